"""Records to and from plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import pytest

from diloco.sync.journal import JSON_DEPTH_MAX, PlainError, canonical, from_plain, parse_json, stored_name, to_plain


class Colour(StrEnum):
    RED = "red"


@dataclass
class Inner:
    n: int
    x: float = 0.5


@dataclass
class Outer:
    name: str
    flag: bool
    colour: Colour | None
    pair: tuple[int, str]
    many: tuple[Inner, ...]
    rows: list[Inner]
    table: dict[str, int] = field(default_factory=dict)
    either: int | str = 1


VALUE = Outer("a", True, Colour.RED, (1, "b"), (Inner(1), Inner(2, 1.5)), [Inner(3)], {"k": 4}, "all")


def test_there_and_back() -> None:
    assert from_plain(Outer, to_plain(VALUE)) == VALUE


def test_canonical_bytes_depend_on_the_value_only() -> None:
    assert canonical({"b": 1, "a": (2, 3)}) == canonical({"a": [2, 3], "b": 1}) == b'{"a":[2,3],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 5}, r"\.name is 5: str wanted"),
        ({"flag": 1}, r"\.flag is 1: bool wanted"),
        ({"colour": "blue"}, r"\.colour is 'blue': not one of red"),
        ({"pair": [1]}, r"\.pair has 1 items: 2 wanted"),
        ({"pair": [1, 2]}, r"\.pair\[1\] is 2: str wanted"),
        ({"many": [{"n": 1}, {"n": True}]}, r"\.many\[1\]\.n is True: int wanted"),
        ({"rows": {}}, r"\.rows is \{\}: a list wanted"),
        ({"rows": [{"m": 1}]}, r"\.rows\[0\] has unknown fields: m"),
        ({"rows": [{}]}, r"\.rows\[0\] lacks fields: n"),
        ({"table": {"k": "v"}}, r"\.table\.k is 'v': int wanted"),
        ({"either": 1.5}, r"\.either is 1\.5: fits none of"),
        ({"other": 1}, r"unknown fields: other"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(change: dict[str, object], words: str) -> None:
    plain = to_plain(VALUE)
    assert isinstance(plain, dict)
    with pytest.raises(PlainError, match=words):
        from_plain(Outer, plain | change)


def test_only_records_have_a_plain_form() -> None:
    with pytest.raises(TypeError, match="set has no plain form"):
        to_plain({1, 2})
    with pytest.raises(PlainError, match="a mapping wanted"):
        from_plain(Outer, [])


def test_whole_numbers_may_stand_for_floats() -> None:
    assert from_plain(Inner, {"n": 1, "x": 2}) == Inner(1, 2.0)


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000, b"\xff", "", "[" * 5000 + "]" * 5000])
def test_what_is_no_json_is_an_error_in_words_however_deep_it_goes(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 — any words
        parse_json(text)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_json_may_nest_as_deep_on_every_interpreter(opening: str, closing: str) -> None:
    def nested(levels: int) -> str:
        return opening * levels + "1" + closing * levels

    assert parse_json(nested(JSON_DEPTH_MAX))
    with pytest.raises(ValueError, match="nested too deeply: more than 100 levels"):
        parse_json(nested(JSON_DEPTH_MAX + 1))


def test_a_number_beyond_every_float_is_none() -> None:
    assert from_plain(float, 10**300, "norm") == 1e300
    with pytest.raises(PlainError, match="norm is 1000"):
        from_plain(float, 10**400, "norm")


def test_a_long_value_is_shown_cut_short() -> None:
    with pytest.raises(PlainError) as raised:
        from_plain(int, "x" * 100_000, "number")
    assert len(str(raised.value)) < 200


@dataclass(frozen=True, slots=True)
class Renamed:
    STORED: ClassVar[str] = "Named"
    now: int = field(metadata={"stored": "before"})


def test_what_is_renamed_keeps_the_name_under_which_it_is_stored() -> None:
    assert stored_name(Renamed) == "Named"
    assert to_plain(Renamed(3)) == {"before": 3}
    assert from_plain(Renamed, {"before": 3}) == Renamed(3)
    with pytest.raises(PlainError, match="lacks fields: before"):
        from_plain(Renamed, {})
    with pytest.raises(PlainError, match="unknown fields: now"):
        from_plain(Renamed, {"before": 3, "now": 3})
