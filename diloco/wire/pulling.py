"""One attempt to pull a version, over one stream or several.

``PullSink`` keeps the bytes of an interrupted pull, so that the next attempt resumes from there.  ``Pulling`` is the
attempt: it opens the streams and fills the sink.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from diloco.wire.channel import Arrival, Guard, Line, Stream
from diloco.wire.chunks import PIECE_BYTES_MIN, ChunkError, DamagedChunk, Holes, bytes_at_risk, check_next, checksum
from diloco.wire.convert import pack_pull, unpack_pull_part
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
    Chunk,
    Frame,
    MalformedMessage,
    Nonsense,
    PullAsk,
    PullHeader,
    Refused,
    Status,
    Unreachable,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.chunks import Span
    from diloco.wire.client import SyncClient


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
    def offset(self) -> int:
        """Bytes held before the first missing one."""
        with self._lock:
            return self._holes.first_missing

    @property
    def bytes_held(self) -> int:
        """Bytes held anywhere in the payload; thread-safe."""
        with self._lock:
            return self._holes.payload_bytes - sum(end - begin for begin, end in self._holes.spans)

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
        self._hold(self._memory(header.payload_bytes), header)
        self._come = self.begun(header, self._view[: header.payload_bytes].toreadonly())

    def belongs(self, header: PullHeader) -> bool:
        """Return whether the bytes held are of the payload that ``header`` describes."""
        held = self.header
        return held is not None and replace(header, fates=held.fates, epoch=held.epoch) == held

    def _memory(self, payload_bytes: int) -> bytearray:
        """Return a buffer; reuse the spare one if it fits, because new memory is ten times as slow to write."""
        spare, self._spare = self._spare, bytearray()
        return spare if payload_bytes <= len(spare) <= 2 * payload_bytes else bytearray(payload_bytes)

    def accept(self, chunk: Chunk | Frame) -> None:
        """Store a piece of the payload; frames may come in any order.  ``ChunkError`` when its bytes are not missing.

        A damaged frame is ignored, and its bytes stay missing.
        """
        if self.header is None:
            raise MalformedMessage("a chunk came before the header")
        if isinstance(chunk, Chunk):
            check_next(chunk, self.offset, self.header.payload_bytes)
        elif not chunk.intact:
            return
        offset, end = chunk.offset, chunk.offset + len(chunk.data)
        with self._lock:
            if not self._holes.fill(offset, end):
                raise ChunkError(f"chunk at offset {offset} has {len(chunk.data)} bytes that are not missing")
        self._view[offset:end] = chunk.data
        if (come := self._come) is not None:
            with self._lock:
                self._unwritten.fill(offset, end)
                held = self._unwritten.first_missing
            come(held)

    def finish(self) -> PulledVersion:
        """Return the complete version.  ``DamagedChunk`` for missing bytes or a wrong checksum of the whole."""
        if self.header is None:
            raise DamagedChunk("the stream ended before the header")
        if self.missing():
            raise DamagedChunk(f"payload ends at {self.offset} of {self.header.payload_bytes} bytes")
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
        try:
            for part in pulled.parts:
                part.release()
            memory.append(memory.pop())  # Raises while another view of a part exists.
        except BufferError:
            return
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


class Pulling:
    """Fills ``sink``, over at most one stream on each of the client's bulk connections.

    When the payload's length is unknown, the first stream asks for it, and the others join once the header shows that
    it is long; when it is known, all ask at once.
    """

    def __init__(
        self, client: SyncClient, ask: PullAsk, sink: PullSink, arrival: Arrival | None, patience: Patience | None
    ) -> None:
        """``ask.bytes_per_s`` is the rate limit of all streams together.  ``arrival`` takes the progress; None where
        the link is not measured.  ``patience`` is for a version that may not be published yet."""
        self.client, self.ask, self.sink, self.arrival, self.patience = client, ask, sink, arrival, patience
        self.bulk = client.in_turn()
        self.at_once = max(1, client.lengths.get(ask.fragment, 0) // PIECE_BYTES_MIN)
        """How many of ``bulk`` ask without waiting for the first one's header."""
        self._lock = threading.Lock()
        self._streams: list[Stream[bool]] = []
        self._failed: WireError | None = None
        self._spoiled = False
        self._damaged = self._began = 0

    def run(self) -> PulledVersion:
        """Pull until the version is complete.  On ``Refused`` or ``Unreachable`` the sink keeps what was received."""
        held, self._began = self.sink.header, self.sink.bytes_held
        try:
            if held is not None and self._began > 0 and held.fragment == self.ask.fragment:
                try:
                    # Even if nothing is missing, ask for the header again: it holds the present fates.
                    self._ask_for_missing(held)
                    return self._rest(held)
                except Refused as refused:
                    if refused.status is not Status.NOT_FOUND:
                        raise
                    self._failed = None
            self.sink.clear()
            return self._pull_from_start()
        except (Refused, Unreachable) as error:
            self.sink.broke_off()
            self.sink.breaks += isinstance(error, Unreachable)
            raise

    def _pull_from_start(self) -> PulledVersion:
        wait_ns = int(self.patience.seconds * 1e9) if self.patience is not None else 0
        deal = 1 + secrets.randbits(61) if len(self.bulk) > 1 else 0
        ask = replace(self.ask, wait_ns=wait_ns, deal=deal)  # The syncer applies one rate limit to a whole deal.
        first, later = self.bulk[: self.at_once], self.bulk[self.at_once :]
        others: list[threading.Thread] = []

        def begun(header: PullHeader) -> None:
            worth = header.payload_bytes // PIECE_BYTES_MIN - len(first)
            if header.frames and not others:
                others.extend(self._begin([replace(ask, wait_ns=0)] * max(0, worth), later))

        others_first = self._begin([ask] * (len(first) - 1), first[1:])
        self._stream(first[0], ask, begun)
        self._join([*others_first, *others])
        return self._rest(self.sink.header)

    def _rest(self, header: PullHeader | None) -> PulledVersion:
        """Ask for the missing bytes until none are missing; ``Unreachable`` when an attempt brings none."""
        while header is not None and (missing := self.sink.missing()):
            damaged = self._damaged
            self._ask_for_missing(header)
            if self.sink.missing() == missing and self._damaged == damaged:
                break
        try:
            return self.sink.finish()
        except DamagedChunk as error:
            raise Unreachable(f"Pull: {error}") from error

    def _ask_for_missing(self, header: PullHeader) -> None:
        """Ask once for missing bytes, over several streams, each with its share of the rate limit."""
        missing = self.sink.missing()
        if not missing:
            spans = [(header.payload_bytes, header.payload_bytes)]
        elif not header.frames:  # A syncer that sends no frames (protocol 2) ignores lengths.
            spans = [(missing[0][0], 0)]
        else:
            breaks, passed = self.sink.breaks, self.sink.bytes_held - self._began
            most = bytes_at_risk(breaks, passed) // len(self.bulk) if breaks else header.payload_bytes
            spans = pieces(missing, len(self.bulk), max(CHUNK_BYTES_MIN, most))
        rate = self.ask.bytes_per_s
        if rate and len(spans) > 1:
            rate = max(1, rate // len(self.bulk))  # At least 1, because 0 means no limit.
        ask = replace(self.ask, want_version=header.version, bytes_per_s=rate)
        asks = [replace(ask, offset=begin, length=max(0, end - begin)) for begin, end in spans]
        others = self._begin(asks[1:], self.bulk[1:])
        self._stream(self.bulk[0], asks[0])
        self._join(others)

    def _begin(self, asks: Sequence[PullAsk], bulk: Sequence[Line]) -> list[threading.Thread]:
        """Open a stream for each of ``asks``, each in its own thread."""
        threads = [
            threading.Thread(target=self._stream, args=(line, ask), name="pull-piece", daemon=True)
            for line, ask in zip(bulk, asks, strict=False)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for all threads; raises the error of the first stream that failed."""
        for thread in threads:
            thread.join()
        if self._spoiled:
            self.sink.clear()
        if self._failed is not None:
            raise self._failed

    def _stream(self, bulk: Line, ask: PullAsk, begun: Callable[[PullHeader], None] = lambda header: None) -> None:
        """Run one of several concurrent streams; on failure it sets ``_failed`` and ends the others."""
        stall_s = self.client.options.stall_s
        guard = Guard(self.client.stalls, stall_s)
        if self.patience is not None and ask.wait_ns:
            self.patience.begin(guard, stall_s)
        try:
            with Stream(bulk, "Pull", pack_pull(ask), lambda raw: self._take(raw, ask, guard, begun), guard) as stream:
                with self._lock:
                    self._streams.append(stream)
                    failed = self._failed is not None
                if not failed:
                    all(stream)  # Reads until ``_take`` returns False.
        except WireError as error:
            with self._lock:
                self._spoiled = self._spoiled or isinstance(error, Nonsense)
                self._failed = self._failed or error
                running = list(self._streams)
            for stream in running:
                stream.cancel()

    def _take(self, raw: bytes, ask: PullAsk, guard: Guard, begun: Callable[[PullHeader], None]) -> bool:
        """Handle one message; return whether to read on."""
        self.client.down.count(len(raw))
        if self.arrival is not None:
            self.arrival.more(len(raw))
        part = unpack_pull_part(raw)
        if isinstance(part, PullHeader):
            if self.patience is not None and ask.wait_ns:
                self.patience.came(guard)
            if part.fragment != ask.fragment or (part.from_version != ask.have_version and not part.whole):
                raise MalformedMessage(f"fragment {part.fragment} from version {part.from_version} was not asked for")
            with self._lock:
                if self.sink.header is not None and not self.sink.belongs(part):
                    if ask.want_version == 0:
                        return False  # A version was published between two streams' asks: ``_rest`` asks for this span.
                    raise MalformedMessage(f"version {part.version} is not the one that the pull began with")
                self.sink.begin(part)
            begun(part)
            return True
        if isinstance(part, Frame) and not part.intact:
            with self._lock:
                self._damaged += 1
                if self._damaged > AGAINS_MAX:
                    raise DamagedChunk(f"chunks were damaged on the way {self._damaged} times")
        self.sink.accept(part)
        return True


def pieces(missing: Sequence[Span], count: int, bytes_max: int) -> list[Span]:
    """Cut at most ``count`` spans from the start of what is missing, one per concurrent stream, each at most
    ``bytes_max`` long."""
    total = sum(end - begin for begin, end in missing)
    most = min(bytes_max, max(PIECE_BYTES_MIN, -(-total // count)))
    found = [(at, min(end, at + most)) for begin, end in missing for at in range(begin, end, most)]
    return found[:count]
