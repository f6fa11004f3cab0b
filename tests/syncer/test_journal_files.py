"""Segments on disk: a torn end is cut, everything else that is not as written is named with file and offset.

The note beside them: the newest whole one counts, and a journal that is shorter than it was cut off.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import pytest

from diloco.durable import PLAIN_DISK, Disk, DiskFullError, ReadingDisk, Step
from diloco.sync.events import JoinRequested
from diloco.sync.journal import CHAIN_START, FRAME_1, UNIT, JournalError, Record, Segment
from diloco.syncer.journal_files import SLOT_BYTES, JournalEnd, JournalFiles, Position, read_file
from tests.sync.format_1 import encode_record


def record(number: int) -> Record:
    return Record(number, JoinRequested(number, f"site-{number}", "0123abcd"), "0" * 16)


def put(journal: JournalFiles, *numbers: int) -> None:
    """A turn of these records, made durable."""
    journal.append([record(number) for number in numbers])
    journal.flush()


def begun(folder: Path, disk: Disk = PLAIN_DISK) -> JournalFiles:
    journal = JournalFiles(folder, disk=disk)
    journal.begin()
    return journal


def read(folder: Path, first: int = 1, chain: str = "") -> list[Record]:
    return JournalFiles(folder).read(first, chain)


def gone_on(folder: Path) -> list[str]:
    """What a process says that takes over and writes a turn."""
    journal = JournalFiles(folder)
    notes = journal.take_over()
    put(journal, 7)
    journal.close()
    return notes


def framed(path: Path) -> Segment:
    return read_file(path).found


def written(folder: Path, segments: int, each: int) -> tuple[list[Record], list[Position]]:
    """``each`` turns of one record in every segment."""
    journal, records, places = JournalFiles(folder), [], []
    for index in range(segments):
        places.append(journal.rotate() if index else journal.begin())
        for _ in range(each):
            put(journal, len(records))
            records.append(record(len(records)))
    journal.close()
    return records, places


def old_segment(path: Path, *numbers: int) -> None:
    """As a process of the version before wrote it."""
    path.write_bytes(b"".join(encode_record(record(number)) for number in numbers))


def test_what_was_appended_is_read_from_any_segment_on(tmp_path: Path) -> None:
    records, places = written(tmp_path, segments=3, each=4)
    journal = JournalFiles(tmp_path)
    copy = shutil.copy(journal.path(2), tmp_path / "journal-000002.bak.log")  # Somebody's, and none of the journal's.
    assert read_file(copy).records == records[4:8]
    assert journal.segments() == [1, 2, 3]
    for number, place in enumerate(places):
        assert journal.read(place.segment, place.chain) == records[4 * number :]
        assert journal.read(place.segment) == records[4 * number :]
    assert places[0].chain == CHAIN_START.hex()
    assert gone_on(tmp_path) == []
    assert read(tmp_path, 3, places[2].chain) == [*records[8:], record(7)], "at the end of the last one"


def test_an_end_that_was_not_acknowledged_is_cut_at_every_byte_and_written_over(tmp_path: Path) -> None:
    records, _ = written(tmp_path / "run", segments=1, each=3)
    path = tmp_path / "run" / "journal-000001.log"
    whole, last = path.read_bytes(), framed(path).frames[-1].offset
    (tmp_path / "run" / "journal.end").unlink()  # The note says that it was acknowledged: as if there were none.
    for cut in range(last, len(whole)):
        folder = tmp_path / str(cut)
        shutil.copytree(tmp_path / "run", folder)
        path = folder / path.name
        path.write_bytes(whole[:cut])
        kept = records if cut >= len(whole) - UNIT.size else records[:-1]
        assert read(folder) == kept, cut
        assert path.stat().st_size == cut, "reading changes nothing"
        is_between = cut in (last, len(whole) - UNIT.size)
        assert [str(path) in note and "cut off at byte" in note for note in gone_on(folder)] == [True] * (
            not is_between
        ), cut
        assert read(folder) == [*kept, record(7)], cut


def test_what_is_taken_over_is_durable_and_marked_before_it_is_gone_on_from(tmp_path: Path) -> None:
    """A whole frame that nobody was told of: from now on it counts, so it must not be lost and its damage must show."""
    written(tmp_path, segments=1, each=2)
    path = tmp_path / "journal-000001.log"
    whole = path.read_bytes()
    path.write_bytes(whole[: -UNIT.size])
    disk, done = Disk(), list[Step]()
    disk.reached = done.append  # type: ignore[method-assign]
    with closing(JournalFiles(tmp_path, disk=disk)) as journal:
        assert journal.take_over() == []
        assert path.read_bytes() == whole
        assert done[-8::2] == [Step.JOURNAL_SYNC, Step.JOURNAL_MARK, Step.JOURNAL_END, Step.JOURNAL_END]
        done.clear()
        journal.rotate()  # All of a segment is durable before the next one begins.
    assert done[::2] == [Step.JOURNAL_SYNC, *[Step.JOURNAL_BEGIN] * 4, Step.JOURNAL_MARK, Step.JOURNAL_END]


@pytest.mark.parametrize("size", [0, 3, 100])
def test_a_segment_that_its_maker_died_over_is_dropped_and_its_number_given_again(tmp_path: Path, size: int) -> None:
    for zeros in (False, True):
        folder = tmp_path / str(zeros)
        records, places = written(folder, segments=2, each=2)
        header = (folder / "journal-000002.log").read_bytes()[:size]
        (folder / "journal-000003.log").write_bytes(bytes(size) if zeros else header)
        assert read(folder) == records
        with pytest.raises(JournalError, match="has lost its header"):
            read(folder, 3, places[1].chain)  # A snapshot names it: it was written behind the header.
        assert len(gone_on(folder)) == (size > 0)
        assert JournalFiles(folder).segments() == [1, 2, 3]
        assert read(folder, 2, places[1].chain) == [*records[2:], record(7)]


@pytest.mark.parametrize(("lost", "first"), [((2,), 1), ((4,), 4), ((1, 2, 3, 4), 1)])
def test_a_missing_segment_is_named_and_a_torn_one_that_is_not_the_last(
    tmp_path: Path, lost: tuple[int, ...], first: int
) -> None:
    """A journal without any segment is not an empty one."""
    journal, _ = JournalFiles(tmp_path), written(tmp_path, segments=4, each=2)
    for index in lost:
        path = journal.path(index)
        path.write_bytes(path.read_bytes()[:-1])
        if index < 4:
            with pytest.raises(JournalError, match=f"{path} ends in the middle of a unit at byte"):
                read(tmp_path, index)
        path.unlink()
    with pytest.raises(JournalError, match=f"journal-{lost[0]:06d}.log is missing"):
        read(tmp_path, first)


def test_a_segment_from_elsewhere_is_not_taken_for_ours(tmp_path: Path) -> None:
    _, places = written(tmp_path / "run", segments=3, each=2)
    written(tmp_path / "other", segments=3, each=3)
    ours = tmp_path / "run" / "journal-000002.log"
    foreign, third = (tmp_path / "other" / ours.name).read_bytes(), (tmp_path / "run/journal-000003.log").read_bytes()
    for content, first, chain, words in (
        (foreign, 1, "", "does not continue the segment before it"),
        (foreign, 2, places[1].chain, "does not continue the segment before it"),
        (third, 1, "", "says that this is segment 3"),
        (b"", 1, "", "is damaged: the segment has lost its header"),
    ):
        ours.write_bytes(content)
        with pytest.raises(JournalError, match=f"{ours}: unit at byte 0 {words}"):
            read(tmp_path / "run", first, chain)
    ours.write_bytes(foreign)
    old_segment(ours, 7)
    (tmp_path / "run" / "journal-000003.log").unlink()
    with pytest.raises(JournalError, match=f"{ours}: unit at byte 0 is damaged: the segment has lost its header"):
        read(tmp_path / "run")
    with closing(JournalFiles(tmp_path / "named", {"run_id": "a"})) as journal:
        journal.begin()
    with pytest.raises(JournalError, match="has run_id 'a': it is of another run"):
        JournalFiles(tmp_path / "named", {"run_id": "b"}).read(1)


def test_blank_means_that_no_event_was_ever_written(tmp_path: Path) -> None:
    with closing(JournalFiles(tmp_path)) as journal:
        assert journal.is_blank()
        journal.begin()
        assert journal.is_blank()
        put(journal, 1)
    path = tmp_path / "journal-000001.log"
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert JournalFiles(tmp_path).is_blank() == (size < len(whole) - UNIT.size), size
    old_segment(path, 1)
    os.truncate(path, FRAME_1.size - 1)
    assert not JournalFiles(tmp_path).is_blank(), "who wrote format 1 wrote nothing before it had an event"


def test_segments_of_format_1_are_read_and_gone_on_from_in_a_new_one_and_their_damage_is_named(tmp_path: Path) -> None:
    old_segment(tmp_path / "journal-000003.log")
    old_segment(tmp_path / "journal-000004.log", 0, 1)
    last = tmp_path / "journal-000005.log"
    old_segment(last, 2, 3)
    whole = last.read_bytes()
    last.write_bytes(whole + whole[:9])
    assert read(tmp_path, 3) == [record(number) for number in range(4)], "an empty one is an empty segment"
    (note,) = gone_on(tmp_path)
    assert f"cut off at byte {len(whole)}: 9 bytes" in note
    assert last.read_bytes() == whole
    assert JournalFiles(tmp_path).segments() == [3, 4, 5, 6]
    for first, numbers in ((4, (0, 1, 2, 3, 7)), (5, (2, 3, 7)), (6, (7,))):
        assert read(tmp_path, first) == [record(number) for number in numbers]
    with pytest.raises(JournalError, match=r"journal-000005.log.*has lost its header"):
        read(tmp_path, 5, "ab" * 32)
    last.write_bytes(whole[:30] + b"?" + whole[31:])
    with pytest.raises(JournalError, match=f"{last}: journal record at byte 0 is damaged"):
        read(tmp_path, 3)
    last.unlink()
    (tmp_path / "journal-000006.log").unlink()
    old_segment(last)
    assert gone_on(tmp_path) == [], "also from an empty one"
    assert read(tmp_path, 4) == [record(0), record(1), record(7)]


# --- a full disk -----------------------------------------------------------------------------------------------------


class FullDisk(Disk):
    """Takes ``room`` bytes more of what is written to the journal, and new ``names`` or none."""

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    room = 1 << 30
    names = cleans = True

    def cut(self, path: Path, size: int, step: Step) -> None:
        if not self.cleans:
            raise self.error
        super().cut(path, size, step)

    def remove(self, path: Path, step: Step) -> None:
        if not self.cleans:
            raise self.error
        super().remove(path, step)

    def open(self, path: Path, mode: str, step: Step, buffering: int = -1) -> BinaryIO:
        if not self.names and not path.exists():
            raise self.error
        return super().open(path, mode, step, buffering)

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        fits = min(self.room, len(data))
        super().write(file, data[:fits], step)
        self.room -= fits
        if fits < len(data):
            raise self.error


def test_a_turn_that_finds_no_room_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    disk = FullDisk()
    with closing(begun(tmp_path, disk)) as journal:
        put(journal, 0)
        size = journal.path(1).stat().st_size
        frame_bytes = journal.append([record(1)])[1] - size
        journal.flush()
        size = journal.path(1).stat().st_size
        for room in range(frame_bytes):
            disk.room = room
            with pytest.raises(DiskFullError):
                journal.append([record(2)])
            assert journal.path(1).stat().st_size == size, room
        disk.room = frame_bytes + 5
        journal.append([record(2)])
        for _ in range(2):
            with pytest.raises(DiskFullError):
                journal.flush()
            disk.room = 5
        disk.room = 1 << 20
        journal.flush()
    assert read(tmp_path) == [record(0), record(1), record(2)]
    assert framed(journal.path(1)).marked


@pytest.mark.parametrize("room", [0, 150, None])
def test_a_new_segment_that_finds_no_room_leaves_the_old_one_in_use(tmp_path: Path, room: int | None) -> None:
    """Neither the folder nor the quota has room for one file more: that had ended the process."""
    disk = FullDisk()
    with closing(begun(tmp_path, disk)) as journal:
        put(journal, 0)
        for _ in range(2):
            disk.room, disk.names = (disk.room, False) if room is None else (room, True)
            with pytest.raises(DiskFullError):
                journal.rotate()
        disk.room, disk.names = 1 << 20, True
        put(journal, 1)
        assert journal.segments() == [1]
        assert journal.rotate().segment == 2
        put(journal, 2)
    assert read(tmp_path) == [record(0), record(1), record(2)]


def test_a_failed_sync_and_half_a_turn_that_stays_are_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again, the turn would stand behind half of itself: a journal that no start reads."""
    disk = FullDisk()

    def refuse(handle: int) -> None:
        raise disk.error

    with closing(begun(tmp_path, disk)) as journal:
        for room, call in (
            (10, lambda: journal.append([record(0)])),
            (10, journal.rotate),
            (1 << 20, lambda: put(journal, 0)),
        ):
            disk.room, disk.cleans = room, False
            if room > 10:  # It is written, and what is on the disk after a failed sync is not known.
                monkeypatch.setattr(os, "fdatasync", refuse)
            with pytest.raises(OSError, match="No space left") as told:
                call()
            assert not isinstance(told.value, DiskFullError)
            disk.room, disk.cleans = 1 << 20, True


def test_a_segment_that_begins_while_one_looks_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader beside the writer: the list of segments and the note of the end are of two instants."""
    journal = begun(tmp_path)
    put(journal, 0)
    listed = JournalFiles.segments

    def then_rotated(self: JournalFiles) -> list[int]:
        found = listed(self)
        if self is not journal and journal.index == 1:
            journal.rotate()
            put(journal, 1)
        return found

    reader = JournalFiles(tmp_path, disk=ReadingDisk())
    monkeypatch.setattr(JournalFiles, "segments", then_rotated)
    assert reader.read(1) == [record(0)]
    journal.close()


# --- The note of the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_the_newest_whole_note_counts_also_for_the_next_process(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal.end"
    for end in (10, 20, 30):
        noted = JournalEnd(path, PLAIN_DISK)
        noted.write(3, end)
        noted.close()
        assert JournalEnd(path, PLAIN_DISK).read() == (3, end)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[SLOT_BYTES + 9] ^= 4
    else:
        del data[SLOT_BYTES + 9 :]
    path.write_bytes(data)
    assert JournalEnd(path, PLAIN_DISK).read() == (3, 20)
    assert JournalEnd(path, PLAIN_DISK).damage() == [f"the note at byte {SLOT_BYTES} is not whole"]
    path.write_bytes(bytes(4))
    assert JournalEnd(path, PLAIN_DISK).read() is None


def test_a_journal_that_is_cut_off_between_two_units_or_lacks_its_last_segment_is_named(tmp_path: Path) -> None:
    written(tmp_path, segments=2, each=3)
    path = tmp_path / "journal-000002.log"
    found = framed(path)
    size = path.stat().st_size
    os.truncate(path, size - UNIT.size)  # The last mark: it is not synced, and nothing is lost with it.
    assert len(read(tmp_path)) == 6
    for frame in reversed(found.frames):
        os.truncate(path, frame.offset)
        with pytest.raises(JournalError, match=f"{path} ends at byte .* and its byte {size - UNIT.size} was"):
            read(tmp_path)
    path.unlink()
    with pytest.raises(JournalError, match=r"journal-000002\.log is missing, and its byte"):
        read(tmp_path)
    begun(tmp_path).close()
    assert read(tmp_path) == [], "one that begins anew has no note of the one before"


@pytest.mark.parametrize("noted", [True, False])
def test_what_was_never_acknowledged_is_not_missed_nor_what_no_note_tells_of(tmp_path: Path, noted: bool) -> None:
    """After a power cut, or where a folder was put together from a copy, there is no note."""
    with closing(begun(tmp_path)) as journal:
        put(journal, 1)
        path, end = journal.path(1), journal.path(1).stat().st_size
        journal.append([record(2)])
        if not noted:
            journal.flush()
            (tmp_path / "journal.end").unlink()
    os.truncate(path, end)
    assert read(tmp_path) == [record(1)]
