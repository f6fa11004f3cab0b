"""A payload in pieces: cutting, checking, putting together.  Pure: no sockets, no clock, no gRPC.

Every chunk carries its offset and a checksum (XXH3-64, or zlib's CRC-32 in protocol 2), so that a byte that changed on
the way, a chunk that came twice or one that is missing is noticed at once; the digest in the header covers the whole.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Cut = tuple[int, memoryview, int, int | None]
Piece = tuple[int, memoryview]
Span = tuple[int, int]
"""From the first byte to the one behind the last."""

PIECE_BYTES_MIN = 256 * 1024
"""A stream of its own is not worth its round trip for less."""
CHUNK_BYTES_FIRST = 256 * 1024
TAIL_BYTES_MIN = 64 * 1024
RISK_BYTES = 4 << 20
"""Half of it may be on its way after a first break, and half of that after each further one, but never less than ..."""
RISK_BYTES_MIN = 128 * 1024
CAREFUL_SHARE = 32
QUICK_S = 0.25
SLOW_S = 1.0


class ChunkError(ValueError):
    """A chunk does not continue the payload, or the payload is not what was declared."""


class DamagedChunk(ChunkError):
    """Bytes changed or are missing; the same payload may be sent again."""


def cut(
    parts: Sequence[bytes | memoryview], chunk_bytes: int, offset: int = 0, *, as_in_2: bool = False
) -> Iterator[Cut]:
    """The chunks of the payload ``parts[0] + parts[1] + ...`` from ``offset`` on, as (offset, data, crc32, xxh3).

    There is one checksum: crc32 and None for who reads them ``as_in_2``, otherwise 0 and xxh3.  ``data`` are views,
    never copies, and never reach over the border of a part.  ``offset`` lies within the payload (``ValueError``); at
    its end there is nothing to cut.
    """
    total_bytes = sum(len(part) for part in parts)
    if not 0 <= offset <= total_bytes:
        raise ValueError(f"offset is {offset}: the payload has {total_bytes} bytes")
    start = 0
    for part in parts:
        view = memoryview(part).cast("B")
        for begin in range(max(0, offset - start), len(view), chunk_bytes):
            data = view[begin : begin + chunk_bytes]
            yield (start + begin, data, *((zlib.crc32(data), None) if as_in_2 else (0, xxh3_64_intdigest(data))))
        start += len(view)


def cut_as_asked(
    parts: Sequence[bytes | memoryview], begin: int, end: int, chunk_bytes: Callable[[], int]
) -> Iterator[Piece]:
    """The chunks of bytes ``begin`` to ``end`` of the payload, as (offset, data), each as long as is asked for then.

    Otherwise as ``cut``, without checksums.
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


def bytes_at_risk(breaks: int, passed: int) -> int:
    """How much may be on its way where a connection has broken ``breaks`` times and carried ``passed`` bytes since.

    It is lost when it breaks again, so that what many breaks cost stays a small share of a payload.
    """
    return max(RISK_BYTES_MIN, RISK_BYTES >> breaks, passed // CAREFUL_SHARE)


def checksum(parts: Sequence[bytes | bytearray | memoryview]) -> int:
    """CRC-32 of all parts as one payload."""
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    return crc32


class Assembler:
    """Puts chunks together again: each must be the next one, be intact and fit in ``payload_bytes``.

    ``write(offset, data)`` gets each good chunk; what it raises passes through and leaves the offset where it was.
    ``offset`` is the number of bytes held, also those of an earlier attempt.
    """

    def __init__(self, payload_bytes: int, write: Callable[[int, memoryview], object], offset: int = 0) -> None:
        if not 0 <= offset <= payload_bytes:
            raise ValueError(f"offset is {offset}: the payload has {payload_bytes} bytes")
        self.payload_bytes = payload_bytes
        self.offset = offset
        self._write = write

    def accept(self, offset: int, data: bytes | memoryview, crc32: int, xxh3: int | None = None) -> None:
        """Take one chunk, with either checksum.

        ``ChunkError`` for a wrong place or too many bytes, ``DamagedChunk`` for changed ones.
        """
        view = memoryview(data).cast("B")
        if offset != self.offset:
            raise ChunkError(f"chunk at offset {offset}, and the next byte is {self.offset}")
        if not len(view):
            raise ChunkError(f"chunk at offset {offset} is empty")
        if len(view) > self.payload_bytes - offset:
            raise ChunkError(f"chunk at offset {offset} has {len(view)} bytes, over the {self.payload_bytes} declared")
        if (zlib.crc32(view) != crc32) if xxh3 is None else (xxh3_64_intdigest(view) != xxh3):
            raise DamagedChunk(f"chunk at offset {offset} was damaged on the way")
        self._write(offset, view)
        self.offset = offset + len(view)

    def finish(self) -> None:
        """``DamagedChunk`` unless every byte is there."""
        if self.offset != self.payload_bytes:
            raise DamagedChunk(f"payload ends at {self.offset} of {self.payload_bytes} bytes")


class ChunkSize:
    """How long the next chunk of a stream is, by how long the last one took.

    Long ones cost least; but a chunk is also the unit in which progress is seen, and a stream on which nothing moves
    for some seconds is given up.  So it begins with ``CHUNK_BYTES_FIRST``, doubles while a chunk passes quickly and
    halves where one takes long: whatever the link, something moves about every second.

    What goes on after a break is ``careful``: a chunk of which a part has come is lost with the connection, so none is
    longer than ``CAREFUL_SHARE`` of what has passed since.
    """

    def __init__(self, bytes_min: int, bytes_max: int, *, careful: bool = False) -> None:
        self._bytes_min, self._bytes_max = bytes_min, bytes_max
        self._careful = careful
        self._passed = 0
        self._bytes = min(bytes_max, max(bytes_min, CHUNK_BYTES_FIRST))

    @property
    def bytes(self) -> int:
        """Of the next one."""
        return max(self._bytes_min, min(self._bytes, self._passed // CAREFUL_SHARE)) if self._careful else self._bytes

    def took(self, seconds: float) -> None:
        """The last chunk took so long to pass."""
        self._passed += self.bytes
        if seconds < QUICK_S:
            self._bytes = min(self._bytes_max, 2 * self._bytes)
        elif seconds > SLOW_S:
            self._bytes = max(self._bytes_min, self._bytes // 2)


def tail_chunk(chunk_bytes: int, left: int, streams: int) -> int:
    """How long the next chunk is where ``streams`` share the ``left`` bytes: near the end shorter and shorter ones, so
    that all of them come to it at about the same time."""
    return chunk_bytes if streams <= 1 else min(chunk_bytes, max(TAIL_BYTES_MIN, left // (2 * streams)))


class Window:
    """Chunks of one payload that come in any order, passed on in theirs.

    ``write(offset, data)`` gets each byte once, always the next one; what it raises passes through and leaves the
    offset where it was.  What comes before its turn waits here, at most ``window_bytes`` of it, by reference.
    """

    def __init__(
        self, payload_bytes: int, write: Callable[[int, memoryview], object], offset: int, window_bytes: int
    ) -> None:
        if not 0 <= offset <= payload_bytes:
            raise ValueError(f"offset is {offset}: the payload has {payload_bytes} bytes")
        self.payload_bytes = payload_bytes
        self.offset = offset
        self._write = write
        self._room = window_bytes
        self._early: dict[int, memoryview] = {}

    def accept(self, offset: int, data: memoryview) -> bool:
        """Take one intact chunk; what is here already is passed over.  False: it came before its turn and has no room.

        ``ChunkError`` for one that reaches over what was declared.
        """
        end = offset + len(data)
        if end > self.payload_bytes:
            raise ChunkError(f"chunk at offset {offset} has {len(data)} bytes, over the {self.payload_bytes} declared")
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

    @property
    def complete(self) -> bool:
        """Whether every byte was passed on."""
        return self.offset == self.payload_bytes


class Holes:
    """Which bytes of a payload are still missing; each is taken once."""

    def __init__(self, payload_bytes: int) -> None:
        self.spans: list[Span] = [(0, payload_bytes)] if payload_bytes else []
        """What is missing, in order."""

    def fill(self, begin: int, end: int) -> bool:
        """Bytes ``begin`` to ``end`` are here now.  False, and nothing changed, unless all of them were missing."""
        at = bisect_right(self.spans, begin, key=lambda span: span[0]) - 1
        if at < 0 or not self.spans[at][0] <= begin < end <= self.spans[at][1]:
            return False
        first, last = self.spans[at]
        self.spans[at : at + 1] = [span for span in ((first, begin), (end, last)) if span[0] < span[1]]
        return True
