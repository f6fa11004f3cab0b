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

from diloco.sync.effects import LearnerEffect, Leave
from diloco.sync.events import (
    BaseDiffers,
    BoundaryReached,
    FateTold,
    FetchFailed,
    FinalAnnounced,
    JoinAnswered,
    LearnerEvent,
    LeaveAsked,
    OverlapChosen,
    PushAnswered,
    Sealed,
    SealFailed,
    StepDone,
    TurnElsewhere,
    UnitsTold,
    VersionFetched,
    VersionPublished,
)
from diloco.sync.plain import from_plain, to_plain
from diloco.sync.progress import FragmentProgress, LearnerState, SentState, SiteTurn
from diloco.sync.site_units import told
from diloco.sync.updates import (
    boundary,
    comes_first,
    fate_told,
    in_turn,
    may_act,
    next_turn,
    push_answered,
    seal_failed,
    sealed,
    step_done,
    steps_to_act,
    unsend,
    write_off,
)
from diloco.sync.versions import differs, fetched, joined, published, settle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.sync.options import LearnerOptions


class LearnerSync:
    """A site's machine; the mirror of ``OuterSync``."""

    def __init__(self, options: LearnerOptions, state: LearnerState | None = None) -> None:
        """``state`` continues an earlier machine; without it, a cold site that owns nothing."""
        self.options = options
        self.state = state or LearnerState([FragmentProgress() for _ in range(options.num_fragments)])
        assert len(self.state.fragments) == options.num_fragments, "the checkpoint has other fragments"

    @classmethod
    def restore(
        cls, options: LearnerOptions, plain: object, outbox: Mapping[tuple[int, int], str], tokens_processed: int
    ) -> LearnerSync:
        """The machine of a checkpoint, in a new process.

        ``outbox`` maps the (fragment, sequence) that are durable there to their digests, ``tokens_processed`` is how
        far the last process really got, by the odometer: what the syncer does not have of it counts as lost."""
        machine = cls(options, from_plain(LearnerState, plain, "state"))
        machine.state.tokens_processed = max(machine.state.tokens_processed, tokens_processed)
        machine.state.overlap_steps = 0  # A new process finds for itself what its link asks for.
        machine.state.stopping = machine.state.at_rest = machine.state.closed = machine.state.left = False
        machine.state.incarnation = 0  # Until the syncer says what an earlier process sent, no number is ours to give.
        for index, part in enumerate(machine.state.fragments):
            part.fetching, part.fetched, part.doubt = False, part.base_version, None
            part.discards = 0  # Who starts a site again wants it to try again, maybe from a ruined checkpoint.
            for sent in list(part.in_flight):
                if sent.void or sent.outrun:
                    write_off(part, sent)
                    continue
                stored = outbox.get((index, sent.sequence)) == sent.digest
                sent.kept = sent.kept and stored
                if sent.state is not SentState.ACCEPTED and not (sent.state is SentState.SEALED and stored):
                    unsend(options, part, sent)
        settle(machine.state)
        return machine

    def snapshot(self) -> object:
        """All of the memory as plain values."""
        return to_plain(self.state)

    def handle(self, event: LearnerEvent, now_ns: int) -> list[LearnerEffect]:
        """Take ``event`` at instant ``now_ns`` and return what the site must do, in order."""
        del now_ns  # The machine has no deadline of its own; the mirror keeps the signature of ``OuterSync``.
        turn = SiteTurn(self.options, self.state)
        match event:  # The usual ones first.
            case StepDone():
                step_done(turn, event)
            case Sealed():
                sealed(turn, event)
            case PushAnswered():
                push_answered(turn, event)
            case FateTold():
                fate_told(turn, event.fate)
            case VersionFetched():
                fetched(turn, event)
            case VersionPublished():
                published(turn, event)
            case BoundaryReached():
                boundary(turn)
            case OverlapChosen():
                assert 0 <= event.steps < self.options.inner_steps, event
                assert not (event.steps and self.options.lock_step), "lock-step adopts before it goes on"
                self.state.overlap_steps = event.steps
            case TurnElsewhere():
                self.state.elsewhere = event.turn
            case JoinAnswered():
                joined(turn, event)
            case SealFailed():
                seal_failed(turn, event)
            case BaseDiffers():
                differs(turn, event)
            case FetchFailed():
                self.state.fragments[event.fragment].fetching = False
                turn.want(event.fragment)
            case UnitsTold():
                told(turn, event)
            case FinalAnnounced():
                turn.end(event.ending, f"the run is {event.ending.value}")
            case LeaveAsked():
                turn.end(None, "this site was asked to leave")
        if self.state.at_rest:
            _maybe_leave(turn)
        return turn.effects

    def next_deadline_ns(self) -> int | None:
        """A site asks for no instant: it acts between two of its own steps and when it is told something."""
        return None

    def ready(self) -> bool:
        """Whether training may begin: every fragment has a base, none is about to be thrown away, and there is data."""
        if self.options.unit_sequences and not self.state.units.real():
            return False
        return all(part.base_version >= 0 and part.retaking is None for part in self.state.fragments)

    def steps_to_act(self) -> int:
        """Inner steps to the next boundary at which anything may be done, unless something comes meanwhile."""
        return steps_to_act(self.options, self.state)

    def next_turn(self) -> tuple[int, int] | None:
        """Lock-step only: where the fragment that is exchanged next stands among those of the site's other machines."""
        return next_turn(self.options, self.state) if self.options.lock_step else None

    def may_act(self) -> bool:
        """Whether, as things stand, anything would be done with values at the boundary after the next step."""
        return may_act(self.options, self.state, self.state.step + 1)

    def settled(self) -> bool:
        """Whether every update sent has its fate."""
        return not any(part.undecided() or part.orphans for part in self.state.fragments)

    def must_wait(self) -> bool:
        """Lock-step only: whether an update, of an earlier process too, is not yet answered by an adopted version.

        That of a fragment whose turn is over, or that another syncer's comes before, is merged in its next one, and not
        waited for.  When the run has reached
        its bound the word that ends it is on its way, and one more step would be one too many.
        """
        if not self.options.lock_step:
            return False
        part = self.state.fragments[in_turn(self.options, self.state)]
        if comes_first(self.options, self.state) and (part.in_flight or part.orphans):
            return True
        if self.state.progress_ppm >= 1_000_000:
            return True
        return any(each.published > each.base_version for each in self.state.fragments)


def _maybe_leave(turn: SiteTurn) -> None:
    """At rest: say goodbye once nothing is left to send and nothing awaits an answer.

    Not earlier, because a step that was under way when the stop was told still brings tokens.
    """
    state = turn.state
    if state.left or state.incarnation == 0:
        return
    sent = state.closed or all(part.unsent_tokens == 0 for part in state.fragments)
    if sent and not any(part.unanswered() for part in state.fragments):
        state.left = True
        turn.effects.append(Leave(state.ending))
