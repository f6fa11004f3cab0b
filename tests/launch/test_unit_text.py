"""Units of the data in words."""

from __future__ import annotations

from diloco.observe.text import units_shortly, units_text

UNITS = {
    "processed": 1201,
    "leased": 1300,
    "merged": 1200,
    "partly": 0,
    "in_hand": 100,
    "given_back": 0,
    "reissued": 7,
    "repeated": 0,
    "sequences": 64,
}


def test_what_is_empty_is_left_out() -> None:
    wanted = "units of 64 sequences: 1,300 leased, 1,201 processed, 1,200 merged, 100 in hand, 7 re-issued"
    assert units_text(UNITS) == wanted


def test_merged_is_always_said() -> None:
    nothing = dict.fromkeys(UNITS, 0)
    assert units_text(nothing).endswith("0 merged")
    every = dict.fromkeys(UNITS, 1)
    assert units_text(every).endswith("1 partly merged, 1 in hand, 1 given back, 1 re-issued, 1 repeated")


def test_who_looks_on_sees_the_same_columns_always() -> None:
    assert units_shortly(UNITS) == "1,300 leased, 1,200 merged, 0 partly, 0 repeated"
    assert units_shortly({}) == "0 leased, 0 merged, 0 partly, 0 repeated"
