"""The decision loop of the simulated syncer: one turn at a time, and nothing is told before the turn is safe.

A turn is what all that has arrived leads to.  Its records are made durable together; then it may have to wait, for the
standby or for the lease (``syncer/core``: ``settle``), and everything else waits behind it.


The syncer as a process of the simulator: the outer machine, leases, a disk, and effects carried out in order.

An event is safe on the disk before its first effect is carried out, an update before its event.  The process can be
told to die at each of the instants between.


The leading syncer's end of replication.  A standby gets what is durable here, read from the disk again: a snapshot
first where it has nothing, then the journal's units byte for byte, each frame with the payloads that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from diloco.sim.outer_disk import digest, journal_name, payload_name, payloads_in, restored
from diloco.sim.world import (
    MILLISECOND_NS,
    Begin,
    Damaged,
    Died,
    Feed,
    GoAway,
    JoinReply,
    Process,
    Pulled,
    Push,
    PushReply,
    Stream,
    Unit,
)
from diloco.sync.admission import fastest_step_ns
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
    DrainRequested,
    FateTold,
    FinalAnnounced,
    JoinAnswered,
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
    UpdateAdmitted,
    UpdateArrived,
    UpdateWithdrawn,
    VersionPublished,
)
from diloco.sync.fates import known_already
from diloco.sync.journal import FRAME, MARK, Record, decode_records, digest_effects, units
from diloco.sync.leadership import RETRY_SHARE, Change, Claim, Leadership, LeaseLostError
from diloco.sync.members import Leases
from diloco.sync.replication import Place, Replication
from diloco.sync.state import Phase, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.sim.checkers import Checkers
    from diloco.sim.outer_disk import OuterDisk
    from diloco.sim.world import Heap, LeaseLine, OuterPlan, Part, ReplicationPlan
    from diloco.sync.site_units import UnitAsk

HELD_AFTER_NS = 500 * MILLISECOND_NS
"""Of a turn that waits for something; from then on nobody waits with it."""
RETRY_NS = 100 * MILLISECOND_NS
INBOX_MAX = 256


@dataclass(slots=True)
class Turn:
    """``decided`` are the records with what the machine said to each, ``answers`` what is said to who only asked.

    ``chain`` is the value of its frame in the journal, and ``place`` is where that ends once it is durable; None where
    nothing was decided.
    """

    began_ns: int
    decided: list[tuple[Record, Sequence[OuterEffect]]] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    chain: bytes | None = None
    place: Place | None = None

    def effects(self) -> list[OuterEffect]:
        """All of them, in order."""
        return [effect for _, effects in self.decided for effect in effects]


class Loop(Process):
    """What every turn goes through."""

    def __init__(self, heap: Heap, on_death: Callable[[], None]) -> None:
        super().__init__(on_death)
        self.heap = heap
        self._turn: Turn | None = None
        self._inbox: list[Callable[[], None]] = []
        self._retrying = False

    def _write(self, turn: Turn) -> None:
        """Make what was decided durable."""
        raise NotImplementedError

    def _must_wait(self, turn: Turn) -> bool:
        """Whether nothing of it may be told yet."""
        raise NotImplementedError

    def _tell(self, turn: Turn) -> None:
        """Carry out its effects."""
        raise NotImplementedError

    def _told(self, turn: Turn) -> None:
        """It is over."""
        raise NotImplementedError

    def ask(self, action: Callable[[], None]) -> None:
        """Somebody outside wants something: now, or after the turn that waits; nothing where that waits for long."""
        self.deliver(lambda: self._asked(action))

    def own(self, action: Callable[[], None]) -> None:
        """The same for what this process has begun itself: it waits for as long as it takes."""
        self.deliver(lambda: self._take(action))

    def _asked(self, action: Callable[[], None]) -> None:
        held = self._turn is not None and self.heap.now_ns - self._turn.began_ns > HELD_AFTER_NS
        if not held and len(self._inbox) < INBOX_MAX:
            self._take(action)

    def _take(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        if self._turn is None:
            self._work()

    def _work(self) -> None:
        while self._turn is None and self._inbox:
            turn = self._turn = Turn(self.heap.now_ns)
            arrived, self._inbox = self._inbox, []
            for action in arrived:
                action()
            if turn.decided:
                self._write(turn)
            self._finish(turn)

    def _say(self, answer: Callable[[], None]) -> None:
        """Answer who only asked, with the turn."""
        assert self._turn is not None
        self._turn.answers.append(answer)

    def go_on(self) -> None:
        """What a turn waits for may be there: tell what it has brought, and take the next."""
        if self._turn is not None:
            self._finish(self._turn)
            self._work()

    def _finish(self, turn: Turn) -> None:
        if not self._must_wait(turn):
            self._tell(turn)
            self._turn = None
            self._told(turn)
        elif not self._retrying:
            self._retrying = True
            self.heap.after(RETRY_NS, lambda: self.deliver(self._retry))

    def _retry(self) -> None:
        self._retrying = False
        self.go_on()

    def settled(self) -> bool:
        """Whether everything that was decided is told."""
        return self._turn is None


class LeaseHolder:
    """Makes the changes at the lease that ``Leadership`` asks for, one at a time."""

    def __init__(self, line: LeaseLine, epoch: int, sent_ns: int) -> None:
        """``sent_ns``: when the lease was asked for."""
        self.epoch = epoch
        self.machine = Leadership(epoch, line.lease.ttl_ns, sent_ns)
        self._line, self._heap = line, line.lease.heap
        self._number = 0
        self._busy = False

    def start(self, process: Loop) -> None:
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

    def names_an_heir(self) -> bool:
        """Whether the lease itself does, whatever this process believes."""
        standing = self._line.lease.standing
        return standing is not None and standing.epoch == self.epoch and standing.heir != ""

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


class CrashPoint(Enum):
    """Where in the handling of an event the syncer dies."""

    PAYLOAD_WRITTEN = "payload written"
    PAYLOAD_RENAMED = "payload renamed"
    BEFORE_WRITE = "before the record"
    TORN_WRITE = "in the record"
    AFTER_WRITE = "record written"
    AFTER_SYNC = "record synced"
    AMONG_EFFECTS = "among its effects"
    STEP_MADE = "outer step made"
    SNAPSHOT_WRITTEN = "snapshot written"
    SNAPSHOT_RENAMED = "snapshot renamed"
    SNAPSHOT_KEPT = "snapshot kept"


class OuterProcess(Loop):
    """One life of a syncer that leads.  Making it is the recovery; ``Damaged`` when the disk does not let it begin."""

    def __init__(
        self,
        heap: Heap,
        disk: OuterDisk,
        plan: OuterPlan,
        checkers: Checkers,
        untold: dict[bytes, Turn],
        on_death: Callable[[], None],
        leadership: LeaseHolder | None = None,
        *,
        promoted: bool = False,
    ) -> None:
        """``untold``: by their chains, turns that a process may have made durable and did not live to tell; only who
        reads a disk next knows whether one is there.  ``promoted``: it was a standby until now, and has none.
        """
        super().__init__(heap, on_death)
        self.disk, self.plan, self.checkers = disk, plan, checkers
        self.leadership = leadership
        self.doom: CrashPoint | None = None
        self.final: MarkFinal | None = None
        self.feeds: dict[str, Feed] = {}
        self._calls: dict[int, Callable[[object], None]] = {}
        self._joins: dict[int, Callable[[int], Feed]] = {}
        self._call = 0
        self._armed_ns: int | None = None
        self._records = 0
        self._untold = untold
        self.replayer = disk.recover()
        self.machine = self.replayer.machine
        self._settle_untold()
        checkers.recovered(self.machine)
        if promoted:
            checkers.stands_alone()
        self._offset_ns = self.machine.state.now_ns - heap.now_ns
        self.leases = Leases(plan.options.site_timeout_ns)
        for name, site in sorted(self.machine.state.sites.items()):
            if site.status in (Status.LIVE, Status.SILENT):
                self.leases.watch(name, self.now_ns(), silent=site.status is Status.SILENT)
        self._promoted = promoted
        self.replicator: Replicator | None = None
        if plan.replication is not None:
            alone = promoted or self.machine.state.detached
            self.replicator = Replicator(self, plan.replication, detached=alone)

    def start(self) -> None:
        """Take over: work that was under way is issued again."""
        if self.leadership is not None:
            self.leadership.start(self)
        epoch = self.leadership.epoch if self.leadership is not None else self.machine.state.epoch + 1
        state = self.machine.state
        away_ns = max(0, self.heap.now_ns - state.now_ns - state.away_ns)
        started = SyncerStarted(epoch, self.plan.health, away_ns, self.plan.options.sites_max)
        self.own(lambda: self._apply(started))
        if self._promoted and not self.machine.state.detached:
            self.own(self._detached)

    def begin_lineage(self, lineage: int) -> None:
        """The disk is a copy of before: its newest values become the next versions, and the momentum is lost."""
        made = restored(self.replayer.versions)
        self.checkers.restored(lineage, [kept[max(kept)] for kept in made])
        self.replayer.versions = made
        digests = tuple(digest(kept[max(kept)].published) for kept in made)
        self.own(lambda: self._apply(LineageBegan(lineage, digests, "a backup was restored")))

    def now_ns(self) -> int:
        """The machine's own time, which stands still while no process lives."""
        return self.heap.now_ns + self._offset_ns

    def _settle_untold(self) -> None:
        """A turn that the last process wrote and did not live to tell is either there or was never told."""
        turn = self._untold.pop(self.disk.chain, None)
        if turn is not None:
            self._book(turn)

    def _book(self, turn: Turn) -> None:
        for record, effects in turn.decided:
            self.checkers.outer(record.at_ns, record.event, effects, self.machine)

    # --- turns -------------------------------------------------------------------------------------------------

    def _write(self, turn: Turn) -> None:
        frame, turn.chain = self.disk.frame([record for record, _ in turn.decided])
        self._untold[turn.chain] = turn
        turn.place = self.disk.write(frame, turn.chain, self._reached)

    def _apply(self, event: OuterEvent) -> None:
        """Let the machine decide, as a part of the turn."""
        assert self._turn is not None
        effects = self.machine.handle(event, self.now_ns())
        if isinstance(event, UpdateArrived) and not any(
            isinstance(effect, AnswerPush) and effect.outcome is Outcome.ACCEPTED for effect in effects
        ):
            event = replace(event, payload="")  # Nobody keeps it, and the same one may be taken in another time.
        self._turn.decided.append((Record(self.now_ns(), event, digest_effects(effects)), effects))

    def _must_wait(self, turn: Turn) -> bool:
        if turn.place is not None and self.replicator is not None and self.replicator.wanting(turn.place) is not None:
            return True
        return self.leadership is not None and self.leadership.wanting() is not None

    def _tell(self, turn: Turn) -> None:
        self._untold.pop(turn.chain or b"", None)
        self._book(turn)
        self.checkers.told(self.machine, turn.chain, turn.effects())
        if turn.chain is not None and self.leadership is not None and self.leadership.names_an_heir():
            self.checkers.told_with_an_heir(turn.chain)
        for record, effects in turn.decided:
            for effect in effects:
                self._carry_out(effect)
                if len(effects) > 1:
                    self._reached(CrashPoint.AMONG_EFFECTS.value)
            if isinstance(record.event, StandbyAttached) and self.replicator is not None:
                self.replicator.machine.attached()
        for answer in turn.answers:
            answer()

    def _told(self, turn: Turn) -> None:
        if self.heap.now_ns - turn.began_ns > self.leases.timeout_ns // 2:
            self.leases.renew(self.now_ns())  # It was this process that waited; nobody could be heard.
        self._records += len(turn.decided)
        if self._records >= self.plan.snapshot_records:
            self.snapshot()
        self._arm()

    def _reached(self, where: str) -> None:
        if self.doom is not None and self.doom.value == where:
            raise Died(where)

    def snapshot(self) -> None:
        """Keep the machine's state and the versions, so that the next recovery replays less."""
        self._records = 0
        self.disk.snapshot(self.machine, self.replayer.versions, self._reached)
        if self.replicator is not None:
            self.replicator.pump()

    def _arm(self) -> None:
        """Plan to look at the deadlines again when the next one comes."""
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

    def _expect(self, reply: Callable[[object], None]) -> int:
        self._call += 1
        self._calls[self._call] = reply
        return self._call

    # --- what sites and operators ask ----------------------------------------------------------------------------

    def join(
        self, site: str, process: str, ticket: int, feed: Callable[[int], Feed], reply: Callable[[object], None]
    ) -> None:
        """Take a process in; ``feed`` makes its stream for the incarnation it gets."""
        call = self._expect(reply)
        self._joins[call] = feed
        self._apply(JoinRequested(call, site, process, ticket))

    def push(self, push: Push, reply: Callable[[object], None]) -> None:
        """Judge the header; the payload follows only when it may enter."""
        self._heard(push.site, push.incarnation)
        verdict = self.machine.admit(
            push.site, push.incarnation, push.fragment, push.sequence, push.base_version, push.digest
        )
        if verdict.outcome is not Outcome.ACCEPTED:
            self._say(lambda: reply(PushReply(verdict.outcome, verdict.reason, verdict.fate)))
        else:
            self.heap.after(push.transfer_ns, lambda: self.own(lambda: self._commit(push, reply)))

    def _commit(self, push: Push, reply: Callable[[object], None]) -> None:
        """The whole payload is here: spool it, then decide."""
        payload = payload_name(push.site, push.fragment, push.sequence, push.digest)
        call = self._expect(lambda answer: self._answer_push(answer, payload, reply))
        self.disk.keep_payload(payload, push.value, self._reached)
        self._heard(push.site, push.incarnation)
        self._apply(
            UpdateArrived(
                call,
                push.site,
                push.incarnation,
                push.fragment,
                push.sequence,
                push.base_version,
                push.tokens,
                push.steps,
                push.step_ns,
                push.cursor,
                push.digest,
                payload,
                "exact",
                push.finite,
                push.final,
                push.norm,
                push.cosine,
                spans=push.spans,
            )
        )

    def _answer_push(self, answer: object, payload: str, reply: Callable[[object], None]) -> None:
        assert isinstance(answer, PushReply)
        refused = answer.outcome is Outcome.REFUSED
        if answer.outcome is Outcome.RETRY or (refused and answer.reason is not Reason.FORGOTTEN):
            if payload not in payloads_in(self.machine.snapshot()) and not self.disk.is_decided(payload):
                self.disk.drop_payload(payload)  # No other attempt at the same update was taken in meanwhile.
        elif refused or answer.fate is not None:
            self.disk.release(payload)  # Decided long ago: only a replay could still want it.
        reply(answer)

    def pull(self, site: str, fragment: int, have_version: int, reply: Callable[[object], None]) -> None:
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

    def report(self, site: str, incarnation: int, ask: UnitAsk | None, reply: Callable[[object], None]) -> None:
        """A sign of life, and an ask for units; the answer says whether this process knows the sender's stream."""
        self._heard(site, incarnation)
        feed = self.feeds.get(site)
        known = feed is not None and feed.incarnation == incarnation
        if ask is None or not known:
            self._say(lambda: reply((known, None)))
            return
        asked = UnitsAsked(0, site, incarnation, ask.known, ask.begin, ask.upto, ask.floor, ask.again)
        told = known_already(self.plan.options, self.machine.state, asked)
        if told is not None:
            self._say(lambda: reply((known, told)))
        else:
            self._apply(replace(asked, call=self._expect(lambda answer: reply((known, answer)))))

    def leave(self, site: str, incarnation: int, reply: Callable[[object], None]) -> None:
        """A goodbye."""
        self._apply(SiteLeft(self._expect(reply), site, incarnation))
        member = self.machine.state.sites.get(site)
        if member is not None and member.status is Status.LEFT:
            self.leases.forget(site)

    def evict(self, site: str) -> None:
        """An operator puts a site out."""
        self._apply(SiteEvicted(self._expect(lambda _: None), site))
        self.leases.forget(site)

    def say(self, word: type[UpdateAdmitted] | type[UpdateWithdrawn], site: str, fragment: int, sequence: int) -> None:
        """An operator decides on an update."""
        self._apply(word(self._expect(lambda _: None), site, fragment, sequence))

    def drain(self) -> None:
        """An operator asks for a pause."""
        self._apply(DrainRequested(self._expect(lambda _: None)))

    def detach(self) -> None:
        """An operator says not to wait for the standby; to be called at once, also while a turn waits."""
        if self.replicator is not None and self.replicator.machine.detach():
            self.checkers.stands_alone()
            self.own(self._detached)
            self.go_on()

    def _detached(self) -> None:
        self._apply(StandbyDetached(self._expect(lambda _: None)))

    def attach(self, standby: str) -> None:
        """The standby has everything again."""
        self.own(lambda: self._apply(StandbyAttached(standby)))

    def over(self) -> bool:
        """Whether the run, or this part of it, has ended."""
        return self.machine.state.phase is Phase.ENDED and self.settled()

    # --- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: OuterEffect) -> None:
        state = self.machine.state
        match effect:
            case AnswerJoin():
                self._answer_join(effect)
            case AskToConfirm():
                del self._joins[effect.call]
                self._calls.pop(effect.call)(JoinReply(None, None, effect.ticket))
            case AnswerPush():
                self._calls.pop(effect.call)(PushReply(effect.outcome, effect.reason, effect.fate))
            case AnswerDone():
                self._calls.pop(effect.call)(effect.reason)
            case AnswerUnits():
                self._calls.pop(effect.call)(effect)
            case StartOuterStep():
                self.heap.after(self.plan.merge_ns, lambda: self.own(lambda: self._step(effect)))
            case PublishVersion():
                published = VersionPublished(
                    self.machine.state.epoch,
                    effect.fragment,
                    effect.version,
                    state.run_tokens(),
                    self.machine.progress_ppm(),
                    state.lineage,
                    fastest_step_ns(state, self.machine.attendance.live),
                )
                for _, feed in sorted(self.feeds.items()):
                    feed.tell(published)
            case TellFate():
                self._tell_fate(effect)
            case AnnounceFinal():
                for _, feed in sorted(self.feeds.items()):
                    feed.tell(FinalAnnounced(effect.ending))
            case MarkFinal():
                self.final = effect
            case DropSite():
                dropped = self.feeds.get(effect.site)
                if dropped is not None and dropped.incarnation == effect.incarnation:
                    del self.feeds[effect.site]
                    dropped.tell(effect)

    def _answer_join(self, effect: AnswerJoin) -> None:
        reply, feed = self._calls.pop(effect.call), self._joins.pop(effect.call)
        if effect.reason is not None:
            reply(JoinReply(None, effect.reason))
            return
        self.leases.watch(effect.site, self.now_ns())
        self.feeds[effect.site] = feed(effect.incarnation)
        reply(
            JoinReply(
                JoinAnswered(
                    self.machine.state.epoch,
                    effect.incarnation,
                    effect.standings,
                    self.machine.state.run_tokens(),
                    self.machine.progress_ppm(),
                    effect.ending,
                    self.machine.state.lineage,
                ),
                None,
            )
        )

    def _tell_fate(self, effect: TellFate) -> None:
        feed = self.feeds.get(effect.site)
        if feed is not None:
            feed.tell(FateTold(effect.fate))
        self.disk.decided(effect.site, effect.fate)

    def _step(self, effect: StartOuterStep) -> None:
        """Compute an outer step; what it is made of is on the disk, and so it can be computed again."""
        if self._fails(effect):
            self._apply(OuterStepFailed(effect.fragment, effect.version))
            return
        try:
            made = self.replayer.made_again(effect)
        except Damaged as error:
            raise Died(str(error)) from error  # The next process does not get past it either, and says so.
        self.checkers.stored(effect, made)
        self._reached(CrashPoint.STEP_MADE.value)
        self.replayer.store(effect.fragment, effect.version, made)
        self._apply(OuterStepDone(effect.fragment, effect.version, digest(made.published), digest(made.link)))

    def _fails(self, effect: StartOuterStep) -> bool:
        """A property of what is merged, so that the same step fails again after a crash."""
        seen = sum(sum(update.digest.encode()) for part in effect.contributions for update in part.updates)
        return seen % 1000 < self.plan.fail_per_mille


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
        begin = Begin(segment) if segment else self._anew()
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
        return Begin(int(str(facts["segment"])), (name, storage.read(name)), payloads)

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
