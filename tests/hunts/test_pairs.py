"""Every pair of settings is in a row or refused in words, and the judge of a run can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hunts.pairs import SETTINGS, Row, covering, judge, pairs_of, refusal, run_of
from tests.runs.processes import place_in

ALL = sum(len(one) * len(two) for at, one in enumerate(SETTINGS.values()) for two in list(SETTINGS.values())[:at])
ROW = {"outer.lock_step": "true", "outer.quorum": "all", "outer.num_fragments": "4 outer.num_syncers=2"}
SUMMARY: dict[str, Any] = {
    "status": "ok",
    "versions": [4, 4],
    "global": {"val_loss_start": 5.0, "val_loss": 4.0},
    "wire": {"bytes_up": 100, "bytes_down": 1300, "bytes_joins": 800, "bytes_fp32_equivalent": 900},
}
FETCHED = [{"what": "fetched", "bytes": 400, "had": had} for had in (-1, -1, 0)]


def test_every_pair_is_in_a_row_or_refused() -> None:
    def refuses(row: Row) -> str:
        needs = row.get("codec.feedback") == "1" and row.get("outer.adopt", "rebase") == "rebase"
        both = row.get("outer.quorum") == "all" and row.get("outer.round_updates") == "3"
        return "feedback" if needs else "both" if both else ""

    rows, refused = covering(3, refuses)
    assert (rows, refused) == covering(3, refuses), "a seed is always the same rows"
    assert sorted(refused.values()) == ["both", "feedback"]
    found = set().union(*(pairs_of(row) for row in rows))
    assert len(found) == ALL - len(refused)
    assert not any(refuses(row) for row in rows)
    assert len(rows) < 40


def test_what_the_door_refuses_is_in_words() -> None:
    assert refusal(ROW) == ""
    assert "outer.round_updates is 3: only with quorum=1" in refusal({**ROW, "outer.round_updates": "3"})


@pytest.mark.parametrize(
    ("part", "changed", "words"),
    [
        ("", {"status": "the run did not come to its end"}, "did not come"),
        ("", {"versions": [4, 1]}, "the last round alone"),
        ("global", {"val_loss": 5.1}, "has not trained"),
        ("wire", {"bytes_joins": 400}, "800 were fetched"),
        ("wire", {"bytes_fp32_equivalent": 500}, "600 bytes apart from joins"),
    ],
)
def test_a_run_that_went_wrong_is_seen(part: str, changed: dict[str, Any], words: str) -> None:
    judge(SUMMARY, FETCHED)
    summary = {**SUMMARY, **({part: SUMMARY[part] | changed} if part else changed)}
    with pytest.raises(AssertionError, match=words):
        judge(summary, FETCHED)


@pytest.mark.slow
def test_a_row_trains_and_says_true_figures(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        run_of(place, "pair", ROW, 10.0)


@pytest.mark.hunt
@pytest.mark.parametrize("number", range(4))
def test_rows_train_and_say_true_figures(number: int, tmp_path: Path) -> None:
    rows, _ = covering(0, refusal)
    with place_in(tmp_path) as place:
        run_of(place, "pair", rows[number], 10.0)
