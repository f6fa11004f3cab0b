"""A region: a syncer to its sites, and a site to the syncer above it (HALoS, arXiv 2506.04531).

Theory of operation.  Each fragment has a site's machine of its own (``learner.py``) in the region's memory.  Its inner
step is an update that was merged here; after ``updates`` of them what the region has gained goes up as one update, with
their tokens and inner steps.  What is heard from above is an event of the outer machine, and in its journal; what the
site's machine then wants done with values is done between two outer steps of the fragment:

    Adopt, Retake   --> TakeVersion, a version that holds no update; share alpha of the version above, or all of it
    Seal            --> the shell encodes (values after the last TakeVersion - values now), less what was sent since

Versions above are fp32 in the spool before the machine hears of them, so that a replay takes the same ones.  An
update's bytes stay in the outbox until the site's machine has it in its list no more, so that "what was sent since" is
there after a crash as well: ``Release`` says when, and ``Forget`` says nothing here.  A standby has either file before
the record that tells of it, and the update before it is sent.

Until a fragment has a base its rounds stay open: what is merged without one could never be told above.  In the last
round nothing is taken or sent any more; when that is over, what is left goes up as the last update, and then goodbye.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from diloco.sync import ending
from diloco.sync.effects import (
    Adopt,
    Fetch,
    Forget,
    Join,
    Leave,
    LetGo,
    Note,
    Release,
    Retake,
    Seal,
    Send,
    SkipData,
    StartOver,
    StopTraining,
    TakeVersion,
)
from diloco.sync.events import (
    BoundaryReached,
    FateTold,
    FetchFailed,
    FinalAnnounced,
    JoinAnswered,
    LeaveAsked,
    StepDone,
    UpstreamAsked,
    UpstreamFetched,
    UpstreamStarted,
    VersionFetched,
)
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions
from diloco.sync.plain import to_plain
from diloco.sync.progress import FragmentProgress, Ledger, Retaking, ledger_of, mean_ledger
from diloco.sync.state import OuterState, Part, Phase, Upstream, VersionAbove

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.effects import LearnerEffect, RegionEffect
    from diloco.sync.events import LearnerEvent, RegionEvent
    from diloco.sync.state import Pending
    from diloco.sync.turn import Turn

V = TypeVar("V", contravariant=True)
OUTBOX = "above/outbox"
"""In the region's data folder: its updates for the one above, for as long as they are wanted."""


def outbox_file(fragment: int, sequence: int) -> str:
    """Where in the data folder an update for the one above lies."""
    return f"{OUTBOX}/{fragment}-{sequence}.update"


# --- between the two shells ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """How a region stands towards the one above: its ledger (the mean over its fragments), the versions that it rests
    on, updates merged since it began, and what an inner step takes here."""

    ledger: Ledger
    versions: tuple[int, ...]
    steps: int
    step_ns: int


class Below(Protocol):
    """The syncer, as the one that speaks for the region above knows it.  Any thread may call."""

    def tell(self, event: RegionEvent) -> None:
        """Hand an event to the machine; they are taken in the order in which they come."""

    def keep(self, fragment: int, values: memoryview, digest: str) -> str:
        """Make the values of a version above durable; where they lie then.  ``OSError`` when there is no room."""

    def standing(self) -> Standing | None:
        """How the region stands; None while nobody can say."""

    def give_up(self, why: str) -> None:
        """The one above will have no more of the region: the process ends, in words."""


class Above(Protocol[V]):
    """The one who speaks for the region above, as the syncer knows it, with values of the kind ``V``.

    ``begin`` comes before the decision loop runs, ``seal`` and ``order`` are called in its thread and wait for nothing.
    """

    def begin(self, below: Below, known: Sequence[Part]) -> UpstreamStarted:
        """What the machine is told first, ``known`` being what it remembers of each fragment."""

    def start(self) -> None:
        """Join, and go on joining."""

    def seal(self, effect: Seal, reference: V, values: V) -> None:
        """Make an update of the difference, beside everything else; neither is written to any more."""

    def order(self, effect: RegionEffect) -> None:
        """Whatever else is to be done towards the one above."""

    def finish(self) -> None:
        """The region's part is over: wait, with a bound, until the last update is taken and goodbye is said."""

    def close(self) -> None:
        """End."""


# --- what is asked of a region's memory ------------------------------------------------------------------------


def standing(state: OuterState) -> Standing | None:
    """As ``Standing`` has it; None for a syncer that is no region."""
    if state.upstream is None:
        return None
    parts = state.upstream.parts
    ledgers = [ledger_of(part.learner, 0) for part in parts]
    versions = tuple(part.progress.base_version for part in parts)
    steps, step_ns = sum(part.learner.step for part in parts), max(part.learner.step_ns for part in parts)
    return Standing(mean_ledger(ledgers), versions, steps, step_ns)


def progress_ppm(state: OuterState) -> int:
    """The progress of the run above, as last told; 0 where there is none."""
    return max((part.learner.progress_ppm for part in state.upstream.parts), default=0) if state.upstream else 0


def has_joined(state: OuterState) -> bool:
    """Whether the one above has taken in the process that speaks for the region."""
    return state.upstream is not None and all(part.learner.incarnation for part in state.upstream.parts)


def waits_for_base(state: OuterState, index: int) -> bool:
    """Whether no round of the fragment may close yet."""
    if state.upstream is None or state.phase is not Phase.RUNNING:
        return False
    return state.upstream.parts[index].progress.base_version < 0


def taking(state: OuterState, index: int) -> TakeVersion | None:
    """The version above that is being taken, from the memory alone, so that a restart takes the same."""
    part = state.upstream.parts[index] if state.upstream is not None else None
    if part is None or part.taking is None:
        return None
    version = state.fragments[index].version + 1
    return TakeVersion(index, version, part.share, part.taking.payload, part.taking.digest)


# --- what happens ----------------------------------------------------------------------------------------------


def heard(turn: Turn, event: RegionEvent) -> None:
    """Something came from above, or was made for it."""
    if isinstance(event, UpstreamStarted):
        _started(turn, event)
        return
    upstream = turn.state.upstream
    assert upstream is not None, event
    match event:
        case UpstreamAsked():
            nobody_speaks(turn.state)
            ending.resume(turn.state)
            turn.note("resumed", "the run above is asked again whether it is over")
        case JoinAnswered():
            for index, each in enumerate(event.standings):
                fates = tuple(replace(fate, fragment=0) for fate in each.fates)
                own = replace(event, standings=(replace(each, fragment=0, fates=fates),))
                _feed(turn, index, own)
            if event.ending is not None:
                ending.begin(turn, event.ending, f"the run above is {event.ending.value}")
        case FinalAnnounced():
            ending.begin(turn, event.ending, f"the run above is {event.ending.value}")
        case FateTold():
            _feed(turn, event.fate.fragment, FateTold(replace(event.fate, fragment=0)))
        case UpstreamFetched():
            _fetched(turn, event)
        case _:
            _feed(turn, event.fragment, replace(event, fragment=0))


def nobody_speaks(state: OuterState) -> None:
    """A process began that has not said yet what is in its outbox: until it has joined nothing is decided."""
    for part in state.upstream.parts if state.upstream is not None else ():
        part.learner.incarnation = 0


def _started(turn: Turn, event: UpstreamStarted) -> None:
    upstream = turn.state.upstream
    if upstream is None:
        upstream = turn.state.upstream = Upstream([Part() for _ in turn.state.fragments])
    upstream.site, upstream.updates, upstream.alpha = event.site, event.updates, event.alpha
    upstream.in_flight_max, upstream.from_blend = event.in_flight_max, event.from_blend
    for index, part in enumerate(upstream.parts):
        before = _listed(part)
        here = {(0, sequence): digest for fragment, sequence, digest in event.outbox if fragment == index}
        processed = part.learner.tokens_processed
        part.learner = LearnerSync.restore(_options(upstream), to_plain(part.learner), here, processed).state
        progress = part.progress
        if any(sent.since_adopt and (0, sent.sequence) not in here for sent in progress.in_flight):
            why = "the bytes of an update that is in flight are gone: what is not sent yet cannot be told from it"
            progress.retaking = progress.retaking or Retaking(progress.base_version, why)
            turn.note("upstream_outbox_lost", why, fragment=index)
        if part.arrived is not None:
            progress.fetched = part.arrived.version
        _release(turn, index, before - _listed(part))


def _fetched(turn: Turn, event: UpstreamFetched) -> None:
    assert turn.state.upstream is not None
    part, here = turn.state.upstream.parts[event.fragment], VersionAbove(event.version, event.payload, event.digest)
    learner, progress = part.learner, part.progress
    if event.lineage != learner.lineage or turn.state.phase is Phase.ENDED:
        _let_go(turn, part, here)  # The new lineage has ordered another; and after the end there is none.
        return
    is_late = 0 < event.epoch < learner.epoch
    if is_late or event.version <= max(progress.fetched, progress.base_version):
        _let_go(turn, part, here)
    else:
        before, part.arrived = part.arrived, here
        _let_go(turn, part, before)
    _feed(turn, event.fragment, FetchFailed(0) if is_late else VersionFetched(0, event.version, ()))


def stepped(turn: Turn, index: int, merged: Sequence[Pending]) -> None:
    """An outer step of the fragment is done, and holds these updates; none where a version above was taken."""
    if turn.state.upstream is None:
        return
    part = turn.state.upstream.parts[index]
    if part.taking is not None:
        before, part.base, part.taking = part.base, part.taking, None
        _let_go(turn, part, before)
        return
    progress, tokens = part.progress, sum(pending.tokens for pending in merged)
    if progress.base_version < 0:  # A last round did not wait for a base, and the first one takes the place of it all.
        part.learner.tokens_processed += tokens
        progress.tokens_overwritten += tokens
        return
    site_ns = [turn.state.sites[name].step_ns for name in turn.attendance.live]
    done = StepDone(
        part.learner.step + len(merged),
        tokens,
        max(site_ns, default=0),
        part.learner.cursor,
        passes=True,  # The boundary is seen to where all events end.
        steps=len(merged),
        inner_steps=sum(pending.steps for pending in merged),
    )
    _feed(turn, index, done)


def cannot_take(turn: Turn, index: int) -> bool:
    """Whether it was a version above that gave no finite values.  Then the region ends in words: without it, what goes
    up next could be measured from nothing.  Another process tries again."""
    if taking(turn.state, index) is None:
        return False
    why = f"fragment {index}: blended with the version above the values, or what is published of them, are not finite"
    turn.effects.append(StopTraining(None, why, failed=True))
    return True


def act(turn: Turn, index: int) -> None:
    """Do what is to be done between two outer steps of the fragment, if this is such an instant."""
    state = turn.state
    if state.upstream is None or state.phase is not Phase.RUNNING:
        return
    if state.fragments[index].merging_since_ns is None and _wants_boundary(state.upstream.parts[index].progress):
        _feed(turn, index, BoundaryReached())


def _wants_boundary(progress: FragmentProgress) -> bool:
    return progress.due or progress.retaking is not None or progress.fetched > progress.base_version


def end(turn: Turn) -> None:
    """After the last round: send what is left, and say goodbye."""
    if turn.state.upstream is not None and turn.state.phase is Phase.ENDED:
        for index, part in enumerate(turn.state.upstream.parts):
            if not part.learner.left:
                _end(turn, index, part)


def _end(turn: Turn, index: int, part: Part) -> None:
    """There is no version any more that could be taken."""
    progress, before, part.arrived = part.progress, part.arrived, None
    if progress.retaking is not None:  # Unsent progress is worth nothing, and nor is what it would be measured from.
        progress.tokens_overwritten += progress.unsent_tokens
        progress.unsent_tokens = progress.unsent_steps = 0
        progress.base_version = -1  # Should the region go on one day, it takes the version of then before all else.
    _let_go(turn, part, before)
    progress.fetched = progress.base_version
    if not part.learner.stopping:
        _feed(turn, index, LeaveAsked())
    _feed(turn, index, BoundaryReached())


def lineage_began(turn: Turn) -> None:
    """The region goes on from restored values: whatever it owed the one above is no more."""
    if turn.state.upstream is not None:
        held = [(part.base, part.arrived, part.taking) for part in turn.state.upstream.parts]
        payloads = sorted({each.payload for three in held for each in three if each is not None})
        turn.effects += [LetGo(payload) for payload in payloads]
        turn.state.upstream.parts = [Part() for _ in held]


# --- the site's machine ----------------------------------------------------------------------------------------


def _options(upstream: Upstream) -> LearnerOptions:
    """Those of a site that takes a share of what comes back, and only of what its own updates have brought about."""
    return LearnerOptions(
        inner_steps=upstream.updates,
        adopt="blend",
        answers_only=True,
        from_adopt=upstream.from_blend,
        updates_in_flight_max=upstream.in_flight_max,
    )


def _listed(part: Part) -> set[int]:
    return {sent.sequence for sent in part.progress.in_flight}


def _feed(turn: Turn, index: int, event: LearnerEvent) -> None:
    """Give ``event`` to the fragment's machine, and pass on what it orders."""
    upstream = turn.state.upstream
    assert upstream is not None
    if not 0 <= index < len(upstream.parts):
        turn.note("upstream_ignored", f"the syncer above speaks of fragment {index}, and there is none")
        return
    part = upstream.parts[index]
    before = _listed(part)
    effects = LearnerSync(_options(upstream), part.learner).handle(event, turn.state.now_ns)
    gone = before - _listed(part)
    for effect in effects:
        if isinstance(effect, Release):
            gone.add(effect.sequence)
        else:
            _pass_on(turn, index, upstream, effect)
    _release(turn, index, gone)


def _release(turn: Turn, index: int, gone: set[int]) -> None:
    turn.effects += [Release(index, sequence) for sequence in sorted(gone)]


def _pass_on(turn: Turn, index: int, upstream: Upstream, effect: LearnerEffect) -> None:
    match effect:
        case Adopt():
            _take(turn, index, upstream.parts[index], effect.version, upstream.alpha)
        case Retake():
            turn.note("upstream_retaken", effect.why, fragment=index)
            _take(turn, index, upstream.parts[index], effect.version, 1.0)
        case StartOver():
            part = upstream.parts[index]
            held, part.base, part.arrived = (part.base, part.arrived), None, None
            for version in held:
                _let_go(turn, part, version)
            turn.effects.append(StartOver(index))
        case Seal() | Send() | Fetch():
            turn.effects.append(replace(effect, fragment=index))
        case Join():
            if effect not in turn.effects:
                turn.effects.append(effect)
        case StopTraining():
            if effect.failed:
                turn.effects.append(effect)
        case Leave():
            if all(part.learner.left for part in upstream.parts):
                turn.effects.append(effect)
        case Note():
            turn.note(f"upstream_{effect.what}", effect.why, fragment=index)
        case Forget() | SkipData() | Release():
            pass


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
    """These values are not needed any more, unless they are by another name."""
    if version is not None and not part.needs(version.payload):
        turn.effects.append(LetGo(version.payload))
