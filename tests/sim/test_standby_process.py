from __future__ import annotations

from random import Random

import pytest

from diloco.sim.outer_process import CrashPoint
from diloco.sim.standby_process import StandbyProcess
from tests.sim.small import Small, a_pair


@pytest.mark.parametrize("power", [pytest.param(False, marks=pytest.mark.slow), True], ids=["killed", "power cut"])
@pytest.mark.parametrize("point", CrashPoint)
def test_standby_that_dies_comes_back_and_has_everything(point: CrashPoint, power: bool) -> None:
    small = Small(replication=a_pair())
    small.run(1)
    syncers = small.syncers
    syncers.doom(syncers.seats[1], point, power=power)
    small.run(1)
    assert small.syncers.outer is not None
    small.syncers.outer.snapshot()
    small.run(2)
    of_the_syncer_only = point in (CrashPoint.AMONG_EFFECTS, CrashPoint.STEP_MADE)
    assert (syncers.restarts, syncers.caught_up()) == (int(not of_the_syncer_only), True), point


def test_its_journal_is_the_syncers_byte_for_byte_and_its_machine_is_warm() -> None:
    small = Small(replication=a_pair())
    small.run(4)
    first, second = small.syncers.seats
    name = first.disk.journal_name()
    there = second.disk.storage.read(name)
    assert len(there) > 1000
    assert first.disk.storage.read(name).startswith(there)
    assert isinstance(second.process, StandbyProcess)
    assert second.process.replayer is not None
    assert second.process.replayer.machine.state.fragments[0].version > 0


def test_parts_that_overtake_one_another_are_taken_in_order() -> None:
    small = Small(replication=a_pair())
    between = small.syncers.between
    assert between is not None
    between.weather.jitter_ns = 300_000_000
    between.weather.twice = 0.3
    small.run(10)
    assert small.syncers.restarts == 0
    assert min(small.versions()) > 3


def test_a_power_cut_of_the_standby_takes_nothing_that_it_acknowledged() -> None:
    small = Small(replication=a_pair())
    small.run(4)
    seat = small.syncers.seats[1]
    before = seat.disk.chain
    seat.disk.storage.power_cut(Random(1))
    seat.disk.recover()
    assert seat.disk.chain == before
