"""The hunt for liars finds code that believes too much or too little; poison is removed; pairs are complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.sync import rounds
from diloco.sync.rounds import raw_weight
from diloco.sync.state import Turn
from tests.hunts import liars, poison
from tests.hunts.pairs import SETTINGS, Row, covering, judge, pairs_of, refusal, run_of
from tests.hunts.poison import Poisoning

Patch = pytest.MonkeyPatch
Hunted = Callable[..., Any]


def weighed_as_said(turn: Turn, index: int, merged: set[str]) -> dict[str, float]:
    found = full_round(turn, index, merged)
    for name in merged:
        first = next(each for each in turn.state.sites[name].lines[index].undecided if each.merging)
        found[name] = raw_weight(turn.options.weights, first.tokens, first.steps)
    return found


full_round = rounds._full_round
WRONG: dict[str, tuple[int, dict[str, object]]] = {
    "hid a norm": (76, {"admission.believed_steps": lambda machine, event: event.steps}),
    "the run has ended": (61, {"admission.implausible": lambda machine, event: ""}),
    "made a round wait": (
        71,
        {"admission.period_ns": lambda site, index: site.lines[index].usual_steps * site.step_ns},
    ),
    "moved the model": (35, {"rounds._full_round": weighed_as_said}),
    "an honest update was refused": (60, {"admission.STEPS_RATIO_MAX": 1, "admission.UNEQUAL_MAX": 1e-9}),
}
"""What the hunt says of a machine that believes too much, or the last one too little; and a seed that showed it."""


def test_honest_sites_are_believed_and_lies_move_no_more_than_the_truth(hunted: Hunted) -> None:
    found, said = hunted(liars, "--n", "300")
    assert found["violations"] == 0, said


@pytest.mark.parametrize("words", WRONG)
def test_what_believes_too_much_or_too_little_is_found(words: str, monkeypatch: Patch, hunted: Hunted) -> None:
    """Try the seed that showed it when this was written, and other seeds if that no longer does."""
    seed, changes = WRONG[words]
    for name, value in changes.items():
        monkeypatch.setattr(f"diloco.sync.{name}", value)
    for each in (seed, *range(200)):
        _, said = hunted(liars, "--seed", str(each), "--n", "1")
        if words in said:
            return
    pytest.fail(f"{words}: not seen")


# --- Poison is removed -----------------------------------------------------------------------------------------------

SMALL = (
    "model.layers=2 model.dim=32 model.heads=2 model.context=64 data=stdlib_bytes inner.batch_sequences=8 "
    "inner.precision=fp32 outer.inner_steps=5 network=loopback"
)


@pytest.mark.hunt
def test_poison_is_taken_out_of_a_run_of_real_training(hunted: Hunted) -> None:
    """Shorter than the hunt, which checks the poison's harm and what is left of it."""
    found, said = hunted(poison, "--tokens", "60000", "--at", "2", "--updates", "1", "--settings", SMALL)
    assert "left_out" in found, said
    assert found["left_out"] >= 1
    assert found["tokens_restored"] >= 60000
    assert found["loss_restored"] < found["loss_without"]


def test_a_site_that_was_to_send_poison_and_did_not_is_noticed(tmp_path: Path) -> None:
    """Regression: the hunt sent no poison any more, and did not notice, after the code that it patches had moved."""
    poisoning = Poisoning(tmp_path, seed=1, tokens=10**9, at=4, updates=3)
    poisoning.check_sent([[], [4, 5, 6], []])
    for sent in ([[], [], []], [[4, 5, 6], [4, 5, 6], []], [[], [4, 5, 6, 7], []]):
        with pytest.raises(AssertionError, match="one site was to send"):
            poisoning.check_sent(sent)


# --- Every pair of settings is in a row or refused with a message, and the judge of a run can fail -------------------

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
    assert (rows, refused) == covering(3, refuses), "the same seed gives the same rows"
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
        ("", {"status": "the run has not reached its end"}, "has not reached"),
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


@pytest.mark.hunt
def test_a_row_trains_and_says_true_figures(tmp_path: Path) -> None:
    run_of(tmp_path, ROW)


@pytest.mark.hunt
@pytest.mark.parametrize("number", range(4))
def test_rows_train_and_say_true_figures(number: int, tmp_path: Path) -> None:
    rows, _ = covering(0, refusal)
    run_of(tmp_path, rows[number])
