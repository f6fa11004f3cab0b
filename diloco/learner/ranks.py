"""Communication between the ranks of one site, and the assignment of fragments to ranks.

Orders.  Between two steps rank 0 broadcasts what all ranks do next, before any value is read or written, so that each
rank joins in the collective that follows: the values of a fragment are gathered from, or scattered to, the ranks that
hold them.  Rank 0 sends any number of such orders, then GO_ON or STOP to all ranks.

Channel.  Background threads cannot wait for the collectives of the training threads.  So rank 0 has one connection to
each other rank over the site's own network; the connecting process must know a key that was sent over the process
group.  Messages arrive in order, one thread reads them, and a lost connection is reported.

Owners.  The owner of a fragment is the rank that holds its exchange tensors.  If every rank has the whole model, that
is rank 0, which can read the model alone.  If each rank holds a part, the fragments are distributed over the ranks, so
that no rank holds the whole model's versions and updates, and all ranks encode and send.

Door.  Accepts connections from processes that prove that they know a key.  It reads nothing but that proof from other
processes, and a silent one blocks no other.  Use it within one site's own network: later messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.inner import GroupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.inner.holding import Holding
    from diloco.inner.parallel import SiteGroup
    from diloco.outer.fragments import Layout


GO_ON, STOP, SEAL, ADOPT, RETAKE, WAIT = range(6)


class Orders:
    """Broadcasts rank 0's orders.  When the site ends, several threads give orders; a lock serializes them."""

    def __init__(self, group: SiteGroup, part: int | None = None, turn: threading.RLock | None = None) -> None:
        self._group, self._part, self._turn = group, part, turn or threading.RLock()

    def of(self, part: int) -> Orders:
        """Return the orders for agent number ``part`` of several; their ``go_on`` does nothing."""
        return Orders(self._group, part, self._turn)

    @contextmanager
    def all_do(self, what: int, fragment: int, owner: int = 0) -> Iterator[None]:
        """Make the other ranks take part in the collective on ``fragment`` that the caller runs inside this context."""
        with self._turn:
            self._group.broadcast_small((what, self._part or 0, fragment, owner))
            yield

    def wait(self) -> None:
        """Tell the other ranks that this boundary lasts, so that their wait for the next order begins anew."""
        with self.all_do(WAIT, 0):
            pass

    def go_on(self, *, stop: bool = False) -> None:
        """End the boundary: all ranks go on, or stop."""
        if self._part is None:
            with self._turn:
                self._group.broadcast_small([STOP if stop else GO_ON])


def lend_a_hand(holding: Holding, layout: Layout, fragment: int, what: int, adopt: str, owner: int) -> None:
    """Take part in an order, on a rank that is not the owner of the fragment."""
    pieces = layout.fragments[fragment].pieces
    # ``overwrite`` does not read the model's values first.
    if what == SEAL or (what == ADOPT and adopt != "overwrite" and fragment not in layout.averaged):
        holding.gather(pieces, None, owner)
    if what != SEAL:
        holding.scatter(pieces, None, owner)


Words = tuple[Any, ...]
KEY_BYTES = 32
BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


class Channel:
    """One end of a connection between rank 0 and another rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def hear(self, take: Callable[[Words], None], lost: Callable[[str], None]) -> None:
        """Start a thread that passes each message to ``take``, and the reason to ``lost`` when the connection fails."""

        def run() -> None:
            try:
                while True:
                    take(self._connection.recv())
            except (EOFError, OSError):
                if not self._closed:
                    lost("its connection within the site has ended")
            except Exception as error:
                lost(f"its message could not be handled: {error!r}")
                shut(self._connection)  # So that the other end sees that its messages are no longer read.
                raise

        self._thread = threading.Thread(target=run, name="within-the-site", daemon=True)
        self._thread.start()

    def send(self, *words: Any) -> None:
        """Send one message without waiting for an answer; a message to a rank that is gone is dropped."""
        try:
            with self._sending:
                self._connection.send(words)
        except OSError:
            return  # The reading thread reports the loss.

    def close(self) -> None:
        """Close this end without reporting a loss; messages already sent still arrive."""
        self._closed = True
        shut(self._connection)  # Wakes the reading thread; close alone would not.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        self._connection.close()


def meet(group: SiteGroup) -> dict[int, Channel]:
    """Connect the ranks; return this rank's channels by the rank at the other end: rank 0 has one to each other rank.

    All ranks must call it together; ``GroupError`` when one does not connect in time, or is lost meanwhile.
    """
    try:
        places = group.all_gather_json(_loopback())
        if group.rank:
            told = group.all_gather_json({})[0]
            host = NEAR if places[group.rank] == places[0] else told["host"] or group.master_addr
            connection = knock(host, told["port"], bytes.fromhex(told["key"]), group.timeout_s)
            connection.send(group.rank)
            return {0: Channel(connection)}
        key, apart, others = secrets.token_bytes(KEY_BYTES), len(set(places)) > 1, group.world - 1
        with contextlib.closing(Door(key, "" if apart else NEAR)) as door:
            host = _own_address(group.master_addr) if apart else NEAR
            group.all_gather_json({"host": host, "port": door.port, "key": key.hex()})
            found: dict[int, Channel] = {}
            while len(found) < others:
                try:
                    connection = door.come.get(timeout=group.timeout_s)
                except queue.Empty:
                    raise GroupError(f"only {len(found)} of {others} ranks of this site connected to rank 0") from None
                if not connection.poll(group.timeout_s):
                    raise GroupError("a rank of this site connected to rank 0 and did not send its number")
                found[connection.recv()] = Channel(connection)
        return found
    except (AuthenticationError, EOFError, OSError) as error:
        raise GroupError(f"rank {group.rank} of this site could not connect to the others: {error!r}") from error


def _loopback() -> str:
    """Return an id that two processes share exactly if they reach each other over the loopback address.  A host name is
    not enough: two machines may have the same one, and containers on one machine may have different ones."""
    try:
        return f"{BOOT.read_text().strip()} {NETWORK.stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _own_address(rendezvous: str) -> str:
    """Return this machine's address on the route to ``rendezvous``; empty if ``rendezvous`` is this machine: the others
    know that address.  The machine's own name is not used: it may resolve to a loopback address."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, towards in socket.getaddrinfo(rendezvous, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as way:
                way.connect(towards)  # Sends nothing.
                own = str(way.getsockname()[0]).partition("%")[0]
                return "" if ipaddress.ip_address(own).is_loopback else own
    return ""


@dataclass(frozen=True, slots=True)
class Dealt:
    """The owner of each fragment of one agent, and this rank's channels: between rank 0 and each of the others."""

    owners: tuple[int, ...]
    channels: Mapping[int, Channel]

    def of(self, rank: int) -> list[int]:
        """Return the fragments that ``rank`` owns."""
        return [fragment for fragment, owner in enumerate(self.owners) if owner == rank]


def all_mine(layout: Layout) -> Dealt:
    """Return the assignment in which rank 0 owns every fragment."""
    return Dealt((0,) * len(layout.fragments), {})


def deal(layout: Layout, holding: Holding) -> Dealt:
    """Assign the fragments to the ranks, and connect the ranks if needed.  All ranks must call it together."""
    owners = owners_of(layout, holding)
    return Dealt(owners, meet(holding.group) if any(owners) else {})


def owners_of(layout: Layout, holding: Holding) -> tuple[int, ...]:
    """Return the owner of each fragment: the largest first, each to the rank with the fewest values so far.

    Rank 0 owns all where every rank has a copy of the whole model.
    """
    if all(holding.is_copied(fragment.pieces) for fragment in layout.fragments):
        return (0,) * len(layout.fragments)
    from diloco.outer.fragments import balanced  # It loads torch; a process that starts ranks does without.

    owned = balanced([fragment.numel for fragment in layout.fragments], [1] * holding.group.world)
    ranks = {fragment: rank for rank, fragments in enumerate(owned) for fragment in fragments}
    return tuple(ranks[fragment.index] for fragment in layout.fragments)


KNOCKING_MAX = 64
"""Most connections that have not proved the key yet; one more evicts the oldest."""
CLOSE_S = 10.0
NEAR = "127.0.0.1"


class Door:
    """Listens, and puts connections that proved the key into ``come``."""

    def __init__(self, key: bytes, host: str = "", port: int = 0) -> None:
        """``host`` is the address to listen on, empty: all of them; ``port`` 0: the system chooses.

        ``OSError`` where it cannot listen there.
        """
        self.come: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._key = key
        self._knocking: deque[Connection] = deque()
        self._changing = threading.Lock()
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close it, and all connections that wait."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the thread; close alone would not.
        self._thread.join(CLOSE_S)
        self._socket.close()
        with self._changing:
            for each in self._knocking:
                shut(each)
            self._knocking.clear()
        while not self.come.empty():
            self.come.get().close()

    def _listen(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except ConnectionError:
                continue  # The client was gone before it was accepted.
            except OSError:
                return  # Closed.
            connection = Connection(accepted.detach())
            with self._changing:
                if len(self._knocking) == KNOCKING_MAX:
                    shut(self._knocking.popleft())
                self._knocking.append(connection)
            threading.Thread(target=self._ask, args=(connection,), name="door", daemon=True).start()

    def _ask(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            known = True
        except (AssertionError, AuthenticationError, EOFError, OSError):
            known = False  # It does not know the key, or was closed.
        with self._changing:
            known = known and connection in self._knocking
            with contextlib.suppress(ValueError):
                self._knocking.remove(connection)
            if known:
                self.come.put(connection)
        if not known:
            connection.close()


def knock(host: str, port: int, key: bytes, bound_s: float) -> Connection:
    """Connect to a ``Door`` and prove the key; return the connection.

    ``OSError`` where no door answers within ``bound_s``; ``AuthenticationError`` where it has another key.
    """
    with socket.create_connection((host, port), timeout=bound_s) as made:
        made.settimeout(None)
        connection = Connection(made.detach())
    over = threading.Timer(bound_s, shut, [connection])
    over.daemon = True
    over.start()
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AssertionError, AuthenticationError, EOFError, OSError) as error:
        connection.close()
        if isinstance(error, EOFError | OSError):
            raise ConnectionError(f"{host}:{port} does not answer: {error!r}") from error
        raise AuthenticationError("the listener does not know the key") from error
    finally:
        over.cancel()
    return connection


def shut(connection: Connection) -> None:
    """Shut a connection down, so that reads at both ends, in any thread, return."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _listening(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port), backlog=KNOCKING_MAX)
    if socket.has_dualstack_ipv6():
        # A kernel with IPv6 support that is switched off has no address to bind.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=KNOCKING_MAX, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=KNOCKING_MAX)
