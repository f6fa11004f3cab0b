"""The machines under some seeds of faults, and figures that show that the seeds were worth something.

A seed replays exactly: in this process, in another, and under another hash seed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from itertools import product
from random import Random

import pytest

from diloco.sim.plan import GENTLE, HARSH, OF_ONE_MACHINE, PAIR, draw_plan, inject_pair_fault
from diloco.sim.swarm import Outcome
from diloco.sim.world import Direction, Link
from diloco.sync.fates import columns_of
from tests.hunts.swarm import run_seed
from tests.sim.small import Small, a_pair
from tests.sooner import sooner
from tests.tidy_rules import ROOT

FAILED_ONCE = (
    500097,
    500320,
    501554,
    509386,
    701813,
    803082,
    912991,
    914170,
    925059,
    50645,
    60061,
    26111975,
    26113595,
    26114034,
    27111028,
    33005021,
    34009699,
    35000869,
)
LONG = (504502, 506599)
"""As long as nothing draws otherwise, each of them goes through what was wrong."""
BESIDE = (26, 37)
"""With those that failed once they inject every fault."""


def test_seeds() -> None:
    outcomes = [run_seed(seed) for seed in (*FAILED_ONCE, *BESIDE)]
    failed = [f"make swarm SEEDS=1 ARGS='--seed {each.seed}'  # {each.failure}" for each in outcomes if each.failure]
    assert not failed, "\n" + "\n".join(failed)
    check_that_it_counts(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", LONG)
def test_a_long_seed_that_failed_once(seed: int) -> None:
    assert run_seed(seed).failure == ""


def check_that_it_counts(outcomes: list[Outcome]) -> None:
    """Seeds in which little happens prove little (etcd's rule)."""
    faults: Counter[str] = sum((each.faults for each in outcomes), Counter())
    fates: Counter[str] = sum((each.fates for each in outcomes), Counter())
    wanted = {*GENTLE, *HARSH, *PAIR}
    assert set(faults) == wanted, f"never injected: {sorted(wanted - set(faults))}"
    assert sum(each.ran["promotions"] for each in outcomes) > len(outcomes) // 20
    assert fates["merged"] > 20 * len(outcomes), fates
    assert {"merged", "stale", "non_finite", "evicted"} <= set(fates), fates
    assert sum(each.ran["restarts"] for each in outcomes) > len(outcomes)
    assert max(each.staleness_worst for each in outcomes) >= 4


REPLAYED = (1, 21)
PROGRAM = f"from tests.hunts.swarm import run_seed\nfor seed in {REPLAYED}: print(run_seed(seed).digest)"


@pytest.mark.slow
def test_a_seed_replays_in_another_process_and_no_delay_that_is_not_from_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [run_seed(seed).digest for seed in REPLAYED]
    assert len(set(here)) == len(REPLAYED)
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == here, f"seeds {REPLAYED}"
    right, loose = Link._delay_ns, random.SystemRandom()
    monkeypatch.setattr(Link, "_delay_ns", lambda self: right(self) + loose.randrange(1000))
    assert all(run_seed(seed).digest != digest for seed, digest in zip(REPLAYED, here, strict=True))


# ---  ----------------------------------------------------------------------------------------------------------------


def test_sites_of_a_calm_run_draw_and_merge_each_unit_once() -> None:
    learner = {"unit_sequences": 2, "sequence_tokens": 10, "units_ahead": 64}
    small = Small(10, sites=3, learner=learner, unit_sequences=2)
    found = columns_of(small.outer.machine)
    assert found.merged > 50
    assert (found.partly, found.given_back, found.reissued, found.repeated) == (0, 0, 0, 0)
    assert found.balanced()
    assert min(small.versions()) > 10
    assert small.cluster.restarts == 0


def test_site_trains_at_its_own_pace_through_a_partition_and_joins_again_after_it() -> None:
    small = Small(2, site_timeout_ns=3_000_000_000)
    site = small.process("a")
    before, first = site.step, site.courier.session
    small.link("a").cut(Direction.DOWN)
    small.run(10)
    assert site.step - before == 100, "one step per 100 ms, as before"
    assert (first is not None, site.courier.session) == (True, None), "it hears nothing and breaks off"
    small.link("a").heal()
    small.run(8)
    assert site.courier.session not in (None, first)


@pytest.mark.parametrize("wiped", [False, True])
def test_a_killed_site_goes_on_from_its_checkpoint_and_a_wiped_one_skips_what_its_updates_consumed(wiped: bool) -> None:
    small = Small(3)
    before = small.process("a")
    (small.cluster.wipe_site if wiped else small.cluster.kill_site)("a", 100_000_000)
    small.run(0.2)
    after = small.process("a")
    assert after.name != before.name
    assert (0 < after.step <= before.step) != wiped, "from the checkpoint, not from nothing and not from memory"
    small.run(1.8)
    assert after.machine.state.incarnation == 2
    if wiped:
        assert after.step < 25
        assert after.cursor > after.step, "an earlier process has read these batches, and its work was accepted"


def test_lock_step_waits_and_gives_up_after_a_bound() -> None:
    small = Small(4, learner={"lock_step": True}, quorum="all")
    small.link("a").cut(*Direction)
    small.run(2)
    waiting = small.process("a").step
    small.run(1)
    assert small.process("a").step == waiting, "it waits for the answer to its update"
    small.run(8)
    assert small.process("a").step > waiting, "the wait has a bound"


# ---  ----------------------------------------------------------------------------------------------------------------

PLANS = [draw_plan(seed) for seed in range(300)]


def test_plan_is_a_function_of_its_seed_and_every_choice_is_drawn_by_some() -> None:
    assert draw_plan(7) == draw_plan(7)
    assert len({repr(plan) for plan in PLANS}) == len(PLANS)
    outers = [plan.outer.options for plan in PLANS]
    learners = [plan.sites[0].options for plan in PLANS]
    for drawn, wanted in (
        ([each.quorum for each in outers], {"all", 1, 2, 3}),
        ([each.weights for each in outers], {"tokens2_per_step", "tokens", "uniform"}),
        ([each.grace for each in outers], {"fixed", "adaptive"}),
        ([(each.merge_by, each.round_updates > 1) for each in outers], {*product(("site", "update"), (False, True))}),
        ([each.num_fragments for each in outers], {1, 2, 3, 4}),
        ([bool(each.token_budget) for each in outers], {True, False}),
        ([each.adopt for each in learners], {"rebase", "overwrite", "blend", "eager"}),
        ([each.lock_step for each in learners], {True, False}),
        ([len(plan.sites) for plan in PLANS], {1, 2, 3, 4, 5}),
        ([site.overlap_steps for plan in PLANS for site in plan.sites], {0, 1, 2, 3}),
        ([len(set(plan.starts_ns)) > 1 for plan in PLANS], {True, False}),
        ([plan.outer.conserving and plan.sites[0].overlap_steps > 0 for plan in PLANS], {True, False}),
    ):
        assert set(drawn) >= wanted
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
    assert not inject_pair_fault(Small().syncers, Random(kind), kind), "there is no standby"
    small = Small(2, replication=a_pair(), site_timeout_ns=1_500_000_000)
    random = Random(kind)
    if kind == "detach":
        assert not inject_pair_fault(small.syncers, random, kind), "there is no need"
        small.between.cut(*Direction)
        small.run(2)
    found = [inject_pair_fault(small.syncers, random, kind) for _ in range(4)]
    assert any(found)
    small.run(4)
    before = small.versions()
    small.cluster.heal()
    small.run(6)
    assert min(small.versions()) > max(before)
    assert small.syncers.caught_up()
