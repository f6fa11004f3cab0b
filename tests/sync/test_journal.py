"""The journal: what a crash cuts short is cut off, what is damaged is found, what is replayed is the same."""

from __future__ import annotations

import hashlib
import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from diloco.sync import events as ev
from diloco.sync.effects import Contribution, Note, StartOuterStep, UpdateRef
from diloco.sync.journal import (
    FRAME_1,
    RECORD_BYTES_MAX,
    JournalError,
    Record,
    canonical,
    describe,
    digest_effects,
    read_records,
    to_plain,
)
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync, replay
from tests.sync.driving import Syncer, through_json
from tests.sync.format_1 import encode_record

if TYPE_CHECKING:
    from collections.abc import Sequence


def a_run() -> Syncer:
    syncer = Syncer(quorum=2, grace="fixed")
    for site in ("a", "b", "c"):
        syncer.join(site, at_s=1)
    syncer.push("a", at_s=2)
    syncer.push("b", at_s=3)
    syncer.deadline()
    syncer.push("c", at_s=4.5)
    syncer.done(at_s=5)
    syncer.handle(ev.SiteSilent("b"), 6)
    syncer.handle(ev.DrainRequested(1), 7)
    return syncer


def written(records: Sequence[Record]) -> list[bytes]:
    return [encode_record(record) for record in records]


def test_what_is_written_is_read() -> None:
    records = a_run().records
    assert read_records(b"".join(written(records))) == (records, sum(map(len, written(records))))
    assert read_records(b"") == ([], 0)


def test_torn_tail_is_cut_at_every_byte() -> None:
    records = a_run().records
    *whole, last = written(records)
    data = b"".join(whole)
    for kept in range(len(last)):
        assert read_records(data + last[:kept]) == (records[:-1], len(data)), f"{kept} bytes of the last record"


@pytest.mark.parametrize("zeros", [1, 7, 8, 9, 4096])
def test_tail_of_zeros_is_cut(zeros: int) -> None:
    """A power cut can leave a file longer than what was written to it."""
    records = a_run().records
    *whole, last = written(records)
    data = b"".join(whole)
    assert read_records(data + last + bytes(zeros)) == (records, len(data + last))
    assert read_records(data + last[:20] + bytes(zeros)) == (records[:-1], len(data))


def test_a_flipped_bit_in_any_byte_before_the_tail_is_found() -> None:
    *whole, last = written(a_run().records)
    data, swallowed = b"".join(whole), []
    bits = range(0, 8 * len(data), 7)
    for bit in bits:
        damaged = bytearray(data + last)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            read_records(bytes(damaged))
        except JournalError:
            continue
        swallowed.append(bit)
    assert not swallowed, f"{len(swallowed)} of {len(bits)} flips pass for a torn end, the first is bit {swallowed[0]}"


def test_many_bytes_that_are_no_record_are_damage() -> None:
    data = encode_record(a_run().records[0])
    with pytest.raises(JournalError, match=f"from byte {len(data)} on"):
        read_records(data + b"\xff" * (FRAME_1.size + RECORD_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b"\xff",
        b'{"at_ns":1,"effects":"","event":"Gone","is":{}}',
        b'{"at_ns":1,"effects":"","event":"SiteHeard","is":{}}',
        b'{"at_ns":1,"effects":"","event":"SiteHeard","is":{"site":"a","more":1}}',
        b'{"at_ns":1.5,"effects":"","event":"SiteHeard","is":{"site":"a"}}',
        b'{"at_ns":1,"effects":2,"event":"SiteHeard","is":{"site":"a"}}',
    ],
)
def test_record_of_another_version_is_named_by_its_offset(body: bytes) -> None:
    first = encode_record(a_run().records[0])
    with pytest.raises(JournalError, match=f"byte {len(first)}"):
        read_records(first + FRAME_1.pack(len(body), zlib.crc32(body)) + body)


def test_replay_gives_the_same_memory_bit_for_bit() -> None:
    syncer = a_run()
    records, _ = read_records(b"".join(written(syncer.records)))
    machine = OuterSync(syncer.options)
    replayed = list(replay(machine, records))
    assert [record for record, _ in replayed] == syncer.records
    assert machine.snapshot() == syncer.machine.snapshot()


def test_replay_from_any_snapshot_gives_the_same_memory() -> None:
    syncer = a_run()
    for cut in range(len(syncer.records)):
        machine = OuterSync(syncer.options)
        list(replay(machine, syncer.records[:cut]))
        machine = OuterSync.restore(syncer.options, through_json(machine.snapshot()))
        list(replay(machine, syncer.records[cut:]))
        assert machine.snapshot() == syncer.machine.snapshot(), f"snapshot after record {cut}"


def test_other_options_are_noticed_at_the_first_record_that_differs() -> None:
    syncer = a_run()
    first = next(number for number, record in enumerate(syncer.records) if isinstance(record.event, ev.UpdateArrived))
    with pytest.raises(JournalError, match=rf"record {first} \(UpdateArrived at 2000000000 ns\)"):
        list(replay(OuterSync(OuterOptions(quorum=1, grace="fixed")), syncer.records))


def test_replay_of_shuffled_records_is_noticed() -> None:
    syncer = a_run()
    shuffled = [Record(0, record.event, record.effects_digest) for record in syncer.records]
    random.Random(3).shuffle(shuffled)
    with pytest.raises((JournalError, AssertionError, KeyError)):
        list(replay(OuterSync(syncer.options), shuffled))


def test_description_is_one_line_with_the_facts() -> None:
    record = next(record for record in a_run().records if isinstance(record.event, ev.UpdateArrived))
    line = describe(record)
    assert "\n" not in line
    for fact in ("2.000000", "UpdateArrived", "site=a", "sequence=1", "tokens=100", record.effects_digest):
        assert fact in line


def test_how_a_note_is_worded_is_no_decision() -> None:
    note = Note("evicted", "an operator's word", "a")
    assert digest_effects([note]) == digest_effects([replace(note, why="said by hand")])
    assert digest_effects([note]) != digest_effects([replace(note, what="held")])
    assert digest_effects([note]) != digest_effects([replace(note, site="b")])
    assert digest_effects([note]) != digest_effects([])


def test_19_a_whole_step_is_told_as_it_was_before_there_were_shares() -> None:
    step = StartOuterStep(1, 7, (Contribution("a", 1.0, 6, (UpdateRef(3, "p", "int4", "d"),)),))
    assert digest_effects([step]) == "6190a878554b89b3"
    assert digest_effects([replace(step, share=0.5)]) != digest_effects([step])


def test_a_journal_whose_digests_cover_the_words_is_read_as_well() -> None:
    syncer = a_run()
    worded = []
    machine = OuterSync(OuterOptions(quorum=2, grace="fixed"))
    for record, effects in replay(machine, syncer.records):
        plain = [(type(effect).__name__, to_plain(effect)) for effect in effects]
        named = [[name, {key: value for key, value in told.items() if key != "share"}] for name, told in plain]
        worded.append(replace(record, effects_digest=hashlib.sha256(canonical(named)).hexdigest()[:16]))
    assert worded != syncer.records, "there are notes in it"
    assert len(list(replay(OuterSync(OuterOptions(quorum=2, grace="fixed")), worded))) == len(worded)
