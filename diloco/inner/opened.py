"""A checkpoint on disk, opened: which tensors it holds, and any box of any of them, read when it is asked for.

Format 1 is written by one rank: ``part.safetensors`` holds the tensors ``part/rest`` whole.  Format 2 is written by all
ranks of a site that holds its model in parts: ``rank-00003.safetensors`` holds what rank 3 kept, and
``rank-00003.json`` which box of which tensor each of them is.  Either is read into any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from diloco.inner.pieces import Box
from diloco.inner.sealed import CheckpointError, digest_of_file, read_sealed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

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
