"""Checkpoints on disk: safetensors and a manifest, whole or not there, verified on read, without pickle.

Names of checkpoints sort by age.  A manifest is a JSON file with its own sha256, by which it says whether it is whole.

Reading.  ``Checkpoint`` is one that is opened: it knows which tensors there are, and reads any box of any of them when
it is asked for.  There are two formats, and either is read into any layout.

Format 1 is written by one rank (``save``).  ``<root>/<name>/manifest.json`` holds the caller's ``meta`` and the size
and sha256 of each tensor file; tensors named ``part/rest`` lie whole in ``part.safetensors`` under ``rest``.

Format 2 is written by all ranks of a site that holds its model in parts (``PartWriter``): ``rank-00003.safetensors``
holds what rank 3 kept, and ``rank-00003.json`` says which box of which tensor each of them is.

Writing in parts.  Every rank writes what it keeps, beside training.  In the temporary folder of a checkpoint it writes
its two files; the JSON also has the digest of the other.  When all ranks have said that theirs is durable, in the
collective that every step has anyway, the first one writes ``manifest.json`` with the digests of the ranks' manifests
and gives the folder its name.  No rank waits for another's disk, nothing is gathered, and until the rename there is no
checkpoint.  The folder must be one that all ranks see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.durable import PLAIN_DISK, Step
from diloco.inner.checks import require
from diloco.inner.parallel import Box, box_of, is_keeper, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.inner.parallel import SiteGroup


__all__ = ["AsyncWriter", "Checkpoint", "CheckpointError", "latest", "load", "names", "publish", "save"]

TEMPORARY = ".tmp-"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file."""


def write_sealed(path: Path, told: Mapping[str, Any], disk: Disk, step: Step) -> None:
    """Make the file ``path``, durable itself; its name is after its folder was synced."""
    text = json.dumps({**told, "sha256": _digest(told)}, indent=1, allow_nan=False)
    disk.make(path, lambda file: file.write_text(text), step)
    disk.sync_file(path, step)


def read_sealed(path: Path) -> dict[str, Any]:
    """What ``write_sealed`` was told; CheckpointError names the file that is missing or damaged."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        undamaged = told.pop("sha256") == _digest(told)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not undamaged:
        raise CheckpointError(f"{path} is damaged: its own sha256 does not match")
    return told


def digest_of_file(file: Path) -> str:
    """Sha256 hex of its content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


WHOLE, PARTS = 1, 2
"""The formats."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: the shape of the whole, and which file holds which box of it."""

    shape: tuple[int, ...]
    stretches: tuple[tuple[str, Box], ...]

    def meets(self, wanted: Box) -> list[tuple[str, Box, Box | None]]:
        """The files that are read for the box ``wanted``: with the box that lies in each, and where the two meet.

        Of an empty tensor nothing lies anywhere, but its kind of numbers does: then it is the first, with None.
        """
        met = [(file, held, meet) for file, held in self.stretches for meet in [held.within(wanted)] if meet]
        return list(met) or [(*self.stretches[0], None)]


class Checkpoint:
    """One checkpoint.  Opening it reads its manifests only; what is read before ``verify`` may be damaged."""

    def __init__(self, path: Path, skipped: tuple[str, ...] = ()) -> None:
        self.path = path
        self.skipped = skipped
        """In words: newer checkpoints that were passed over, and why."""
        manifest = path / "manifest.json"
        told = read_sealed(manifest)
        try:
            self._format, self.meta = told["format"], told["meta"]
            if self._format not in (WHOLE, PARTS):
                raise CheckpointError(f"{manifest} has format {self._format!r}, and this program reads 1 and 2")
            self._digests, self._boxes = _whole(told) if self._format == WHOLE else _parts(path, told)
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{manifest} cannot be read: {error}") from error

    meta: dict[str, Any]
    """Plain JSON."""

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Read every file and compare its digest; CheckpointError names the first that is damaged.

        Of ``world`` ranks that share the work each takes every ``world``-th file.
        """
        for file in sorted(self._digests)[rank::world]:
            path = self.path / file
            try:
                if digest_of_file(path) != self._digests[file]:
                    raise CheckpointError(f"{path} is damaged: its sha256 differs from the manifest")
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    @property
    def num_parts(self) -> int:
        """How many files of tensors it has: in format 2 as many as there were ranks."""
        return len(self._digests)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by name."""
        found: dict[str, list[tuple[str, Box]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(self._digests):
            for name, shape, box in self._boxes[file] if self._format == PARTS else self._listed(file):
                if shapes.setdefault(name, shape) != shape:
                    raise CheckpointError(f"{self.path} holds {name} in two shapes, {shapes[name]} and {shape}")
                found.setdefault(name, []).append((file, box))
        for name, boxes in found.items():
            if sum(math.prod(box.sizes) for _, box in boxes) != math.prod(shapes[name]):
                raise CheckpointError(f"{self.path} does not hold every value of {name} once")
        return {name: Entry(shapes[name], tuple(boxes)) for name, boxes in found.items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors, each read when it is asked for."""
        return _Tensors(self, "")

    def part(self, name: str) -> Mapping[str, Tensor]:
        """Tensors under ``name/``, without that prefix."""
        return _Tensors(self, f"{name}/")

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The values in ``box`` of the tensor ``name``, or all of them, as a new tensor on the CPU."""
        entry = self.entries[name]
        wanted = box or Box((0,) * len(entry.shape), entry.shape)
        values: Tensor | None = None
        for file, held, meet in entry.meets(wanted):
            inside = meet.seen_from(held).slices if meet else tuple(slice(0, 0) for _ in held.sizes)
            found = self._sliced(file, name, inside)
            if values is None:
                values = torch.empty(wanted.sizes, dtype=found.dtype)
            if meet is not None:
                values[meet.seen_from(wanted).slices] = found
        assert values is not None, "an entry lies somewhere"
        return values

    def _sliced(self, file: str, name: str, inside: tuple[slice, ...]) -> Tensor:
        path = self.path / file
        key = name if self._format == PARTS else name.removeprefix(f"{path.stem}/")
        try:
            with safe_open(path, "pt") as tensors:
                found: Tensor = tensors.get_slice(key)[inside]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return found

    def _listed(self, file: str) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        path = self.path / file
        try:
            with safe_open(path, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (it is no dictionary)
                    shape = tuple(tensors.get_slice(key).get_shape())
                    yield f"{path.stem}/{key}", shape, Box((0,) * len(shape), shape)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Tensors(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint under a prefix."""

    def __init__(self, of: Checkpoint, prefix: str) -> None:
        self._of, self._prefix = of, prefix

    def __getitem__(self, name: str) -> Tensor:
        if self._prefix + name not in self._of.entries:
            raise KeyError(name)
        return self._of.read(self._prefix + name)

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in self._of.entries if name.startswith(self._prefix))

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._of.entries

    def __len__(self) -> int:
        return sum(1 for _ in self)


_Boxes = dict[str, list[tuple[str, tuple[int, ...], Box]]]


def _whole(told: dict[str, Any]) -> tuple[dict[str, str], _Boxes]:
    return {f"{part}.safetensors": str(facts["sha256"]) for part, facts in told["files"].items()}, {}


def _parts(path: Path, told: dict[str, Any]) -> tuple[dict[str, str], _Boxes]:
    """Digests and boxes by file, as the ranks' own manifests tell them."""
    digests: dict[str, str] = {}
    boxes: _Boxes = {}
    for rank, digest in told["ranks"].items():
        listed = path / f"{rank}.json"
        try:
            if digest_of_file(listed) != digest:
                raise CheckpointError(f"{listed} is damaged: its sha256 differs from the manifest")
        except OSError as error:
            raise CheckpointError(f"{listed} cannot be read: {error}") from error
        own, file = read_sealed(listed), f"{rank}.safetensors"
        digests[file] = str(own["sha256_of_file"])
        boxes[file] = [
            (name, tuple(facts["shape"]), Box(tuple(facts["starts"]), tuple(facts["sizes"])))
            for name, facts in own["tensors"].items()
        ]
    return digests, boxes


def save(
    root: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int = 3,
    disk: Disk = PLAIN_DISK,
) -> Path:
    """Write ``root/name`` and delete all but the newest ``keep`` (0: none); returns its path.

    After it returns the checkpoint survives a power cut; whenever it dies before, the older ones are untouched.
    ``tensors`` are named ``part/rest``, on any device, and do not share memory.  CheckpointError in words.
    """
    require(keep >= 0, "keep", keep, "0 (all) or more")
    path, temporary = root / name, root / f"{TEMPORARY}{name}"
    try:
        disk.settle(root, Step.CHECKPOINT_FOLDER)
        disk.remove(temporary, Step.CHECKPOINT_PRUNE)
        disk.make_folder(temporary, Step.CHECKPOINT_BEGIN)
        files = {part: _write_part(temporary, part, named, disk) for part, named in _by_part(tensors).items()}
        told = {"format": WHOLE, "files": files, "meta": dict(meta)}
        write_sealed(temporary / "manifest.json", told, disk, Step.CHECKPOINT_FILE)
        publish(root, name, keep, disk)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # A full disk does not get fuller with every attempt.
            disk.remove(temporary, Step.CHECKPOINT_PRUNE)
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error
    return path


def publish(root: Path, name: str, keep: int, disk: Disk) -> None:
    """Give the checkpoint in the temporary folder, whose files are durable, its name; delete all but ``keep``."""
    path, temporary, replaced = root / name, root / f"{TEMPORARY}{name}", root / f"{TEMPORARY}old-{name}"
    disk.remove(replaced, Step.CHECKPOINT_PRUNE)
    disk.sync_folder(temporary, Step.CHECKPOINT_FOLDER)
    if path.exists():
        disk.rename(path, replaced, Step.CHECKPOINT_RENAME)
    disk.rename(temporary, path, Step.CHECKPOINT_RENAME)
    disk.sync_folder(root, Step.CHECKPOINT_FOLDER)
    disk.remove(replaced, Step.CHECKPOINT_PRUNE)
    for old in names(root)[:-keep] if keep else []:
        if old != name:
            disk.remove(root / old, Step.CHECKPOINT_PRUNE)


def names(root: Path) -> list[str]:
    """Names of the checkpoints below ``root``, oldest first; temporary folders of a writer that died are not listed."""
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open one checkpoint, and verify it unless no value is wanted; CheckpointError names the file that is missing or
    damaged."""
    found = Checkpoint(path)
    if verify:
        found.verify()
    return found


def latest(root: Path, *, verify: bool = True) -> Checkpoint | None:
    """The newest valid checkpoint, as ``load`` opens it, or None.  Its ``skipped`` says which newer ones were damaged.

    CheckpointError when there are some and all are damaged: starting from nothing would be a silent loss.
    """
    skipped: list[str] = []
    for name in reversed(names(root)):
        try:
            found = load(root / name, verify=verify)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        found.skipped = tuple(skipped)
        return found
    if skipped:
        raise CheckpointError(f"no checkpoint in {root} is whole: {'; '.join(skipped)}")
    return None


def _by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        part, slash, rest = key.partition("/")
        require(bool(slash and rest and part.isidentifier()), "tensor name", key, "part/rest")
        parts.setdefault(part, {})[rest] = tensor.detach().contiguous()
    return parts


def _write_part(directory: Path, part: str, tensors: dict[str, Tensor], disk: Disk) -> dict[str, Any]:
    file = directory / f"{part}.safetensors"
    disk.make(file, lambda path: safetensors.torch.save_file(tensors, path), Step.CHECKPOINT_FILE)
    disk.sync_file(file, Step.CHECKPOINT_FILE)
    return {"bytes": file.stat().st_size, "sha256": digest_of_file(file)}


class AsyncWriter:
    """Writes checkpoints beside training, one at a time.

    The caller gives tensors that nobody changes any more (clones).  An error of the background write is raised by
    the next call here.  ``synchronous`` writes in the caller's thread, for deterministic runs.
    """

    def __init__(self, root: Path, keep: int = 3, synchronous: bool = False, disk: Disk = PLAIN_DISK) -> None:
        self.root, self._keep, self._synchronous, self._disk = root, keep, synchronous, disk
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is under way; raises the error of the last one if it failed."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._thread is not None

    def submit(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Start writing ``root/name``; must not be called while ``busy``."""
        self.start(lambda: save(self.root, name, tensors, meta, self._keep, self._disk))

    def start(self, write: Callable[[], object]) -> None:
        """Start ``write``; must not be called while ``busy``."""
        assert not self.busy, "one checkpoint at a time: ask busy first"
        if self._synchronous:
            write()
            return
        # A daemon, so that a disk that hangs cannot keep a dying process alive; wait() is the orderly end.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def wait(self, bound_s: float) -> None:
        """Return when nothing is under way; CheckpointError after ``bound_s`` or if the write failed."""
        if self._thread is not None:
            self._thread.join(bound_s)
        if self.busy:
            raise CheckpointError(f"a checkpoint in {self.root} is still being written after {bound_s:g} s")

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # kept and raised in the caller's thread, whatever it is
            self._error = error


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
