"""The merges that are more than a mean: read twice, by ranges, so that of no site there is ever more than a range.

First the products of the contributions with each other, segment by segment, of which ``blend`` makes weights; then
what is merged, with these.  Sums are those of ``sums`` over the parts into which segments and ranges cut each other,
added up in their order: no bit depends on threads, nor on whether there are kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import Add, NonFiniteError, Towards, accumulate_into
from diloco.codec.sums import sum_of_products
from diloco.outer.merge import PAIRWISE, Segment, blend, shares, trimmed_mean
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from diloco.codec.contract import Codec

    Range = tuple[int, int]
    Ranges = Sequence[Range]
    Spread = Callable[[Callable[[Ranges], list[float]], Iterable[Ranges]], Iterable[list[float]]]
    Sites = Sequence[tuple[float, Sequence[tuple[Codec, memoryview]]]]


def decoded(updates: Sequence[tuple[Codec, memoryview]], numel: int, bounds: Range) -> Tensor:
    """A range of one site's contribution: its updates added up in their order."""
    contribution = torch.empty(bounds[1] - bounds[0])
    for index, (codec, payload) in enumerate(updates):
        codec.decode_into(payload, numel, contribution, bounds[0], Add() if index else None)
    return contribution


@dataclass(frozen=True, slots=True)
class Merging:
    """How contributions are merged: ``segments`` partition the fragment in order, and with ``factors``, one for each
    contribution, each is that times as much.  All have a weight then.
    """

    segments: Sequence[Segment]
    factors: Sequence[float] | None = None


def merge_into(out: Tensor, sites: Sites, merging: Merging, cut: Ranges, spread: Spread) -> None:
    """Write into ``out``, flat fp32 of the fragment, what ``sites`` (weight, updates) are merged to.

    ``cut`` is where the codecs may be cut.  ``NonFiniteError`` where that is not finite.
    """
    segments, factors = merging.segments, merging.factors
    numel = out.numel()
    assert [0, *(each.stop for each in segments)] == [*(each.start for each in segments), numel], "no partition"
    weights, one_by_one = [weight for weight, _ in sites], [(bounds,) for bounds in cut]
    count = len(sites)

    def products(some: Ranges) -> list[float]:
        (bounds,) = some
        values = [decoded(updates, numel, bounds) for _, updates in sites]
        found = []
        for segment, part in _parts(segments, bounds):
            if segment.options.kind == "trimmed_mean":
                continue
            for row in range(count):
                for column in range(row, count):
                    needed = row == column or segment.options.kind in PAIRWISE
                    found.append(sum_of_products(values[row][part], values[column][part]) if needed else 0.0)
        if not all(map(isfinite, found)):
            raise NonFiniteError("updates of one site add up to what is not finite")
        return found

    totals: dict[Segment, list[float]] = {}
    for bounds, found in zip(cut, spread(products, one_by_one), strict=True):
        each, size = iter(found), count * (count + 1) // 2
        for segment, _ in _parts(segments, bounds):
            if segment.options.kind != "trimmed_mean":
                before = totals.get(segment, [0.0] * size)
                totals[segment] = [total + next(each) for total in before]
    blends = {
        segment: blend(segment.options, weights, _square(found, count), factors) for segment, found in totals.items()
    }

    def write(some: Ranges) -> list[float]:
        (bounds,) = some
        values = [decoded(updates, numel, bounds) for _, updates in sites]
        for segment, part in _parts(segments, bounds):
            here = out[bounds[0] : bounds[1]][part]
            mine = [each[part] for each in values]
            if segment.options.kind == "trimmed_mean":
                for each, factor in zip(mine, factors or (), strict=factors is not None):
                    each.mul_(factor)
                trimmed_mean(list(zip(weights, mine, strict=True)), segment.options.trim_share, here)
                continue
            changed, scale = blends[segment]
            first = True
            for share, (each,) in shares([(weight, (each,)) for weight, each in zip(changed, mine, strict=True)]):
                accumulate_into(here, each, None if first else Towards(share))
                first = False
            here.mul_(scale)
        if not is_finite(out[slice(*bounds)]):
            raise NonFiniteError("what is merged is not finite")
        return []

    for _ in spread(write, one_by_one):
        pass


def _parts(segments: Sequence[Segment], bounds: Range) -> list[tuple[Segment, slice]]:
    """The segments that have values in a range, and where in the range."""
    return [
        (each, slice(max(each.start, bounds[0]) - bounds[0], min(each.stop, bounds[1]) - bounds[0]))
        for each in segments
        if each.start < bounds[1] and each.stop > bounds[0]
    ]


def _square(upper: Sequence[float], count: int) -> list[list[float]]:
    """The symmetric matrix of which ``upper`` has the rows from the diagonal on."""
    each, full = iter(upper), [[0.0] * count for _ in range(count)]
    for row in range(count):
        for column in range(row, count):
            full[row][column] = full[column][row] = next(each)
    return full
