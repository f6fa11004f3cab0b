"""The gRPC handlers of the syncer's services, on top of the API that its shell implements.

Messages arrive as raw bytes and are parsed here, so that bytes that do not parse are the sender's error
(INVALID_ARGUMENT) and not the syncer's.  Each call is checked in this order: the caller's identity, its call rate, its
right to call this method (all in ``door``, which explains why all methods are streams); the message's size and bounds;
whether the caller may speak for the site; the run id; whether it may send this update; the concurrency limits.  Only
then is the shell called, and only then is payload read.

The shell.  ``SyncerApi`` and the protocols before it are what the syncer's shell must implement so that
``server.RunningServer`` can put it on the network, in plain dataclasses.  Their methods are called from many threads at
once, one per call of a client; none may block without a timeout.  Each may raise ``Refusal``, which ends that call with
the given status and text.  Any other exception is a bug of the syncer: it is logged with its traceback and answered
INTERNAL.  Before a method is called, the message was parsed and all its bounds checked, the caller was authenticated,
and it was checked that the caller may speak for the message's site and that the run id is this syncer's (except for
Join, where the shell's refusal names the difference).

Push.  ``Receiving`` takes the bytes of one push, over one stream or several, and writes them in order to a session.

Pull over several streams.  The streams of one pull share a ``channel.Deal``, which ``Deals`` finds by the number that
their asks have in common.

Frame cache.  Sites pull a version at the same time, so the frames made for one site are what the next site needs.
Making a frame reads its data, hashes it and copies it into newly allocated memory; ``Repeats`` caches the latest frames
to save that work.

Probe.  A probe tells a site whether its settings fit the syncer's, and how fast the link is, before it joins the run.
It changes nothing of the run, and a standby answers it as well.  Its cost to the syncer is bounded before it is parsed:
the caller is authenticated, has one probe at a time, and few run at once.  A caller may make a probe with filler only
every few seconds, and the filler is charged to the byte rates granted to the caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from diloco.wire import convert
from diloco.wire.channel import ADMIN_SERVICE, REPLICATION_SERVICE, SYNC_SERVICE, Arrival, Deal, Guard, Pacer, filler
from diloco.wire.chunks import ChunkError, ChunkSize, DamagedChunk, Window, check_next, cut
from diloco.wire.door import Call, Gate, OneAtATime
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
    CONTROL_BYTES_MAX,
    FRAMES_SINCE,
    JOIN_BYTES_MAX,
    PROBES_MAX,
    STOPS,
    STREAMS_MAX,
    WINDOW_BYTES,
    Alive,
    Chunk,
    Dropped,
    Filler,
    FollowAck,
    FollowStart,
    Frame,
    JoinAsk,
    JoinReply,
    MalformedMessage,
    MemberAsk,
    ProbeAsk,
    ProbeTaken,
    PullAsk,
    PullHeader,
    PushAdmitted,
    PushAgain,
    PushCommit,
    PushHeader,
    PushResult,
    Refusal,
    ReportInfo,
    ReportReply,
    Status,
    WatchEvent,
)
from diloco.wire.options import FRAMES_KEPT

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterator

    from diloco.wire.chunks import Piece
    from diloco.wire.convert import M
    from diloco.wire.door import Door
    from diloco.wire.identity import Identity
    from diloco.wire.messages import FollowPart, ProbeAnswer


class PushSession(Protocol):
    """One admitted push.  Called by one thread at a time, in the order ``write`` ..., ``commit``, ``close``."""

    @property
    def offset(self) -> int:
        """Bytes already held from an earlier, interrupted push of the same id; 0 when there are none."""

    def write(self, offset: int, data: memoryview) -> None:
        """Store ``data`` at ``offset``, which is always the next missing byte.  Its checksum was verified."""

    def commit(self, digest: str) -> PushResult:
        """Verify ``digest`` over all bytes (Refusal DATA_LOSS), make the update durable, and return the result."""

    def close(self) -> None:
        """Release the session.  Always called once, last; without a ``commit`` before it the push is void."""


class WatchFeed(Protocol):
    """The events for one site, read by one thread."""

    def get(self, timeout_s: float) -> WatchEvent | None:
        """Return the next event, or None after ``timeout_s``.  After ``Dropped`` the stream ends.

        A newer Watch of the same site ends this one; raise ``Refusal`` to end it for another reason.
        """

    def close(self) -> None:
        """Release the feed after the client has gone.  Always called once, last."""


@dataclass(frozen=True, slots=True)
class PullSource:
    """A version ready to be sent: ``parts`` have the lengths ``header.part_bytes``."""

    header: PullHeader
    parts: Sequence[bytes | memoryview]


class SyncerApi(Protocol):
    """What the syncer's shell implements for sites, observers and operators."""

    def join(self, request: JoinAsk) -> JoinReply:
        """Admit a learner process to the run.  Raises FAILED_PRECONDITION (the text names the field), PERMISSION_DENIED
        (evicted), ALREADY_EXISTS (superseded) or RESOURCE_EXHAUSTED (full); the last three with their reason."""

    def open_push(self, header: PushHeader) -> PushSession | PushResult:
        """Admit an update before its first payload byte, answer it at once (duplicate, refused), or raise ``Refusal``.

        Any older push of the same (site, fragment, sequence) has ended already, and its session is closed.
        """

    def watch(self, site: str, incarnation: int) -> WatchFeed:
        """Return the feed of the events for ``site`` from now on."""

    def pull(self, ask: PullAsk, identity: Identity) -> PullSource:
        """Return the requested version.  The header and parts describe the whole payload, even if only a part of it is
        requested; ``payload_crc32`` may be 0 for a client of protocol 3.

        Raises NOT_FOUND for an unknown fragment, and when the same bytes of ``want_version`` are no longer available
        (the client then starts over).
        """

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        """Return whether ``pull`` has a version newer than ``version``, waiting at most ``timeout_s`` for one.

        Raises NOT_FOUND for an unknown fragment."""

    def report(self, report: ReportInfo) -> ReportReply:
        """Take a heartbeat."""

    def leave(self, site: str, incarnation: int) -> None:
        """Let ``site`` leave the run."""

    def probe(self, ask: ProbeAsk) -> ProbeAnswer:
        """Return why a join with the settings in ``ask`` would be refused, and which syncer this is; changes nothing.

        The handler fills in ``identity`` and ``time_ns`` of the answer.
        """

    def status(self) -> dict[str, object]:
        """Return the state of the run, as values that JSON can carry."""

    def drain(self) -> None:
        """Begin the last round."""

    def evict(self, site: str) -> None:
        """Evict ``site`` from the run.  NOT_FOUND when there is no such site."""

    def readmit(self, site: str) -> None:
        """Let an evicted site join again.  NOT_FOUND when there is no such site."""

    def admit(self, site: str, fragment: int, sequence: int) -> None:
        """Let a held update be merged.  NOT_FOUND when there is none, FAILED_PRECONDITION when it is too late."""

    def refuse(self, site: str, fragment: int, sequence: int) -> None:
        """Exclude an accepted update from every merge.  Raises as ``admit`` does."""

    def snapshot(self) -> None:
        """Write a snapshot now; returns when it is durable."""

    def promote(self, *, lossy: bool) -> None:
        """Let a standby take over; ``lossy``: even if it may lack something that was acknowledged."""

    def detach(self) -> None:
        """Continue without a standby until one has caught up."""


class Followed(Protocol):
    """One standby being served.  One thread calls ``parts``; any thread may call the other methods."""

    def parts(self) -> Iterator[FollowPart]:
        """Yield everything to replicate until closed; ``Alive`` while there is nothing."""

    def acknowledged(self, ack: FollowAck) -> None:
        """Note that everything up to ``ack`` is durable at the standby."""

    def close(self) -> None:
        """Release it after the standby has gone.  Always called, last; perhaps twice."""


class Follow(Protocol):
    """Serves standbys."""

    def admit(self, start: FollowStart) -> None:
        """Raise ``Refusal`` where this standby may not follow now."""

    def follow(self, start: FollowStart) -> Followed:
        """Serve it from ``start`` on; FAILED_PRECONDITION where its journal is not a prefix of the syncer's."""


LOOK_S = 0.25
ROOM_WAIT_S = 5.0
"""How long an early frame waits for missing bytes of slower streams before it is dropped and requested again."""


class Receiving:
    """One push.  Each of its streams has its own thread; one of these at a time calls the session."""

    def __init__(self, header: PushHeader, session: PushSession) -> None:
        self.header, self.session = header, session
        self.window = Window(session.write, session.offset, WINDOW_BYTES)
        """``window.offset`` is the number of bytes that the session holds."""
        self._changed = threading.Condition()
        self._asked: set[int] = set()
        self.agains = 0
        """How often a chunk was requested again."""
        self._streams = 1
        self._over = False

    def take(self, part: Chunk | Frame) -> PushAgain | None:
        """Take a piece; return the request to send it again when it was damaged or found no room, else None.

        A sender without frames cannot send again, and sends in order: ``ChunkError`` for a piece that is not the next
        one, and ``DamagedChunk`` for a damaged one.  For all, ``ChunkError`` past the declared length, and
        ``DamagedChunk`` when the push is over or has too many retries.
        """
        if not self.header.frames:
            check_next(part, self.window.offset, self.header.payload_bytes)
        end = part.offset + len(part.data)
        if end > self.header.payload_bytes:
            raise ChunkError(f"frame at offset {part.offset} ends at {end} of {self.header.payload_bytes} bytes")
        until_s = time.monotonic() + ROOM_WAIT_S
        with self._changed:
            while not self._over:
                if not part.intact:
                    return self._ask(part, "was damaged on the way")
                if self.window.accept(part.offset, memoryview(part.data)):
                    self._asked.discard(part.offset)
                    self._changed.notify_all()
                    return None
                # The missing bytes come on another stream, so waiting helps only if there is one.  If a chunk was
                # requested again, it may come after this one on this very stream: do not wait then.
                waits = self._streams > 1 and not self._asked
                if not waits or not self._changed.wait(until_s - time.monotonic()):
                    return self._ask(part, "found no room")
        raise DamagedChunk("the push that this stream belongs to is over")

    def _ask(self, part: Chunk | Frame, why: str) -> PushAgain | None:
        if part.offset + len(part.data) <= self.window.offset:
            return None
        self.agains += 1
        if self.agains > AGAINS_MAX:
            raise DamagedChunk(f"chunk at offset {part.offset} {why}, after {AGAINS_MAX} retries in this push")
        self._asked.add(part.offset)
        self._changed.notify_all()
        return PushAgain(part.offset, len(part.data))

    def await_rest(self, moved: Callable[[], object], active: Callable[[], bool]) -> bool:
        """After the commit, wait until the other streams have brought the rest, or a chunk is requested again.

        Returns True when every byte has arrived, False when a requested chunk has not; otherwise ``DamagedChunk``.
        ``moved`` is called when bytes have arrived; the wait ends when the sender is no longer ``active``.
        """
        payload_bytes = self.header.payload_bytes
        with self._changed:
            while self.header.others and self.window.offset < payload_bytes and not self._asked and active():
                before = self.window.offset
                self._changed.wait(LOOK_S)
                if self.window.offset > before:
                    moved()
            if not self._asked and self.window.offset < payload_bytes:
                raise DamagedChunk(f"payload ends at {self.window.offset} of {payload_bytes} bytes")
            return not self._asked

    @contextmanager
    def stream_beside(self) -> Iterator[None]:
        """Count one more stream that brings chunks of this push; ``MalformedMessage`` above ``STREAMS_MAX``."""
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
        """End the push: the session takes nothing more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Receivings:
    """The pushes under way, by header, so that an additional stream finds its push."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[PushHeader, Receiving] = {}

    @contextmanager
    def open(self, header: PushHeader, session: PushSession) -> Iterator[Receiving]:
        """Register an admitted push while the context lasts; there is one at a time of the same header."""
        receiving = Receiving(header, session)
        with self._changed:
            self._open[header] = receiving
            self._changed.notify_all()
        try:
            yield receiving
        finally:
            receiving.close()
            with self._changed:
                del self._open[header]

    def of(self, header: PushHeader, timeout_s: float, active: Callable[[], bool]) -> Receiving:
        """Return the push that an additional stream belongs to.

        If the header allows streams to start before admission (``others``), waits for it at most ``timeout_s`` and
        while ``active``.  ``DamagedChunk`` when there is no such push: the chunks of this stream are lost.
        """
        wanted, until_s = replace(header, beside=False), time.monotonic() + timeout_s
        with self._changed:
            while (receiving := self._open.get(wanted)) is None:
                left_s = until_s - time.monotonic()
                if not header.others or left_s <= 0 or not active():
                    raise DamagedChunk("the push that this stream belongs to is over")
                self._changed.wait(min(left_s, LOOK_S))
        return receiving


DEALS_KEPT = 16
"""Deals remembered per client, so that a stream that starts after the others are done finds nothing left to send."""
ASKERS_KEPT = 256
"""How many (payload, client) pairs ``Repeats`` remembers, and how many clients ``Deals`` does at least; the oldest goes
first.  Without authentication, a caller may invent a client for each call."""


class Deals:
    """The deals of the latest clients, and of all where there are at most ``sites_max``."""

    def __init__(self, sites_max: int) -> None:
        # All sites pull a version at the same time, and a stream of a forgotten deal would begin at byte 0 again.
        self._askers_max = max(ASKERS_KEPT, 2 * sites_max)
        self._lock = threading.Lock()
        self._of: dict[str, dict[tuple[int, ...], Deal]] = {}

    def join(self, asker: str, ask: PullAsk, header: PullHeader) -> Deal:
        """Join one more stream to the deal ``ask.deal`` of ``asker``; a different version makes a different deal."""
        key = (ask.deal, header.fragment, header.from_version, header.version, header.whole, header.payload_bytes)
        with self._lock:
            mine = self._of[asker] = self._of.pop(asker, {})
            if len(self._of) > self._askers_max:
                del self._of[next(iter(self._of))]
            deal = mine.get(key)
            if deal is None:
                while len(mine) >= DEALS_KEPT:
                    del mine[next(iter(mine))]
                deal = mine[key] = Deal(0, header.payload_bytes, Pacer(ask.bytes_per_s))
            deal.streams += 1
        return deal


class Repeats:
    """A thread-safe cache of the latest frames, at most ``bytes_max`` in total."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._kept: dict[tuple[Hashable, int, int], bytes] = {}
        self._bytes = 0
        self._asked: dict[tuple[Hashable, str], int] = {}

    def asked(self, payload: Hashable, asker: str, attempt: int) -> None:
        """Note that ``asker`` starts to pull ``payload``; the streams of one pull share an ``attempt``, 0 if only one.

        A client that starts the same payload again may have received wrong bytes in intact frames, and the damage may
        lie in this cache.  So the frames of this payload are dropped and made again for the next request.
        """
        with self._lock:
            before = self._asked.pop((payload, asker), None)
            self._asked[payload, asker] = attempt
            if len(self._asked) > ASKERS_KEPT:
                del self._asked[next(iter(self._asked))]
            if before is None or before == attempt != 0:
                return
            for key in [key for key in self._kept if key[0] == payload]:
                self._bytes -= len(self._kept.pop(key))

    def frame(self, payload: Hashable, offset: int, data: bytes | memoryview) -> bytes:
        """Return the frame of ``data`` at ``offset`` of ``payload``, a key that always stands for the same bytes."""
        key = (payload, offset, len(data))
        with self._lock:
            found = self._kept.get(key)
        if found is not None:
            return found
        frame = convert.pack_frame(offset, data)
        with self._lock:
            if key not in self._kept:  # Another thread may have made it at the same time.
                self._kept[key] = frame
                self._bytes += len(frame)
            while self._bytes > self._bytes_max:
                self._bytes -= len(self._kept.pop(next(iter(self._kept))))
        return frame


_FEED_WAIT_S = 0.5
_JOINS_EACH_MAX = 2
"""Joins of one caller at once: its process, and the one that replaces it."""
SHORT_CHUNKS_MAX = 64
"""Chunks of one push that may be shorter than ``CHUNK_BYTES_MIN``."""


class SyncHandlers:
    """All methods of ``SyncService``, on top of one ``SyncerApi``."""

    def __init__(self, api: SyncerApi, door: Door) -> None:
        self._api, self._door, self._options = api, door, door.options
        options, pushback_ms = door.options, door.options.pushback_ms
        self._joins = Gate("join", options.sites_max, _JOINS_EACH_MAX, pushback_ms)
        self._pushes = Gate("push", options.push_credits, options.pushes_per_site_max, pushback_ms)
        pulls_max = 8 * options.sites_max  # Eight streams for each site, so that there is room for observers too.
        self._pulls = Gate("pull", pulls_max, options.pulls_per_site_max, pushback_ms)
        watches_max = options.watches_per_site_max * options.sites_max
        self._watches = Gate("watch", watches_max, options.watches_per_site_max, pushback_ms)
        self._probes = Gate("probe", PROBES_MAX, 1, pushback_ms)
        self._pushing = OneAtATime("push", pushback_ms)
        self._watching = OneAtATime("watch", pushback_ms)
        self._receivings = Receivings()
        self._deals = Deals(options.sites_max)
        self._repeats = Repeats(FRAMES_KEPT * options.chunk_bytes)
        handlers = {
            "Join": door.unary("Join", self._join, large=True),
            "Report": door.unary("Report", self._report),
            "Leave": door.unary("Leave", self._leave),
            "Push": door.handler("Push", self._push),
            "Watch": door.handler("Watch", self._watch),
            "Pull": door.handler("Pull", self._pull),
            "Probe": door.handler("Probe", self._probe),
        }
        self.generic_handler: Any = grpc.method_handlers_generic_handler(SYNC_SERVICE, handlers)
        """All handlers, in the form that gRPC's server takes."""

    def _check_speaker(self, ask: PushHeader | MemberAsk | ReportInfo, identity: Identity) -> None:
        identity.check_site(ask.site_id)
        self._door.check_run(ask.run_id)

    def _join(self, raw: bytes, call: Call) -> bytes:
        with self._joins.enter(call.caller):
            ask = convert.unpack_join(raw)
            call.identity.check_site(ask.site_id)
            return convert.pack_join_reply(self._api.join(ask))

    def _report(self, raw: bytes, call: Call) -> bytes:
        report = convert.unpack_report(raw)
        self._check_speaker(report, call.identity)
        return convert.pack_report_reply(self._api.report(report))

    def _leave(self, raw: bytes, call: Call) -> bytes:
        ask = convert.unpack_member(raw)
        self._check_speaker(ask, call.identity)
        self._api.leave(ask.site_id, ask.incarnation)
        return b""

    # --- Push --------------------------------------------------------------------------------------------------

    def _push(self, call: Call) -> Iterator[bytes]:
        with Guard(self._door.stalls, self._options.header_timeout_s, call.context.cancel) as guard:
            with self._door.waiting_room.enter(call.caller, call.context.cancel):
                raw = next(call.requests, None)
            if raw is None:
                raise DamagedChunk("the stream ended before the header")
            # Only a chunk may be longer, and no chunk is parsed before the header.
            header = _first_of("push", "header", PushHeader, convert.unpack_push, raw, CONTROL_BYTES_MAX)
            self._check_speaker(header, call.identity)
            if header.beside:
                yield from self._push_beside(header, call, guard)
                return
            self._door.check_push(header, call.identity)
            key = (header.site_id, header.fragment, header.sequence)
            with self._pushing.enter(key, header.incarnation, call.context.cancel), self._pushes.enter(header.site_id):
                guard.limit(None)
                opened = self._api.open_push(header)
                guard.limit(self._options.stall_s)
                if isinstance(opened, PushResult):
                    result = opened
                else:
                    with closing(opened), self._receivings.open(header, opened) as receiving:
                        yield convert.pack_push_reply(PushAdmitted(opened.offset, header.frames))
                        result = yield from self._received(receiving, call, guard)
            yield convert.pack_push_reply(result)

    def _received(self, receiving: Receiving, call: Call, guard: Guard) -> Generator[bytes, None, PushResult]:
        header = receiving.header
        for part in self._parts(receiving, call, guard):
            if isinstance(part, PushCommit):
                if (part.payload_bytes, part.digest) != (header.payload_bytes, header.digest):
                    raise MalformedMessage("the commit does not repeat what the header declared")
                if not receiving.await_rest(guard.touch, call.context.is_active):
                    continue  # Sent before the request for a chunk arrived; the sender commits again after that chunk.
                guard.limit(None)
                result = receiving.session.commit(part.digest)
                guard.limit(self._options.stall_s)
                return result
            yield from self._taken(receiving, part, call.identity)
        # The end of a stream is no commit: a killed client looks like one that has finished.
        self._door.counters.add("broken_off")
        held = receiving.window.offset
        raise DamagedChunk(f"the stream ended at {held} of {header.payload_bytes} bytes, before the commit")

    def _push_beside(self, header: PushHeader, call: Call, guard: Guard) -> Iterator[bytes]:
        """Serve an additional stream of a push that another stream opened; that stream passed all admission checks."""
        guard.limit(None)
        with self._door.waiting_room.enter(call.caller, call.context.cancel):
            receiving = self._receivings.of(header, self._options.header_timeout_s, call.context.is_active)
        with receiving.stream_beside():
            guard.limit(self._options.stall_s)
            for part in self._parts(receiving, call, guard):
                if isinstance(part, PushCommit):
                    raise MalformedMessage("only the stream that opened a push may commit it")
                yield from self._taken(receiving, part, call.identity)

    def _parts(self, receiving: Receiving, call: Call, guard: Guard) -> Iterator[Chunk | Frame | PushCommit]:
        # A short chunk costs as much work as a long one, and only the last one needs to be short.
        payload_bytes = receiving.header.payload_bytes
        messages_max = payload_bytes // CHUNK_BYTES_MIN + SHORT_CHUNKS_MAX
        for count, raw in enumerate(call.requests):
            guard.touch()
            if count > messages_max + 2 * receiving.agains:  # A chunk sent again, and the commit that precedes it.
                raise MalformedMessage(f"chunks are too short: {payload_bytes} bytes take {messages_max} at most")
            part = convert.unpack_push(raw)
            if isinstance(part, PushHeader):
                raise MalformedMessage("a push has one header")
            yield part

    def _taken(self, receiving: Receiving, part: Chunk | Frame, identity: Identity) -> Iterator[bytes]:
        self._door.charge_bytes("payload_bytes_in", "bytes_per_s", len(part.data), identity)
        before = receiving.window.offset
        again = receiving.take(part)
        if receiving.header.progress and receiving.window.offset > before:
            yield convert.pack_push_reply(PushAdmitted(receiving.window.offset, frames=True))
        if again is not None:
            self._door.counters.add("chunks_again")
            yield convert.pack_push_reply(again)

    # --- Watch -------------------------------------------------------------------------------------------------

    def _watch(self, call: Call) -> Iterator[bytes]:
        ask = convert.unpack_member(self._door.first(call))
        self._check_speaker(ask, call.identity)
        with (
            self._watching.enter((ask.site_id,), ask.incarnation, call.context.cancel),
            self._watches.enter(ask.site_id),
            closing(self._api.watch(ask.site_id, ask.incarnation)) as feed,
            Guard(self._door.stalls, self._options.stall_s, call.context.cancel) as guard,
        ):
            yield convert.pack_watch_event(Alive())
            until_s = time.monotonic() + self._options.connection_age_s
            silent_until_s = time.monotonic() + self._options.alive_s
            while self._door.serves(call.context):
                if call.identity.certificate and time.monotonic() > until_s:
                    raise Refusal(Status.UNAVAILABLE, "this stream is too old: connect again with a certificate")
                event = feed.get(max(0.0, min(_FEED_WAIT_S, silent_until_s - time.monotonic())))
                guard.touch()
                if event is None:
                    if time.monotonic() < silent_until_s:
                        continue
                    event = Alive()
                yield convert.pack_watch_event(event)
                guard.touch()
                if isinstance(event, Dropped):
                    return
                silent_until_s = time.monotonic() + self._options.alive_s
            if self._door.stopping.is_set():
                raise Refusal(Status.UNAVAILABLE, STOPS)

    # --- Pull --------------------------------------------------------------------------------------------------

    def _pull(self, call: Call) -> Iterator[bytes]:
        ask = convert.unpack_pull(self._door.first(call))
        call.identity.check_reader(ask.site_id)
        self._door.check_run(ask.run_id)
        self._door.spend("pull_bytes_per_s", 0.0, call.identity)  # Refuses a caller in debt.
        # Wait for a version newer than the client's.  A waiting call takes no place of the pull limit.
        until_s = time.monotonic() + ask.wait_ns / 1e9
        while self._door.serves(call.context) and (left_s := until_s - time.monotonic()) > 0:
            if self._api.has_newer(ask.fragment, ask.have_version, min(left_s, _FEED_WAIT_S)):
                break
        # Counted by the caller's identity, not by the site it reads as: one site must not use up the observers' places.
        asker = call.identity.name or ask.site_id
        with self._pulls.enter(asker):
            source = self._api.pull(ask, call.identity)
            payload_bytes = source.header.payload_bytes
            if ask.offset > payload_bytes:
                raise Refusal(Status.NOT_FOUND, f"offset is {ask.offset}: the payload is shorter")
            size = ChunkSize(CHUNK_BYTES_MIN, self._options.chunk_bytes, careful=ask.want_version > 0)
            if ask.deal:
                deal = self._deals.join(asker, ask, source.header)
            else:
                end = min(ask.offset + (ask.length or payload_bytes), payload_bytes)
                deal = Deal(ask.offset, end, Pacer(ask.bytes_per_s))
            pieces = _pieces(source.parts, deal, lambda: deal.pacer.chunk_bytes(size.bytes))
            with Guard(self._door.stalls, self._options.stall_s, call.context.cancel) as guard:
                frames = ask.protocol >= FRAMES_SINCE
                yield convert.pack_pull_part(replace(source.header, frames=frames))
                # A retry (``want_version``) bypasses the cache: the bytes were damaged, perhaps here.
                name = None if ask.want_version else replace(source.header, fates=(), epoch=0)
                if name is not None and not ask.offset:
                    self._repeats.asked(name, asker, ask.deal)
                for offset, data in pieces:
                    self._door.charge_bytes("payload_bytes_out", "pull_bytes_per_s", len(data), call.identity)
                    deal.pacer.wait(len(data), guard)
                    began_s = time.monotonic()
                    if not frames:
                        yield convert.pack_pull_part(Chunk.of(offset, data, as_in_2=True))
                    elif name is None:
                        yield convert.pack_frame(offset, data)
                    else:
                        yield self._repeats.frame(name, offset, data)
                    size.took(time.monotonic() - began_s)
                    guard.touch()

    # --- Probe -------------------------------------------------------------------------------------------------

    def _probe(self, call: Call) -> Iterator[bytes]:
        with self._probes.enter(call.caller):
            raw = self._door.first(call, large=True)
            ask = _first_of("probe", "ask", ProbeAsk, convert.unpack_probe, raw, JOIN_BYTES_MAX)
            if ask.run_id:
                self._door.check_run(ask.run_id)
            self._door.check_probe(ask.bytes_up, ask.bytes_down, call.identity)
            answer = self._api.probe(ask)
            with Guard(self._door.stalls, self._options.stall_s, call.context.cancel) as guard:
                yield convert.pack_probe_reply(replace(answer, identity=call.identity.name, time_ns=time.time_ns()))
                if ask.bytes_up:
                    yield convert.pack_probe_reply(self._filler_taken(ask, call, guard))
                for count, raw in filler(ask.bytes_down, ask.limit_ns, convert.pack_probe_reply):
                    self._door.charge_bytes("probe_bytes_out", "pull_bytes_per_s", count, call.identity)
                    yield raw
                    guard.touch()

    def _filler_taken(self, ask: ProbeAsk, call: Call, guard: Guard) -> ProbeTaken:
        """Receive filler until it ends, until ``limit_ns`` after its first message, or until all announced bytes came.

        ``MalformedMessage`` for more than was announced.
        """
        arrival, left, until_ns = Arrival(), ask.bytes_up, 0
        messages_max = ask.bytes_up // CHUNK_BYTES_MIN + 2
        for count, raw in enumerate(call.requests):
            part = convert.unpack_probe(raw)
            if not isinstance(part, Filler) or len(part.data) > left or count >= messages_max:
                raise MalformedMessage(
                    f"filler wanted, {ask.bytes_up} bytes at most, in {messages_max} messages at most"
                )
            guard.touch()
            self._door.charge_bytes("probe_bytes_in", "bytes_per_s", len(part.data), call.identity)
            arrival.more(len(part.data))
            left -= len(part.data)
            until_ns = until_ns or time.monotonic_ns() + ask.limit_ns
            if not left or time.monotonic_ns() >= until_ns:
                break
        return arrival.taken()


def _first_of(of: str, what: str, kind: type[M], unpack: Callable[[bytes], object], raw: bytes, bytes_max: int) -> M:
    """Unpack the first message of a stream; ``MalformedMessage`` if it is longer than ``bytes_max`` or no ``kind``."""
    if len(raw) > bytes_max:
        raise MalformedMessage(f"{what} is {len(raw)} bytes long: at most {bytes_max} wanted")
    part = unpack(raw)
    if not isinstance(part, kind):
        raise MalformedMessage(f"the first message of a {of} is not its {what}")
    return part


def _pieces(parts: Sequence[bytes | memoryview], deal: Deal, chunk_bytes: Callable[[], int]) -> Iterator[Piece]:
    """Yield the pieces of a payload that one stream of ``deal`` sends."""
    while (span := deal.next(chunk_bytes())) is not None:
        yield from cut(parts, *span, chunk_bytes)


_ADMIN: Mapping[str, tuple[Callable[[bytes], Any], Callable[[SyncerApi, Any], object]]] = MappingProxyType(
    {
        "Status": (convert.unpack_empty, lambda api, ask: api.status()),
        "Drain": (convert.unpack_empty, lambda api, ask: api.drain()),
        "Evict": (convert.unpack_evict, lambda api, ask: api.evict(ask.site_id)),
        "Readmit": (convert.unpack_evict, lambda api, ask: api.readmit(ask.site_id)),
        "Admit": (convert.unpack_update, lambda api, ask: api.admit(ask.site_id, ask.fragment, ask.sequence)),
        "Refuse": (convert.unpack_update, lambda api, ask: api.refuse(ask.site_id, ask.fragment, ask.sequence)),
        "Snapshot": (convert.unpack_empty, lambda api, ask: api.snapshot()),
        "Promote": (convert.unpack_promote, lambda api, ask: api.promote(lossy=ask.lossy)),
        "Detach": (convert.unpack_empty, lambda api, ask: api.detach()),
    }
)
"""The operator's calls: how each request is parsed, and which API method it calls.  Only Status returns data."""


def admin_handler(api: SyncerApi, door: Door) -> Any:
    """Return the handlers of ``AdminService`` in the form that gRPC's server takes."""

    def work(name: str, raw: bytes, call: Call) -> bytes:
        del call
        unpack, act = _ADMIN[name]
        told = act(api, unpack(raw))
        return convert.pack_status(told) if isinstance(told, dict) else b""

    handlers = {name: door.unary(name, partial(work, name)) for name in _ADMIN}
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers)


def follow_handler(serve: Follow, door: Door) -> Any:
    """Return the handlers of ``ReplicationService`` in the form that gRPC's server takes."""
    one = OneAtATime("standby", door.options.pushback_ms)

    def follow(call: Call) -> Iterator[bytes]:
        raw = door.first(call)
        start = _first_of("standby", "start", FollowStart, convert.unpack_follow, raw, CONTROL_BYTES_MAX)
        door.check_run(start.run_id)
        serve.admit(start)  # Refused beside another, it does not end that one's stream.
        with one.enter(("standby",), 0, call.context.cancel), closing(serve.follow(start)) as followed:
            threading.Thread(target=listen, args=(call.requests, followed), name="standby-acks", daemon=True).start()
            for part in followed.parts():
                if door.stopping.is_set():
                    raise Refusal(Status.UNAVAILABLE, STOPS)
                yield convert.pack_follow_part(part)

    def listen(requests: Iterator[bytes], followed: Followed) -> None:
        """Read the standby's acknowledgements, in a separate thread, until it is gone."""
        try:
            for raw in requests:
                ack = convert.unpack_follow(raw)
                if not isinstance(ack, FollowAck):
                    raise MalformedMessage("a standby sends one start, then acknowledgements")
                followed.acknowledged(ack)
        except (grpc.RpcError, MalformedMessage):
            door.counters.add("broken_off")
        finally:
            followed.close()

    return grpc.method_handlers_generic_handler(REPLICATION_SERVICE, {"Follow": door.handler("Follow", follow)})
