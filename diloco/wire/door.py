"""Access control at the server: admit each call before reading it, and turn its errors into gRPC statuses.

``Door`` authenticates and authorizes a caller, limits its call rate and limits its concurrent calls.  A caller is an
identity or, without authentication, a connection.  A call uses resources (threads, credits, time of the decision loop)
only after the door has admitted it, so this file bounds how far one caller can slow down the others.

Concurrency limits.  ``Gate`` bounds the open streams of one kind, in total and per site.  ``WaitingRoom`` bounds calls
that wait for a first message, or for the push they belong to.  ``OneAtATime`` allows one stream per key.  ``Counters``
counts events.

First message.  The door admits a call before any of its bytes are read, and the first message must arrive within a
timeout.  For a unary method, gRPC reads the one message in the handler's thread before it calls the handler, without a
timeout: a few callers that open calls and send nothing, authenticated or not, would hold every thread.  So every method
is registered as a stream of requests, which is the same on the wire, and its first message is read here.

Statuses.  Only this file turns refusals and defects into statuses.  A refusal changes nothing but a counter.
INTERNAL always means a bug of the syncer: it is logged with its traceback and counted.

Connections.  gRPC has one limit for all connections (``grpc.max_allowed_incoming_connections``).  It accepts each
connection unasked, and keeps one that answers pings for ever.  So a few hundred connections that never make a call
would leave no place for a new site, and no file descriptor.  Here the limit is half of the files that this process may
have open.  When three quarters of those places are taken, the server closes connections that have no call under way:
first those on which no caller was ever admitted, from the address with the most such connections, oldest first.  A
connection with a call under way is never closed.  A site whose idle connection was closed reconnects at its next call.

Two rates are not limited.  The first is how often a caller is refused for lack of room: a caller at its limit is
refused at once, because a call that waits to be refused would take a thread from another caller.  That costs processor
time: half a core for 1300 refusals a second, which did not slow down the rounds of another site (``make flood``).
The second is the rate of the health service's Check and List, which need no authentication.  Only restricting who may
connect (client certificates, a firewall) bounds both.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc

from diloco import open_files
from diloco.wire.channel import PUSHBACK_KEY, REASON_KEY, Guard, Rates, StallWatch
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.identity import Authenticator, Identity
from diloco.wire.messages import PROBES_BURST_S, PROBES_PER_S, TEXT_CHARS_MAX, MalformedMessage, Refusal, Status
from diloco.wire.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.wire.messages import PushHeader

_log = logging.getLogger(__name__)

_TELL_EVERY_S = 60.0
_GATHER_S = 1.0


class Counters:
    """Named totals since the start.  They are all that a refused message may change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add ``count`` to the total ``name``."""
        with self._lock:
            self._totals[name] += count

    def totals(self) -> dict[str, int]:
        """Return a copy of all totals, sorted by name."""
        with self._lock:
            return dict(sorted(self._totals.items()))


class TurnedAway:
    """Counts closed connections; reports a second after the first, then at most once a minute while there are more."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._count = self._told = 0
        self._why = ""
        self._due_s = 0.0
        """The next report comes no sooner."""

    def add(self, why: str, count: int = 1) -> None:
        """Count ``count`` closed connections; the next report gives the latest ``why``."""
        with self._lock:
            if self._count == self._told:
                self._due_s = max(time.monotonic() + _GATHER_S, self._due_s)
            self._count += count
            self._why = why

    def tell(self) -> None:
        """Send the report if one is due.  Call it regularly, from one thread."""
        with self._lock:
            count, why, now_s = self._count, self._why, time.monotonic()
            if count == self._told or now_s < self._due_s:
                return
            self._told, self._due_s = count, now_s + _TELL_EVERY_S
        self._tell(f"connections closed so far: {count}; {why}")


@dataclass(eq=False)
class Gate:
    """A concurrency limit of ``total_max``, and of ``each_max`` per site; a call over it is refused, never queued."""

    what: str
    total_max: int
    each_max: int
    pushback_ms: int
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _inside: Counter[str] = field(init=False, default_factory=Counter)

    @contextmanager
    def enter(self, site: str) -> Iterator[None]:
        """Hold one place.  Raises RESOURCE_EXHAUSTED, with a retry delay, when there is no room."""
        with self._lock:
            full = self._inside[site] >= self.each_max
            if full or self._inside.total() >= self.total_max:
                text = f"no room for one more {self.what} {'of this caller' if full else 'in all'}: retry later"
                raise Refusal(Status.RESOURCE_EXHAUSTED, text, self.pushback_ms)
            self._inside[site] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[site] -= 1
                if not self._inside[site]:
                    del self._inside[site]


@dataclass(eq=False)
class WaitingRoom:
    """At most ``total_max`` waiting calls.  When it is full, a new call evicts an old one and is always admitted.

    The evicted call is the longest-waiting one of the caller with the most calls here.  So a caller that fills the room
    loses its own calls, and a caller that waits only briefly is never evicted.
    """

    total_max: int
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _inside: dict[object, tuple[str, Callable[[], object]]] = field(init=False, default_factory=dict)
    """The caller of each call and how to end it, in the order of arrival."""

    @contextmanager
    def enter(self, caller: str, cancel: Callable[[], object]) -> Iterator[None]:
        """Hold one place; when the call is evicted, another thread calls ``cancel``."""
        place = object()
        with self._lock:
            sent_away = None
            if len(self._inside) >= self.total_max:
                # Of callers with equally many calls, the one whose call came first loses one.
                [(most, _)] = Counter(each for each, _ in self._inside.values()).most_common(1)
                longest = next(place for place, (each, _) in self._inside.items() if each == most)
                _, sent_away = self._inside.pop(longest)
            self._inside[place] = caller, cancel
        if sent_away is not None:
            sent_away()
        try:
            yield
        finally:
            with self._lock:
                self._inside.pop(place, None)


_SUPERSEDE_S = 2.0


@dataclass(eq=False)
class OneAtATime:
    """One stream per key: a new stream ends the one before it.

    A site whose connection broke reconnects long before the server knows that its old stream is dead.  The new stream
    must not be blocked by the place and the resources that the old one holds.
    """

    what: str
    pushback_ms: int
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)
    _streams: dict[tuple[object, ...], tuple[int, Callable[[], object]]] = field(init=False, default_factory=dict)
    """By key, the incarnation of the stream under way and how to end it."""

    @contextmanager
    def enter(self, key: tuple[object, ...], incarnation: int, cancel: Callable[[], object]) -> Iterator[None]:
        """Be the one stream of ``key``; ``cancel`` is called when another stream takes over.

        Raises FAILED_PRECONDITION when a newer incarnation has the stream, and RESOURCE_EXHAUSTED when the older stream
        does not end within ``_SUPERSEDE_S``.
        """
        with self._changed:
            if (before := self._before(key, incarnation)) is not None:
                _, cancel_before = before
                cancel_before()
                self._changed.wait_for(lambda: self._streams.get(key) is not before, _SUPERSEDE_S)
                if self._before(key, incarnation) is not None:
                    text = f"an older {self.what} with the same key has not ended yet: retry later"
                    raise Refusal(Status.RESOURCE_EXHAUSTED, text, self.pushback_ms)
            self._streams[key] = incarnation, cancel
        try:
            yield
        finally:
            with self._changed:
                del self._streams[key]
                self._changed.notify_all()

    def _before(self, key: tuple[object, ...], incarnation: int) -> tuple[int, Callable[[], object]] | None:
        """Return the stream under way; FAILED_PRECONDITION where it is of a newer incarnation."""
        before = self._streams.get(key)
        if before is not None and before[0] > incarnation:
            text = f"fenced: a newer incarnation of this site has this {self.what}"
            raise Refusal(Status.FAILED_PRECONDITION, text)
        return before


FOR_EACH_SITE = 256
"""Connections per site: a site of many ranks has a few connections for each of its fragments."""
_LOOK_S = 0.5
_CROWDED_LOOK_S = 0.05
_SHARE = 0.1
"""Largest share of the time that ``Connections.look`` takes while the server is crowded."""
_DESCRIPTORS = "/dev/fd"


def places(options: ServerOptions) -> int:
    """Return how many connections a server may have open at once; it leaves at least as many descriptors for files."""
    soft, _ = open_files.limits()
    return max(1, min(soft // 2, FOR_EACH_SITE * (options.sites_max + 4)))


class Connections:
    """Watches the connections of one server, and closes idle ones when they are too many."""

    def __init__(self, places: int, counters: Counters, tell: Callable[[str], None]) -> None:
        self._places = places
        self._room = max(1, places * 3 // 4)
        self._counters = counters
        self._turned_away = TurnedAway(tell)
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        """The number of calls under way of each admitted peer, in the order in which their last call ended."""
        self._seen: list[str] = []
        """The peers that have a connection, in the order in which they were first seen."""

    @contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Mark the connection of ``peer``, as gRPC names it, as having an admitted call under way."""
        peer = unquote(peer)
        with self._lock:
            self._calls[peer] = self._calls.get(peer, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[peer] = self._calls.pop(peer) - 1

    def watch(self, port: int, stopping: threading.Event) -> None:
        """Watch the connections to ``port`` until ``stopping`` is set."""
        wait_s = _LOOK_S
        while not stopping.wait(wait_s):
            began_s = time.monotonic()
            crowded = self.look(port)
            took_s = time.monotonic() - began_s
            wait_s = max(_CROWDED_LOOK_S, took_s / _SHARE) if crowded else _LOOK_S
            self._turned_away.tell()

    def look(self, port: int) -> bool:
        """Close idle connections above the threshold; return whether any was closed."""
        descriptors: Sequence[int] = range(min(open_files.limits()[0], open_files.WANTED))
        with suppress(OSError):  # Where no descriptor is left to read the folder with, all are tried.
            descriptors = [int(each) for each in os.listdir(_DESCRIPTORS)]
        if len(descriptors) <= self._room and len(self._calls) <= self._places:
            return False
        found = {peer: fd for fd in descriptors if (peer := _peer_at(fd, port))}
        self._seen = [peer for peer in dict.fromkeys([*self._seen, *found]) if peer in found]
        with self._lock:
            self._calls = {peer: calls for peer, calls in self._calls.items() if calls or peer in found}
            known = [peer for peer, calls in self._calls.items() if not calls]
            strangers = [peer for peer in self._seen if peer not in self._calls]
        excess = len(found) - self._room
        chosen = _chosen(strangers, excess)
        chosen += _chosen(known, excess - len(chosen))
        for peer in chosen:
            fd = found[peer]
            with suppress(OSError):
                if _peer_at(fd, port) == peer:  # Otherwise gRPC has closed it meanwhile.
                    with _borrowed(fd) as connection:
                        connection.shutdown(socket.SHUT_RDWR)  # gRPC reads end of file and closes its descriptor.
        if chosen:
            self._counters.add("hung_up", len(chosen))
            taken = f"when {len(found)} of {self._places} places were taken"
            why = f"the latest was from {_host(chosen[-1])} and had no call under way {taken}"
            self._turned_away.add(why, len(chosen))
        return bool(chosen)


def _chosen(peers: Sequence[str], count: int) -> list[str]:
    """Choose ``count`` of ``peers`` in order, each from the address with the most peers not yet chosen."""
    by_host: dict[str, list[str]] = {}
    for peer in reversed(peers):
        by_host.setdefault(_host(peer), []).append(peer)
    chosen: list[str] = []
    while by_host and len(chosen) < count:
        host = max(by_host, key=lambda each: len(by_host[each]))
        chosen.append(by_host[host].pop())
        if not by_host[host]:
            del by_host[host]
    return chosen


def _host(peer: str) -> str:
    """Return the host of a peer: ``10.0.0.1`` for ``ipv4:10.0.0.1:5555``."""
    return peer.partition(":")[2].rpartition(":")[0]


def _peer_at(fd: int, port: int) -> str:
    """Return the peer of a connection to ``port``, as gRPC names it before quoting; "" for any other descriptor."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return ""
        with _borrowed(fd) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                return ""
            host, peer_port = connection.getpeername()[:2]
            if connection.family == socket.AF_INET or host.startswith("::ffff:"):
                return f"ipv4:{host.removeprefix('::ffff:')}:{peer_port}"
            return f"ipv6:[{host}]:{peer_port}"
    return ""  # Closed meanwhile, or a listening socket.


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Wrap a descriptor that gRPC owns in a socket, and never close it.

    The descriptor is not duplicated: gRPC relies on closing the last descriptor when it closes its own.
    """
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


WAIT_MAX_S = 1.0
"""Longest delay of a call by the rate limit; a call that would wait longer is refused."""


_FOR_STRANGERS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"})


@dataclass(eq=False, slots=True)
class Call:
    """An admitted call."""

    method: str
    requests: Iterator[bytes]
    context: Any
    """gRPC's."""
    identity: Identity

    @property
    def caller(self) -> str:
        """The key by which calls are counted: the identity's name, or the connection of a caller without a name."""
        return self.identity.name or f"peer {self.context.peer()}"


Work = Callable[[Call], Iterator[bytes]]
"""A method for an admitted call: yields its answers."""


@dataclass(eq=False)
class Door:
    """Admits calls, and ends them when the caller's credentials are no longer valid."""

    authenticator: Authenticator
    options: ServerOptions
    crowded: Callable[[str], None]
    """Told, at most once a minute, when idle connections were closed."""

    def __post_init__(self) -> None:
        self.counters = Counters()
        self.connections = Connections(places(self.options), self.counters, self.crowded)
        self.stalls = StallWatch("stalls-syncer")
        self.stopping = threading.Event()
        """Set when the server takes no new calls; streams that wait for events end then."""
        self._lock = threading.Lock()
        self._inside: set[Call] = set()
        calls_max, pushback_ms = self.options.calls_max, self.options.pushback_ms
        self._places = Gate("call", calls_max, self.options.calls_per_caller_max, pushback_ms)
        self.waiting_room = WaitingRoom(calls_max // 2)
        """For calls whose first message is awaited."""
        self._rates = {
            "calls_per_s": Rates(burst_s=2.0),
            "probes": Rates(burst_s=PROBES_BURST_S),
            "pushes_per_s": Rates(burst_s=2.0),
            "bytes_per_s": Rates(burst_s=1.0),
            "pull_bytes_per_s": Rates(burst_s=1.0),
        }

    def handler(self, method: str, work: Work) -> Any:
        """Return gRPC's handler of ``method``, whose stream of answers ``work`` yields."""
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._answers(method, work, requests, context)
        )

    def unary(self, method: str, work: Callable[[bytes, Call], bytes], *, large: bool = False) -> Any:
        """As ``handler``, for a method with one request message, which ``work`` answers with one.

        gRPC sends the answer together with the status, which frees the thread.  After a message of a stream the thread
        waits until the caller has read it, so callers that read nothing would hold every thread.
        """

        def work_once(call: Call) -> Iterator[bytes]:
            yield work(self.first(call, large=large), call)

        def answer(requests: Iterator[bytes], context: Any) -> bytes:
            answers = list(self._answers(method, work_once, requests, context))
            if not answers:
                abort(context, Refusal(Status.CANCELLED, "the call is over"))
            return answers[0]

        return grpc.stream_unary_rpc_method_handler(answer)

    def _answers(self, method: str, work: Work, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Yield the answers of ``work``, or end the call with the status of its error.

        A bug of the syncer is logged and counted as ``internal``.
        """
        try:
            with self.enter(method, requests, context) as call:
                yield from work(call)
            return
        except grpc.RpcError as error:  # The client is gone: no status can be sent.
            self.counters.add("broken_off")
            forget(error)
            return
        except Exception as error:
            match error:
                case Refusal():
                    refusal = Refusal(error.status, error.text, error.retry_ms, reason=error.reason)
                case DamagedChunk():
                    refusal = Refusal(Status.DATA_LOSS, str(error))
                case MalformedMessage() | ChunkError():
                    refusal = Refusal(Status.INVALID_ARGUMENT, str(error))
                case _:
                    _log.exception("%s failed because of a bug in the syncer", method, exc_info=error)
                    refusal = Refusal(Status.INTERNAL, "a bug in the syncer: its log has the traceback")
            defect = refusal.status is Status.INTERNAL
            self.counters.add("internal" if defect else f"refused_{refusal.status.value.lower()}")
            forget(error)
        abort(context, refusal)

    @contextmanager
    def enter(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[Call]:
        """Admit one call, and hold its place for the block.

        Raises UNAUTHENTICATED for an unknown caller, RESOURCE_EXHAUSTED with a retry delay for one with too many calls
        at once or far over its rate limit, and PERMISSION_DENIED for a method that its role does not allow.  A caller
        slightly over its rate limit is delayed, even if it is then refused: a refusal costs the syncer nearly as much
        as an answer, and a delayed caller does not retry meanwhile.
        """
        if method in _FOR_STRANGERS:
            yield Call(method, requests, context, Identity())
            return
        try:
            identity = self.authenticator.identify(context)
        except Refusal:
            # All unauthenticated callers together get the places and the rate of one caller.
            with self._places.enter(""):
                self._wait_for_turn("", self.options.calls_per_s)
            raise
        call = Call(method, requests, context, identity)
        with self.connections.calling(context.peer()), self._places.enter(call.caller):
            self._wait_for_turn(call.caller, identity.grant.calls_per_s or self.options.calls_per_s)
            identity.check_role(method)
            with self._lock:
                self._inside.add(call)
            try:
                yield call
            finally:
                with self._lock:
                    self._inside.discard(call)

    def first(self, call: Call, *, large: bool = False) -> bytes:
        """Return the first message of a call; a ``large`` one has the stall timeout instead of the header timeout.

        Raises DEADLINE_EXCEEDED after that, and ``MalformedMessage`` when the call ends before its message.
        """
        limit_s = self.options.stall_s if large else self.options.header_timeout_s
        with (
            self.waiting_room.enter(call.caller, call.context.cancel),
            Guard(self.stalls, limit_s, call.context.cancel) as guard,
        ):
            try:
                raw = next(call.requests, None)
            except grpc.RpcError as error:
                forget(error)
                if not guard.stalled:
                    raise
        if guard.stalled:
            raise Refusal(Status.DEADLINE_EXCEEDED, f"no message arrived within {limit_s:g} s")
        if raw is None:
            raise MalformedMessage("the call ended before its message")
        return raw

    def serves(self, context: Any) -> bool:
        """Return whether a call goes on: its client is there and the server is not stopping."""
        return bool(context.is_active()) and not self.stopping.is_set()

    def check_run(self, run_id: str) -> None:
        """Raise NOT_FOUND for another run's id."""
        if run_id != self.options.run_id:
            raise Refusal(Status.NOT_FOUND, f"run_id is {run_id!r}: there is no such run here")

    def check_push(self, header: PushHeader, identity: Identity) -> None:
        """Refuse an update that its sender may not send, or not yet.  Called before its payload is read."""
        identity.grant.check_push(header)
        # ``charge_bytes`` charges the bytes as they arrive; this only checks that the caller has no debt.
        self.spend("bytes_per_s", 0.0, identity)
        self.spend("pushes_per_s", 1.0, identity)

    def check_probe(self, bytes_up: int, bytes_down: int, identity: Identity) -> None:
        """Refuse a probe's filler that the caller may not send or receive, or not yet.  Called before any is moved."""
        if bytes_up and not identity.grant.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{identity.name} may not push, nor send filler")
        if bytes_up:
            self.spend("bytes_per_s", 0.0, identity)
        if bytes_down:
            self.spend("pull_bytes_per_s", 0.0, identity)
        if bytes_up or bytes_down:
            self._charge("probes", identity.name, 1.0, PROBES_PER_S)

    def charge_bytes(self, counter: str, rate: str, count: int, identity: Identity) -> None:
        """Count ``count`` bytes, received or about to be sent, and charge them to ``rate``; never refuses."""
        self.counters.add(counter, count)
        self.spend(rate, count, identity, math.inf)

    def spend(self, rate: str, amount: float, identity: Identity, wait_max_s: float = 0.0) -> None:
        """Charge ``amount`` to the granted ``rate``; refuse where the credit is more than ``wait_max_s`` away."""
        per_s = getattr(identity.grant, rate)
        if per_s is not None:
            self._charge(rate, identity.name, amount, per_s, wait_max_s)

    def end_revoked(self) -> list[str]:
        """End the calls of all identities that would no longer be admitted; return one reason for each identity."""
        with self._lock:
            calls = list(self._inside)
        reasons: dict[str, str] = {}
        for call in calls:
            name = call.identity.name
            try:
                self.authenticator.check_still(call.identity, call.method)
            except Refusal as refusal:
                reasons[name] = f"calls of {name} were ended: {refusal.text}"
                call.context.cancel()
        return [reasons[name] for name in sorted(reasons)]

    def _wait_for_turn(self, caller: str, per_s: float) -> None:
        if per_s and (wait_s := self._charge("calls_per_s", caller, 1.0, per_s, WAIT_MAX_S)) > 0:
            self.counters.add("kept_waiting")
            time.sleep(wait_s)

    def _charge(self, rate: str, caller: str, amount: float, per_s: float, wait_max_s: float = 0.0) -> float:
        """Charge ``amount``; return the seconds until the caller has credit for it, or refuse above ``wait_max_s``."""
        wait_s = self._rates[rate].take(caller, amount, per_s, time.monotonic(), wait_max_s)
        if wait_s > wait_max_s:
            pushback_ms = max(self.options.pushback_ms, int((wait_max_s or wait_s) * 1000) + 1)
            raise Refusal(Status.RESOURCE_EXHAUSTED, f"caller is over its limit of {rate}: retry later", pushback_ms)
        return wait_s


def forget(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and of its causes.

    A traceback and the frames of the call refer to each other, so the call would live until the next garbage
    collection.  As long as it lives, gRPC counts it among the few streams that a connection may have.
    """
    held: BaseException | None = error
    while held is not None:
        held.__traceback__ = None
        held = held.__cause__ or held.__context__


def abort(context: Any, refusal: Refusal) -> None:
    """End the call with the status of ``refusal``; always raises gRPC's own exception."""
    beside = [(PUSHBACK_KEY, str(refusal.retry_ms))] if refusal.retry_ms is not None else []
    beside += [(REASON_KEY, refusal.reason.value)] if refusal.reason is not None else []
    if beside:
        context.set_trailing_metadata(tuple(beside))
    text = " ".join(refusal.text.split())[:TEXT_CHARS_MAX]
    context.abort(grpc.StatusCode[refusal.status.name], text)
