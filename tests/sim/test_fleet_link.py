"""What a link brings, against sums made by hand."""

from __future__ import annotations

from diloco.sim.fleet_site import Arrivals, carry_ns, fetch_bytes
from diloco.sync.options import SECOND_NS
from tests.sim.test_fleet import FleetSite, fleet

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
