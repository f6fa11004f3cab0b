"""Sets of numbers as spans."""

from __future__ import annotations

import random

from diloco.sync.data_units import (
    PAST_MAX,
    SKIPPED,
    Holder,
    Span,
    Units,
    added,
    columns,
    common,
    first_of,
    in_units,
    joined,
    leased_places,
    pieces_before,
    pieces_from,
    size,
    units_at,
    whole_units,
    without,
)
from diloco.sync.journal import from_plain, to_plain


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


# --- Lists of units --------------------------------------------------------------------------------------------------


def test_pieces_are_cut_and_joined_by_places() -> None:
    pieces = [(10, 3), (SKIPPED, 2), (20, 1)]
    assert pieces_from(pieces, 0) == pieces
    assert pieces_from(pieces, 1) == [(11, 2), (SKIPPED, 2), (20, 1)]
    assert pieces_from(pieces, 4) == [(SKIPPED, 1), (20, 1)]
    assert pieces_from(pieces, 9) == []
    assert pieces_before(pieces, 4) == [(10, 3), (SKIPPED, 1)]
    assert pieces_before(pieces, 0) == []
    assert joined([(1, 2), (3, 1), (SKIPPED, 1), (SKIPPED, 2), (9, 0), (4, 1)]) == [(1, 3), (SKIPPED, 3), (4, 1)]


def test_the_units_at_places_of_a_list() -> None:
    pieces = [(10, 3), (SKIPPED, 2), (4, 1)]
    assert units_at(100, pieces, [(0, 1000)]) == [(4, 5), (10, 13)]
    assert units_at(100, pieces, [(101, 104)]) == [(11, 13)]
    assert leased_places(100, pieces) == [(100, 103), (105, 106)]


def test_a_holder_forgets_what_is_over() -> None:
    holder = Holder(merged=[[(0, 7)], [(2, 9)]], pieces=[(5, 4)], counted=[(1, 2)])
    assert holder.end == 4
    assert holder.open() == [(0, 1), (2, 4)]
    assert holder.whole(2) == [(1, 3)]
    holder.cut(2, 2)
    assert (holder.first, holder.end, holder.pieces, holder.counted) == (2, 4, [(7, 2)], [])
    assert holder.begin == 0
    assert holder.merged == [[(0, 7)], [(2, 9)]]
    holder.pieces = [(7, PAST_MAX)]
    holder.cut(PAST_MAX + 1, 2)
    assert (holder.begin, holder.first, holder.end) == (1, PAST_MAX + 1, PAST_MAX + 2)
    assert holder.merged == [[(2, 7)], [(2, 9)]]


def test_every_unit_is_in_one_column() -> None:
    units = Units(fresh=10, over=[(0, 4)], partly=1, begun=[(4, 6)], free=[(6, 7)])
    found = columns(units, [(5, 6), (7, 10)])
    assert (found.merged, found.partly, found.in_hand, found.given_back) == (3, 2, 4, 1)
    assert found.balanced()
    assert not columns(units, [(7, 10)]).balanced() or columns(units, [(7, 10)]).partly == 3


def test_the_memory_has_a_plain_form() -> None:
    units = Units(corpus="c", fresh=3, over=[(0, 1)], holders={"a": Holder(merged=[[(0, 2)]], pieces=[(0, 3)])})
    assert from_plain(Units, to_plain(units)) == units
