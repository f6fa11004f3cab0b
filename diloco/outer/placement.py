"""Which syncer holds which fragments, where a run has several, and the layout that each of them works on.

Every syncer is a whole one that knows its own fragments only: fragments are synchronised on their own, so that nothing
is lost by their being in different places.  All sites and all syncers compute the same placement from the same sizes
and rates, and compare it when a site joins.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from diloco.outer.fragments import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence


def place(numels: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Deal fragments of ``numels`` values to as many syncers as there are ``rates``; the indices of each, rising.

    The fragments from large to small, each to the syncer whose link would have carried all of its own first (Graham
    1969; Gonzalez, Ibarra and Sahni 1977 for rates that differ).  The last link is then done after at most
    4/3 - 1/(3n) of the best possible time where the n rates are equal, and less than twice that where they are not.
    Equal sizes and equal times go by index; times are compared as fractions, so that no rounding decides.
    """
    if not rates:
        raise ValueError("rates is empty: one for each syncer")
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise ValueError(f"rates has {rate!r}: positive and finite")
    speeds = [Fraction(rate) for rate in rates]
    loads = [0] * len(rates)
    placed: list[list[int]] = [[] for _ in rates]
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        times = [
            ((load + numels[index]) / speed, at) for at, (load, speed) in enumerate(zip(loads, speeds, strict=True))
        ]
        _, at = min(times)
        placed[at].append(index)
        loads[at] += numels[index]
    for at, indices in enumerate(placed):
        if not indices:
            raise ValueError(
                f"syncer {at} of {len(rates)} would hold none of {len(numels)} fragments, with a rate of {rates[at]:g} "
                f"among {', '.join(f'{rate:g}' for rate in rates)}"
            )
    return tuple(tuple(sorted(indices)) for indices in placed)


def part_of(layout: Layout, indices: Sequence[int]) -> Layout:
    """The layout of a syncer that holds the fragments ``indices``: their parameters and no others, counted from 0.

    ``ValueError`` where a parameter lies partly in another syncer's fragments, which no layout of ``plan_layout`` has.
    """
    fragments = tuple(replace(layout.fragments[index], index=at) for at, index in enumerate(indices))
    names = {piece.name for fragment in fragments for piece in fragment.pieces}
    return Layout(tuple(each for each in layout.parameters if each[0] in names), fragments)


def described(placement: Sequence[Sequence[int]]) -> str:
    """The placement in words that two ends can compare: ``0 2 / 1 3``."""
    return " / ".join(" ".join(map(str, indices)) for indices in placement)
