"""What a pull brings, and the memory that keeps it when the pull breaks off in the middle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco.wire.chunks import Assembler, DamagedChunk, checksum
from diloco.wire.messages import PAYLOAD_BYTES_MAX, Chunk, MalformedMessage, PullHeader


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """A version, whole and with its checksum compared; ``parts`` are views of one buffer, as in ``header.part_bytes``.

    Without parts there is nothing newer than the version that the asker has.
    """

    header: PullHeader
    parts: tuple[memoryview, ...]


class PullSink:
    """Takes one fragment's pull, over as many attempts as it needs; used by one thread.

    ``payload_bytes_max`` bounds what the other end may make us allocate.
    """

    def __init__(self, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()
        self._assembler: Assembler | None = None
        self.header: PullHeader | None = None

    @property
    def offset(self) -> int:
        """Bytes held."""
        return self._assembler.offset if self._assembler is not None else 0

    def clear(self) -> None:
        """Forget what came."""
        self._buffer = bytearray()
        self._assembler = None
        self.header = None

    def begin(self, header: PullHeader) -> bool:
        """A header came.  True when what is held belongs to it and is kept; otherwise it begins at byte 0.

        ``MalformedMessage`` when it declares more than is permitted.
        """
        if header.payload_bytes > self.payload_bytes_max:
            raise MalformedMessage(f"payload_bytes is {header.payload_bytes}: at most {self.payload_bytes_max} wanted")
        if self.header is not None and replace(header, fates=self.header.fates, epoch=self.header.epoch) == self.header:
            self.header = header
            return True
        self.clear()
        self.header = header
        self._buffer = bytearray(header.payload_bytes)
        self._assembler = Assembler(header.payload_bytes, self._write)
        return False

    def accept(self, chunk: Chunk) -> None:
        """The next chunk.  ``ChunkError`` when it is not."""
        if self._assembler is None:
            raise MalformedMessage("a chunk came before the header")
        self._assembler.accept(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3)

    def finish(self) -> PulledVersion:
        """Everything came.  ``DamagedChunk`` when bytes are missing or the checksum of the whole differs."""
        if self._assembler is None or self.header is None:
            raise DamagedChunk("the stream ended before the header")
        self._assembler.finish()
        if self.header.payload_crc32 and checksum((self._buffer,)) != self.header.payload_crc32:
            self.clear()
            raise DamagedChunk("the checksum of the whole payload differs")
        parts, start, view = [], 0, memoryview(self._buffer).toreadonly()
        for part_bytes in self.header.part_bytes:
            parts.append(view[start : start + part_bytes])
            start += part_bytes
        pulled = PulledVersion(self.header, tuple(parts))
        self.clear()
        return pulled

    def _write(self, offset: int, data: memoryview) -> None:
        self._buffer[offset : offset + len(data)] = data
