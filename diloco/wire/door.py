"""Admission of calls: what every call passes before a byte of its message is looked at.

The door asks who calls, whether they may, how often, and how many at once.  A caller here is an identity, or a
connection where callers are not told apart.  A caller can take up resources (threads, credits, the decision loop's
attention) only behind the door, so this file bounds what one caller does to the others.

Places.  ``Gate`` bounds how many streams of a kind may be open, in all and for each site; ``WaitingRoom`` and
``OneAtATime`` bound calls that wait and calls of which a caller may have one.  ``Counters`` counts what was done.

Connections.  gRPC has one bound for all connections (``grpc.max_allowed_incoming_connections``), takes each without
asking, and keeps one that answers pings for ever.  So a few hundred connections that never make a call would leave no
place for a new site, and no descriptor for a file.  Here the bound is half of the files that this process may have
open.  When three quarters of those places are taken, connections without a call under way are hung up on: first those
on which no caller was ever let in, of the address that has most of them, the oldest first.  A connection with a call
under way is never hung up on, and a site whose idle connection was comes back with its next call.

Not bounded is how often a caller is told that there is no room.  A caller that has all its places taken is refused at
once, because a call that waits to be refused would take a thread from another caller.  That costs processor time: half
a core for 1300 refusals a second, in which another site's rounds were no longer (``make flood``).  Nor are the health
service's Check and List, which are open to strangers, held to a rate.  Only a bound on who may connect at all bounds
both: client certificates, or a firewall.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from diloco import open_files
from diloco.wire.channel import Rates
from diloco.wire.identity import Identity
from diloco.wire.messages import PROBES_BURST_S, PROBES_PER_S, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.wire.identity import Authenticator
    from diloco.wire.messages import PushHeader
    from diloco.wire.options import ServerOptions

_TELL_EVERY_S = 60.0
_GATHER_S = 1.0


class Counters:
    """Named totals since the start; what a refused message may change, and nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0) + count

    def totals(self) -> dict[str, int]:
        """A copy, by name."""
        with self._lock:
            return dict(sorted(self._totals.items()))


class TurnedAway:
    """Counts who was turned away; tells of it a second after the first, and then once a minute while there are more."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._count = self._told = 0
        self._why = ""
        self._told_s, self._due_s = -_TELL_EVERY_S, 0.0

    def add(self, why: str, count: int = 1) -> None:
        """Count; ``why`` is the latest, and goes out with the next word."""
        with self._lock:
            if self._count == self._told:
                self._due_s = max(time.monotonic() + _GATHER_S, self._told_s + _TELL_EVERY_S)
            self._count += count
            self._why = why

    def tell(self) -> None:
        """To be called now and then, from one thread."""
        with self._lock:
            count, why, now_s = self._count, self._why, time.monotonic()
            if count == self._told or now_s < self._due_s:
                return
            self._told, self._told_s = count, now_s
        self._tell(f"connections hung up on so far: {count}; {why}")


class Gate:
    """At most ``total_max`` inside, and at most ``each_max`` for one site; nobody waits."""

    def __init__(self, what: str, total_max: int, each_max: int, pushback_ms: int) -> None:
        self._what = what
        self._total_max = total_max
        self._each_max = each_max
        self._pushback_ms = pushback_ms
        self._lock = threading.Lock()
        self._inside: dict[str, int] = {}

    @contextmanager
    def enter(self, site: str) -> Iterator[None]:
        """Be inside.  RESOURCE_EXHAUSTED with a time to come back when there is no room."""
        with self._lock:
            mine = self._inside.get(site, 0)
            if mine >= self._each_max or sum(self._inside.values()) >= self._total_max:
                whose = "of this site" if mine >= self._each_max else "in all"
                raise Refusal(
                    Status.RESOURCE_EXHAUSTED,
                    f"no room for one more {self._what} {whose}: come back",
                    self._pushback_ms,
                )
            self._inside[site] = mine + 1
        try:
            yield
        finally:
            with self._lock:
                if self._inside[site] > 1:
                    self._inside[site] -= 1
                else:
                    del self._inside[site]


class WaitingRoom:
    """At most ``total_max`` wait inside.  One more always finds room: who has waited longest is sent away for it.

    It is sent away from among those of the caller who has most of them here, so that whoever fills the room loses its
    own, and whoever waits for a moment only is never the one.
    """

    def __init__(self, total_max: int) -> None:
        self._total_max = total_max
        self._lock = threading.Lock()
        self._inside: dict[str, dict[object, Callable[[], object]]] = {}

    @contextmanager
    def enter(self, caller: str, cancel: Callable[[], object]) -> Iterator[None]:
        """Be inside; ``cancel`` is called, from another thread, when the room is needed for somebody else."""
        place = object()
        with self._lock:
            sent_away = self._longest() if sum(map(len, self._inside.values())) >= self._total_max else None
            self._inside.setdefault(caller, {})[place] = cancel
        if sent_away is not None:
            sent_away()
        try:
            yield
        finally:
            with self._lock:
                self._leave(caller, place)

    def _longest(self) -> Callable[[], object]:
        # max takes the first of equals, and callers stand in the order in which they came.
        caller = max(self._inside, key=lambda each: len(self._inside[each]))
        place, cancel = next(iter(self._inside[caller].items()))
        self._leave(caller, place)
        return cancel

    def _leave(self, caller: str, place: object) -> None:
        mine = self._inside.get(caller, {})
        mine.pop(place, None)
        if not mine:
            self._inside.pop(caller, None)


_SUPERSEDE_S = 2.0


class _UnderWay:
    def __init__(self, incarnation: int, cancel: Callable[[], object]) -> None:
        self.incarnation = incarnation
        self.cancel = cancel
        self.gone = threading.Event()


class OneAtATime:
    """One stream for each key: a later one ends the one before it.

    A site whose connection broke comes back long before its old stream is known to be dead, and must find neither the
    old stream's room taken nor what it held open.
    """

    def __init__(self, what: str, pushback_ms: int) -> None:
        self._what = what
        self._pushback_ms = pushback_ms
        self._lock = threading.Lock()
        self._streams: dict[tuple[object, ...], _UnderWay] = {}

    @contextmanager
    def enter(self, key: tuple[object, ...], incarnation: int, cancel: Callable[[], object]) -> Iterator[None]:
        """Be the one stream of ``key``; ``cancel`` ends it when another takes over.

        FAILED_PRECONDITION when a newer incarnation is inside, RESOURCE_EXHAUSTED when the older one does not end soon.
        """
        mine = _UnderWay(incarnation, cancel)
        before = self._take(key, mine)
        if before is not None:
            before.cancel()
            if not before.gone.wait(_SUPERSEDE_S) or self._take(key, mine) is not None:
                text = f"an older {self._what} like this one is still being ended: come back"
                raise Refusal(Status.RESOURCE_EXHAUSTED, text, self._pushback_ms)
        try:
            yield
        finally:
            with self._lock:
                del self._streams[key]
            mine.gone.set()

    def _take(self, key: tuple[object, ...], mine: _UnderWay) -> _UnderWay | None:
        with self._lock:
            before = self._streams.get(key)
            if before is None:
                self._streams[key] = mine
            elif before.incarnation > mine.incarnation:
                text = f"fenced: a newer incarnation of this site has this {self._what}"
                raise Refusal(Status.FAILED_PRECONDITION, text)
            return before


FOR_EACH_SITE = 256
"""A site of many ranks has a few connections for each of its fragments."""
_LOOK_S = 0.5
_CROWDED_LOOK_S = 0.05
_SHARE = 0.1
"""Of the time, at most, that looks take while the server is crowded."""
_DESCRIPTORS = "/dev/fd"


def places(options: ServerOptions) -> int:
    """Connections that a server may have open at once; as many descriptors again stay for files."""
    soft, _ = open_files.limits()
    return max(1, min(soft // 2, FOR_EACH_SITE * (options.sites_max + 4)))


class Connections:
    """A thread that looks at the connections of one server, and who has made a call on which."""

    def __init__(self, places: int, counters: Counters, tell: Callable[[str], None]) -> None:
        self._places = places
        self._room = max(1, places * 3 // 4)
        self._counters = counters
        self._turned_away = TurnedAway(tell)
        self._lock = threading.Lock()
        self._under_way: dict[str, int] = {}
        self._used_s: dict[str, float] = {}
        """When the last call ended of a connection on which a caller was let in."""
        self._seen_s: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """A caller that was let in has a call under way on the connection of ``peer``, as gRPC names it."""
        with self._lock:
            self._under_way[peer] = self._under_way.get(peer, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[peer] -= 1
                if not self._under_way[peer]:
                    del self._under_way[peer]
                self._used_s[peer] = time.monotonic()

    def watch(self, port: int) -> None:
        """Begin to look after what comes in at ``port``."""
        self._thread = threading.Thread(target=self._run, args=(port,), name="connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _run(self, port: int) -> None:
        wait_s = _LOOK_S
        while not self._stopping.wait(wait_s):
            began_s = time.monotonic()
            crowded = self.look(port)
            took_s = time.monotonic() - began_s
            wait_s = max(_CROWDED_LOOK_S, took_s / _SHARE) if crowded else _LOOK_S
            self._turned_away.tell()

    def look(self, port: int) -> bool:
        """Hang up on what is too much; whether anything was."""
        descriptors = os.listdir(_DESCRIPTORS)
        if len(descriptors) <= self._room and len(self._used_s) <= self._places:
            return False
        now_s = time.monotonic()
        found = {peer: fd for fd in map(int, descriptors) if (peer := _peer_at(fd, port))}
        self._seen_s = {peer: self._seen_s.get(peer, now_s) for peer in found}
        with self._lock:
            busy = {unquote(peer) for peer in self._under_way}
            self._used_s = {peer: used_s for peer, used_s in self._used_s.items() if unquote(peer) in found}
            used_s = {unquote(peer): used_s for peer, used_s in self._used_s.items()}
        idle = [peer for peer in found if peer not in busy]
        strangers = sorted((peer for peer in idle if peer not in used_s), key=self._seen_s.__getitem__)
        known = sorted((peer for peer in idle if peer in used_s), key=used_s.__getitem__)
        excess = len(found) - self._room
        chosen = _chosen(strangers, excess)
        chosen += _chosen(known, excess - len(chosen))
        for peer in chosen:
            _hang_up(found[peer], peer, port)
        if chosen:
            self._counters.add("hung_up", len(chosen))
            host, why = _host(chosen[-1]), "it had no call under way when {} of {} places were taken"
            self._turned_away.add(f"the latest from {host}, {why.format(len(found), self._places)}", len(chosen))
        return bool(chosen)


def _chosen(peers: Sequence[str], count: int) -> list[str]:
    """The first ``count`` of ``peers``, each from the address that has most of those that are left."""
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
    """Of ``ipv4:10.0.0.1:5555``: ``10.0.0.1``."""
    return peer.partition(":")[2].rpartition(":")[0]


def _peer_at(fd: int, port: int) -> str:
    """Whose connection to ``port`` the descriptor is, as gRPC names it before it quotes it; "" for any other."""
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
    return ""  # It is closed meanwhile, or listens.


def _hang_up(fd: int, peer: str, port: int) -> None:
    """As if ``peer`` had: gRPC reads the end of the connection, and closes its descriptor itself."""
    with suppress(OSError):
        if _peer_at(fd, port) == peer:
            with _borrowed(fd) as connection:
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that is gRPC's to close.

    There is no second descriptor of it: gRPC counts on the last one being closed when it closes its own.
    """
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


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
