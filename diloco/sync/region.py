"""A region: a syncer to its sites, and a site to the syncer above it (HALoS, arXiv 2506.04531).

Theory of operation.  Each fragment has its own site machine (``learner.py``) in the region's memory.  One inner step of
that machine is one update merged in the region; after ``updates`` of them the region's progress goes up as one update,
with their tokens and inner steps.  Messages from above are events of the outer machine, and in its journal.  The
effects of the site machine on values are carried out between two outer steps of the fragment:

    Adopt, Retake   --> TakeVersion, a version without updates: share alpha of the version above, or all of it
    Seal            --> the shell encodes (values after the last TakeVersion - values now), less what was sent since

Versions from above are durable in the spool as fp32 before the machine's event, so that a replay takes the same ones.
An update's bytes stay in the outbox as long as the site machine has it in its list, so that "what was sent since" is
available after a crash as well: ``Release`` ends that, and ``Forget`` has no effect here.  A standby gets both kinds of
file before the records that name them, and an update before the region sends it.

Until a fragment has a base its rounds stay open: progress merged without a base could never go up.  In the last round
the region takes and sends nothing any more; after it, the rest goes up as the last update, and the region leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.fates import begin_last_round, resume
from diloco.sync.journal import to_plain
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions
from diloco.sync.progress import Retaking, Standing, standing_of
from diloco.sync.state import OuterState, Part, Pending, Phase, Turn, Upstream, VersionAbove

V = TypeVar("V", contravariant=True)
OUTBOX = "above/outbox"
"""Folder in the region's data folder for its updates to the syncer above, until they are released."""


def outbox_file(fragment: int, sequence: int) -> str:
    """Return the path, in the data folder, of an update for the syncer above."""
    return f"{OUTBOX}/{fragment}-{sequence}.update"


# --- between the two shells ------------------------------------------------------------------------------------


class Below(Protocol):
    """The region's syncer, as its client to the syncer above (``Above``) sees it.  Any thread may call."""

    def tell(self, event: ev.RegionEvent) -> None:
        """Hand an event to the machine; events are handled in order of arrival."""

    def keep(self, fragment: int, values: memoryview, digest: str) -> str:
        """Make the values of a version above durable; return where they are.  ``OSError`` when there is no room."""

    def standing(self) -> Standing | None:
        """Return the region's standing; None while it is not available."""

    def give_up(self, why: str) -> None:
        """End the process with the error ``why``: no more updates of the region go to the syncer above."""


class Above(Protocol[V]):
    """The region's client to the syncer above, as the region's syncer sees it, with values of the kind ``V``.

    ``begin`` is called before the decision loop runs; ``seal`` and ``order`` are called in its thread and never block.
    """

    def begin(self, below: Below, known: list[Part]) -> ev.UpstreamStarted:
        """Return the machine's first event; ``known`` is its memory of each fragment."""

    def start(self) -> None:
        """Join the run above, retrying until it succeeds."""

    def seal(self, effect: fx.Seal, reference: V, values: V) -> None:
        """Encode an update from the difference in the background; the caller writes to neither argument any more."""

    def order(self, effect: fx.RegionEffect) -> None:
        """Carry out any other effect towards the syncer above."""

    def finish(self) -> None:
        """At the region's end: wait, with a bound, until the last update is accepted and the region has left."""

    def close(self) -> None:
        """Stop the client."""


# --- queries of a region's memory ------------------------------------------------------------------------------


def standing(state: OuterState) -> Standing | None:
    """Return the region's standing; None for a syncer that is no region."""
    if state.upstream is None:
        return None
    return standing_of([part.learner for part in state.upstream.parts])


def has_joined(state: OuterState) -> bool:
    """Return whether the syncer above has admitted this process of the region."""
    return state.upstream is not None and all(part.learner.incarnation for part in state.upstream.parts)


def taking(state: OuterState, index: int) -> fx.TakeVersion | None:
    """Return the version above that is being taken, from the memory alone, so that a restart takes the same one."""
    part = state.upstream.parts[index] if state.upstream is not None else None
    if part is None or part.taking is None:
        return None
    version = state.fragments[index].version + 1
    return fx.TakeVersion(index, version, part.share, part.taking.payload, part.taking.digest)


# --- handlers --------------------------------------------------------------------------------------------------


def heard(turn: Turn, event: ev.RegionEvent) -> None:
    """Handle an event of the exchange with the syncer above, after ``started``."""
    assert turn.state.upstream is not None, event
    match event:
        case ev.UpstreamAsked():
            mark_not_joined(turn.state)
            resume(turn.state)
            turn.note("resumed", "the run above is asked again whether it is over")
        case ev.JoinAnswered():
            for index, each in enumerate(event.standings):
                fates = tuple(replace(fate, fragment=0) for fate in each.fates)
                own = replace(event, standings=(replace(each, fragment=0, fates=fates),))
                _feed(turn, index, own)
            if event.ending is not None:
                begin_last_round(turn, event.ending, f"the run above is {event.ending.value}")
        case ev.FinalAnnounced():
            begin_last_round(turn, event.ending, f"the run above is {event.ending.value}")
        case ev.FateTold():
            _feed(turn, event.fate.fragment, ev.FateTold(replace(event.fate, fragment=0)))
        case ev.UpstreamFetched():
            _fetched(turn, event)
        case ev.VersionPublished() | ev.Sealed() | ev.SealFailed() | ev.PushAnswered() | ev.FetchFailed():
            _feed(turn, event.fragment, replace(event, fragment=0))
        case _:
            raise AssertionError(event)


def mark_not_joined(state: OuterState) -> None:
    """Mark every fragment as not joined: a new process has not reported its outbox yet, so nothing is decided."""
    for part in state.upstream.parts if state.upstream is not None else ():
        part.learner.incarnation = 0


def started(turn: Turn, event: ev.UpstreamStarted) -> None:
    """Handle a new process of the region, the first one or a later one."""
    known = turn.state.upstream
    parts = known.parts if known is not None else [Part() for _ in turn.state.fragments]
    rules = (event.site, event.updates, event.alpha, event.in_flight_max, event.from_blend)
    upstream = turn.state.upstream = Upstream(parts, *rules)
    for index, part in enumerate(parts):
        before = _listed(part)
        here = {(0, sequence): digest for fragment, sequence, digest in event.outbox if fragment == index}
        part.learner = LearnerSync.restore(_options(upstream), to_plain(part.learner), here, tokens_processed=0).state
        progress = part.progress
        if any(sent.since_adopt and (0, sent.sequence) not in here for sent in progress.in_flight):
            why = "the bytes of an update that is in flight are gone: what is not sent yet cannot be told from it"
            progress.retaking = progress.retaking or Retaking(progress.base_version, why)
            turn.note("upstream_outbox_lost", why, fragment=index)
        if part.arrived is not None:
            progress.fetched = part.arrived.version
        turn.effects += [fx.Release(index, sequence) for sequence in sorted(before - _listed(part))]


def _fetched(turn: Turn, event: ev.UpstreamFetched) -> None:
    assert turn.state.upstream is not None
    part, here = turn.state.upstream.parts[event.fragment], VersionAbove(event.version, event.payload, event.digest)
    learner, progress = part.learner, part.progress
    if event.lineage != learner.lineage or turn.state.phase is Phase.ENDED:
        _let_go(turn, part, here)  # In a new lineage another fetch is under way; after the end none is needed.
        return
    is_late = 0 < event.epoch < learner.epoch
    unused: VersionAbove | None = here
    if not is_late and event.version > max(progress.fetched, progress.base_version):
        unused, part.arrived = part.arrived, here
    _let_go(turn, part, unused)
    _feed(turn, event.fragment, ev.FetchFailed(0) if is_late else ev.VersionFetched(0, event.version, ()))


def stepped(turn: Turn, index: int, merged: list[Pending]) -> None:
    """Handle a finished outer step of the fragment with its ``merged`` updates (none where it took a version above)."""
    if turn.state.upstream is None:
        return
    part = turn.state.upstream.parts[index]
    if part.taking is not None:
        before, part.base, part.taking = part.base, part.taking, None
        _let_go(turn, part, before)
        return
    progress, tokens = part.progress, sum(pending.tokens for pending in merged)
    if progress.base_version < 0:  # A last round does not wait for a base; the first base will overwrite its result.
        part.learner.tokens_processed += tokens
        progress.tokens_overwritten += tokens
        return
    site_ns = [turn.state.sites[name].step_ns for name in sorted(turn.attendance.live)]
    done = ev.StepDone(
        part.learner.step + len(merged),
        tokens,
        max(site_ns, default=0),
        part.learner.cursor,
        passes=True,  # ``act`` handles the boundary in the sweep after each event.
        steps=len(merged),
        inner_steps=sum(pending.steps for pending in merged),
    )
    _feed(turn, index, done)


def act(turn: Turn, index: int) -> None:
    """Handle the boundary between two outer steps of the fragment, if it is at one and has work there."""
    state = turn.state
    if state.upstream is None or state.phase is not Phase.RUNNING:
        return
    progress = state.upstream.parts[index].progress
    is_wanted = progress.due or progress.retaking is not None or progress.fetched > progress.base_version
    if is_wanted and state.fragments[index].merging_since_ns is None:
        _feed(turn, index, ev.BoundaryReached())


def end(turn: Turn) -> None:
    """After the last round: take no more versions, send the remaining progress and leave."""
    if turn.state.upstream is None or turn.state.phase is not Phase.ENDED:
        return
    for index, part in enumerate(turn.state.upstream.parts):
        if part.learner.left:
            continue
        progress, before, part.arrived = part.progress, part.arrived, None
        if progress.retaking is not None:  # Unsent progress is void, and so is its base.
            progress.overwrite_unsent()
            progress.base_version = -1  # If the region resumes one day, it first takes the version of that time.
        _let_go(turn, part, before)
        progress.fetched = progress.base_version
        if not part.learner.stopping:
            _feed(turn, index, ev.LeaveAsked())
        _feed(turn, index, ev.BoundaryReached())


def lineage_began(turn: Turn) -> None:
    """Drop all state towards the syncer above: the region continues from restored values."""
    if turn.state.upstream is not None:
        held = [(part.base, part.arrived, part.taking) for part in turn.state.upstream.parts]
        payloads = sorted({each.payload for three in held for each in three if each is not None})
        turn.effects += [fx.LetGo(payload) for payload in payloads]
        turn.state.upstream.parts = [Part() for _ in held]


# --- the site machine ------------------------------------------------------------------------------------------


def _options(upstream: Upstream) -> LearnerOptions:
    """Return the options of a site that blends in versions, and only those that answer its own updates."""
    return LearnerOptions(
        inner_steps=upstream.updates,
        adopt="blend",
        answers_only=True,
        from_adopt=upstream.from_blend,
        updates_in_flight_max=upstream.in_flight_max,
    )


def _listed(part: Part) -> set[int]:
    return {sent.sequence for sent in part.progress.in_flight}


def _feed(turn: Turn, index: int, event: ev.LearnerEvent) -> None:
    """Give ``event`` to the fragment's site machine, and pass on its effects."""
    upstream = turn.state.upstream
    assert upstream is not None
    if not 0 <= index < len(upstream.parts):
        turn.note("upstream_ignored", f"the syncer above names fragment {index}, which does not exist")
        return
    part = upstream.parts[index]
    before = _listed(part)
    effects = LearnerSync(_options(upstream), part.learner).handle(event, turn.state.now_ns)
    gone = before - _listed(part)
    for effect in effects:
        match effect:
            case fx.Adopt():
                _take(turn, index, part, effect.version, upstream.alpha)
            case fx.Retake():
                turn.note("upstream_retaken", effect.why, fragment=index)
                _take(turn, index, part, effect.version, 1.0)
            case fx.StartOver():
                held, part.base, part.arrived = (part.base, part.arrived), None, None
                for version in held:
                    _let_go(turn, part, version)
                turn.effects.append(fx.StartOver(index))
            case fx.Seal() | fx.Send() | fx.Fetch():
                turn.effects.append(replace(effect, fragment=index))
            case fx.Release():
                gone.add(effect.sequence)
            case fx.Join() if effect not in turn.effects:
                turn.effects.append(effect)
            case fx.StopTraining() if effect.failed:
                turn.effects.append(effect)
            case fx.Leave() if all(each.learner.left for each in upstream.parts):
                turn.effects.append(effect)
            case fx.Note():
                turn.note(f"upstream_{effect.what}", effect.why, fragment=index)
    turn.effects += [fx.Release(index, sequence) for sequence in sorted(gone)]


def _take(turn: Turn, index: int, part: Part, version: int, share: float) -> None:
    chosen = part.base
    if part.arrived is not None and part.arrived.version == version:
        chosen, part.arrived = part.arrived, None
    assert chosen is not None, version
    assert chosen.version == version, (chosen, version)
    part.taking, part.share = chosen, share
    turn.state.fragments[index].merging_since_ns = turn.state.now_ns
    command = taking(turn.state, index)
    assert command is not None
    turn.effects.append(command)


def _let_go(turn: Turn, part: Part, version: VersionAbove | None) -> None:
    """Release the values of ``version``, unless another version in use has the same payload."""
    used = [each.payload for each in (part.base, part.arrived, part.taking) if each is not None]
    if version is not None and version.payload not in used:
        turn.effects.append(fx.LetGo(version.payload))
