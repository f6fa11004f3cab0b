"""Sets of numbers as spans."""

from __future__ import annotations

import random

from diloco.sync.data_units import Span, added, common, first_of, in_units, size, whole_units, without


def numbers(spans: list[Span]) -> set[int]:
    return {number for start, stop in spans for number in range(start, stop)}


def some(draw: random.Random) -> list[Span]:
    starts = [draw.randrange(30) for _ in range(draw.randrange(6))]
    return [(start, start + draw.randrange(6)) for start in starts]


def test_spans_are_sets_of_numbers_however_they_are_given() -> None:
    draw = random.Random(1)
    for _ in range(500):
        ours, theirs = some(draw), some(draw)
        for found, wanted in (
            (added(ours, theirs), numbers(ours) | numbers(theirs)),
            (without(ours, theirs), numbers(ours) - numbers(theirs)),
            (common(ours, theirs), numbers(ours) & numbers(theirs)),
        ):
            assert numbers(found) == wanted
            assert size(found) == len(wanted)
            assert found == added(found, ()), "sorted, and no two touch"


def test_the_first_numbers_of_spans() -> None:
    assert first_of([(2, 4), (7, 9)], 3) == [(2, 4), (7, 8)]
    assert first_of([(2, 4), (7, 9)], 9) == [(2, 4), (7, 9)]
    assert first_of([(2, 4)], 0) == first_of([(2, 4)], -1) == []


def test_units_that_are_touched_and_units_that_are_whole() -> None:
    assert in_units([(3, 9), (12, 13)], 4) == [(0, 4)]
    assert whole_units([(3, 9), (12, 13)], 4) == [(1, 2)]
    assert whole_units([(4, 12)], 4) == in_units([(4, 12)], 4) == [(1, 3)]


class Counted(int):
    """A number that counts how often one is compared."""

    times = 0

    def __le__(self, other: int) -> bool:
        Counted.times += 1
        return int(self) <= int(other)

    def __lt__(self, other: int) -> bool:
        Counted.times += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Counted.times += 1
        return int(self) > int(other)

    def __ge__(self, other: int) -> bool:
        Counted.times += 1
        return int(self) >= int(other)


def test_long_lists_are_gone_through_once() -> None:
    count = 1000
    spans = [(Counted(10 * at), Counted(10 * at + 6)) for at in range(count)]
    less = [(Counted(10 * at + 2), Counted(10 * at + 3)) for at in range(count)]
    Counted.times = 0
    assert size(without(spans, less)) == 5 * count
    assert Counted.times < 40 * count
