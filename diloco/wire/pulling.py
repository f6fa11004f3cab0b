"""One attempt to get a version, over one stream or several."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert_bulk
from diloco.wire.chunks import PIECE_BYTES_MIN, ChunkError, DamagedChunk, bytes_at_risk
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
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

    from diloco.wire.calls import Calls
    from diloco.wire.chunks import Span
    from diloco.wire.options import ClientOptions
    from diloco.wire.pulled import PulledVersion, PullSink
    from diloco.wire.stall import Guard, StallWatch


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
