"""What every call passes before a byte of its message is looked at: who, may they, how often, how many at once.

A caller here is an identity, or, where nobody is told apart, a connection.  Everything that it can take up (threads,
credits, the decision loop's attention) it can take up only inside, so that what one caller does to the others is
bounded by what is said here.

Not bounded is how often somebody is told that there is no room: whoever has all places of a caller taken is refused at
once, because a call that waits to be refused would take a thread from somebody else.  That costs processor time, half a
core for 1300 refusals a second, in which another site's rounds were no longer (``make flood``).  Nor are the health
service's Check and List, which are for strangers, held to a rate.  Who may connect at all is the bound of both: client
certificates, or a firewall.
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
from diloco.wire.probing import PROBES_BURST_S, PROBES_PER_S
from diloco.wire.rates import Rates

if TYPE_CHECKING:
    from diloco.wire.connections import Connections
    from diloco.wire.gates import Counters
    from diloco.wire.identity import Authenticator
    from diloco.wire.messages import PushHeader
    from diloco.wire.options import ServerOptions

WAIT_MAX_S = 1.0
"""Longest that a call is kept waiting for its turn."""


@dataclass(eq=False, slots=True)
class _Inside:
    method: str
    cancel: Callable[[], object]
    identity: Identity | None = None
    """None: not let in yet, or on the way out."""


class Door:
    """The one place that lets callers in, and the one that puts them out when what they showed is good no more."""

    def __init__(
        self, authenticator: Authenticator, options: ServerOptions, counters: Counters, connections: Connections
    ) -> None:
        self._authenticator = authenticator
        self._options = options
        self._counters = counters
        self._connections = connections
        self._lock = threading.Lock()
        self._inside: dict[str, set[_Inside]] = {}
        self._calls = Rates(burst_s=2.0, least=1.0)
        self._pushes = Rates(burst_s=2.0, least=1.0)
        self._bytes = Rates(burst_s=1.0, least=1.0)
        self._pulled = Rates(burst_s=1.0, least=1.0)
        self._probes = Rates(burst_s=PROBES_BURST_S, least=1.0)

    @contextmanager
    def enter(self, method: str, context: Any) -> Iterator[Identity]:
        """Be inside.

        Refuses with UNAUTHENTICATED somebody unknown, with RESOURCE_EXHAUSTED and a time to come back who is inside too
        many times or calls far too often, and with PERMISSION_DENIED a method that is not theirs.  Who calls a little
        too often is kept waiting, also for a refusal: that costs the syncer nearly as much as an answer, and whoever
        waits does not ask again meanwhile.
        """
        try:
            identity = self._authenticator.identify(context)
        except Refusal:
            # Strangers share one place among them: what they can take up is what one caller can.
            with self._place("", _Inside(method, context.cancel)):
                self._wait_for_turn("", self._options.calls_per_s)
            raise
        caller = identity.caller(context)
        entry = _Inside(method, context.cancel)
        with self._connections.calling(context.peer()), self._place(caller, entry):
            self._wait_for_turn(caller, identity.grant.calls_per_s or self._options.calls_per_s)
            identity.check_role(method)
            entry.identity = identity
            yield identity

    @contextmanager
    def _place(self, caller: str, entry: _Inside) -> Iterator[None]:
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
            yield
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

    def check_probe(self, bytes_up: int, bytes_down: int, identity: Identity) -> None:
        """Refuse filler to who may not carry it, or not yet; called before a byte of it passes."""
        if bytes_up == bytes_down == 0:
            return
        grant, now_s = identity.grant, time.monotonic()
        if bytes_up and not grant.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{identity.name} may not push, nor send filler")
        if bytes_up and grant.bytes_per_s is not None:
            self._come_back("bytes_per_s", self._bytes.spend(identity.name, 0.0, grant.bytes_per_s, now_s))
        if bytes_down:
            self.check_pull(identity)
        self._come_back("probes", self._probes.spend(identity.name, 1.0, PROBES_PER_S, now_s))

    def received(self, count: int, identity: Identity, counter: str = "payload_bytes_in") -> None:
        """``count`` bytes of an update, or of what ``counter`` names, have come."""
        self._counters.add(counter, count)
        if identity.grant.bytes_per_s is not None:
            self._bytes.charge(identity.name, count, identity.grant.bytes_per_s, time.monotonic())

    def check_pull(self, identity: Identity) -> None:
        """Refuse a version to who may not have it yet; called before anything of it is read."""
        per_s = identity.grant.pull_bytes_per_s
        if per_s is not None:
            self._come_back("pull_bytes_per_s", self._pulled.spend(identity.name, 0.0, per_s, time.monotonic()))

    def sends(self, count: int, identity: Identity, counter: str = "payload_bytes_out") -> None:
        """``count`` bytes of a version, or of what ``counter`` names, are about to go out."""
        self._counters.add(counter, count)
        if identity.grant.pull_bytes_per_s is not None:
            self._pulled.charge(identity.name, count, identity.grant.pull_bytes_per_s, time.monotonic())

    def put_out(self) -> list[str]:
        """End every call of those who would not be let in any more; why, one text for each identity."""
        with self._lock:
            entries = [(entry, entry.identity) for inside in self._inside.values() for entry in inside]
        reasons: dict[str, str] = {}
        for entry, identity in entries:
            if identity is None:
                continue
            try:
                self._authenticator.check_still(identity, entry.method)
            except Refusal as refusal:
                reasons[identity.name] = f"calls of {identity.name} were ended: {refusal.text}"
                entry.cancel()
        return [reasons[name] for name in sorted(reasons)]

    def _wait_for_turn(self, caller: str, per_s: float) -> None:
        if not per_s:
            return
        wait_s = self._calls.reserve(caller, 1.0, per_s, time.monotonic(), WAIT_MAX_S)
        if wait_s is None:
            self._come_back("calls_per_s", WAIT_MAX_S)
        elif wait_s > 0:
            self._counters.add("kept_waiting")
            time.sleep(wait_s)

    def _come_back(self, what: str, wait_s: float) -> None:
        if wait_s > 0:
            pushback_ms = max(self._options.pushback_ms, int(wait_s * 1000) + 1)
            raise Refusal(Status.RESOURCE_EXHAUSTED, f"{what} of this caller is used up: come back", pushback_ms)
