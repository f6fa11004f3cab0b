"""A process that leads, and its lease; the simulated cluster is without faults but for the one that is shown."""

from __future__ import annotations

from diloco.sim.outer_process import OuterProcess
from diloco.sim.standby_process import Leadership
from diloco.sim.world import Direction
from tests.sim.small import Small, a_pair


def leading() -> tuple[Small, OuterProcess, Leadership]:
    small = Small(replication=a_pair())
    small.run(3)
    outer = small.cluster.outer
    assert outer is not None
    assert outer.leadership is not None
    return small, outer, outer.leadership


def test_a_standby_that_has_everything_becomes_the_heir_and_is_taken_out_before_it_lacks_anything() -> None:
    small, outer, leadership = leading()
    assert leadership.is_heir("q1")
    assert not leadership.may_inherit("q1"), "nobody else"
    assert leadership.may_inherit(""), "it stands there still"
    small.run(0.5)
    assert small.cluster.syncers.lease is not None
    assert outer.alive
    assert leadership.is_heir("q1"), "it has everything again"


def test_who_cannot_renew_tells_nothing_and_goes_on_when_it_can() -> None:
    small, outer, leadership = leading()
    line = small.cluster.syncers.seats[0].line
    assert line is not None
    line.link.cut(*Direction)
    small.run(1.3)
    assert leadership.wanting()
    assert not leadership.lost
    line.link.heal()
    small.run(0.6)
    assert (leadership.wanting(), outer.alive) == (False, True)


def test_who_was_frozen_for_longer_than_its_lease_ends_and_the_heir_leads() -> None:
    small, outer, leadership = leading()
    outer.freeze()
    small.run(3)
    outer.thaw()
    small.run(0.2)
    assert (leadership.lost, outer.alive) == (True, False)
    now = small.cluster.outer
    assert now is not None
    assert now.machine.state.epoch > leadership.epoch
