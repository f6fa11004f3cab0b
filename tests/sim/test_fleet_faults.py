"""What goes wrong at its time, and to several sites at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.sim.fleet import simulate
from diloco.sim.fleet_plan import FleetFault, FleetPlan, Region
from diloco.sim.fleet_site import Arrivals, carry_ns, fetch_bytes
from diloco.sync.options import SECOND_NS
from tests.sim.test_fleet import FleetSite, check, fleet

HOUR_S = 3600.0
TIMEOUT_NS = 15 * SECOND_NS


def with_fault(fault: FleetFault, sites: int = 2, starts_s: float = 0.0, **rules: object) -> FleetPlan:
    each = (FleetSite(step_s=1.0, rtt_s=0.1), FleetSite(step_s=1.0, rtt_s=0.1, starts_s=starts_s))
    return replace(fleet(each[:sites], site_timeout_ns=TIMEOUT_NS, **rules), faults=(fault,))


@pytest.mark.parametrize("when", [{"at_s": 900.0}, {"at_share": 0.25}])
def test_a_killed_site_is_away_for_its_time_and_the_other_goes_on(when: dict[str, float]) -> None:
    plan = with_fault(FleetFault(kind="away", site=1, lasts_s=300.0, **when))
    found = simulate(plan)
    check(plan, found)
    assert [site.away_s for site in found.sites] == [0.0, pytest.approx(300.0)]
    assert found.sites[0].trained_s > HOUR_S - 1
    assert found.sites[1].steps == pytest.approx(3300, abs=3)
    assert found.sites[1].rounds == pytest.approx(3300 / 24, abs=2)


def test_a_site_that_is_killed_for_good_does_not_come_back() -> None:
    found = simulate(with_fault(FleetFault(kind="away", site=1, at_s=600.0)))
    assert found.sites[1].away_s == pytest.approx(3000, abs=1)
    assert found.sites[1].steps == pytest.approx(600, abs=2)


def test_behind_a_cut_link_a_site_trains_on_and_its_updates_come_late() -> None:
    plan = with_fault(FleetFault(kind="cut", site=1, at_s=1000.0, lasts_s=1000.0), quorum="all")
    found = simulate(plan)
    check(plan, found)
    assert found.sites[1].steps == pytest.approx(3600, abs=2), "it never waits for the syncer"
    # Once it has been silent for its lease the rounds go on without it; of what it made, its window holds two.
    assert found.sites[0].rounds == pytest.approx(150, abs=3)
    assert found.sites[1].rounds == pytest.approx((3600 - 1000) / 24, abs=4)
    assert found.sites[1].tokens_merged > 3500, "and nothing of it is lost"


def test_a_syncer_that_does_nothing_holds_back_versions_and_nobody_who_trains() -> None:
    fault = FleetFault(kind="pause", site=None, at_s=1000.0, lasts_s=600.0)
    calm, plan = with_fault(replace(fault, at_s=10 * HOUR_S)), with_fault(fault)
    found = simulate(plan)
    check(plan, found)
    assert all(site.trained_s > HOUR_S - 1 for site in found.sites)
    assert sum(simulate(calm).versions) - sum(found.versions) == pytest.approx(2 * 600 / 24 - 2, abs=5)
    lock_step = {"lock_step": True, "updates_in_flight_max": 1, "adopt": "overwrite"}
    waits = simulate(with_fault(fault, quorum="all", updates_in_flight_max=1, learner=lock_step))
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
    found = simulate(plan)
    check(plan, found)
    assert [each.away_s for each in found.sites] == [found.sites[2].away_s, 0.0, found.sites[0].away_s]
    assert found.sites[0].interruptions == pytest.approx(36, abs=15)
    # Interruptions that come while the sites are away are part of the same one.
    assert found.sites[0].away_s / found.seconds == pytest.approx(60 / 560, abs=0.04)
    short = replace(plan, seconds=HOUR_S)
    assert simulate(short) == simulate(short)


# --- What a link brings, against sums made by hand -------------------------------------------------------------------

MBPS = 8e-3  # 1000 bytes, an update of ``fleet``, take a second
HALF_NS = SECOND_NS // 10


def test_what_has_no_bound_takes_no_time() -> None:
    assert (carry_ns(1000, 0.0), carry_ns(1000, MBPS)) == (0, SECOND_NS)


def test_many_differences_are_never_more_than_all_of_it() -> None:
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
