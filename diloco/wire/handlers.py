"""The syncer's end of ``SyncService``.

Messages come as raw bytes and are parsed here, so that bytes which are not a message are the sender's fault
(INVALID_ARGUMENT) and not ours.  In each call the order is: who is it, have they called too often, may they call this
method (``door``); is the message within its size and its bounds; may they speak for this site; is it this run; may they
send this update; is there room.  Only then the shell is asked, and only then a byte of payload is read.  ``arrivals``
says why all of them are streams.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert, convert_bulk
from diloco.wire.answers import streamed, unary
from diloco.wire.calls import SYNC_SERVICE
from diloco.wire.chunks import ChunkSize, DamagedChunk, cut_as_asked
from diloco.wire.dealing import Deals
from diloco.wire.gates import Counters, Gate, OneAtATime
from diloco.wire.messages import (
    CHUNK_BYTES_MIN,
    CONTROL_BYTES_MAX,
    FRAMES_SINCE,
    Alive,
    Chunk,
    Dropped,
    Frame,
    MalformedMessage,
    PushAdmitted,
    PushCommit,
    PushHeader,
    PushResult,
    Refusal,
    Status,
)
from diloco.wire.options import FRAMES_KEPT
from diloco.wire.pacing import Pacer
from diloco.wire.probe_handler import ProbeHandler
from diloco.wire.receiving import Receivings
from diloco.wire.repeats import Repeats

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Iterator

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.chunks import Piece
    from diloco.wire.dealing import Deal
    from diloco.wire.door import Door
    from diloco.wire.identity import Identity
    from diloco.wire.messages import PullAsk, PullHeader, WatchEvent
    from diloco.wire.options import ServerOptions
    from diloco.wire.receiving import Receiving
    from diloco.wire.service import PullSource, PushSession, SyncerApi, WatchFeed
    from diloco.wire.stall import Guard, StallWatch

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
