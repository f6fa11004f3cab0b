"""A payload in pieces: cutting, checking, putting together.  Pure: no sockets, no clock, no gRPC.

Every chunk carries its offset and a checksum (XXH3-64, or zlib's CRC-32 in protocol 2), so that a byte that changed on
the way, a chunk that came twice or one that is missing is noticed at once; the digest in the header covers the whole.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Cut = tuple[int, memoryview, int, int | None]


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
