"""The journal on disk: segments ``journal-000001.log`` and on, their bytes as in ``sync/journal.py``.

The end. ``JournalEnd`` notes in a separate file where the journal's durable end was, so that a truncated journal is
noticed. The journal itself cannot show it: if it is cut off between two units, it is an intact, shorter journal. So
once a frame is durable, and before the syncer tells anything of it, the end is noted in a file of two slots, in turn:

    u32 CRC-32 of the rest | u64 count | u32 segment | u64 end of its last durable unit

The note is not synced. A killed process loses none of it. A power cut may leave an older note or none. An older note
names an end that the journal has reached and passed, and so raises no false alarm.

Segments. When each part becomes durable (each line is a call here, in the order in which a process makes them):

- ``take_over`` (a start): an incomplete write of a crash is cut off, the segment synced, its last mark written if it is
  missing. From then on all of it counts as acknowledged.
- ``append``: one frame is written. Nothing is synced. ``flush``: the segment is synced (fdatasync); then the frame's
  mark is written and *not* synced, and the end of the frame is noted (``JournalEnd``), not synced either. Only then
  may the syncer tell anything that follows from the frame.
- ``rotate``: the old segment is synced, its last mark with it. The new one gets its header and is synced, then the
  folder is synced, then the header's mark is written. Only after that may a snapshot name the new segment.
- ``prune``: segments that nothing needs are removed, oldest first. Nothing is synced: the next prune removes one that a
  power cut brings back.

What a power cut leaves when it comes ...

- in ``append`` or before the sync of ``flush`` is done: nothing, a part, or all of the frame. A part is cut off. A
  whole one is kept: no site has heard of it, and the senders of its events will send them again.
- between that sync and the next one: the frame, with its mark, with a part of it, or without.
- in ``rotate``: no new segment, an empty one, a part of a header, or a header. A segment without a header is removed,
  and its number used again; one with nothing but a header is continued.

Anything else is damage: ``JournalError`` with file and offset, and the syncer does not start on it. Segments of format
1, which an earlier version has left, are read and never written to.
"""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from diloco.durable import PLAIN_DISK, Disk, DiskFullError, Step, full_in_words
from diloco.sync.journal import (
    CHAIN_START,
    JournalError,
    Record,
    Segment,
    decode_records,
    encode_frame,
    encode_header,
    encode_mark,
    encode_records,
    is_framed,
    read_records,
    read_segment,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from diloco.sync.leadership import Place

REST = struct.Struct("<QIQ")
CHECKSUM = struct.Struct("<I")
SLOT_BYTES = 512
"""Each slot has its own sector, so that a torn write spoils only one of the two."""


class JournalEnd:
    """The note at ``path``.  One writer."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._file: BinaryIO | None = None
        self._count = 0

    def read(self) -> tuple[int, int] | None:
        """Return segment and end as last noted; None when there is no intact note."""
        whole = [slot for slot in self._slots().values() if slot is not None]
        if not whole:
            return None
        self._count, segment, end = max(whole)
        return segment, end

    def damage(self) -> list[str]:
        """Return a text for each damaged slot. Nothing relies on a damaged one: the other has the note before it."""
        return [f"the note at byte {at} is not whole" for at, slot in self._slots().items() if slot is None]

    def _slots(self) -> dict[int, tuple[int, int, int] | None]:
        """Return the slots that were written, by their offsets: count, segment and end; None for one not whole."""
        data = self.path.read_bytes() if self.path.exists() else b""
        slots: dict[int, tuple[int, int, int] | None] = {}
        for at in (0, SLOT_BYTES):
            slot = data[at : at + CHECKSUM.size + REST.size]
            rest = slot[CHECKSUM.size :]
            if slot.strip(b"\0"):
                whole = len(rest) == REST.size and CHECKSUM.unpack_from(slot)[0] == zlib.crc32(rest)
                slots[at] = REST.unpack(rest) if whole else None
        return slots

    def write(self, segment: int, end: int) -> None:
        """Note that everything up to ``end`` of ``segment`` is durable. Only the first notes need new disk space."""
        if self._file is None:
            self.read()  # To count on from there.
            is_new = not self.path.exists()
            self._file = self._disk.open(self.path, "w+b" if is_new else "r+b", Step.JOURNAL_END, buffering=0)
        self._count += 1
        rest = REST.pack(self._count, segment, end)
        self._file.seek(SLOT_BYTES * (self._count % 2))
        self._disk.write(self._file, CHECKSUM.pack(zlib.crc32(rest)) + rest, Step.JOURNAL_END)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class Position:
    """A place where a replay can begin: the start of a segment. ``chain`` is the value before it; "" if it has none."""

    segment: int
    chain: str


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """A segment as read; ``torn_bytes`` follow the intact part. One of format 1 (``is_old``) has no header, frames or
    marks."""

    index: int
    found: Segment
    records: list[Record]
    torn_bytes: int
    is_old: bool


class JournalFiles:
    """The segments in ``folder``. One writer; a new segment's header holds ``run``, which identifies its run."""

    def __init__(self, folder: Path, run: Mapping[str, str | int] | None = None, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._run = dict(run or {})
        self._disk = disk
        disk.make_folder(folder, Step.FOLDER)
        self.index = max(self.segments(), default=0)
        self._file: BinaryIO | None = None
        self.noted = JournalEnd(folder / "journal.end", disk)
        self.chain = CHAIN_START
        """The chain value of the last unit."""
        self._end = 0
        self._synced = self._marked = True
        self.begun = (0, 0)
        """The segment that ``rotate`` began last, and where its durable header ends."""

    def path(self, index: int) -> Path:
        """Return a segment's path."""
        return self.folder / f"journal-{index:06d}.log"

    def segments(self) -> list[int]:
        """Return the numbers of the existing segments, rising."""
        return sorted(index for path in self.folder.glob("journal-*.log") if (index := index_of(path)))

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, first: int, chain: str = "") -> list[Record]:
        """Return every record from segment ``first`` on; ``chain``, if known, is the chain's value before it."""
        return [record for segment in self.walk(first, chain) for record in segment.records]

    def walk(self, first: int, chain: str = "") -> Iterator[SegmentRead]:
        """Yield each segment from ``first`` on, checked; ``JournalError`` names file and offset of damage."""
        noted = self.noted.read()  # Before the journal, which may grow until it is read.
        wanted = [index for index in self.segments() if index >= first]
        missing = sorted(set(range(first, max(wanted, default=first) + 1)) - set(wanted))
        if missing:
            raise JournalError(f"{self.path(missing[0])} is missing: the journal is needed from segment {first} on")
        before = bytes.fromhex(chain) if chain else None
        for index in wanted:
            read = read_file(self.path(index))
            is_last, end = index == wanted[-1], read.found.end
            if read.torn_bytes and not is_last:
                raise JournalError(f"{self.path(index)} ends in the middle of a unit at byte {end}: it is damaged")
            self._check_header(read, before, may_be_blank=is_last and index != first)
            before = read.found.chain
            if is_last and noted is not None and noted > (index, end):
                found = f"ends at byte {end}" if noted[0] == index else "is missing"
                raise JournalError(
                    f"{self.path(noted[0])} {found}, and its byte {noted[1]} was durable: it was cut off"
                )
            yield read

    def _check_header(self, read: SegmentRead, before: bytes | None, *, may_be_blank: bool) -> None:
        """Check that the segment continues the chain value ``before``; None: not known."""
        path, header = self.path(read.index), read.found.header
        if header is None:
            # One of format 1 has none, and the last one's process may have died right after creating it.
            if before in (None, CHAIN_START) or (may_be_blank and not read.is_old):
                return
            raise JournalError(f"{path}: unit at byte 0 is damaged: the segment has lost its header")
        if header.segment != read.index:
            raise JournalError(f"{path}: unit at byte 0 says that this is segment {header.segment}")
        if before is not None and header.before != before.hex():
            raise JournalError(f"{path}: unit at byte 0 does not continue the segment before it")
        for name in sorted(self._run.keys() & header.run.keys()):
            if header.run[name] != self._run[name]:
                raise JournalError(f"{path}: unit at byte 0 has {name} {header.run[name]!r}: it is of another run")

    def is_blank(self) -> bool:
        """Return whether no event was ever written: then nothing was ever acknowledged."""
        try:
            found = [read_file(self.path(index)) for index in self.segments()]
        except JournalError:
            return False
        return not any(read.records or read.is_old for read in found)

    # --- writing -----------------------------------------------------------------------------------------------------

    def begin(self, place: Position | None = None) -> Position:
        """Begin the first segment of a new folder, at ``place`` when it continues another folder's journal.

        Removes segments that an interrupted call left.
        """
        for index in self.segments():
            self._disk.remove(self.path(index), Step.JOURNAL_CUT)
        self.noted.close()
        self._disk.remove(self.noted.path, Step.JOURNAL_END)
        self.index, self.chain = 0, CHAIN_START
        if place is not None:
            self.index, self.chain = place.segment - 1, bytes.fromhex(place.chain)
        return self.rotate()

    def take_over(self) -> list[str]:
        """Continue after what the last process wrote, which was read without an error; return a note for each cut.

        It cuts off what was never acknowledged, and a last mark that is incomplete.
        """
        notes = [f"{self.noted.path} is damaged: {why}" for why in self.noted.damage()]
        path = self.path(self.index)
        read = read_file(path)
        found = read.found
        if read.torn_bytes:
            notes.append(f"{path} is cut off at byte {found.end}: {read.torn_bytes} bytes there were incomplete")
        if found.header is None and not read.is_old:
            self._disk.remove(path, Step.JOURNAL_CUT)
            self._disk.sync_folder(self.folder, Step.JOURNAL_CUT)
            self.index -= 1
            self.chain = read_file(self.path(self.index)).found.chain if self.index in self.segments() else CHAIN_START
            self.rotate()
            return notes
        if read.torn_bytes:
            self._disk.cut(path, found.end, Step.JOURNAL_CUT)
        self._file = self._disk.open(path, "ab", Step.JOURNAL_BEGIN, buffering=0)
        self.chain, self._end, self._synced, self._marked = found.chain, found.end, False, found.marked
        if read.is_old:
            self.rotate()
        else:
            self.flush()
        return notes

    def append(self, records: Sequence[Record]) -> Place:
        """Write the records of a turn; return where they end. They are durable after ``flush``.

        Raises ``DiskFullError`` when there is no space: nothing of them remains, and the caller may try again.
        """
        return self.append_body(encode_records(records))

    def append_body(self, body: bytes) -> Place:
        """Like ``append``, with records that are already encoded, perhaps by another version of the program."""
        data, chain = encode_frame(body, self.chain)
        self._put(data, Step.JOURNAL_WRITE)
        self.chain, self._synced, self._marked = chain, False, False
        return self.index, self._end

    def flush(self) -> None:
        """Make all that was appended durable, and mark it. A failed sync is final: the caller must stop.

        Raises ``DiskFullError`` when there is no space for the mark: call it again.
        """
        if self._file is None:
            return
        if not self._synced:
            self._disk.sync(self._file, Step.JOURNAL_SYNC)
            self._synced = True
        if not self._marked:
            end = self._end
            self._put(encode_mark(self.chain), Step.JOURNAL_MARK)
            self._marked = True
            with contextlib.suppress(OSError):  # Only its first two writes need space; an older note is valid too.
                self.noted.write(self.index, end)

    def _put(self, data: bytes, step: Step) -> None:
        assert self._file is not None, "begin or take_over comes first"
        try:
            with full_in_words():
                self._disk.write(self._file, data, step)
        except OSError:
            # Its partial bytes would separate the intact part from the next frame.
            self._disk.cut(self.path(self.index), self._end, Step.JOURNAL_CUT)
            raise
        self._end += len(data)

    def rotate(self) -> Position:
        """Begin a new segment. ``DiskFullError`` when there is no space for it: then the old one continues."""
        if self._file is not None:
            self.flush()
            self._disk.sync(self._file, Step.JOURNAL_SYNC)
        index, before = self.index + 1, self.chain
        header, chain = encode_header(index, before, self._run)
        path = self.path(index)
        try:
            with full_in_words(), contextlib.ExitStack() as opened:
                file = opened.enter_context(self._disk.open(path, "ab", Step.JOURNAL_BEGIN, buffering=0))
                self._disk.write(file, header, Step.JOURNAL_BEGIN)
                self._disk.sync(file, Step.JOURNAL_BEGIN)
                self._disk.sync_folder(self.folder, Step.JOURNAL_BEGIN)
                opened.pop_all()
        except OSError:
            # Removed durably: if it came back, the old segment would not end where this header says.
            self._disk.remove(path, Step.JOURNAL_CUT)
            self._disk.sync_folder(self.folder, Step.JOURNAL_CUT)
            raise
        if self._file is not None:
            self._file.close()
        self.index, self._file, self.chain = index, file, chain
        self._end, self._synced, self._marked = len(header), True, False
        with contextlib.suppress(DiskFullError):  # The next frame proves the header whole, as a mark would.
            self.flush()
        self.begun = index, len(header)
        return Position(index, before.hex())

    def prune(self, first: int) -> None:
        """Delete the segments before ``first``."""
        for index in self.segments():
            if index < first:
                self._disk.remove(self.path(index), Step.JOURNAL_PRUNE)

    def close(self) -> None:
        """Close the last segment."""
        self.noted.close()
        if self._file is not None:
            self._file.close()
            self._file = None


def index_of(path: Path) -> int:
    """Return the number of the segment in ``path``; 0 where its name is no segment's, such as a copy's."""
    found = re.fullmatch(r"journal-(\d{6,})\.log", path.name)
    return int(found[1]) if found else 0


def read_file(path: Path) -> SegmentRead:
    """Read one segment by itself; ``JournalError`` names file and offset of damage."""
    index, data = index_of(path), path.read_bytes()
    try:
        if not is_framed(data):
            records, end = read_records(data)
            found = Segment(None, (), end, CHAIN_START, marked=True)
            return SegmentRead(index, found, records, len(data) - end, is_old=True)
        found = read_segment(data)
        turns = [decode_records(frame.body, frame.offset) for frame in found.frames]
        records = [record for turn in turns for record in turn]
        return SegmentRead(index, found, records, len(data) - found.end, is_old=False)
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from error
