"""What the hunt for liars is worth: it finds each thing that would believe too much, or too little."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco.sync import admission, rounds
from diloco.sync.rounds import raw_weight
from tests.hunts import liars

Patch = pytest.MonkeyPatch


def believe_all_steps(patch: Patch) -> None:
    patch.setattr(admission, "believed_steps", lambda state, options, event: event.steps)
    patch.setattr(admission, "believed_steps", lambda state, options, event: event.steps)


def believe_all_tokens(patch: Patch) -> None:
    patch.setattr(rounds, "implausible", lambda state, options, event: "")


def believe_the_period_of_a_site(patch: Patch) -> None:
    patch.setattr(rounds, "period_ns", lambda site, index: site.lines[index].usual_steps * site.step_ns)


def weigh_by_what_an_update_says(patch: Patch) -> None:
    right = rounds._full_round

    def full_round(turn: rounds.Turn, index: int, merged: set[str]) -> dict[str, float]:
        found = right(turn, index, merged)
        for name in merged:
            (first, *_) = [each for each in turn.state.sites[name].lines[index].undecided if each.merging]
            found[name] = raw_weight(turn.options.weights, first.tokens, first.steps)
        return found

    patch.setattr(rounds, "_full_round", full_round)


def believe_no_more_than_usual(patch: Patch) -> None:
    patch.setattr(admission, "STEPS_RATIO_MAX", 1)
    patch.setattr(admission, "UNEQUAL_MAX", 1e-9)


def test_honest_sites_are_believed_and_lies_move_no_more_than_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    assert liars.main(["--n", "300"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("mutate", "seed", "words"),
    [
        (believe_all_steps, 76, "hid a norm"),
        (believe_all_tokens, 61, "the run has ended"),
        (believe_the_period_of_a_site, 71, "made a round wait"),
        (weigh_by_what_an_update_says, 35, "moved the model"),
        (believe_no_more_than_usual, 60, "an honest update was refused"),
    ],
)
def test_what_believes_too_much_or_too_little_is_found(
    mutate: Callable[[Patch], None], seed: int, words: str, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with the seed that showed it when this was written, and the others where it shows it no more."""
    mutate(monkeypatch)
    for each in (seed, *range(200)):
        found = liars.main(["--seed", str(each), "--n", "1"])
        if found and words in capsys.readouterr().out:
            return
    pytest.fail(f"{words}: not seen")
