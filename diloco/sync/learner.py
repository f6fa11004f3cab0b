"""A site's machine: what to send, what to fetch, what to adopt, and where every token has gone.

Theory of operation.  For each fragment the site trains on *unsent* progress.  When the fragment is due and nothing of
it awaits the syncer's answer, the progress is sealed into an update: it leaves *unsent* and enters the in-flight
list, where it stays until its fate is known and, if merged, until the version that contains it is adopted.

    unsent --Seal--> sealing --Sealed--> sealed --Send, accepted--> accepted --fate: merged, Adopt--> (gone)
       ^                                    |                          |
       +---------- refused, keep -----------+---- fate: keep ----------+        refused, discard: Retake

At most one update per fragment awaits an answer: a refused one therefore never has a successor that was measured
from it, and its sequence number can be used again.  At most ``updates_in_flight_max`` are undecided.

Versions are fetched as they are published and adopted at the next step boundary.  A fetch brings this site's fates
as of the same instant, so that an adopt always knows which of the site's own updates the version contains.

The training thread calls ``handle`` with ``StepDone`` and carries out ``Seal``, ``Adopt`` and ``Retake`` at once;
everything else is the business of the threads beside it.  ``handle`` itself never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.effects import (
    Adopt,
    Fetch,
    Forget,
    Join,
    LearnerEffect,
    Leave,
    Note,
    Release,
    Retake,
    Seal,
    Send,
    SkipData,
    StopTraining,
)
from diloco.sync.events import (
    DISCARDING,
    BoundaryReached,
    Ending,
    Fate,
    FateTold,
    FetchFailed,
    FinalAnnounced,
    FragmentStanding,
    JoinAnswered,
    LearnerEvent,
    LeaveAsked,
    Outcome,
    PushAnswered,
    Reason,
    Sealed,
    SealFailed,
    StepDone,
    VersionFetched,
    VersionPublished,
)
from diloco.sync.plain import from_plain, to_plain
from diloco.sync.progress import Doubt, FragmentProgress, LearnerState, Orphan, Retaking, Sent, SentState
from diloco.sync.quorum import smoothed
from diloco.sync.schedule import is_due

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.sync.options import LearnerOptions

GIVING_UP = frozenset({Reason.FENCED, Reason.SUPERSEDED, Reason.EVICTED})
"""Answers after which this process must not speak for the site any more."""


class LearnerSync:
    """A site's machine; the mirror of ``OuterSync``."""

    def __init__(self, options: LearnerOptions, state: LearnerState | None = None) -> None:
        """``state`` continues an earlier machine; without it, a cold site that owns nothing."""
        self.options = options
        self.state = state or LearnerState([FragmentProgress() for _ in range(options.num_fragments)])
        assert len(self.state.fragments) == options.num_fragments, "the checkpoint has other fragments"
        self._effects: list[LearnerEffect] = []

    @classmethod
    def restore(
        cls, options: LearnerOptions, plain: object, outbox: Mapping[tuple[int, int], str], tokens_processed: int
    ) -> LearnerSync:
        """The machine of a checkpoint, in a new process.

        ``outbox`` maps the (fragment, sequence) that are durable there to their digests, ``tokens_processed`` is how
        far the last process really got, by the odometer: what the syncer does not have of it counts as lost."""
        machine = cls(options, from_plain(LearnerState, plain, "state"))
        machine.state.tokens_processed = max(machine.state.tokens_processed, tokens_processed)
        machine.state.ending = None
        machine.state.stopping = machine.state.at_rest = machine.state.closed = machine.state.left = False
        machine.state.incarnation = 0  # Until the syncer says what an earlier process sent, no number is ours to give.
        for index, part in enumerate(machine.state.fragments):
            part.fetching, part.fetched, part.doubt = False, part.base_version, None
            part.discards = 0  # Who starts a site again wants it to try again, maybe from a ruined checkpoint.
            for sent in list(part.in_flight):
                stored = outbox.get((index, sent.sequence)) == sent.digest
                if sent.state is not SentState.ACCEPTED and not (sent.state is SentState.SEALED and stored):
                    machine._unsend(part, sent)
        machine._settle()
        return machine

    def snapshot(self) -> object:
        """All of the memory as plain values."""
        return to_plain(self.state)

    def handle(self, event: LearnerEvent, now_ns: int) -> list[LearnerEffect]:
        """Take ``event`` at instant ``now_ns`` and return what the site must do, in order."""
        del now_ns  # The machine has no deadline of its own; the mirror keeps the signature of ``OuterSync``.
        self._effects = []
        match event:
            case JoinAnswered():
                self._joined(event)
            case StepDone():
                self._step_done(event)
            case BoundaryReached():
                self._boundary()
            case Sealed():
                self._sealed(event)
            case SealFailed():
                self._seal_failed(event)
            case PushAnswered():
                self._push_answered(event)
            case FateTold():
                self._fate(event.fate)
            case VersionPublished():
                self._published(event)
            case VersionFetched():
                self._fetched(event)
            case FetchFailed():
                self.state.fragments[event.fragment].fetching = False
                self._want(event.fragment)
            case FinalAnnounced():
                self._end(event.ending, f"the run is {event.ending.value}")
            case LeaveAsked():
                self._end(None, "this site was asked to leave")
        self._maybe_leave()
        return self._effects

    def next_deadline_ns(self) -> int | None:
        """A site asks for no instant: it acts between two of its own steps and when it is told something."""
        return None

    def ready(self) -> bool:
        """Whether training may begin: every fragment has a base and none is about to be thrown away."""
        return all(part.base_version >= 0 and part.retaking is None for part in self.state.fragments)

    def settled(self) -> bool:
        """Whether every update sent has its fate."""
        return not any(part.undecided() or part.orphans for part in self.state.fragments)

    def must_wait(self) -> bool:
        """Lock-step only: whether an update, of an earlier process too, is not yet answered by an adopted version.

        When the run has reached its bound the word that ends it is on its way, and one more step would be one too many.
        """
        return self.options.lock_step and (
            self.state.progress_ppm >= 1_000_000
            or any(p.in_flight or p.orphans or p.published > p.base_version for p in self.state.fragments)
        )

    # --- joining -----------------------------------------------------------------------------------------------

    def _joined(self, event: JoinAnswered) -> None:
        state = self.state
        if event.epoch < state.epoch:
            self._note("join_ignored", f"epoch {event.epoch} is older than {state.epoch}")
            return
        state.epoch, state.incarnation = event.epoch, event.incarnation
        state.run_tokens, state.progress_ppm = event.run_tokens, event.progress_ppm
        state.closed = state.closed and event.ending is not None
        before = state.cursor
        doubtful = [standing.fragment for standing in event.standings if not self._compare(standing)]
        if doubtful and not state.left:
            self._effects.append(Join("the answer knows less than the syncer has acknowledged: it may be a late one"))
        self._settle()
        if state.cursor > before:
            self._effects.append(SkipData(state.cursor))
        for index in range(len(state.fragments)):
            self._want(index)
        if event.ending is not None:
            self._end(event.ending, f"the run is {event.ending.value}")

    def _compare(self, standing: FragmentStanding) -> bool:
        """Bring one fragment in line with what the syncer has accepted and decided; False if it seems to know less.

        An ack or a version can overtake the answer to a join.  Only one that was asked for afterwards is proof.
        """
        index, part = standing.fragment, self.state.fragments[standing.fragment]
        part.published = max(part.published, standing.version)
        self.state.cursor = max(self.state.cursor, standing.cursor)
        accepted = max((s.sequence for s in part.in_flight if s.state is SentState.ACCEPTED), default=0)
        if standing.watermark < accepted or standing.version < part.base_version:
            doubt, part.doubt = part.doubt, Doubt(accepted, part.base_version)
            if doubt is not None and (standing.watermark < doubt.sequence or standing.version < doubt.version):
                self._stop(f"the syncer has forgotten what it acknowledged of fragment {index}", failed=True)
            return False
        part.doubt = None
        if standing.watermark >= part.next_sequence or part.contradicted(standing.fates):
            self._outrun(standing)
            return True
        for sent in part.in_flight:
            if sent.state is SentState.SEALED and sent.sequence <= standing.watermark:
                self._accept(index, sent)
            elif sent.state is SentState.SEALED:
                self._effects.append(Send(index, sent.sequence))
        for fate in standing.fates:
            self._fate(fate)
        if part.base_version < 0:
            part.retaking = part.retaking or Retaking(standing.version, "first version of a new site")
        return True

    def _outrun(self, standing: FragmentStanding) -> None:
        """The syncer has accepted work that this process does not know: an earlier process did it.

        Their pseudo-gradients are gone with that process; what they brought is only in the published version.
        """
        index, part = standing.fragment, self.state.fragments[standing.fragment]
        for sent in part.in_flight:
            if sent.state is not SentState.ACCEPTED:
                self._effects.append(Forget(index, sent.sequence))
            self._effects.append(Release(index, sent.sequence))
        part.in_flight = []
        part.unsent_tokens = part.unsent_steps = 0
        part.next_sequence = standing.watermark + 1
        part.tokens_merged = standing.tokens_merged
        part.tokens_refused = max(part.tokens_refused, standing.tokens_discarded)
        part.orphans = [Orphan(sequence, tokens) for sequence, tokens in standing.undecided]
        part.retaking = Retaking(standing.version, "an earlier process of this site had sent later work")
        self._note("outrun", part.retaking.why, index)

    def _settle(self) -> None:
        """After a restart or a join: what was processed and is nowhere else is lost."""
        state = self.state
        state.tokens_processed = max([state.tokens_processed, *(part.accounted() for part in state.fragments)])
        for part in state.fragments:
            part.tokens_lost = state.tokens_processed - part.accounted()

    # --- between two steps -------------------------------------------------------------------------------------

    def _step_done(self, event: StepDone) -> None:
        state, options = self.state, self.options
        assert all(part.base_version >= 0 for part in state.fragments), "a step was trained without a base"
        state.step, state.cursor = event.step, event.cursor
        state.tokens_processed += event.tokens
        state.step_ns = smoothed(state.step_ns, event.step_ns)
        for index, part in enumerate(state.fragments):
            part.unsent_tokens += event.tokens
            part.unsent_steps += 1
            part.due = part.due or is_due(event.step, index, options.num_fragments, options.inner_steps)
        self._boundary()

    def _boundary(self) -> None:
        self.state.at_rest = self.state.stopping
        if self.state.incarnation == 0:  # Nothing is decided before it is known what an earlier process has sent.
            return
        for index, part in enumerate(self.state.fragments):
            if part.retaking is not None:
                here = max(part.fetched, part.base_version) >= max(part.retaking.version, 0)
                if here and not part.encoding():  # What is kept is subtracted, so it must be known.
                    self._retake(index, part, part.retaking)
            elif part.fetched > part.base_version:
                self._adopt(index, part)
            if self._may_seal(part):
                self._seal(index, part)

    def _adopt(self, index: int, part: FragmentProgress) -> None:
        version = part.fetched
        merged = [s for s in part.in_flight if s.merged_version is not None and s.merged_version <= version]
        part.in_flight = [sent for sent in part.in_flight if sent not in merged]
        for sent in part.in_flight:
            sent.since_adopt = False
        if self.options.adopt != "rebase":
            # The next update begins at the value right after this adopt, so what was trained and not sent is given up.
            part.tokens_overwritten += part.unsent_tokens
            part.unsent_tokens = part.unsent_steps = 0
        part.base_version = version
        self._effects.append(Adopt(index, version, tuple(sent.sequence for sent in merged)))

    def _retake(self, index: int, part: FragmentProgress, retaking: Retaking) -> None:
        version = max(part.fetched, part.base_version)
        part.in_flight = [s for s in part.in_flight if s.merged_version is None or s.merged_version > version]
        for sent in part.in_flight:
            sent.since_adopt = False
        part.tokens_overwritten += part.unsent_tokens
        part.unsent_tokens = part.unsent_steps = 0
        part.base_version, part.retaking, part.due = version, None, False
        self._effects.append(Retake(index, version, tuple(s.sequence for s in part.in_flight), retaking.why))

    def _may_seal(self, part: FragmentProgress) -> bool:
        if not (part.due or self.state.stopping) or part.unsent_tokens == 0:
            return False
        if part.base_version <= part.stale_base or part.retaking is not None or part.unanswered():
            return False
        if self.state.incarnation == 0 or self.state.closed or self.state.left:
            return False
        allowed = 1 if self.options.lock_step else self.options.updates_in_flight_max
        return len(part.undecided()) + len(part.orphans) < allowed

    def _seal(self, index: int, part: FragmentProgress) -> None:
        sent = Sent(part.next_sequence, part.base_version, part.unsent_tokens, part.unsent_steps)
        subtract = tuple(
            other.sequence for other in part.in_flight if other.since_adopt or self.options.adopt == "rebase"
        )
        part.in_flight.append(sent)
        part.next_sequence += 1
        part.unsent_tokens = part.unsent_steps = 0
        part.due = False
        site = self.state
        where = (index, sent.sequence, sent.base_version, subtract)
        self._effects.append(Seal(*where, sent.tokens, sent.steps, site.step_ns, site.cursor, final=site.stopping))

    # --- sending -----------------------------------------------------------------------------------------------

    def _find(self, index: int, sequence: int) -> Sent | None:
        return next((sent for sent in self.state.fragments[index].in_flight if sent.sequence == sequence), None)

    def _sealed(self, event: Sealed) -> None:
        sent = self._find(event.fragment, event.sequence)
        if sent is None:  # A join in between has shown that an earlier process was ahead: these bytes are not wanted.
            self._effects += [Forget(event.fragment, event.sequence), Release(event.fragment, event.sequence)]
            return
        if sent.state is SentState.SEALING:
            sent.state, sent.digest = SentState.SEALED, event.digest
            self._effects.append(Send(event.fragment, event.sequence))

    def _seal_failed(self, event: SealFailed) -> None:
        sent = self._find(event.fragment, event.sequence)
        if sent is not None and sent.state is SentState.SEALING:
            self._discard(event.fragment, sent, Reason.NON_FINITE)

    def _push_answered(self, event: PushAnswered) -> None:
        sent = self._find(event.fragment, event.sequence)
        if sent is None or sent.state is not SentState.SEALED:
            return  # It is known by a join or a fate already, or the answer is a late one to what was taken back.
        if event.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            self._accept(event.fragment, sent)
            return
        assert event.outcome is Outcome.REFUSED, event
        assert event.reason is not None, event
        if event.reason in GIVING_UP:
            self._stop(f"the syncer no longer takes this process for the site: {event.reason.value}", failed=True)
        elif event.reason in DISCARDING:
            self._discard(event.fragment, sent, event.reason)
        elif event.reason in (Reason.STALE, Reason.OVERLOAD):
            self._keep(event.fragment, sent, event.reason)
        elif event.reason is Reason.FINISHED:
            self._keep(event.fragment, sent, event.reason)
            self.state.closed = True
            if not self.state.stopping:
                self._effects.append(Join("the last round is over and this site was not told"))
        elif event.reason is Reason.NOT_JOINED:
            self._effects.append(Join("the syncer does not know this site"))
        else:
            what = f"update {event.sequence} of fragment {event.fragment}"
            self._stop(f"the syncer refuses {what} for good: {event.reason.value}", failed=True)

    def _accept(self, index: int, sent: Sent) -> None:
        sent.state = SentState.ACCEPTED
        self._effects.append(Forget(index, sent.sequence))

    def _unsend(self, part: FragmentProgress, sent: Sent) -> None:
        """The update never was: its progress is unsent again and its number free."""
        self._give_back(part, sent)
        part.next_sequence = sent.sequence

    def _give_back(self, part: FragmentProgress, sent: Sent) -> None:
        """Out of the in-flight list; its progress is in the values still, unless an adopt has replaced them."""
        part.in_flight.remove(sent)
        if sent.since_adopt or self.options.adopt == "rebase":
            part.unsent_tokens += sent.tokens
            part.unsent_steps += sent.steps
            part.due = True
        else:
            part.tokens_overwritten += sent.tokens

    def _keep(self, index: int, sent: Sent, reason: Reason) -> None:
        """Refused, and the progress goes out again with the next update."""
        part = self.state.fragments[index]
        part.updates_refused[reason.value] = part.updates_refused.get(reason.value, 0) + 1
        if sent.state is SentState.ACCEPTED:  # Its number is used up; one refused at the door leaves it free.
            self._give_back(part, sent)
        else:
            self._unsend(part, sent)
            self._effects.append(Forget(index, sent.sequence))
        self._effects.append(Release(index, sent.sequence))
        self._note("update_kept", f"{reason.value}: its progress goes out with the next update", index)
        if reason is Reason.STALE:  # So there is a newer version, and with this base the next one would be stale too.
            part.stale_base = max(part.stale_base, sent.base_version)
            part.published = max(part.published, sent.base_version + 1)
            self._want(index)

    def _discard(self, index: int, sent: Sent, reason: Reason) -> None:
        """Refused, and the progress is worth nothing: back to the published values."""
        part = self.state.fragments[index]
        part.updates_refused[reason.value] = part.updates_refused.get(reason.value, 0) + 1
        part.in_flight.remove(sent)
        part.tokens_refused += sent.tokens
        if sent.state is not SentState.ACCEPTED:
            part.next_sequence = sent.sequence
            self._effects.append(Forget(index, sent.sequence))
        self._effects.append(Release(index, sent.sequence))
        part.discards += part.retaking is None  # Updates that were in flight together went wrong together.
        part.retaking = Retaking(part.base_version, f"an update was refused: {reason.value}")
        self._note("update_discarded", f"{reason.value}: {part.discards} in a row", index)
        if part.discards >= self.options.discards_max:
            self._stop(f"{part.discards} updates of fragment {index} in a row were {reason.value}", failed=True)

    # --- being told --------------------------------------------------------------------------------------------

    def _fate(self, fate: Fate) -> None:
        part = self.state.fragments[fate.fragment]
        for orphan in [orphan for orphan in part.orphans if orphan.sequence == fate.sequence]:
            self._orphan_decided(part, orphan, fate)
        sent = self._find(fate.fragment, fate.sequence)
        if sent is None or sent.merged_version is not None:
            return
        if sent.digest != fate.digest:
            self._effects.append(Join("another process of this site has used the number of an update of this one"))
            return
        if sent.state is not SentState.ACCEPTED:
            self._accept(fate.fragment, sent)
        if fate.merged:
            sent.merged_version = fate.version
            part.tokens_merged += sent.tokens
            part.updates_merged += 1
            part.discards = 0
            return
        assert fate.reason is not None
        if fate.reason in DISCARDING:
            self._discard(fate.fragment, sent, fate.reason)
        else:
            self._keep(fate.fragment, sent, fate.reason)

    def _orphan_decided(self, part: FragmentProgress, orphan: Orphan, fate: Fate) -> None:
        part.orphans.remove(orphan)
        if fate.merged:
            part.tokens_merged += orphan.tokens
        elif fate.reason in DISCARDING:
            part.tokens_refused += orphan.tokens
        else:
            part.tokens_lost += orphan.tokens

    def _published(self, event: VersionPublished) -> None:
        if event.epoch < self.state.epoch:
            self._note("publish_ignored", f"epoch {event.epoch} is older than {self.state.epoch}", event.fragment)
            return
        self.state.epoch = event.epoch
        self.state.run_tokens, self.state.progress_ppm = event.run_tokens, event.progress_ppm
        part = self.state.fragments[event.fragment]
        part.published = max(part.published, event.version)
        self._want(event.fragment)

    def _want(self, index: int) -> None:
        """Fetch the newest version unless it is here or on its way."""
        part = self.state.fragments[index]
        have = max(part.fetched, part.base_version)
        if part.published > have and not part.fetching:
            part.fetching = True
            self._effects.append(Fetch(index, have))

    def _fetched(self, event: VersionFetched) -> None:
        part = self.state.fragments[event.fragment]
        part.fetching = False
        if event.version <= max(part.fetched, part.base_version):
            part.published = max(part.fetched, part.base_version)  # It was asked for something newer: there is none.
        part.fetched = max(part.fetched, event.version)
        part.published = max(part.published, event.version)
        for fate in event.fates:
            self._fate(fate)
        self._want(event.fragment)

    # --- the end -----------------------------------------------------------------------------------------------

    def _end(self, ending: Ending | None, why: str) -> None:
        self.state.ending = self.state.ending or ending
        if not self.state.stopping:
            self.state.stopping = True
            self._effects.append(StopTraining(ending, why))

    def _stop(self, why: str, *, failed: bool) -> None:
        self.state.stopping = self.state.left = True
        self._effects.append(StopTraining(None, why, failed))

    def _maybe_leave(self) -> None:
        """Say goodbye once nothing is left to send and nothing awaits an answer."""
        if not self.state.at_rest or self.state.left or self.state.incarnation == 0:
            return  # A step under way when the stop was told still brings tokens.
        sent = self.state.closed or all(part.unsent_tokens == 0 for part in self.state.fragments)
        if sent and not any(part.unanswered() for part in self.state.fragments):
            self.state.left = True
            self._effects.append(Leave(self.state.ending))

    def _note(self, what: str, why: str, fragment: int | None = None) -> None:
        self._effects.append(Note(what, why, fragment=fragment))
