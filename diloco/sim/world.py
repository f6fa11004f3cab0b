"""Time and the network of the simulator: a heap of instants, and one link per site.

A link behaves as TCP does over a bad path: what is lost comes later (a retransmission), what is sent into a partition
is held and, when the partition ends, either arrives late or has died with its connection.  Messages overtake one
another freely and may come twice, which is more than gRPC does; the machines claim to bear it.


What a site and the syncer say to each other in the simulator, beside the events that they are made of.

A disk that does with writes what disks do: what was not synced may be lost, torn or reordered, and bits rot.

A process that is killed loses nothing of what it wrote.  A power cut leaves of each write that no sync has covered all,
a part or nothing, whatever became of the writes around it; and of each name that no sync of the folder has covered the
old file or the new one.  That is more than a journalling file system does to its users and no more than it may do.


What a process of the simulator can suffer: it can be stopped for a while, and it can die.


The lease of a simulated run: one object somewhere else, which both syncers reach over links of their own.  Who may take
it, and whether its holder leads at this moment, is decided in ``sync/leadership``."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from diloco.sim.values import OuterRule, Value
from diloco.sync.data_units import Span
from diloco.sync.events import Fate, JoinAnswered, Outcome, Reason
from diloco.sync.leadership import Claim, Standing, next_standing, refusal
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.replication import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from diloco.sync.effects import DropSite
    from diloco.sync.events import LearnerEvent

MILLISECOND_NS = 1_000_000
RETRANSMISSION_NS = 200 * MILLISECOND_NS
RETRANSMISSIONS_MAX = 5
HELD_MAX = 64
"""Messages that one direction of a cut link holds; later ones are lost, as in a full socket buffer."""


Message = tuple["Callable[[], None]", "Callable[[], None] | None"]


class Heap:
    """Everything that is going to happen, in order of instant and then of planning."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._planned: list[tuple[int, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, instant_ns: int, action: Callable[[], object]) -> None:
        """Run ``action`` at ``instant_ns``, or now if that has passed."""
        self._count += 1
        instant_ns = instant_ns if instant_ns > self.now_ns else self.now_ns
        heapq.heappush(self._planned, (instant_ns, self._count, action))

    def after(self, delay_ns: int, action: Callable[[], object]) -> None:
        """Run ``action`` in ``delay_ns``."""
        self.at(self.now_ns + delay_ns, action)

    def run_until(self, instant_ns: int, over: Callable[[], bool]) -> None:
        """Let everything up to ``instant_ns`` happen, or until ``over()``."""
        planned, pop = self._planned, heapq.heappop
        while planned and planned[0][0] <= instant_ns and not over():
            self.now_ns, _, action = pop(planned)
            self.events += 1
            action()
        if not over():
            self.now_ns = max(self.now_ns, instant_ns)


class Direction(Enum):
    """``UP`` is from the site to the syncer."""

    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class Weather:
    """How a link behaves while it is not cut.  ``loss`` and ``twice`` are shares of messages, 0 to 1."""

    latency_ns: int = 20 * MILLISECOND_NS
    jitter_ns: int = 0
    loss: float = 0.0
    twice: float = 0.0


class Link:
    """One site's path to the syncer and back."""

    def __init__(self, heap: Heap, random: Random, weather: Weather) -> None:
        self.weather = weather
        self._usual = Weather(weather.latency_ns, weather.jitter_ns)
        self._heap = heap
        self._random = random
        self._cut: set[Direction] = set()
        self._held: dict[Direction, list[Message]] = {Direction.UP: [], Direction.DOWN: []}

    def send(
        self,
        direction: Direction,
        deliver: Callable[[], None],
        transfer_ns: int = 0,
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Carry a message whose bytes take ``transfer_ns``; ``deliver`` runs on arrival, later, never or twice.

        ``lost`` runs where a message dies with its connection: who reads a stream is told that it broke.
        """
        message = (deliver, lost)
        self._heap.after(self._delay_ns() + transfer_ns, lambda: self._arrive(direction, message))
        if self.weather.twice and self._random.random() < self.weather.twice:
            self._heap.after(2 * self._delay_ns() + transfer_ns, lambda: self._arrive(direction, message))

    def cut(self, *directions: Direction) -> None:
        """Let nothing arrive in ``directions`` until ``heal``."""
        self._cut.update(directions)

    def heal(self) -> None:
        """End the partition: of what was held, some arrives late and some is lost with its connection."""
        self._cut.clear()
        for direction in Direction:
            held, self._held[direction] = self._held[direction], []
            for deliver, lost in held:
                if self._random.random() < 0.5:
                    self.send(direction, deliver, lost=lost)
                elif lost is not None:
                    lost()

    def calm(self) -> None:
        """End the partition, and let nothing be lost any more, come twice or be held up by a storm."""
        self.heal()
        self.weather = self._usual

    def _arrive(self, direction: Direction, message: Message) -> None:
        deliver, lost = message
        if direction not in self._cut:
            deliver()
        elif len(self._held[direction]) < HELD_MAX:
            self._held[direction].append(message)
        elif lost is not None:
            lost()

    def _delay_ns(self) -> int:
        weather, random = self.weather, self._random
        delay_ns = weather.latency_ns + int(random.random() * weather.jitter_ns)
        if weather.loss:
            wait_ns = RETRANSMISSION_NS
            for _ in range(RETRANSMISSIONS_MAX):
                if random.random() >= weather.loss:
                    break
                delay_ns += wait_ns
                wait_ns *= 2
        return delay_ns


@dataclass(frozen=True, slots=True)
class Push:
    """An update as it is on its way.  ``finite`` is what the syncer will find when it decodes the payload."""

    site: str
    incarnation: int
    fragment: int
    sequence: int
    base_version: int
    tokens: int
    steps: int
    step_ns: int
    cursor: int
    digest: str
    final: bool
    finite: bool
    value: Value
    transfer_ns: int
    norm: float
    cosine: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class PushReply:
    """The answer to a push."""

    outcome: Outcome
    reason: Reason | None
    fate: Fate | None


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The answer to a join: refused with a ``reason``, ``answered``, or a ``ticket`` to join with; or none of it."""

    answered: JoinAnswered | None
    reason: Reason | None
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version: the down-links that lead to it from the version asked about, or (``whole``) its values."""

    version: int
    whole: bool
    parts: tuple[Value, ...]
    fates: tuple[Fate, ...]


class Feed:
    """The stream of small events to one site's process; a message that is lost breaks it."""

    def __init__(
        self,
        incarnation: int,
        link: Link,
        told: Callable[[LearnerEvent | DropSite], None],
        broken: Callable[[], None],
    ) -> None:
        self.incarnation = incarnation
        self._link, self._told, self._broken = link, told, broken

    def tell(self, what: LearnerEvent | DropSite) -> None:
        """Send ``what`` down the site's link."""
        self._link.send(Direction.DOWN, lambda: self._told(what), lost=self._broken)


@dataclass(frozen=True, slots=True)
class Begin:
    """The standby is to begin here.  ``snapshot`` and ``payloads`` are the files for one that has nothing."""

    segment: int
    snapshot: tuple[str, bytes] | None = None
    payloads: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the journal byte for byte, where it ends, and the payloads that it names."""

    kind: bytes
    chain: bytes
    raw: bytes
    end: Place
    payloads: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class GoAway:
    """The standby's journal is not one that this one goes on from: it needs an empty folder."""


Part = Begin | Unit | GoAway | None
"""None: there is nothing new."""


class Stream:
    """One attempt to follow: its parts come in order, and once."""

    def __init__(
        self,
        name: str,
        link: Link,
        process: Process,
        taken: Callable[[Stream, Part], None],
        broken: Callable[[Stream], None],
    ) -> None:
        self.name, self.link, self._process = name, link, process
        self._taken, self._broken = taken, broken
        self.served = False
        """Whether a syncer has begun to: a request that the network has doubled is the same stream."""
        self._sent = self._expected = 0
        self._early: dict[int, Part] = {}

    def send(self, part: Part, broken: Callable[[], None]) -> None:
        """The syncer says the next ``part``; ``broken``: it died with the connection."""
        number = self._sent
        self._sent += 1

        def lost() -> None:
            self.broken()
            broken()

        self.link.send(Direction.DOWN, lambda: self._process.deliver(lambda: self._take(number, part)), lost=lost)

    def _take(self, number: int, part: Part) -> None:
        """A part is here, perhaps before its turn, perhaps again."""
        if number >= self._expected:
            self._early[number] = part
        while self._expected in self._early:
            self._taken(self, self._early.pop(self._expected))
            self._expected += 1

    def broken(self) -> None:
        """The connection is gone."""
        self._process.deliver(lambda: self._broken(self))


SEAL_BYTES = 16


class Damaged(Exception):
    """What is on the disk is not what was written; the text names the file."""


@dataclass(slots=True)
class File:
    """``data`` as a process reads it; ``pending`` are the pieces of it (offset, length) that no sync has covered."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int]] = field(default_factory=list)

    def lose(self, random: Random) -> None:
        """Keep of each pending piece all, the beginning or nothing; what then is a hole reads as zeros."""
        if not self.pending:
            return
        kept = bytearray(self.data[: self.pending[0][0]])
        for offset, length in self.pending:
            share = random.choice((0.0, random.random(), 1.0))
            piece = self.data[offset : offset + int(length * share)]
            if piece:
                kept.extend(bytes(max(0, offset - len(kept))))
                kept[offset:] = piece
        self.data, self.pending = kept, []


class Storage:
    """One folder of one machine."""

    def __init__(self) -> None:
        self._names: dict[str, File] = {}
        self._synced: dict[str, File] = {}
        self._rotten: list[tuple[File, int, int]] = []

    def names(self, prefix: str) -> list[str]:
        """The files whose names begin so, in order."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        """What is in a file; ``Damaged`` when there is none."""
        if name not in self._names:
            raise Damaged(f"{name} is missing")
        return bytes(self._names[name].data)

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file, safe after ``sync``; one that was not there begins, safe after ``sync_names``."""
        file = self._names.setdefault(name, File())
        file.pending.append((len(file.data), len(data)))
        file.data += data

    def cut(self, name: str, size: int) -> None:
        """Cut a file off, and sync it; what had rotted behind the cut is gone with it."""
        file = self._names[name]
        self._rotten = [rot for rot in self._rotten if rot[0] is not file or rot[1] < size]
        del file.data[size:]
        self.sync(name)

    def sync(self, name: str) -> None:
        """What was written to the file is safe."""
        self._names[name].pending.clear()

    def rename(self, name: str, to: str) -> None:
        """Give a file another name; safe after ``sync_names``."""
        self._names[to] = self._names.pop(name)

    def remove(self, name: str) -> None:
        """Remove a file; it may be back after a power cut unless ``sync_names`` came before."""
        self._names.pop(name, None)

    def sync_names(self) -> None:
        """The names as they are now are safe."""
        self._synced = dict(self._names)

    def is_safe(self, name: str, data: bytes) -> bool:
        """Whether ``data`` is in a file, and no power cut would take it from there."""
        file = self._synced.get(name)
        at = -1 if file is None or self._names.get(name) is not file else file.data.find(data)
        return file is not None and at >= 0 and not any(offset < at + len(data) for offset, _ in file.pending)

    def power_cut(self, random: Random) -> None:
        """Everything that is not safe meets its fate."""
        found: dict[str, File] = {}
        for name in sorted(self._names.keys() | self._synced.keys()):
            old, new = self._synced.get(name), self._names.get(name)
            file = new if old is new or random.random() < 0.5 else old
            if file is not None:
                found[name] = file
        lost: list[File] = []
        for file in found.values():
            if not any(file is each for each in lost):
                file.lose(random)
                lost.append(file)
        self._names, self._synced = found, dict(found)

    def rot(self, random: Random) -> bool:
        """Flip one bit of one file, without a word; False when there is nothing to rot."""
        names = [name for name in self.names("") if self._names[name].data]
        if not names:
            return False
        file = self._names[random.choice(names)]
        place, bit = random.randrange(len(file.data)), 1 << random.randrange(8)
        file.data[place] ^= bit
        self._rotten.append((file, place, bit))
        return True

    def is_rotten(self) -> bool:
        """Whether some bit has rotted since the last ``mend``."""
        return bool(self._rotten)

    def mend(self) -> None:
        """An operator brings back every file as it was, from a copy that did not rot."""
        for file, place, bit in self._rotten:
            if place < len(file.data):
                file.data[place] ^= bit
        self._rotten = []


def sealed(data: bytes) -> bytes:
    """``data`` behind its digest."""
    return hashlib.sha256(data).digest()[:SEAL_BYTES] + data


def unsealed(name: str, data: bytes) -> bytes:
    """What ``sealed`` was given; ``Damaged`` names the file when it is another."""
    if hashlib.sha256(data[SEAL_BYTES:]).digest()[:SEAL_BYTES] != data[:SEAL_BYTES]:
        raise Damaged(f"{name} is damaged")
    return data[SEAL_BYTES:]


class Died(Exception):
    """The process ends in the middle of what it was doing; nothing after this instant of it happens."""


class Process:
    """Everything that happens to a process comes through ``deliver``."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self.alive = True
        self.frozen = False
        self._inside = False
        self._backlog: list[Callable[[], None]] = []
        self._on_death = on_death

    def deliver(self, action: Callable[[], None]) -> None:
        """Run ``action`` in this process: now, after the thaw when it is frozen, never when it is dead.

        One that is delivered by another is a part of it: where it dies, the rest of the other does not happen either.
        """
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(action)
            return
        if self._inside:
            action()
            return
        self._inside = True
        try:
            action()
        except Died:
            self.kill()
            self._on_death()
        finally:
            self._inside = False

    def freeze(self) -> None:
        """Stop as by SIGSTOP: nothing is lost, everything waits."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on, with what has waited first."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.deliver(action)

    def kill(self) -> None:
        """End as by SIGKILL."""
        self.alive = False
        self._backlog.clear()


@dataclass(slots=True)
class Lease:
    """What it says.  ``last`` is the number of the holder's last change: one that comes late changes nothing."""

    heap: Heap = field(repr=False)
    ttl_ns: int
    standing: Standing | None = None
    renewed_ns: int = 0
    last: int = 0

    def acquire(self, claim: Claim) -> int | str | None:
        """Take it: the new epoch, None while another holds it, or why it is not to be had."""
        if (why := refusal(self.standing, claim, "here")) is not None:
            return why
        held = self.standing is not None and self.standing.holder != claim.name
        if held and self.heap.now_ns < self.renewed_ns + self.ttl_ns:
            return None
        self.standing = next_standing(self.standing, claim)
        self.renewed_ns, self.last = self.heap.now_ns, 0
        return self.standing.epoch

    def change(self, epoch: int, number: int, heir: str | None = None) -> bool:
        """Name the heir, or hold it for another ``ttl_ns`` where that is None; False when it is another's."""
        assert self.standing is not None
        if epoch == self.standing.epoch and number > self.last:
            self.last = number
            if heir is None:
                self.renewed_ns = self.heap.now_ns
            else:
                self.standing = replace(self.standing, heir=heir)
        return epoch == self.standing.epoch


class LeaseLine:
    """One machine's way to the lease."""

    def __init__(self, lease: Lease, link: Link) -> None:
        self.lease, self.link = lease, link
        self.machine = 1
        """Another one once a machine is lost: nothing that it had on its way arrives."""

    def ask(
        self,
        process: Process,
        request: Callable[[Lease], object],
        answered: Callable[[object], None],
        missed: Callable[[], None],
    ) -> None:
        """Exactly one of ``answered`` and ``missed`` happens, unless ``process`` dies."""
        waiting = [True]

        def settle(action: Callable[[], None]) -> None:
            if waiting:
                waiting.clear()
                action()

        machine = self.machine

        def receive() -> None:
            if machine != self.machine:
                return
            answer = request(self.lease)
            self.link.send(Direction.DOWN, lambda: process.deliver(lambda: settle(lambda: answered(answer))))

        self.link.send(Direction.UP, receive)
        self.lease.heap.after(self.lease.ttl_ns // 4, lambda: process.deliver(lambda: settle(missed)))


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """How a run's standby follows, the paths between the three machines, and how long the lease lasts."""

    between: Weather
    to_lease: Weather
    mode: str = "sync"
    ttl_ns: int = 2000 * MILLISECOND_NS
    timeout_ns: int = 2000 * MILLISECOND_NS
    alive_ns: int = 500 * MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """How this run's syncer is set: its rules, its speed, and how often it takes a snapshot."""

    options: OuterOptions
    rule: OuterRule
    merge_ns: int = 0
    fail_per_mille: int = 0
    """Share of outer steps without a finite result."""
    snapshot_records: int = 50
    health: HealthOptions = field(default_factory=HealthOptions)
    replication: ReplicationPlan | None = None
    """How a standby follows; None: there is none, and no lease."""
