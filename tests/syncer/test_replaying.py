"""A replay from any snapshot: the same memory, the same bits, and words for whatever is not the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.outer.optimizer import OuterRule
from diloco.sync.journal import JournalError
from diloco.sync.syncer import OuterSync
from diloco.syncer.replaying import Replayer
from diloco.syncer.snapshots import Snapshot
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

    def replayer(self) -> Replayer:
        machine = OuterSync.restore(OUTER, self.first.state)
        return Replayer(machine, self.first.fragments, self.desk.store.spool, self.desk.rules, self.desk.store.lineages)


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
    held = replayer.values[0]
    assert held.version > 1
    header = replayer.holdings.choose(PullAsk(RUN, "a", 0, held.version - 1, 0, 0), (), replayer.machine.state).header
    assert (header.version, header.digest) == (held.version, held.digest)
    assert header.whole is (codec == "fp32"), "it keeps the down-links of the steps that it made"


def test_other_decisions_are_named_by_the_record_and_other_bits_by_the_version(tmp_path: Path) -> None:
    told = Told(tmp_path, 4)
    replayer = told.replayer()
    replayer.apply(told.records[0])
    with pytest.raises(JournalError, match=r"record 1 .* had effects 0123456789abcdef"):
        replayer.apply(replace(told.records[1], effects_digest="0123456789abcdef"))
    replayer = told.replayer()
    replayer.rule = OuterRule(replace(OPTIMIZER, lr=0.125))
    with pytest.raises(
        JournalError, match=r"version 1 of fragment \d was xxh3:\w{12} when it was published and is xxh3:\w{12}"
    ):
        told.replay(replayer)
