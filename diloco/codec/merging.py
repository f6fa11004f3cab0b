"""The merges that are more than a mean: read twice, by ranges, so that of no site there is ever more than a range.

First the products of the contributions with each other, segment by segment, of which ``blend`` makes weights; then
what is merged, with these.  Where tensors are corrected by the outer momentum, the products are tensor by tensor, and
those with the momentum among them.  Sums are those of ``sums`` over the parts into which tensors, segments and ranges
cut each other, added up in their order: no bit depends on threads, nor on whether there are kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.contract import Add, NonFiniteError, Towards, accumulate_into
from diloco.codec.sums import sum_of_products
from diloco.outer.correction import UNCORRECTED, Correction, corrected, corrected_products
from diloco.outer.merge import PAIRWISE, Segment, blend, shares, trimmed_mean
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from diloco.codec.contract import Codec
    from diloco.outer.correction import Change
    from diloco.outer.rule import OuterRule

    Range = tuple[int, int]
    Ranges = Sequence[Range]
    Spread = Callable[[Callable[[Ranges], list[float]], Iterable[Ranges]], Iterable[list[float]]]
    Sites = Sequence[tuple[float, Sequence[tuple[Codec, memoryview]]]]
    Blends = Mapping[Segment, tuple[list[float], float]]


def decoded(updates: Sequence[tuple[Codec, memoryview]], numel: int, bounds: Range) -> Tensor:
    """A range of one site's contribution: its updates added up in their order."""
    contribution = torch.empty(bounds[1] - bounds[0])
    for index, (codec, payload) in enumerate(updates):
        codec.decode_into(payload, numel, contribution, bounds[0], Add() if index else None)
    return contribution


@dataclass(frozen=True, slots=True)
class Merging:
    """How contributions are merged: ``segments`` partition the fragment in order, each contribution is corrected, and
    with ``factors``, one for each contribution, then made that times as much.  All have a weight then.
    """

    segments: Sequence[Segment]
    factors: Sequence[float] | None = None
    correction: Correction = UNCORRECTED

    @staticmethod
    def of(rule: OuterRule, fragment: int, staleness: Sequence[int]) -> Merging | None:
        """That of a run, of contributions that are so many versions old; None for the weighted mean."""
        segments = rule.segments_of(fragment)
        return Merging(segments, rule.factors(staleness), rule.correction) if segments else None


def merge_into(
    out: Tensor, sites: Sites, merging: Merging, cut: Ranges, spread: Spread, momentum: Tensor | None = None
) -> None:
    """Write into ``out``, flat fp32 of the fragment, what ``sites`` (weight, updates) are merged to.

    ``cut`` is where the codecs may be cut; ``momentum``, as ``out``, what contributions are corrected by, None before
    the first outer step.  ``NonFiniteError`` where the result is not finite.
    """
    segments, one_by_one = merging.segments, [(bounds,) for bounds in cut]
    assert [0, *(each.stop for each in segments)] == [*(each.start for each in segments), out.numel()], "no partition"
    work = _Merge(out, sites, merging, None if merging.correction.is_none else momentum)
    blocks = work.blocks()
    totals = {block: [0.0] * len(work.pairs(block)) for block in blocks}
    for bounds, found in zip(cut, spread(functools.partial(work.products, blocks), one_by_one), strict=True):
        each = iter(found)
        for block, _ in _parts(blocks, bounds):
            totals[block] = [total + next(each) for total in totals[block]]
    changes, blends = work.decided(totals)
    for _ in spread(functools.partial(work.write, changes, blends), one_by_one):
        pass


@dataclass(frozen=True, slots=True)
class _Block:
    """The values ``[start, stop)`` that are of one segment and, where there are cuts, of one tensor."""

    start: int
    stop: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class _Merge:
    """One merge; the momentum, where there is one, stands behind the sites in their products."""

    out: Tensor
    sites: Sites
    merging: Merging
    momentum: Tensor | None

    def blocks(self) -> list[_Block]:
        """All of the fragment."""
        return [
            _Block(start, stop, segment)
            for segment in self.merging.segments
            for start, stop in pairwise((segment.start, *segment.cuts, segment.stop))
        ]

    def pairs(self, block: _Block) -> list[tuple[int, int]]:
        """The products that are read of a block."""
        kind, count = block.segment.options.kind, len(self.sites)
        pairs = [(row, column) for row in range(count) for column in range(row, count)]
        if kind not in PAIRWISE:
            pairs = [(row, column) for row, column in pairs if row == column]
        if self.momentum is not None:
            return [*pairs, *((row, count) for row in range(count + 1))]
        return [] if kind == "trimmed_mean" else pairs

    def products(self, blocks: Sequence[_Block], some: Ranges) -> list[float]:
        """Those of the blocks in a range, one after the other."""
        (bounds,) = some
        values = self._read(bounds)
        if self.momentum is not None:
            values.append(self.momentum[slice(*bounds)])
        found = [
            sum_of_products(values[row][part], values[column][part])
            for block, part in _parts(blocks, bounds)
            for row, column in self.pairs(block)
        ]
        if not all(map(isfinite, found)):
            raise NonFiniteError("updates of one site add up to what is not finite")
        return found

    def decided(self, totals: Mapping[_Block, Sequence[float]]) -> tuple[dict[_Block, list[Change]], Blends]:
        """How the contributions change in each block, and how they are then blended in each segment."""
        sites = range(len(self.sites))
        changes: dict[_Block, list[Change]] = {}
        products: dict[Segment, list[list[float]]] = {}
        for block, found in totals.items():
            square = [[0.0] * (len(sites) + 1) for _ in range(len(sites) + 1)]
            for (row, column), product in zip(self.pairs(block), found, strict=True):
                square[row][column] = square[column][row] = product
            correction = self.merging.correction
            changes[block] = [correction.change(square[site][site], square[site][-1], square[-1][-1]) for site in sites]
            together = products.setdefault(block.segment, [[0.0] * len(sites) for _ in sites])
            for so_far, more in zip(together, corrected_products(square, changes[block]), strict=True):
                so_far[:] = [total + each for total, each in zip(so_far, more, strict=True)]
        weights = [weight for weight, _ in self.sites]
        return changes, {
            segment: blend(segment.options, weights, found, self.merging.factors)
            for segment, found in products.items()
            if segment.options.kind != "trimmed_mean"
        }

    def write(self, changes: Mapping[_Block, Sequence[Change]], blends: Blends, some: Ranges) -> list[float]:
        """A range of what comes out."""
        (bounds,) = some
        values, out = self._read(bounds), self.out[slice(*bounds)]
        weights, factors = [weight for weight, _ in self.sites], self.merging.factors
        for block, part in _parts(changes, bounds):
            here, mine = out[part], [each[part] for each in values]
            if self.momentum is not None:
                ahead = self.momentum[slice(*bounds)][part]
                for each, change in zip(mine, changes[block], strict=True):
                    each.copy_(corrected(each, ahead, change))
            options = block.segment.options
            if options.kind == "trimmed_mean":
                for each, factor in zip(mine, factors or (), strict=factors is not None):
                    each.mul_(factor)
                trimmed_mean(list(zip(weights, mine, strict=True)), options.trim_share, here)
                continue
            changed, scale = blends[block.segment]
            first = True
            for share, (each,) in shares([(weight, (each,)) for weight, each in zip(changed, mine, strict=True)]):
                accumulate_into(here, each, None if first else Towards(share))
                first = False
            here.mul_(scale)
        if not is_finite(out):
            raise NonFiniteError("what is merged is not finite")
        return []

    def _read(self, bounds: Range) -> list[Tensor]:
        return [decoded(updates, self.out.numel(), bounds) for _, updates in self.sites]


def _parts(blocks: Iterable[_Block], bounds: Range) -> list[tuple[_Block, slice]]:
    """The blocks that have values in a range, and where in the range."""
    return [
        (each, slice(max(each.start, bounds[0]) - bounds[0], min(each.stop, bounds[1]) - bounds[0]))
        for each in blocks
        if each.start < bounds[1] and each.stop > bounds[0]
    ]
