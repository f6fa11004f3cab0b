"""The syncer's end of ``SyncService``.

Messages come as raw bytes and are parsed here, so that bytes which are not a message are the sender's fault
(INVALID_ARGUMENT) and not ours.  Each call is checked in this order: who is it, have they called too often, may they
call this method (``door``); is the message within its size and its bounds; may they speak for this site; is it this
run; may they send this update; is there room.  Only then the shell is asked, and only then a byte of payload is read.
``arrivals`` says why all methods are streams.

Receiving.  ``Receiving`` takes the bytes of one push, over one stream or several, and hands them in order to a session.

Deals.  ``Deal`` sends one payload over several streams: it gives each chunk to the stream that can take it next.  Parts
of equal length would end when the slowest connection has brought its own.

Probe.  What a probe costs the syncer is bounded before a byte of it is parsed: the caller is known, it makes one at a
time, and few are made at once.  With filler, a caller makes one every few seconds, and its bytes are charged to the
rates that the caller is granted.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from diloco.sync.link import later_rate
from diloco.wire import convert, convert_bulk
from diloco.wire.arrivals import streamed, unary
from diloco.wire.channel import SYNC_SERVICE, Pacer
from diloco.wire.chunks import Assembler, ChunkError, ChunkSize, DamagedChunk, Window, cut_as_asked, tail_chunk
from diloco.wire.convert import pack_probe_reply, unpack_probe
from diloco.wire.convert_bulk import Repeats
from diloco.wire.door import Counters, Gate, OneAtATime
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
    CONTROL_BYTES_MAX,
    FRAMES_SINCE,
    JOIN_BYTES_MAX,
    PROBES_MAX,
    STREAMS_MAX,
    WINDOW_BYTES,
    Alive,
    Chunk,
    Dropped,
    Filler,
    Frame,
    MalformedMessage,
    ProbeAsk,
    ProbeTaken,
    PushAdmitted,
    PushAgain,
    PushCommit,
    PushHeader,
    PushResult,
    Refusal,
    Status,
)
from diloco.wire.options import FRAMES_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.channel import Guard, StallWatch
    from diloco.wire.chunks import Piece, Span
    from diloco.wire.door import Door
    from diloco.wire.identity import Identity
    from diloco.wire.messages import PullAsk, PullHeader, WatchEvent
    from diloco.wire.options import ServerOptions
    from diloco.wire.service import PullSource, PushSession, SyncerApi, WatchFeed

LOOK_S = 0.25
ROOM_WAIT_S = 5.0
"""So long a stream waits for one that is behind it, before what it brought is let fall and asked for again."""


class Receiving:
    """One push.  Its streams call from a thread each; the session is called by one of them at a time."""

    def __init__(self, header: PushHeader, session: PushSession) -> None:
        self.header = header
        self._window = Window(header.payload_bytes, session.write, session.offset, WINDOW_BYTES)
        self._changed = threading.Condition()
        self._asked: set[int] = set()
        self.agains = 0
        """Times that something was asked for once more."""
        self._streams = 1
        self._over = False

    @property
    def offset(self) -> int:
        """Bytes that the session has."""
        return self._window.offset

    @property
    def awaits(self) -> bool:
        """Whether something was asked for again and has not come."""
        with self._changed:
            return bool(self._asked)

    def chunk(self, chunk: Chunk) -> None:
        """Take a chunk, which must be the next one.  ``ChunkError`` when it is not, or was damaged."""
        with self._changed:
            assembler = Assembler(self.header.payload_bytes, self._window.accept, self.offset)
            assembler.accept(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3)

    def frame(self, frame: Frame) -> PushAgain | None:
        """Take a frame.  What it was, when it has to be sent once more."""
        end = frame.offset + len(frame.data)
        if end > self.header.payload_bytes:
            raise ChunkError(f"frame at offset {frame.offset} ends at {end} of {self.header.payload_bytes} bytes")
        until_s = time.monotonic() + ROOM_WAIT_S
        with self._changed:
            while not self._over:
                if not frame.intact:
                    return self._ask(frame, "was damaged on the way")
                if self._window.accept(frame.offset, frame.data):
                    self._asked.discard(frame.offset)
                    self._changed.notify_all()
                    return None
                # Only another stream can be what everybody waits for, and not while it waits for a chunk once more:
                # that may come behind this one.
                waits = self._streams > 1 and not self._asked
                if not waits or not self._changed.wait(until_s - time.monotonic()):
                    return self._ask(frame, "found no room")
        raise DamagedChunk("the push that this stream belongs to is over")

    def _ask(self, frame: Frame, why: str) -> PushAgain | None:
        if frame.offset + len(frame.data) <= self.offset:
            return None
        self.agains += 1
        if self.agains > AGAINS_MAX:
            raise DamagedChunk(f"chunk at offset {frame.offset} {why}, as {AGAINS_MAX} before it")
        self._asked.add(frame.offset)
        self._changed.notify_all()
        return PushAgain(frame.offset, len(frame.data))

    def await_rest(self, moved: Callable[[], object], active: Callable[[], bool]) -> None:
        """Behind the commit: until what streams beside it still bring is here, or something is wanted once more.

        ``moved`` is told of what came; as soon as the sender is not ``active`` nothing more is expected.
        """
        with self._changed:
            while self.header.others and not (self._window.complete or self._asked) and active():
                before = self.offset
                self._changed.wait(LOOK_S)
                if self.offset > before:
                    moved()

    def finish(self) -> None:
        """``DamagedChunk`` unless every byte is there."""
        if not self._window.complete:
            raise DamagedChunk(f"payload ends at {self.offset} of {self.header.payload_bytes} bytes")

    @contextmanager
    def stream_beside(self) -> Iterator[None]:
        """One stream more brings chunks of this push."""
        with self._changed:
            if self._streams >= STREAMS_MAX:
                raise MalformedMessage(f"a push has at most {STREAMS_MAX} streams")
            self._streams += 1
        try:
            yield
        finally:
            with self._changed:
                self._streams -= 1

    def close(self) -> None:
        """The session takes nothing more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Receivings:
    """The pushes under way, so that streams beside the first find theirs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[tuple[str, int, int], Receiving] = {}

    @contextmanager
    def open(self, header: PushHeader, session: PushSession) -> Iterator[Receiving]:
        """A push that was admitted, as long as it is."""
        receiving = Receiving(header, session)
        with self._changed:
            self._open[_key(header)] = receiving
            self._changed.notify_all()
        try:
            yield receiving
        finally:
            receiving.close()
            with self._changed:
                if self._open.get(_key(header)) is receiving:
                    del self._open[_key(header)]

    def of(self, header: PushHeader, timeout_s: float, active: Callable[[], bool]) -> Receiving:
        """The one that a stream beside it belongs to.

        One that may come before that was admitted waits for it, at most ``timeout_s`` and while ``active``.
        ``DamagedChunk`` where it is over: what comes here is lost.
        """
        wanted, until_s = replace(header, beside=False), time.monotonic() + timeout_s
        with self._changed:
            while True:
                receiving = self._open.get(_key(header))
                if receiving is not None and receiving.header == wanted:
                    return receiving
                left_s = until_s - time.monotonic()
                if not header.others or left_s <= 0 or not active():
                    raise DamagedChunk("the push that this stream belongs to is over")
                self._changed.wait(min(left_s, LOOK_S))


def _key(header: PushHeader) -> tuple[str, int, int]:
    return header.site_id, header.fragment, header.sequence


DEALS_KEPT = 16
"""Of each asker: a stream that comes when the others are through finds that nothing is left for it."""


class Deal:
    """A payload of ``payload_bytes`` for any number of streams, each in a thread of its own."""

    def __init__(self, payload_bytes: int, bytes_per_s: int) -> None:
        self._payload_bytes = payload_bytes
        self.pacer = Pacer(bytes_per_s)
        """Of all its streams together, so that what one does not take is another's."""
        self._lock = threading.Lock()
        self._at = 0
        self._streams = 0

    def join(self) -> None:
        """One stream more."""
        with self._lock:
            self._streams += 1

    def next(self, chunk_bytes: int) -> Span | None:
        """What a stream sends next, at most ``chunk_bytes`` of it; None when everything is dealt."""
        with self._lock:
            left = self._payload_bytes - self._at
            if not left:
                return None
            begin = self._at
            self._at += min(left, tail_chunk(chunk_bytes, left, self._streams))
            return begin, self._at


class Deals:
    """Those of all askers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, dict[tuple[int, ...], Deal]] = {}

    def join(self, asker: str, ask: PullAsk, header: PullHeader) -> Deal:
        """The one that ``asker`` calls ``ask.deal``; of another version than that of another stream it is another."""
        key = (ask.deal, header.fragment, header.from_version, header.version, header.whole, header.payload_bytes)
        with self._lock:
            mine = self._of.setdefault(asker, {})
            deal = mine.get(key)
            if deal is None:
                while len(mine) >= DEALS_KEPT:
                    del mine[next(iter(mine))]
                deal = mine[key] = Deal(header.payload_bytes, ask.bytes_per_s)
        deal.join()
        return deal


class ProbeHandler:
    """One for all callers."""

    def __init__(
        self, api: SyncerApi, options: ServerOptions, arrivals: Arrivals, door: Door, stalls: StallWatch
    ) -> None:
        self._api = api
        self._options = options
        self._arrivals = arrivals
        self._door = door
        self._stalls = stalls
        self._gate = Gate("probe", PROBES_MAX, 1, options.pushback_ms)

    def probe(self, requests: Iterator[bytes], context: Any, identity: Identity) -> Iterator[bytes]:
        """The method, for a caller who was let in."""
        with self._gate.enter(identity.caller(context)):
            ask = self._asked(self._arrivals.first(requests, context, identity, large=True))
            self._door.check_probe(ask.bytes_up, ask.bytes_down, identity)
            answer = self._api.probe(ask, identity)
            with self._stalls.guard(self._options.stall_s, context.cancel) as guard:
                yield pack_probe_reply(replace(answer, identity=identity.name, time_ns=time.time_ns()))
                if ask.bytes_up:
                    yield pack_probe_reply(self._taken(ask, requests, guard, identity))
                if ask.bytes_down:
                    yield from self._filler(ask, guard, identity)

    def _asked(self, raw: bytes) -> ProbeAsk:
        if len(raw) > JOIN_BYTES_MAX:
            raise MalformedMessage(f"ask is {len(raw)} bytes long: at most {JOIN_BYTES_MAX} wanted")
        ask = unpack_probe(raw)
        if not isinstance(ask, ProbeAsk):
            raise MalformedMessage("the first message of a probe is not its ask")
        if ask.run_id not in ("", self._options.run_id):
            raise Refusal(Status.NOT_FOUND, f"run_id is {ask.run_id!r}: there is no such run here")
        return ask

    def _taken(self, ask: ProbeAsk, requests: Iterator[bytes], guard: Guard, identity: Identity) -> ProbeTaken:
        """Filler, as long as it comes, there is time, and it is no more than was said."""
        seen: list[tuple[int, int]] = []
        messages_max = ask.bytes_up // CHUNK_BYTES_MIN + 2
        for count, raw in enumerate(requests):
            part = unpack_probe(raw)
            total = (seen[-1][1] if seen else 0) + (len(part.data) if isinstance(part, Filler) else 0)
            if not isinstance(part, Filler) or total > ask.bytes_up or count >= messages_max:
                raise MalformedMessage(
                    f"filler wanted, {ask.bytes_up} bytes at most, in {messages_max} messages at most"
                )
            guard.touch()
            self._door.received(len(part.data), identity, "probe_bytes_in")
            seen.append((time.monotonic_ns(), total))
            if total == ask.bytes_up or seen[-1][0] - seen[0][0] >= ask.limit_ns:
                break
        if not seen:
            return ProbeTaken(0, 0, 0)
        return ProbeTaken(seen[-1][1], seen[-1][0] - seen[0][0], int(later_rate(seen)))

    def _filler(self, ask: ProbeAsk, guard: Guard, identity: Identity) -> Iterator[bytes]:
        block = os.urandom(min(CHUNK_BYTES_MIN, ask.bytes_down))
        until, left = time.monotonic_ns() + ask.limit_ns, ask.bytes_down
        whole = pack_probe_reply(Filler(block))
        while left and time.monotonic_ns() < until:
            count = min(len(block), left)
            self._door.sends(count, identity, "probe_bytes_out")
            yield whole if count == len(block) else pack_probe_reply(Filler(block[:count]))
            guard.touch()
            left -= count


_FEED_WAIT_S = 0.5
_JOINS_EACH_MAX = 2
"""Of one caller at once: its process, and the one that takes its place."""
SHORT_CHUNKS_MAX = 64
"""Chunks of one push that may be shorter than ``CHUNK_BYTES_MIN``."""


class SyncHandlers:
    """All methods of ``SyncService`` over one ``SyncerApi``."""

    def __init__(
        self,
        api: SyncerApi,
        options: ServerOptions,
        arrivals: Arrivals,
        door: Door,
        stalls: StallWatch,
        counters: Counters,
        stopping: threading.Event,
    ) -> None:
        self._api = api
        self._options = options
        self._arrivals = arrivals
        self._door = door
        self._stalls = stalls
        self._counters = counters
        self._stopping = stopping
        pushback_ms = options.pushback_ms
        self._joins = Gate("join", options.sites_max, _JOINS_EACH_MAX, pushback_ms)
        self._pushes = Gate("push", options.push_credits, options.pushes_per_site_max, pushback_ms)
        self._pulls = Gate("pull", options.pull_credits, options.pulls_per_site_max, pushback_ms)
        self._watches = Gate("watch", options.watch_credits, options.watches_per_site_max, pushback_ms)
        self._pushing = OneAtATime("push", pushback_ms)
        self._watching = OneAtATime("watch", pushback_ms)
        self._probing = ProbeHandler(api, options, arrivals, door, stalls)
        self._receivings = Receivings()
        self._deals = Deals()
        self._repeats = Repeats(FRAMES_KEPT * options.chunk_bytes)

    def generic_handler(self) -> Any:
        """What gRPC's server takes."""
        handlers = {
            "Join": grpc.stream_unary_rpc_method_handler(self._unary("Join", self._join, self._joins, large=True)),
            "Report": grpc.stream_unary_rpc_method_handler(self._unary("Report", self._report)),
            "Leave": grpc.stream_unary_rpc_method_handler(self._unary("Leave", self._leave)),
            "Push": grpc.stream_stream_rpc_method_handler(self._streaming("Push", self._push)),
            "Watch": grpc.stream_stream_rpc_method_handler(self._streaming("Watch", self._watch)),
            "Pull": grpc.stream_stream_rpc_method_handler(self._streaming("Pull", self._pull)),
            "Probe": grpc.stream_stream_rpc_method_handler(self._streaming("Probe", self._probing.probe)),
        }
        return grpc.method_handlers_generic_handler(SYNC_SERVICE, handlers)

    def _unary(
        self, method: str, work: Callable[[bytes, Identity], bytes], gate: Gate | None = None, *, large: bool = False
    ) -> Callable[[Iterator[bytes], Any], bytes]:
        return unary(self._arrivals, self._counters, method, work, large=large, gate=gate)

    def _streaming(
        self, method: str, work: Callable[[Iterator[bytes], Any, Identity], Iterator[bytes]]
    ) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
        def let_in(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            with self._arrivals.enter(method, context) as identity:
                yield from work(requests, context, identity)

        def handler(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            return streamed(let_in(requests, context), context, method, self._counters)

        return handler

    def _check_run(self, run_id: str) -> None:
        if run_id != self._options.run_id:
            raise Refusal(Status.NOT_FOUND, f"run_id is {run_id!r}: there is no such run here")

    def _join(self, raw: bytes, identity: Identity) -> bytes:
        ask = convert.unpack_join(raw)
        identity.check_site(ask.site_id)
        return convert.pack_join_reply(self._api.join(ask, identity))

    def _report(self, raw: bytes, identity: Identity) -> bytes:
        report = convert.unpack_report(raw)
        identity.check_site(report.site_id)
        self._check_run(report.run_id)
        return convert.pack_report_reply(self._api.report(report, identity))

    def _leave(self, raw: bytes, identity: Identity) -> bytes:
        ask = convert.unpack_leave(raw)
        identity.check_site(ask.site_id)
        self._check_run(ask.run_id)
        self._api.leave(ask.site_id, ask.incarnation, identity)
        return b""

    # --- Push --------------------------------------------------------------------------------------------------

    def _push(self, requests: Iterator[bytes], context: Any, identity: Identity) -> Iterator[bytes]:
        with self._stalls.guard(self._options.header_timeout_s, context.cancel) as guard:
            with self._arrivals.waiting(identity, context):
                header = self._declared(requests, identity)
            if header.beside:
                yield from self._push_beside(header, requests, context, guard, identity)
                return
            self._door.check_push(header, identity)
            key = (header.site_id, header.fragment, header.sequence)
            with (
                self._pushing.enter(key, header.incarnation, context.cancel),
                self._pushes.enter(header.site_id),
            ):
                guard.limit(None)
                opened = self._api.open_push(header, identity)
                guard.limit(self._options.stall_s)
                if isinstance(opened, PushResult):
                    result = opened
                else:
                    with closing(opened), self._receivings.open(header, opened) as receiving:
                        yield convert_bulk.pack_push_reply(PushAdmitted(opened.offset, header.frames))
                        result = yield from self._received(receiving, opened, requests, context, guard, identity)
            yield convert_bulk.pack_push_reply(result)

    def _declared(self, requests: Iterator[bytes], identity: Identity) -> PushHeader:
        raw = next(requests, None)
        if raw is None:
            raise DamagedChunk("the stream ended before the header")
        if len(raw) > CONTROL_BYTES_MAX:  # A chunk may be longer, and is nothing to be parsed before the header.
            raise MalformedMessage(f"header is {len(raw)} bytes long: at most {CONTROL_BYTES_MAX} wanted")
        header = convert_bulk.unpack_push(raw)
        if not isinstance(header, PushHeader):
            raise MalformedMessage("the first message of a push is not its header")
        identity.check_site(header.site_id)
        self._check_run(header.run_id)
        if header.payload_bytes > self._options.payload_bytes_max:
            raise MalformedMessage(
                f"payload_bytes is {header.payload_bytes}: at most {self._options.payload_bytes_max} wanted"
            )
        return header

    def _received(
        self,
        receiving: Receiving,
        session: PushSession,
        requests: Iterator[bytes],
        context: Any,
        guard: Guard,
        identity: Identity,
    ) -> Generator[bytes, None, PushResult]:
        header = receiving.header
        for part in self._parts(receiving, requests, guard):
            if isinstance(part, PushCommit):
                if (part.payload_bytes, part.digest) != (header.payload_bytes, header.digest):
                    raise MalformedMessage("the commit does not repeat what the header declared")
                receiving.await_rest(guard.touch, context.is_active)
                if receiving.awaits:
                    continue  # It was on its way when a chunk was asked for again, and comes once more behind that.
                receiving.finish()
                guard.limit(None)
                result = session.commit(part.digest)
                guard.limit(self._options.stall_s)
                return result
            yield from self._taken(receiving, part, identity)
        # A stream's end means nothing: a client that was killed looks like one that has finished.
        self._counters.add("broken_off")
        raise DamagedChunk(f"the stream ended at {receiving.offset} of {header.payload_bytes} bytes, before the commit")

    def _push_beside(
        self, header: PushHeader, requests: Iterator[bytes], context: Any, guard: Guard, identity: Identity
    ) -> Iterator[bytes]:
        """A stream that brings chunks of a push which another one has begun: it has passed whatever that has passed."""
        guard.limit(None)
        with self._arrivals.waiting(identity, context):
            receiving = self._receivings.of(header, self._options.header_timeout_s, context.is_active)
        with receiving.stream_beside():
            guard.limit(self._options.stall_s)
            for part in self._parts(receiving, requests, guard):
                if isinstance(part, PushCommit):
                    raise MalformedMessage("a push is committed by the stream that has begun it")
                yield from self._taken(receiving, part, identity)

    def _parts(
        self, receiving: Receiving, requests: Iterator[bytes], guard: Guard
    ) -> Iterator[Chunk | Frame | PushCommit]:
        # A chunk costs the same work however short it is; only the last one has a reason to be short.
        payload_bytes = receiving.header.payload_bytes
        messages_max = payload_bytes // CHUNK_BYTES_MIN + SHORT_CHUNKS_MAX
        for count, raw in enumerate(requests):
            guard.touch()
            if count > messages_max + 2 * receiving.agains:  # The chunk, and the commit that came before it.
                raise MalformedMessage(f"chunks are too short: {payload_bytes} bytes take {messages_max} at most")
            part = convert_bulk.unpack_push(raw)
            if isinstance(part, PushHeader):
                raise MalformedMessage("a push has one header")
            yield part

    def _taken(self, receiving: Receiving, part: Chunk | Frame, identity: Identity) -> Iterator[bytes]:
        self._door.received(len(part.data), identity)
        if isinstance(part, Chunk):
            receiving.chunk(part)
            return
        before = receiving.offset
        again = receiving.frame(part)
        if receiving.header.progress and receiving.offset > before:
            yield convert_bulk.pack_push_reply(PushAdmitted(receiving.offset, frames=True))
        if again is not None:
            self._counters.add("chunks_again")
            yield convert_bulk.pack_push_reply(again)

    # --- Watch -------------------------------------------------------------------------------------------------

    def _watch(self, requests: Iterator[bytes], context: Any, identity: Identity) -> Iterator[bytes]:
        raw = self._arrivals.first(requests, context, identity)
        ask = convert.unpack_watch(raw)
        identity.check_site(ask.site_id)
        self._check_run(ask.run_id)
        with (
            self._watching.enter((ask.site_id,), ask.incarnation, context.cancel),
            self._watches.enter(ask.site_id),
            closing(self._api.watch(ask.site_id, ask.incarnation, identity)) as feed,
            self._stalls.guard(self._options.stall_s, context.cancel) as guard,
        ):
            yield convert.pack_watch_event(Alive())
            until_s = time.monotonic() + self._options.connection_age_s
            while context.is_active() and not self._stopping.is_set():
                if identity.certificate and time.monotonic() > until_s:
                    raise Refusal(Status.UNAVAILABLE, "this stream is old: show a certificate once more")
                event = self._next_event(feed, context)
                guard.touch()
                yield convert.pack_watch_event(event)
                guard.touch()
                if isinstance(event, Dropped):
                    return
            if self._stopping.is_set():
                raise Refusal(Status.UNAVAILABLE, "the syncer stops")

    def _next_event(self, feed: WatchFeed, context: Any) -> WatchEvent:
        silent_until_s = time.monotonic() + self._options.alive_s
        while context.is_active() and not self._stopping.is_set():
            asked_s = time.monotonic()
            if asked_s >= silent_until_s:
                break
            wait_s = min(_FEED_WAIT_S, silent_until_s - asked_s)
            event = feed.get(wait_s)
            if event is not None:
                return event
            # A feed that was closed has nothing to wait for, and must not make this loop spin.
            self._stopping.wait(max(0.0, wait_s - (time.monotonic() - asked_s)))
        return Alive()

    # --- Pull --------------------------------------------------------------------------------------------------

    def _pull(self, requests: Iterator[bytes], context: Any, identity: Identity) -> Iterator[bytes]:
        raw = self._arrivals.first(requests, context, identity)
        ask = convert_bulk.unpack_pull(raw)
        identity.check_reader(ask.site_id)
        self._check_run(ask.run_id)
        self._door.check_pull(identity)
        self._await(ask, context)
        # By who it is, and not by whom it reads as: one site must not take up the room of all observers.
        asker = identity.name or ask.site_id
        with self._pulls.enter(asker):
            source = self._api.pull(ask, identity)
            try:
                if ask.offset > source.header.payload_bytes:
                    raise Refusal(Status.NOT_FOUND, f"offset is {ask.offset}: the payload is shorter")
                size = ChunkSize(CHUNK_BYTES_MIN, self._options.chunk_bytes, careful=ask.want_version > 0)
                deal = self._deals.join(asker, ask, source.header) if ask.deal else None
                pacer = deal.pacer if deal is not None else Pacer(ask.bytes_per_s)
                pieces = _pieces(ask, source, deal, lambda: pacer.chunk_bytes(size.bytes))
                with self._stalls.guard(self._options.stall_s, context.cancel) as guard:
                    frames = ask.protocol >= FRAMES_SINCE
                    yield convert_bulk.pack_pull_part(replace(source.header, frames=frames))
                    # Bytes that are asked for once more are looked at once more: they were damaged, perhaps here.
                    name = None if ask.want_version else replace(source.header, fates=(), epoch=0)
                    if name is not None and not ask.offset:
                        self._repeats.asked(name, asker, ask.deal)
                    for offset, data in pieces:
                        self._door.sends(len(data), identity)
                        pacer.wait(len(data), guard)
                        began_s = time.monotonic()
                        yield self._part(name, offset, data, frames=frames)
                        size.took(time.monotonic() - began_s)
                        guard.touch()
            finally:
                source.close()

    def _part(self, name: PullHeader | None, offset: int, data: memoryview, *, frames: bool) -> bytes:
        """One piece of what ``name`` describes, which several sites are sent."""
        if frames and name is not None:
            return self._repeats.frame(name, offset, data)
        return convert_bulk.pack_pull_part(Frame(offset, data) if frames else Chunk.of(offset, data))

    def _await(self, ask: PullAsk, context: Any) -> None:
        """Where nothing is there yet that the asker does not have: until it is, or it is waited for no longer.

        Whoever waits takes up none of the room of those who are sent something.
        """
        until_s = time.monotonic() + ask.wait_ns / 1e9
        while context.is_active() and not self._stopping.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._api.has_newer(ask.fragment, ask.have_version, min(left_s, _FEED_WAIT_S)):
                return


def _pieces(ask: PullAsk, source: PullSource, deal: Deal | None, chunk_bytes: Callable[[], int]) -> Iterator[Piece]:
    """What one stream brings of a payload."""
    if deal is None:
        payload_bytes = source.header.payload_bytes
        end = min(payload_bytes, ask.offset + ask.length) if ask.length else payload_bytes
        yield from cut_as_asked(source.parts, ask.offset, end, chunk_bytes)
        return
    while (span := deal.next(chunk_bytes())) is not None:
        yield from cut_as_asked(source.parts, *span, chunk_bytes)
