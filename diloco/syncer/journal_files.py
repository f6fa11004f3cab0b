"""The journal on disk: segments of records, ``journal-000001.log`` and on; a snapshot names the first one it needs.

``append`` writes, ``flush`` makes everything appended durable; nothing is acknowledged or published in between.  A
crash can cut the last record of the last segment short: that record was never acknowledged, and ``open`` cuts it off.
Damage anywhere else is ``JournalError`` with file and offset: the syncer does not start on it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from diloco.durable import sync_folder
from diloco.sync.journal import JournalError, Record, encode_record, read_records

if TYPE_CHECKING:
    from pathlib import Path


class JournalFiles:
    """The segments in ``folder``.  One writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.index = max(self.segments(), default=0)
        self._file = None if self.index == 0 else self._path(self.index).open("ab")

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
                os.truncate(path, end)
            records += found
        return records

    def is_blank(self) -> bool:
        """Whether nothing was ever written: then nothing was ever acknowledged."""
        return all(self._path(index).stat().st_size == 0 for index in self.segments())

    def append(self, record: Record) -> None:
        """Write ``record``; it is durable after ``flush``."""
        assert self._file is not None, "rotate begins the first segment"
        self._file.write(encode_record(record))

    def flush(self) -> None:
        """Make all appended records durable.  A failed fsync is final: the caller must stop, never try again."""
        if self._file is not None:
            self._file.flush()
            os.fdatasync(self._file.fileno())

    def rotate(self) -> int:
        """Begin a new segment and return its number."""
        if self._file is not None:
            self.flush()
            self._file.close()
        self.index += 1
        self._file = self._path(self.index).open("ab")
        sync_folder(self.folder)
        return self.index

    def prune(self, first: int) -> None:
        """Drop the segments before ``first``."""
        for index in self.segments():
            if index < first:
                self._path(index).unlink()

    def close(self) -> None:
        """Close the last segment."""
        if self._file is not None:
            self._file.close()
            self._file = None
