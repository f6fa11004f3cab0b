"""How many connections a server has, and which of them it hangs up on when there are too many.

gRPC has one bound for all (``grpc.max_allowed_incoming_connections``), asks nobody before it takes a connection, and
keeps one that answers pings for ever.  So a few hundred connections that never make a call would leave no place for a
site that comes, and no descriptor for a file.  Here the bound is a half of the files that this process may have open,
and when three quarters of those places are taken, connections without a call under way are hung up on: first those on
which no caller was ever let in, of the address that has most of them, the oldest first.  What is under way is never
hung up on, and a site whose idle connection was comes back with its next call.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import unquote

from diloco import open_files
from diloco.wire.gates import TurnedAway

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diloco.wire.gates import Counters
    from diloco.wire.options import ServerOptions

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
