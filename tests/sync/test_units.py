"""Lists of units."""

from __future__ import annotations

from diloco.sync.data_units import (
    PAST_MAX,
    SKIPPED,
    Holder,
    Units,
    columns,
    joined,
    leased_places,
    pieces_before,
    pieces_from,
    units_at,
)
from diloco.sync.plain import from_plain, to_plain


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
