"""A replay from any snapshot: the same memory, the same bits, and words for whatever is not the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.outer.optimizer import OuterRule
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import OuterStepDone
from diloco.sync.journal import JournalError, Record
from diloco.sync.syncer import OuterSync
from diloco.syncer.outer_step import OuterResult
from diloco.syncer.replaying import Replayer
from diloco.syncer.snapshots import Snapshot
from diloco.syncer.spool import SpoolError
from diloco.wire.messages import PullAsk
from tests.syncer.building import RUN
from tests.syncer.desk import OPTIMIZER, OUTER, Desk
from tests.syncer.test_store import Story, assert_same


class Told:
    """A run of ``length`` events with the records since its first snapshot."""

    def __init__(self, folder: Path, seed: int, codec: str = "int8", length: int = 40) -> None:
        self.desk = Desk(folder, codec)
        self.first: Snapshot = self.desk.store.snapshots.load(1)
        self.desk.begin()
        story = Story(self.desk, seed)
        for _ in range(length):
            story.tell()
        self.desk.close()
        self.records = self.desk.store.journal.read(self.first.journal_segment)

    def replay(self, replayer: Replayer) -> Replayer:
        for record in self.records:
            replayer.apply(record)
        return replayer

    def replayer(self, kind: type[Replayer] = Replayer) -> Replayer:
        machine = OuterSync.restore(OUTER, self.first.state)
        return kind(machine, self.first.fragments, self.desk.store.spool, self.desk.rules, self.desk.store.lineages)


@pytest.mark.parametrize("codec", ["fp32", "int4:32+zstd1"])
def test_record_by_record_it_becomes_what_the_process_was(tmp_path: Path, codec: str) -> None:
    told = Told(tmp_path, random.Random(codec).randrange(1 << 20), codec)
    replayer = told.replayer()
    for number, record in enumerate(told.records, 1):
        replayer.apply(record)
        assert replayer.records == number
        versions = [fragment.version for fragment in replayer.machine.state.fragments]
        assert [values.version for values in replayer.values] == versions, "memory and values are of one instant"
    assert sum(versions) > 3, "no outer step: the dice prove nothing"
    again = Desk(tmp_path, codec)
    again.machine, again.values = replayer.machine, replayer.values
    assert_same(again, told.desk, codec)
    again.close()


def test_it_keeps_the_down_links_of_the_steps_that_it_made(tmp_path: Path) -> None:
    told = Told(tmp_path, 3)
    replayer = told.replayer()
    told.replay(replayer)
    held = replayer.values[0]
    assert held.version > 1
    ask = PullAsk(RUN, "a", 0, held.version - 1, 0, 0)
    header = replayer.holdings.choose(ask, (), replayer.machine.state).header
    assert (header.from_version, header.version, header.whole) == (held.version - 1, held.version, False)
    assert header.digest == held.digest


def test_other_decisions_are_named_by_the_record(tmp_path: Path) -> None:
    told = Told(tmp_path, 4)
    replayer = told.replayer()
    replayer.apply(told.records[0])
    with pytest.raises(JournalError, match=r"record 1 .* had effects 0123456789abcdef"):
        replayer.apply(replace(told.records[1], effects_digest="0123456789abcdef"))


def test_other_bits_are_named_by_the_version(tmp_path: Path) -> None:
    told = Told(tmp_path, 5)
    replayer = told.replayer()
    replayer.rule = OuterRule(replace(OPTIMIZER, lr=0.125))
    with pytest.raises(
        JournalError, match=r"version 1 of fragment \d was xxh3:\w{12} when it was published and is xxh3:\w{12}"
    ):
        told.replay(replayer)


def test_a_payload_that_is_gone_is_named(tmp_path: Path) -> None:
    told = Told(tmp_path, 6)
    for path in (tmp_path / "spool").glob("*/*.update"):
        path.unlink()
    replayer = told.replayer()
    with pytest.raises(SpoolError, match=r"\.update is missing"):
        told.replay(replayer)


class Idle(Replayer):
    """Makes every outer step of nothing: the version rises, the values stay."""

    def step(self, event: OuterStepDone, command: StartOuterStep) -> OuterResult:
        values = replace(self.values[event.fragment], version=command.version)
        return OuterResult(values, b"", "", 0.0, 0.0)


def test_other_numbers_may_be_put_under_the_same_decisions(tmp_path: Path) -> None:
    told = Told(tmp_path, 7)
    replayer = told.replayer(Idle)
    told.replay(replayer)
    assert replayer.machine.snapshot() == told.desk.machine.snapshot()
    assert [values.version for values in replayer.values] == [values.version for values in told.desk.values]
    assert [values.digest for values in replayer.values] == [values.digest for values in told.first.fragments]


def test_a_step_that_was_under_way_at_the_snapshot_is_known(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.begin()
    story = Story(desk, 8)
    while len(desk.under_way) < 2:
        story.tell()
    desk.snapshot()
    newest = desk.store.snapshots.load(max(desk.store.snapshots.numbers()))
    desk.finish(0)
    desk.finish(1)
    desk.close()
    records: list[Record] = desk.store.journal.read(newest.journal_segment)
    machine = OuterSync.restore(OUTER, newest.state)
    replayer = Replayer(machine, newest.fragments, desk.store.spool, desk.rules, desk.store.lineages)
    for record in records:
        replayer.apply(record)
    assert [values.digest for values in replayer.values] == [values.digest for values in desk.values]
