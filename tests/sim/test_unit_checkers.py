"""The checkers of leased units, shown what they must not accept."""

from __future__ import annotations

import pytest

from diloco.sim.checkers import Violation
from diloco.sim.site_checkers import Balanced, CountedOnce
from diloco.sim.values import OuterRule
from diloco.sim.world import OuterPlan
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.fates import columns_of
from diloco.sync.options import OuterOptions
from tests.sim.small import Small
from tests.sync.driving import Syncer, running

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
