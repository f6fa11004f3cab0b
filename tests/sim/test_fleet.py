"""Fleets without tensors: the books balance, and what has a formula is what the formula says."""

from __future__ import annotations

import gc
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from diloco.sim.fleet import COLLECT_EVERY, EndlessError, Fleet, RegionalSyncer, Site, simulate
from diloco.sim.fleet_link import Arrivals, carry_ns, fetch_bytes, to_ns
from diloco.sim.fleet_plan import FleetFault, FleetPlan, FleetResult, FleetSite, Region, RegionPlan
from diloco.sync import effects as fx
from diloco.sync.options import SECOND_NS, LearnerOptions, OuterOptions
from diloco.sync.region import standing
from diloco.sync.state import Phase

HOUR_S = 3600.0
HALF_S = HOUR_S / 2
LOCK_STEP = {
    "quorum": "all",
    "updates_in_flight_max": 1,
    "learner": {"lock_step": True, "updates_in_flight_max": 1, "adopt": "overwrite"},
}


def fleet(
    sites: tuple[FleetSite, ...],
    *,
    fragments: int = 1,
    inner_steps: int = 24,
    seconds: float | None = HOUR_S,
    learner: dict[str, Any] | None = None,
    **outer: Any,
) -> FleetPlan:
    rules = {"quorum": 1, "grace": "fixed", "grace_ns": 0, "sites_max": len(sites), **outer}
    return FleetPlan(
        sites=sites,
        outer=OuterOptions(num_fragments=fragments, **rules),
        learner=LearnerOptions(num_fragments=fragments, inner_steps=inner_steps, **(learner or {})),
        update_bytes=(1000,) * fragments,
        version_bytes=(1000,) * fragments,
        whole_bytes=(8000,) * fragments,
        seconds=seconds,
    )


def checked(plan: FleetPlan) -> FleetResult:
    """What comes of it, and what holds whatever happened."""
    found = simulate(plan)
    for site in found.sites:
        assert site.trained_s + site.away_s + site.waited_s == pytest.approx(found.seconds)
        assert min(site.trained_s, site.away_s, site.waited_s) >= 0
    return found


@pytest.mark.parametrize("fragments", [1, 4])
def test_where_nothing_fails_and_links_are_without_bound_everybody_trains_all_the_time(fragments: int) -> None:
    found = checked(fleet((FleetSite(step_s=1.0),) * 4, fragments=fragments))
    assert found.goodput == pytest.approx(1.0)
    assert [site.steps for site in found.sites] == [3600] * 4
    # Every fragment is due 150 times in 3600 steps; the last updates may not be merged yet.
    assert found.site_rounds == pytest.approx(4 * fragments * 150, abs=4 * fragments)
    # Of four that come at one instant the first closes a round, and the others meet in the next.
    assert found.sites_per_version == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("phases", [(0, 6, 12, 18), (0, 1, 22, 23)])
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
    found = simulate(fleet(sites, grace="adaptive", grace_ns=SECOND_NS, grace_period_percent=90, seconds=10 * HOUR_S))
    assert found.goodput == pytest.approx(1.0)
    assert found.versions[0] > 1.0 * 10 * HOUR_S / 24 / 2, "a version in two periods of the fastest or more"
    merged = [site.rounds for site in found.sites]
    assert merged == pytest.approx([1500, 1125, 750, 375], abs=3), "every update is merged"


def test_invariant_14_nobody_waits_for_a_site_that_is_slow_far_or_away() -> None:
    slow = FleetSite(step_s=5.0, rtt_s=3.0, up_mbps=0.01, down_mbps=0.01, interruptions_per_s=1 / 300, away_s=60.0)
    found = checked(fleet((FleetSite(step_s=1.0), FleetSite(step_s=1.3, rtt_s=0.1), slow), updates_in_flight_max=2))
    assert found.sites[0].waited_s == pytest.approx(0.0, abs=1e-6)
    assert found.sites[1].waited_s < 1.0, "no more than its first version's way"
    assert found.sites[2].interruptions > 3
    assert found.sites[2].away_s > 100


@pytest.mark.parametrize(
    ("adopt", "fragments", "left_s"), [("rebase", 2, 1003.0), ("rebase", 2, 1017.0), ("overwrite", 4, 1008.0)]
)
def test_in_lock_step_the_versions_say_whose_turn_it_is(adopt: str, fragments: int, left_s: float) -> None:
    """Who was silent for longer than its lease comes back to the middle of another fragment's period."""
    sites = (FleetSite(step_s=1.0, planned=((left_s, left_s + 100),)), FleetSite(step_s=1.0))
    plan = fleet(sites, fragments=fragments, seconds=HALF_S, **LOCK_STEP)
    plan = replace(plan, learner=replace(plan.learner, adopt=adopt))
    found = checked(plan)
    assert all(version == pytest.approx(HALF_S / 24, abs=4) for version in found.versions)
    assert found.sites[0].rounds > (HALF_S - 200) / 24 * fragments
    assert [site.away_s for site in found.sites] == [100.0, 0.0]


@pytest.mark.parametrize(("adopt", "rtt_s"), [("rebase", 0.0), ("rebase", 0.1), ("overwrite", 0.1)])
def test_what_is_lost_goes_out_with_the_next_update_a_period_later(adopt: str, rtt_s: float) -> None:
    site = FleetSite(step_s=1.0, rtt_s=rtt_s, lost_share=0.5)
    found = checked(fleet((site,) * 2, seconds=4 * HOUR_S, learner={"adopt": adopt}))
    assert found.goodput > 0.99
    assert all(site.rounds == pytest.approx(4 * HOUR_S / 24 / 2, rel=0.1) for site in found.sites)
    if adopt == "rebase":
        assert all(site.tokens_merged > 0.99 * site.steps for site in found.sites)


def test_in_lock_step_everybody_waits_for_the_slowest() -> None:
    sites = (FleetSite(step_s=1.0), FleetSite(step_s=0.5), FleetSite(step_s=2.0))
    found = checked(fleet(sites, **LOCK_STEP))
    shares = [site.trained_s / HOUR_S for site in found.sites]
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
    found = checked(plan)
    assert found.versions[0] > 0.9 * HOUR_S / 24
    assert simulate(replace(plan, learner=replace(plan.learner, dynamic_steps=False))).versions[0] < 0.3 * HOUR_S / 24


def test_steps_take_what_is_known_of_each_and_then_what_is_usual() -> None:
    known = FleetSite(step_s=2.0, steps_s=(3.0,) * 24 + (1.0,) * 24)
    found = simulate(fleet((known, FleetSite(step_s=2.0)), seconds=240.0))
    # 72 s and 24 s for the first two periods, and 72 more steps of 2 s.
    assert [site.steps for site in found.sites] == [48 + 72, 120]


@pytest.mark.parametrize(
    ("bound", "seconds"),
    [({"run_ns": 600 * SECOND_NS}, None), ({"token_budget": 1100}, HOUR_S)],
    ids=["time", "tokens"],
)
def test_the_end_of_the_run_is_the_end_of_time(bound: dict[str, int], seconds: float | None) -> None:
    sites = (FleetSite(step_s=1.0, rtt_s=0.1), FleetSite(step_s=1.3, rtt_s=0.1))
    found = checked(fleet(sites, seconds=seconds, **bound))
    assert 600 < found.seconds < 650
    assert found.goodput > 0.98, "nobody waits when the run is over"
    for site in found.sites:
        assert site.tokens_merged == site.steps, "the last round takes what was unsent"


def test_a_site_that_is_away_at_the_end_holds_nobody_up_for_longer_than_the_last_round_may_wait() -> None:
    sites = (FleetSite(step_s=1.0), FleetSite(step_s=1.0, planned=((500.0, 5000.0),)))
    plan = fleet(sites, seconds=None, run_ns=600 * SECOND_NS, site_timeout_ns=10**15, final_wait_ns=30 * SECOND_NS)
    found = checked(plan)
    assert found.seconds == pytest.approx(630, abs=1)
    assert found.sites[0].waited_s == pytest.approx(30, abs=1)


def test_a_run_that_never_ends_says_so_and_leaves_pythons_collector_as_it_was() -> None:
    before = gc.get_threshold()
    assert before[0] != COLLECT_EVERY, "an earlier run has left it changed"
    plan = fleet((FleetSite(step_s=1.0),), seconds=None, quorum=2, token_budget=1000)
    with pytest.raises(EndlessError, match="no version in the last 24 h, and 0 of 1000 tokens are merged"):
        simulate(plan)
    never = FleetSite(step_s=1.0, starts_s=inf)
    with pytest.raises(EndlessError, match="no version in the last 24 h, and no site has joined"):
        simulate(fleet((never,), seconds=None, run_ns=600 * SECOND_NS))
    assert gc.get_threshold() == before


# --- What goes wrong at its time, and to several sites at once --------------------------------------------------------

TIMEOUT_NS = 15 * SECOND_NS


def with_fault(fault: FleetFault, sites: int = 2, starts_s: float = 0.0, **rules: object) -> FleetPlan:
    each = (FleetSite(step_s=1.0, rtt_s=0.1), FleetSite(step_s=1.0, rtt_s=0.1, starts_s=starts_s))
    return replace(fleet(each[:sites], site_timeout_ns=TIMEOUT_NS, **rules), faults=(fault,))


@pytest.mark.parametrize(
    ("when", "away_s"),
    [({"at_s": 900.0, "lasts_s": 300.0}, 300), ({"at_share": 0.25, "lasts_s": 300.0}, 300), ({"at_s": 600.0}, 3000)],
    ids=["at a time", "at a share of the run", "for good"],
)
def test_a_killed_site_is_away_for_its_time_and_the_other_goes_on(when: dict[str, float], away_s: float) -> None:
    found = checked(with_fault(FleetFault(kind="away", site=1, **when)))
    assert [site.away_s for site in found.sites] == [0.0, pytest.approx(away_s, abs=1)]
    assert found.sites[0].trained_s > HOUR_S - 1
    assert found.sites[1].steps == pytest.approx(HOUR_S - away_s, abs=3)
    assert found.sites[1].rounds == pytest.approx((HOUR_S - away_s) / 24, abs=2)


def test_behind_a_cut_link_a_site_trains_on_and_its_updates_come_late() -> None:
    found = checked(with_fault(FleetFault(kind="cut", site=1, at_s=1000.0, lasts_s=1000.0), quorum="all"))
    assert found.sites[1].steps == pytest.approx(3600, abs=2), "it never waits for the syncer"
    # Once it has been silent for its lease the rounds go on without it; of what it made, its window holds two.
    assert found.sites[0].rounds == pytest.approx(150, abs=3)
    assert found.sites[1].rounds == pytest.approx((3600 - 1000) / 24, abs=4)
    assert found.sites[1].tokens_merged > 3500, "and nothing of it is lost"


def test_a_site_whose_link_is_cut_before_its_join_crosses_it_joins_after_that() -> None:
    found = simulate(with_fault(FleetFault(kind="cut", site=1, at_s=999.0, lasts_s=60.0), starts_s=1000.0))
    assert found.sites[1].steps == pytest.approx(3600 - 1060, abs=3)
    assert found.sites[1].waited_s == pytest.approx(59.5, abs=1)


def test_a_syncer_that_does_nothing_holds_back_versions_and_nobody_who_trains() -> None:
    fault = FleetFault(kind="pause", site=None, at_s=1000.0, lasts_s=600.0)
    calm, plan = with_fault(replace(fault, at_s=10 * HOUR_S)), with_fault(fault)
    found = checked(plan)
    assert all(site.trained_s > HOUR_S - 1 for site in found.sites)
    assert sum(simulate(calm).versions) - sum(found.versions) == pytest.approx(2 * 600 / 24 - 2, abs=5)
    waits = simulate(with_fault(fault, **LOCK_STEP))
    assert all(500 < site.waited_s < 800 for site in waits.sites)


@pytest.mark.parametrize(("kind", "lasts_s"), [("pause", 600.0), ("down", 900.0)])
def test_for_a_syncer_that_is_not_there_the_time_of_the_run_stands_still(kind: str, lasts_s: float) -> None:
    fault = FleetFault(kind=kind, site=None, at_s=200.0, lasts_s=300.0)
    found = simulate(with_fault(fault, seconds=None, run_ns=600 * SECOND_NS))
    assert found.seconds == pytest.approx(lasts_s, abs=3)


def test_a_site_may_come_late_or_leave_for_good() -> None:
    late = simulate(with_fault(FleetFault(kind="start", site=1, at_s=1600.0), starts_s=float("inf")))
    assert late.sites[1].steps == pytest.approx(2000, abs=3)
    assert late.sites[1].waited_s < 1, "it was not there before"
    left = simulate(with_fault(FleetFault(kind="leave", site=1, at_s=1600.0)))
    assert left.sites[1].steps == left.sites[1].tokens_merged == pytest.approx(1600, abs=3)
    assert left.sites[1].waited_s < 1, "and is gone afterwards"


def test_the_sites_of_a_region_fail_together_and_the_others_do_not() -> None:
    site = FleetSite(step_s=1.0, rtt_s=0.1)
    region = Region(sites=(0, 2), interruptions_per_s=1 / 500, away_s=60.0)
    plan = replace(fleet((site,) * 3, seconds=5 * HOUR_S), regions=(region,))
    found = checked(plan)
    assert [each.away_s for each in found.sites] == [found.sites[2].away_s, 0.0, found.sites[0].away_s]
    assert found.sites[0].interruptions == pytest.approx(36, abs=15)
    # Interruptions that come while the sites are away are part of the same one.
    assert found.sites[0].away_s / found.seconds == pytest.approx(60 / 560, abs=0.04)


# --- What a link brings, against sums made by hand -------------------------------------------------------------------

MBPS = 8e-3  # 1000 bytes, an update of ``fleet``, take a second
HALF_NS = SECOND_NS // 10


def test_what_has_no_bound_takes_no_time_and_many_differences_never_more_than_all_of_it() -> None:
    assert (carry_ns(1000, 0.0), carry_ns(1000, MBPS)) == (0, SECOND_NS)
    plan = fleet((FleetSite(step_s=1.0),))
    assert [fetch_bytes(plan, 0, have, 9) for have in (-1, 0, 7, 8)] == [8000, 8000, 2000, 1000]


def test_versions_come_one_after_the_other_and_what_comes_together_is_fetched_together() -> None:
    published = [[0]]
    arrivals = Arrivals(fleet((FleetSite(step_s=1.0),)), published, HALF_NS, MBPS)
    for tenths in (10, 13, 18, 60):
        published[0].append(tenths * SECOND_NS // 10)
        arrivals.published(0)
    # Version 1 is heard of at 1.1 s, asked for until 1.2, carried until 2.2, here at 2.3; 2 and 3 wait for that.
    assert arrivals.newest(0, 22 * SECOND_NS // 10) == (0, 0)
    assert arrivals.newest(0, 23 * SECOND_NS // 10) == (23 * SECOND_NS // 10, 1)
    assert arrivals.newest(0, 44 * SECOND_NS // 10) == (23 * SECOND_NS // 10, 1)
    assert arrivals.newest(0, 45 * SECOND_NS // 10) == (45 * SECOND_NS // 10, 3)
    assert arrivals.newest(0, 100 * SECOND_NS) == (73 * SECOND_NS // 10, 4)


def test_fragments_share_the_link_in_the_order_of_asking() -> None:
    published = [[0], [0]]
    arrivals = Arrivals(fleet((FleetSite(step_s=1.0),), fragments=2), published, 0, MBPS)
    for fragment in (1, 0):
        published[fragment].append(SECOND_NS + 1 - fragment)
        arrivals.published(fragment)
    assert arrivals.newest(1, 10 * SECOND_NS) == (2 * SECOND_NS, 1)
    assert arrivals.newest(0, 10 * SECOND_NS) == (3 * SECOND_NS, 1)


# --- Regions: what their sites make goes up by the rules of a run, and the books of both levels balance ---------------

ONE_BY_ONE = {"round_updates": 1, "staleness_max": 30}
UPDATES = 4


def region(*, fragments: int = 1, below: FleetPlan | None = None, **link: float) -> FleetSite:
    """Two sites, one half as fast as the other, that make an update every eight steps."""
    sites = (FleetSite(step_s=1.0), FleetSite(step_s=2.0))
    plan = below or fleet(sites, fragments=fragments, inner_steps=8, seconds=None, **ONE_BY_ONE)
    return FleetSite(step_s=0.0, region=RegionPlan(plan=plan, updates=UPDATES, alpha=0.25), **link)


def tree(*regions: FleetSite, fragments: int = 1, **plan: object) -> FleetPlan:
    return fleet(regions, fragments=fragments, **{**ONE_BY_ONE, **plan})  # type: ignore[arg-type]


@pytest.mark.parametrize("fragments", [1, 3])
def test_of_so_many_merged_updates_one_goes_up(fragments: int) -> None:
    plan = tree(region(fragments=fragments), region(fragments=fragments), fragments=fragments, seconds=1200.0)
    found = simulate(plan)
    assert found.goodput == pytest.approx(1.0)
    for site in found.sites:
        assert site.region is not None
        assert [each.steps for each in site.region.sites] == [1200, 600]
        assert site.rounds == pytest.approx(site.region.site_rounds / UPDATES, abs=2 * fragments)
        assert site.bytes_up == pytest.approx(1000 * site.rounds, abs=2000 * fragments)
        # The region's versions hold its own updates, and those from above that its own were answered with.
        assert sum(site.region.versions) > site.region.site_rounds
    assert found.site_rounds == sum(site.rounds + site.region.site_rounds for site in found.sites if site.region)
    assert sum(found.versions) == sum(site.rounds for site in found.sites)


def test_the_end_of_the_run_above_is_that_of_its_regions_and_nothing_is_lost() -> None:
    plan = tree(region(rtt_s=0.2), region(rtt_s=1.0), seconds=None, token_budget=3000, final_wait_ns=100 * SECOND_NS)
    world = Fleet(plan)
    world.heap.run_until(7200 * SECOND_NS, world.is_over)
    assert world.is_over()
    assert world.machine.state.run_tokens() >= 3000
    for each in world.sites:
        assert isinstance(each, RegionalSyncer)
        state = each.below.machine.state
        assert state.phase is Phase.ENDED
        assert all(site.machine.state.left for site in each.below.sites if not isinstance(site, RegionalSyncer))
        told = standing(state)
        assert told is not None
        books = told.ledger
        assert books.balanced()
        assert books.processed == state.run_tokens() > 0
        assert books.lost == books.refused == books.unsent == 0
        # What is in flight at goodbye is what came last, and the one above has it.
        merged = sum(line.tokens_merged for line in world.machine.state.sites[each.name].lines)
        assert merged == books.merged + books.in_flight


def test_a_far_link_above_holds_up_no_site_of_a_region_or_beside_it_and_bounds_what_crosses_it() -> None:
    # An update of 1000 bytes takes 80 s.
    found = simulate(tree(region(up_mbps=1e-4, rtt_s=5.0), region(), FleetSite(step_s=1.0)))
    assert len(found.training()) == 5
    assert found.goodput == pytest.approx(1.0)
    far, near, alone = found.sites
    assert 3600 / 80 - 5 < far.rounds <= 3600 / 80
    assert near.rounds > 2 * far.rounds
    assert (alone.region, alone.steps) == (None, 3600)


def test_what_fails_fails_in_each_region_by_itself() -> None:
    failing = replace(FleetSite(step_s=1.0), interruptions_per_s=0.02, away_s=3.0)
    each = region(below=fleet((failing, failing), inner_steps=8, seconds=None, **ONE_BY_ONE))
    plan = tree(each, each, seconds=1200.0)
    found = simulate(plan)
    times = [site.away_s for one in found.sites if one.region for site in one.region.sites]
    assert min(times) > 0
    assert len(set(times)) == 4
    assert simulate(plan) == found, "the same plan is the same to the last figure"


# --- A site that is told of versions only when it has an update to make decides as one told at once -------------------

Made = list[tuple[int, str, int, int, int, int]]


def made_in(plan: FleetPlan, monkeypatch: pytest.MonkeyPatch, *, at_once: bool) -> tuple[Made, Fleet]:
    """Every update that is made: when, by whom, of what, from which version, of how many steps."""
    made: Made = []
    seal, train = Site._seal, Site._train

    def noted(self: Site, effect: fx.Seal) -> None:
        made.append((self.heap.now_ns, self.name, effect.fragment, effect.sequence, effect.base_version, effect.steps))
        seal(self, effect)

    def listening(self: Site) -> None:
        train(self)
        self.fleet.resting[self.index] = self

    with monkeypatch.context() as patched:
        patched.setattr(Site, "_seal", noted)
        if at_once:
            patched.setattr(Site, "_train", listening)
            patched.setattr(Site, "told_in_passing", Site.told)
        world = Fleet(plan)
        assert plan.seconds is not None
        world.heap.run_until(to_ns(plan.seconds), world.is_over)
        world.result()
    return sorted(made), world


@pytest.mark.parametrize(("adopt", "fragments"), [("rebase", 1), ("rebase", 3), ("eager", 3)])
def test_a_site_that_looks_later_makes_the_same_updates(
    adopt: str, fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = tuple(
        FleetSite(step_s=step_s, rtt_s=0.2137, up_mbps=0.05, down_mbps=0.05, interruptions_per_s=fails, away_s=7.3)
        for step_s, fails in ((1.0, 0.0), (1.3, 1 / 200), (2.1, 0.0))
    )
    plan = fleet(sites, fragments=fragments, learner={"adopt": adopt}, seconds=1800.0, staleness_max=20)
    (later, one), (at_once, other) = (made_in(plan, monkeypatch, at_once=which) for which in (False, True))
    assert len(later) > 100
    assert later == at_once
    for site, same in zip(one.sites, other.sites, strict=True):
        assert site.account.bytes_up == same.account.bytes_up
        assert site.account.bytes_down == pytest.approx(same.account.bytes_down, rel=0.05), "what nobody looked at yet"


def test_the_word_of_the_end_comes_after_what_was_trained_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last update of each fragment; it once made one of the steps before the last adopt and another of the rest."""
    sites = (FleetSite(step_s=1.0, rtt_s=0.1), FleetSite(step_s=1.3, rtt_s=0.1), FleetSite(step_s=1.7, rtt_s=0.1))
    plan = fleet(sites, fragments=4, learner={"adopt": "overwrite"}, seconds=700.0, run_ns=to_ns(600.0))
    made, _ = made_in(plan, monkeypatch, at_once=False)
    last = [(name, fragment) for now_ns, name, fragment, *_ in made if now_ns > to_ns(600.0)]
    assert len(last) == len(set(last)) > 6


def test_every_version_crosses_the_link_of_a_site_that_is_there() -> None:
    plan = fleet((FleetSite(step_s=1.0, rtt_s=0.1),) * 3, fragments=2)
    world = Fleet(plan)
    world.heap.run_until(to_ns(1800.0), world.is_over)
    versions = sum(world.result().versions)
    for site in world.sites:
        assert site.account.bytes_down == pytest.approx(2 * 8000 + versions * 1000, abs=4000)
