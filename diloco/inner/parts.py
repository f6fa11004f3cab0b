"""Checkpoints of a site that holds its model in parts: every rank writes what it keeps, beside training.

In the temporary folder of a checkpoint each rank writes ``rank-00003.safetensors`` and, beside it, ``rank-00003.json``:
which box of which tensor each of them is, and the file's digest.  When all ranks have said that theirs is durable, in
the collective that every step has anyway, the first one writes ``manifest.json`` with the digests of the ranks'
manifests and gives the folder its name.  No rank waits for another's disk, nothing is gathered, and until the rename
there is no checkpoint.  The folder must be one that all ranks see.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from diloco.durable import PLAIN_DISK, Step
from diloco.inner.checkpoint import TEMPORARY, AsyncWriter, publish
from diloco.inner.opened import PARTS
from diloco.inner.pieces import box_of, is_keeper, local
from diloco.inner.sealed import CheckpointError, digest_of_file, write_sealed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.inner.parallel import SiteGroup


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of ``shape``, that starts at ``starts``.  ``values`` are on the CPU and nobody changes them."""

    values: Tensor
    starts: tuple[int, ...]
    shape: tuple[int, ...]


def kept(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], place: Mapping[str, int]) -> dict[str, Part]:
    """What the rank at ``place`` of the grid writes of the site's ``tensors``, and its ``own``, whole; all copies."""
    found: dict[str, Part] = {}
    for name, tensor in tensors.items():
        box = box_of(tensor)
        if is_keeper(tensor, place) and not box.is_empty:
            found[name] = Part(_copy(local(tensor)), box.starts, tuple(tensor.shape))
    for name, tensor in own.items():
        found[name] = Part(_copy(tensor), (0,) * tensor.ndim, tuple(tensor.shape))
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write_part(root: Path, name: str, rank: int, parts: Mapping[str, Part], disk: Disk = PLAIN_DISK) -> None:
    """Write what ``rank`` keeps into the temporary folder of ``root/name``; durable when it returns."""
    folder = root / f"{TEMPORARY}{name}"
    file = folder / f"{rank_name(rank)}.safetensors"
    values = {key: part.values for key, part in parts.items()}
    try:
        disk.make_folder(folder, Step.CHECKPOINT_BEGIN)
        disk.make(file, lambda path: safetensors.torch.save_file(values, path), Step.CHECKPOINT_FILE)
        disk.sync_file(file, Step.CHECKPOINT_FILE)
        boxes = {
            key: {"starts": part.starts, "sizes": tuple(part.values.shape), "shape": part.shape}
            for key, part in parts.items()
        }
        told = {"format": PARTS, "sha256_of_file": digest_of_file(file), "tensors": boxes}
        write_sealed(file.with_suffix(".json"), told, disk, Step.CHECKPOINT_FILE)
        disk.sync_folder(folder, Step.CHECKPOINT_FOLDER)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {root / name} could not be written: {error}") from error


def commit(root: Path, name: str, world: int, meta: Mapping[str, Any], keep: int, disk: Disk = PLAIN_DISK) -> None:
    """Make ``root/name`` of what ``world`` ranks have written; delete all but the newest ``keep``."""
    folder = root / f"{TEMPORARY}{name}"
    ranks = [rank_name(rank) for rank in range(world)]
    files = {f"{rank}{end}" for rank in ranks for end in (".json", ".safetensors")}
    try:
        for left in sorted(folder.iterdir()):
            if left.name not in files:  # of an attempt that died, with more ranks
                disk.remove(left, Step.CHECKPOINT_PRUNE)
        digests = {rank: digest_of_file(folder / f"{rank}.json") for rank in ranks}
        told = {"format": PARTS, "ranks": digests, "meta": dict(meta)}
        write_sealed(folder / "manifest.json", told, disk, Step.CHECKPOINT_FILE)
        publish(root, name, keep, disk)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {root / name} could not be written: {error}") from error


def rank_name(rank: int) -> str:
    """Of the files of ``rank``, without their ends."""
    return f"rank-{rank:05d}"


class PartWriter:
    """One rank's side of it.  All methods are called by all ranks alike; those that talk to each other say so."""

    def __init__(self, root: Path, keep: int, synchronous: bool, wait_s: float, group: SiteGroup, disk: Disk) -> None:
        self._root, self._keep, self._wait_s, self._group, self._disk = root, keep, wait_s, group, disk
        self.writer = AsyncWriter(root, keep, synchronous, disk)
        self._name = ""
        """Of the checkpoint whose parts are being written."""
        self._meta: Mapping[str, Any] = {}
        self._why = ""
        """Why this rank's part could not be."""

    def begin(self) -> None:
        """Remove what writers left that died.  A collective; CheckpointError where the folder cannot be one."""
        why = ""
        if self._group.is_first:
            try:
                self._disk.settle(self._root, Step.CHECKPOINT_FOLDER)
                for left in sorted(self._root.glob(f"{TEMPORARY}*")):
                    self._disk.remove(left, Step.CHECKPOINT_PRUNE)
            except OSError as error:
                why = f"no checkpoint can be written in {self._root}: {error}"
        if any(self._group.all_reduce_sum([float(bool(why))])):
            raise CheckpointError(why or f"rank 0 can write no checkpoint in {self._root}")

    def words(self) -> list[float]:
        """Whether this rank's part is done, and whether it failed: for ``heard``, summed over the ranks."""
        if not self._name:
            return [0.0, 0.0]
        if not self._why:
            try:
                if self.writer.busy:
                    return [0.0, 0.0]
            except CheckpointError as error:
                self._why = str(error)
        return [float(not self._why), float(bool(self._why))]

    @property
    def is_free(self) -> bool:
        """Whether a checkpoint can begin; raises the error of the last one if the first rank could not finish it."""
        return not self._name and not self.writer.busy

    def submit(self, name: str, parts: Mapping[str, Part], meta: Mapping[str, Any]) -> None:
        """Begin ``name`` with this rank's ``parts``; the first rank's ``meta`` counts."""
        self._name, self._meta, self._why = name, meta, ""
        try:
            self.writer.start(lambda: self._write(name, parts))
        except CheckpointError as error:  # It was written at once.
            self._why = str(error)

    def heard(self, words: Sequence[float]) -> str:
        """The sums of all ranks' ``words``: finish what all have ended.  Why that is no checkpoint, if it is none."""
        done, failed, *_ = words
        if not self._name or done + failed < self._group.world:
            return ""
        name, self._name = self._name, ""
        if failed:
            if self._tidies:
                with contextlib.suppress(OSError):
                    self._disk.remove(self._root / f"{TEMPORARY}{name}", Step.CHECKPOINT_PRUNE)
            return self._why or f"another rank could not write its part of {self._root / name}"
        self._finish(name, self._meta)
        return ""

    @property
    def _tidies(self) -> bool:
        """Whether this rank is the one that removes and finishes in its folder."""
        return self._group.is_first

    def _write(self, name: str, parts: Mapping[str, Part]) -> None:
        """Make this rank's part durable, beside training."""
        write_part(self._root, name, self._group.rank, parts, self._disk)

    def _finish(self, name: str, meta: Mapping[str, Any]) -> None:
        """All ranks have said that their parts are whole.  Called by all."""
        if self._tidies:
            self.writer.start(lambda: commit(self._root, name, self._group.world, meta, self._keep, self._disk))

    def settle(self) -> None:
        """Wait until nothing is under way on any rank.  A collective; CheckpointError when it came to nothing."""
        why = ""
        for _ in range(2):  # the parts; then what the first rank makes of them
            try:
                self.writer.wait(self._wait_s)
            except CheckpointError as error:
                if self._name:
                    self._why = str(error)
                else:
                    why = str(error)
            try:
                why = self.heard(self._group.all_reduce_sum(self.words())) or why
            except CheckpointError as error:  # The first rank finished it at once, or could not.
                why = str(error)
        [failed] = self._group.all_reduce_sum([float(bool(why))])
        if failed:
            raise CheckpointError(why or f"the first rank could not finish a checkpoint in {self._root}")
