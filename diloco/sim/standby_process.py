"""The lease of a simulated run: one object somewhere else, which both syncers reach over links of their own.

Its rules are the product's: the epoch only rises, by compare-and-swap; who wants it and is neither the last holder nor
its heir is refused; it may be taken by another once it was not renewed for as long as it lasts.


Whether a simulated syncer leads at this moment, and how a process comes to lead (``syncer/lease`` in short).

The leading syncer's end of replication in the simulator (``syncer/replicator`` in short).

A standby gets what is durable here, read from the disk again: a snapshot first where it has nothing, then the journal's
units byte for byte, each frame with the payloads that it names.  What must wait for it, and when the lease may name it
as heir, are the product's rules.


A standby as a process of the simulator: a second folder that follows the first, and a machine that is warm.

What comes is laid down as the syncer did: a payload before the frame that names it, the frame synced and marked before
it is acknowledged.  Then the records are carried out, so that every version is computed here as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim.checkers import Violation
from diloco.sim.outer_disk import Place, journal_name, payloads_in
from diloco.sim.world import MILLISECOND_NS, Damaged, Died, Direction, Heap, JoinReply, Process, Weather
from diloco.sync.effects import TellFate
from diloco.sync.events import UpdateArrived
from diloco.sync.journal import FRAME, HEADER, MARK, chain_after, decode_records, units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.sim.checkers import Checkers
    from diloco.sim.outer_disk import OuterDisk, Replayer
    from diloco.sim.outer_process import CrashPoint, OuterPlan, OuterProcess
    from diloco.sim.world import Feed, Link


@dataclass(slots=True)
class Lease:
    """What it says.  ``last`` is the number of the holder's last change: one that comes late changes nothing."""

    heap: Heap = field(repr=False)
    ttl_ns: int
    epoch: int = 0
    holder: str = ""
    heir: str = ""
    renewed_ns: int = 0
    last: int = 0

    def acquire(self, name: str, *, by_itself: bool) -> int | str | None:
        """Take it: the new epoch, None while another holds it, or why it is not to be had."""
        if self.epoch and name != self.holder:
            if name != self.heir:
                return f"{name} is neither {self.holder} nor its heir"
            if self.heap.now_ns < self.renewed_ns + self.ttl_ns:
                return None
        elif by_itself and not self.epoch:
            return f"{name} is a standby, and nobody has led yet"
        self.epoch, self.holder, self.heir = self.epoch + 1, name, ""
        self.renewed_ns, self.last = self.heap.now_ns, 0
        return self.epoch

    def renew(self, epoch: int, number: int) -> bool:
        """Hold it for another ``ttl_ns``; False when it is another's."""
        if epoch == self.epoch and number > self.last:
            self.renewed_ns, self.last = self.heap.now_ns, number
        return epoch == self.epoch

    def mark(self, epoch: int, number: int, heir: str) -> bool:
        """Name the heir; False when it is another's."""
        if epoch == self.epoch and number > self.last:
            self.heir, self.last = heir, number
        return epoch == self.epoch


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


VALID_TENTHS = 6
"""Of the lease's time, from the instant at which the last confirmed renewal was sent."""
RENEW_SHARE = 3
RETRY_SHARE = 10


class Leadership:
    """The guard of one process that has taken the lease."""

    def __init__(self, line: LeaseLine, epoch: int, sent_ns: int) -> None:
        """``sent_ns``: when the lease was asked for."""
        self.epoch = epoch
        self._line, self._heap = line, line.lease.heap
        self._ttl_ns = line.lease.ttl_ns
        self._confirmed_ns = sent_ns
        self._due_ns = sent_ns + self._ttl_ns // RENEW_SHARE
        self._number = 0
        self._busy = False
        self._wish = ""
        self._marked: str | None = ""
        self._possible = ""
        self.lost = False

    def start(self, process: OuterProcess) -> None:
        """Begin to renew."""
        self._process = process
        self._later()

    # --- asked before anything is told ---------------------------------------------------------------------------

    def wanting(self) -> bool:
        """Whether nothing may be told now; the process ends where nothing may ever be again."""
        if self.lost:
            raise Died(f"the lease of epoch {self.epoch} is lost")
        return self._heap.now_ns - self._confirmed_ns >= self._ttl_ns * VALID_TENTHS // 10

    def may_inherit(self, name: str) -> bool:
        """Whether somebody else than ``name`` may stand there as the heir; who does is taken out."""
        if self._wish not in ("", name):
            self._wish = ""
        if self._possible in ("", name):
            return False
        self._step()
        return True

    def name_heir(self, name: str) -> None:
        """The standby ``name`` has everything, and gets everything from now on."""
        self._wish = name
        self._step()

    def is_heir(self, name: str) -> bool:
        """Whether it is certain that the lease names ``name``, and that this is to stay so."""
        return self._wish == self._marked == self._possible == name

    # --- beside it -----------------------------------------------------------------------------------------------

    def _later(self) -> None:
        due_ns = self._due_ns
        self._heap.at(due_ns, lambda: self._process.deliver(lambda: self._step() if due_ns == self._due_ns else None))

    def _step(self) -> None:
        """Renew if it is time, else write down the heir if another is wished for: one thing at a time."""
        if self._busy or self.lost:
            return
        heir = self._wish if self._possible in ("", self._wish) else ""  # Never one name right after another.
        if self._heap.now_ns >= self._due_ns:
            self._change(lambda number: self._renew(number))
        elif not heir == self._marked == self._possible:
            self._possible, self._marked = heir or self._possible, None
            self._change(lambda number: self._mark(number, heir))

    def _change(self, change: Callable[[int], None]) -> None:
        self._busy = True
        self._number += 1
        change(self._number)

    def _renew(self, number: int) -> None:
        sent_ns = self._heap.now_ns

        def renewed() -> None:
            self._confirmed_ns, self._due_ns = sent_ns, sent_ns + self._ttl_ns // RENEW_SHARE
            self._later()

        self._line.ask(
            self._process,
            lambda lease: lease.renew(self.epoch, number),
            lambda held: self._answered(held is True, renewed),
            self._missed,
        )

    def _mark(self, number: int, heir: str) -> None:
        def marked() -> None:
            self._possible = self._marked = heir

        self._line.ask(
            self._process,
            lambda lease: lease.mark(self.epoch, number, heir),
            lambda held: self._answered(held is True, marked),
            self._missed,
        )

    def _answered(self, held: bool, then: Callable[[], None]) -> None:
        self._busy = False
        if not held:
            self.lost = True
            raise Died(f"the lease of epoch {self.epoch} is lost")
        then()
        self._step()
        self._process.go_on()

    def _missed(self) -> None:
        self._busy = False
        self._due_ns = self._heap.now_ns + self._ttl_ns // RETRY_SHARE
        self._later()


def claim(
    process: Process,
    line: LeaseLine,
    name: str,
    taken: Callable[[Leadership], None],
    refused: Callable[[str], None],
    *,
    by_itself: bool,
) -> None:
    """Ask for the lease again and again until it is taken; ``refused`` hears why it is not to be had, each time."""
    heap, ttl_ns = line.lease.heap, line.lease.ttl_ns
    sent_ns = heap.now_ns

    def again() -> None:
        heap.after(
            ttl_ns // RETRY_SHARE,
            lambda: process.deliver(lambda: claim(process, line, name, taken, refused, by_itself=by_itself)),
        )

    def answered(answer: object) -> None:
        if isinstance(answer, int):
            taken(Leadership(line, answer, sent_ns))
            return
        if isinstance(answer, str):
            refused(answer)
        if process.alive:
            again()

    line.ask(process, lambda lease: lease.acquire(name, by_itself=by_itself), answered, again)


MODES = ("sync", "async")
START: Place = (0, 0)
NEAR_NS = 1000 * MILLISECOND_NS
"""A detached standby that is no further behind is waited for again."""


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
class Begin:
    """The standby is to begin here.  ``snapshot`` and ``payloads`` are the files for one that has nothing."""

    anew: bool
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
class Alive:
    """There is nothing new."""


@dataclass(frozen=True, slots=True)
class GoAway:
    """The standby's journal is not one that this one goes on from: it needs an empty folder."""


Part = Begin | Unit | Alive | GoAway


class Replicator:
    """What waits for a standby, and who may inherit."""

    def __init__(self, process: OuterProcess, plan: ReplicationPlan, *, detached: bool) -> None:
        self.process, self.plan = process, plan
        self.detached = detached
        self.durable = process.disk.end()
        self._acked = START
        self._acker = ""
        self._attaching = False
        self._heard_ns = process.heap.now_ns
        self._follower: Follower | None = None
        self._goal, self._goal_ns = START, self._heard_ns

    # --- the decision loop's side --------------------------------------------------------------------------------

    def wanting(self, end: Place) -> bool:
        """Whether nothing may be told yet of the turn that ends there."""
        if end > self.durable:
            self.durable = end
            if self._follower is not None:
                self._follower.pump()
        if self.detached:
            return self._may_inherit("")
        if self._acked >= end:
            return self._may_inherit(self._acker)
        if self.follows() or self.plan.mode == "sync":
            return True
        return self._may_inherit("")

    def _may_inherit(self, name: str) -> bool:
        leadership = self.process.leadership
        return leadership is not None and leadership.may_inherit(name)

    def follows(self) -> bool:
        """Whether a standby is heard."""
        return self._follower is not None and self.process.heap.now_ns - self._heard_ns <= self.plan.timeout_ns

    def rotated(self) -> None:
        """The journal goes on in another segment."""
        self.durable = self.process.disk.end()
        if self._follower is not None:
            self._follower.pump()

    def attached(self) -> None:
        """The record that says so is durable here and there: from now on the standby is waited for."""
        self.detached = self._attaching = False

    def caught_up(self) -> bool:
        """Whether the standby had everything of late, is waited for, and may inherit."""
        leadership = self.process.leadership
        heir = leadership is not None and leadership.is_heir(self._acker)
        return heir and not self.detached and self.follows()

    # --- a standby's side ----------------------------------------------------------------------------------------

    def follow(self, stream: Stream, chain: str, segment: int) -> None:
        """Serve a standby from where it is."""
        follower = Follower(self, stream)
        if not follower.begin(segment, chain):
            return
        self._follower, self._attaching = follower, False
        self._heard_ns = self.process.heap.now_ns
        self._acked, self._acker = follower.place, stream.name
        self._goal, self._goal_ns = self.durable, self._heard_ns
        follower.pump()
        follower.keep_alive()

    def heard(self, stream: Stream, place: Place) -> None:
        """The standby has everything up to ``place``."""
        if self._follower is None or self._follower.stream is not stream:
            return
        self._heard_ns = self.process.heap.now_ns
        self._acked = max(self._acked, place)
        near, caught_up = self._is_near(), self._acked >= self.durable
        if self.detached:
            if (near or caught_up) and not self._attaching:
                self._attaching = True
                self.process.attach(stream.name)
        elif caught_up and self.process.leadership is not None:
            self.process.leadership.name_heir(stream.name)
        self.process.go_on()

    def _is_near(self) -> bool:
        """Whether what was durable a short time ago is there now."""
        if self._acked < self._goal:
            return False
        near = self._heard_ns - self._goal_ns <= NEAR_NS
        self._goal, self._goal_ns = self.durable, self._heard_ns
        return near

    def gone(self, stream: Stream) -> None:
        """The stream has ended."""
        if self._follower is not None and self._follower.stream is stream:
            self._follower = None
            self._attaching = False
            self.process.go_on()

    def serves(self, follower: Follower) -> bool:
        """Whether this is the one that is being served."""
        return self._follower is follower


class Follower:
    """One standby being served."""

    def __init__(self, replicator: Replicator, stream: Stream) -> None:
        self.stream = stream
        self._replicator = replicator
        self._disk: OuterDisk = replicator.process.disk
        self.place = START
        self._at = START
        self._sent = 0

    def begin(self, segment: int, chain: str) -> bool:
        """Find where to begin, and say so; False when the standby must go away."""
        if segment == 0:
            name = self._disk.storage.names("snapshot-")[-1]
            facts = self._disk.facts(name)
            self._at = (int(str(facts["segment"])), 0)
            payloads = tuple(self._payloads(sorted(payloads_in(facts["state"]))))
            self._send(Begin(True, self._at[0], (name, self._disk.storage.read(name)), payloads))
            return True
        found = self._find(segment, chain)
        if found is None:
            self._send(GoAway())
            return False
        self.place = self._at = found
        self._send(Begin(False, segment))
        return True

    def _find(self, segment: int, chain: str) -> Place | None:
        name = journal_name(segment)
        if name in self._disk.storage.names("journal-"):
            for unit in units(self._disk.storage.read(name)):
                if unit.kind != MARK and unit.chain.hex() == chain:
                    return segment, unit.end
        return None

    def pump(self) -> None:
        """Send everything durable that was not sent yet."""
        while self._at < self._replicator.durable:
            segment, at = self._at
            last, end = self._replicator.durable
            try:
                data = self._disk.storage.read(journal_name(segment))
            except Damaged:
                self._send(GoAway())
                self._replicator.gone(self.stream)
                return
            for unit in units(data[:end] if segment == last else data, at):
                if unit.kind != MARK:
                    payloads = tuple(self._named_in(unit.body, at)) if unit.kind == FRAME else ()
                    self._send(Unit(unit.kind, unit.chain, data[at : unit.end], (segment, unit.end), payloads))
                at = unit.end
            self._at = (segment, at) if segment == last else (segment + 1, 0)
            if segment == last:
                return

    def _named_in(self, body: bytes, at: int) -> Iterator[tuple[str, bytes]]:
        events = [record.event for record in decode_records(body, at)]
        return self._payloads([event.payload for event in events if isinstance(event, UpdateArrived) and event.payload])

    def _payloads(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            # One that is not there any more was refused: as long as a frame is kept, what it took in is.
            if self._disk.storage.names(f"spool/{name}"):
                yield name, self._disk.storage.read(f"spool/{name}")

    def keep_alive(self) -> None:
        """Say something every now and then for as long as it is served."""
        process = self._replicator.process

        def again() -> None:
            if self._replicator.serves(self):
                self._send(Alive())
                self.keep_alive()

        process.heap.after(self._replicator.plan.alive_ns, lambda: process.deliver(again))

    def _send(self, part: Part) -> None:
        number, stream, process = self._sent, self.stream, self._replicator.process
        self._sent += 1

        def broken() -> None:
            stream.broken()
            process.deliver(lambda: self._replicator.gone(stream))

        stream.link.send(Direction.DOWN, lambda: stream.arrived(number, part), lost=broken)


PAUSE_NS = 500 * MILLISECOND_NS


class Stream:
    """One attempt to follow: its parts come in order, and once."""

    def __init__(self, name: str, link: Link, process: StandbyProcess) -> None:
        self.name, self.link, self._process = name, link, process
        self.served = False
        """Whether a syncer has begun to: a request that the network has doubled is the same stream."""
        self._expected = 0
        self._early: dict[int, Part] = {}

    def arrived(self, number: int, part: Part) -> None:
        """A part is here, perhaps before its turn, perhaps again."""
        self._process.deliver(lambda: self._take(number, part))

    def _take(self, number: int, part: Part) -> None:
        if number >= self._expected:
            self._early[number] = part
        while self._expected in self._early:
            self._process.take(self, self._early.pop(self._expected))
            self._expected += 1

    def broken(self) -> None:
        """The connection is gone."""
        self._process.deliver(lambda: self._process.lost(self))


class StandbyProcess(Process):
    """One life of a standby.  Making it is the recovery of what is there."""

    def __init__(
        self,
        heap: Heap,
        name: str,
        disk: OuterDisk,
        plan: OuterPlan,
        checkers: Checkers,
        link: Link,
        line: LeaseLine,
        primary: Callable[[], OuterProcess | None],
        on_death: Callable[[], None],
    ) -> None:
        """``name`` is the folder's, by which the lease knows it; ``link`` leads to the other machine."""
        super().__init__(on_death)
        assert plan.replication is not None
        self.heap, self.name, self.disk, self.plan, self.checkers = heap, name, disk, plan, checkers
        self.replication = plan.replication
        self.doom: CrashPoint | None = None
        self.useless = False
        """Whether this folder cannot follow any more: an operator gives it an empty one."""
        self._link, self._line, self._primary = link, line, primary
        self._stream: Stream | None = None
        self._began_at: Begin | None = None
        self._heard_ns = heap.now_ns
        self._place: Place = START
        self.replayer: Replayer | None = None if disk.is_new() else disk.recover().replayer

    def start(self, taken: Callable[[Leadership], None]) -> None:
        """Follow, and take over as the heir of a syncer that fell silent: then ``taken`` is called."""
        self.deliver(self._follow)
        self.deliver(lambda: claim(self, self._line, self.name, taken, lambda why: None, by_itself=True))

    def ask(self, action: Callable[[], None]) -> None:
        """As the syncer's."""
        self.deliver(action)

    def join(
        self, site: str, process: str, ticket: int, feed: Callable[[int], Feed], reply: Callable[[object], None]
    ) -> None:
        """Not here."""
        del site, process, ticket, feed
        reply(JoinReply(None, None))

    # --- following -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        stream = self._stream = Stream(self.name, self._link, self)
        self._heard_ns = self.heap.now_ns
        segment, chain = 0, ""
        if self.replayer is not None:
            segment, chain = self.disk.segment, self.disk.chain.hex()
            self.checkers.resumed(self.disk.storage, self.disk.journal_name(), self.disk.chain)

        def receive() -> None:
            primary = self._primary()
            if primary is not None:
                primary.deliver(lambda: self._asked(primary, stream, chain, segment))
            else:
                self._link.send(Direction.DOWN, stream.broken)  # Nobody listens there.

        self._link.send(Direction.UP, receive, lost=stream.broken)
        self._watch(stream)

    def _asked(self, primary: OuterProcess, stream: Stream, chain: str, segment: int) -> None:
        if primary.replicator is not None and not stream.served:
            stream.served = True
            primary.replicator.follow(stream, chain, segment)

    def _watch(self, stream: Stream) -> None:
        def look() -> None:
            if self._stream is stream:
                if self.heap.now_ns - self._heard_ns > self.replication.timeout_ns:
                    self.lost(stream)
                else:
                    self._watch(stream)

        self.heap.after(self.replication.timeout_ns // 2, lambda: self.deliver(look))

    def lost(self, stream: Stream) -> None:
        """The syncer is not heard any more: try again."""
        if self._stream is stream:
            self._stream = None
            self.heap.after(PAUSE_NS, lambda: self.deliver(self._follow))

    def take(self, stream: Stream, part: Part) -> None:
        """One part of the stream, in order."""
        if self._stream is not stream:
            return
        self._heard_ns = self.heap.now_ns
        match part:
            case GoAway():
                self.useless = True
                raise Died("an empty folder is needed")
            case Begin():
                self._began_at = part if part.anew else None
            case Unit():
                self._unit(part, stream)
            case Alive():
                self._ack(stream)

    def _ack(self, stream: Stream) -> None:
        place = self._place

        def receive() -> None:
            primary = self._primary()
            if primary is not None:
                primary.deliver(lambda: self._acked(primary, stream, place))

        self._link.send(Direction.UP, receive, lost=stream.broken)

    def _acked(self, primary: OuterProcess, stream: Stream, place: Place) -> None:
        if primary.replicator is not None:
            primary.replicator.heard(stream, place)

    def _unit(self, part: Unit, stream: Stream) -> None:
        """One unit of the journal: durable when it is acknowledged, carried out afterwards."""
        if self._began_at is not None:
            assert part.kind == HEADER
            self._begin(self._began_at, part.raw)
            self._began_at = None
        elif part.kind == HEADER:
            assert self.replayer is not None
            self.disk.snapshot(self.replayer.machine, self.replayer.versions, self._reached)
        else:
            (unit,) = units(part.raw)
            assert chain_after(self.disk.chain, unit.body) == unit.chain, "a frame does not go on from the journal here"
            for name, data in part.payloads:
                self.disk.keep_file(name, data, self._reached)
            self.disk.write(part.raw, part.chain, self._reached)
            self.checkers.replicated(self.disk.storage, self.disk.journal_name(), part)
        assert self.disk.chain == part.chain, "the journal here is another one"
        self._place = part.end
        self._ack(stream)
        if part.kind != HEADER:
            self._carry_out(part.raw)

    def _begin(self, begin: Begin, header: bytes) -> None:
        assert begin.snapshot is not None
        self.disk.begin(begin.segment, header, begin.snapshot, begin.payloads, self._reached)
        self.replayer = self.disk.recover().replayer

    def _carry_out(self, raw: bytes) -> None:
        assert self.replayer is not None
        (unit,) = units(raw)
        for record in decode_records(unit.body, 0):
            try:
                effects = self.replayer.apply(record)
            except Damaged as error:
                raise Violation("replicated", f"the standby computes something else: {error}") from error
            for effect in effects:
                if isinstance(effect, TellFate):
                    self.disk.decided(effect.site, effect.fate)

    def _reached(self, where: str) -> None:
        if self.doom is not None and self.doom.value == where:
            raise Died(where)
