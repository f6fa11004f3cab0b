from __future__ import annotations

from diloco.sim.outer_process import OuterProcess
from diloco.sim.standby_process import StandbyProcess
from tests.sim.small import Small, a_pair


def test_the_heir_takes_over_and_sites_find_it_and_the_old_syncer_comes_back_as_a_standby() -> None:
    small = Small(replication=a_pair(), site_timeout_ns=1_500_000_000)
    small.run(3)
    syncers = small.syncers
    first, second = syncers.seats
    before = small.versions()
    first.up = False
    syncers.kill(first)
    small.run(6)
    assert syncers.promotions == 1
    assert isinstance(second.process, OuterProcess)
    assert min(small.versions()) > max(before)
    syncers.bring_up(first)
    small.run(5)
    assert isinstance(first.process, StandbyProcess), "it does not win"
    assert (first.leads, syncers.caught_up()) == (False, True)


def test_a_syncer_that_is_soon_back_leads_again() -> None:
    small = Small(replication=a_pair())
    small.run(3)
    syncers = small.syncers
    syncers.kill(syncers.seats[0])
    small.run(5)
    assert syncers.promotions == 0
    outer = small.syncers.outer
    assert outer is not None
    assert outer.machine.state.epoch == 2
    assert syncers.caught_up()


def test_a_folder_may_be_lost_where_the_other_machine_has_what_was_told() -> None:
    small = Small(replication=a_pair())
    small.run(3)
    syncers = small.syncers
    first, second = syncers.seats
    assert syncers.may_be_lost(first)
    assert syncers.may_be_lost(second)
    syncers.lose(second)
    assert not syncers.may_be_lost(first) or syncers.lease is None or syncers.lease.heir != second.folder()
    small.run(8)
    assert (second.folder(), syncers.caught_up()) == ("q2", True)


def test_one_machine_needs_no_lease() -> None:
    small = Small()
    syncers = small.syncers
    assert (len(syncers.seats), syncers.lease, syncers.caught_up()) == (1, None, True)
    assert not syncers.may_be_lost(syncers.seats[0])
