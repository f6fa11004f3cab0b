"""The note beside the journal: the newest whole one counts, and a journal that is shorter than it was cut off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.durable import PLAIN_DISK
from diloco.sync.journal import UNIT, JournalError
from diloco.syncer.journal_files import SLOT_BYTES, JournalEnd, JournalFiles, read_file
from tests.syncer.test_journal_files import record


def test_the_newest_note_counts_also_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.end"
    for end in range(1, 6):
        noted = JournalEnd(path, PLAIN_DISK)
        noted.write(3, end)
        noted.close()
        assert JournalEnd(path, PLAIN_DISK).read() == (3, end)
    noted.clear()
    assert JournalEnd(path, PLAIN_DISK).read() is None


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_note_that_is_not_whole_leaves_the_one_before_it(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal.end"
    noted = JournalEnd(path, PLAIN_DISK)
    for end in (10, 20, 30):
        noted.write(1, end)
    noted.close()
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[SLOT_BYTES + 9] ^= 4
    else:
        del data[SLOT_BYTES + 9 :]
    path.write_bytes(data)
    assert JournalEnd(path, PLAIN_DISK).read() == (1, 20)
    assert JournalEnd(path, PLAIN_DISK).damage() == [f"the note at byte {SLOT_BYTES} is not whole"]
    path.write_bytes(bytes(4))
    assert JournalEnd(path, PLAIN_DISK).read() is None


def a_journal(folder: Path, segments: int = 2) -> JournalFiles:
    journal = JournalFiles(folder)
    journal.begin()
    for index in range(segments):
        if index:
            journal.rotate()
        for number in range(3):
            journal.append([record(10 * index + number)])
            journal.flush()
    journal.close()
    return journal


def test_a_journal_that_is_cut_off_between_two_units_is_named(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    path = journal.path(2)
    found = read_file(path).found
    assert found is not None
    size = path.stat().st_size
    assert len(JournalFiles(tmp_path).read(1)) == 6
    os.truncate(path, size - UNIT.size)  # The last mark: it is not synced, and nothing is lost with it.
    assert len(JournalFiles(tmp_path).read(1)) == 6
    for frame in reversed(found.frames):
        os.truncate(path, frame.offset)
        with pytest.raises(JournalError, match=f"{path} ends at byte .* and its byte {size - UNIT.size} was"):
            JournalFiles(tmp_path).read(1)


def test_a_last_segment_that_is_gone_is_named(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    journal.path(2).unlink()
    with pytest.raises(JournalError, match=r"journal-000002\.log is missing, and its byte"):
        JournalFiles(tmp_path).read(1)


def test_what_was_never_acknowledged_is_not_missed(tmp_path: Path) -> None:
    """A frame that was written and not flushed has no note: it may go."""
    journal = a_journal(tmp_path, 1)
    whole = journal.path(1).stat().st_size
    journal = JournalFiles(tmp_path)
    journal.read(1)
    journal.take_over()
    journal.append([record(7)])
    journal.close()
    os.truncate(journal.path(1), whole)
    assert len(JournalFiles(tmp_path).read(1)) == 3


def test_without_a_note_a_journal_is_read_as_it_is(tmp_path: Path) -> None:
    """After a power cut, or where a folder was put together from a copy."""
    journal = a_journal(tmp_path)
    (tmp_path / "journal.end").unlink()
    os.truncate(journal.path(2), read_file(journal.path(2)).found.frames[-1].offset)  # type: ignore[union-attr]
    assert len(JournalFiles(tmp_path).read(1)) == 5


def test_a_journal_that_begins_anew_forgets_it(tmp_path: Path) -> None:
    a_journal(tmp_path)
    journal = JournalFiles(tmp_path)
    journal.begin()
    journal.close()
    assert JournalFiles(tmp_path).read(1) == []
