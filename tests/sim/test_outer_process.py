"""The simulated syncer and its standby; each cluster is without faults but for the one that is shown."""

from __future__ import annotations

from random import Random

import pytest

from diloco.sim.outer_disk import CrashPoint, journal_name
from diloco.sim.outer_process import HELD_AFTER_NS, INBOX_MAX
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.world import Direction
from diloco.sync.events import DrainRequested
from diloco.sync.options import SECOND_NS
from tests.sim.small import Small, a_pair
from tests.sooner import sooner


@pytest.mark.parametrize("power", sooner([False, True], True), ids=["killed", "power cut"])
@pytest.mark.parametrize("point", CrashPoint)
def test_syncer_that_dies_comes_back_and_goes_on(point: CrashPoint, power: bool) -> None:
    small = Small(1.5, site_timeout_ns=1_500_000_000)  # So reports are frequent and a dead syncer is soon noticed.
    before = small.versions()
    small.syncers.doom(small.syncers.seats[0], point, power=power)
    if point.value.startswith("snapshot"):
        small.outer.ask(small.outer.snapshot)
    small.run(4)
    assert (small.cluster.restarts, small.syncers.power_cuts) == (1, int(power)), point
    assert small.outer.machine.state.epoch == 2
    assert all(now > was for now, was in zip(small.versions(), before, strict=True)), (before, small.versions())


def test_payloads_go_with_the_snapshots_that_need_them() -> None:
    small = Small(8)
    for _ in range(3):
        small.outer.snapshot()
    undecided = sum(len(line.undecided) for site in small.outer.machine.state.sites.values() for line in site.lines)
    assert len(small.syncers.disk.storage.names("spool/")) == undecided


def test_rot_is_found_or_harmless() -> None:
    found = 0
    for seed in range(8):
        small = Small(2, sites=1)
        assert small.syncers.disk.storage.rot(Random(seed))
        small.syncers.kill(small.syncers.seats[0])
        small.run(2)
        assert small.syncers.outer is not None, seed
        found += small.syncers.damage_found
    assert found > 4


def test_the_sites_of_a_drained_run_have_ended_and_may_come_back() -> None:
    small = Small(3)
    small.outer.ask(lambda: small.outer.order(DrainRequested))
    small.run(10)
    assert not any(site.running() for site in small.cluster.sites.values())
    before = small.versions()
    small.syncers.kill(small.syncers.seats[0])
    for name in small.cluster.sites:
        small.cluster.come_back(name)
    small.run(5)
    assert all(now > was for now, was in zip(small.versions(), before, strict=True))


def test_machine_time_stands_still_while_no_process_lives() -> None:
    small = Small(2)
    before = small.outer.now_ns()
    small.syncers.seats[0].restart_ns = 50 * 1_000_000_000
    small.syncers.kill(small.syncers.seats[0])
    small.run(50)
    assert small.outer.now_ns() - before < 1_000_000_000


# --- A process that leads, and what waits for its standby -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nothing_is_told_without_the_standby_until_it_is_detached_or_no_heir_in_async(
    mode: str,
) -> None:
    small = Small(2, replication=a_pair(mode=mode))
    outer = small.outer
    assert small.syncers.caught_up()
    small.between.cut(*Direction)
    small.run(2.5)
    before = small.versions()
    small.run(2)
    if mode == "sync":
        assert small.versions() == before
        outer.deliver(outer.detach)
        small.run(3)
    else:
        assert small.lease.standing is not None
        assert small.lease.standing.heir == ""
    assert sum(small.versions()) > sum(before)
    small.between.heal()
    small.run(3)
    assert small.syncers.caught_up(), "it has everything again"
    assert not outer.machine.state.detached


def test_a_syncer_that_is_soon_back_leads_again() -> None:
    small = Small(3, replication=a_pair())
    small.syncers.kill(small.syncers.seats[0])
    small.run(5)
    assert (small.syncers.promotions, small.outer.machine.state.epoch) == (0, 2)
    assert small.syncers.caught_up()


def test_a_folder_may_be_lost_where_the_other_machine_has_what_was_told() -> None:
    alone = Small().syncers
    assert (len(alone.seats), alone.lease, alone.caught_up()) == (1, None, True)
    assert not alone.may_be_lost(alone.seats[0])
    small = Small(3, replication=a_pair())
    syncers = small.syncers
    first, second = syncers.seats
    assert syncers.may_be_lost(first)
    assert syncers.may_be_lost(second)
    syncers.lose(second)
    assert not syncers.may_be_lost(first) or small.lease.heir != second.folder()
    small.run(8)
    assert (second.folder(), syncers.caught_up()) == ("q2", True)


# --- The standby ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", sooner([False, True], True), ids=["killed", "power cut"])
@pytest.mark.parametrize("point", CrashPoint)
def test_standby_that_dies_comes_back_and_has_everything(point: CrashPoint, power: bool) -> None:
    small = Small(1, replication=a_pair())
    syncers = small.syncers
    syncers.doom(syncers.seats[1], point, power=power)
    small.run(1)
    small.outer.snapshot()
    small.run(2)
    of_the_syncer_only = point in (CrashPoint.AMONG_EFFECTS, CrashPoint.STEP_MADE)
    assert (syncers.restarts, syncers.caught_up()) == (int(not of_the_syncer_only), True), point


def test_a_standby_is_warm_and_has_the_journal_byte_for_byte_also_after_a_power_cut() -> None:
    small = Small(4, replication=a_pair())
    first, second = small.syncers.seats
    name = journal_name(first.disk.segment)
    there = second.disk.storage.read(name)
    assert len(there) > 1000
    assert first.disk.storage.read(name).startswith(there)
    assert isinstance(second.process, StandbyProcess)
    assert second.process.replayer is not None
    assert second.process.replayer.machine.state.fragments[0].version > 0
    acknowledged = second.disk.chain
    second.disk.storage.power_cut(Random(1))
    second.disk.recover()
    assert second.disk.chain == acknowledged


def test_what_arrives_while_a_turn_waits_makes_one_turn_and_the_inbox_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, holds, seen = Small(sites=0), True, list[str]()
    outer = small.outer
    monkeypatch.setattr(outer, "_must_wait", lambda turn: holds)
    monkeypatch.setattr(outer.checkers, "told", lambda *what: seen.append("turn"))

    def says(what: str) -> None:
        outer.pull("a", 0, 0, lambda answer: seen.append(what))

    for _ in range(2 * INBOX_MAX):
        outer.ask(lambda: says("x"))
    small.run(2 * HELD_AFTER_NS / SECOND_NS)
    outer.ask(lambda: says("late"))
    outer.own(lambda: says("own"))
    assert seen == []
    holds = False
    outer.deliver(outer.go_on)
    assert seen == ["turn", "x", "turn", *["x"] * INBOX_MAX, "own"]
