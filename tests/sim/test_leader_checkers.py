from __future__ import annotations

import pytest

from diloco.sim.checkers import Violation
from diloco.sim.site_checkers import OneLeader, Replicated
from diloco.sim.world import OuterPlan, OuterRule, Storage, Unit
from diloco.sync.effects import PublishVersion
from diloco.sync.events import StandbyAttached, StandbyDetached, SyncerStarted
from diloco.sync.journal import CHAIN_START, FRAME, encode_frame
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync
from tests.sim.small import a_pair

OPTIONS = OuterOptions(num_fragments=1)
PLAN = OuterPlan(OPTIONS, OuterRule(), replication=a_pair())


def of_epoch(epoch: int) -> OuterSync:
    machine = OuterSync(OPTIONS)
    machine.state.epoch = epoch
    return machine


def test_nobody_speaks_after_who_came_later() -> None:
    checker = OneLeader(PLAN)
    checker.told(of_epoch(2), None, [])
    with pytest.raises(Violation, match="tells something after"):
        checker.told(of_epoch(1), None, [])


def test_epochs_rise() -> None:
    checker = OneLeader(PLAN)
    checker.outer(0, SyncerStarted(2), [], of_epoch(2))
    with pytest.raises(Violation, match="came after"):
        checker.outer(0, SyncerStarted(2), [], of_epoch(2))


def test_a_version_has_one_digest() -> None:
    checker = OneLeader(PLAN)
    checker.told(of_epoch(1), b"", [PublishVersion(0, 1, "x")])
    checker.told(of_epoch(2), b"", [PublishVersion(0, 1, "x")])
    with pytest.raises(Violation, match="published as x and now as y"):
        checker.told(of_epoch(2), b"", [PublishVersion(0, 1, "y")])


def test_what_is_told_is_durable_at_the_standby() -> None:
    checker, storage = Replicated(PLAN), Storage()
    raw, chain = encode_frame(b"x\n", CHAIN_START)
    unit = Unit(FRAME, chain, raw, (1, len(raw)), ())
    storage.append("journal-000001", raw)
    with pytest.raises(Violation, match="not durable"):
        checker.replicated(storage, "journal-000001", unit)
    with pytest.raises(Violation, match="without the standby"):
        checker.told(of_epoch(1), chain, [])
    storage.sync("journal-000001")
    storage.sync_names()
    checker.replicated(storage, "journal-000001", unit)
    checker.resumed(storage, "journal-000001", chain)
    checker.told(of_epoch(1), chain, [])


def test_a_detached_standby_is_not_asked_for_from_the_word_on_until_it_is_attached() -> None:
    checker, machine = Replicated(PLAN), of_epoch(1)
    checker.stands_alone()
    checker.told(machine, b"1", [])
    checker.outer(0, StandbyDetached(1), [], machine)
    checker.outer(0, StandbyAttached("q"), [], machine)
    checker.told(machine, b"2", [])
    with pytest.raises(Violation, match="without the standby"):
        checker.told(machine, b"3", [])
    checker.stands_alone()
    checker.recovered(machine)
    with pytest.raises(Violation, match="without the standby"):
        checker.told(machine, b"4", [])
