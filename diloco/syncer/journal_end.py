"""Where the journal's durable end was, noted beside it, so that a journal that somebody cut off is noticed.

The journal itself cannot say it: cut off between two units it is a whole, shorter journal.  So after each frame that is
durable, and before anything is told of it, the end is noted in a file of two slots, in turn:

    u32 CRC-32 of the rest | u64 count | u32 segment | u64 end of its last durable unit

Nothing is synced.  A process that is killed loses none of it; a power cut may leave an older note or none, which names
an end that the journal has reached and passed, and so accuses nobody wrongly.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from diloco.durable import Step

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from diloco.durable import Disk

REST = struct.Struct("<QIQ")
CHECKSUM = struct.Struct("<I")
SLOT_BYTES = 512
"""Each slot has a sector of its own, so that a write that is torn spoils one of the two."""


class JournalEnd:
    """The note at ``path``.  One writer."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._file: BinaryIO | None = None
        self._count = 0

    def read(self) -> tuple[int, int] | None:
        """Segment and end, as last noted; None when there is no note that is whole."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        found = [slot for slot in (self._slot(data, at) for at in (0, SLOT_BYTES)) if slot is not None]
        if not found:
            return None
        self._count, segment, end = max(found)
        return segment, end

    def damage(self) -> list[str]:
        """Which slots are not as they were written.  Nothing rests on one: the other has the note before it."""
        data = self.path.read_bytes() if self.path.exists() else b""
        places = [at for at in (0, SLOT_BYTES) if data[at : at + CHECKSUM.size + REST.size].strip(b"\0")]
        return [f"the note at byte {at} is not whole" for at in places if self._slot(data, at) is None]

    def _slot(self, data: bytes, at: int) -> tuple[int, int, int] | None:
        rest = data[at + CHECKSUM.size : at + CHECKSUM.size + REST.size]
        if len(rest) < REST.size or CHECKSUM.unpack_from(data, at)[0] != zlib.crc32(rest):
            return None
        count, segment, end = REST.unpack(rest)
        return count, segment, end

    def write(self, segment: int, end: int) -> None:
        """Everything up to ``end`` of ``segment`` is durable.  The room for it is taken once, at the first note."""
        if self._file is None:
            self.read()  # To count on from there.
            is_new = not self.path.exists()
            self._file = self._disk.open(self.path, "w+b" if is_new else "r+b", Step.JOURNAL_END, buffering=0)
        self._count += 1
        rest = REST.pack(self._count, segment, end)
        self._file.seek(SLOT_BYTES * (self._count % 2))
        self._disk.write(self._file, CHECKSUM.pack(zlib.crc32(rest)) + rest, Step.JOURNAL_END)

    def clear(self) -> None:
        """The journal begins anew."""
        self.close()
        self._count = 0
        self._disk.remove(self.path, Step.JOURNAL_END)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
