"""The syncer as a process of the simulator: the outer machine, leases, a disk, and effects carried out in order.

An event is safe on the disk before its first effect is carried out, an update before its event.  The process can be
told to die at each of the instants between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.messages import Feed, JoinReply, Pulled, Push, PushReply
from diloco.sim.outer_disk import Kept, digest, restored, store
from diloco.sim.process import Died, Process
from diloco.sim.storage import Damaged
from diloco.sim.values import OuterRule, Value
from diloco.sync.effects import (
    AnnounceFinal,
    AnswerDone,
    AnswerJoin,
    AnswerPush,
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
    SyncerStarted,
    UpdateAdmitted,
    UpdateArrived,
    UpdateWithdrawn,
    VersionPublished,
)
from diloco.sync.journal import Record, digest_effects
from diloco.sync.leases import Leases
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.state import Phase, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.checking import Checkers
    from diloco.sim.network import Heap
    from diloco.sim.outer_disk import OuterDisk, Versions
    from diloco.sync.effects import Contribution


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


class OuterProcess(Process):
    """One life of the syncer.  Making it is the recovery; ``Damaged`` when the disk does not let it begin."""

    def __init__(
        self, heap: Heap, disk: OuterDisk, plan: OuterPlan, checkers: Checkers, on_death: Callable[[], None]
    ) -> None:
        super().__init__(on_death)
        self.heap, self.disk, self.plan, self.checkers = heap, disk, plan, checkers
        self.doom: CrashPoint | None = None
        self.final: MarkFinal | None = None
        self.feeds: dict[str, Feed] = {}
        self._calls: dict[int, Callable[[object], None]] = {}
        self._joins: dict[int, Callable[[int], Feed]] = {}
        self._call = 0
        self._armed_ns: int | None = None
        self._records = 0
        found = disk.recover(self._again)
        self.machine, self.versions = found.machine, found.versions
        self._settle(found.last)
        checkers.recovered(self.machine)
        self._offset_ns = self.machine.state.now_ns - heap.now_ns
        self.leases = Leases(plan.options.site_timeout_ns)
        for name, site in sorted(self.machine.state.sites.items()):
            if site.status in (Status.LIVE, Status.SILENT):
                self.leases.watch(name, self.now_ns(), silent=site.status is Status.SILENT)

    def start(self) -> None:
        """Take over: work that was under way is issued again."""
        self.deliver(lambda: self._apply(SyncerStarted(self.machine.state.epoch + 1, self.plan.health)))

    def begin_lineage(self, lineage: int) -> None:
        """The disk is a copy of before: its newest values become the next versions, and the momentum is lost."""
        made = restored(self.versions)
        self.checkers.restored(lineage, [kept[max(kept)] for kept in made])
        self.versions[:] = made
        digests = tuple(digest(kept[max(kept)].published) for kept in made)
        self.deliver(lambda: self._apply(LineageBegan(lineage, digests, "a backup was restored")))

    def now_ns(self) -> int:
        """The machine's own time, which stands still while no process lives."""
        return self.heap.now_ns + self._offset_ns

    def _settle(self, last: Record | None) -> None:
        """A record that the last process wrote and did not live to sync is either there or was never told."""
        unsettled, self.disk.unsettled = self.disk.unsettled, None
        if unsettled is not None and unsettled[0] == last:
            record, effects = unsettled
            self.checkers.outer(record.at_ns, record.event, effects, self.machine)

    # --- events ------------------------------------------------------------------------------------------------

    def _apply(self, event: OuterEvent) -> None:
        now_ns = self.now_ns()
        effects = self.machine.handle(event, now_ns)
        record = Record(now_ns, event, digest_effects(effects))
        self.disk.unsettled = (record, effects)
        self.disk.write(record, self._reached)
        self.disk.unsettled = None
        self.checkers.outer(now_ns, event, effects, self.machine)
        for effect in effects:
            self._carry_out(effect)
            if len(effects) > 1:
                self._reached(CrashPoint.AMONG_EFFECTS.value)
        self._records += 1
        if self._records >= self.plan.snapshot_records:
            self.snapshot()
        self._arm()

    def _reached(self, where: str) -> None:
        if self.doom is not None and self.doom.value == where:
            raise Died(where)

    def snapshot(self) -> None:
        """Keep the machine's state and the versions, so that the next recovery replays less."""
        self._records = 0
        self.disk.snapshot(self.machine, self.versions, self._reached)

    def _arm(self) -> None:
        """Plan to look at the deadlines again when the next one comes."""
        wanted = [self.machine.next_deadline_ns(), self.leases.next_deadline_ns()]
        ahead = min((instant for instant in wanted if instant is not None), default=None)
        if ahead is not None and (self._armed_ns is None or ahead < self._armed_ns):
            self._armed_ns = ahead
            self.heap.at(ahead - self._offset_ns, lambda: self.deliver(lambda: self._look(ahead)))

    def _look(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
        for silent in self.leases.expired(self.now_ns()):
            self._apply(silent)
        deadline_ns = self.machine.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= self.now_ns():
            self._apply(DeadlinePassed())
        self._arm()

    def _heard(self, site: str, incarnation: int) -> None:
        member = self.machine.state.sites.get(site)
        if member is not None and member.incarnation == incarnation:
            event = self.leases.heard(site, self.now_ns())
            if event is not None:
                self._apply(event)
        self._arm()

    def _expect(self, reply: Callable[[object], None]) -> int:
        self._call += 1
        self._calls[self._call] = reply
        return self._call

    # --- what sites and operators ask ----------------------------------------------------------------------------

    def join(self, site: str, process: str, feed: Callable[[int], Feed], reply: Callable[[object], None]) -> None:
        """Take a process in; ``feed`` makes its stream for the incarnation it gets."""
        call = self._expect(reply)
        self._joins[call] = feed
        self._apply(JoinRequested(call, site, process))

    def push(self, push: Push, reply: Callable[[object], None]) -> None:
        """Judge the header; the payload follows only when it may enter."""
        self._heard(push.site, push.incarnation)
        verdict = self.machine.admit(
            push.site, push.incarnation, push.fragment, push.sequence, push.base_version, push.digest
        )
        if verdict.outcome is not Outcome.ACCEPTED:
            reply(PushReply(verdict.outcome, verdict.reason, verdict.fate))
        else:
            self.heap.after(push.transfer_ns, lambda: self.deliver(lambda: self._commit(push, reply)))

    def _commit(self, push: Push, reply: Callable[[object], None]) -> None:
        """The whole payload is here: spool it, then decide."""
        payload = _payload(push.site, push.fragment, push.sequence, push.digest)
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
            )
        )

    def _answer_push(self, answer: object, payload: str, reply: Callable[[object], None]) -> None:
        assert isinstance(answer, PushReply)
        refused = answer.outcome is Outcome.REFUSED
        if answer.outcome is Outcome.RETRY or (refused and answer.reason is not Reason.FORGOTTEN):
            self.disk.drop_payload(payload)
        elif refused or answer.fate is not None:
            self.disk.release(payload)  # Decided long ago: only a replay could still want it.
        reply(answer)

    def pull(self, site: str, fragment: int, have_version: int, reply: Callable[[object], None]) -> None:
        """Answer with the newest version and the site's fates, or None when there is none newer."""
        newest = self.machine.state.fragments[fragment].version
        kept = self.versions[fragment]
        member = self.machine.state.sites.get(site)
        if newest <= have_version or member is None:
            reply(None)
            return
        fates = tuple(member.lines[fragment].fates)
        steps = range(have_version + 1, newest + 1)
        if have_version >= 0 and all(version in kept for version in steps):
            reply(Pulled(newest, False, tuple(kept[version].link for version in steps), fates))
        else:
            reply(Pulled(newest, True, (kept[newest].published,), fates))

    def report(self, site: str, incarnation: int, reply: Callable[[object], None]) -> None:
        """A sign of life; the answer says whether this process knows the sender's stream."""
        self._heard(site, incarnation)
        feed = self.feeds.get(site)
        reply(feed is not None and feed.incarnation == incarnation)

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

    def over(self) -> bool:
        """Whether the run, or this part of it, has ended."""
        return self.machine.state.phase is Phase.ENDED

    # --- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: OuterEffect) -> None:
        state = self.machine.state
        match effect:
            case AnswerJoin():
                self._answer_join(effect)
            case AnswerPush():
                self._calls.pop(effect.call)(PushReply(effect.outcome, effect.reason, effect.fate))
            case AnswerDone():
                self._calls.pop(effect.call)(effect.reason)
            case StartOuterStep():
                self.heap.after(self.plan.merge_ns, lambda: self.deliver(lambda: self._step(effect)))
            case PublishVersion():
                published = VersionPublished(
                    self.machine.state.epoch,
                    effect.fragment,
                    effect.version,
                    state.run_tokens(),
                    self.machine.progress_ppm(),
                    state.lineage,
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
        fate = effect.fate
        self.disk.release(_payload(effect.site, fate.fragment, fate.sequence, fate.digest))

    def _step(self, effect: StartOuterStep) -> None:
        """Compute an outer step; what it is made of is on the disk, and so it can be computed again."""
        if self._fails(effect):
            self._apply(OuterStepFailed(effect.fragment, effect.version))
            return
        try:
            made = self._again(self.versions, effect)
        except Damaged as error:
            raise Died(str(error)) from error  # The next process does not get past it either, and says so.
        self.checkers.stored(effect, made)
        self._reached(CrashPoint.STEP_MADE.value)
        store(self.versions, effect.fragment, effect.version, made)
        self._apply(OuterStepDone(effect.fragment, effect.version, digest(made.published), digest(made.link)))

    def _again(self, versions: Versions, command: StartOuterStep) -> Kept:
        """The outer step ``command``, also long after it was computed for the first time."""
        contributions = [(part.weight, self._updates(part)) for part in command.contributions]
        return self.made(versions[command.fragment][command.version - 1], contributions)

    def _updates(self, part: Contribution) -> list[Value]:
        return [self.disk.payload(update.payload) for update in part.updates]

    def made(self, before: Kept, contributions: list[tuple[float, list[Value]]]) -> Kept:
        """The version after ``before``."""
        rule = self.plan.rule
        theta, momentum = values.outer_step(before.theta, before.momentum, values.merged(contributions), rule)
        if rule.published_quantum == 1:
            return Kept(theta, momentum, theta, values.minus(theta, before.published))
        link = values.quantised(values.minus(theta, before.published), rule.published_quantum)
        return Kept(theta, momentum, values.plus(before.published, link), link)

    def _fails(self, effect: StartOuterStep) -> bool:
        """A property of what is merged, so that the same step fails again after a crash."""
        seen = sum(sum(update.digest.encode()) for part in effect.contributions for update in part.updates)
        return seen % 1000 < self.plan.fail_per_mille


def _payload(site: str, fragment: int, sequence: int, digest: str) -> str:
    return f"{site}-{fragment}-{sequence}-{digest}"
