"""The checkers of the sites: their list, and conservation by hand; ``test_mutants`` shows the rest."""

from __future__ import annotations

import pytest

from diloco.sim.checkers import Violation
from diloco.sim.site_checkers import CHECKERS, Balanced, Conservation, CountedOnce, Ledger
from diloco.sim.world import OuterPlan, OuterRule
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.fates import columns_of
from diloco.sync.options import OuterOptions
from tests.sim.small import Small
from tests.sync.driving import Syncer, running


def test_names_are_unique_and_every_one_says_what_breaks_it() -> None:
    names = [checker.name for checker in CHECKERS]
    assert len(set(names)) == len(names)
    assert all(checker.mutation for checker in CHECKERS)


def test_progress_that_vanishes_between_two_events_is_seen() -> None:
    small = Small()
    small.run(3)
    process = small.process("a")
    process.theta[0] = (process.theta[0][0] - 1, *process.theta[0][1:])
    with pytest.raises(Violation, match="r is") as raised:
        small.run(1)
    assert raised.value.checker == Conservation.name


def test_token_that_vanishes_is_seen() -> None:
    small = Small()
    small.run(3)
    process = small.process("a")
    process.machine.state.fragments[1].tokens_merged -= 1
    with pytest.raises(Violation) as raised:
        small.run(1)
    assert raised.value.checker == Ledger.name


# --- The checkers of leased units, shown what they must not accept ---------------------------------------------------

PLAN = OuterPlan(OuterOptions(unit_sequences=2), OuterRule())
SAID = [fx.Note("anything", "")]


def with_a_lease() -> Syncer:
    syncer = running("a", unit_sequences=2)
    syncer.handle(ev.UnitsAsked(1, "a", 1, 0, 0, 4, 0, 0))
    return syncer


def test_a_unit_that_counts_and_was_not_trained_on_is_seen() -> None:
    syncer = with_a_lease()
    assert syncer.machine.state.units is not None
    syncer.machine.state.units.over = [(1, 2)]
    with pytest.raises(Violation, match=r"counted as merged, and not merged: \[1\]"):
        CountedOnce(PLAN).told(syncer.machine, b"", SAID)


def test_a_unit_in_two_places_or_none_is_seen() -> None:
    syncer = with_a_lease()
    assert syncer.machine.state.units is not None
    Balanced(PLAN).told(syncer.machine, b"", SAID)
    syncer.machine.state.units.free = [(3, 4)]
    with pytest.raises(Violation, match="balanced"):
        Balanced(PLAN).told(syncer.machine, b"", SAID)
    syncer.machine.state.units.free = []
    syncer.machine.state.units.fresh += 1
    with pytest.raises(Violation, match="balanced"):
        Balanced(PLAN).told(syncer.machine, b"", SAID)


def test_sites_of_a_calm_run_draw_and_merge_each_unit_once() -> None:
    learner = {"unit_sequences": 2, "sequence_tokens": 10, "units_ahead": 64}
    small = Small(sites=3, learner=learner, unit_sequences=2)
    small.run(10)
    outer = small.syncers.outer
    assert outer is not None
    found = columns_of(outer.plan.options, outer.machine.state)
    assert found.merged > 50
    assert (found.partly, found.given_back, found.reissued, found.repeated) == (0, 0, 0, 0)
    assert found.balanced()
