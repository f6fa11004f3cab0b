"""What every call passes before a byte of its message is looked at: who, may they, how often, how many at once.

A caller here is an identity, or, where nobody is told apart, a connection.  Everything that it can take up (threads,
credits, the decision loop's attention) it can take up only inside, so that what one caller does to the others is
bounded by what is said here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.wire.identity import Identity
from diloco.wire.messages import Refusal, Status
from diloco.wire.rates import Rates

if TYPE_CHECKING:
    from diloco.wire.gates import Counters
    from diloco.wire.identity import Authenticator
    from diloco.wire.messages import PushHeader
    from diloco.wire.options import ServerOptions


@dataclass(eq=False, slots=True)
class _Inside:
    method: str
    identity: Identity
    cancel: Callable[[], object]


class Door:
    """The one place that lets callers in, and the one that puts them out when what they showed is good no more."""

    def __init__(self, authenticator: Authenticator, options: ServerOptions, counters: Counters) -> None:
        self._authenticator = authenticator
        self._options = options
        self._counters = counters
        self._lock = threading.Lock()
        self._inside: dict[str, set[_Inside]] = {}
        self._calls = Rates(burst_s=2.0, least=1.0)
        self._pushes = Rates(burst_s=2.0, least=1.0)
        self._bytes = Rates(burst_s=1.0, least=1.0)

    @contextmanager
    def enter(self, method: str, context: Any) -> Iterator[Identity]:
        """Be inside.

        Refuses, in this order: UNAUTHENTICATED for somebody unknown, PERMISSION_DENIED for a method that is not theirs,
        RESOURCE_EXHAUSTED with a time to come back when they call too often or are inside too many times.
        """
        identity = self._authenticator.identify(context)
        identity.check_role(method)
        caller = identity.caller(context)
        self._check_rate(caller, identity)
        entry = _Inside(method, identity, context.cancel)
        with self._lock:
            entries = self._inside.setdefault(caller, set())
            if len(entries) >= self._options.calls_per_caller_max:
                raise Refusal(
                    Status.RESOURCE_EXHAUSTED,
                    f"{len(entries)} calls of this caller are under way: come back",
                    self._options.pushback_ms,
                )
            entries.add(entry)
        try:
            yield identity
        finally:
            with self._lock:
                entries.discard(entry)
                if not entries and self._inside.get(caller) is entries:
                    del self._inside[caller]

    def check_push(self, header: PushHeader, identity: Identity) -> None:
        """Refuse an update that its sender may not send, or not yet; called before a byte of it is read."""
        grant = identity.grant
        grant.check_push(header)
        now_s = time.monotonic()
        if grant.bytes_per_s is not None:
            # What comes is charged as it comes (``received``); here it is only asked whether there is a debt.
            self._come_back("bytes_per_s", self._bytes.spend(identity.name, 0.0, grant.bytes_per_s, now_s))
        if grant.pushes_per_s is not None:
            self._come_back("pushes_per_s", self._pushes.spend(identity.name, 1.0, grant.pushes_per_s, now_s))

    def received(self, count: int, identity: Identity) -> None:
        """``count`` bytes of an update have come."""
        self._counters.add("payload_bytes_in", count)
        if identity.grant.bytes_per_s is not None:
            self._bytes.charge(identity.name, count, identity.grant.bytes_per_s, time.monotonic())

    def put_out(self) -> list[str]:
        """End every call of those who would not be let in any more; why, one text for each identity."""
        with self._lock:
            entries = [entry for inside in self._inside.values() for entry in inside]
        reasons: dict[str, str] = {}
        for entry in entries:
            try:
                self._authenticator.check_still(entry.identity, entry.method)
            except Refusal as refusal:
                reasons[entry.identity.name] = f"calls of {entry.identity.name} were ended: {refusal.text}"
                entry.cancel()
        return [reasons[name] for name in sorted(reasons)]

    def _check_rate(self, caller: str, identity: Identity) -> None:
        per_s = identity.grant.calls_per_s or self._options.calls_per_s
        if per_s:
            self._come_back("calls_per_s", self._calls.spend(caller, 1.0, per_s, time.monotonic()))

    def _come_back(self, what: str, wait_s: float) -> None:
        if wait_s > 0:
            pushback_ms = max(self._options.pushback_ms, int(wait_s * 1000) + 1)
            raise Refusal(Status.RESOURCE_EXHAUSTED, f"{what} of this caller is used up: come back", pushback_ms)
