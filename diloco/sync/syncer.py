"""The outer machine: who is in the run, which updates wait for which round, when a round closes.

Theory of operation.  Every fragment is a small machine of its own.  Updates that were accepted and have no fate yet
*wait*.  The first one opens the fragment's round; its members are the sites live at that instant.  When enough
distinct sites have arrived (``sync/rounds.py``) the grace begins; when it is over, or every live site has arrived,
the round closes into exactly one ``StartOuterStep`` with every waiting update.  The shell computes the step and sends
``OuterStepDone``.  Then the version rises by one, the machine tells the fates of the merged updates, it refuses updates
that have become too stale, and if any update still waits the next round opens at once.

    no round --UpdateArrived--> collecting --quorum, grace--> merging --OuterStepDone--> no round (or collecting)
                                                              merging --OuterStepFailed-> no round (updates refused)

A fragment can collect and merge at the same time: an update that arrives during a merge waits for the next round.
Between its rounds a region also makes versions from those of the syncer above it (``sync/region.py``).

The run ends with one last round per fragment: every live site marks its last update ``final`` or leaves, and the
updates that have arrived by then, or by ``final_deadline_ns``, are merged whatever the quorum.

Everything here is a function of the events and their instants.  The only memory is ``OuterState``; ``Attendance`` keeps
counts of it that every event needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.sync import admission, fates, members, region, rounds
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.data_units import Units
from diloco.sync.journal import JournalError, Record, digest_effects, digest_with_prose, from_plain, to_plain
from diloco.sync.state import Attendance, FragmentState, Machine, OuterState, Phase, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from diloco.sync.options import OuterOptions


class OuterSync(Machine):
    """The syncer's machine.  ``handle`` is its only input; ``next_deadline_ns`` is its only request to the caller."""

    def __init__(self, options: OuterOptions, state: OuterState | None = None) -> None:
        """Continue from ``state`` (of a snapshot); without it, start at version 0 of every fragment."""
        state = state or OuterState(fragments=[FragmentState() for _ in range(options.num_fragments)])
        assert len(state.fragments) == options.num_fragments, "the snapshot has other fragments"
        if options.unit_sequences and state.units is None:
            state.units = Units()
        super().__init__(options, state, Attendance(state))

    @classmethod
    def restore(cls, options: OuterOptions, plain: object) -> OuterSync:
        """Return the machine whose ``snapshot`` is ``plain``; raise ``PlainError`` if ``plain`` describes none."""
        return cls(options, from_plain(OuterState, plain, "state"))

    def snapshot(self) -> object:
        """Return the whole memory as plain values."""
        return to_plain(self.state)

    def handle(self, event: ev.OuterEvent, now_ns: int) -> list[fx.OuterEffect]:
        """Handle ``event`` at instant ``now_ns`` (never falling); return the effects for the shell, in order."""
        assert now_ns >= self.state.now_ns, (now_ns, self.state.now_ns)
        self.state.now_ns = now_ns
        turn = Turn(self.options, self.state, self.attendance)
        RULES.get(type(event), region.heard)(turn, event)
        # The sweep: begin the last round when due, close rounds that may close, end the run when all is final.
        fates.begin_last_round_when_due(turn)
        admission.expire(turn)
        fates.expire(turn)
        for index, fragment in enumerate(self.state.fragments):
            if self.state.upstream is not None:
                region.act(turn, index)
            if fragment.round is not None or self.attendance.arrived[index]:
                rounds.consider(turn, index)
        fates.finish_when_final(turn)
        region.end(turn)
        return turn.effects

    def next_deadline_ns(self) -> int | None:
        """Return the instant at which the machine needs ``DeadlinePassed``, if any."""
        state, now_ns = self.state, self.state.now_ns
        wanted = [fragment.round.deadline_ns for fragment in state.fragments if fragment.round]
        wanted += [expires_ns for *_, expires_ns in admission.held_updates(self)]
        wanted += [since_ns + self.options.lease_ns for since_ns in fates.silent_since(state).values()]
        if state.phase is Phase.ENDING:
            wanted.append(state.final_deadline_ns)
        elif state.phase is Phase.RUNNING and self.options.run_ns and state.started_ns is not None:
            wanted.append(state.started_ns + self.options.run_ns)
        # A past deadline is left out: if a merge holds its action back, the sweep after that merge sees it again.
        return min([instant for instant in wanted if instant is not None and instant > now_ns], default=None)

    def progress_ppm(self) -> int:
        """Return the run's progress in millionths: by tokens, by time or of the run above, whichever is further."""
        options, state = self.options, self.state
        shares = [part.learner.progress_ppm for part in state.upstream.parts] if state.upstream is not None else [0]
        if options.token_budget:
            shares.append(self.attendance.run_tokens() * 1_000_000 // options.token_budget)
        if options.run_ns and state.started_ns is not None:
            shares.append((state.now_ns - state.started_ns) * 1_000_000 // options.run_ns)
        return min(1_000_000, max(shares))

    def announced(self, fragment: int, version: int) -> ev.VersionPublished:
        """Return the event that announces a version to the sites, with the run's present state."""
        state = self.state
        run = (self.attendance.run_tokens(), self.progress_ppm(), state.lineage)
        return ev.VersionPublished(state.epoch, fragment, version, *run, admission.fastest_step_ns(state))

    def under_way(self, index: int, leave_out: Collection[tuple[str, int]] = ()) -> fx.StartOuterStep | fx.TakeVersion:
        """Return the effect under way that makes the next version of fragment ``index``, as if the updates of
        ``leave_out`` (site, sequence) had never come."""
        return region.taking(self.state, index) or rounds.outer_step(self, index, leave_out)


def _started(turn: Turn, event: ev.SyncerStarted) -> None:
    state = turn.state
    assert event.epoch > state.epoch, (event.epoch, state.epoch)
    state.epoch = event.epoch
    state.away_ns += admission.AWAY_UNKNOWN_NS if event.away_ns is None else event.away_ns
    state.health = event.health or state.health
    if event.sites_max is not None:
        if state.sites_max not in (None, event.sites_max):
            turn.note("settings_changed", f"outer.sites_max is {event.sites_max} and was {state.sites_max}")
        state.sites_max = event.sites_max
    region.mark_not_joined(state)
    if state.phase is Phase.ENDED and state.ending is ev.Ending.DRAINED:
        fates.resume(state)
        turn.note("resumed", "the run had been drained")
    for index, fragment in enumerate(state.fragments):
        if fragment.merging_since_ns is not None:
            turn.effects.append(region.taking(state, index) or rounds.outer_step(turn, index))
            turn.note("outer_step_again", "it was under way when the last process ended", fragment=index)
        fates.refuse_stale(turn, index)  # This process may have a smaller ``staleness_max``.
    if state.ending is not None:  # The last process may have ended after the journal record, before the announcement.
        turn.effects.append(fx.AnnounceFinal(state.ending))
    if state.phase is Phase.ENDED:
        fates.mark_final(turn)


def _standby(turn: Turn, event: ev.StandbyDetached | ev.StandbyAttached) -> None:
    turn.state.detached = isinstance(event, ev.StandbyDetached)
    if isinstance(event, ev.StandbyDetached):
        turn.effects.append(fx.AnswerDone(event.call))
        turn.note("standby_detached", "from now on one disk holds what is acknowledged")
    else:
        turn.note("standby_attached", f"{event.standby} has everything: two disks hold what is acknowledged")


def _units_asked(turn: Turn, event: ev.UnitsAsked) -> None:
    reason = fates.refusal(turn.state, event)
    if reason is not None:
        turn.effects.append(fx.AnswerUnits(event.call, 0, (), reason))
        return
    members.came_back(turn, event.site)  # Otherwise the answer could list units that have been given back.
    fates.asked(turn, event)


def _drain(turn: Turn, event: ev.DrainRequested) -> None:
    fates.begin_last_round(turn, ev.Ending.DRAINED, "an operator asked for a pause")
    turn.effects.append(fx.AnswerDone(event.call))


RULES: Mapping[type[ev.OuterEvent], Callable[[Turn, Any], None]] = {
    ev.UpdateArrived: rounds.update_arrived,
    ev.OuterStepDone: rounds.outer_step_done,
    ev.OuterStepFailed: rounds.outer_step_failed,
    ev.DeadlinePassed: lambda turn, event: None,  # The sweep checks every deadline anyway.
    ev.JoinRequested: members.join,
    ev.UnitsAsked: _units_asked,
    ev.SiteSilent: members.silent,
    ev.SiteHeard: lambda turn, event: members.came_back(turn, event.site),
    ev.SiteLeft: members.left,
    ev.SiteEvicted: members.evicted,
    ev.SiteReadmitted: members.readmitted,
    ev.UpdateAdmitted: admission.admitted,
    ev.UpdateWithdrawn: admission.withdrawn,
    ev.DrainRequested: _drain,
    ev.StandbyDetached: _standby,
    ev.StandbyAttached: _standby,
    ev.SyncerStarted: _started,
    ev.LineageBegan: members.lineage_began,
    ev.UpstreamStarted: region.started,
}
"""The handler of each event; ``region.heard`` handles all others."""


# --- Replay


class Replay:
    """Lets ``machine`` decide records again, one by one.  A subclass recomputes the values as well (``step_done``).

    After a failure the state is inconsistent: discard the replay.
    """

    def __init__(self, machine: OuterSync) -> None:
        self.machine = machine
        self.records = 0

    def apply(self, record: Record) -> list[fx.OuterEffect]:
        """Apply ``record``, bring the values up to date, and return its effects.

        ``JournalError`` when the machine decides otherwise than when the record was written.
        """
        event = record.event
        command = self.machine.under_way(event.fragment) if isinstance(event, ev.OuterStepDone) else None
        effects = self.machine.handle(event, record.at_ns)
        found = digest_effects(effects)
        # Earlier versions digested the prose of notes as well; their journals are accepted while it is unchanged.
        if record.effects_digest not in (found, digest_with_prose(effects)):
            raise JournalError(
                f"record {self.records} ({type(event).__name__} at {record.at_ns} ns) had effects "
                f"{record.effects_digest} when it was written and {found} now: another version or other options"
            )
        self.records += 1
        if isinstance(event, ev.OuterStepDone) and command is not None:
            self.step_done(event, command)
        elif isinstance(event, ev.LineageBegan):
            self.lineage_began(event)
        return effects

    def step_done(self, event: ev.OuterStepDone, command: fx.StartOuterStep | fx.TakeVersion) -> None:
        """Hook: recompute the version that ``command`` made, and compare it with the digests of ``event``."""

    def lineage_began(self, event: ev.LineageBegan) -> None:
        """Hook: take the versions with which the lineage began: later versions are computed from them."""
