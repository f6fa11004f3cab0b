"""The journal on disk: segments of records, ``journal-000001.log`` and on; a snapshot names the first one it needs.

``append`` writes, ``flush`` makes everything appended durable; nothing is acknowledged or published in between.  A
crash can cut the last record of the last segment short: that record was never acknowledged, and ``open`` cuts it off.
Damage anywhere else is ``JournalError`` with file and offset: the syncer does not start on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK, Step
from diloco.sync.journal import JournalError, Record, encode_record, read_records

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from diloco.durable import Disk


class JournalFiles:
    """The segments in ``folder``.  One writer."""

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._disk = disk
        disk.make_folder(folder, Step.FOLDER)
        self.index = max(self.segments(), default=0)
        self._file: BinaryIO | None = None if self.index == 0 else self._path(self.index).open("ab")

    def _path(self, index: int) -> Path:
        return self.folder / f"journal-{index:06d}.log"

    def segments(self) -> list[int]:
        """The numbers of the segments that exist, rising."""
        return sorted(int(path.stem.removeprefix("journal-")) for path in self.folder.glob("journal-*.log"))

    def read(self, first: int) -> list[Record]:
        """Every record from segment ``first`` on; a torn end of the last segment is cut off."""
        wanted = [index for index in self.segments() if index >= first]
        missing = sorted(set(range(first, max(wanted, default=first) + 1)) - set(wanted))
        if missing:
            raise JournalError(f"{self._path(missing[0])} is missing: the journal is needed from segment {first} on")
        records: list[Record] = []
        for index in wanted:
            path = self._path(index)
            data = path.read_bytes()
            try:
                found, end = read_records(data)
            except JournalError as error:
                raise JournalError(f"{path}: {error}") from error
            if end < len(data):
                if index != wanted[-1]:
                    raise JournalError(
                        f"{path} ends in the middle of a record at byte {end} and is not the last segment"
                    )
                self._disk.cut(path, end, Step.JOURNAL_CUT)
            records += found
        return records

    def is_blank(self) -> bool:
        """Whether nothing was ever written: then nothing was ever acknowledged."""
        return all(self._path(index).stat().st_size == 0 for index in self.segments())

    def append(self, record: Record) -> None:
        """Write ``record``; it is durable after ``flush``."""
        assert self._file is not None, "rotate begins the first segment"
        self._disk.write(self._file, encode_record(record), Step.JOURNAL_WRITE)

    def flush(self) -> None:
        """Make all appended records durable.  A failed fsync is final: the caller must stop, never try again."""
        if self._file is not None:
            self._disk.sync(self._file, Step.JOURNAL_SYNC)

    def rotate(self) -> int:
        """Begin a new segment and return its number."""
        if self._file is not None:
            self.flush()
            self._file.close()
        self.index += 1
        self._file = self._disk.open(self._path(self.index), "ab", Step.JOURNAL_BEGIN)
        self._disk.sync_folder(self.folder, Step.JOURNAL_BEGIN)
        return self.index

    def prune(self, first: int) -> None:
        """Drop the segments before ``first``."""
        for index in self.segments():
            if index < first:
                self._disk.remove(self._path(index), Step.JOURNAL_PRUNE)

    def close(self) -> None:
        """Close the last segment."""
        if self._file is not None:
            self._file.close()
            self._file = None
