"""Between rank 0 of a site and each other rank: a connection for what is not said at a boundary.

What a rank's threads do beside training cannot wait for the collectives of the training threads.  One connection for
each rank above 0, made over the site's own network; who connects must know a key that the process group has carried.
What is sent arrives in order, is heard by one thread, and its loss is told.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import queue
import secrets
import socket
import threading
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.inner.parallel import GroupError
from diloco.learner.meeting import CLOSE_S, NEAR, Door, knock, shut

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from diloco.inner.parallel import SiteGroup

Words = tuple[Any, ...]
KEY_BYTES = 32
BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


class Channel:
    """One end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def hear(self, take: Callable[[Words], None], lost: Callable[[str], None]) -> None:
        """From now on ``take`` gets what comes, in a thread of its own, and ``lost`` why nothing does any more."""

        def run() -> None:
            try:
                while True:
                    take(self._connection.recv())
            except (EOFError, OSError):
                if not self._closed:
                    lost("its connection within the site has ended")
            except Exception as error:
                lost(f"what it said could not be done: {error!r}")
                shut(self._connection)  # So that the other end knows that nobody hears it.
                raise

        self._thread = threading.Thread(target=run, name="within-the-site", daemon=True)
        self._thread.start()

    def send(self, *words: Any) -> None:
        """Never waits for the other end to do anything; what a rank that is gone would have heard is nothing."""
        try:
            with self._sending:
                self._connection.send(words)
        except OSError:
            return  # Whoever hears of the loss says so.

    def close(self) -> None:
        """No word is missed any more; what was sent still arrives."""
        self._closed = True
        shut(self._connection)  # Wakes the thread, which closing does not.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        self._connection.close()


def meet(group: SiteGroup) -> dict[int, Channel]:
    """The channels of this rank, by the rank at the other end: rank 0 has one to each, the others one to it.

    For all ranks at once; GroupError when one does not come in time, or goes meanwhile.
    """
    try:
        return _met(group)
    except (AuthenticationError, EOFError, OSError) as error:
        raise GroupError(f"rank {group.rank} of this site could not meet rank 0: {error!r}") from error


def _met(group: SiteGroup) -> dict[int, Channel]:
    places = group.all_gather_bytes(_loopback())
    if group.rank:
        told = json.loads(group.all_gather_bytes(b"{}")[0])
        host = NEAR if places[group.rank] == places[0] else told["host"] or group.master_addr
        connection = knock(host, told["port"], bytes.fromhex(told["key"]), group.timeout_s)
        connection.send(group.rank)
        return {0: Channel(connection)}
    key, apart = secrets.token_bytes(KEY_BYTES), len(set(places)) > 1
    with Door(key, "" if apart else NEAR) as door:
        host = _own_address(group.master_addr) if apart else NEAR
        group.all_gather_bytes(json.dumps({"host": host, "port": door.port, "key": key.hex()}).encode())
        found: dict[int, Channel] = {}
        while len(found) < group.world - 1:
            try:
                connection = door.come.get(timeout=group.timeout_s)
            except queue.Empty:
                raise GroupError(f"only {len(found)} of {group.world - 1} ranks of this site came to rank 0") from None
            if not connection.poll(group.timeout_s):
                raise GroupError("a rank of this site came to rank 0 and does not say which")
            found[connection.recv()] = Channel(connection)
    return found


def _loopback() -> bytes:
    """What two processes have in common exactly if they reach each other over the loopback: a name does not tell, as
    machines may have the same and containers of one machine may not."""
    try:
        return f"{BOOT.read_text().strip()} {NETWORK.stat().st_ino}".encode()
    except OSError:
        return socket.gethostname().encode()


def _own_address(rendezvous: str) -> str:
    """This machine's address on the way to ``rendezvous``; empty where that is here, and the others know how it is
    reached.  By its own name a machine may find itself at a loopback address."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, towards in socket.getaddrinfo(rendezvous, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as way:
                way.connect(towards)  # Sends nothing.
                own = str(way.getsockname()[0]).partition("%")[0]
                return "" if ipaddress.ip_address(own).is_loopback else own
    return ""
