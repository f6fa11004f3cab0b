"""The gRPC clients of a site, of an operator and of a standby.

Every method of ``SyncClient`` and ``AdminClient`` blocks, has a timeout, may be called from any thread, and ends in an
answer, in ``Refused`` (a definite no) or in ``Unreachable`` (try again).  Nothing is retried here: the caller decides
how long to back off (``channel.Backoff``).

Learned rate.  Bulk traffic is limited to a rate each way: the one that the operator configured for the link, or the one
that ``Learned`` has measured.  Only a long-distance link is measured: on a short one the queue is short, and the
machines limit a transfer.  The learned rate may be too low: the link has become faster, or a busy machine and not the
link limited the transfer.  So one transfer in ``LOOK_AGAIN`` has no rate limit, and if it is much faster, learning
starts over.

Push.  One stream opens a push and commits it.  Where one TCP connection cannot fill the path, additional streams carry
chunks as well.  Each stream takes the next unsent chunk (``channel.Deal``) whenever flow control permits, so a slow one
takes fewer.  gRPC's own threads make the messages (``requests``, ``beside``) while the caller's thread reads the
answers.

Pull.  At most one stream on each bulk connection fills a ``PullSink``, which keeps the bytes for the next attempt.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.sync.events import Outcome
from diloco.sync.link import LinkEstimate, LinkEstimator, Pace
from diloco.wire import convert
from diloco.wire.channel import (
    ADMIN_SERVICE,
    REPLICATION_SERVICE,
    SYNC_SERVICE,
    Arrival,
    Deal,
    Guard,
    Line,
    Pacer,
    ServiceClient,
    Stream,
    bulk_bytes_per_s,
    check_address,
    split_addresses,
)
from diloco.wire.chunks import PIECE_BYTES_MIN, ChunkSize, DamagedChunk, bytes_at_risk
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
    STREAMS_MAX,
    EvictAsk,
    FollowAck,
    FollowPart,
    FollowRequest,
    FollowStart,
    Frame,
    JoinAsk,
    JoinReply,
    MalformedMessage,
    MemberAsk,
    Nonsense,
    PromoteAsk,
    PullAsk,
    PullHeader,
    PushAdmitted,
    PushAgain,
    PushCommit,
    PushHeader,
    PushPart,
    PushReply,
    PushResult,
    Refused,
    ReportInfo,
    ReportReply,
    Status,
    Unreachable,
    UpdateAsk,
    WatchEvent,
    WireError,
)
from diloco.wire.options import ClientOptions, SecurityOptions
from diloco.wire.pulling import Patience, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco.wire.chunks import Span
    from diloco.wire.pulling import PulledVersion, PullSink

FAR_NS = 10_000_000
LOOK_AGAIN = 20
"""After so many rate-limited transfers, transfers have no limit until one is long enough to measure the link."""
FASTER_PERCENT = 110
"""An unlimited transfer faster than this percentage of the learned rate shows that the rate is too low."""


class Learned(Pacer):
    """The rate of one direction of a link, which its transfers keep to; thread-safe."""

    def __init__(self, mbps: float) -> None:
        """``mbps`` is the configured rate in 10^6 bits a second; 0: not configured, so measure it."""
        super().__init__(bulk_bytes_per_s(mbps))
        self._told = mbps > 0
        self._lock = threading.Lock()
        self._pace, self._held = Pace(), 0
        self.bytes = 0
        """Bytes sent or received in this direction since the start."""

    def count(self, message_bytes: int) -> None:
        """Add the bytes of one message to ``bytes``."""
        with self._lock:
            self.bytes += message_bytes

    def begin(self, rtt_ns: int) -> Arrival | None:
        """Start a transfer over a round trip of ``rtt_ns`` (0: unknown); its rate limit is then ``bytes_per_s``.

        Returns where to record its progress; None where the transfer does not measure the link."""
        if self._told or not rtt_ns:
            return None
        if rtt_ns < FAR_NS:
            self.forget()
            return None
        with self._lock:
            self._held += self.bytes_per_s > 0
            if self._held > LOOK_AGAIN:
                self.bytes_per_s = 0
            return Arrival(self.bytes_per_s)

    def over(self, arrival: Arrival | None) -> None:
        """Learn from a transfer that has completed."""
        if arrival is None or not (rate := arrival.rate()):
            return
        with self._lock:
            if arrival.sent_at or not self._pace.bytes_per_s:
                self._pace.carried(rate, arrival.sent_at)
            else:
                self._held = 0
                if 100 * rate > FASTER_PERCENT * self._pace.bytes_per_s:
                    self._pace = Pace()
                    self._pace.carried(rate, 0)
            if self._held <= LOOK_AGAIN:
                self.bytes_per_s = self._pace.bytes_per_s

    def forget(self) -> None:
        """Drop the learned rate, because the link has changed."""
        if not self._told:
            with self._lock:
                self._pace, self._held, self.bytes_per_s = Pace(), 0, 0


@dataclass(eq=False)
class Pushing:
    """One attempt at a push: the header, then chunks from the admitted offset, then the commit.

    With ``at_once`` it does not wait for the admission and sends from byte 0; when the admission arrives it skips what
    the syncer already holds.  Waiting would cost a round trip, and the syncer nearly always holds nothing yet.

    gRPC asks for the next message when the last one has passed flow control, so each request for one is progress.
    """

    client: SyncClient
    header: PushHeader
    payload: memoryview
    breaks: int = 0
    """Earlier attempts at this push that were interrupted."""
    at_once: bool = False
    """Send without waiting for admission."""
    arrival: Arrival | None = None
    """Where to record how many bytes the syncer holds; None where the link is not measured."""

    def __post_init__(self) -> None:
        self.bulk = self.client.in_turn()
        """The push opens on the first; the others carry additional streams."""
        others = min(len(self.bulk) - 1, self.header.payload_bytes // PIECE_BYTES_MIN)
        progress = self.breaks > 0 or self.arrival is not None
        self.header = replace(self.header, frames=True, progress=progress, others=others)
        self._guard = Guard(self.client.stalls, self.client.options.stall_s)
        self._changed = threading.Condition()
        self.deal = Deal(0, len(self.payload), self.client.up, streams=1)
        """What was never sent, for all streams."""
        self._began = self._held = 0
        self.admitted = False
        """Whether the syncer has admitted the push; an attempt that breaks before that loses no bytes."""
        self._again: deque[Span] = deque()
        self._agains = 0
        self._stopped = False
        self._others: list[tuple[Stream[PushReply], threading.Thread]] = []
        self._carrying: dict[Guard, bool] = {}
        """Whether a stream was given any chunk; False: it broke before that, and gets none."""
        self._failed: WireError | None = None

    def run(self) -> PushResult:
        """Push, and return the syncer's result.  Raises ``Refused`` or ``Unreachable``; it always ends all streams."""
        first = Stream(self.bulk[0], "Push", self.requests(), lambda raw: self._heard(raw, first), self._guard)
        result: PushResult | None = None
        try:
            with first:
                if self.at_once:
                    self._open_others(first, 0)
                for reply in first:
                    if isinstance(reply, PushResult):
                        result = reply
                        self.stop()
        except WireError as error:
            if result is None:
                raise self._failed or error from error
        finally:
            self.stop()
            for other, thread in self._others:
                other.cancel()
                thread.join()
        if result is None:
            raise self._failed or Unreachable("Push: the stream ended without an answer")
        return result

    def _heard(self, raw: bytes, first: Stream[PushReply] | None) -> PushReply:
        """Handle and return one reply, on the ``first`` stream, or on an additional one where ``first`` is None."""
        reply = convert.unpack_push_reply(raw)
        if isinstance(reply, PushAgain):
            self.again(reply)
        elif isinstance(reply, PushAdmitted) and (self.admitted or first is None):
            self.held(reply.offset)  # Only the first reply on the first stream sets the offset to send from.
        elif isinstance(reply, PushAdmitted):
            self.admit(reply)
            if not self.at_once and first is not None:
                self._open_others(first, reply.offset)
        return reply

    def _open_others(self, first: Stream[PushReply], offset: int) -> None:
        worth = (self.header.payload_bytes - offset) // PIECE_BYTES_MIN
        others = self.bulk[1 : 1 + worth]
        self.deal.streams = 1 + len(others)
        for bulk in others:
            guard = Guard(self.client.stalls, self.client.options.stall_s)
            stream = Stream(bulk, "Push", self.beside(guard), lambda raw: self._heard(raw, None), guard)
            thread = threading.Thread(target=self._listen, args=(stream, first, guard), name="push-beside", daemon=True)
            thread.start()
            self._others.append((stream, thread))

    def _listen(self, stream: Stream[PushReply], first: Stream[PushReply], guard: Guard) -> None:
        """Read the replies on an additional stream, in a separate thread."""
        try:
            with stream:
                for _ in stream:
                    pass
        except WireError as error:
            if self.carries(guard) or isinstance(error, Nonsense):  # Otherwise the push continues without this stream.
                self._failed = self._failed or error
                first.cancel()

    def admit(self, admitted: PushAdmitted) -> None:
        """Note that the syncer holds ``admitted.offset`` bytes and wants the rest."""
        if admitted.offset > len(self.payload):
            raise MalformedMessage(f"offset is {admitted.offset}: the payload has {len(self.payload)} bytes")
        with self._changed:
            self._began = admitted.offset
            self._held = max(self._held, admitted.offset)
            self.deal.at = max(self.deal.at, admitted.offset)
            self.admitted = True
            self._changed.notify_all()

    def held(self, offset: int) -> None:
        """Note that the syncer holds ``offset`` bytes by now."""
        with self._changed:
            if self.arrival is not None:
                self.arrival.more(max(0, offset - self._held))
            self._held = max(self._held, offset)
            self._changed.notify_all()

    def again(self, wanted: PushAgain) -> None:
        """Send the ``wanted`` bytes again.  ``MalformedMessage`` if they were never sent, or after ``AGAINS_MAX``."""
        if wanted.offset + wanted.length > self.deal.at:
            raise MalformedMessage(f"offset is {wanted.offset}: the syncer requests bytes again that were never sent")
        with self._changed:
            self._agains += 1
            if self._agains > AGAINS_MAX:
                raise MalformedMessage(f"the syncer requests chunks again for the {self._agains}th time")
            self._again.append((wanted.offset, wanted.offset + wanted.length))
            self._guard.limit(self.client.options.stall_s)
            self._changed.notify_all()

    def stop(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def requests(self) -> Iterator[bytes]:
        """Yield the messages of the stream that opens and commits the push, as gRPC asks for them."""
        yield self._packed(self.header)
        with self._changed:
            # The caller's stall guard bounds this wait: however the call ends, ``run`` then calls ``stop``.
            self._changed.wait_for(lambda: self._stopped or self.admitted or self.at_once)
        while not self._stopped:
            yield from self._chunks(self._guard)
            if self._stopped or self._again:
                continue
            yield self._packed(PushCommit(self.header.payload_bytes, self.header.digest))
            with self._changed:
                if not self._again:
                    self._guard.limit(self.client.options.answer_s)
                self._changed.wait_for(lambda: self._stopped or self._again)

    def beside(self, guard: Guard) -> Iterator[bytes]:
        """Yield the messages of an additional stream."""
        yield self._packed(replace(self.header, beside=True))
        yield from self._chunks(guard)

    def carries(self, guard: Guard) -> bool:
        """Note that the additional stream of ``guard`` has broken, so that it gets no first chunk any more.

        Returns whether it was given any: those are lost, so the whole push is broken.
        """
        with self._changed:
            return self._carrying.setdefault(guard, False)

    def _chunks(self, guard: Guard) -> Iterator[bytes]:
        bytes_max = self.client.up.chunk_bytes(self.client.options.chunk_bytes)
        size = ChunkSize(CHUNK_BYTES_MIN, bytes_max, careful=self._began > 0)
        while (span := self._next(size.bytes, guard)) is not None:
            begin, end = span
            self.client.up.wait(end - begin, guard)
            began_s = time.monotonic()
            yield self._packed(Frame(begin, self.payload[begin:end]))
            size.took(time.monotonic() - began_s)
            guard.touch()

    def _next(self, chunk_bytes: int, guard: Guard) -> Span | None:
        with self._changed:
            # Bytes requested again go on the stream that commits: on another one, the commit would overtake them.
            again = self._again if guard is self._guard else ()
            # Bytes in flight when a connection breaks are lost, so an unreliable one gets a bound on them.  A single
            # chunk may always be in flight, or the push would never progress.
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or again
                    or not self.breaks
                    or self.deal.at <= self._held
                    or self.deal.at + chunk_bytes <= self._held + bytes_at_risk(self.breaks, self._held - self._began)
                )
            )
            if self._stopped or self._carrying.get(guard) is False:
                return None
            span = self._again.popleft() if again else self.deal.next(chunk_bytes)
            if span is not None:
                self._carrying[guard] = True
            return span

    def _packed(self, part: PushPart) -> bytes:
        message = convert.pack_push(part)
        self.client.up.count(len(message))
        return message


_OF_ITS_FILES = frozenset({Status.PERMISSION_DENIED, Status.UNAUTHENTICATED})

BREAKS_KEPT = 64
"""Updates for which the number of interrupted pushes is remembered."""
CONFIRMATIONS_MAX = 3
"""Most tickets repeated in one join; each further ticket means that yet another process of the site has joined."""


class Pulling:
    """Fills ``sink``, over at most one stream on each of the client's bulk connections.

    A pull begins with as many streams as the last payload of the fragment was worth, at least one; the others join once
    a header shows that this payload is longer.
    """

    def __init__(
        self, client: SyncClient, ask: PullAsk, sink: PullSink, arrival: Arrival | None, patience: Patience
    ) -> None:
        """``ask.bytes_per_s`` is the rate limit of all streams together.  ``arrival`` takes the progress; None where
        the link is not measured.  ``patience`` is for a version that may not be published yet."""
        self.client, self.ask, self.sink, self.arrival, self.patience = client, ask, sink, arrival, patience
        self.bulk = client.in_turn()
        self._lock = threading.Lock()
        self._streams: list[Stream[bool]] = []
        self._threads: list[threading.Thread] = []
        """Of the streams begun beside the first, in the order of ``bulk``."""
        self._failed: WireError | None = None
        self._damaged, self._began = 0, sink.bytes_held

    def run(self) -> PulledVersion:
        """Pull until the version is complete.  On ``Refused`` or ``Unreachable`` the sink keeps what was received."""
        try:
            if self._began:
                try:
                    # Even if nothing is missing, ask for the header again: it holds the present fates.
                    self._ask_for_missing()
                    return self._rest()
                except Refused as refused:
                    if refused.status is not Status.NOT_FOUND:
                        raise
                    self._failed = None
            self.sink.clear()
            wait_ns = int(self.patience.seconds * 1e9)
            deal = 1 + secrets.randbits(61) if len(self.bulk) > 1 else 0
            ask = replace(self.ask, wait_ns=wait_ns, deal=deal)  # The syncer applies one rate limit to a whole deal.
            self._ask([ask] * max(1, self.client.lengths.get(ask.fragment, 0) // PIECE_BYTES_MIN))
            return self._rest()
        except (Refused, Unreachable) as error:
            self.sink.broke_off()
            self.sink.breaks += isinstance(error, Unreachable)
            raise

    def _rest(self) -> PulledVersion:
        """Ask for the missing bytes until none are missing; ``Unreachable`` when an attempt brings none."""
        while missing := self.sink.missing():
            damaged = self._damaged
            self._ask_for_missing()
            if self.sink.missing() == missing and self._damaged == damaged:
                break
        try:
            return self.sink.finish()
        except DamagedChunk as error:
            raise Unreachable(f"Pull: {error}") from error

    def _ask_for_missing(self) -> None:
        """Ask once for missing bytes, over several streams, each with its share of the rate limit."""
        header, breaks, passed = self.sink.header, self.sink.breaks, self.sink.bytes_held - self._began
        assert header is not None
        most = bytes_at_risk(breaks, passed) // len(self.bulk) if breaks else header.payload_bytes
        spans = pieces(self.sink.missing(), len(self.bulk), max(CHUNK_BYTES_MIN, most))
        rate = self.ask.bytes_per_s
        if rate and len(spans) > 1:
            rate = max(1, rate // len(self.bulk))  # At least 1, because 0 means no limit.
        ask = replace(self.ask, want_version=header.version, bytes_per_s=rate, offset=header.payload_bytes)
        self._ask([replace(ask, offset=begin, length=end - begin) for begin, end in spans] or [ask])

    def _ask(self, asks: Sequence[PullAsk]) -> None:
        """Run a stream for each of ``asks``, and those that join meanwhile; raises the error that ended them."""
        self._begin_others(asks)
        self._stream(self.bulk[0], asks[0])
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if isinstance(self._failed, Nonsense):
            self.sink.clear()
        if self._failed is not None:
            raise self._failed

    def _begin_others(self, asks: Sequence[PullAsk]) -> None:
        """Begin a stream for each of ``asks`` but the first, on its own connection, unless it was begun already."""
        with self._lock:
            for line, ask in [*zip(self.bulk, asks, strict=False)][1 + len(self._threads) :]:
                thread = threading.Thread(target=self._stream, args=(line, ask), name="pull-piece", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _stream(self, bulk: Line, ask: PullAsk) -> None:
        """Run one of several concurrent streams; on failure it sets ``_failed`` and ends the others."""
        stall_s = self.client.options.stall_s
        guard = Guard(self.client.stalls, stall_s)
        if ask.wait_ns:
            self.patience.begin(guard, stall_s)
        try:
            with Stream(bulk, "Pull", convert.pack_pull(ask), lambda raw: self._take(raw, ask, guard), guard) as stream:
                with self._lock:
                    self._streams.append(stream)
                    failed = self._failed is not None
                if not failed:
                    all(stream)  # Reads until ``_take`` returns False.
        except WireError as error:
            with self._lock:
                if self._failed is None or isinstance(error, Nonsense):
                    self._failed = error
                running = list(self._streams)
            for stream in running:
                stream.cancel()

    def _take(self, raw: bytes, ask: PullAsk, guard: Guard) -> bool:
        """Handle one message; return whether to read on."""
        self.client.down.count(len(raw))
        if self.arrival is not None:
            self.arrival.more(len(raw))
        part = convert.unpack_pull_part(raw)
        if isinstance(part, PullHeader):
            if ask.wait_ns:
                self.patience.came(guard)
            if part.fragment != ask.fragment or (part.from_version != ask.have_version and not part.whole):
                raise MalformedMessage(f"fragment {part.fragment} from version {part.from_version} was not asked for")
            with self._lock:
                if self.sink.header is not None and not self.sink.belongs(part):
                    if ask.want_version == 0:
                        return False  # A version was published between two streams' asks: ``_rest`` asks for this span.
                    raise MalformedMessage(f"version {part.version} is not the one that the pull began with")
                self.sink.begin(part)
            if ask.deal:
                self._begin_others([replace(ask, wait_ns=0)] * (part.payload_bytes // PIECE_BYTES_MIN))
            return True
        if not part.intact:
            with self._lock:
                self._damaged += 1
                if self._damaged > AGAINS_MAX:
                    raise DamagedChunk(f"chunks were damaged on the way {self._damaged} times")
        self.sink.accept(part)
        return True


class SyncClient(ServiceClient):
    """The client of ``site_id`` in run ``run_id``; ``site_id`` is empty for an observer that only pulls.

    Control calls (Join, Watch, Report, Leave) and bulk calls (Push, Pull) use separate connections.  Each connects at
    its first call, and reconnects by itself.  ``ValueError`` for an address or security options that cannot work.

    ``address`` may list several, separated by commas: that of the syncer, and those of the standbys that may replace
    it.  ``join`` finds the one that admits the site, and all other calls go there from then on; the attribute
    ``address`` is that one, before a join the first to try.  The client measures the link there (``estimate``).  An
    answer from a syncer of an older epoch is discarded, on every connection: that syncer has been replaced.
    """

    service = SYNC_SERVICE

    def __init__(
        self,
        address: str,
        site_id: str,
        run_id: str,
        security: SecurityOptions | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        security = security or SecurityOptions()
        self._addresses = split_addresses(address)
        self.has_choice = len(self._addresses) > 1
        for each in self._addresses:
            check_address(each, security)
        super().__init__(self._addresses[0], security, options)
        self.site_id, self.run_id = site_id, run_id
        self._joining = threading.Lock()
        self._at = 0
        self._epoch = 0  # Of the syncer that took the site in last.
        # All lines lead to one address, so updates go only to a syncer that admitted the site.  A line connects at its
        # first use, so spare ones cost nothing and can be used later.
        self._bulk = [Line(self.address, security, self.options, SYNC_SERVICE) for _ in range(STREAMS_MAX)]
        self._streams = self.options.data_channels
        self._turn = itertools.count()
        self._breaks: dict[str, int] = {}
        self._welcome = False  # The last push was accepted, so expect the same of the next one.
        self.lengths: dict[int, int] = {}
        """By fragment, the length of the last payload pulled."""
        self.up, self.down = Learned(self.options.up_mbps), Learned(self.options.down_mbps)
        self._measuring, self._estimator = threading.Lock(), LinkEstimator()

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes of Push messages sent, and of Pull messages received, since the start, headers and re-sent chunks
        included."""
        return self.up.bytes, self.down.bytes

    @property
    def taken_in(self) -> tuple[int, int]:
        """The index of the address that last admitted the site, and its syncer's epoch: the argument of ``follow``."""
        return self._at, self._epoch

    def follow(self, taken_in: tuple[int, int]) -> None:
        """Send all further calls to the syncer that admitted another process of this site."""
        with self._joining:
            at, self._epoch = taken_in
            self._go_to(at)

    def _go_to(self, at: int) -> None:
        """Switch to the address with index ``at``; if it is another one, drop everything measured of the link."""
        if at != self._at:
            with self._measuring:
                self._estimator = LinkEstimator()
            for way in (self.up, self.down):
                way.forget()
        self._at, self.address = at, self._addresses[at]
        for line in (self._line, *self._bulk):
            line.lead_to(self.address)

    def close(self) -> None:
        """End every call under way; they raise ``Unreachable``."""
        for line in self._bulk:
            line.close()
        self.up.close()
        super().close()

    def join(self, ask: JoinAsk, epoch: int = 0) -> JoinReply:
        """Join at the first address that admits the site, trying each once; later calls go there.

        A syncer older than (``ask.lineage``, ``epoch``) has been replaced by another and is ignored.  When no address
        admits the site, a refusal is raised in preference to ``Unreachable``.  But a refusal that depends on a syncer's
        own permission files is not raised while another address, whose files may differ, is unreachable.
        """
        with self._joining:
            failures: list[Refused | Unreachable] = []
            for at in [*range(self._at, len(self._addresses)), *range(self._at)]:
                self._line.lead_to(self._addresses[at])
                try:
                    reply = self._join(ask, epoch)
                except (Refused, Unreachable) as error:
                    failures.append(error)
                    continue
                self._epoch = reply.epoch
                self._go_to(at)
                return reply
            self._line.lead_to(self.address)
            raise _worst(failures)

    def _join(self, ask: JoinAsk, epoch: int) -> JoinReply:
        """Join at the present address; repeat the ask with the ticket given while another process holds the site."""
        for _ in range(1 + CONFIRMATIONS_MAX):
            limit_s = self.options.join_timeout_s
            reply = self._line.unary("Join", convert.pack_join(ask), convert.unpack_join_reply, limit_s)
            if (reply.lineage, reply.epoch) < (ask.lineage, epoch):
                older = f"of lineage {reply.lineage}, epoch {reply.epoch}"
                raise Unreachable(f"Join: the syncer is {older}, and one of epoch {epoch} has replaced it")
            if reply.ticket == 0:
                return reply
            ask = replace(ask, ticket=reply.ticket)
        raise Unreachable("Join: other processes of this site join at the same time: is it started more than once?")

    def report(self, report: ReportInfo) -> ReportReply:
        """Send a heartbeat."""
        began_ns = time.monotonic_ns()
        reply = self._line.unary("Report", convert.pack_report(report), convert.unpack_report_reply)
        self._check_epoch("Report", reply.epoch)
        with self._measuring:
            self._estimator.answered(time.monotonic_ns() - began_ns)
        return reply

    def _check_epoch(self, method: str, epoch: int) -> None:
        """Raise ``Unreachable`` when an answer's ``epoch`` (0: not given) is older than that of the joined syncer."""
        if 0 < epoch < self._epoch:
            for line in self._bulk:  # The name may resolve elsewhere now; an open connection never notices.
                line.lead_to(None)
            older = f"the syncer that answers is of epoch {epoch}"
            raise Unreachable(f"{method}: {older}, and one of epoch {self._epoch} has replaced it")

    def leave(self, incarnation: int) -> None:
        """Tell the syncer that this site leaves the run."""
        ask = MemberAsk(self.run_id, self.site_id, incarnation)
        self._line.unary("Leave", convert.pack_member(ask), convert.unpack_empty)

    def watch(self, incarnation: int) -> Stream[WatchEvent]:
        """Stream the events of this site as they happen.  The first is an ``Alive``: the stream is open."""
        ask = MemberAsk(self.run_id, self.site_id, incarnation)
        guard = Guard(self.stalls, self.options.stall_s)
        return Stream(self._line, "Watch", convert.pack_member(ask), convert.unpack_watch_event, guard)

    def push(self, header: PushHeader, payload: bytes | memoryview) -> PushResult:
        """Make one attempt to send an update; the next attempt resumes from the bytes that the syncer holds.

        Other threads read ``payload`` until this returns, so it must not change.
        """
        view = memoryview(payload).cast("B")
        if len(view) != header.payload_bytes:
            raise MalformedMessage(f"payload_bytes is {header.payload_bytes}: the payload has {len(view)}")
        breaks = self._breaks.pop(header.digest, None)
        at_once, self._welcome = self._welcome and breaks is None, False
        arrival = self.up.begin(self.estimate().rtt_min_ns)
        pushing = Pushing(self, header, view, breaks or 0, at_once=at_once, arrival=arrival)
        began_ns, before = time.monotonic_ns(), self.up.bytes
        try:
            result = pushing.run()
        except Unreachable:
            self._breaks[header.digest] = (breaks or 0) + pushing.admitted
            if len(self._breaks) > BREAKS_KEPT:
                del self._breaks[next(iter(self._breaks))]
            raise
        self._check_epoch("Push", result.epoch)
        with self._measuring:
            self._estimator.carried(self.up.bytes - before, time.monotonic_ns() - began_ns, up=True)
        self.up.over(arrival)
        self._welcome = result.outcome is Outcome.ACCEPTED
        return result

    def pull(self, ask: PullAsk, sink: PullSink, patience: Patience | None = None) -> PulledVersion:
        """Make one attempt to pull a version into ``sink``; the next with the same sink asks only for missing bytes.

        With ``patience`` the call waits for a version that is not published yet.
        """
        arrival = self.down.begin(self.estimate().rtt_min_ns)
        ask = replace(ask, bytes_per_s=arrival.sent_at if arrival is not None else self.down.bytes_per_s)
        began_ns, before = time.monotonic_ns(), self.down.bytes
        pulled = Pulling(self, ask, sink, arrival, patience or Patience(0.0)).run()
        self.down.over(arrival)
        self._check_epoch("Pull", pulled.header.epoch)
        count, took_ns, round_trips = self.down.bytes - before, time.monotonic_ns() - began_ns, 1
        if patience is not None:  # It is timed from its first byte, without a round trip; others came while it waited.
            took_ns, round_trips = int(patience.carried_s * 1e9), 0
            count = pulled.header.payload_bytes if took_ns else 0  # One that resumes does not wait, and is not timed.
        with self._measuring:
            self._estimator.carried(count, took_ns, up=False, round_trips=round_trips)
        if pulled.parts:
            self.lengths[ask.fragment] = pulled.header.payload_bytes
        return pulled

    def use_channels(self, count: int) -> None:
        """Use ``count`` connections (clamped to 1 .. ``STREAMS_MAX``) from the next transfer on."""
        self._streams = max(1, min(count, STREAMS_MAX))

    def estimate(self) -> LinkEstimate:
        """Return the present estimate of the link, from the heartbeats and transfers that succeeded."""
        with self._measuring:
            return self._estimator.estimate()

    def in_turn(self) -> Sequence[Line]:
        """Return the bulk channels in use, rotated by one at each call."""
        bulk = self._bulk[: self._streams]
        first = next(self._turn) % len(bulk)
        return [*bulk[first:], *bulk[:first]]


class AdminClient(ServiceClient):
    """The client of an operator."""

    service = ADMIN_SERVICE

    def status(self) -> dict[str, object]:
        """Return the state of the run."""
        return self._line.unary("Status", b"", convert.unpack_status)

    def drain(self) -> None:
        """Begin the last round."""
        self._have("Drain")

    def evict(self, site_id: str) -> None:
        """Evict ``site_id`` from the run."""
        self._have("Evict", convert.pack_evict(EvictAsk(site_id)))

    def readmit(self, site_id: str) -> None:
        """Let ``site_id`` join again."""
        self._have("Readmit", convert.pack_evict(EvictAsk(site_id)))

    def admit(self, site_id: str, fragment: int, sequence: int) -> None:
        """Let a held update be merged."""
        self._have("Admit", convert.pack_update(UpdateAsk(site_id, fragment, sequence)))

    def refuse(self, site_id: str, fragment: int, sequence: int) -> None:
        """Exclude an accepted update from every merge."""
        self._have("Refuse", convert.pack_update(UpdateAsk(site_id, fragment, sequence)))

    def snapshot(self) -> None:
        """Write a snapshot now; returns when it is durable."""
        self._have("Snapshot", timeout_s=self.options.admin_timeout_s)

    def promote(self, *, lossy: bool = False) -> None:
        """Make the standby at this address take over; ``lossy``: even if it may lack something acknowledged."""
        self._have("Promote", convert.pack_promote(PromoteAsk(lossy)), self.options.admin_timeout_s)

    def detach(self) -> None:
        """Let the syncer continue without a standby until one has caught up."""
        self._have("Detach", timeout_s=self.options.admin_timeout_s)

    def _have(self, method: str, request: bytes = b"", timeout_s: float | None = None) -> None:
        self._line.unary(method, request, convert.unpack_empty, timeout_s)


class FollowClient(ServiceClient):
    """The client of a standby."""

    service = REPLICATION_SERVICE

    def follow(self, start: FollowStart) -> FollowStream:
        """Stream everything that the syncer stores, each item once it is durable there."""
        return FollowStream(self._line, start, Guard(self.stalls, self.options.stall_s))


class FollowStream(Stream[FollowPart]):
    """Parts to replicate.  One thread iterates; others may call ``ack`` and ``cancel``.  Use it in ``with``.

    Raises ``Unreachable`` or ``Refused`` when it ends.
    """

    def __init__(self, line: Line, start: FollowStart, guard: Guard) -> None:
        self._said: queue.SimpleQueue[FollowRequest | None] = queue.SimpleQueue()
        self._said.put(start)
        requests: Iterator[FollowRequest] = iter(self._said.get, None)
        super().__init__(line, "Follow", map(convert.pack_follow, requests), convert.unpack_follow_part, guard)

    def __next__(self) -> FollowPart:
        try:
            return super().__next__()
        except StopIteration:
            raise Unreachable("Follow: the stream ended") from None

    def ack(self, ack: FollowAck) -> None:
        """Acknowledge that everything up to ``ack`` is durable here."""
        self._said.put(ack)

    def cancel(self) -> None:
        """End the stream and wake the iterating thread."""
        self._said.put(None)
        super().cancel()


def _worst(failures: Sequence[Refused | Unreachable]) -> Refused | Unreachable:
    """Return the error to raise when every address has failed (see ``SyncClient.join``)."""
    if len(failures) == 1:
        return failures[0]
    refused = [failure for failure in failures if isinstance(failure, Refused)]
    of_the_run = [each for each in refused if each.final or each.status not in _OF_ITS_FILES]
    if of_the_run or len(refused) == len(failures):
        return min(of_the_run or refused, key=lambda each: not each.final)
    said = "; ".join(each.text if isinstance(each, Refused) else each.why for each in failures)
    return Unreachable(said, refused=refused[0].text if refused else "")
