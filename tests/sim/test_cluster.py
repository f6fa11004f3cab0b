from __future__ import annotations

from tests.sim.small import Small


def test_versions_rise_without_faults() -> None:
    small = Small(sites=3)
    small.run(10)
    assert min(small.versions()) > 10
    assert small.cluster.restarts == 0


def test_twin_takes_over_and_the_old_process_ends() -> None:
    small = Small()
    small.run(3)
    old = small.process("a")
    small.cluster.twin_site("a")
    small.run(3)
    new = small.process("a")
    assert (old.alive, new.alive) == (False, True), "two processes speak for one site"


def test_evicted_site_is_not_started_again() -> None:
    small = Small()
    small.run(2)
    outer = small.syncers.outer
    assert outer is not None
    outer.ask(lambda: outer.evict("a"))
    small.run(3)
    site = small.cluster.sites["a"]
    assert (site.running(), site.wanted) == (False, False)
    assert "evicted" in site.why


def test_drained_run_ends_with_everybody_gone_and_goes_on_when_started_again() -> None:
    small = Small()
    small.run(3)
    outer = small.syncers.outer
    assert outer is not None
    outer.ask(outer.drain)
    small.run(10)
    assert small.syncers.ended()
    assert not any(site.running() for site in small.cluster.sites.values())
    before = small.versions()
    small.syncers.kill(small.syncers.seats[0])
    for name in small.cluster.sites:
        small.cluster.come_back(name)
    small.run(5)
    assert all(now > was for now, was in zip(small.versions(), before, strict=True))
