"""Events in plain values, which JSON can carry."""

from __future__ import annotations

import json

import pytest

from diloco.sync.effects import Contribution, StartOuterStep, TellFate, UpdateRef
from diloco.sync.events import Ending, Fate, JoinRequested, Reason
from diloco.sync.options import OuterOptions
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync
from diloco.syncer.outer_step import OuterResult, outer_step_facts, refusal_facts, start_facts


def test_a_start_says_where_the_run_stands_and_whether_it_is_over() -> None:
    machine = OuterSync(OuterOptions(num_fragments=2))
    machine.state.epoch, machine.state.fragments[1].version = 3, 7
    assert start_facts(machine) == ({"epoch": 3, "versions": [0, 7], "tokens_merged": {}}, None)
    machine.handle(JoinRequested(1, "a", "0123abcd"), 0)
    for line, tokens in zip(machine.state.sites["a"].lines, (5, 30), strict=True):
        line.tokens_merged = tokens
    assert start_facts(machine)[0]["tokens_merged"] == {"a": 35}
    machine.state.phase, machine.state.ending = Phase.ENDED, Ending.DRAINED
    assert start_facts(machine)[1] is Ending.DRAINED


def test_a_refusal_says_which_update_and_why() -> None:
    told = TellFate("a", Fate(1, 5, 9, 100, "digest", Reason.STALE))
    assert refusal_facts(told) == {"site": "a", "fragment": 1, "sequence": 5, "reason": "stale"}


def test_an_outer_step_says_who_was_in_it_and_how_stale() -> None:
    update = UpdateRef(4, "payload", "fp32", "digest")
    command = StartOuterStep(0, 6, (Contribution("a", 0.25, 5, (update,)), Contribution("b", 0.75, 3, (update,))))
    result = OuterResult(None, b"", "", 1.5, 0.125)  # type: ignore[arg-type]
    facts = outer_step_facts(command, result, {"read_s": 0.5})
    assert facts == json.loads(json.dumps(facts))
    assert (facts["sites"], facts["staleness"]) == ({"a": 0.25, "b": 0.75}, {"a": 0, "b": 2})
    assert facts["read_s"] == 0.5
    again = (*command.contributions, Contribution("b", 0.125, 4, (update,)))
    of_three = outer_step_facts(StartOuterStep(0, 6, again), result, {})
    assert (of_three["sites"], of_three["staleness"]) == ({"a": 0.25, "b": 0.875}, {"a": 0, "b": 2})
    assert (facts["version"], facts["norm"], facts["seconds"]) == (6, pytest.approx(1.5), 0.125)
