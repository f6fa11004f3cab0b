"""The outer machine: who is in the run, which updates wait for which round, when a round closes.

Theory of operation.  Every fragment is a small machine of its own.  Updates that were accepted and have no fate yet
*wait*.  The first one opens the fragment's round; its members are the sites live at that instant.  When enough
distinct sites have arrived (``sync/rounds.py``) the grace begins; when it is over, or every live site has arrived,
the round closes into exactly one ``StartOuterStep`` with everything that waits.  The shell computes the step and says
``OuterStepDone``; the version rises by one, the fates of its updates are told, what has become too stale is
refused, and if anything still waits the next round opens at once.

    no round --UpdateArrived--> collecting --quorum, grace--> merging --OuterStepDone--> no round (or collecting)
                                                              merging --OuterStepFailed-> no round (updates refused)

A fragment can collect and merge at the same time: an update that arrives during a merge waits for the next round.
A region makes versions of another kind between its rounds, out of those of the syncer above it (``sync/region.py``).

The end is one last round per fragment: every live site marks its last update ``final`` or leaves, and whatever has
arrived by then, or by ``final_deadline_ns``, is merged whatever the quorum.

Everything here is a function of the events and their instants.  Memory is ``OuterState`` and nothing else; what is
asked of it at every event is counted along in ``Attendance``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import ending, fates, region
from diloco.sync.admission import AWAY_UNKNOWN_NS, Verdict, admit, admitted, deadline_ns, expire, withdrawn
from diloco.sync.data_units import Units
from diloco.sync.effects import AnnounceFinal, AnswerDone, OuterEffect, StartOuterStep, TakeVersion
from diloco.sync.events import (
    DeadlinePassed,
    DrainRequested,
    Ending,
    FragmentStanding,
    JoinRequested,
    LineageBegan,
    OuterEvent,
    OuterStepDone,
    OuterStepFailed,
    SiteEvicted,
    SiteHeard,
    SiteLeft,
    SiteReadmitted,
    SiteSilent,
    StandbyAttached,
    StandbyDetached,
    SyncerStarted,
    UnitsAsked,
    UpdateAdmitted,
    UpdateArrived,
    UpdateWithdrawn,
)
from diloco.sync.fates import refuse_stale
from diloco.sync.members import came_back, evicted, join, left, lineage_began, presence, readmitted, standings
from diloco.sync.plain import from_plain, to_plain
from diloco.sync.rounds import consider, outer_step, outer_step_done, outer_step_failed, update_arrived
from diloco.sync.state import FragmentState, OuterState, Phase
from diloco.sync.turn import Attendance, Turn

if TYPE_CHECKING:
    from diloco.sync.options import OuterOptions


class OuterSync:
    """The syncer's machine.  ``handle`` is the only way in; ``next_deadline_ns`` the only thing it asks."""

    def __init__(self, options: OuterOptions, state: OuterState | None = None) -> None:
        """``state`` continues an earlier machine (from a snapshot); without it, version 0 of every fragment."""
        self.options = options
        self.state = state or OuterState(fragments=[FragmentState() for _ in range(options.num_fragments)])
        assert len(self.state.fragments) == options.num_fragments, "the snapshot has other fragments"
        if options.unit_sequences and self.state.units is None:
            self.state.units = Units()
        self.attendance = Attendance(self.state)

    @classmethod
    def restore(cls, options: OuterOptions, plain: object) -> OuterSync:
        """The machine whose ``snapshot`` is ``plain``; ``PlainError`` if it describes none."""
        return cls(options, from_plain(OuterState, plain, "state"))

    def snapshot(self) -> object:
        """All of the memory as plain values."""
        return to_plain(self.state)

    def handle(self, event: OuterEvent, now_ns: int) -> list[OuterEffect]:
        """Take ``event`` at instant ``now_ns`` (never falling) and return what the world must do, in order."""
        assert now_ns >= self.state.now_ns, (now_ns, self.state.now_ns)
        self.state.now_ns = now_ns
        turn = Turn(self.options, self.state, self.attendance)
        match event:  # The usual ones first.
            case UpdateArrived():
                update_arrived(turn, event)
            case OuterStepDone():
                outer_step_done(turn, event)
            case DeadlinePassed():
                pass  # The sweep below looks at every deadline anyway.
            case SyncerStarted():
                _started(turn, event)
            case LineageBegan():
                lineage_began(turn, event)
            case JoinRequested():
                join(turn, event)
            case OuterStepFailed():
                outer_step_failed(turn, event)
            case UnitsAsked():
                if fates.refusal(self.state, event) is None:
                    came_back(turn, event.site)  # Or what it is told would be that of a site that is gone.
                fates.asked(turn, event)
            case SiteSilent() | SiteHeard():
                presence(turn, event)
            case SiteLeft():
                left(turn, event)
            case SiteEvicted():
                evicted(turn, event)
            case SiteReadmitted():
                readmitted(turn, event)
            case UpdateAdmitted():
                admitted(turn, event)
            case UpdateWithdrawn():
                withdrawn(turn, event)
            case DrainRequested():
                ending.begin(turn, Ending.DRAINED, "an operator asked for a pause")
                turn.effects.append(AnswerDone(event.call))
            case StandbyDetached() | StandbyAttached():
                _standby(turn, event)
            case _:
                region.heard(turn, event)
        _sweep(turn)
        return turn.effects

    def next_deadline_ns(self) -> int | None:
        """The instant at which ``DeadlinePassed`` is wanted, if any."""
        state, now_ns = self.state, self.state.now_ns
        wanted = [fragment.round.deadline_ns for fragment in state.fragments if fragment.round]
        wanted.append(deadline_ns(state, self.attendance))
        wanted.append(fates.deadline_ns(self.options, state))
        if state.phase is Phase.ENDING:
            wanted.append(state.final_deadline_ns)
        elif state.phase is Phase.RUNNING:
            wanted.append(ending.run_end_ns(self.options, state))
        # A deadline that a merge under way keeps from acting on is asked for again when that merge is done.
        return min([instant for instant in wanted if instant is not None and instant > now_ns], default=None)

    def admit(
        self, site: str, incarnation: int, fragment: int, sequence: int, base_version: int, digest: str
    ) -> Verdict:
        """What ``UpdateArrived`` would be answered now, judged by the header; changes nothing."""
        return admit(self.state, self.options, site, incarnation, fragment, sequence, base_version, digest)

    def progress_ppm(self) -> int:
        """The run's progress in millionths: by tokens or by time, whichever is further."""
        options, state = self.options, self.state
        shares = [region.progress_ppm(state)]
        if options.token_budget:
            shares.append(self.attendance.run_tokens() * 1_000_000 // options.token_budget)
        if options.run_ns and state.started_ns is not None:
            shares.append((state.now_ns - state.started_ns) * 1_000_000 // options.run_ns)
        return min(1_000_000, max(shares))

    def standings(self, site: str) -> tuple[FragmentStanding, ...]:
        """What the syncer knows of ``site``, fragment by fragment."""
        return standings(self.state, site)

    def outer_step(self, index: int) -> StartOuterStep:
        """The outer step of fragment ``index`` that is under way."""
        return outer_step(self.options, self.state, index)

    def under_way(self, index: int) -> StartOuterStep | TakeVersion:
        """What makes the next version of fragment ``index`` at this moment."""
        return region.taking(self.state, index) or self.outer_step(index)


def _started(turn: Turn, event: SyncerStarted) -> None:
    state = turn.state
    assert event.epoch > state.epoch, (event.epoch, state.epoch)
    state.epoch = event.epoch
    state.away_ns += AWAY_UNKNOWN_NS if event.away_ns is None else event.away_ns
    state.health = event.health or state.health
    if event.sites_max is not None:
        if state.sites_max not in (None, event.sites_max):
            turn.note("settings_changed", f"outer.sites_max is {event.sites_max} and was {state.sites_max}")
        state.sites_max = event.sites_max
    region.nobody_speaks(state)
    if state.phase is Phase.ENDED and state.ending is Ending.DRAINED:
        ending.resume(state)
        turn.note("resumed", "the run had been drained")
    for index, fragment in enumerate(state.fragments):
        if fragment.merging_since_ns is not None:
            turn.effects.append(region.taking(state, index) or outer_step(turn.options, state, index))
            turn.note("outer_step_again", "it was under way when the last process ended", fragment=index)
        refuse_stale(turn, index)  # The bound may be a smaller one in this process.
    if state.ending is not None:  # The last process may have ended between the record and the word.
        turn.effects.append(AnnounceFinal(state.ending))
    if state.phase is Phase.ENDED:
        ending.mark_final(turn)


def _standby(turn: Turn, event: StandbyDetached | StandbyAttached) -> None:
    turn.state.detached = isinstance(event, StandbyDetached)
    if isinstance(event, StandbyDetached):
        turn.effects.append(AnswerDone(event.call))
        turn.note("standby_detached", "from now on one disk holds what is acknowledged")
    else:
        turn.note("standby_attached", f"{event.standby} has everything: two disks hold what is acknowledged")


def _sweep(turn: Turn) -> None:
    """After every event: begin the end if it is time, close what may close, finish when all is final."""
    ending.begin_when_due(turn)
    expire(turn)
    fates.expire(turn)
    arrived, is_region = turn.attendance.arrived, turn.state.upstream is not None
    for index, fragment in enumerate(turn.state.fragments):
        if is_region:
            region.act(turn, index)
        if fragment.round is not None or arrived[index]:
            consider(turn, index)
    ending.finish_when_final(turn)
    region.end(turn)
