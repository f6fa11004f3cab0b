from __future__ import annotations

from random import Random

import pytest

from diloco.sim.plan import GENTLE, OF_ONE_MACHINE, PAIR, PairFaults, draw_plan
from diloco.sim.world import Direction
from tests.sim.small import Small, a_pair
from tests.sooner import sooner

PLANS = [draw_plan(seed) for seed in range(300)]


def test_plan_is_a_function_of_its_seed_and_every_choice_is_drawn_by_some() -> None:
    assert draw_plan(7) == draw_plan(7)
    assert len({repr(plan) for plan in PLANS}) == len(PLANS)
    options = [plan.outer.options for plan in PLANS]
    learners = [plan.sites[0].options for plan in PLANS]
    assert {each.quorum for each in options} >= {"all", 1, 2, 3}
    assert {each.weights for each in options} == {"tokens2_per_step", "tokens", "uniform"}
    assert {each.grace for each in options} == {"fixed", "adaptive"}
    assert {(each.merge_by, each.round_updates > 1) for each in options} == {
        (by, several) for by in ("site", "update") for several in (False, True)
    }
    assert {each.adopt for each in learners} == {"rebase", "overwrite", "blend", "eager"}
    assert {each.lock_step for each in learners} == {True, False}
    assert {each.num_fragments for each in options} == {1, 2, 3, 4}
    assert {bool(each.token_budget) for each in options} == {True, False}
    assert {len(plan.sites) for plan in PLANS} == {1, 2, 3, 4, 5}
    assert any(len(set(plan.starts_ns)) > 1 for plan in PLANS), "nobody joins late"
    overlaps = {site.overlap_steps for plan in PLANS for site in plan.sites}
    assert overlaps >= {0, 1, 2, 3}
    assert any(plan.outer.conserving and plan.sites[0].overlap_steps for plan in PLANS)
    pairs = [plan for plan in PLANS if plan.outer.replication is not None]
    assert len(PLANS) / 5 < len(pairs) < len(PLANS) / 2
    assert {kind for plan in pairs for kind in plan.faults} > set(PAIR)
    assert not {kind for plan in pairs for kind in plan.faults} & set(OF_ONE_MACHINE)


def test_conserving_plan_has_nothing_that_throws_progress_away() -> None:
    conserving = [plan for plan in PLANS if plan.outer.conserving]
    assert conserving
    for plan in conserving:
        assert set(plan.faults) <= {*GENTLE, *PAIR}, plan.seed
        assert (plan.outer.rule.lr_tenths, plan.outer.rule.momentum_tenths) == (10, 0), plan.seed
        assert plan.sites[0].options.adopt == "rebase", plan.seed


@pytest.mark.parametrize("kind", sooner(PAIR, *PAIR[::2]))
def test_a_run_survives_each_fault(kind: str) -> None:
    assert not PairFaults(Small().syncers, Random(kind)).inject(kind), "there is no standby"
    small = Small(replication=a_pair(), site_timeout_ns=1_500_000_000)
    small.run(2)
    faults = PairFaults(small.syncers, Random(kind))
    if kind == "detach":
        assert not faults.inject(kind), "there is no need"
        small.between.cut(*Direction)
        small.run(2)
    found = [faults.inject(kind) for _ in range(4)]
    assert any(found)
    small.run(4)
    before = small.versions()
    small.cluster.heal()
    small.run(6)
    assert min(small.versions()) > max(before)
    assert small.syncers.caught_up()
