"""Which part of a tensor this rank holds: a box of it, from ``starts`` on and of ``sizes``.

A DTensor of the layouts that ``sharding`` makes is cut along one or more of its dimensions, and along one of them by
several sides of the grid; either way what a rank holds is one box.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_cut(value: Tensor) -> TypeGuard[DTensor]:
    """Whether ``value`` is one of which ranks hold parts.

    Its class is not imported: that is 2 s of a processor at every start, and most sites have none.
    """
    return hasattr(value, "placements")


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing: there were more ranks than rows."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index by which it is taken out of the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def within(self, other: Box) -> Box | None:
        """What of this box lies in ``other``; None where they do not meet.  Counted as ``starts`` are."""
        starts = tuple(max(here, there) for here, there in zip(self.starts, other.starts, strict=True))
        stops = (
            min(here + size, there + long)
            for here, size, there, long in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, other: Box) -> Box:
        """The same box, counted from where ``other`` starts."""
        return Box(tuple(here - there for here, there in zip(self.starts, other.starts, strict=True)), self.sizes)


def box_of(value: Tensor) -> Box:
    """What this rank holds of ``value``; of a plain tensor, all."""
    starts, sizes = [0] * value.ndim, list(value.shape)
    if not is_cut(value):
        return Box(tuple(starts), tuple(sizes))
    place = value.device_mesh.get_coordinate()
    assert place is not None, "every rank of a site is in its grid"
    for side in sides_cut(value):
        dim = value.placements[side].dim  # type: ignore[attr-defined]
        count = value.device_mesh.size(side)
        # As torch.chunk cuts: parts of the same size, rounded up, so that the last ones may be shorter or empty.
        part = -(-sizes[dim] // count)
        begin = min(place[side] * part, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + begin, min(part, sizes[dim] - begin)
    box = Box(tuple(starts), tuple(sizes))
    assert tuple(value.to_local().shape) == box.sizes, f"torch cut {value.placements} otherwise"
    return box


def is_keeper(value: Tensor, place: Mapping[str, int]) -> bool:
    """Whether the rank at ``place`` of the grid is the one, of those that hold the same part, that speaks for it.

    A tensor may be of a part of the grid only: along the other sides it is the same.
    """
    cut: set[str] = set()
    if is_cut(value):
        names = value.device_mesh.mesh_dim_names
        assert names is not None, "the sides of a site's grid have names"
        cut = {names[side] for side in sides_cut(value)}
    return all(at == 0 for side, at in place.items() if side not in cut)


def local(value: Tensor) -> Tensor:
    """What this rank holds of ``value``, as a plain tensor on the same memory."""
    detached = value.detach()
    return detached.to_local() if is_cut(detached) else detached


@torch.no_grad()
def put(value: Tensor, whole: Tensor) -> None:
    """Write into ``value``, in place, this rank's part of the plain tensor ``whole``."""
    local(value).copy_(whole[box_of(value).slices])


def alike(value: Tensor, part: Tensor) -> Tensor:
    """``part``, of the size that this rank holds of ``value``, as a tensor that is sharded as ``value`` is."""
    if not is_cut(value):
        return part
    made: Tensor = type(value).from_local(
        part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return made


def sides_cut(value: DTensor) -> list[int]:
    """The sides of the grid along which ``value`` is cut, in the order of the cuts.

    Under tp+fsdp rows are cut for the products first and then for fully_shard, which torch marks as strided.
    """
    cut = [side for side, placement in enumerate(value.placements) if not placement.is_replicate()]
    return sorted(cut, key=lambda side: "Strided" in type(value.placements[side]).__name__)
