"""One attempt to get a version, over one stream or several.

``PullSink`` keeps what a pull has brought when the pull breaks off in the middle, so that the next attempt goes on from
there.  ``Pulling`` is the attempt: it opens the streams and fills the sink.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert_bulk
from diloco.wire.chunks import PIECE_BYTES_MIN, Assembler, ChunkError, DamagedChunk, Holes, bytes_at_risk, checksum
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
    PAYLOAD_BYTES_MAX,
    Chunk,
    Frame,
    MalformedMessage,
    PullAsk,
    PullHeader,
    Refused,
    Status,
    Unreachable,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.channel import Calls, Guard, StallWatch
    from diloco.wire.chunks import Span
    from diloco.wire.options import ClientOptions


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


class Patience:
    """How long a pull waits for a version that is not there yet, and how fast the version came when it was.

    ``due`` may be called by any thread: the version is there, and whoever still waits has lost its connection.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._waiting: dict[Guard, float] = {}
        self._due = False
        self._began_s: float | None = None

    def begin(self, guard: Guard, stall_s: float) -> None:
        """A stream waits; once the version is there nothing is quiet for ``stall_s``."""
        with self._lock:
            self._waiting[guard] = stall_s
            guard.limit(stall_s if self._due else self.seconds + stall_s)

    def came(self, guard: Guard) -> None:
        """A stream has begun to bring it."""
        with self._lock:
            if (stall_s := self._waiting.pop(guard, None)) is not None:
                guard.limit(stall_s)
            self._began_s = self._began_s or time.monotonic()

    def due(self) -> None:
        """The version is known to be there."""
        with self._lock:
            self._due = True
            for guard, stall_s in self._waiting.items():
                guard.limit(stall_s)

    @property
    def carried_s(self) -> float:
        """Since the first stream began to bring it."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s


class Pulling:
    """Fills ``sink``, over one stream of each of ``bulk``.

    Where nothing is known of the payload yet, the first asks for it, and the others join it in bringing it once it is
    seen to be long; where that is known, all ask at once.
    """

    def __init__(
        self,
        bulk: Sequence[Calls],
        ask: PullAsk,
        sink: PullSink,
        options: ClientOptions,
        stalls: StallWatch,
        received: Callable[[int], None],
        at_once: int = 1,
        patience: Patience | None = None,
        bytes_per_s: int = 0,
    ) -> None:
        """``at_once``: so many of ``bulk`` ask without waiting for the first; with ``patience`` for what is to come.

        ``bytes_per_s`` is what all streams together ask to be sent; 0: as fast as can be."""
        self._bytes_per_s = bytes_per_s
        self._bulk = bulk
        self._at_once = min(at_once, len(bulk))
        self._patience = patience
        self._ask = ask
        self._sink = sink
        self._options = options
        self._stalls = stalls
        self._received = received
        self._lock = threading.Lock()
        self._under_way: set[Any] = set()
        self._failed: WireError | None = None
        self._spoiled = False
        self._damaged = 0
        self._began = sink.bytes_held

    def run(self) -> PulledVersion:
        """Until everything is here.  ``Refused`` or ``Unreachable``; what came stays in the sink."""
        try:
            return self._run()
        except (Refused, Unreachable) as error:
            self._sink.broke_off()
            self._sink.breaks += isinstance(error, Unreachable)
            raise

    def _run(self) -> PulledVersion:
        held = self._sink.header
        if held is not None and self._sink.bytes_held > 0 and held.fragment == self._ask.fragment:
            try:
                # Where nothing is missing the header comes once more, with the fates as they are now.
                self._join(self._open(held, self._spans(held) or [(held.payload_bytes, 0)], self._bulk))
                return self._rest(held)
            except Refused as refused:
                if refused.status is not Status.NOT_FOUND:
                    raise
                self._failed = None
        self._sink.clear()
        return self._anew()

    def _anew(self) -> PulledVersion:
        wait_ns = int(self._patience.seconds * 1e9) if self._patience is not None else 0
        deal = 1 + secrets.randbits(61) if len(self._bulk) > 1 else 0
        ask = replace(self._ask, wait_ns=wait_ns, deal=deal)
        first, later = self._bulk[: self._at_once], self._bulk[self._at_once :]
        others: list[threading.Thread] = []

        def begun(header: PullHeader) -> None:
            worth = header.payload_bytes // PIECE_BYTES_MIN - len(first)
            if header.frames and not others:
                others.extend(self._begin([replace(ask, wait_ns=0)] * max(0, worth), later))

        others_first = self._begin([ask] * (len(first) - 1), first[1:])
        self._stream(first[0], ask, len(self._bulk), begun)
        self._join([*others_first, *others])
        return self._rest(self._sink.header)

    def _rest(self, header: PullHeader | None) -> PulledVersion:
        """What is missing, until nothing is."""
        while header is not None and (missing := self._sink.missing()):
            damaged = self._damaged
            self._join(self._open(header, self._spans(header), self._bulk))
            if self._sink.missing() == missing and self._damaged == damaged:
                break
        try:
            return self._sink.finish()
        except DamagedChunk as error:
            raise Unreachable(f"Pull: {error}") from error

    def _spans(self, header: PullHeader) -> list[Span]:
        """What to ask for next.  Whoever sends no frames knows of no lengths either."""
        missing = self._sink.missing()
        if not header.frames:
            return [(begin, 0) for begin, _ in missing[:1]]
        breaks, passed = self._sink.breaks, self._sink.bytes_held - self._began
        most = bytes_at_risk(breaks, passed) // len(self._bulk) if breaks else header.payload_bytes
        return pieces(missing, len(self._bulk), max(CHUNK_BYTES_MIN, most))

    def _open(self, header: PullHeader, spans: Sequence[Span], bulk: Sequence[Calls]) -> list[threading.Thread]:
        """A stream for each of ``spans``."""
        asks = [
            replace(self._ask, want_version=header.version, offset=begin, length=max(0, end - begin))
            for begin, end in spans
        ]
        return self._begin(asks, bulk)

    def _begin(self, asks: Sequence[PullAsk], bulk: Sequence[Calls]) -> list[threading.Thread]:
        """A stream for each of ``asks``, each in a thread of its own but for one that is alone."""
        if len(asks) == 1 and bulk is self._bulk:
            self._stream(bulk[0], asks[0], 1)
            return []
        threads = [
            threading.Thread(target=self._stream, args=(calls, ask, len(self._bulk)), name="pull-piece", daemon=True)
            for calls, ask in zip(bulk, asks, strict=False)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Every one of them is over; raises what the first that failed has met."""
        for thread in threads:
            thread.join()
        if self._spoiled:
            self._sink.clear()
        if self._failed is not None:
            raise self._failed

    def _stream(
        self, bulk: Calls, ask: PullAsk, streams: int, begun: Callable[[PullHeader], None] = lambda header: None
    ) -> None:
        """One stream of several at once; where it fails it ends the others and says why in ``_failed``."""
        each_of = 1 if ask.deal else streams  # What a deal may carry is all its streams' together.
        # 0 would be no bound at all.
        ask = replace(ask, bytes_per_s=max(1, self._bytes_per_s // each_of) if self._bytes_per_s else 0)
        with self._stalls.guard(self._options.stall_s) as guard:
            call: Any = None
            try:
                call = bulk.stream("Pull", convert_bulk.pack_pull(ask))
                guard.arm(call.cancel)
                if self._patience is not None and ask.wait_ns:
                    self._patience.begin(guard, self._options.stall_s)
                self._follow(call, ask, guard, begun)
            except DamagedChunk as error:
                self._fail(Unreachable(f"Pull: {error}"))
            except (MalformedMessage, ChunkError) as error:
                self._spoiled = True
                self._fail(Unreachable(f"Pull: the syncer's answer cannot be: {error}"))
            except grpc.RpcError as error:
                self._fail(bulk.failed("Pull", error, guard))
            except WireError as error:
                self._fail(error)
            finally:
                if call is not None:
                    call.cancel()
                    with self._lock:
                        self._under_way.discard(call)

    def _follow(self, call: Any, ask: PullAsk, guard: Guard, begun: Callable[[PullHeader], None]) -> None:
        with self._lock:
            self._under_way.add(call)
            if self._failed is not None:
                return
        for raw in call:
            guard.touch()
            self._received(len(raw))
            part = convert_bulk.unpack_pull_part(raw)
            if isinstance(part, PullHeader):
                if self._patience is not None and ask.wait_ns:
                    self._patience.came(guard)
                if not self._take_header(part, ask):
                    return
                begun(part)
            else:
                self._take(part)

    def _take_header(self, header: PullHeader, ask: PullAsk) -> bool:
        """Whether what comes behind it is wanted."""
        if header.fragment != ask.fragment or (header.from_version != ask.have_version and not header.whole):
            raise MalformedMessage(f"fragment {header.fragment} from version {header.from_version} was not asked for")
        with self._lock:
            goes_on = self._sink.header is not None and not self._sink.belongs(header)
            if goes_on and ask.want_version == 0:
                return False  # One was published between two parts: what this one would bring is asked for once more.
            if goes_on and ask.want_version != 0:
                raise MalformedMessage(f"version {header.version} is not the one that the pull began with")
            self._sink.begin(header)
            return True

    def _take(self, part: Chunk | Frame) -> None:
        if isinstance(part, Frame) and not part.intact:
            with self._lock:
                self._damaged += 1
                if self._damaged > AGAINS_MAX:
                    raise DamagedChunk(f"chunks were damaged on the way {self._damaged} times")
        self._sink.accept(part)

    def _fail(self, why: WireError) -> None:
        with self._lock:
            self._failed = self._failed or why
            others = list(self._under_way)
        for call in others:
            call.cancel()


def pieces(missing: Sequence[Span], count: int, bytes_max: int) -> list[Span]:
    """At most ``count`` spans of what is missing, from its beginning, for as many streams at once; none longer than
    ``bytes_max``."""
    total = sum(end - begin for begin, end in missing)
    most = min(bytes_max, max(PIECE_BYTES_MIN, -(-total // count)))
    found = [(at, min(end, at + most)) for begin, end in missing for at in range(begin, end, most)]
    return found[:count]
