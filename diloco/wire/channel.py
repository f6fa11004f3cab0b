"""A site's connection to the syncer: retries, rate limits, stall detection, pacing, addresses, and calls in raw bytes.

Back-off.  ``Backoff`` says how long to wait before a retry: capped exponential growth with full-range jitter.

Rates.  ``Rates`` bounds how much of something one caller may have each second.  It is pure arithmetic but for one lock:
time is an argument.

Stalls.  ``StallWatch`` ends streams on which nothing moves.  gRPC's sync API waits for the next message without a
bound, and a connection may be alive while its application is frozen, so every stream, at both ends, is guarded by its
own clock of progress.

Pace.  A site limits its own bulk traffic so that the link is left to others as well.  Of a link's rate as its operator
gives it bulk gets all but ``CONTROL_SHARE``; heartbeats and events find that share free however long a transfer takes.
A rate that was learned (``client.Learned``) leaves them less, and nothing in transfers that try for more.

Line.  gRPC takes a client's certificate once, when a channel is made, and a site lives longer than its certificate.  So
when a call fails because the syncer cannot be reached, and the files have changed since, the line makes a new channel;
what was under way on the old one ends as on any lost connection.  A site may know several addresses, of the syncer and
of the standby that may take its place; a line leads to one of them at a time.

Calls.  ``Calls`` makes calls over one channel, with raw bytes in and out, and turns gRPC's failures into ``WireError``.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from diloco.sync.events import Reason
from diloco.wire.messages import CHUNK_BYTES_MIN, Refused, Status, Unreachable, WireError
from diloco.wire.options import (
    PORT_MAX,
    SYSTEM_ROOTS,
    SecurityOptions,
    Watched,
    is_loopback,
    read_authority,
    read_pair,
    read_token,
)
from diloco.wire.v1 import admin_pb2, replication_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType


@dataclass(slots=True)
class Backoff:
    """Delays between ``base_s / 2`` and ``cap_s``; pure arithmetic, the caller brings the chance.

    The n-th delay is drawn evenly from the upper half of ``min(cap_s, base_s · 2ⁿ)``, so that many sites that lost the
    syncer at one instant do not come back at one instant.
    """

    base_s: float = 0.2
    cap_s: float = 5.0
    failures: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.base_s <= self.cap_s:
            raise ValueError(f"base_s is {self.base_s!r}: positive and not above cap_s={self.cap_s!r}")

    def next_s(self, chance: float, at_least_s: float = 0.0) -> float:
        """The next delay in seconds; ``chance`` is in [0, 1), ``at_least_s`` what the other end asked for.

        The other end asks all whom it refuses for the same, so that what it asked for is spread by half of it as well.
        """
        span_s = min(self.cap_s, self.base_s * 2.0 ** min(self.failures, 60))
        self.failures += 1
        return max(at_least_s * (1.0 + 0.5 * chance), span_s * (0.5 + 0.5 * chance))

    def reset(self) -> None:
        """Something worked: begin anew."""
        self.failures = 0


class Rates:
    """One bucket of credit for each caller: filled at its rate up to ``burst_s`` seconds' worth, spent at will.

    What is larger than the bucket passes when that is full, and its debt is paid off before anything else passes.  At
    most ``callers_max`` are remembered, the longest unused is forgotten.
    """

    def __init__(self, burst_s: float, least: float, callers_max: int = 4096) -> None:
        """``least``: a full bucket holds so much however low the rate."""
        self._burst_s = burst_s
        self._least = least
        self._callers_max = callers_max
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, caller: str, amount: float, per_s: float, now_s: float) -> float:
        """Take ``amount`` if there is credit for it; 0.0 when it was taken, else the seconds until there is."""
        with self._lock:
            credit = self._credit(caller, per_s, now_s)
            wanted = min(amount, self._full(per_s)) - 1e-9
            self._keep(caller, credit - amount if credit >= wanted else credit, now_s)
        return max(0.0, (wanted - credit) / per_s)

    def reserve(self, caller: str, amount: float, per_s: float, now_s: float, wait_max_s: float) -> float | None:
        """Take ``amount`` now for later: the seconds to wait until it is due, or None (and nothing taken) when that is
        more than ``wait_max_s``."""
        with self._lock:
            credit = self._credit(caller, per_s, now_s)
            wait_s = max(0.0, (min(amount, self._full(per_s)) - 1e-9 - credit) / per_s)
            if wait_s <= wait_max_s:
                self._keep(caller, credit - amount, now_s)
                return wait_s
        return None

    def charge(self, caller: str, amount: float, per_s: float, now_s: float) -> None:
        """Take ``amount`` whatever is there."""
        with self._lock:
            self._keep(caller, self._credit(caller, per_s, now_s) - amount, now_s)

    def _credit(self, caller: str, per_s: float, now_s: float) -> float:
        full = self._full(per_s)
        credit, at_s = self._buckets.get(caller, (full, now_s))
        return min(full, credit + max(0.0, now_s - at_s) * per_s)

    def _full(self, per_s: float) -> float:
        return max(self._least, per_s * self._burst_s)

    def _keep(self, caller: str, credit: float, now_s: float) -> None:
        # Threads bring their instants in any order, and no second is paid for twice.
        _, before_s = self._buckets.get(caller, (0.0, now_s))
        self._buckets[caller] = (credit, max(before_s, now_s))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._callers_max:
            self._buckets.popitem(last=False)


_TICK_S = 0.25


class Guard:
    """One guarded stream.  ``touch`` it when something moved; after ``limit_s`` without that, ``cancel`` is called."""

    def __init__(self, watch: StallWatch, limit_s: float, cancel: Callable[[], object] | None) -> None:
        self._watch = watch
        self._cancel = cancel
        self._limit_s: float | None = limit_s
        self._moved_at_s = time.monotonic()
        self.stalled = False

    def arm(self, cancel: Callable[[], object]) -> None:
        """Say what ends the stream, where that was not known at first."""
        self._cancel = cancel

    def touch(self) -> None:
        """Something moved."""
        self._moved_at_s = time.monotonic()

    def limit(self, limit_s: float | None) -> None:
        """From now on wait so long for the next move; None: this end is at work itself, and the other one waits."""
        self._moved_at_s = time.monotonic()
        self._limit_s = limit_s

    @property
    def limit_s(self) -> float | None:
        """The bound that holds now."""
        return self._limit_s

    def check(self, now_s: float) -> None:
        """Called by the watch's thread."""
        limit_s = self._limit_s
        if self._cancel is None or limit_s is None or self.stalled or now_s - self._moved_at_s < limit_s:
            return
        self.stalled = True
        self._cancel()

    def __enter__(self) -> Guard:
        self._watch.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.remove(self)


class StallWatch:
    """One thread for all guarded streams of a client or a server; it sleeps while there are none."""

    def __init__(self, name: str) -> None:
        self._guards: dict[int, Guard] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._name = name

    def guard(self, limit_s: float, cancel: Callable[[], object] | None = None) -> Guard:
        """A guard to be used as ``with watch.guard(...) as guard``."""
        return Guard(self, limit_s, cancel)

    def add(self, guard: Guard) -> None:
        """Called by ``Guard``."""
        with self._changed:
            self._guards[id(guard)] = guard
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, guard: Guard) -> None:
        """Called by ``Guard``."""
        with self._changed:
            self._guards.pop(id(guard), None)

    def close(self) -> None:
        """End the thread; streams that are still open are guarded no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._guards and not self._closed:
                    self._changed.wait()
                elif not self._closed:
                    self._changed.wait(_TICK_S)
                if self._closed:
                    return
            self._look()

    def _look(self) -> None:
        # A call of its own, so that nothing of a stream that is over is held until the next look.
        with self._changed:
            guards = list(self._guards.values())
        now_s = time.monotonic()
        for guard in guards:
            guard.check(now_s)


CONTROL_SHARE = 0.05
"""Of a link, kept free of bulk."""
BURST_S = 0.05
"""So much of the rate may go at once: what is longer would stand in the link's queue before a heartbeat."""
WAIT_MAX_S = 3600.0
_LOOK_S = 0.5


def bulk_bytes_per_s(mbps: float) -> int:
    """What bulk may take of a link of ``mbps``; 0 where the link has no bound."""
    return int(mbps * 1e6 / 8 * (1.0 - CONTROL_SHARE))


class Pacer:
    """One bucket for everything that goes one way; used by many threads.  0 bytes a second: nothing is held back."""

    def __init__(self, bytes_per_s: int) -> None:
        self._per_s = bytes_per_s
        self._rates = Rates(burst_s=BURST_S, least=1.0, callers_max=1)
        self._ended = threading.Event()

    def keep_to(self, bytes_per_s: int) -> None:
        """From now on."""
        self._per_s = bytes_per_s

    def chunk_bytes(self, bytes_max: int) -> int:
        """The longest chunk that goes at this rate without more of a burst than ``BURST_S`` allows."""
        return max(CHUNK_BYTES_MIN, min(bytes_max, int(self._per_s * BURST_S))) if self._per_s else bytes_max

    def wait(self, count: int, guard: Guard) -> None:
        """Until ``count`` bytes may go; ``guard`` is told that whoever waits here is not stuck."""
        if not (per_s := self._per_s):
            return
        wait_s = self._rates.reserve("", count, per_s, time.monotonic(), WAIT_MAX_S)
        left_s = WAIT_MAX_S if wait_s is None else wait_s
        while left_s > 0 and not self._ended.wait(min(left_s, _LOOK_S)):
            left_s -= _LOOK_S
            guard.touch()

    def close(self) -> None:
        """Whoever waits goes on."""
        self._ended.set()


_HOST_PORT = re.compile(r"[^\s,/:\[\]]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}|unix:[^\s,]+")
ADDRESSES_MAX = 8


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses in ``text``, which has commas between them; ``ValueError`` in words for what is none."""
    found = tuple(part.strip() for part in text.split(","))
    for address in found:
        if not _HOST_PORT.fullmatch(address):
            raise ValueError(f"address is {text!r}: host:port wanted, or several with commas between them")
        _check_port(address)
        if found.count(address) > 1:
            raise ValueError(f"address is {text!r}: {address} is in it twice")
    if len(found) > ADDRESSES_MAX:
        raise ValueError(f"address is {text!r}: at most {ADDRESSES_MAX} wanted")
    return found


def _check_port(address: str) -> None:
    """gRPC takes a port modulo 65536, and would call whoever listens there."""
    port = address.rpartition(":")[2]
    if not address.startswith("unix:") and port.isdecimal() and not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"address is {address!r}: a port of 1 to {PORT_MAX} wanted")


def check_address(address: str, options: SecurityOptions) -> None:
    """``ValueError`` in words for a port that is none, and when a token would go unencrypted to another machine."""
    _check_port(address)
    has_token = bool(options.token or options.token_file)
    if has_token and not (options.tls_ca or is_loopback(address) or options.insecure_non_loopback):
        raise ValueError(
            f"address is {address!r}: the token would travel unencrypted. Give tls_ca, "
            "or set insecure_non_loopback to accept that anyone on the way can read it"
        )


class Line:
    """One channel to ``address``, with TLS where ``tls_ca`` is given, and the metadata that goes with each call.

    Raises ``ValueError`` in words when a token would be sent unencrypted to another machine, and for files that cannot
    work.
    """

    def __init__(self, address: str, options: SecurityOptions, arguments: list[tuple[str, int]]) -> None:
        check_address(address, options)
        self._options = options
        self._address = address
        self._arguments = arguments
        self._lock = threading.Lock()
        self._closed = False
        files = [options.tls_ca] if options.tls_ca != SYSTEM_ROOTS else []
        files += [options.tls_cert, options.tls_key]
        self._shown: Watched[Any] | None = None
        if options.tls_ca:
            names = [name for name in files if name]
            self._shown = Watched("tls_ca, tls_cert or tls_key", names, lambda: _credentials(options))
        self._token: Watched[str] | None = None
        if options.token_file:
            self._token = Watched("token_file", [options.token_file], lambda: read_token(options.token_file))
        self._fixed_token = options.token
        self._channel = self._open()

    @property
    def channel(self) -> Any:
        """gRPC's channel, as it is now."""
        return self._channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call: the token, where there is one, as its file has it now."""
        token = self._fixed_token
        if self._token is not None:
            self._token.refresh()
            token = self._token.value
        return (("authorization", f"Bearer {token}"),) if token else ()

    def lost(self) -> None:
        """A call found nobody: show what the files have now, if it is something else than before."""
        with self._lock:
            if self._shown is None or self._closed:
                return
            before = self._shown.value
            self._shown.refresh()
            if self._shown.value is before:
                return
            old, self._channel = self._channel, self._open()
        old.close()

    def lead_to(self, address: str) -> None:
        """Make the channel one to ``address``; what is under way on another one ends."""
        check_address(address, self._options)
        with self._lock:
            if self._closed or address == self._address:
                return
            self._address = address
            old, self._channel = self._channel, self._open()
        old.close()

    def renew(self) -> None:
        """Make the channel anew: it leads where the address leads now; what is under way on the old one ends."""
        with self._lock:
            if self._closed:
                return
            old, self._channel = self._channel, self._open()
        old.close()

    def close(self) -> None:
        """End every call under way."""
        with self._lock:
            self._closed = True
        self._channel.close()

    def _open(self) -> Any:
        if self._shown is None:
            return grpc.insecure_channel(self._address, self._arguments)
        return grpc.secure_channel(self._address, self._shown.value, self._arguments)


def _credentials(options: SecurityOptions) -> Any:
    roots = None if options.tls_ca == SYSTEM_ROOTS else read_authority(options.tls_ca)
    cert, key = read_pair(options.tls_cert, options.tls_key) if options.tls_cert else (None, None)
    return grpc.ssl_channel_credentials(roots, key, cert)


SYNC_SERVICE: str = sync_pb2.DESCRIPTOR.services_by_name["SyncService"].full_name
ADMIN_SERVICE: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
REPLICATION_SERVICE: str = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"].full_name
PUSHBACK_KEY = "grpc-retry-pushback-ms"
REASON_KEY = "diloco-reason"

# After these the same request may be sent again: no answer came, the bytes were damaged, or the other end had a defect.
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
"""What gRPC says, without a time to come back, for a server that has more calls at once than it has threads.  Its other
RESOURCE_EXHAUSTED are of messages too large, which no second attempt makes smaller."""


class Calls:
    """The methods of ``service`` on ``line``; messages are bytes."""

    def __init__(self, line: Line, service: str) -> None:
        self._line = line
        self._service = service

    def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """One message there, one back.  Raises ``Refused`` or ``Unreachable``."""
        try:
            reply: bytes = self._open("unary_unary", method)(request, timeout=timeout_s, metadata=self._line.metadata())
        except grpc.RpcError as error:
            raise self.failed(method, error) from error
        except ValueError as error:
            raise Unreachable(f"{method}: {error}") from error
        return reply

    def stream(self, method: str, request: bytes, timeout_s: float | None = None) -> Any:
        """One message there, many back: gRPC's call, to be iterated and cancelled.

        What moves is never cut because it is long: bulk has no deadline, and a guard ends what does not move.
        """
        try:
            return self._open("unary_stream", method)(request, timeout=timeout_s, metadata=self._line.metadata())
        except ValueError as error:
            raise Unreachable(f"{method}: {error}") from error

    def exchange(self, method: str, requests: Iterator[bytes], timeout_s: float | None = None) -> Any:
        """Many messages both ways: gRPC's call, to be iterated and cancelled; bulk has no deadline here either."""
        try:
            return self._open("stream_stream", method)(requests, timeout=timeout_s, metadata=self._line.metadata())
        except ValueError as error:
            raise Unreachable(f"{method}: {error}") from error

    def close(self) -> None:
        """End everything under way."""
        self._line.close()

    def failed(self, method: str, error: Any, guard: Guard | None = None) -> WireError:
        """What a failed call means to the caller (``wire_error``), after which this end may show something newer."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._line.lost()
        return wire_error(method, error, guard)

    def _open(self, kind: str, method: str) -> Any:
        # gRPC raises ValueError for a channel that was closed, here or at the call.
        return getattr(self._line.channel, kind)(f"/{self._service}/{method}")


def wire_error(method: str, error: Any, guard: Guard | None = None) -> WireError:
    """What a failed call means to the caller: ``Refused`` or ``Unreachable``."""
    if guard is not None and guard.stalled:
        return Unreachable(f"{method}: nothing moved for {guard.limit_s:g} s")
    status = Status(error.code().name)
    text = error.details() or str(status)
    metadata = error.trailing_metadata() or ()
    retry_after_s = _pushback_s(metadata)
    if status in _AGAIN or retry_after_s is not None or (status is Status.RESOURCE_EXHAUSTED and text == _FULL):
        return Unreachable(f"{method}: {text} ({status})", retry_after_s)
    return Refused(status, text, _reason(metadata))


def _reason(metadata: Any) -> Reason | None:
    """What the syncer gave with its refusal; None also for one that only a later release knows."""
    told = [value for key, value in metadata if key == REASON_KEY]
    return next((reason for reason in Reason if [reason.value] == told), None)


def _pushback_s(metadata: Any) -> float | None:
    for key, value in metadata:
        if key == PUSHBACK_KEY and isinstance(value, str) and value.isdigit() and len(value) <= 8:
            return int(value) / 1000.0
    return None
