"""The outer machine: who is in the run, which updates wait for which round, when a round closes.

Theory of operation.  Every fragment is a small machine of its own.  Updates that were accepted and have no fate yet
*wait*.  The first one opens the fragment's round; its members are the sites live at that instant.  When enough
distinct sites have arrived (``sync/quorum.py``) the grace begins; when it is over, or every live site has arrived,
the round closes into exactly one ``StartOuterStep`` with everything that waits.  The shell computes the step and says
``OuterStepDone``; the version rises by one, the fates of its updates are told, what has become too stale is
refused, and if anything still waits the next round opens at once.

    no round --UpdateArrived--> collecting --quorum, grace--> merging --OuterStepDone--> no round (or collecting)
                                                              merging --OuterStepFailed-> no round (updates refused)

A fragment can collect and merge at the same time: an update that arrives during a merge waits for the next round.

The end is one last round per fragment: every live site marks its last update ``final`` or leaves, and whatever has
arrived by then, or by ``final_deadline_ns``, is merged whatever the quorum.

Everything here is a function of the events and their instants.  Memory is ``OuterState`` and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.admission import Verdict, admit
from diloco.sync.effects import (
    AnnounceFinal,
    AnswerDone,
    AnswerJoin,
    AnswerPush,
    Contribution,
    DropSite,
    MarkFinal,
    Note,
    OuterEffect,
    PublishVersion,
    StartOuterStep,
    TellFate,
    UpdateRef,
)
from diloco.sync.events import (
    DISCARDING,
    DeadlinePassed,
    DrainRequested,
    Ending,
    Fate,
    FragmentStanding,
    JoinRequested,
    Outcome,
    OuterEvent,
    OuterStepDone,
    OuterStepFailed,
    Reason,
    SiteEvicted,
    SiteHeard,
    SiteLeft,
    SiteSilent,
    SyncerStarted,
    UpdateArrived,
)
from diloco.sync.plain import from_plain, to_plain
from diloco.sync.quorum import grace_ns, smoothed, standing
from diloco.sync.state import FragmentState, Line, OuterState, Pending, Phase, Round, Site, Status
from diloco.sync.weights import normalised, raw_weight

if TYPE_CHECKING:
    from diloco.sync.options import OuterOptions

PROCESSES_REMEMBERED_MAX = 16
"""Names of replaced processes kept per site, so that an old one that comes back late does not fence the new."""


class OuterSync:
    """The syncer's machine.  ``handle`` is the only way in; ``next_deadline_ns`` the only thing it asks."""

    def __init__(self, options: OuterOptions, state: OuterState | None = None) -> None:
        """``state`` continues an earlier machine (from a snapshot); without it, version 0 of every fragment."""
        self.options = options
        self.state = state or OuterState(fragments=[FragmentState() for _ in range(options.num_fragments)])
        assert len(self.state.fragments) == options.num_fragments, "the snapshot has other fragments"
        self._effects: list[OuterEffect] = []

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
        self._effects = []
        match event:
            case SyncerStarted():
                self._started(event)
            case JoinRequested():
                self._join(event)
            case UpdateArrived():
                self._update_arrived(event)
            case OuterStepDone():
                self._outer_step_done(event)
            case OuterStepFailed():
                self._outer_step_failed(event)
            case SiteSilent() | SiteHeard():
                self._presence(event)
            case SiteLeft():
                self._left(event)
            case SiteEvicted():
                self._evicted(event)
            case DrainRequested():
                self._begin_ending(Ending.DRAINED, "an operator asked for a pause")
                self._effects.append(AnswerDone(event.call))
            case DeadlinePassed():
                pass  # The sweep below looks at every deadline anyway.
        self._sweep()
        return self._effects

    def next_deadline_ns(self) -> int | None:
        """The instant at which ``DeadlinePassed`` is wanted, if any."""
        state = self.state
        wanted = [f.round.deadline_ns for f in state.fragments if f.round and f.round.deadline_ns is not None]
        wanted = [instant for instant in wanted if instant is not None]
        if state.phase is Phase.ENDING and state.final_deadline_ns is not None:
            wanted.append(state.final_deadline_ns)
        run_end_ns = self._run_end_ns()
        if state.phase is Phase.RUNNING and run_end_ns is not None:
            wanted.append(run_end_ns)
        # A deadline that a merge under way keeps from acting on is asked for again when that merge is done.
        ahead = [instant for instant in wanted if instant > state.now_ns]
        return min(ahead) if ahead else None

    def admit(
        self, site: str, incarnation: int, fragment: int, sequence: int, base_version: int, digest: str
    ) -> Verdict:
        """What ``UpdateArrived`` would be answered now, judged by the header; changes nothing."""
        return admit(self.state, self.options, site, incarnation, fragment, sequence, base_version, digest)

    def progress_ppm(self) -> int:
        """The run's progress in millionths: by tokens or by time, whichever is further."""
        options, state = self.options, self.state
        shares = [0]
        if options.token_budget:
            shares.append(state.run_tokens() * 1_000_000 // options.token_budget)
        if options.run_ns and state.started_ns is not None:
            shares.append((state.now_ns - state.started_ns) * 1_000_000 // options.run_ns)
        return min(1_000_000, max(shares))

    def standings(self, site: str) -> tuple[FragmentStanding, ...]:
        """What the syncer knows of ``site``, fragment by fragment."""
        lines = self.state.sites[site].lines
        return tuple(
            FragmentStanding(
                fragment=index,
                version=fragment.version,
                digest=fragment.digest,
                watermark=line.watermark,
                cursor=line.cursor,
                tokens_merged=line.tokens_merged,
                tokens_discarded=line.tokens_discarded,
                undecided=tuple((pending.sequence, pending.tokens) for pending in line.undecided),
                fates=tuple(line.fates),
            )
            for index, (fragment, line) in enumerate(zip(self.state.fragments, lines, strict=True))
        )

    # --- membership --------------------------------------------------------------------------------------------

    def _started(self, event: SyncerStarted) -> None:
        assert event.epoch > self.state.epoch, (event.epoch, self.state.epoch)
        self.state.epoch = event.epoch
        if self.state.phase is Phase.ENDED and self.state.ending is Ending.DRAINED:
            self.state.phase, self.state.ending, self.state.final_deadline_ns = Phase.RUNNING, None, None
            for site in self.state.sites.values():
                for line in site.lines:
                    line.final = False
            self._note("resumed", "the run had been drained")
        for index, fragment in enumerate(self.state.fragments):
            if fragment.merging_since_ns is not None:
                self._effects.append(self.outer_step(index))
                self._note("outer_step_again", "it was under way when the last process ended", fragment=index)
            self._refuse_stale(index)  # The bound may be a smaller one in this process.
        if self.state.ending is not None:  # The last process may have ended between the record and the word.
            self._effects.append(AnnounceFinal(self.state.ending))
        if self.state.phase is Phase.ENDED:
            self._mark_final()

    def _join(self, event: JoinRequested) -> None:
        site = self.state.sites.get(event.site)
        reason = self._join_refusal(event, site)
        if reason is not None:
            self._effects.append(AnswerJoin(event.call, event.site, 0, (), self.state.ending, reason))
            return
        if site is None:
            lines = [Line() for _ in self.state.fragments]
            site = self.state.sites[event.site] = Site(1, event.process, Status.LIVE, lines)
            self._note("site_joined", "it was never seen before", site=event.site)
        elif site.process != event.process:
            self._effects.append(DropSite(event.site, site.incarnation, Reason.SUPERSEDED))
            site.superseded = [*site.superseded, site.process][-PROCESSES_REMEMBERED_MAX:]
            site.process = event.process
            site.incarnation += 1
            for line in site.lines:
                line.final = False
            self._note("site_joined", f"a new process speaks for it: incarnation {site.incarnation}", site=event.site)
        elif site.status is not Status.LIVE:
            self._note("site_back", f"it was {site.status.value}", site=event.site)
        site.status = Status.LIVE
        if self.state.started_ns is None:
            self.state.started_ns = self.state.now_ns
        standings = self.standings(event.site)
        self._effects.append(AnswerJoin(event.call, event.site, site.incarnation, standings, self.state.ending, None))

    def _join_refusal(self, event: JoinRequested, site: Site | None) -> Reason | None:
        if site is None:
            return Reason.FULL if len(self.state.sites) >= self.options.sites_max else None
        if site.status is Status.EVICTED:
            return Reason.EVICTED
        return Reason.SUPERSEDED if event.process in site.superseded else None

    def _presence(self, event: SiteSilent | SiteHeard) -> None:
        site = self.state.sites[event.site]
        if isinstance(event, SiteSilent) and site.status is Status.LIVE:
            site.status = Status.SILENT
            self._note("site_silent", f"nothing heard for {self.options.site_timeout_ns / 1e9:g} s", site=event.site)
        elif isinstance(event, SiteHeard) and site.status is Status.SILENT:
            self._back(event.site, site)

    def _back(self, name: str, site: Site) -> None:
        site.status = Status.LIVE
        self._note("site_back", "it was heard again", site=name)

    def _left(self, event: SiteLeft) -> None:
        site = self.state.sites.get(event.site)
        if site is None or site.incarnation != event.incarnation or site.status is Status.EVICTED:
            reason = Reason.NOT_JOINED if site is None else Reason.FENCED
            self._effects.append(AnswerDone(event.call, reason))
            return
        site.status = Status.LEFT
        self._effects.append(AnswerDone(event.call))
        self._note("site_left", "it said goodbye", site=event.site)

    def _evicted(self, event: SiteEvicted) -> None:
        site = self.state.sites.get(event.site)
        if site is None:
            self._effects.append(AnswerDone(event.call, Reason.NOT_JOINED))
            return
        site.status = Status.EVICTED
        for index, line in enumerate(site.lines):
            for pending in line.waiting():
                self._refuse(event.site, index, pending, Reason.EVICTED)
        self._effects += [DropSite(event.site, site.incarnation, Reason.EVICTED), AnswerDone(event.call)]
        self._note("site_evicted", "an operator's word", site=event.site)

    # --- updates and rounds ------------------------------------------------------------------------------------

    def _update_arrived(self, event: UpdateArrived) -> None:
        assert event.tokens > 0, event
        assert event.steps > 0, event
        verdict = self.admit(
            event.site, event.incarnation, event.fragment, event.sequence, event.base_version, event.digest
        )
        if verdict.outcome is Outcome.ACCEPTED and not event.finite:
            verdict = Verdict(Outcome.REFUSED, Reason.NON_FINITE)
        known = 0 <= event.fragment < len(self.state.fragments)
        version = self.state.fragments[event.fragment].version if known else 0
        self._effects.append(AnswerPush(event.call, verdict.outcome, version, verdict.reason, verdict.fate))
        if verdict.outcome is not Outcome.ACCEPTED:
            return
        site, fragment = self.state.sites[event.site], self.state.fragments[event.fragment]
        if site.status is Status.SILENT:
            self._back(event.site, site)
        site.step_ns = smoothed(site.step_ns, event.step_ns)
        line = site.lines[event.fragment]
        line.watermark, line.cursor, line.final = event.sequence, max(line.cursor, event.cursor), event.final
        line.undecided.append(
            Pending(
                event.sequence,
                event.base_version,
                event.tokens,
                event.steps,
                event.digest,
                event.payload,
                event.encoding,
            )
        )
        if fragment.round is None:
            self._open_round(event.fragment)

    def _open_round(self, index: int) -> None:
        fragment = self.state.fragments[index]
        fragment.round = Round(members=self.state.live(), opened_ns=self.state.now_ns)

    def _sweep(self) -> None:
        """After every event: begin the end if it is time, close what may close, finish when all is final."""
        state = self.state
        if state.phase is Phase.RUNNING:
            if self.options.token_budget and state.run_tokens() >= self.options.token_budget:
                self._begin_ending(Ending.FINISHED, f"{state.run_tokens()} tokens are merged")
            run_end_ns = self._run_end_ns()
            if run_end_ns is not None and state.now_ns >= run_end_ns:
                self._begin_ending(Ending.FINISHED, f"{self.options.run_ns / 1e9:g} s have passed")
        for index, fragment in enumerate(state.fragments):
            self._consider(index, fragment)
        if state.phase is Phase.ENDING and all(self._is_final(index) for index in range(len(state.fragments))):
            state.phase = Phase.ENDED
            self._mark_final()

    def _consider(self, index: int, fragment: FragmentState) -> None:
        """Close the fragment's round if it may close; start its grace when the quorum is met.

        A merge under way keeps the round open, but quorum and grace do not wait for it.
        """
        arrived = self.state.arrived(index)
        if not arrived:
            fragment.round = None  # Every update of it was refused: no version is made of nothing.
            return
        if fragment.round is None:
            self._open_round(index)
        assert fragment.round is not None
        shrunk = self._shrink(index, fragment.round, arrived)
        merging = fragment.merging_since_ns is not None
        if not merging and self._all_final(index):
            self._close(index, "the last round is complete")
            return
        stand = standing(self.options, fragment.round.members, self.state.live(), arrived)
        if not stand.met:
            fragment.round.met_ns = fragment.round.deadline_ns = None
            if shrunk and set(fragment.round.members) <= set(arrived):
                self._note("round_waits", stand.why, fragment=index)
            return
        now_ns = self.state.now_ns
        if fragment.round.met_ns is None:
            fragment.round.met_ns = now_ns
            wait_ns = self._grace_ns(fragment)
            fragment.round.deadline_ns = now_ns + wait_ns
            fragment.quorum_ns = smoothed(fragment.quorum_ns, now_ns - fragment.round.opened_ns)
            if wait_ns and not stand.complete:
                self._note("grace", f"{stand.why}; {wait_ns / 1e6:.0f} ms for more", fragment=index)
        assert fragment.round.deadline_ns is not None
        if merging:
            return
        if stand.complete:
            self._close(index, "every live site arrived")
        elif now_ns >= fragment.round.deadline_ns:
            self._close(index, f"{stand.why}; grace over")

    def _shrink(self, index: int, open_round: Round, arrived: list[str]) -> bool:
        """A member that is gone is waited for no more; what it has delivered still counts."""
        waited_for = {*self.state.live(), *arrived}
        gone = [name for name in open_round.members if name not in waited_for]
        for name in gone:
            open_round.members.remove(name)
            why = f"its status is {self.state.sites[name].status.value}: {len(open_round.members)} members remain"
            self._note("round_shrunk", why, site=name, fragment=index)
        return bool(gone)

    def _grace_ns(self, fragment: FragmentState) -> int:
        step_ns = max((self.state.sites[name].step_ns for name in self.state.live()), default=0)
        return grace_ns(self.options, step_ns, fragment.quorum_ns, fragment.sync_ns)

    def _close(self, index: int, why: str) -> None:
        fragment = self.state.fragments[index]
        for site in self.state.sites.values():
            for pending in site.lines[index].undecided:
                assert fragment.version - pending.base_version <= self.options.staleness_max, "stale at the merge"
                pending.merging = True
        fragment.round = None
        fragment.merging_since_ns = self.state.now_ns
        self._note("round_closed", why, fragment=index, version=fragment.version + 1)
        self._effects.append(self.outer_step(index))

    def outer_step(self, index: int) -> StartOuterStep:
        """The outer step that is under way, from the memory alone, so that a restart gives the same one."""
        merging = {
            name: [pending for pending in self.state.sites[name].lines[index].undecided if pending.merging]
            for name in sorted(self.state.sites)
        }
        merging = {name: updates for name, updates in merging.items() if updates}
        raw = [
            raw_weight(self.options.weights, sum(u.tokens for u in updates), sum(u.steps for u in updates))
            for updates in merging.values()
        ]
        contributions = tuple(
            Contribution(
                name,
                weight,
                min(update.base_version for update in updates),
                tuple(UpdateRef(u.sequence, u.payload, u.encoding, u.digest) for u in updates),
            )
            for (name, updates), weight in zip(merging.items(), normalised(raw), strict=True)
        )
        return StartOuterStep(index, self.state.fragments[index].version + 1, contributions)

    def _outer_step_done(self, event: OuterStepDone) -> None:
        fragment = self.state.fragments[event.fragment]
        assert fragment.merging_since_ns is not None, event
        assert event.version == fragment.version + 1, event
        fragment.version, fragment.digest = event.version, event.digest
        fragment.sync_ns = smoothed(fragment.sync_ns, self.state.now_ns - fragment.merging_since_ns)
        fragment.merging_since_ns = None
        fates: list[TellFate] = []
        for name, pending in self._under_merge(event.fragment):
            fates.append(self._decide(name, event.fragment, pending, event.version, None))
        self._effects += [PublishVersion(event.fragment, event.version, event.digest), *fates]
        self._refuse_stale(event.fragment)

    def _refuse_stale(self, index: int) -> None:
        """Staleness is judged against the version that the next outer step begins from."""
        version = self.state.fragments[index].version
        for name in sorted(self.state.sites):
            for pending in self.state.sites[name].lines[index].waiting():
                if version - pending.base_version > self.options.staleness_max:
                    self._refuse(name, index, pending, Reason.STALE)

    def _outer_step_failed(self, event: OuterStepFailed) -> None:
        fragment = self.state.fragments[event.fragment]
        assert fragment.merging_since_ns is not None, event
        fragment.merging_since_ns = None
        for name, pending in self._under_merge(event.fragment):
            self._refuse(name, event.fragment, pending, Reason.NON_FINITE)

    def _under_merge(self, index: int) -> list[tuple[str, Pending]]:
        sites = self.state.sites
        return [(name, p) for name in sorted(sites) for p in list(sites[name].lines[index].undecided) if p.merging]

    def _refuse(self, name: str, index: int, pending: Pending, reason: Reason) -> None:
        version = self.state.fragments[index].version
        self._effects.append(self._decide(name, index, pending, version, reason))
        self._note("update_refused", f"{reason.value}: sequence {pending.sequence}", site=name, fragment=index)

    def _decide(self, name: str, index: int, pending: Pending, version: int, reason: Reason | None) -> TellFate:
        """Give an accepted update its one fate."""
        line = self.state.sites[name].lines[index]
        line.undecided.remove(pending)
        fate = Fate(index, pending.sequence, version, pending.tokens, pending.digest, reason)
        line.fates = [*line.fates, fate][-self.options.fates_kept_max :]
        if reason is None:
            line.tokens_merged += pending.tokens
            line.updates_merged += 1
        else:
            line.updates_refused[reason.value] = line.updates_refused.get(reason.value, 0) + 1
            if reason in DISCARDING:
                line.tokens_discarded += pending.tokens
            else:
                line.final = False  # The site kept the progress and sends it once more.
        return TellFate(name, fate)

    # --- the end -----------------------------------------------------------------------------------------------

    def _run_end_ns(self) -> int | None:
        if not self.options.run_ns or self.state.started_ns is None:
            return None
        return self.state.started_ns + self.options.run_ns

    def _begin_ending(self, ending: Ending, why: str) -> None:
        if self.state.phase is not Phase.RUNNING:
            return
        self.state.phase, self.state.ending = Phase.ENDING, ending
        self.state.final_deadline_ns = self.state.now_ns + self.options.final_wait_ns
        self._effects.append(AnnounceFinal(ending))
        self._note("last_round", why)

    def _mark_final(self) -> None:
        assert self.state.ending is not None
        self._effects.append(MarkFinal(self.state.ending, tuple(f.version for f in self.state.fragments)))

    def _all_final(self, index: int) -> bool:
        """Whether nothing more can arrive for the fragment in the last round before it closes.

        A site whose window is full is no reason to wait: it sends its last update after the fates that a close brings.
        """
        state = self.state
        if state.phase is not Phase.ENDING:
            return False
        assert state.final_deadline_ns is not None
        if state.now_ns >= state.final_deadline_ns:
            return True
        lines = [state.sites[name].lines[index] for name in state.live()]
        return all(line.final or len(line.undecided) >= self.options.updates_in_flight_max for line in lines)

    def _is_final(self, index: int) -> bool:
        fragment = self.state.fragments[index]
        return fragment.merging_since_ns is None and not self.state.arrived(index) and self._all_final(index)

    def _note(
        self, what: str, why: str, *, site: str | None = None, fragment: int | None = None, version: int | None = None
    ) -> None:
        self._effects.append(Note(what, why, site, fragment, version))
