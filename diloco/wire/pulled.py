"""What a pull brings, and the memory that keeps it when the pull breaks off in the middle."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.wire.chunks import Assembler, ChunkError, DamagedChunk, Holes, checksum
from diloco.wire.messages import PAYLOAD_BYTES_MAX, Chunk, Frame, MalformedMessage, PullHeader

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.wire.chunks import Span


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """A version, whole and with its checksums compared; ``parts`` are views of one buffer, as in ``header.part_bytes``.

    Without parts there is nothing newer than the version that the asker has.
    """

    header: PullHeader
    parts: tuple[memoryview, ...]


class PullSink:
    """Takes one fragment's pull, over as many streams and attempts as it needs.

    ``payload_bytes_max`` bounds what the other end may make us allocate.  ``accept`` may be called by several threads.
    """

    def __init__(
        self,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        begun: Callable[[PullHeader, memoryview], Callable[[int], None] | None] | None = None,
        broken: Callable[[], None] | None = None,
    ) -> None:
        """``begun`` is told of each payload that begins, with the memory that it will fill, and may return what wants
        to be told how many bytes from the first one on have come, by the threads that bring them, in any order.

        It is told no more once ``broken`` is: an attempt broke off, and another may come late or never."""
        self.payload_bytes_max = payload_bytes_max
        self._begun = begun
        self._broken = broken
        self._come: Callable[[int], None] | None = None
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)
        self._spare: bytearray | None = None
        self._holes = Holes(0)
        self._unwritten = Holes(0)
        self._lock = threading.Lock()
        self.header: PullHeader | None = None
        self.breaks = 0
        """Attempts at what is held that were broken off."""

    @property
    def offset(self) -> int:
        """Bytes held before the first that is missing."""
        with self._lock:
            return self._holes.spans[0][0] if self._holes.spans else self._payload_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes that are here, wherever; any thread may ask."""
        with self._lock:
            return self._payload_bytes - sum(end - begin for begin, end in self._holes.spans)

    @property
    def _payload_bytes(self) -> int:
        return self.header.payload_bytes if self.header is not None else 0

    def missing(self) -> list[Span]:
        """What has not come yet, in order."""
        with self._lock:
            return list(self._holes.spans)

    def clear(self) -> None:
        """Forget what came."""
        self._view.release()
        self._spare = self._buffer if self._buffer else self._spare
        self._forget()

    def broke_off(self) -> None:
        """An attempt is over, with no thread left that brings anything; what came stays."""
        self._come = None
        if self._broken is not None:
            self._broken()

    def _forget(self) -> None:
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)
        self._hold_nothing(None)
        self._unwritten = Holes(0)
        self._come = None
        self.breaks = 0

    def _hold_nothing(self, header: PullHeader | None) -> None:
        """Of what ``header`` describes all is missing: at once, since without its holes it would pass for here."""
        with self._lock:
            self.header, self._holes = header, Holes(header.payload_bytes if header is not None else 0)

    def begin(self, header: PullHeader) -> bool:
        """A header came.  True when what is held belongs to it and is kept; otherwise it begins at byte 0.

        ``MalformedMessage`` when it declares more than is permitted.
        """
        if header.payload_bytes > self.payload_bytes_max:
            raise MalformedMessage(f"payload_bytes is {header.payload_bytes}: at most {self.payload_bytes_max} wanted")
        if self.belongs(header):
            self.header = header
            return True
        self.clear()
        self._buffer = self._memory(header.payload_bytes)
        self._view = memoryview(self._buffer)
        self._hold_nothing(header)
        self._unwritten = Holes(header.payload_bytes)
        if self._begun is not None:
            self._come = self._begun(header, self._view[: header.payload_bytes].toreadonly())
        return False

    def belongs(self, header: PullHeader) -> bool:
        """Whether what is held is of the payload that ``header`` describes."""
        held = self.header
        return held is not None and replace(header, fates=held.fates, epoch=held.epoch) == held

    def _memory(self, payload_bytes: int) -> bytearray:
        """Memory that was written before is ten times as fast to write as memory that is new."""
        spare, self._spare = self._spare, None
        fits = spare is not None and payload_bytes <= len(spare) <= 2 * payload_bytes
        return spare if spare is not None and fits else bytearray(payload_bytes)

    def accept(self, chunk: Chunk | Frame) -> None:
        """A piece of the payload; a frame may come in any order.  ``ChunkError`` when it does not belong there.

        A frame that was damaged leaves its bytes missing, and nothing else happens.
        """
        if self.header is None:
            raise MalformedMessage("a chunk came before the header")
        if isinstance(chunk, Frame):
            if chunk.intact:
                self._take(chunk.offset, chunk.data)
            return
        assembler = Assembler(self.header.payload_bytes, self._take, self.offset)
        assembler.accept(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3)

    def _take(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        with self._lock:
            if not self._holes.fill(offset, end):
                raise ChunkError(f"chunk at offset {offset} has {len(data)} bytes that are not missing")
        self._view[offset:end] = data
        if (come := self._come) is not None:
            with self._lock:
                self._unwritten.fill(offset, end)
                held = self._unwritten.spans[0][0] if self._unwritten.spans else self._payload_bytes
            come(held)

    def finish(self) -> PulledVersion:
        """Everything came.  ``DamagedChunk`` when bytes are missing or the checksum of the whole differs."""
        if self.header is None:
            raise DamagedChunk("the stream ended before the header")
        if self.missing():
            raise DamagedChunk(f"payload ends at {self.offset} of {self.header.payload_bytes} bytes")
        told = self.header.payload_crc32
        if told and checksum((self._view[: self._payload_bytes],)) != told:
            self.clear()
            raise DamagedChunk("the checksum of the whole payload differs")
        parts, start, view = [], 0, self._view.toreadonly()
        for part_bytes in self.header.part_bytes:
            parts.append(view[start : start + part_bytes])
            start += part_bytes
        pulled = PulledVersion(self.header, tuple(parts))
        self._forget()
        return pulled

    def give_back(self, pulled: PulledVersion) -> None:
        """Nobody reads the parts of ``pulled`` any more: a next payload of about its length is written over it.

        Where somebody still does, nothing happens.
        """
        memory = pulled.parts[0].obj if pulled.parts else None
        if not isinstance(memory, bytearray):
            return
        try:
            for part in pulled.parts:
                part.release()
            memory.append(memory.pop())  # Refused while anything else, made of a part, reads it.
        except BufferError:
            return
        self._spare = memory
