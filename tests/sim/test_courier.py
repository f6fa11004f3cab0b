from __future__ import annotations

from diloco.sim.world import Direction
from tests.sim.small import Small


def session(small: Small) -> object:
    return small.process("a").courier.session


def test_site_that_hears_nothing_breaks_off_and_joins_again_after_the_heal() -> None:
    small = Small(site_timeout_ns=3_000_000_000)
    small.run(1)
    first = session(small)
    assert first is not None
    small.cluster.sites["a"].sides[0].link.cut(Direction.DOWN)
    small.run(8)
    assert session(small) is None
    small.cluster.sites["a"].sides[0].link.heal()
    small.run(4)
    assert session(small) not in (None, first)


def test_site_joins_a_syncer_that_comes_up_late() -> None:
    small = Small()
    small.syncers.seats[0].restart_ns = 20_000_000_000
    small.syncers.kill(small.syncers.seats[0])
    small.run(19)
    assert session(small) is None
    small.run(5)
    assert session(small) is not None, "it asks for ever, with a capped back-off"


def test_site_that_is_asked_to_leave_says_goodbye() -> None:
    small = Small()
    small.run(2)
    site = small.cluster.sites["a"]
    small.process("a").ask_to_leave()
    small.run(3)
    assert (site.why, site.wanted, site.running()) == ("left", False, False)
