"""A process that leads, and its lease; the simulated cluster is without faults but for the one that is shown."""

from __future__ import annotations

from diloco.sim.outer_process import LeaseHolder, OuterProcess
from diloco.sim.world import Direction
from tests.sim.small import Small, a_pair


def leading() -> tuple[Small, OuterProcess, LeaseHolder]:
    small = Small(replication=a_pair())
    small.run(3)
    outer = small.syncers.outer
    assert outer is not None
    assert outer.leadership is not None
    return small, outer, outer.leadership


def test_a_standby_that_has_everything_becomes_the_heir_and_is_taken_out_before_it_lacks_anything() -> None:
    small, outer, leadership = leading()
    assert leadership.machine.has_heir("q1")
    assert leadership.heir_is("q1") is None, "nobody else"
    assert leadership.heir_is("") is not None, "it stands there still"
    small.run(0.5)
    assert small.syncers.lease is not None
    assert outer.alive
    assert leadership.machine.has_heir("q1"), "it has everything again"


def test_who_cannot_renew_tells_nothing_and_goes_on_when_it_can() -> None:
    small, outer, leadership = leading()
    line = small.syncers.seats[0].line
    assert line is not None
    line.link.cut(*Direction)
    small.run(1.3)
    assert leadership.wanting() is not None
    assert leadership.machine.lost is None
    line.link.heal()
    small.run(0.6)
    assert (leadership.wanting(), outer.alive) == (None, True)


def test_who_was_frozen_for_longer_than_its_lease_ends_and_the_heir_leads() -> None:
    small, outer, leadership = leading()
    outer.freeze()
    small.run(3)
    outer.thaw()
    small.run(0.2)
    assert leadership.machine.lost is not None
    assert not outer.alive
    now = small.syncers.outer
    assert now is not None
    assert now.machine.state.epoch > leadership.epoch
