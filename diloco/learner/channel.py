"""What the ranks of one site say to each other, and which rank owns which fragment.

Orders.  Between two steps rank 0 tells all ranks what to do.  It says so before a value is read or written, so that
each takes its part in what follows: the values of a fragment are gathered from the ranks that hold them, or handed out
to them.  Any number of such orders comes, then one of the two by which all go on or stop.

Channel.  What a rank's threads do beside training cannot wait for the collectives of the training threads.  So rank 0
has one connection to each other rank, made over the site's own network; the process that connects must know a key that
the process group has carried.  What is sent arrives in order, one thread hears it, and a loss of the connection is
told.

Owners.  The owner of a fragment is the rank that has the tensors of its exchange.  Where every rank has the whole model
that is rank 0, which then needs no other rank to read it.  Where each rank holds a part, the fragments are dealt to the
ranks, so that none holds the whole model's versions and updates, and all encode and send.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from diloco.inner.parallel import GroupError
from diloco.learner.meeting import CLOSE_S, NEAR, Door, knock, shut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from diloco.inner.holding import Holding
    from diloco.inner.parallel import SiteGroup
    from diloco.outer.fragments import Fragment, Layout

GO_ON, STOP, SEAL, ADOPT, RETAKE = range(5)


class Owned(Protocol):
    """What a rank above 0 owns of the fragments of one agent."""

    def do(self) -> None:
        """The next thing that rank 0 has ordered of it, at a boundary."""


class Orders:
    """Rank 0's.  What several threads order at a site's end is done one after the other."""

    def __init__(self, group: SiteGroup, part: int = 0) -> None:
        self._group, self._part, self._turn = group, part, threading.RLock()
        self._is_site = True

    def of(self, part: int) -> Orders:
        """Those of one of several agents, which has the layout ``part``: when to go on is the site's to say."""
        found = Orders(self._group, part)
        found._turn, found._is_site = self._turn, False
        return found

    @contextmanager
    def all_do(self, what: int, fragment: int, owner: int = 0) -> Iterator[None]:
        """Inside, the other ranks take their part in what is done with the model's values of ``fragment``."""
        with self._turn:
            self._say(what, self._part, fragment, owner)
            yield

    def go_on(self, *, stop: bool = False) -> None:
        """The boundary is over."""
        if self._is_site:
            with self._turn:
                self._say(STOP if stop else GO_ON)

    def _say(self, *words: int) -> None:
        if self._group.world > 1:
            self._group.broadcast_small(words)


def take_part(holding: Holding, layouts: Sequence[Layout], adopt: str, owned: Sequence[Owned | None] = ()) -> bool:
    """A boundary of a rank above 0; returns whether this rank is to stop.

    ``layouts`` are those of the site's agents, ``adopt`` is by what rule they adopt, ``owned`` what this rank does for
    each of them with fragments whose owner it is, None where there are none.
    """
    while True:
        what, *which = holding.group.broadcast_small([])
        if what in (GO_ON, STOP):
            return what == STOP
        part, fragment, owner = which
        if owner == holding.group.rank:
            own = owned[part]
            assert own is not None, f"rank 0 orders something of agent {part}, of which this rank owns nothing"
            own.do()
        else:
            lend_a_hand(holding, layouts[part].fragments[fragment], what, adopt, owner)


def lend_a_hand(holding: Holding, fragment: Fragment, what: int, adopt: str, owner: int) -> None:
    """The part that each rank but the owner takes in an order."""
    # Overwritten values need not be read first.
    if what == SEAL or (what == ADOPT and adopt != "overwrite"):
        holding.gather(fragment.pieces, None, owner)
    if what != SEAL:
        holding.scatter(fragment.pieces, None, owner)


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


@dataclass(frozen=True, slots=True)
class Dealt:
    """The owner of each fragment of one agent, and the channels of this rank: between rank 0 and each of the others."""

    owners: tuple[int, ...]
    channels: Mapping[int, Channel]

    def of(self, rank: int) -> list[int]:
        """The fragments of ``rank``."""
        return [fragment for fragment, owner in enumerate(self.owners) if owner == rank]


def all_mine(layout: Layout) -> Dealt:
    """Rank 0 owns everything."""
    return Dealt((0,) * len(layout.fragments), {})


def deal(layout: Layout, holding: Holding) -> Dealt:
    """Deal the fragments to the ranks, and connect these.  For all ranks at once."""
    owners = owners_of(layout, holding)
    return Dealt(owners, meet(holding.group) if any(owners) else {})


def owners_of(layout: Layout, holding: Holding) -> tuple[int, ...]:
    """The owner of each fragment: the largest first, each to the rank that has least so far."""
    if all(holding.is_copied(fragment.pieces) for fragment in layout.fragments):
        return (0,) * len(layout.fragments)
    loads, found = [0] * holding.group.world, [0] * len(layout.fragments)
    for fragment in sorted(layout.fragments, key=lambda each: (-each.numel, each.index)):
        rank = loads.index(min(loads))
        found[fragment.index] = rank
        loads[rank] += fragment.numel
    return tuple(found)
