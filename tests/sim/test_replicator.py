"""What waits for a standby; the cluster is without faults but for the one that is shown."""

from __future__ import annotations

from diloco.sim.outer_process import OuterProcess, Replicator
from diloco.sim.world import Direction
from tests.sim.small import Small, a_pair


def a_leader(small: Small) -> tuple[OuterProcess, Replicator]:
    outer = small.syncers.outer
    assert outer is not None
    assert outer.replicator is not None
    return outer, outer.replicator


def test_nothing_is_told_while_the_standby_is_away_until_an_operator_detaches_it() -> None:
    small = Small(replication=a_pair())
    small.run(2)
    outer, replicator = a_leader(small)
    assert replicator.caught_up()
    between = small.syncers.between
    assert between is not None
    between.cut(*Direction)
    small.run(2)
    before = small.versions()
    assert not replicator.follows()
    small.run(2)
    assert small.versions() == before
    outer.deliver(outer.detach)
    small.run(3)
    assert sum(small.versions()) > sum(before)
    between.heal()
    small.run(3)
    assert replicator.caught_up(), "it is attached again"
    assert not outer.machine.state.detached


def test_async_goes_on_without_a_standby_that_is_away_once_that_is_the_heir_no_more() -> None:
    small = Small(replication=a_pair(mode="async"))
    small.run(2)
    outer, replicator = a_leader(small)
    assert replicator.caught_up()
    between, lease = small.syncers.between, small.syncers.lease
    assert between is not None
    assert lease is not None
    between.cut(*Direction)
    small.run(2.5)
    before = small.versions()
    small.run(2)
    assert sum(small.versions()) > sum(before)
    assert lease.standing is not None
    assert lease.standing.heir == ""
    between.heal()
    small.run(3)
    assert replicator.caught_up(), "it has everything again"
    assert not outer.machine.state.detached


def test_a_standby_whose_journal_was_left_behind_gets_a_new_folder() -> None:
    small = Small(replication=a_pair())
    small.run(2)
    outer, replicator = a_leader(small)
    between = small.syncers.between
    assert between is not None
    between.cut(*Direction)
    small.run(3)
    outer.deliver(outer.detach)
    for _ in range(4):
        small.run(3)
        outer.snapshot()
    between.heal()
    small.run(4)
    assert small.syncers.seats[1].folder() == "q2"
    assert replicator.caught_up()
