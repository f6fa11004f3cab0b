"""Sets of whole numbers as sorted spans that neither overlap nor touch; every function gives such a list.

Long runs of numbers that were given out and came back in order are one span, however many they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""From the first number to before the second."""


def added(spans: Iterable[Span], more: Iterable[Span]) -> list[Span]:
    """What is in either."""
    found: list[Span] = []
    for start, stop in sorted([*spans, *more]):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def without(spans: Iterable[Span], less: Iterable[Span]) -> list[Span]:
    """What is in ``spans`` and not in ``less``."""
    found: list[Span] = []
    gaps, here = added(less, ()), 0
    for start, stop in added(spans, ()):
        at = start
        while here < len(gaps) and gaps[here][0] < stop:
            begin, end = gaps[here]
            if begin > at:
                found.append((at, begin))
            at = max(at, end)
            if end > stop:
                break  # It reaches into what comes next.
            here += 1
        if at < stop:
            found.append((at, stop))
    return found


def common(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What is in both."""
    found: list[Span] = []
    theirs, here = added(others, ()), 0
    for start, stop in added(spans, ()):
        while here < len(theirs) and theirs[here][0] < stop:
            begin, end = theirs[here]
            if start < end:
                found.append((max(start, begin), min(stop, end)))
            if end > stop:
                break  # It reaches into what comes next.
            here += 1
    return found


def size(spans: Iterable[Span]) -> int:
    """How many numbers there are."""
    return sum(stop - start for start, stop in spans)


def in_units(spans: Iterable[Span], unit: int) -> list[Span]:
    """The numbers of the units, of ``unit`` numbers each, that ``spans`` touches."""
    return added([(start // unit, -(-stop // unit)) for start, stop in spans], ())


def whole_units(spans: Iterable[Span], unit: int) -> list[Span]:
    """The numbers of the units, of ``unit`` numbers each, that are in ``spans`` as a whole."""
    return added([(-(-start // unit), stop // unit) for start, stop in spans], ())


def first_of(spans: Sequence[Span], count: int) -> list[Span]:
    """The ``count`` smallest numbers, or all where there are fewer."""
    found: list[Span] = []
    for start, stop in spans:
        if count <= 0:
            break
        stop = min(stop, start + count)
        found.append((start, stop))
        count -= stop - start
    return found
