"""A site's end of the wire, and an operator's.

Every method of ``SyncClient`` and ``AdminClient`` blocks, has a bound, may be called from any thread, and ends in an
answer, in ``Refused`` (a definite no) or in ``Unreachable`` (try again).  Nothing is retried in here: how long to wait
is the caller's decision (``channel.Backoff``).

Learned rate.  Bulk keeps to a rate each way: what the operator told of the link, or what ``Learned`` has found.  Only
a far link is learned: on a near one a queue is short, and the machines bound a transfer.  The learned rate may be too
low: the link has become faster, or a busy machine held the bytes back and not the link.  So one transfer in
``LOOK_AGAIN`` goes unheld, and where it arrives much faster the learning begins anew.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from diloco.sync.events import Outcome
from diloco.sync.link import ROUND_TRIPS_KEPT, SPAN_MIN_NS, Pace, later_rate
from diloco.wire import convert
from diloco.wire.channel import (
    ADMIN_SERVICE,
    SYNC_SERVICE,
    Calls,
    Guard,
    Line,
    Pacer,
    StallWatch,
    bulk_bytes_per_s,
    check_address,
    split_addresses,
)
from diloco.wire.chunks import PIECE_BYTES_MIN
from diloco.wire.messages import (
    FRAMES_SINCE,
    MIB,
    STREAMS_MAX,
    EvictAsk,
    JoinAsk,
    JoinReply,
    LeaveAsk,
    MalformedMessage,
    PullAsk,
    PushHeader,
    PushResult,
    Refused,
    ReportInfo,
    ReportReply,
    Status,
    Unreachable,
    UpdateAsk,
    WatchAsk,
    WatchEvent,
)
from diloco.wire.options import ClientOptions, SecurityOptions
from diloco.wire.pulling import Patience, Pulling
from diloco.wire.pushing import Pushing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from diloco.wire.pulling import PulledVersion, PullSink

FAR_S = 0.01
BYTES_MIN = 2 * MIB
"""Of a transfer by which a link is judged."""
LOOK_AGAIN = 20
"""Transfers that were held; the next one goes unheld, and so do those after it until one is long enough to judge by."""
FASTER_PERCENT = 110
"""Of the rate that was learned: whoever arrives faster unheld shows that it was too little."""


class Arrival:
    """When how many bytes of one transfer had arrived.  For any thread."""

    def __init__(self, sent_at: int) -> None:
        """It goes at ``sent_at`` bytes a second; 0: as fast as it can."""
        self.sent_at = sent_at
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int]] = []

    def held(self, count: int) -> None:
        """So many bytes are at the other end by now."""
        with self._lock:
            self._seen.append((time.monotonic_ns(), max(count, self._seen[-1][1] if self._seen else 0)))

    def more(self, count: int) -> None:
        """So many bytes more have come."""
        with self._lock:
            self._seen.append((time.monotonic_ns(), count + (self._seen[-1][1] if self._seen else 0)))

    def rate(self) -> int:
        """Bytes a second, once it is under way; 0 where it was too short to tell."""
        with self._lock:
            seen = list(self._seen)
        if not seen or seen[-1][0] - seen[0][0] < SPAN_MIN_NS or seen[-1][1] - seen[0][1] < BYTES_MIN:
            return 0
        return int(later_rate(seen))


class Learned:
    """One way of a link; for any thread."""

    def __init__(self, mbps: float) -> None:
        """``mbps`` is what was told of it; 0: nothing."""
        self._told = mbps > 0
        self._lock = threading.Lock()
        self._pace, self._held = Pace(), 0
        self.bytes_per_s = bulk_bytes_per_s(mbps)

    def begin(self, rtt_s: float) -> Arrival | None:
        """A transfer begins over ``rtt_s`` (0: not known), at ``bytes_per_s`` from now on; None where nothing is to be
        learned from it."""
        if self._told or rtt_s <= 0:
            return None
        if rtt_s < FAR_S:
            self.forget()
            return None
        with self._lock:
            self._held += self.bytes_per_s > 0
            if self._held > LOOK_AGAIN:
                self.bytes_per_s = 0
            return Arrival(self.bytes_per_s)

    def over(self, arrival: Arrival | None) -> None:
        """It came to its end."""
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
        """It is another link."""
        if not self._told:
            with self._lock:
                self._pace, self._held, self.bytes_per_s = Pace(), 0, 0


T = TypeVar("T")

_OF_ITS_FILES = frozenset({Status.PERMISSION_DENIED, Status.UNAUTHENTICATED})

BREAKS_KEPT = 64
"""Updates of which is remembered how often their push was broken off."""
CONFIRMATIONS_MAX = 3
"""Times that a ticket is repeated in one join: each further one means that yet another process was taken in."""


class SyncClient:
    """Speaks for ``site_id`` in run ``run_id``; ``site_id`` is empty for an observer that only pulls.

    Control (Join, Watch, Report, Leave) and bulk (Push, Pull) have connections of their own.  Nothing is connected
    before the first call; a lost connection comes back by itself.  ``ValueError`` for an address or security that
    cannot work.

    ``address`` may be several, with commas between them: of the syncer, and of each standby that may take its place.
    ``join`` finds the one that takes the site in, and every other call goes there from then on.  An answer of a syncer
    of an older epoch than that one's counts for nothing, whatever connection it came on: another has taken its place.
    """

    def __init__(
        self,
        address: str,
        site_id: str,
        run_id: str,
        security: SecurityOptions | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        security = security or SecurityOptions()
        self._options = options or ClientOptions()
        self._site_id, self._run_id = site_id, run_id
        self._stalls = StallWatch(f"stalls-{site_id or 'observer'}")
        self._addresses = split_addresses(address)
        for each in self._addresses:
            check_address(each, security)
        self._joining = threading.Lock()
        self._at = 0
        self._epoch = 0  # Of the syncer that took the site in last.
        arguments = self._options.channel_arguments()
        # The first is for control.  What a site has to send goes nowhere that has not taken the site in.
        # Nothing is connected before it is used, so that more may be used later.
        self._lines = [Line(self.address, security, arguments) for _ in range(1 + STREAMS_MAX)]
        self._streams = self._options.data_channels
        self._control, *self._bulk = (Calls(line, SYNC_SERVICE) for line in self._lines)
        self._turn = itertools.count()
        self._breaks: dict[str, int] = {}
        self._protocol = 0  # That both speak, as the join said.
        self._welcome = False  # The last push was let in, as the next one will be.
        self._lengths: dict[int, int] = {}  # Of the last payload that was pulled of each fragment.
        self._up, self._down = Learned(self._options.up_mbps), Learned(self._options.down_mbps)
        self._pacer = Pacer(self._up.bytes_per_s)
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._bytes = threading.Lock()
        self._bytes_up = 0
        self._bytes_down = 0

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The one that took the site in last, or is tried first."""
        return self._addresses[self._at]

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one address."""
        return len(self._addresses) > 1

    @property
    def has_patience(self) -> bool:
        """Whether the syncer that took the site in lets a pull wait for what is not there yet."""
        return self._protocol >= FRAMES_SINCE

    @property
    def bytes_up(self) -> int:
        """Bytes of Push messages sent since the start, headers and re-sent chunks included."""
        return self._bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of Pull messages received since the start, headers and re-sent chunks included."""
        return self._bytes_down

    @property
    def taken_in(self) -> tuple[int, int, int]:
        """The place of the address that took the site in last, its epoch, and the protocol: what ``follow`` takes."""
        return self._at, self._epoch, self._protocol

    def follow(self, taken_in: tuple[int, int, int]) -> None:
        """Another process of the site has joined: what is sent from here goes where that one was taken in."""
        with self._joining:
            at, epoch, protocol = taken_in
            if at != self._at:
                self._elsewhere()
            self._at, self._epoch, self._protocol = at, epoch, protocol
            for line in self._lines:
                line.lead_to(self.address)

    def close(self) -> None:
        """End every call under way; they raise ``Unreachable``."""
        for calls in (self._control, *self._bulk):
            calls.close()
        self._pacer.close()
        self._stalls.close()

    def join(self, ask: JoinAsk, epoch: int = 0) -> JoinReply:
        """Speak for the site from now on, at the first address that takes it in; each is asked once.

        A syncer older than (``ask.lineage``, ``epoch``) is one whose place another has taken: it does not count.
        Where nobody takes the site in, a refusal says more than silence and is what is raised; but not one for what
        a syncer's own files say, as long as another is away whose files may say otherwise.
        """
        with self._joining:
            failures: list[Refused | Unreachable] = []
            for at in [*range(self._at, len(self._addresses)), *range(self._at)]:
                self._lines[0].lead_to(self._addresses[at])
                try:
                    reply = self._join(ask, epoch)
                except (Refused, Unreachable) as error:
                    failures.append(error)
                    continue
                if at != self._at:
                    self._elsewhere()
                self._at = at
                self._epoch, self._protocol = reply.epoch, reply.protocol
                for line in self._lines[1:]:
                    line.lead_to(self.address)
                return reply
            self._lines[0].lead_to(self.address)
            raise _worst(failures)

    def _elsewhere(self) -> None:
        """Another address: nothing that was measured holds for the link to it."""
        self._round_trips_s.clear()
        for way in (self._up, self._down):
            way.forget()

    def _join(self, ask: JoinAsk, epoch: int) -> JoinReply:
        """One address; where another process speaks for the site, it is asked again with the ticket that it gives."""
        for _ in range(1 + CONFIRMATIONS_MAX):
            reply = self._join_once(ask, epoch)
            if reply.ticket == 0:
                return reply
            ask = replace(ask, ticket=reply.ticket)
        raise Unreachable("Join: other processes of this site join at the same time: is it started more than once?")

    def _join_once(self, ask: JoinAsk, epoch: int) -> JoinReply:
        raw = self._control.unary("Join", convert.pack_join(ask), self._options.join_timeout_s)
        reply = _parsed("Join", convert.unpack_join_reply, raw)
        if (reply.lineage, reply.epoch) < (ask.lineage, epoch):
            older = f"of lineage {reply.lineage}, epoch {reply.epoch}"
            raise Unreachable(f"Join: the syncer is {older}, and another of epoch {epoch} has taken its place")
        return reply

    def report(self, report: ReportInfo) -> ReportReply:
        """The heartbeat."""
        began_s = time.monotonic()
        raw = self._control.unary("Report", convert.pack_report(report), self._options.control_timeout_s)
        self._round_trips_s.append(time.monotonic() - began_s)
        reply = _parsed("Report", convert.unpack_report_reply, raw)
        self._check_epoch("Report", reply.epoch)
        return reply

    def _check_epoch(self, method: str, epoch: int) -> None:
        """``epoch`` came with an answer; 0: it was not told."""
        if 0 < epoch < self._epoch:
            for line in self._lines[1:]:  # One name may lead elsewhere now; a connection that stands never notices.
                line.renew()
            older = f"the syncer that answers is of epoch {epoch}"
            raise Unreachable(f"{method}: {older}, and another of epoch {self._epoch} has taken its place")

    def leave(self, incarnation: int) -> None:
        """Say goodbye."""
        ask = LeaveAsk(self._run_id, self._site_id, incarnation)
        self._control.unary("Leave", convert.pack_leave(ask), self._options.control_timeout_s)

    def watch(self, incarnation: int) -> WatchStream:
        """The events of this site as they happen.  The first is an ``Alive``: the stream stands."""
        ask = WatchAsk(self._run_id, self._site_id, incarnation)
        guard = self._stalls.guard(self._options.stall_s)
        return WatchStream(self._control.stream("Watch", convert.pack_watch(ask)), guard, self._control)

    def push(self, header: PushHeader, payload: bytes | memoryview) -> PushResult:
        """One attempt to send an update; the next one goes on where the syncer's bytes end.

        ``payload`` is read by another thread until this returns, and must not change.
        """
        view = memoryview(payload).cast("B")
        if len(view) != header.payload_bytes:
            raise MalformedMessage(f"payload_bytes is {header.payload_bytes}: the payload has {len(view)}")
        breaks, known = self._breaks.pop(header.digest, None), self._protocol >= FRAMES_SINCE
        at_once, self._welcome = known and self._welcome and breaks is None, False
        arrival = self._up.begin(self._rtt_s)
        self._pacer.keep_to(self._up.bytes_per_s)
        pushing = Pushing(
            self._in_turn(),
            header,
            view,
            self._options,
            self._stalls,
            self._count_up,
            self._pacer,
            breaks or 0,
            known=known,
            at_once=at_once,
            arrived=arrival.held if arrival is not None else None,
        )
        try:
            result = pushing.run()
        except Unreachable:
            self._breaks[header.digest] = (breaks or 0) + pushing.admitted
            if len(self._breaks) > BREAKS_KEPT:
                del self._breaks[next(iter(self._breaks))]
            raise
        self._check_epoch("Push", result.epoch)
        self._up.over(arrival)
        self._welcome = result.outcome is Outcome.ACCEPTED
        return result

    def pull(self, ask: PullAsk, sink: PullSink, patience: Patience | None = None) -> PulledVersion:
        """One attempt to get a version into ``sink``; the next one with the same sink asks for what is missing.

        With ``patience`` it may be one that is not there yet; a syncer of an earlier protocol has none.
        """
        bulk, at_once = self._in_turn(), max(1, self._lengths.get(ask.fragment, 0) // PIECE_BYTES_MIN)
        if not self.has_patience:
            at_once, patience = 1, None
        arrival, options = self._down.begin(self._rtt_s), self._options

        def received(count: int) -> None:
            self._count_down(count)
            if arrival is not None:
                arrival.more(count)

        held_to = arrival.sent_at if arrival is not None else self._down.bytes_per_s
        by = (options, self._stalls, received, at_once, patience, held_to)
        pulled = Pulling(bulk, ask, sink, *by).run()
        self._down.over(arrival)
        self._check_epoch("Pull", pulled.header.epoch)
        if pulled.parts:
            self._lengths[ask.fragment] = pulled.header.payload_bytes
        return pulled

    def use_channels(self, count: int) -> None:
        """From the next transfer on go over ``count`` connections, as far as there may be so many."""
        self._streams = max(1, min(count, STREAMS_MAX))

    @property
    def _rtt_s(self) -> float:
        """The shortest round trip lately; 0: none was made yet."""
        return min(tuple(self._round_trips_s), default=0.0)

    def _in_turn(self) -> Sequence[Calls]:
        """The bulk channels in use, another one first each time."""
        bulk = self._bulk[: self._streams]
        first = next(self._turn) % len(bulk)
        return [*bulk[first:], *bulk[:first]]

    def _count_up(self, message_bytes: int) -> None:
        with self._bytes:
            self._bytes_up += message_bytes

    def _count_down(self, message_bytes: int) -> None:
        with self._bytes:
            self._bytes_down += message_bytes


class WatchStream:
    """Events of a site, to be iterated by one thread; ``cancel`` may come from another.

    Ends after ``Dropped`` or ``cancel``; raises ``Unreachable`` or ``Refused`` otherwise.  Use it in ``with``, or
    cancel it.
    """

    def __init__(self, call: Any, guard: Guard, calls: Calls) -> None:
        self._call = call
        self._calls = calls
        self._guard = guard
        self._cancelled = False
        guard.arm(call.cancel)
        guard.__enter__()

    def __enter__(self) -> WatchStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[WatchEvent]:
        return self

    def __next__(self) -> WatchEvent:
        try:
            event = convert.unpack_watch_event(next(self._call))
        except StopIteration:
            self.cancel()
            raise
        except grpc.RpcError as error:
            cancelled = self._cancelled
            self.cancel()
            if cancelled:
                raise StopIteration from error
            raise self._calls.failed("Watch", error, self._guard) from error
        except MalformedMessage as error:
            self.cancel()
            raise Unreachable(f"Watch: the syncer's answer cannot be: {error}") from error
        self._guard.touch()
        return event

    def cancel(self) -> None:
        """End the stream; the thread that iterates is woken."""
        self._cancelled = True
        self._guard.__exit__(None, None, None)
        self._call.cancel()


class AdminClient:
    """An operator's end."""

    def __init__(
        self, address: str, security: SecurityOptions | None = None, options: ClientOptions | None = None
    ) -> None:
        security = security or SecurityOptions()
        self._options = options or ClientOptions()
        self._calls = Calls(Line(address, security, self._options.channel_arguments()), ADMIN_SERVICE)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def status(self) -> dict[str, object]:
        """How the run stands."""
        raw = self._calls.unary("Status", b"", self._options.control_timeout_s)
        return _parsed("Status", convert.unpack_status, raw)

    def drain(self) -> None:
        """Begin the last round."""
        self._calls.unary("Drain", b"", self._options.control_timeout_s)

    def evict(self, site_id: str) -> None:
        """Put ``site_id`` out of the run."""
        self._calls.unary("Evict", convert.pack_evict(EvictAsk(site_id)), self._options.control_timeout_s)

    def readmit(self, site_id: str) -> None:
        """Let ``site_id`` join again."""
        self._calls.unary("Readmit", convert.pack_evict(EvictAsk(site_id)), self._options.control_timeout_s)

    def admit(self, site_id: str, fragment: int, sequence: int) -> None:
        """Let a held update be merged."""
        self._update("Admit", UpdateAsk(site_id, fragment, sequence))

    def refuse(self, site_id: str, fragment: int, sequence: int) -> None:
        """An accepted update is never merged."""
        self._update("Refuse", UpdateAsk(site_id, fragment, sequence))

    def _update(self, method: str, ask: UpdateAsk) -> None:
        self._calls.unary(method, convert.pack_update(ask), self._options.control_timeout_s)

    def snapshot(self) -> None:
        """Write a snapshot now; returns when it is durable."""
        self._calls.unary("Snapshot", b"", self._options.admin_timeout_s)

    def promote(self, *, lossy: bool = False) -> None:
        """Have a standby take over."""
        self._calls.unary("Promote", convert.pack_promote(lossy=lossy), self._options.admin_timeout_s)

    def detach(self) -> None:
        """Have the syncer go on without a standby until one has caught up."""
        self._calls.unary("Detach", b"", self._options.admin_timeout_s)

    def close(self) -> None:
        """End every call under way."""
        self._calls.close()


def _parsed(method: str, unpack: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return unpack(raw)
    except MalformedMessage as error:
        raise Unreachable(f"{method}: the syncer's answer cannot be: {error}") from error


def _worst(failures: Sequence[Refused | Unreachable]) -> Refused | Unreachable:
    """What to say when every address has failed."""
    if len(failures) == 1:
        return failures[0]
    refused = [failure for failure in failures if isinstance(failure, Refused)]
    of_the_run = [each for each in refused if each.final or each.status not in _OF_ITS_FILES]
    if of_the_run or len(refused) == len(failures):
        return min(of_the_run or refused, key=lambda each: not each.final)
    said = "; ".join(each.text if isinstance(each, Refused) else each.why for each in failures)
    return Unreachable(said, refused=refused[0].text if refused else "")
