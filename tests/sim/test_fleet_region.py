"""Regions of a fleet: what their sites make goes up by the rules of a run, and the books of both levels balance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.sim.fleet import Fleet, RegionalSyncer, simulate
from diloco.sim.fleet_plan import FleetPlan, FleetSite, RegionPlan
from diloco.sync.options import SECOND_NS
from diloco.sync.region import standing
from diloco.sync.state import Phase
from tests.sim.test_fleet import fleet

ONE_BY_ONE = {"round_updates": 1, "staleness_max": 30}
UPDATES = 4


def region(*, fragments: int = 1, below: FleetPlan | None = None, **link: float) -> FleetSite:
    """Two sites, one half as fast as the other, that make an update every eight steps."""
    sites = (FleetSite(step_s=1.0), FleetSite(step_s=2.0))
    plan = below or fleet(sites, fragments=fragments, inner_steps=8, seconds=None, **ONE_BY_ONE)
    return FleetSite(step_s=0.0, region=RegionPlan(plan=plan, updates=UPDATES, alpha=0.25), **link)


def tree(*regions: FleetSite, fragments: int = 1, **plan: object) -> FleetPlan:
    return fleet(regions, fragments=fragments, **{**ONE_BY_ONE, **plan})  # type: ignore[arg-type]


def ended(plan: FleetPlan) -> Fleet:
    world = Fleet(plan)
    world.heap.run_until(7200 * SECOND_NS, world.is_over)
    assert world.is_over()
    return world


def below(world: Fleet) -> list[RegionalSyncer]:
    return [site for site in world.sites if isinstance(site, RegionalSyncer)]


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
    world = ended(plan)
    assert world.machine.state.run_tokens() >= 3000
    for each in below(world):
        state = each.below.state
        assert state.phase is Phase.ENDED
        assert all(site.machine.state.left for site in each.below.sites if not isinstance(site, RegionalSyncer))
        told = standing(state)
        assert told is not None
        books = told.ledger
        assert books.processed == state.run_tokens() > 0
        parts = books.merged + books.refused + books.in_flight + books.unsent + books.overwritten + books.lost
        assert books.processed == parts
        assert books.lost == books.refused == books.unsent == 0
        # What is in flight at goodbye is what came last, and the one above has it.
        merged = sum(line.tokens_merged for line in world.state.sites[each.name].lines)
        assert merged == books.merged + books.in_flight


def test_a_far_link_above_holds_up_no_site_and_is_what_bounds_the_updates_that_cross_it() -> None:
    # An update of 1000 bytes takes 80 s.
    found = simulate(tree(region(up_mbps=1e-4, rtt_s=5.0), region()))
    assert found.goodput == pytest.approx(1.0)
    far, near = found.sites
    assert 3600 / 80 - 5 < far.rounds <= 3600 / 80
    assert near.rounds > 2 * far.rounds


def test_what_fails_fails_in_each_region_by_itself() -> None:
    failing = replace(FleetSite(step_s=1.0), interruptions_per_s=0.02, away_s=3.0)
    each = region(below=fleet((failing, failing), inner_steps=8, seconds=None, **ONE_BY_ONE))
    plan = tree(each, each, seconds=1200.0)
    found = simulate(plan)
    times = [site.away_s for one in found.sites if one.region for site in one.region.sites]
    assert min(times) > 0
    assert len(set(times)) == 4
    for one in found.sites:
        assert one.region is not None
        for site in one.region.sites:
            assert site.trained_s + site.away_s + site.waited_s == pytest.approx(found.seconds)
    assert simulate(plan) == found, "the same plan is the same to the last figure"


def test_a_site_may_stand_beside_a_region() -> None:
    found = simulate(tree(FleetSite(step_s=1.0), region()))
    assert len(found.training()) == 3
    assert found.goodput == pytest.approx(1.0)
    alone, through = found.sites
    assert (alone.region, alone.steps) == (None, 3600)
    assert through.rounds > 0
