"""The lease of a simulated run: one object somewhere else, which both syncers reach over links of their own.

Who may take it, and whether its holder leads at this moment, is decided in ``sync/leadership``.

The leading syncer's end of replication, whose decisions are made in ``sync/replication``.  A standby gets what is
durable here, read from the disk again: a snapshot first where it has nothing, then the journal's units byte for byte,
each frame with the payloads that it names.


A standby as a process of the simulator: a second folder that follows the first, and a machine that is warm.

What comes is laid down as the syncer did: a payload before the frame that names it, the frame synced and marked before
it is acknowledged.  Then the records are carried out, so that every version is computed here as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from diloco.sim.checkers import Violation
from diloco.sim.outer_disk import journal_name, payloads_in
from diloco.sim.world import MILLISECOND_NS, Damaged, Died, Direction, Heap, JoinReply, Process, Weather
from diloco.sync.effects import TellFate
from diloco.sync.events import UpdateArrived
from diloco.sync.journal import FRAME, HEADER, MARK, chain_after, decode_records, units
from diloco.sync.leadership import (
    RETRY_SHARE,
    Change,
    Claim,
    Leadership,
    LeaseLostError,
    Standing,
    next_standing,
    refusal,
)
from diloco.sync.replication import Place, Replication

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


class LeaseHolder:
    """Makes the changes at the lease that ``Leadership`` asks for, one at a time."""

    def __init__(self, line: LeaseLine, epoch: int, sent_ns: int) -> None:
        """``sent_ns``: when the lease was asked for."""
        self.epoch = epoch
        self.machine = Leadership(epoch, line.lease.ttl_ns, sent_ns)
        self._line, self._heap = line, line.lease.heap
        self._number = 0
        self._busy = False

    def start(self, process: OuterProcess) -> None:
        """Begin to renew."""
        self._process = process
        self._later()

    def wanting(self) -> str | None:
        """As ``Leadership.wanting`` now; the process ends where nothing may ever be told again."""
        try:
            return self.machine.wanting(self._heap.now_ns)
        except LeaseLostError as error:
            raise Died(str(error)) from error

    def heir_is(self, name: str) -> str | None:
        """As ``Leadership.heir_is``; another is taken out at once."""
        why = self.machine.heir_is(name)
        if why is not None:
            self._step()
        return why

    def name_heir(self, name: str) -> None:
        """As ``Leadership.name_heir``; it is written down at once."""
        self.machine.name_heir(name)
        self._step()

    def _later(self) -> None:
        self._heap.at(self.machine.due_ns, lambda: self._process.deliver(self._step))

    def _step(self) -> None:
        change = None if self._busy else self.machine.next_change(self._heap.now_ns)
        if change is not None:
            self._busy = True
            self._number += 1
            number = self._number
            self._line.ask(
                self._process,
                lambda lease: lease.change(self.epoch, number, change.heir),
                lambda held: self._answered(change, held is True),
                self._missed,
            )

    def _answered(self, change: Change, held: bool) -> None:
        self._busy = False
        self.machine.changed(change, held=held)
        self.wanting()
        if change.heir is None:
            self._later()
        self._step()
        self._process.go_on()

    def _missed(self) -> None:
        self._busy = False
        self.machine.missed(self._heap.now_ns, "no answer")
        self._later()


def take_lease(
    process: Process,
    line: LeaseLine,
    name: str,
    taken: Callable[[LeaseHolder], None],
    refused: Callable[[str], None],
    *,
    by_itself: bool,
) -> None:
    """Ask for the lease again and again until it is taken; ``refused`` hears why it is not to be had, each time."""
    heap, ttl_ns = line.lease.heap, line.lease.ttl_ns
    sent_ns, claim = heap.now_ns, Claim(name, 0, 1, anew=True, by_itself=by_itself)

    def again() -> None:
        heap.after(
            int(ttl_ns * RETRY_SHARE),
            lambda: process.deliver(lambda: take_lease(process, line, name, taken, refused, by_itself=by_itself)),
        )

    def answered(answer: object) -> None:
        if isinstance(answer, int):
            taken(LeaseHolder(line, answer, sent_ns))
            return
        if isinstance(answer, str):
            refused(answer)
        if process.alive:
            again()

    line.ask(process, lambda lease: lease.acquire(claim), answered, again)


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
class GoAway:
    """The standby's journal is not one that this one goes on from: it needs an empty folder."""


Part = Begin | Unit | GoAway | None
"""None: there is nothing new."""


class Replicator:
    """The leading syncer's end: serves one standby, and tells ``Replication`` what it hears."""

    def __init__(self, process: OuterProcess, plan: ReplicationPlan, *, detached: bool) -> None:
        self.process, self.plan = process, plan
        end, now_ns = process.disk.end(), process.heap.now_ns
        self.machine = Replication(plan.mode, plan.timeout_ns, end, now_ns, detached=detached)
        self._at: Place = (0, 0)

    # --- the decision loop's side --------------------------------------------------------------------------------

    def wanting(self, end: Place) -> str | None:
        """Why nothing may be told yet of the turn that ends there."""
        if end > self.machine.durable:
            self.pump()
        why, heir = self.machine.may_tell(end, self.process.heap.now_ns)
        leadership = self.process.leadership
        return leadership.heir_is(heir) if why is None and leadership is not None else why

    def follows(self) -> bool:
        """Whether a standby is heard."""
        return self.machine.away_ns(self.process.heap.now_ns) is None

    def caught_up(self) -> bool:
        """Whether the standby had everything of late, is waited for, and may inherit."""
        leadership = self.process.leadership
        heir = leadership is not None and leadership.machine.has_heir(self.machine.standby)
        return heir and not self.machine.detached and self.follows()

    # --- a standby's side ----------------------------------------------------------------------------------------

    def follow(self, stream: Stream, chain: str, segment: int) -> None:
        """Serve a standby from where it is, or send it away."""
        place = self._find(segment, chain) if segment else (0, 0)
        if place is None:
            self._send(stream, GoAway())
            return
        begin = Begin(False, segment) if segment else self._anew()
        self._at = place if segment else (begin.segment, 0)
        self.machine.followed(stream, stream.name, place, self.process.heap.now_ns)
        self._send(stream, begin)
        self.pump()
        self._keep_alive(stream)

    def heard(self, stream: Stream, place: Place) -> None:
        """The standby has everything up to ``place``."""
        attach, heir = self.machine.heard(stream, place, self.process.heap.now_ns)
        if attach:
            self.process.attach(stream.name)
        if heir and self.process.leadership is not None:
            self.process.leadership.name_heir(stream.name)
        self.process.go_on()

    def gone(self, stream: Stream) -> None:
        """The stream has ended."""
        if self.machine.gone(stream):
            self.process.go_on()

    def pump(self) -> None:
        """Send everything durable that was not sent yet."""
        stream, disk = self.machine.follower, self.process.disk
        while isinstance(stream, Stream) and self._at < (durable := disk.end()):
            segment, at = self._at
            last, end = durable
            try:
                data = disk.storage.read(journal_name(segment))
            except Damaged:
                self._send(stream, GoAway())
                self.gone(stream)
                return
            for unit in units(data[:end] if segment == last else data, at):
                if unit.kind != MARK:
                    payloads = tuple(self._named_in(unit.body, at)) if unit.kind == FRAME else ()
                    self._send(stream, Unit(unit.kind, unit.chain, data[at : unit.end], (segment, unit.end), payloads))
                at = unit.end
            self._at = (segment, at) if segment == last else (segment + 1, 0)

    def _anew(self) -> Begin:
        """For a standby that has nothing."""
        storage = self.process.disk.storage
        name = storage.names("snapshot-")[-1]
        facts = self.process.disk.facts(name)
        payloads = tuple(self._payloads(sorted(payloads_in(facts["state"]))))
        return Begin(True, int(str(facts["segment"])), (name, storage.read(name)), payloads)

    def _find(self, segment: int, chain: str) -> Place | None:
        storage, name = self.process.disk.storage, journal_name(segment)
        if name in storage.names("journal-"):
            for unit in units(storage.read(name)):
                if unit.kind != MARK and unit.chain.hex() == chain:
                    return segment, unit.end
        return None

    def _named_in(self, body: bytes, at: int) -> Iterator[tuple[str, bytes]]:
        events = [record.event for record in decode_records(body, at)]
        return self._payloads([event.payload for event in events if isinstance(event, UpdateArrived) and event.payload])

    def _payloads(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        storage = self.process.disk.storage
        for name in names:
            # One that is not there any more was refused: as long as a frame is kept, what it took in is.
            if storage.names(f"spool/{name}"):
                yield name, storage.read(f"spool/{name}")

    def _keep_alive(self, stream: Stream) -> None:
        """Say something every now and then for as long as it is served."""

        def again() -> None:
            if self.machine.follower is stream:
                self._send(stream, None)
                self._keep_alive(stream)

        self.process.heap.after(self.plan.alive_ns, lambda: self.process.deliver(again))

    def _send(self, stream: Stream, part: Part) -> None:
        stream.send(part, lambda: self.process.deliver(lambda: self.gone(stream)))


PAUSE_NS = 500 * MILLISECOND_NS


class Stream:
    """One attempt to follow: its parts come in order, and once."""

    def __init__(self, name: str, link: Link, process: StandbyProcess) -> None:
        self.name, self.link, self._process = name, link, process
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
        self._place: Place = (0, 0)
        self.replayer: Replayer | None = None if disk.is_new() else disk.recover()

    def start(self, taken: Callable[[LeaseHolder], None]) -> None:
        """Follow, and take over as the heir of a syncer that fell silent: then ``taken`` is called."""
        self.deliver(self._follow)
        self.deliver(lambda: take_lease(self, self._line, self.name, taken, lambda why: None, by_itself=True))

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
            case None:
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
        self.replayer = self.disk.recover()

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
