"""A site's connection to the syncer: retries, rate limits, stall detection, pacing, addresses, and calls in raw bytes.

Back-off.  ``Backoff`` computes the wait before a retry: capped exponential growth with jitter.

Rate limits.  ``Rates`` is a token bucket per caller.  It is pure arithmetic except for one lock: time is an argument.

Stalls.  ``StallWatch`` ends streams that make no progress.  gRPC's sync API waits for the next message without a
timeout, and a connection may be alive while its application is frozen, so at both ends every stream has a stall
timeout.

Pacing.  A site limits its own bulk traffic so that other traffic gets a part of the link.  Of a configured link rate
bulk gets all but ``CONTROL_SHARE``, which stays free for heartbeats and events however long a transfer takes.  A
learned rate (``client.Learned``) leaves them less, and a transfer that probes for a higher rate leaves them nothing.

Deal.  ``Deal`` gives each chunk of one payload, a push's or a pull's, to the stream that can send next.  With parts of
equal length, the transfer would take as long as the slowest connection needs for its part.

Line.  gRPC reads a client's certificate once, when a channel is made, and a site outlives its certificate.  So when a
call fails because the syncer is unreachable, and the files have changed since, the line opens a new channel; calls on
the old one end as on a lost connection.  A site may know several addresses, of the syncer and of the standbys that may
replace it; a line leads to one of them at a time.

A line turns the failures of gRPC, and malformed answers, into ``WireError``.  ``Stream`` is a call with many answers.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import grpc

from diloco.sync.events import Reason
from diloco.sync.link import SPAN_MIN_NS, later_rate
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.messages import (
    CHUNK_BYTES_MIN,
    MIB,
    Filler,
    MalformedMessage,
    Nonsense,
    ProbeTaken,
    Refused,
    Status,
    Unreachable,
    WireError,
)
from diloco.wire.options import (
    PORT_MAX,
    SYSTEM_ROOTS,
    ClientOptions,
    SecurityOptions,
    Watched,
    client_credentials,
    is_loopback,
    read_token,
)
from diloco.wire.v1 import admin_pb2, replication_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from diloco.wire.chunks import Span

T = TypeVar("T")


@dataclass(slots=True)
class Backoff:
    """Back-off delays between ``base_s / 2`` and ``cap_s``; pure arithmetic, the caller supplies the random number.

    The n-th delay is uniform in the upper half of ``min(cap_s, base_s · 2ⁿ)``, so that sites that lost the syncer at
    the same time do not all reconnect at the same time.
    """

    base_s: float
    cap_s: float
    failures: int = 0
    """In a row; the caller sets it to 0 after a success."""

    def next_s(self, chance: float, at_least_s: float = 0.0) -> float:
        """Return the next delay in seconds; ``chance`` is in [0, 1), ``at_least_s`` the delay the other end asked for.

        The other end asks the same delay of every caller that it refuses, so up to half of it is added as jitter.
        """
        span_s = min(self.cap_s, self.base_s * 2.0 ** min(self.failures, 60))
        self.failures += 1
        return max(at_least_s * (1.0 + 0.5 * chance), span_s * (0.5 + 0.5 * chance))


@dataclass(eq=False)
class Rates:
    """One token bucket per caller: filled at its rate, up to ``burst_s`` seconds' worth but at least 1.

    An amount larger than the bucket passes when the bucket is full; the debt is paid off before anything else passes.
    At most ``callers_max`` buckets are kept; the least recently used is dropped.
    """

    burst_s: float
    callers_max: int = 4096
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _buckets: OrderedDict[str, tuple[float, float]] = field(init=False, default_factory=OrderedDict)

    def take(self, caller: str, amount: float, per_s: float, now_s: float, wait_max_s: float = 0.0) -> float:
        """Take ``amount`` and return the seconds until there is credit for it; takes nothing if that is more than
        ``wait_max_s``.  ``per_s`` is the caller's rate, ``now_s`` the present time."""
        full = max(1.0, per_s * self.burst_s)
        with self._lock:
            credit, at_s = self._buckets.get(caller, (full, now_s))
            credit = min(full, credit + max(0.0, now_s - at_s) * per_s)
            wait_s = max(0.0, (min(amount, full) - 1e-9 - credit) / per_s)
            taken = amount if wait_s <= wait_max_s else 0.0
            # Threads pass their times in any order; max keeps any second from being credited twice.
            self._buckets[caller] = (credit - taken, max(at_s, now_s))
            self._buckets.move_to_end(caller)
            if len(self._buckets) > self.callers_max:
                self._buckets.popitem(last=False)
        return wait_s


_TICK_S = 0.25


@dataclass(eq=False)
class Guard:
    """One guarded stream, while in ``with``: ``cancel`` is called after ``limit_s`` without a ``touch``."""

    watch: StallWatch
    limit_s: float | None
    """The stall timeout now in force; None: none."""
    cancel: Callable[[], object] | None = None
    """Ends the stream; None where it is not known yet."""
    moved_at_s: float = field(init=False, default_factory=time.monotonic)
    stalled: bool = field(init=False, default=False)

    def touch(self) -> None:
        """Note progress."""
        self.moved_at_s = time.monotonic()

    def limit(self, limit_s: float | None) -> None:
        """Set the stall timeout from now on; None: no timeout, because this end is busy and the other one waits."""
        self.moved_at_s = time.monotonic()
        self.limit_s = limit_s

    def __enter__(self) -> Guard:
        self.watch.add(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self.watch.remove(self)


@dataclass(eq=False)
class StallWatch:
    """One thread that checks all guarded streams of a client or a server; it sleeps while there are none."""

    name: str
    _guards: set[Guard] = field(init=False, default_factory=set)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)
    _closed: bool = field(init=False, default=False)
    _thread: threading.Thread | None = field(init=False, default=None)

    def add(self, guard: Guard) -> None:
        """Start to check ``guard``.  Called by ``Guard``."""
        with self._changed:
            self._guards.add(guard)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, guard: Guard) -> None:
        """Stop checking ``guard``.  Called by ``Guard``."""
        with self._changed:
            self._guards.discard(guard)

    def close(self) -> None:
        """End the thread; streams that are still open lose their stall timeout."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._guards or self._closed)
                if self._changed.wait_for(lambda: self._closed, _TICK_S):
                    return
            self._look()

    def _look(self) -> None:
        # A separate function, so that no local variable keeps a finished stream alive until the next check.
        with self._changed:
            guards = list(self._guards)
        now_s = time.monotonic()
        for guard in guards:
            limit_s = guard.limit_s
            if guard.cancel is None or limit_s is None or guard.stalled or now_s - guard.moved_at_s < limit_s:
                continue
            guard.stalled = True
            guard.cancel()


CONTROL_SHARE = 0.05
"""Share of a link that is kept free of bulk."""
BURST_S = 0.05
"""Longest burst, in seconds of the rate: a longer one would delay a heartbeat in the link's queue."""
WAIT_MAX_S = 3600.0
_LOOK_S = 0.5


def bulk_bytes_per_s(mbps: float) -> int:
    """Return the bulk rate in bytes a second for a link of ``mbps`` (10^6 bits a second); 0 stays 0, no limit."""
    return int(mbps * 1e6 / 8 * (1.0 - CONTROL_SHARE))


@dataclass(eq=False)
class Pacer:
    """One token bucket for all traffic in one direction; thread-safe."""

    bytes_per_s: int
    """The rate from now on; 0: no limit."""
    _rates: Rates = field(init=False, default_factory=lambda: Rates(burst_s=BURST_S, callers_max=1))
    _ended: threading.Event = field(init=False, default_factory=threading.Event)

    def chunk_bytes(self, bytes_max: int) -> int:
        """Return the longest chunk whose burst at this rate stays within ``BURST_S``, at most ``bytes_max``."""
        per_s = self.bytes_per_s
        return max(CHUNK_BYTES_MIN, min(bytes_max, int(per_s * BURST_S))) if per_s else bytes_max

    def wait(self, count: int, guard: Guard) -> None:
        """Block until ``count`` bytes may be sent; touches ``guard`` meanwhile, because this wait is no stall."""
        if not (per_s := self.bytes_per_s):
            return
        left_s = min(WAIT_MAX_S, self._rates.take("", count, per_s, time.monotonic(), WAIT_MAX_S))
        while left_s > 0 and not self._ended.wait(min(left_s, _LOOK_S)):
            left_s -= _LOOK_S
            guard.touch()

    def close(self) -> None:
        """Release all waiting threads."""
        self._ended.set()


@dataclass(eq=False)
class Deal:
    """Distributes a payload from byte ``at`` to ``end`` over any number of streams, each in its own thread."""

    at: int
    """The first byte not yet given to a stream."""
    end: int
    pacer: Pacer
    """The rate limit of all its streams together, so that one stream can use what another leaves."""
    streams: int = 0
    """How many streams have joined; the owner counts them."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def next(self, chunk_bytes: int) -> Span | None:
        """Return the next span to send, at most ``chunk_bytes`` long; None when everything is distributed."""
        with self._lock:
            left = self.end - self.at
            if not left:
                return None
            begin = self.at
            if self.streams > 1:  # Chunks shrink towards the end, so that all streams finish at about the same time.
                chunk_bytes = min(chunk_bytes, max(CHUNK_BYTES_MIN, left // (2 * self.streams)))
            self.at += min(left, chunk_bytes)
            return begin, self.at


BYTES_MIN = 2 * MIB
"""Fewest bytes of a transfer from which the link's rate is measured."""


@dataclass(eq=False)
class Arrival:
    """The progress of one transfer: bytes arrived over time.  Thread-safe."""

    sent_at: int = 0
    """The rate limit of the transfer in bytes a second; 0: none."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _seen: list[tuple[int, int]] = field(init=False, default_factory=list)

    def more(self, count: int) -> None:
        """Record that ``count`` more bytes have arrived."""
        with self._lock:
            self._seen.append((time.monotonic_ns(), count + (self._seen[-1][1] if self._seen else 0)))

    def taken(self) -> ProbeTaken:
        """Return how many bytes arrived, in what time, and how fast."""
        with self._lock:
            seen = list(self._seen)
        return ProbeTaken(seen[-1][1], seen[-1][0] - seen[0][0], int(later_rate(seen))) if seen else ProbeTaken(0, 0, 0)

    def rate(self) -> int:
        """Return the steady rate in bytes a second (``later_rate``); 0 where the transfer was too short to measure."""
        taken = self.taken()
        if not taken.bytes or taken.duration_ns < SPAN_MIN_NS or taken.bytes - self._seen[0][1] < BYTES_MIN:
            return 0
        return taken.bytes_per_s


def filler(count: int, limit_ns: int, pack: Callable[[Filler], bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield ``count`` random bytes as (length, packed message) pairs, for at most ``limit_ns``."""
    block = os.urandom(min(CHUNK_BYTES_MIN, max(count, 1)))
    whole, until = pack(Filler(block)), time.monotonic_ns() + limit_ns
    while count and time.monotonic_ns() < until:
        length = min(len(block), count)
        yield length, whole if length == len(block) else pack(Filler(block[:length]))
        count -= length


_HOST_PORT = re.compile(r"[^\s,/:\[\]]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}|unix:[^\s,]+")
ADDRESSES_MAX = 8


def split_addresses(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of addresses; ``ValueError`` names the part that is not one."""
    found = tuple(part.strip() for part in text.split(","))
    for address in found:
        if not _HOST_PORT.fullmatch(address):
            raise ValueError(f"address is {text!r}: host:port wanted, or several with commas between them")
        _check_port(address)
        if found.count(address) > 1:
            raise ValueError(f"address is {text!r}: {address} is listed twice")
    if len(found) > ADDRESSES_MAX:
        raise ValueError(f"address is {text!r}: at most {ADDRESSES_MAX} wanted")
    return found


def _check_port(address: str) -> None:
    """Refuse an invalid port, which gRPC would take modulo 65536 and so call another server."""
    port = address.rpartition(":")[2]
    if not address.startswith("unix:") and port.isdecimal() and not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"address is {address!r}: a port of 1 to {PORT_MAX} wanted")


def check_address(address: str, options: SecurityOptions) -> None:
    """Raise ``ValueError`` for an invalid port, or when a token would go unencrypted to another machine."""
    _check_port(address)
    has_token = bool(options.token or options.token_file)
    if has_token and not (options.tls_ca or is_loopback(address) or options.insecure_non_loopback):
        raise ValueError(
            f"address is {address!r}: the token would travel unencrypted. Give tls_ca, "
            "or set insecure_non_loopback to accept that anyone on the path can read it"
        )


SYNC_SERVICE: str = sync_pb2.DESCRIPTOR.services_by_name["SyncService"].full_name
ADMIN_SERVICE: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
REPLICATION_SERVICE: str = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"].full_name
PUSHBACK_KEY = "grpc-retry-pushback-ms"
REASON_KEY = "diloco-reason"

# After these statuses the same request may be retried: no answer, damaged bytes, or a bug at the other end.
_AGAIN = frozenset(
    {
        Status.UNAVAILABLE,
        Status.DEADLINE_EXCEEDED,
        Status.CANCELLED,
        Status.DATA_LOSS,
        Status.INTERNAL,
        Status.UNKNOWN,
        Status.ABORTED,
    }
)

_FULL = "Concurrent RPC limit exceeded!"
"""gRPC's text, without a retry delay, when a server has more calls at once than threads.  Its other RESOURCE_EXHAUSTED
errors are for too large messages, where a retry is no use."""


class Line:
    """One channel to ``address``, with TLS where ``tls_ca`` is given, for the methods of ``service``.

    Messages are bytes.  A method of another service is named in full, beginning with a slash.

    Raises ``ValueError`` when a token would be sent unencrypted to another machine, and for unusable files.
    """

    def __init__(self, address: str, security: SecurityOptions, options: ClientOptions, service: str) -> None:
        check_address(address, security)
        self._address, self._security, self._options, self._service = address, security, options, service
        self._lock = threading.Lock()
        self._closed = False
        files = (security.tls_ca, security.tls_cert, security.tls_key) if security.tls_ca else ()
        names = [name for name in files if name not in ("", SYSTEM_ROOTS)]
        self._shown = Watched("tls_ca, tls_cert or tls_key", names, lambda: client_credentials(security))
        self._token = Watched.where("token_file", security.token_file, read_token, security.token)
        self.channel = self._open()
        """gRPC's present channel."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call: the token, if there is one, as now in its file."""
        self._token.refresh()
        return (("authorization", f"Bearer {self._token.value}"),) if self._token.value else ()

    def lost(self) -> None:
        """After a call found the syncer unreachable, open a new channel if the TLS files have changed."""
        with self._lock:  # Calls that fail together see one change and open one new channel.
            before = self._shown.value
            self._shown.refresh()
            if self._closed or self._shown.value is before:
                return
            old, self.channel = self.channel, self._open()
        old.close()

    def lead_to(self, address: str | None) -> None:
        """Switch to ``address`` on a new channel, unless it is the present one; calls under way on the old channel end.

        None: open a new channel to the present address, which resolves it again.
        """
        if address is not None:
            check_address(address, self._security)
        with self._lock:
            if self._closed or address == self._address:
                return
            self._address = address or self._address
            old, self.channel = self.channel, self._open()
        old.close()

    def close(self) -> None:
        """End every call under way."""
        with self._lock:
            self._closed = True
        self.channel.close()

    def _open(self) -> Any:
        arguments = self._options.channel_arguments()
        if self._shown.value is None:
            return grpc.insecure_channel(self._address, arguments)
        return grpc.secure_channel(self._address, self._shown.value, arguments)

    def unary(self, method: str, request: bytes, unpack: Callable[[bytes], T], timeout_s: float | None = None) -> T:
        """Send one message and return the unpacked answer, within ``control_timeout_s`` by default.

        Raises ``Refused`` or ``Unreachable``."""
        timeout_s = timeout_s or self._options.control_timeout_s
        try:
            return unpack(self.call("unary_unary", method, request, timeout_s))
        except (grpc.RpcError, MalformedMessage, ChunkError) as error:
            raise self.failed(method, error) from error

    def call(self, kind: str, method: str, requests: bytes | Iterator[bytes], timeout_s: float | None) -> Any:
        """Begin gRPC's call of that ``kind``.  Raises ``Unreachable`` for a closed channel."""
        path = method if method.startswith("/") else f"/{self._service}/{method}"
        try:
            return getattr(self.channel, kind)(path)(requests, timeout=timeout_s, metadata=self.metadata())
        except ValueError as error:
            raise self.failed(method, error) from error

    def failed(self, method: str, error: Exception, guard: Guard | None = None) -> WireError:
        """Return ``Refused`` or ``Unreachable`` for an ``error`` of a call or of its answer."""
        name = method.rpartition("/")[2]
        if isinstance(error, grpc.RpcError):
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self.lost()
            return wire_error(name, error, guard)
        if isinstance(error, MalformedMessage | ChunkError) and not isinstance(error, DamagedChunk):
            return Nonsense(f"{name}: the syncer's answer is invalid: {error}")
        return Unreachable(f"{name}: {error}")


class Stream(Generic[T]):
    """The answers of one call.  One thread iterates them; others may call ``cancel``.

    Raises ``Refused`` or ``Unreachable`` unless it ends normally or by ``cancel``.  Use it in ``with``, or cancel it.
    A transfer that progresses is never cut for its length: bulk has no deadline, and ``guard`` ends stalled streams.
    """

    def __init__(
        self,
        line: Line,
        method: str,
        requests: bytes | Iterator[bytes],
        unpack: Callable[[bytes], T],
        guard: Guard | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """``requests`` is one request message, or an iterator of several."""
        self._line, self._method, self._unpack, self._guard = line, method, unpack, guard
        self._cancelled = False
        kind = "unary_stream" if isinstance(requests, bytes) else "stream_stream"
        self._call = line.call(kind, method, requests, timeout_s)
        if guard is not None:
            guard.cancel = self._call.cancel
            guard.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()
        # The callback often holds this stream, and a payload: without that cycle the memory is free at once.
        del self._unpack

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            raw = next(self._call)
            if self._guard is not None:
                self._guard.touch()
            return self._unpack(raw)
        except (grpc.RpcError, MalformedMessage, ChunkError) as error:
            error.__traceback__ = None  # gRPC raises the call itself: its frames hold it, and through them a payload.
            if self._cancelled:
                raise StopIteration from error
            raise self._line.failed(self._method, error, self._guard) from error

    def cancel(self) -> None:
        """End the stream and wake the iterating thread."""
        self._cancelled = True
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
        self._call.cancel()


_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:\S+: )?"
    r"(?:Failed to connect to remote host: )?(.+)",
    re.DOTALL,
)
"""gRPC's text for an address that it cannot connect to; the group is the reason from the system or from TLS."""


def wire_error(method: str, error: Any, guard: Guard | None = None) -> WireError:
    """Return ``Refused`` or ``Unreachable`` for a failed call."""
    if guard is not None and guard.stalled:
        return Unreachable(f"{method}: no progress for {guard.limit_s:g} s")
    status = Status(error.code().name)
    text = error.details() or str(status)
    beside = dict(error.trailing_metadata() or ())
    pushback = str(beside.get(PUSHBACK_KEY, ""))
    retry_after_s = int(pushback) / 1000.0 if pushback.isdigit() and len(pushback) <= 8 else None
    if status in _AGAIN or retry_after_s is not None or (status is Status.RESOURCE_EXHAUSTED and text == _FULL):
        failed = _NOT_CONNECTED.fullmatch(text)
        why = f"{method}: {failed[1]}" if failed else f"{method}: {text} ({status})"
        return Unreachable(why, retry_after_s, refused=text if REASON_KEY in beside else "")
    # A later release may send reasons that this one does not know.
    return Refused(status, text, next((each for each in Reason if each.value == beside.get(REASON_KEY)), None))


class ServiceClient:
    """The base of clients of one ``service``, with a channel of their own for its calls; ``SyncClient`` has more."""

    service: ClassVar[str]

    def __init__(
        self, address: str, security: SecurityOptions | None = None, options: ClientOptions | None = None
    ) -> None:
        """``ValueError`` or ``OSError`` for an address or files that cannot work."""
        self.address = address
        self.options = options or ClientOptions()
        self._line = Line(address, security or SecurityOptions(), self.options, self.service)
        self.stalls = StallWatch("stalls-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every call under way; they raise ``Unreachable``."""
        self._line.close()
        self.stalls.close()
