"""What one pull keeps between its attempts (``client.Pulling``): its bytes (``PullSink``) and how long it may wait."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from diloco.wire.channel import Guard
from diloco.wire.chunks import PIECE_BYTES_MIN, ChunkError, DamagedChunk, Holes, checksum
from diloco.wire.messages import MalformedMessage, PullHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.chunks import Span
    from diloco.wire.messages import Chunk, Frame


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """A complete version with verified checksums; ``parts`` are views of one buffer, cut as in ``header.part_bytes``.

    No parts means that there is nothing newer than the version that the client has.
    """

    header: PullHeader
    parts: tuple[memoryview, ...]


class PullSink:
    """Collects one fragment's payload, over as many streams and attempts as it needs.

    Several threads may call ``accept``.  A subclass may work on a payload while it comes: see ``begun``.
    """

    def __init__(self) -> None:
        self._come: Callable[[int], None] | None = None
        self._spare = bytearray()
        self._lock = threading.Lock()
        self.header: PullHeader | None
        self.breaks: int
        """Interrupted attempts at the payload held."""
        self._hold(bytearray())

    @property
    def bytes_held(self) -> int:
        """Bytes held anywhere in the payload; thread-safe."""
        with self._lock:
            return self._holes.held

    def missing(self) -> list[Span]:
        """Return the missing spans, in order."""
        with self._lock:
            return list(self._holes.spans)

    def clear(self) -> None:
        """Drop what was received."""
        self._view.release()
        self._spare = self._buffer or self._spare
        self._hold(bytearray())

    def begun(self, header: PullHeader, payload: memoryview) -> Callable[[int], None] | None:
        """Note that a payload begins; ``payload`` is the memory that it will fill.

        May return a callback, which the receiving threads call, in any order, with the number of contiguous bytes from
        byte 0.  It is not called after ``broke_off``, and the next attempt may begin late or never.
        """
        del header, payload
        return None

    def broke_off(self) -> None:
        """Note that an attempt broke off and all its threads have ended; the received bytes are kept."""
        self._come = None

    def _hold(self, memory: bytearray, header: PullHeader | None = None) -> None:
        """Use ``memory`` for the payload of ``header``, all of it missing.

        Header and holes are set under one lock, because a header without its holes would look like a complete payload.
        """
        payload_bytes = header.payload_bytes if header is not None else 0
        self._buffer, self._view = memory, memoryview(memory)
        with self._lock:
            self.header, self._holes, self._unwritten = header, Holes(payload_bytes), Holes(payload_bytes)
        self._come = None
        self.breaks = 0

    def begin(self, header: PullHeader) -> None:
        """Take a header.  Keeps the bytes held if they belong to it; otherwise starts at byte 0."""
        if self.belongs(header):
            self.header = header
            return
        self.clear()
        memory, self._spare = self._spare, bytearray()
        if not header.payload_bytes <= len(memory) <= 2 * header.payload_bytes:
            memory = bytearray(header.payload_bytes)  # Ten times as slow to write as the spare one.
        self._hold(memory, header)
        self._come = self.begun(header, self._view[: header.payload_bytes].toreadonly())

    def belongs(self, header: PullHeader) -> bool:
        """Return whether the bytes held are of the payload that ``header`` describes."""
        held = self.header
        return held is not None and replace(header, fates=held.fates, epoch=held.epoch) == held

    def accept(self, chunk: Chunk | Frame) -> None:
        """Store a piece of the payload, in any order.  ``ChunkError`` when its bytes are not missing.

        A damaged one is ignored, and its bytes stay missing.
        """
        if self.header is None:
            raise MalformedMessage("a chunk came before the header")
        if not chunk.intact:
            return
        offset, end = chunk.offset, chunk.offset + len(chunk.data)
        with self._lock:
            if not self._holes.fill(offset, end):
                raise ChunkError(f"chunk at offset {offset} has {len(chunk.data)} bytes that are not missing")
        self._view[offset:end] = chunk.data
        if (come := self._come) is not None:
            with self._lock:
                self._unwritten.fill(offset, end)
                left = self._unwritten.spans
                held = left[0][0] if left else self._unwritten.payload_bytes
            come(held)

    def finish(self) -> PulledVersion:
        """Return the complete version.  ``DamagedChunk`` for missing bytes or a wrong checksum of the whole."""
        if self.header is None:
            raise DamagedChunk("the stream ended before the header")
        if missing := self.missing():
            raise DamagedChunk(f"payload ends at {missing[0][0]} of {self.header.payload_bytes} bytes")
        told = self.header.payload_crc32
        if told and checksum((self._view[: self.header.payload_bytes],)) != told:
            self.clear()
            raise DamagedChunk("the checksum of the whole payload differs")
        parts, start, view = [], 0, self._view.toreadonly()
        for part_bytes in self.header.part_bytes:
            parts.append(view[start : start + part_bytes])
            start += part_bytes
        pulled = PulledVersion(self.header, tuple(parts))
        self._hold(bytearray())
        return pulled

    def give_back(self, pulled: PulledVersion) -> None:
        """Reuse the memory of ``pulled`` for the next payload of about its length; its parts become invalid.

        Does nothing while the parts are still in use.
        """
        memory = pulled.parts[0].obj if pulled.parts else None
        if not isinstance(memory, bytearray):
            return
        with suppress(BufferError):
            for part in pulled.parts:
                part.release()
            memory.append(memory.pop())  # Raises while another view of a part exists.
            self._spare = memory


@dataclass(eq=False)
class Patience:
    """The timeout of a pull that waits for a version not yet published; it also measures how long the transfer took.

    Any thread may call ``due`` when the version is published: a stream that still waits then has lost its connection.
    """

    seconds: float
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _waiting: dict[Guard, float] = field(init=False, default_factory=dict)
    _due: bool = field(init=False, default=False)
    _began_s: float | None = field(init=False, default=None)

    def begin(self, guard: Guard, stall_s: float) -> None:
        """Let a stream wait: ``seconds`` plus ``stall_s``, and only ``stall_s`` once the version is published."""
        with self._lock:
            self._waiting[guard] = stall_s
            guard.limit(stall_s if self._due else self.seconds + stall_s)

    def came(self, guard: Guard) -> None:
        """Note that a stream has begun to receive the version."""
        with self._lock:
            if (stall_s := self._waiting.pop(guard, None)) is not None:
                guard.limit(stall_s)
            self._began_s = self._began_s or time.monotonic()

    def due(self) -> None:
        """Note that the version is published."""
        with self._lock:
            self._due = True
            for guard, stall_s in self._waiting.items():
                guard.limit(stall_s)

    @property
    def carried_s(self) -> float:
        """Seconds since the first stream began to receive the version; 0 before that."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s


def pieces(missing: Sequence[Span], count: int, bytes_max: int) -> list[Span]:
    """Cut at most ``count`` spans from the start of what is missing, one per concurrent stream, each at most
    ``bytes_max`` long."""
    total = sum(end - begin for begin, end in missing)
    most = min(bytes_max, max(PIECE_BYTES_MIN, -(-total // count)))
    found = [(at, min(end, at + most)) for begin, end in missing for at in range(begin, end, most)]
    return found[:count]
