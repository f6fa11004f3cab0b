"""Selections: what is typed, what it takes, and what is said about nonsense."""

from __future__ import annotations

import pytest

from diloco.sync.rounds import Selection, parse_selection


def test_versions_of_one_site() -> None:
    found = parse_selection("site=b:versions=17..19")
    assert found == Selection("b", "versions", 17, 19)
    assert [version for version in range(15, 22) if found.takes("b", 3, 99, version)] == [17, 18, 19]
    assert not found.takes("a", 3, 99, 18)
    assert str(found) == "site=b:versions=17..19"


def test_sequences_of_one_fragment() -> None:
    found = parse_selection("fragment=2:site=site-b:sequences=4")
    assert found == Selection("site-b", "sequences", 4, 4, 2)
    assert found.takes("site-b", 2, 4, 1000)
    assert not found.takes("site-b", 1, 4, 1000)
    assert not found.takes("site-b", 2, 5, 4), "a version is no sequence"
    assert parse_selection(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has ''"),
        ("b", "has 'b'"),
        ("site=b", "selects nothing"),
        ("versions=1..2", "selects nothing"),
        ("site=b:versions=1:sequences=2", "selects nothing"),
        ("site=b:site=c:versions=1", "says site twice"),
        ("site=b:version=1", "has 'version=1'"),
        ("site=b:versions=", "has 'versions='"),
        ("site=b:versions=3..1", "the first is not above the last"),
        ("site=b:versions=0", "from 1 on"),
        ("site=b:versions=x..y", "versions=x: a whole number"),
        ("site=b:versions=1..", "versions=: a whole number"),
        ("site=b:versions=1:fragment=-1", "fragment=-1: a whole number"),
        ("site=b:versions=٣", "a whole number"),
    ],
)
def test_nonsense_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^'") as caught:
        parse_selection(text)
    assert said in str(caught.value), caught.value
