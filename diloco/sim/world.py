"""The world of the simulator: time, links, disks, processes, the lease, and the numbers that stand for tensors.

Time is a heap of instants.  A link behaves like TCP over a bad path: a lost message arrives later (a retransmission).
A message sent into a partition is held; when the partition ends, it either arrives late or is lost with its
connection.  Messages overtake each other freely and may arrive twice.  gRPC does neither, but the machines claim to
tolerate both.

A disk may lose, tear or reorder writes that were not synced, and its bits may rot.  A killed process loses nothing that
it wrote.  A power cut keeps each unsynced write whole, in part or not at all, independently of the other writes; for
each name that no folder sync has covered it keeps the old file or the new one.  That is harsher than a journalling file
system usually is, but no harsher than it is allowed to be.

A process can be stopped for a while, and it can die.  The lease is one object in a third place, which each syncer
reaches over its own link; ``sync/leadership`` decides who may take it and whether its holder leads.

A fragment is a ``Value`` of three integers.  The first is what a site has learned: each inner step adds a random
amount, and the codec rounds it coarsely.  The second counts tokens: each step adds its tokens and no codec rounds it,
so that checkers can compare an update's content with the tokens it declares.  The third is 1 in a site's own random
initialisation, before it adopts a version, and 0 in every version: no update may contain it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from typing import TYPE_CHECKING, Any

from diloco.sync.events import Fate, JoinAnswered, UpdateArrived
from diloco.sync.journal import JournalError, canonical
from diloco.sync.leadership import Claim, Place, Standing, next_standing, refusal
from diloco.sync.options import HealthOptions, OuterOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from diloco.sync.effects import AnswerJoin, Seal
    from diloco.sync.syncer import OuterSync


Value = tuple[int, int, int]
ZERO: Value = (0, 0, 0)
COLD: Value = (10**12 + 7, 10**9 + 7, 1)
WEIGHT_UNIT = 1 << 53
PARTS = 1_000_000
"""The resolution of an outer step's ``share``: millionths."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Outer SGD with heavy-ball momentum, in tenths: ``lr_tenths`` 10 and ``momentum_tenths`` 0 is the plain mean.

    ``published_quantum`` is the rounding step of the down-link's codec; 1 is lossless.
    """

    lr_tenths: int = 10
    momentum_tenths: int = 0
    published_quantum: int = 1


def plus(a: Value, b: Value) -> Value:
    """Return ``a + b``."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def minus(a: Value, b: Value) -> Value:
    """Return ``a - b``."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def total(values: Iterable[Value]) -> Value:
    """Return the sum of ``values``."""
    return reduce(plus, values, ZERO)


def quantised(value: Value, quantum: int) -> Value:
    """Encode and decode ``value``: round its first number to a multiple of ``quantum``."""
    return ((value[0] + quantum // 2) // quantum * quantum, value[1], value[2])


def merged(contributions: Sequence[tuple[float, Sequence[Value]]]) -> Value:
    """Return the weighted mean of each contribution's sum of updates.

    Equal contributions give exactly that contribution, and a single one gives itself.
    """
    weights = [max(1, int(weight * WEIGHT_UNIT)) for weight, _ in contributions]
    sums = [total(updates) for _, updates in contributions]
    whole = sum(weights)
    first, second, third = (
        sum(weight * each[place] for weight, each in zip(weights, sums, strict=True)) // whole for place in range(3)
    )
    return (first, second, third)


def outer_step(
    theta: Value, momentum: Value, gradient: Value, rule: OuterRule, share: float = 1
) -> tuple[Value, Value]:
    """Return ``theta`` and ``momentum`` after an outer step down ``gradient``, scaled by ``share`` to the millionth."""
    first, second, third = (was * rule.momentum_tenths // 10 + now for was, now in zip(momentum, gradient, strict=True))
    kept, parts = (first, second, third), rule.lr_tenths * max(1, round(share * PARTS))
    return minus(theta, (first * parts // (10 * PARTS), second * parts // (10 * PARTS), third)), kept


def blended(local: Value, new: Value, alpha_tenths: int) -> Value:
    """Return ``new + α (local - new)``."""
    first, second, third = (b + (a - b) * alpha_tenths // 10 for a, b in zip(local, new, strict=True))
    return (first, second, third)


# --- The world of the simulator --------------------------------------------------------------------------------------

MILLISECOND_NS = 1_000_000
RETRANSMISSION_NS = 200 * MILLISECOND_NS
RETRANSMISSIONS_MAX = 5
HELD_MAX = 64
"""How many messages one direction of a cut link holds; later ones are lost, as in a full socket buffer."""


Message = tuple[Callable[[], None], Callable[[], None] | None]
Reply = Callable[[object], None]


class Heap:
    """The queue of planned actions, ordered by instant and then by the order of planning."""

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
        """Run all actions planned up to ``instant_ns``, or until ``over()`` is true."""
        planned, pop = self._planned, heapq.heappop
        while planned and planned[0][0] <= instant_ns and not over():
            self.now_ns, _, action = pop(planned)
            self.events += 1
            action()
        if not over():
            self.now_ns = max(self.now_ns, instant_ns)


class Direction(Enum):
    """The direction of a message: ``UP`` is from the site to the syncer."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Weather:
    """How a link behaves while it is not cut.

    ``loss`` and ``twice`` are the shares of messages, 0 to 1, that are retransmitted and duplicated.
    """

    latency_ns: int = 20 * MILLISECOND_NS
    jitter_ns: int = 0
    loss: float = 0.0
    twice: float = 0.0


class Link:
    """One site's path to the syncer and back."""

    def __init__(self, heap: Heap, random: Random, weather: Weather) -> None:
        self.weather = weather
        self._usual = Weather(weather.latency_ns, weather.jitter_ns)
        self.heap = heap
        self._random = random
        self._cut: set[Direction] = set()
        self._held: dict[Direction, list[Message]] = {Direction.UP: [], Direction.DOWN: []}

    def send(self, direction: Direction, deliver: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Carry a message; ``deliver`` runs on arrival: late, twice or never.

        ``lost`` runs when the message is lost with its connection: it tells a stream's reader that the stream broke.
        """
        message = (deliver, lost)
        self.heap.after(self._delay_ns(), lambda: self._arrive(direction, message))
        if self.weather.twice and self._random.random() < self.weather.twice:
            self.heap.after(2 * self._delay_ns(), lambda: self._arrive(direction, message))

    def cut(self, *directions: Direction) -> None:
        """Begin a partition: nothing arrives in ``directions`` until ``heal``."""
        self._cut.update(directions)

    def heal(self) -> None:
        """End the partition: about half of the held messages arrive late, the others are lost with their connection."""
        self._cut.clear()
        for direction in Direction:
            held, self._held[direction] = self._held[direction], []
            for deliver, lost in held:
                if self._random.random() < 0.5:
                    self.send(direction, deliver, lost)
                elif lost is not None:
                    lost()

    def calm(self) -> None:
        """End the partition, and restore the link's latency and jitter, without loss or duplicates."""
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


def join_answered(machine: OuterSync, answer: AnswerJoin) -> JoinAnswered:
    """Build the event for a site whose join the syncer accepted."""
    state = machine.state
    run = (machine.attendance.run_tokens(), machine.progress_ppm(), answer.ending, state.lineage)
    return JoinAnswered(state.epoch, answer.incarnation, answer.standings, *run)


def update_arrived(seal: Seal, site: str, incarnation: int, digest: str) -> UpdateArrived:
    """Build the event for an update that a site has sealed."""
    key = (0, site, incarnation, seal.fragment, seal.sequence)
    work = (seal.base_version, seal.tokens, seal.steps, seal.step_ns, seal.cursor)
    return UpdateArrived(*key, *work, digest, digest, "exact", True, seal.final, spans=seal.spans)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to a pull: ``parts`` are the down-links from the caller's version, or (``whole``) the full values."""

    version: int
    whole: bool
    parts: tuple[Value, ...]
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Where the standby's stream begins.  ``snapshot`` and ``payloads`` are the files for an empty standby."""

    segment: int
    snapshot: tuple[str, bytes] | None = None
    payloads: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the journal byte for byte, the place where it ends, and the payloads that it names."""

    chain: bytes
    raw: bytes
    end: Place
    payloads: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class GoAway:
    """The syncer's journal does not continue the standby's: the standby needs an empty folder."""


Part = Begin | Unit | GoAway | None
"""None is a keep-alive: nothing new."""


class Stream:
    """One attempt of a standby to follow the syncer.  Its parts arrive in order, each exactly once."""

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
        """Whether a syncer serves it already: a duplicated request does not start a second stream."""
        self._sent = self._expected = 0
        self._early: dict[int, Part] = {}

    def send(self, part: Part, broken: Callable[[], None]) -> None:
        """Send the next ``part`` from the syncer; ``broken`` runs there when it is lost with the connection."""
        number = self._sent
        self._sent += 1

        def lost() -> None:
            self.broken()
            broken()

        self.link.send(Direction.DOWN, lambda: self._process.deliver(lambda: self._take(number, part)), lost)

    def _take(self, number: int, part: Part) -> None:
        """Accept a part that may have arrived out of order or twice."""
        if number >= self._expected:
            self._early[number] = part
        while self._expected in self._early:
            self._taken(self, self._early.pop(self._expected))
            self._expected += 1

    def broken(self) -> None:
        """Tell the standby that the connection is gone."""
        self._process.deliver(lambda: self._broken(self))


SEAL_BYTES = 16


class Damaged(JournalError):
    """The disk's content differs from what was written; the message names the file."""


@dataclass(slots=True)
class File:
    """``data`` is what a process reads; ``pending`` are its pieces (offset, length) that no sync has covered."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int]] = field(default_factory=list)

    def lose(self, random: Random) -> None:
        """Keep all, a prefix or none of each pending piece; a hole left by this reads as zeros."""
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
        self.rotten: list[tuple[File, int, int]] = []
        """The bits that have rotted since the last ``mend``: file, offset and bit."""

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, sorted."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        """Return a file's content; raise ``Damaged`` when the file does not exist."""
        if name not in self._names:
            raise Damaged(f"{name} is missing")
        return bytes(self._names[name].data)

    def append(self, name: str, data: bytes) -> None:
        """Append to a file, durable after ``sync``; create a missing file, durable after ``sync_names``."""
        file = self._names.setdefault(name, File())
        file.pending.append((len(file.data), len(data)))
        file.data += data

    def cut(self, name: str, size: int) -> None:
        """Truncate a file and sync it; rot behind the cut is gone."""
        file = self._names[name]
        self.rotten = [rot for rot in self.rotten if rot[0] is not file or rot[1] < size]
        del file.data[size:]
        self.sync(name)

    def sync(self, name: str) -> None:
        """Make everything written to the file durable."""
        self._names[name].pending.clear()

    def rename(self, name: str, to: str) -> None:
        """Rename a file; durable after ``sync_names``."""
        self._names[to] = self._names.pop(name)

    def remove(self, name: str) -> None:
        """Remove a file; a power cut before the next ``sync_names`` may bring it back."""
        self._names.pop(name, None)

    def sync_names(self) -> None:
        """Make the present names durable."""
        self._synced = dict(self._names)

    def is_safe(self, name: str, data: bytes) -> bool:
        """Return whether a file contains ``data`` and would keep it through a power cut."""
        file = self._synced.get(name)
        at = -1 if file is None or self._names.get(name) is not file else file.data.find(data)
        return file is not None and at >= 0 and not any(offset < at + len(data) for offset, _ in file.pending)

    def power_cut(self, random: Random) -> None:
        """Lose, tear or keep everything that is not durable, as ``random`` draws."""
        found: dict[str, File] = {}
        for name in sorted(self._names.keys() | self._synced.keys()):
            old, new = self._synced.get(name), self._names.get(name)
            file = new if old is new or random.random() < 0.5 else old
            if file is not None:
                found[name] = file
        for file in {id(file): file for file in found.values()}.values():  # Once, whatever names it has.
            file.lose(random)
        self._names, self._synced = found, dict(found)

    def rot(self, random: Random) -> bool:
        """Silently flip one bit of one file; return False when every file is empty."""
        names = [name for name in self.names("") if self._names[name].data]
        if not names:
            return False
        file = self._names[random.choice(names)]
        place, bit = random.randrange(len(file.data)), 1 << random.randrange(8)
        file.data[place] ^= bit
        self.rotten.append((file, place, bit))
        return True

    def mend(self) -> None:
        """Undo all rot, as an operator who restores the files from an intact copy."""
        for file, place, bit in self.rotten:
            if place < len(file.data):
                file.data[place] ^= bit
        self.rotten = []


def sealed(value: object) -> bytes:
    """Return ``value`` as JSON with its digest in front."""
    data = canonical(value)
    return hashlib.sha256(data).digest()[:SEAL_BYTES] + data


def unsealed(name: str, data: bytes) -> Any:
    """Return the value that ``sealed`` was given; raise ``Damaged`` with the file's name when the digest differs."""
    if hashlib.sha256(data[SEAL_BYTES:]).digest()[:SEAL_BYTES] != data[:SEAL_BYTES]:
        raise Damaged(f"{name} is damaged")
    return json.loads(data[SEAL_BYTES:])


class Died(Exception):
    """Raised to end a process in the middle of an action; the rest of the action does not happen."""


class Process:
    """A simulated process; ``deliver`` is the only way to run an action in it."""

    def __init__(self, heap: Heap, on_death: Callable[[], None]) -> None:
        self.heap = heap
        self.alive = True
        self.frozen = False
        """Whether it is stopped as by SIGSTOP: actions are queued until ``thaw``, and none is lost."""
        self._inside = False
        self._backlog: list[Callable[[], None]] = []
        self._on_death = on_death

    def deliver(self, action: Callable[[], None]) -> None:
        """Run ``action`` in this process: now, after the thaw when it is frozen, never when it is dead.

        An action that another action delivers is part of that one: if the process dies in it, both end there.
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

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Run ``action`` in this process in ``delay_ns``."""
        self.heap.after(delay_ns, lambda: self.deliver(action))

    def freeze(self, for_ns: int) -> None:
        """Stop for ``for_ns``."""
        self.frozen = True
        self.heap.after(for_ns, self.thaw)

    def thaw(self) -> None:
        """Continue, running the queued actions first."""
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
    """The lease's state.  ``last`` is the number of the holder's newest change; older ones are ignored."""

    heap: Heap = field(repr=False)
    ttl_ns: int
    standing: Standing | None = None
    renewed_ns: int = 0
    last: int = 0

    def acquire(self, claim: Claim) -> int | str | None:
        """Take the lease: return the new epoch, None while another holds it, or the reason why the claim is refused."""
        if (why := refusal(self.standing, claim, "here")) is not None:
            return why
        held = self.standing is not None and self.standing.holder != claim.name
        if held and self.heap.now_ns < self.renewed_ns + self.ttl_ns:
            return None
        self.standing = next_standing(self.standing, claim)
        self.renewed_ns, self.last = self.heap.now_ns, 0
        return self.standing.epoch

    def change(self, epoch: int, number: int, heir: str | None = None) -> bool:
        """Name the heir or, where ``heir`` is None, renew for another ``ttl_ns``; return False when another leads."""
        assert self.standing is not None
        if epoch == self.standing.epoch and number > self.last:
            self.last = number
            if heir is None:
                self.renewed_ns = self.heap.now_ns
            else:
                self.standing = replace(self.standing, heir=heir)
        return epoch == self.standing.epoch


def ask(link: Link, process: Process, request: Callable[[Reply], None], answered: Reply, deadline_ns: int) -> None:
    """Run ``request`` at the other end of ``link``; it may reply through its argument.

    Runs ``answered`` once, with the reply or, after ``deadline_ns``, with None, unless ``process`` dies.
    """
    waiting = [True]

    def settle(answer: object) -> None:
        if waiting:
            waiting.clear()
            answered(answer)

    def reply(answer: object) -> None:
        link.send(Direction.DOWN, lambda: process.deliver(lambda: settle(answer)))

    link.send(Direction.UP, lambda: request(reply))
    process.after(deadline_ns, lambda: settle(None))


class LeaseLine:
    """One machine's connection to the lease."""

    def __init__(self, lease: Lease, link: Link) -> None:
        self.lease, self.link = lease, link
        self.machine = 1
        """Changes when the machine is lost: messages that the old machine sent are dropped."""

    def ask(self, process: Process, request: Callable[[Lease], object], answered: Reply) -> None:
        """As the function ``ask``, with the lease; the request is dropped if this machine is lost before it arrives."""
        machine = self.machine

        def receive(reply: Reply) -> None:
            if machine == self.machine:
                reply(request(self.lease))

        ask(self.link, process, receive, answered, self.lease.ttl_ns // 4)


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """How a run's standby follows, the links between the three machines, and how long the lease lasts."""

    between: Weather
    to_lease: Weather
    mode: str = "sync"
    ttl_ns: int = 2000 * MILLISECOND_NS
    timeout_ns: int = 2000 * MILLISECOND_NS
    alive_ns: int = 500 * MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """The settings of this run's syncer: its rules, its speed, and how often it takes a snapshot."""

    options: OuterOptions
    rule: OuterRule
    merge_ns: int = 0
    fail_per_mille: int = 0
    """The share of outer steps whose result is not finite, in thousandths."""
    snapshot_records: int = 50
    health: HealthOptions = field(default_factory=HealthOptions)
    replication: ReplicationPlan | None = None
    """How a standby follows; None: no standby and no lease."""
    conserving: bool = False
    """Whether no fault of this run discards progress and the outer step is the plain mean."""
