"""Cutting a payload into chunks, checking them and reassembling it.  Pure: no sockets, no clock, no gRPC.

Every chunk carries its offset and a checksum (XXH3-64, or zlib's CRC-32 in protocol 2), so that a changed byte, a
duplicate chunk or a missing one is detected at once; the digest in the header covers the whole payload.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diloco.wire.messages import Chunk, Frame

Piece = tuple[int, memoryview]
Span = tuple[int, int]
"""Offsets of the first byte and of the one after the last."""

PIECE_BYTES_MIN = 256 * 1024
"""Fewer bytes are not worth the round trip of an additional stream."""
CHUNK_BYTES_FIRST = 256 * 1024
RISK_BYTES = 4 << 20
"""After one break, half of this may be in flight; each further break halves it, down to ``RISK_BYTES_MIN``."""
RISK_BYTES_MIN = 128 * 1024
CAREFUL_SHARE = 32
QUICK_S = 0.25
SLOW_S = 1.0


class ChunkError(ValueError):
    """A chunk does not continue the payload, or the payload differs from its declaration."""


class DamagedChunk(ChunkError):
    """Bytes changed or are missing; the same payload may be sent again."""


def cut(parts: Sequence[bytes | memoryview], begin: int, end: int, chunk_bytes: Callable[[], int]) -> Iterator[Piece]:
    """Yield bytes ``begin`` to ``end`` of the payload ``parts[0] + parts[1] + ...`` as (offset, data) pieces.

    ``chunk_bytes`` is called for the length limit of each piece.  ``data`` are views, never copies, and never cross the
    boundary of a part.
    """
    start = 0
    for part in parts:
        view = memoryview(part).cast("B")
        at = max(0, begin - start)
        while at < min(len(view), end - start):
            data = view[at : min(at + chunk_bytes(), end - start)]
            yield start + at, data
            at += len(data)
        start += len(view)


def check_next(chunk: Chunk | Frame, offset: int, payload_bytes: int) -> None:
    """Raise ``ChunkError`` unless ``chunk`` is the next one of a payload of which ``offset`` bytes have arrived, and
    ``DamagedChunk`` if its data changed in transit."""
    if chunk.offset != offset:
        raise ChunkError(f"chunk at offset {chunk.offset}, and the next byte is {offset}")
    if len(chunk.data) > payload_bytes - offset:
        raise ChunkError(f"chunk at offset {offset} has {len(chunk.data)} bytes, over the {payload_bytes} declared")
    if not chunk.intact:
        raise DamagedChunk(f"chunk at offset {offset} was damaged on the way")


def bytes_at_risk(breaks: int, passed: int) -> int:
    """Return how many bytes may be in flight after ``breaks`` breaks and ``passed`` bytes carried since the last.

    The next break loses these bytes, so the bound keeps the cost of many breaks a small share of the payload.
    """
    return max(RISK_BYTES_MIN, RISK_BYTES >> breaks, passed // CAREFUL_SHARE)


def checksum(parts: Sequence[bytes | bytearray | memoryview]) -> int:
    """Return the CRC-32 of all parts as one payload."""
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    return crc32


class ChunkSize:
    """Adapts the chunk length of a stream to the time that the last chunk took.

    Long chunks cost least.  But a chunk is also the unit of progress, and a stream without progress for some seconds is
    ended.  So the length starts at ``CHUNK_BYTES_FIRST``, doubles after a chunk faster than ``QUICK_S`` and halves
    after one slower than ``SLOW_S``: on any link a chunk passes about every second.

    A stream that resumes after a break is ``careful``: a partly received chunk is lost with the connection, so no chunk
    is longer than 1 / ``CAREFUL_SHARE`` of the bytes passed since.
    """

    def __init__(self, bytes_min: int, bytes_max: int, *, careful: bool = False) -> None:
        self._bytes_min, self._bytes_max = bytes_min, bytes_max
        self._careful = careful
        self._passed = 0
        self._bytes = min(bytes_max, max(bytes_min, CHUNK_BYTES_FIRST))

    @property
    def bytes(self) -> int:
        """Length of the next chunk."""
        return max(self._bytes_min, min(self._bytes, self._passed // CAREFUL_SHARE)) if self._careful else self._bytes

    def took(self, seconds: float) -> None:
        """Note that the last chunk took ``seconds`` to pass."""
        self._passed += self.bytes
        if seconds < QUICK_S:
            self._bytes = min(self._bytes_max, 2 * self._bytes)
        elif seconds > SLOW_S:
            self._bytes = max(self._bytes_min, self._bytes // 2)


class Window:
    """Reorders the chunks of one payload, which arrive in any order, from byte ``offset`` on.

    ``write(offset, data)`` gets each byte once, in order; an exception from it passes through and leaves ``offset``
    unchanged.  Chunks that arrive early are held here by reference, at most ``window_bytes`` of them.
    """

    def __init__(self, write: Callable[[int, memoryview], object], offset: int, window_bytes: int) -> None:
        self.offset = offset
        self._write = write
        self._room = window_bytes
        self._early: dict[int, memoryview] = {}

    def accept(self, offset: int, data: memoryview) -> bool:
        """Take one intact chunk; bytes already written are skipped.  False: it is early and there is no room for it."""
        end = offset + len(data)
        if offset > self.offset:
            if offset not in self._early:
                if len(data) > self._room:
                    return False
                self._room -= len(data)
                self._early[offset] = data
            return True
        while end > self.offset:
            self._write(self.offset, data[self.offset - offset :])
            self.offset = end
            data = self._early.pop(end, data[:0])
            offset, end = end, end + len(data)
            self._room += len(data)
        return True


class Holes:
    """The missing bytes of a payload; each is filled once."""

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.spans: list[Span] = [(0, payload_bytes)] if payload_bytes else []
        """The missing spans, in order."""
        self.held = 0
        """Number of bytes that are present."""

    def fill(self, begin: int, end: int) -> bool:
        """Mark bytes ``begin`` to ``end`` as present.  Returns False, changing nothing, unless all were missing."""
        at = bisect_right(self.spans, (begin, self.payload_bytes)) - 1
        if at < 0 or not self.spans[at][0] <= begin < end <= self.spans[at][1]:
            return False
        first, last = self.spans[at]
        self.held += end - begin
        self.spans[at : at + 1] = [span for span in ((first, begin), (end, last)) if span[0] < span[1]]
        return True
