"""Segments on disk: a torn end is cut, everything else that is not as written is named with file and offset."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from diloco.sync.events import JoinRequested
from diloco.sync.journal import FRAME, JournalError, Record, encode_record
from diloco.syncer.journal_files import JournalFiles


def record(number: int) -> Record:
    return Record(number, JoinRequested(number, f"site-{number}", "0123abcd"), "0" * 16)


def read(folder: Path, first: int = 1) -> list[Record]:
    with closing(JournalFiles(folder)) as journal:
        return journal.read(first)


def written(folder: Path, segments: int, each: int) -> list[Record]:
    journal, records = JournalFiles(folder), []
    for _ in range(segments):
        journal.rotate()
        for _ in range(each):
            records.append(record(len(records)))
            journal.append(records[-1])
    journal.flush()
    journal.close()
    return records


def test_what_was_appended_is_read_from_any_segment_on(tmp_path: Path) -> None:
    records = written(tmp_path, segments=3, each=4)
    journal = JournalFiles(tmp_path)
    assert journal.segments() == [1, 2, 3]
    assert journal.index == 3
    for first in (1, 2, 3):
        assert journal.read(first) == records[4 * (first - 1) :]
    journal.append(record(99))  # And it goes on at the end of the last one.
    journal.flush()
    assert read(tmp_path, 3)[-1] == record(99)
    journal.close()


def test_a_torn_end_is_cut_at_every_byte_and_written_over(tmp_path: Path) -> None:
    records = written(tmp_path, segments=1, each=3)
    path = tmp_path / "journal-000001.log"
    whole = path.read_bytes()
    last = len(encode_record(records[-1]))
    for cut in range(len(whole) - last, len(whole)):
        path.write_bytes(whole[:cut])
        journal = JournalFiles(tmp_path)
        assert journal.read(1) == records[:-1], cut
        assert path.stat().st_size == len(whole) - last
        journal.append(records[-1])
        journal.flush()
        journal.close()
        assert path.read_bytes() == whole, cut


def test_damage_before_the_end_is_named_with_file_and_offset(tmp_path: Path) -> None:
    records = written(tmp_path, segments=1, each=8)
    path = tmp_path / "journal-000001.log"
    whole = path.read_bytes()
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    starts = [0]
    for each in records:
        starts.append(starts[-1] + len(encode_record(each)))
    for _ in range(150):
        at, bit = dice.randrange(starts[-2]), dice.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        begin = max(start for start in starts if start <= at)
        with pytest.raises(JournalError, match=f"{path}.*byte {begin} ") as raised:
            read(tmp_path)
        assert path.stat().st_size == len(whole), (seed, at, bit, raised.value)


def test_a_segment_that_ends_in_a_torn_record_must_be_the_last(tmp_path: Path) -> None:
    written(tmp_path, segments=2, each=2)
    first = tmp_path / "journal-000001.log"
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(JournalError, match=f"{first} ends in the middle of a record at byte"):
        read(tmp_path)
    assert len(read(tmp_path, 2)) == 2


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_a_missing_segment_is_named_wherever_it_is_missing(tmp_path: Path, lost: int) -> None:
    written(tmp_path, segments=4, each=2)
    for index in range(lost, 5 if lost == 4 else lost + 1):
        (tmp_path / f"journal-{index:06d}.log").unlink()
    with pytest.raises(JournalError, match=f"journal-{lost:06d}.log is missing"):
        read(tmp_path, lost if lost == 4 else 1)


def test_a_journal_without_any_segment_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal-000001.log is missing"):
        read(tmp_path)


def test_nothing_is_durable_before_flush_and_everything_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JournalFiles(tmp_path)
    journal.rotate()
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle)))
    journal.append(record(1))
    journal.append(record(2))
    assert synced == []
    journal.flush()
    assert synced == [len(encode_record(record(1)) + encode_record(record(2)))]
    journal.close()


def test_a_segment_is_dropped_only_before_the_first_one_needed(tmp_path: Path) -> None:
    written(tmp_path, segments=4, each=1)
    journal = JournalFiles(tmp_path)
    journal.prune(0)
    assert journal.segments() == [1, 2, 3, 4]
    journal.prune(3)
    assert journal.segments() == [3, 4]
    journal.close()


def test_blank_means_that_no_byte_was_ever_written(tmp_path: Path) -> None:
    journal = JournalFiles(tmp_path)
    assert journal.is_blank()
    journal.rotate()
    assert journal.is_blank()
    journal.append(record(1))
    journal.flush()
    assert not journal.is_blank()
    journal.close()
    os.truncate(tmp_path / "journal-000001.log", FRAME.size - 1)
    with closing(JournalFiles(tmp_path)) as again:
        assert not again.is_blank()
