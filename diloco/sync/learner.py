"""A site's machine: what to send, fetch and adopt, and an account of every token.

Theory of operation.  For each fragment training adds to the *unsent* progress.  When the fragment is due and no update
of it awaits the syncer's answer, the progress is sealed into an update: it leaves *unsent* and enters the in-flight
list, where it stays until its fate is known and, if merged, until the site adopts the version that contains it.

    unsent --Seal--> sealing --Sealed--> sealed --Send, accepted--> accepted --fate: merged, Adopt--> (gone)
       ^                                    |                          |
       +---------- refused, keep -----------+---- fate: keep ----------+        refused, discard: Retake

At most one update per fragment awaits an answer.  So a refused update never has a successor that was measured from it,
and its sequence number can be used again.  At most ``updates_in_flight_max`` are undecided.

The site fetches versions as they are published and adopts them at the next step boundary.  A fetch brings this site's
fates as of the same instant, so that an adopt always knows which of the site's own updates the version contains.

The training thread calls ``handle`` with ``StepDone`` and carries out ``Seal``, ``Adopt`` and ``Retake`` at once; other
threads carry out everything else.  ``handle`` itself never waits.

The machine also joins, and follows the versions that the syncer publishes.  At a join it reconciles what the syncer has
accepted and decided with what the site knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync import progress, updates
from diloco.sync.journal import from_plain, to_plain
from diloco.sync.options import LearnerOptions, how_to_restore
from diloco.sync.progress import Doubt, FragmentProgress, LearnerState, Orphan, Retaking, SentState, SiteTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class LearnerSync:
    """A site's machine; the mirror of ``OuterSync``."""

    def __init__(self, options: LearnerOptions, state: LearnerState | None = None) -> None:
        """Continue from ``state``; without it, start as a new site without any version."""
        self.options = options
        self.state = state or LearnerState([FragmentProgress() for _ in range(options.num_fragments)])
        assert len(self.state.fragments) == options.num_fragments, "the checkpoint has other fragments"

    @classmethod
    def restore(
        cls, options: LearnerOptions, plain: object, outbox: Mapping[tuple[int, int], str], tokens_processed: int
    ) -> LearnerSync:
        """Return the machine of a checkpoint, for a new process.

        ``outbox`` maps each (fragment, sequence) that is durable in the outbox to its digest.  ``tokens_processed`` is
        the persisted token counter, which may be ahead of the checkpoint (0: there is none): tokens that the syncer
        lacks count as lost.
        """
        machine = cls(options, from_plain(LearnerState, plain, "state"))
        machine.state.tokens_processed = max(machine.state.tokens_processed, tokens_processed)
        machine.state.overlap_steps = 0  # A new process measures its link again.
        machine.state.stopping = machine.state.at_rest = machine.state.closed = machine.state.left = False
        machine.state.final_wanted, machine.state.final_versions = False, []
        machine.state.incarnation = 0  # No sequence number is free until the syncer says what an earlier process sent.
        for index, part in enumerate(machine.state.fragments):
            part.fetching, part.fetched, part.doubt = False, part.base_version, None
            part.discards = 0  # A restarted site gets all its attempts again, even from a bad checkpoint.
            for sent in list(part.in_flight):
                if sent.void or sent.outrun:
                    updates.write_off(part, sent)
                    continue
                stored = outbox.get((index, sent.sequence)) == sent.digest
                sent.kept = sent.kept and stored
                if sent.state is not SentState.ACCEPTED and not (sent.state is SentState.SEALED and stored):
                    updates.unsend(options, part, sent)
        settle(machine.state)
        return machine

    def snapshot(self) -> object:
        """Return the whole memory as plain values."""
        return to_plain(self.state)

    def handle(self, event: ev.LearnerEvent, now_ns: int) -> list[fx.LearnerEffect]:
        """Take ``event`` at instant ``now_ns`` and return what the site must do, in order."""
        del now_ns  # The machine has no deadline of its own; the mirror keeps the signature of ``OuterSync``.
        turn = SiteTurn(self.options, self.state)
        RULES[type(event)](turn, event)
        state = self.state
        # Leave at rest, not before: a step that was under way at the stop still adds tokens.
        if state.at_rest and not state.left and state.incarnation:
            unsent = [part for part in state.fragments if part.unsent_tokens]
            unanswered = [sent for part in state.fragments for sent in part.unanswered()]
            if not unanswered and (state.closed or not unsent):
                state.left = True
                turn.effects.append(fx.Leave(state.ending))
        return turn.effects

    def ready(self) -> bool:
        """Return whether training may begin: every fragment has a base, none waits for a retake, and there is data."""
        if self.options.unit_sequences and not self.state.units.real():
            return False
        return all(part.base_version >= 0 and part.retaking is None for part in self.state.fragments)

    def steps_to_act(self) -> int:
        """Return the inner steps to the next boundary with possible work, if no event arrives before; at least 1, at
        most ``inner_steps``."""
        options, state, step = self.options, self.state, self.state.step
        if options.dynamic_steps:
            dues = [updates.dynamic_due(options, state, each) - step for each in range(options.num_fragments)]
        else:
            dues = [options.inner_steps - (step - at) % options.inner_steps for at in options.due_at]
        wanted = [options.inner_steps, *dues]
        for part in state.fragments:
            if part.fetched > part.base_version and not updates.would_lose_work(options, part):
                wanted.append(part.held_until - step)
            if part.due and updates.may_follow(options, part):
                wanted.append(1)
        return max(1, min(wanted))

    def next_turn(self) -> tuple[int, int] | None:
        """Lock-step only: return the order key of the fragment exchanged next, to compare with other machines' keys."""
        return updates.next_turn(self.options, self.state)[:2] if self.options.lock_step else None

    def may_act(self) -> bool:
        """Return whether, as things stand, the boundary after the next step would read or write values.

        Always True in lock-step, because a site may have to wait there.
        """
        options, state, step = self.options, self.state, self.state.step + 1
        if options.lock_step or state.stopping:
            return True
        if state.incarnation == 0:
            return False
        coming = updates.coming_due(options, state, step)
        for index, part in enumerate(state.fragments):
            adopts = part.fetched > part.base_version and not updates.is_held(options, state, part, step)
            seals = (part.due or index in coming) and updates.may_follow(options, part)
            if part.retaking is not None or adopts or seals:
                return True
        return False

    def settled(self) -> bool:
        """Return whether every update sent has its fate; in lock-step, also whether every announced version is adopted.

        A fate and the end of the run can overtake the download of the version, and a site in lock-step ends with the
        model that the run ends with.  So does one that wants the final versions of a run that is finished.
        """
        state, parts, lock_step = self.state, self.state.fragments, self.options.lock_step
        undecided = any(part.undecided() or part.orphans for part in parts)
        lacks_final = state.final_wanted and state.ending is ev.Ending.FINISHED and not self.is_final()
        lags = lock_step and state.ending is not None and any(part.published > part.base_version for part in parts)
        return not (undecided or lacks_final or lags)

    def is_final(self) -> bool:
        """Return whether the site has taken the run's final versions, which it wants, and nothing else."""
        state = self.state
        if not (state.final_wanted and state.final_versions and state.ending is ev.Ending.FINISHED):
            return False
        pairs = zip(state.fragments, state.final_versions, strict=True)
        return all(part.retaking is None and part.base_version >= version for part, version in pairs)

    def must_wait(self) -> bool:
        """Lock-step only: return whether an update, also of an earlier process, has no adopted version yet.

        The site waits only for the fragment whose turn it is, and only if no fragment of another syncer comes first;
        an update of any other fragment is merged in that fragment's next turn.  When the run has reached its bound the
        site waits as well: the announcement of the end is on its way, and one more step would be one too many.
        """
        if not self.options.lock_step:
            return False
        parts, turn = self.state.fragments, updates.in_turn(self.options, self.state)
        if turn is not None and (parts[turn].in_flight or parts[turn].orphans):
            return True
        return self.state.progress_ppm >= 1_000_000 or any(part.published > part.base_version for part in parts)


def joined(turn: SiteTurn, event: ev.JoinAnswered) -> None:
    """Handle the syncer's admission of this process."""
    state = turn.state
    if (event.lineage, event.epoch) < (state.lineage, state.epoch):
        here = f"lineage {state.lineage}, epoch {state.epoch}"
        turn.note("join_ignored", f"lineage {event.lineage}, epoch {event.epoch} is older than {here}")
        return
    restored = event.lineage > state.lineage
    if state.incarnation == 0:
        state.ending = None  # Of an earlier process: the run may have been extended since.
    state.lineage, state.epoch, state.incarnation = event.lineage, event.epoch, event.incarnation
    state.run_tokens, state.progress_ppm, state.keep = event.run_tokens, event.progress_ppm, event.keep
    state.closed = state.closed and event.ending is not None
    before = state.cursor
    if restored:
        _start_over(turn, event)
    else:
        doubtful = [standing.fragment for standing in event.standings if not _compare(turn, standing)]
        if doubtful and not state.left:
            turn.effects.append(fx.Join("the answer knows less than the syncer has acknowledged: it may be a late one"))
    settle(state)
    if state.cursor > before:
        turn.effects.append(fx.SkipData(state.cursor))
    for index in range(len(state.fragments)):
        turn.want(index)
    if event.ending is not None:
        turn.end(event.ending, f"the run is {event.ending.value}")


def _compare(turn: SiteTurn, standing: ev.FragmentStanding) -> bool:
    """Reconcile one fragment with what the syncer has accepted and decided; return False if it seems to know less.

    An ack or a version can overtake the answer to a join.  Only the answer to a later join proves that it knows less.
    """
    index, part = standing.fragment, turn.state.fragments[standing.fragment]
    part.published = max(part.published, standing.version)
    turn.state.cursor = max(turn.state.cursor, standing.cursor)
    sequences = [sent.sequence for sent in part.in_flight if sent.state is SentState.ACCEPTED]
    accepted = max([*sequences, *(orphan.sequence for orphan in part.orphans)], default=0)
    if standing.watermark < accepted or standing.version < part.base_version:
        doubt, part.doubt = part.doubt, Doubt(accepted, part.base_version)
        if doubt is None or not (standing.watermark < doubt.sequence or standing.version < doubt.version):
            return False
        if not updates.send_again(turn, standing):
            lost = f"the syncer has forgotten what it acknowledged of fragment {index}, as if its data were an old copy"
            turn.stop(f"{lost}; {how_to_restore(turn.state.lineage)}")
            return False
    part.doubt = None
    told = {fate.sequence: fate.digest for fate in standing.fates}
    own = [sent for sent in part.in_flight if not sent.outrun]
    contradicted = any(told.get(sent.sequence, sent.digest) != sent.digest for sent in own)
    if contradicted or standing.watermark >= part.next_sequence:  # Another process of the site used these numbers.
        _outrun(turn, standing)
        return True
    for sent in part.in_flight:
        if sent.state is SentState.SEALED and sent.sequence <= standing.watermark:
            updates.accept(turn, index, sent)
        elif sent.state is SentState.SEALED:
            turn.effects.append(fx.Send(index, sent.sequence))
    for fate in standing.fates:
        updates.fate_told(turn, ev.FateTold(fate))
    if part.base_version < 0:
        part.retaking = part.retaking or Retaking(standing.version, "first version of a new site", cold=True)
    return True


def _outrun(turn: SiteTurn, standing: ev.FragmentStanding) -> None:
    """Take over updates that the syncer accepted from an earlier process and that this process does not know.

    Their pseudo-gradients are lost with that process; their progress is only in the published version.
    """
    index, part = standing.fragment, turn.state.fragments[standing.fragment]
    for sent in part.in_flight:
        if sent.state is SentState.SEALING:
            sent.outrun, sent.tokens, sent.steps, sent.spans = True, 0, 0, []
            continue  # Its sequence number is not reused until its bytes are here and can be discarded.
        turn.drop(index, sent)
    part.in_flight = [sent for sent in part.in_flight if sent.outrun]
    part.unsent_tokens = part.unsent_steps = 0
    part.unsent_spans = []
    _take_over(turn, standing)
    why = "what this site sent earlier and does not know any more comes back with the syncer's version"
    part.retaking = Retaking(standing.version, why)
    turn.note("outrun", part.retaking.why, index)


def _take_over(turn: SiteTurn, standing: ev.FragmentStanding) -> None:
    """Continue with the syncer's account of what earlier processes have sent."""
    part = turn.state.fragments[standing.fragment]
    part.next_sequence = standing.watermark + 1
    part.tokens_merged = standing.tokens_merged
    part.tokens_refused = max(part.tokens_refused, standing.tokens_discarded)
    part.orphans = [Orphan(sequence, tokens, turn.state.epoch) for sequence, tokens in standing.undecided]


def _start_over(turn: SiteTurn, event: ev.JoinAnswered) -> None:
    """Start over after a restore of the run: updates in flight and versions here belong to the old lineage."""
    turn.state.final_versions = []
    turn.note("started_over", f"the run was restored: lineage {event.lineage}")
    for standing in event.standings:
        index, part = standing.fragment, turn.state.fragments[standing.fragment]
        turn.state.cursor = max(turn.state.cursor, standing.cursor)
        told = {(fate.sequence, fate.digest): fate for fate in standing.fates}
        for sent in list(part.in_flight):
            sent.void = sent.state is SentState.SEALING
            if sent.void:
                continue  # Its sequence number is not reused until its bytes are here and can be discarded.
            turn.drop(index, sent)
            fate = told.get((sent.sequence, sent.digest))
            counted = sent.sequence <= standing.watermark and (fate is None or fate.merged)
            if sent.merged_version is None and not counted:
                updates.write_off(part, sent)
        part.in_flight = [sent for sent in part.in_flight if sent.void]
        merged = {fate.sequence for fate in standing.fates if fate.merged}
        part.tokens_refused += sum(orphan.tokens for orphan in part.orphans if orphan.sequence not in merged)
        _take_over(turn, standing)
        part.published, part.fetched, part.fetching = standing.version, -1, False
        part.base_version = part.stale_base = -1
        part.due, part.discards, part.doubt = False, 0, None
        part.retaking = Retaking(standing.version, f"the run was restored: lineage {event.lineage}")
        turn.effects.append(fx.StartOver(index))
    if turn.options.unit_sequences:
        progress.units_start_over(turn.options, turn.state)


def settle(state: LearnerState) -> None:
    """Count as lost the processed tokens that are nowhere else, after a restart or a join."""
    state.tokens_processed = max([state.tokens_processed, *(part.accounted() for part in state.fragments)])
    for part in state.fragments:
        part.tokens_lost = state.tokens_processed - part.accounted()


def published(turn: SiteTurn, event: ev.VersionPublished) -> None:
    """Handle the announcement of a version; ignore one of another lineage or of an older epoch."""
    if event.lineage and event.lineage != turn.state.lineage:
        turn.note("publish_ignored", f"lineage {event.lineage} is not {turn.state.lineage}", event.fragment)
        if event.lineage > turn.state.lineage:
            turn.effects.append(fx.Join("the run was restored"))
        return
    if event.epoch < turn.state.epoch:
        turn.note("publish_ignored", f"epoch {event.epoch} is older than {turn.state.epoch}", event.fragment)
        return
    turn.state.epoch = event.epoch
    turn.state.run_tokens, turn.state.progress_ppm = event.run_tokens, event.progress_ppm
    turn.state.fastest_step_ns = event.fastest_step_ns
    part = turn.state.fragments[event.fragment]
    part.published = max(part.published, event.version)
    turn.want(event.fragment)


def differs(turn: SiteTurn, event: ev.BaseDiffers) -> None:
    """Replace a base that differs from its published version: updates measured from it would be wrong."""
    part = turn.state.fragments[event.fragment]
    if part.base_version != event.version or part.retaking is not None:
        return  # The base has been replaced by now, or a retake will replace it.
    why = f"version {event.version} in this site's memory is not what was published"
    part.retaking = Retaking(event.version, why)
    part.base_version = part.fetched = -1
    part.published, part.fetching = max(part.published, event.version), False
    turn.note("base_differs", why, event.fragment)
    turn.effects.append(fx.StartOver(event.fragment))
    turn.want(event.fragment)


def fetched(turn: SiteTurn, event: ev.VersionFetched | ev.FetchFailed) -> None:
    """Handle the end of a fetch: the arrival of a version's values, or a failure."""
    part = turn.state.fragments[event.fragment]
    part.fetching = False
    if isinstance(event, ev.VersionFetched):
        if event.version <= max(part.fetched, part.base_version):
            part.published = max(part.fetched, part.base_version)  # The fetch asked for a newer version: there is none.
        part.fetched = max(part.fetched, event.version)
        part.published = max(part.published, event.version)
        for fate in event.fates:
            updates.fate_told(turn, ev.FateTold(fate))
    turn.want(event.fragment)


def final(turn: SiteTurn, event: ev.FinalAnnounced | ev.FinalWanted) -> None:
    """Handle the end of the run, or of the training loop: of both, if the run is finished, take the final versions.

    Nothing more is merged then, so what this site's model has beyond them (unsent progress, and what a codec rounded
    off) is discarded: every site ends with the same values.
    """
    state = turn.state
    if isinstance(event, ev.FinalWanted):
        state.final_wanted = True
    else:
        turn.end(event.ending, f"the run is {event.ending.value}")
        if len(event.versions) not in (0, len(state.fragments)):
            there = f"there are {len(state.fragments)} fragments"
            turn.note("final_ignored", f"{len(event.versions)} final versions, and {there}")
            return
        if state.final_wanted and state.final_versions == list(event.versions):
            return  # Told again by a new stream: the versions are being taken, or are here.
        state.final_versions = list(event.versions)
    if state.final_wanted and state.final_versions and state.ending is ev.Ending.FINISHED:
        state.closed = True  # Nothing is merged any more: leave without waiting for the download.
        for index, version in enumerate(state.final_versions):
            part = state.fragments[index]
            part.published = max(part.published, version)
            part.retaking = Retaking(version, "the run is finished, and this is its final version", final=True)
            turn.want(index)


def _overlap_chosen(turn: SiteTurn, event: ev.OverlapChosen) -> None:
    assert 0 <= event.steps < turn.options.inner_steps, event
    assert not (event.steps and turn.options.lock_step), "lock-step adopts before it goes on"
    turn.state.overlap_steps = event.steps


def _turn_elsewhere(turn: SiteTurn, event: ev.TurnElsewhere) -> None:
    turn.state.elsewhere = event.turn


RULES: Mapping[type[ev.LearnerEvent], Callable[[SiteTurn, Any], None]] = {
    ev.StepDone: updates.step_done,
    ev.Sealed: updates.sealed,
    ev.SealFailed: updates.seal_failed,
    ev.PushAnswered: updates.push_answered,
    ev.FateTold: updates.fate_told,
    ev.VersionPublished: published,
    ev.VersionFetched: fetched,
    ev.FetchFailed: fetched,
    ev.BaseDiffers: differs,
    ev.BoundaryReached: updates.boundary,
    ev.OverlapChosen: _overlap_chosen,
    ev.TurnElsewhere: _turn_elsewhere,
    ev.JoinAnswered: joined,
    ev.UnitsTold: progress.units_told,
    ev.FinalAnnounced: final,
    ev.FinalWanted: final,
    ev.LeaveAsked: lambda turn, event: turn.end(None, "this site left before the end of the run"),
}
"""The handler of each event."""
