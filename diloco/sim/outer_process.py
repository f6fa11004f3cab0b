"""The syncer as a process of the simulator: its loop, the outer machine, leases, and effects carried out in order.

The loop takes one turn at a time: it handles everything that has arrived.  An update's payload is durable before its
event; a turn's records are made durable together before its first effect is carried out.  Then the turn may have to
wait for the standby or the lease (``syncer/core``: ``settle``), and everything else waits behind it.  The process can
be made to die at each instant between these steps.

A standby gets what is durable here, read from the disk again (``Replicator``): first a snapshot if its folder is empty,
then the journal's units byte for byte, each frame with the payloads that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from diloco.sim.checkers import Checkers, accepted
from diloco.sim.outer_disk import CrashPoint, OuterDisk, digest, journal_name, payload_name, payloads_in, restored
from diloco.sim.world import (
    MILLISECOND_NS,
    Begin,
    Damaged,
    Died,
    GoAway,
    Heap,
    LeaseLine,
    Link,
    OuterPlan,
    Process,
    Pulled,
    Reply,
    Stream,
    Unit,
    join_answered,
    sealed,
)
from diloco.sync.admission import admit
from diloco.sync.effects import (
    AnnounceFinal,
    AnswerDone,
    AnswerJoin,
    AnswerPush,
    AnswerUnits,
    AskToConfirm,
    DropSite,
    MarkFinal,
    OuterEffect,
    PublishVersion,
    StartOuterStep,
    TellFate,
)
from diloco.sync.events import (
    DeadlinePassed,
    FateTold,
    FinalAnnounced,
    JoinRequested,
    LineageBegan,
    Outcome,
    OuterEvent,
    OuterStepDone,
    OuterStepFailed,
    Reason,
    SiteEvicted,
    SiteLeft,
    StandbyAttached,
    StandbyDetached,
    SyncerStarted,
    UnitsAsked,
    UpdateArrived,
)
from diloco.sync.fates import known_already
from diloco.sync.journal import (
    FRAME,
    MARK,
    Record,
    decode_records,
    digest_effects,
    encode_frame,
    encode_records,
    units,
)
from diloco.sync.leadership import RETRY_SHARE, Change, Claim, Leadership, LeaseLostError, Place, Replication
from diloco.sync.members import Leases
from diloco.sync.state import Phase, Status

if TYPE_CHECKING:
    from diloco.sim.world import Part, ReplicationPlan, Value
    from diloco.sync.events import LearnerEvent
    from diloco.sync.progress import UnitAsk

HELD_AFTER_NS = 500 * MILLISECOND_NS
"""Once a turn has waited for so long, new requests from outside are dropped instead of queued behind it."""
RETRY_NS = 100 * MILLISECOND_NS
RESTART_NS = 300 * MILLISECOND_NS
INBOX_MAX = 256
Tell = Callable[["LearnerEvent | DropSite"], None]
"""Sends a small event down a site's stream; a lost message breaks the stream."""


@dataclass(slots=True)
class Turn:
    """``decided`` are the records, each with its effects; ``answers`` are the replies to read requests.

    ``chain`` is the chain value of the turn's frame in the journal, and ``place`` is where the durable frame ends; both
    are None where nothing was decided.
    """

    began_ns: int
    decided: list[tuple[Record, Sequence[OuterEffect]]] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    chain: bytes | None = None
    place: Place | None = None


Term = tuple[int, int]
"""The epoch of a lease that was taken, and when the request for it was sent."""


class LeaseHolder:
    """Makes the lease changes that ``Leadership`` asks for, one at a time."""

    def __init__(self, process: OuterProcess, line: LeaseLine, term: Term) -> None:
        self.epoch, self.lease = term[0], line.lease
        self.machine = Leadership(self.epoch, line.lease.ttl_ns, term[1])
        self._process, self._line, self._heap = process, line, line.lease.heap
        self._number = 0
        self._busy = False
        self._later()

    def wanting(self) -> str | None:
        """As ``Leadership.wanting`` now; the process dies where the lease is lost."""
        try:
            return self.machine.wanting(self._heap.now_ns)
        except LeaseLostError as error:
            raise Died(str(error)) from error

    def heir_is(self, name: str) -> str | None:
        """As ``Leadership.heir_is``; begins at once to remove another heir."""
        why = self.machine.heir_is(name)
        if why is not None:
            self._step()
        return why

    def name_heir(self, name: str) -> None:
        """As ``Leadership.name_heir``; begins at once to write the name."""
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
                lambda held: self._answered(change, held),
            )

    def _answered(self, change: Change, held: object) -> None:
        self._busy = False
        if held is None:
            self.machine.missed(self._heap.now_ns, "no answer")
            self._later()
            return
        self.machine.changed(change, held=held is True)
        self.wanting()
        if change.heir is None:
            self._later()
        self._step()
        self._process.go_on()


def take_lease(
    process: Process,
    line: LeaseLine,
    name: str,
    taken: Callable[[Term], None],
    refused: Callable[[], None] | None = None,
) -> None:
    """Request the lease until it is granted; a standby, which gives no ``refused``, requests it by itself."""
    sent_ns, claim = process.heap.now_ns, Claim(name, 0, 1, anew=True, by_itself=refused is None)

    def answered(answer: object) -> None:
        if isinstance(answer, int):
            taken((answer, sent_ns))
        elif isinstance(answer, str) and refused is not None:
            refused()
        else:
            again = partial(take_lease, process, line, name, taken, refused)
            process.after(int(line.lease.ttl_ns * RETRY_SHARE), again)

    line.ask(process, lambda lease: lease.acquire(claim), answered)


@dataclass(slots=True)
class Seat:
    """One machine: its folder and its process.  ``up``: whether the supervisor starts a process here."""

    name: str
    disk: OuterDisk
    leads: bool
    """Whether the supervisor starts a syncer here, not a standby."""
    line: LeaseLine | None = None
    folders: int = 1
    process: Process | None = None
    up: bool = True
    power: bool = False
    """Whether the next death is by power cut."""
    restart_ns: int = RESTART_NS

    def folder(self) -> str:
        """Return the folder's name in the lease; a new empty folder gets a new name."""
        return f"{self.name}{self.folders}"


@dataclass(eq=False)
class Machines:
    """The machines of one syncer, and what the processes on them and the sites share."""

    heap: Heap
    plan: OuterPlan
    checkers: Checkers
    seats: list[Seat] = field(default_factory=list)
    between: Link | None = None
    untold: dict[bytes, Turn] = field(default_factory=dict)
    """By chain, turns that a dead process may have made durable but did not tell; the next recovery finds out which
    are on the disk."""

    def died(self, seat: Seat, process: Process) -> None:
        """Handle the death of a process on ``seat``."""
        raise NotImplementedError


class OuterProcess(Process):
    """One life of a leading syncer.  The constructor recovers the disk, or raises ``Damaged`` when it cannot.

    Requests are queued, and each turn takes those that have arrived through all of its stages.
    """

    def __init__(self, machines: Machines, seat: Seat, term: Term | None, *, promoted: bool) -> None:
        """``term``: that of its lease.  ``promoted``: it was a standby until now, and has no standby itself."""
        super().__init__(machines.heap, lambda: machines.died(seat, self))
        self.disk, self.plan, self.checkers = seat.disk, machines.plan, machines.checkers
        self.final: MarkFinal | None = None
        self._turn: Turn | None = None
        self._inbox: list[Callable[[], None]] = []
        self._retrying = False
        self._streams: dict[str, tuple[int, Tell]] = {}
        """The stream of each site, with the incarnation that reads it."""
        self._calls: dict[int, Reply] = {}
        self._call = 0
        self._armed_ns: int | None = None
        self._records = 0
        self._untold = machines.untold
        self.disk.doom = None
        self.replayer = self.disk.recover()
        self.machine = self.replayer.machine
        self.leadership = LeaseHolder(self, seat.line, term) if seat.line is not None and term is not None else None
        written = self._untold.pop(self.disk.chain, None)
        if written is not None:  # The last process wrote this turn and did not tell it.
            self._book(written)
        self.checkers.recovered(self.machine)
        if promoted:
            self.checkers.stands_alone()
        self._offset_ns = self.machine.state.now_ns - self.heap.now_ns
        self.leases = Leases(self.plan.options.site_timeout_ns)
        for name, site in sorted(self.machine.state.sites.items()):
            if site.status in (Status.LIVE, Status.SILENT):
                self.leases.watch(name, self.now_ns(), silent=site.status is Status.SILENT)
        self._promoted = promoted
        self.replicator: Replicator | None = None
        if self.plan.replication is not None:
            alone = promoted or self.machine.state.detached
            self.replicator = Replicator(self, self.plan.replication, detached=alone)

    def start(self, lineage: int = 0) -> None:
        """Begin to lead; the machine issues again the work that was under way.

        On a restored disk a new ``lineage`` begins: its newest values become the next versions; the momentum is lost.
        """
        if lineage:
            made = self.replayer.versions = restored(self.replayer.versions)
            self.checkers.restored(lineage, [kept[max(kept)] for kept in made])
            digests = tuple(digest(kept[max(kept)].published) for kept in made)
            self.own(lambda: self._apply(LineageBegan(lineage, digests, "a backup was restored")))
        epoch = self.leadership.epoch if self.leadership is not None else self.machine.state.epoch + 1
        state = self.machine.state
        away_ns = max(0, self.heap.now_ns - state.now_ns - state.away_ns)
        started = SyncerStarted(epoch, self.plan.health, away_ns, self.plan.options.sites_max)
        self.own(lambda: self._apply(started))
        if self._promoted and not self.machine.state.detached:
            self.own(lambda: self.order(StandbyDetached))

    def now_ns(self) -> int:
        """Return the machine's own time, which stands still while no process is alive."""
        return self.heap.now_ns + self._offset_ns

    def _book(self, turn: Turn) -> None:
        """Report a turn that is on the disk to the checkers."""
        for record, effects in turn.decided:
            self.checkers.journalled(record.at_ns, record.event, effects)

    # --- turns -------------------------------------------------------------------------------------------------

    def ask(self, action: Callable[[], None]) -> None:
        """Take a request from outside: run it now or after the waiting turn; drop it if that has waited too long."""
        self.deliver(lambda: self._take(action, from_outside=True))

    def own(self, action: Callable[[], None]) -> None:
        """Take an action that this process itself has begun; it is queued, and never dropped."""
        self.deliver(lambda: self._take(action))

    def _take(self, action: Callable[[], None], *, from_outside: bool = False) -> None:
        turn = self._turn
        held = len(self._inbox) >= INBOX_MAX or (turn and self.heap.now_ns - turn.began_ns > HELD_AFTER_NS)
        if not (from_outside and held):
            self._inbox.append(action)
            if turn is None:
                self._work()

    def _work(self) -> None:
        while self._turn is None and self._inbox:
            turn = self._turn = Turn(self.heap.now_ns)
            arrived, self._inbox = self._inbox, []
            for action in arrived:
                action()
            if turn.decided:
                records = encode_records([record for record, _ in turn.decided])
                frame, turn.chain = encode_frame(records, self.disk.chain)
                self._untold[turn.chain] = turn
                turn.place = self.disk.write(frame, turn.chain)
            self._finish(turn)

    def _say(self, answer: Callable[[], None]) -> None:
        """Add the answer to a read request to the turn."""
        assert self._turn is not None
        self._turn.answers.append(answer)

    def go_on(self) -> None:
        """Check the waiting turn again; if it need not wait any longer, finish it and take the next one."""
        if self._turn is not None:
            self._finish(self._turn)
            self._work()

    def _retry(self) -> None:
        self._retrying = False
        self.go_on()

    def _apply(self, event: OuterEvent) -> None:
        """Give ``event`` to the machine and add the record and its effects to the turn."""
        assert self._turn is not None
        effects = self.machine.handle(event, self.now_ns())
        if isinstance(event, UpdateArrived) and accepted(event, effects) is None:
            event = replace(event, payload="")  # Not kept; the same update may still be accepted another time.
        self._turn.decided.append((Record(self.now_ns(), event, digest_effects(effects)), effects))

    def _must_wait(self, turn: Turn) -> bool:
        if turn.place is not None and self.replicator is not None and self.replicator.wanting(turn.place) is not None:
            return True
        return self.leadership is not None and self.leadership.wanting() is not None

    def _finish(self, turn: Turn) -> None:
        """Carry out the turn's effects and send its answers, unless it must wait."""
        if self._must_wait(turn):
            if not self._retrying:
                self._retrying = True
                self.after(RETRY_NS, self._retry)
            return
        self._untold.pop(turn.chain or b"", None)
        self._book(turn)
        all_effects = [effect for _, effects in turn.decided for effect in effects]
        self.checkers.told(self.machine, turn.chain, all_effects)
        if turn.chain is not None and self.leadership is not None:
            standing = self.leadership.lease.standing  # The lease's real content, whatever this process believes.
            if standing is not None and standing.epoch == self.leadership.epoch and standing.heir:
                self.checkers.told_with_an_heir(turn.chain)
        for record, effects in turn.decided:
            for effect in effects:
                self._carry_out(effect)
                if len(effects) > 1:
                    self.disk.reached(CrashPoint.AMONG_EFFECTS.value)
            if isinstance(record.event, StandbyAttached) and self.replicator is not None:
                self.replicator.machine.attached()
        for answer in turn.answers:
            answer()
        self._turn = None
        if self.heap.now_ns - turn.began_ns > self.leases.timeout_ns // 2:
            self.leases.renew(self.now_ns())  # This process itself waited and could hear no site.
        self._records += len(turn.decided)
        if self._records >= self.plan.snapshot_records:
            self.snapshot()
        self._arm()

    def snapshot(self) -> None:
        """Write a snapshot of the machine's state and versions, so that the next recovery replays less."""
        self._records = 0
        self.disk.snapshot(self.machine, self.replayer.versions)
        if self.replicator is not None:
            self.replicator.pump()

    def _arm(self) -> None:
        """Plan a check of the deadlines at the instant of the next one."""
        wanted = [self.machine.next_deadline_ns(), self.leases.next_deadline_ns()]
        ahead = min((instant for instant in wanted if instant is not None), default=None)
        if ahead is not None and (self._armed_ns is None or ahead < self._armed_ns):
            self._armed_ns = ahead
            self.heap.at(ahead - self._offset_ns, lambda: self.own(lambda: self._look(ahead)))

    def _look(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
        for silent in self.leases.expired(self.now_ns()):
            self._apply(silent)
        deadline_ns = self.machine.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= self.now_ns():
            self._apply(DeadlinePassed())

    def _heard(self, site: str, incarnation: int) -> None:
        member = self.machine.state.sites.get(site)
        if member is not None and member.incarnation == incarnation:
            event = self.leases.heard(site, self.now_ns())
            if event is not None:
                self._apply(event)

    def _expect(self, reply: Reply) -> int:
        self._call += 1
        self._calls[self._call] = reply
        return self._call

    # --- requests of sites and operators -------------------------------------------------------------------------

    def join(self, site: str, process: str, ticket: int, tell: Tell, reply: Reply) -> None:
        """Handle a site's join; ``tell`` is the site's stream, once it is accepted."""

        def answered(answer: object) -> None:
            if isinstance(answer, AnswerJoin) and answer.reason is None:
                self.leases.watch(site, self.now_ns())
                self._streams[site] = (answer.incarnation, tell)
                reply(join_answered(self.machine, answer))
                if self.final is not None and self.over():
                    tell(FinalAnnounced(self.final.ending, self.final.versions))
            else:
                reply(answer.reason if isinstance(answer, AnswerJoin) else answer)

        self._apply(JoinRequested(self._expect(answered), site, process, ticket))

    def push(self, update: UpdateArrived, value: Value, transfer_ns: int, reply: Reply) -> None:
        """Judge an update by its header; the payload, which takes ``transfer_ns``, follows only if that is accepted."""
        self._heard(update.site, update.incarnation)
        header = (update.site, update.incarnation, update.fragment, update.sequence, update.base_version, update.digest)
        verdict = admit(self.machine, *header)
        if verdict.outcome is not Outcome.ACCEPTED:
            self._say(lambda: reply(verdict))
        else:
            self.heap.after(transfer_ns, lambda: self.own(lambda: self._commit(update, value, reply)))

    def _commit(self, update: UpdateArrived, value: Value, reply: Reply) -> None:
        """The whole payload has arrived: spool it, then let the machine decide."""
        payload = payload_name(update.site, update.fragment, update.sequence, update.digest)
        call = self._expect(lambda answer: self._answer_push(answer, payload, reply))
        self.disk.keep_payload(payload, sealed(value))
        self._heard(update.site, update.incarnation)
        self._apply(replace(update, call=call, payload=payload))

    def _answer_push(self, answer: object, payload: str, reply: Reply) -> None:
        assert isinstance(answer, AnswerPush)
        refused = answer.outcome is Outcome.REFUSED
        if answer.outcome is Outcome.RETRY or (refused and answer.reason is not Reason.FORGOTTEN):
            released = {name for _, name in self.disk.released}
            if payload not in released | payloads_in(self.machine.snapshot()):
                # No other attempt at the same update was accepted meanwhile.
                self.disk.storage.remove(f"spool/{payload}")
        elif refused or answer.fate is not None:
            self.disk.release(payload)  # Decided before: only a replay could still need it.
        reply(answer)

    def pull(self, site: str, fragment: int, have_version: int, reply: Reply) -> None:
        """Answer with the newest version and the site's fates, or None when there is none newer."""
        newest = self.machine.state.fragments[fragment].version
        kept = self.replayer.versions[fragment]
        member = self.machine.state.sites.get(site)
        answer = None
        if newest > have_version and member is not None:
            fates = tuple(member.lines[fragment].fates)
            steps = range(have_version + 1, newest + 1)
            if have_version >= 0 and all(version in kept for version in steps):
                answer = Pulled(newest, False, tuple(kept[version].link for version in steps), fates)
            else:
                answer = Pulled(newest, True, (kept[newest].published,), fates)
        self._say(lambda: reply(answer))

    def report(self, site: str, incarnation: int, ask: UnitAsk | None, reply: Reply) -> None:
        """Handle a heartbeat and its request for units; the answer says whether this process has the site's stream."""
        self._heard(site, incarnation)
        known = self._streams.get(site, (-1, None))[0] == incarnation
        if ask is None or not known:
            self._say(lambda: reply((known, None)))
            return
        asked = UnitsAsked(0, site, incarnation, ask.known, ask.begin, ask.upto, ask.floor, ask.again)
        told = known_already(self.machine, asked)
        if told is not None:
            self._say(lambda: reply((known, told)))
        else:
            self._apply(replace(asked, call=self._expect(lambda answer: reply((known, answer)))))

    def leave(self, site: str, incarnation: int, reply: Reply) -> None:
        """Handle a site's leave."""
        self._apply(SiteLeft(self._expect(reply), site, incarnation))
        member = self.machine.state.sites.get(site)
        if member is not None and member.status is Status.LEFT:
            self.leases.forget(site)

    def order(self, request: Callable[[int], OuterEvent]) -> None:
        """Handle an operator's request; ``request`` returns its event for a call number."""
        event = request(self._expect(lambda _: None))
        self._apply(event)
        if isinstance(event, SiteEvicted):
            self.leases.forget(event.site)

    def detach(self) -> None:
        """Stop waiting for the standby, for an operator; takes effect at once, also while a turn waits."""
        if self.replicator is not None and self.replicator.machine.detach():
            self.checkers.stands_alone()
            self.own(lambda: self.order(StandbyDetached))
            self.go_on()

    def attach(self, standby: str) -> None:
        """Wait for the standby again, which now has everything."""
        self.own(lambda: self._apply(StandbyAttached(standby)))

    def over(self) -> bool:
        """Return whether the run, or this syncer's part of it, has ended."""
        return self.machine.state.phase is Phase.ENDED and self._turn is None

    # --- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: OuterEffect) -> None:
        match effect:
            case AnswerJoin() | AskToConfirm() | AnswerPush() | AnswerDone() | AnswerUnits():
                self._calls.pop(effect.call)(effect)
            case StartOuterStep():
                self.heap.after(self.plan.merge_ns, lambda: self.own(lambda: self._step(effect)))
            case PublishVersion():
                self._tell_all(self.machine.announced(effect.fragment, effect.version))
            case TellFate():
                if effect.site in self._streams:
                    self._streams[effect.site][1](FateTold(effect.fate))
                self.disk.decided(effect.site, effect.fate)
            case AnnounceFinal():
                self._tell_all(FinalAnnounced(effect.ending))
            case MarkFinal():
                self.final = effect
                self._tell_all(FinalAnnounced(effect.ending, effect.versions))
            case DropSite():
                incarnation, dropped = self._streams.get(effect.site, (-1, None))
                if dropped is not None and incarnation == effect.incarnation:
                    del self._streams[effect.site]
                    dropped(effect)

    def _tell_all(self, event: LearnerEvent) -> None:
        for site in sorted(self._streams):
            self._streams[site][1](event)

    def _step(self, effect: StartOuterStep) -> None:
        """Compute an outer step; its inputs are on the disk, so it can be computed again.

        Whether it fails is a function of its updates, so that it fails again after a crash.
        """
        seen = sum(sum(update.digest.encode()) for part in effect.contributions for update in part.updates)
        if seen % 1000 < self.plan.fail_per_mille:
            self._apply(OuterStepFailed(effect.fragment, effect.version))
            return
        try:
            made = self.replayer.made_again(effect)
        except Damaged as error:
            raise Died(str(error)) from error  # The next process fails at the same payload and reports it.
        self.checkers.stored(effect, made)
        self.disk.reached(CrashPoint.STEP_MADE.value)
        self.replayer.store(effect.fragment, effect.version, made)
        self._apply(OuterStepDone(effect.fragment, effect.version, digest(made.published), digest(made.link)))


class Replicator:
    """The leading syncer's end of replication: serves one standby, and reports its progress to ``Replication``."""

    def __init__(self, process: OuterProcess, plan: ReplicationPlan, *, detached: bool) -> None:
        self.process, self.plan = process, plan
        end, now_ns = process.disk.end(), process.heap.now_ns
        self.machine = Replication(plan.mode, plan.timeout_ns, end, now_ns, detached=detached)
        self._at: Place = (0, 0)

    # --- the decision loop's side --------------------------------------------------------------------------------

    def wanting(self, end: Place) -> str | None:
        """Return why the turn that ends at ``end`` must not be published yet; None if it may."""
        if end > self.machine.durable:
            self.pump()
        why, heir = self.machine.may_tell(end, self.process.heap.now_ns)
        leadership = self.process.leadership
        return leadership.heir_is(heir) if why is None and leadership is not None else why

    def follows(self) -> bool:
        """Return whether a standby follows and is not silent."""
        return self.machine.away_ns(self.process.heap.now_ns) is None

    def caught_up(self) -> bool:
        """Return whether the standby follows, is attached, and is the lease's heir."""
        leadership = self.process.leadership
        heir = leadership is not None and leadership.machine.has_heir(self.machine.standby)
        return heir and not self.machine.detached and self.follows()

    # --- a standby's side ----------------------------------------------------------------------------------------

    def follow(self, stream: Stream, chain: str, segment: int) -> None:
        """Serve a standby from its place in the journal; ``GoAway`` where this journal does not continue its own."""
        if stream.served:
            return
        stream.served = True
        disk, name = self.process.disk, journal_name(segment)
        begin, place = Begin(segment), (0, 0)
        if not segment:  # The standby is empty: it gets the newest snapshot and its payloads.
            snapshot = disk.storage.names("snapshot-")[-1]
            facts = disk.facts(snapshot)
            payloads = self._payloads(sorted(payloads_in(facts["state"])))
            begin = Begin(facts["segment"], (snapshot, disk.storage.read(snapshot)), payloads)
            self._at = (begin.segment, 0)
        else:
            written = units(disk.storage.read(name)) if name in disk.storage.names("journal-") else ()
            end = next((unit.end for unit in written if unit.kind != MARK and unit.chain.hex() == chain), None)
            if end is None:
                self._send(stream, GoAway())
                return
            self._at = place = (segment, end)
        self.machine.followed(stream, stream.name, place, self.process.heap.now_ns)
        self._send(stream, begin)
        self.pump()
        self._keep_alive(stream)

    def heard(self, stream: Stream, place: Place) -> None:
        """Handle an acknowledgement: the standby has everything up to ``place``."""
        attach, heir = self.machine.heard(stream, place, self.process.heap.now_ns)
        if attach:
            self.process.attach(stream.name)
        if heir and self.process.leadership is not None:
            self.process.leadership.name_heir(stream.name)
        self.process.go_on()

    def gone(self, stream: Stream) -> None:
        """Handle the end of a stream."""
        if self.machine.gone(stream):
            self.process.go_on()

    def pump(self) -> None:
        """Send everything durable that is not sent yet."""
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
                    events = [each.event for each in decode_records(unit.body, at)] if unit.kind == FRAME else []
                    named = [event.payload for event in events if isinstance(event, UpdateArrived) and event.payload]
                    raw, end_of = data[at : unit.end], (segment, unit.end)
                    self._send(stream, Unit(unit.chain, raw, end_of, self._payloads(named)))
                at = unit.end
            self._at = (segment, at) if segment == last else (segment + 1, 0)

    def _payloads(self, names: list[str]) -> tuple[tuple[str, bytes], ...]:
        storage = self.process.disk.storage
        # A missing payload is of a refused update: accepted payloads are kept as long as their frame.
        return tuple((name, storage.read(f"spool/{name}")) for name in names if storage.names(f"spool/{name}"))

    def _keep_alive(self, stream: Stream) -> None:
        """Send a keep-alive every ``alive_ns`` for as long as the stream is served."""

        def again() -> None:
            if self.machine.follower is stream:
                self._send(stream, None)
                self._keep_alive(stream)

        self.process.after(self.plan.alive_ns, again)

    def _send(self, stream: Stream, part: Part) -> None:
        stream.send(part, lambda: self.process.deliver(lambda: self.gone(stream)))
