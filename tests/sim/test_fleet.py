"""Fleets without tensors: the books balance, and what has a formula is what the formula says."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from diloco.sim.fleet import COLLECT_EVERY, EndlessError, Fleet, simulate
from diloco.sim.fleet_plan import YEAR_S, FleetPlan, FleetResult, FleetSite
from diloco.sync.options import SECOND_NS, LearnerOptions, OuterOptions
from tests.sooner import sooner

HOUR_S = 3600.0
HALF_S = HOUR_S / 2


def fleet(
    sites: tuple[FleetSite, ...],
    *,
    fragments: int = 1,
    inner_steps: int = 24,
    update_bytes: int = 1000,
    seconds: float | None = HOUR_S,
    seed: int = 0,
    learner: dict[str, Any] | None = None,
    **outer: Any,
) -> FleetPlan:
    rules = {"quorum": 1, "grace": "fixed", "grace_ns": 0, "sites_max": len(sites), **outer}
    return FleetPlan(
        sites=sites,
        outer=OuterOptions(num_fragments=fragments, **rules),
        learner=LearnerOptions(num_fragments=fragments, inner_steps=inner_steps, **(learner or {})),
        update_bytes=(update_bytes,) * fragments,
        version_bytes=(update_bytes,) * fragments,
        whole_bytes=(8 * update_bytes,) * fragments,
        seconds=seconds,
        seed=seed,
    )


def check(plan: FleetPlan, found: FleetResult) -> None:
    """What holds whatever happened."""
    for site in found.sites:
        assert site.trained_s + site.away_s + site.waited_s == pytest.approx(found.seconds)
        assert min(site.trained_s, site.away_s, site.waited_s) >= 0


@pytest.mark.parametrize("fragments", [1, 4])
def test_where_nothing_fails_and_links_are_without_bound_everybody_trains_all_the_time(fragments: int) -> None:
    plan = fleet((FleetSite(step_s=1.0),) * 4, fragments=fragments)
    found = simulate(plan)
    check(plan, found)
    assert found.goodput == pytest.approx(1.0)
    assert [site.steps for site in found.sites] == [3600] * 4
    # Every fragment is due 150 times in 3600 steps; the last updates may not be merged yet.
    assert found.site_rounds == pytest.approx(4 * fragments * 150, abs=4 * fragments)
    # Of four that come at one instant the first closes a round, and the others meet in the next.
    assert found.sites_per_version == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("phases", [(0, 6, 12, 18), (0, 0, 12, 12), (0, 1, 22, 23), (0, 11, 13, 14)])
def test_19_equal_sites_settle_into_common_rounds_whatever_their_phase(phases: tuple[float, ...]) -> None:
    """A period has 24 s.  None has waited, and without the share of a period they stay apart."""
    sites = tuple(FleetSite(step_s=1.0, starts_s=float(each)) for each in phases)
    plan = fleet(sites, grace="adaptive", grace_ns=SECOND_NS, overlap_steps=2, grace_period_percent=90)
    found = simulate(plan)
    assert found.sites_per_version > 3.9
    assert [site.waited_s for site in found.sites] == pytest.approx([0.0] * 4, abs=1e-6)
    assert simulate(replace(plan, outer=replace(plan.outer, grace_period_percent=0))).sites_per_version < 2.1
    early = simulate(replace(plan, seconds=24 * 3.0 + 23))
    assert early.versions[0] <= 4


def test_19_a_share_of_a_period_holds_no_uneven_site_up() -> None:
    sites = tuple(FleetSite(step_s=1 / speed) for speed in (1.0, 0.75, 0.5, 0.25))
    plan = fleet(sites, grace="adaptive", grace_ns=SECOND_NS, grace_period_percent=90, seconds=10 * HOUR_S)
    found = simulate(plan)
    assert found.goodput == pytest.approx(1.0)
    assert found.versions[0] > 1.0 * 10 * HOUR_S / 24 / 2, "a version in two periods of the fastest or more"
    merged = [site.rounds for site in found.sites]
    assert merged == pytest.approx([1500, 1125, 750, 375], abs=3), "every update is merged"


def test_invariant_14_nobody_waits_for_a_site_that_is_slow_far_or_away() -> None:
    slow = FleetSite(step_s=5.0, rtt_s=3.0, up_mbps=0.01, down_mbps=0.01, interruptions_per_s=1 / 300, away_s=60.0)
    plan = fleet((FleetSite(step_s=1.0), FleetSite(step_s=1.3, rtt_s=0.1), slow), updates_in_flight_max=2)
    found = simulate(plan)
    check(plan, found)
    assert found.sites[0].waited_s == pytest.approx(0.0, abs=1e-6)
    assert found.sites[1].waited_s < 1.0, "no more than its first version's way"
    assert found.sites[2].interruptions > 3
    assert found.sites[2].away_s > 100


def test_in_lock_step_the_others_go_on_without_a_site_that_is_away_and_with_it_afterwards() -> None:
    learner = {"lock_step": True, "updates_in_flight_max": 1, "adopt": "overwrite"}
    sites = (FleetSite(step_s=1.0, planned=((1000.0, 1100.0),)), FleetSite(step_s=1.0))
    plan = fleet(sites, quorum="all", updates_in_flight_max=1, learner=learner)
    found = simulate(plan)
    check(plan, found)
    assert found.versions[0] == pytest.approx(HOUR_S / 24, abs=3)
    assert found.sites[0].steps == pytest.approx(HOUR_S - 100, abs=50)


@pytest.mark.parametrize(("adopt", "fragments"), [("rebase", 2), ("overwrite", 4)])
@pytest.mark.parametrize("left_s", [1000.0, 1003.0, 1008.0, 1017.0])
def test_in_lock_step_the_versions_say_whose_turn_it_is(adopt: str, fragments: int, left_s: float) -> None:
    """Who was silent for longer than its lease comes back to the middle of another fragment's period."""
    learner = {"lock_step": True, "updates_in_flight_max": 1, "adopt": adopt}
    sites = (FleetSite(step_s=1.0, planned=((left_s, left_s + 100),)), FleetSite(step_s=1.0))
    plan = fleet(sites, fragments=fragments, seconds=HALF_S, quorum="all", updates_in_flight_max=1, learner=learner)
    found = simulate(plan)
    check(plan, found)
    assert all(version == pytest.approx(HALF_S / 24, abs=4) for version in found.versions)
    assert found.sites[0].rounds > (HALF_S - 200) / 24 * fragments


@pytest.mark.parametrize(("adopt", "rtt_s"), [("rebase", 0.0), ("rebase", 0.1), ("overwrite", 0.1)])
def test_what_is_lost_goes_out_with_the_next_update_a_period_later(adopt: str, rtt_s: float) -> None:
    site = FleetSite(step_s=1.0, rtt_s=rtt_s, lost_share=0.5)
    plan = fleet((site,) * 2, seconds=4 * HOUR_S, learner={"adopt": adopt})
    found = simulate(plan)
    check(plan, found)
    assert found.goodput > 0.99
    assert all(site.rounds == pytest.approx(4 * HOUR_S / 24 / 2, rel=0.1) for site in found.sites)
    if adopt == "rebase":
        assert all(site.tokens_merged > 0.99 * site.steps * plan.sites[0].tokens_per_step for site in found.sites)


def test_in_lock_step_everybody_waits_for_the_slowest() -> None:
    sites = (FleetSite(step_s=1.0), FleetSite(step_s=0.5), FleetSite(step_s=2.0))
    learner = {"lock_step": True, "updates_in_flight_max": 1, "adopt": "overwrite"}
    plan = fleet(sites, quorum="all", updates_in_flight_max=1, learner=learner)
    found = simulate(plan)
    check(plan, found)
    shares = [site.trained_s / plan.seconds for site in found.sites]
    assert shares == pytest.approx([0.5, 0.25, 1.0], abs=0.02)


def test_a_link_that_is_too_slow_holds_up_updates_and_not_training() -> None:
    """A period is 24 s and an update takes 48 s of the link: every other one waits for its turn."""
    site = FleetSite(step_s=1.0, up_mbps=8 * 1000 / 48 / 1e6)
    found = simulate(fleet((site,) * 2, seconds=5 * HOUR_S))
    assert found.goodput == pytest.approx(1.0, abs=0.001)
    assert found.site_rounds == pytest.approx(2 * 18_000 / 48, rel=0.05)
    assert all(site.bytes_up == pytest.approx(1000 * 18_000 / 48, rel=0.05) for site in found.sites)


def test_a_slow_site_makes_fewer_steps_where_they_are_dynamic_and_all_merge_together() -> None:
    sites = tuple(FleetSite(step_s=step_s) for step_s in (1.0, 1.0, 2.0, 4.0))
    plan = fleet(sites, quorum="all", learner={"dynamic_steps": True, "updates_in_flight_max": 1})
    found = simulate(plan)
    check(plan, found)
    assert found.versions[0] > 0.9 * HOUR_S / 24
    assert simulate(replace(plan, learner=replace(plan.learner, dynamic_steps=False))).versions[0] < 0.3 * HOUR_S / 24


@pytest.mark.parametrize("sites", sooner([1, 4], 4))
def test_goodput_is_what_the_renewal_formula_says(sites: int) -> None:
    """1 / (1 + rate R), where interruptions that come while a site is away are part of the same one."""
    rate, away_s = 1.2e6 / sites / YEAR_S, 21.0
    site = FleetSite(step_s=1.0, interruptions_per_s=rate, away_s=away_s, rtt_s=0.05)
    plan = fleet((site,) * sites, seconds=12 * HOUR_S / sites, grace="adaptive", grace_ns=10**9)
    found = simulate(plan)
    check(plan, found)
    assert found.goodput == pytest.approx(1 / (1 + rate * away_s), abs=0.02)


def test_maintenance_is_away_as_planned() -> None:
    plan = fleet((FleetSite(step_s=1.0, planned=((600.0, 1200.0),)), FleetSite(step_s=1.0)))
    found = simulate(plan)
    check(plan, found)
    assert [site.away_s for site in found.sites] == [600.0, 0.0]
    assert found.sites[0].steps == pytest.approx(3000, abs=30)


def test_steps_take_what_is_known_of_each_and_then_what_is_usual() -> None:
    known = FleetSite(step_s=2.0, steps_s=(3.0,) * 24 + (1.0,) * 24)
    found = simulate(fleet((known, FleetSite(step_s=2.0)), seconds=240.0))
    # 72 s and 24 s for the first two periods, and 72 more steps of 2 s.
    assert [site.steps for site in found.sites] == [48 + 72, 120]


def test_the_same_seed_gives_the_same_weeks_and_another_others() -> None:
    site = FleetSite(step_s=1.0, step_jitter=0.3, interruptions_per_s=1 / 200, away_s=30.0, rtt_s=0.1)
    plan = fleet((site,) * 3, seconds=HALF_S)
    found = simulate(plan)
    assert simulate(plan) == found
    assert simulate(replace(plan, seed=1)) != found


@pytest.mark.parametrize("bound", [{"run_ns": 600 * SECOND_NS}, {"token_budget": 1100}])
@pytest.mark.parametrize("seconds", [None, HOUR_S])
def test_the_end_of_the_run_is_the_end_of_time(bound: dict[str, int], seconds: float | None) -> None:
    sites = (FleetSite(step_s=1.0, rtt_s=0.1), FleetSite(step_s=1.3, rtt_s=0.1))
    plan = fleet(sites, seconds=seconds, **bound)
    found = simulate(plan)
    check(plan, found)
    assert 600 < found.seconds < 650
    assert found.goodput > 0.98, "nobody waits when the run is over"
    for site in found.sites:
        assert site.tokens_merged == site.steps, "the last round takes what was unsent"


def test_a_site_that_is_away_at_the_end_holds_nobody_up_for_longer_than_the_last_round_may_wait() -> None:
    sites = (FleetSite(step_s=1.0), FleetSite(step_s=1.0, planned=((500.0, 5000.0),)))
    plan = fleet(sites, seconds=None, run_ns=600 * SECOND_NS, site_timeout_ns=10**15, final_wait_ns=30 * SECOND_NS)
    found = simulate(plan)
    check(plan, found)
    assert found.seconds == pytest.approx(630, abs=1)
    assert found.sites[0].waited_s == pytest.approx(30, abs=1)


def test_a_run_that_never_ends_says_so() -> None:
    plan = fleet((FleetSite(step_s=1.0),), seconds=None, quorum=2, token_budget=1000)
    with pytest.raises(EndlessError, match="no version in the last 24 h, and 0 of 1000 tokens are merged"):
        simulate(plan)


def test_python_collects_seldom_while_a_fleet_is_simulated_and_as_before_when_that_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, meanwhile = gc.get_threshold(), []

    def result(_: Fleet) -> FleetResult:
        meanwhile.append(gc.get_threshold())
        raise EndlessError("it failed")

    monkeypatch.setattr(Fleet, "result", result)
    with pytest.raises(EndlessError, match="it failed"):
        simulate(fleet((FleetSite(step_s=1.0),), seconds=60.0))
    assert meanwhile == [(COLLECT_EVERY, *before[1:])]
    assert gc.get_threshold() == before
