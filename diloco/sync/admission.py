"""Whether an update may enter: ``admit`` is asked before the first payload byte, and again when the update is whole.

Claims.  A site says of its update what the syncer cannot count, and so much is believed:

- *steps*: those that there was time for since the site's updates before (:func:`believed_steps`).
  Norms are compared by the steps that are believed.  ``STEPS_RATIO_MAX`` times as many are implausible.
- *tokens*: of a step, ``TOKENS_RATIO_MAX`` times those of the site's first update, which has at most
  ``NEWCOMER_RATIO_MAX`` times those of the others, or ``STEP_TOKENS_MIN``.  More are implausible.  Where units of the
  data are leased, a step may read what counts no more: a site's first says nothing of its next, and the largest of the
  others bound them all.
- *step_ns*: no less than a part of what is usual at the other sites (:func:`fastest_step_ns`), and where it makes a
  grace no more than the time between the site's updates (:func:`period_ns`).
- *cursor*: it moves the data of the site alone.  *spans*: ``fates`` knows which units were leased to the site.
- The norm, the cosine and the digest of the values are the syncer's own.

An honest site is far from each bound.  Only the first update of a run has nothing to be compared with: its steps are
bounded by the time since its site joined, its tokens by ``STEP_TOKENS_MAX`` a step.

Health.  An update has two vital signs, measured by the shell when it decodes the payload: the L2 norm of the
pseudo-gradient, and its cosine with the fragment's outer momentum.  Each is held against two windows of recent admitted
updates of the same fragment: the site's own and those of all others.  An update is an *outlier* only if it is far from
both (from the one that is long enough, where only one is), because a site with other batches differs from the others
for ever, and a site after a long absence from itself for once.

*Norm ratio*: the norm over the median of a window's.  Only too large is too far: a small update does no harm, and
learning rates decay.  An update of more steps than one of the window may be larger in proportion (AdamW moves every
parameter by at most about the learning rate in each step), so each norm of the window is raised by the steps' ratio,
and never lowered for fewer.

*Cosine z-score*: how many spreads the cosine lies below the mean of a window's, the spread being at least
``COSINE_SPREAD_MIN``.  Only a negative cosine can be too far: an update that goes with the run is no danger.  Cosines
fall fast while the momentum is young, and a step too far turns them round at all sites, so nothing is said about
direction before the site's own window is full.

The rule is that of robust aggregation turned into admission: screening by norm and by direction against what is usual
(arXiv 1703.02757, 1803.01498).  What it cannot see is a bad update of usual size and direction; what that one can do is
bounded by its site's weight.

Measured before the defaults were chosen (``tests/hunts/pseudo_gradients.py``, ``python -m tests.hunts.admission``):
14,960 pseudo-gradients of a byte-level transformer trained with AdamW at 1 to 4 sites, in 2 fragments, with 2 to 8
inner steps and more; all rounds from the first, long and short warm-up, decay to nothing, a learning rate of 0.01,
texts and batch sizes of the sites' own, a site that joins half-way, restarts with an empty optimizer, updates of ten
times the usual steps after a partition, lock-step and asynchronous.  The largest norm ratio was 2.5.  The lowest z of a
negative cosine was -4.3; with windows of 4 updates it was -15, and where sites pull against each other -9
(``tests/loopback/toy.py`` under Nesterov).  With the defaults none is an outlier.  Turned round in sign, 28 % of the
same updates are: of most others the cosine is too near to nothing to tell.

Everything here is made of additions, products, quotients and square roots, so that every machine judges alike.

Holding.  An outlier is refused, held for an operator's word, or only noted, as the site's policy says.  A held update
is accepted and durable.  It waits, and what its site sends after it waits behind it, until an operator admits or
refuses it, it is too stale to be merged, or its time is over.  Rounds do not wait for its site meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from diloco.sync.effects import AnswerDone
from diloco.sync.events import Fate, Outcome, Reason
from diloco.sync.fates import refuse
from diloco.sync.state import Held, OuterState, Phase, Status, Vital

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.events import UpdateAdmitted, UpdateArrived, UpdateWithdrawn
    from diloco.sync.options import HealthOptions, OuterOptions
    from diloco.sync.state import Line, Pending, Site
    from diloco.sync.turn import Attendance, Turn

STEPS_RATIO_MAX = 64
"""Steps beside those that are believed: a syncer whose clock was wrong while it was away may believe too few."""
TOKENS_RATIO_MAX = 16
"""Batches grow in the course of a run, and a site may start again with others."""
NEWCOMER_RATIO_MAX = 64
STEP_TOKENS_MIN, STEP_TOKENS_MAX = 1 << 16, 1 << 26
ARRIVALS_KEPT = 16
STEPS_MIN, STEP_NS_MIN = 1000, 10_000
"""Where nothing is usual yet: so many steps, and one for so much time, are always believed."""
AWAY_UNKNOWN_NS = 10 * 365 * 86_400 * 1_000_000_000
"""For how long there was no syncer where nobody has said it: what the sites say of that time is believed."""
UNEQUAL_MAX = 8
"""How many times the steps of an update, and the steps in the same time, of most other sites a site may have."""


def implausible(state: OuterState, options: OuterOptions, event: UpdateArrived) -> str:
    """Why what is said of an update cannot be true; empty where it can."""
    line = state.sites[event.site].lines[event.fragment]
    believed = believed_steps(state, options, event)
    if event.steps > STEPS_RATIO_MAX * believed:
        return f"steps is {event.steps}, and there was time for {believed}"
    known = sorted([other.step_tokens for other in _others(state, event) if other.step_tokens])
    others = known[(len(known) - 1) // 2] if known else 0  # The lower of two, so that no pair raises its own bound.
    bound, why = STEP_TOKENS_MAX, "as at any site"
    if line.step_tokens and not options.unit_sequences:
        bound, why = TOKENS_RATIO_MAX * line.step_tokens, f"{TOKENS_RATIO_MAX} times its first {line.step_tokens}"
    elif others:
        bound, why = NEWCOMER_RATIO_MAX * others, f"{NEWCOMER_RATIO_MAX} times the {others} of others"
        if bound < STEP_TOKENS_MIN:
            bound, why = STEP_TOKENS_MIN, "as at any site that others say little of"
    if event.tokens > bound * believed:
        return f"tokens is {event.tokens}, and {believed} steps have at most {bound} each, {why}"
    return ""


def believed_steps(state: OuterState, options: OuterOptions, event: UpdateArrived) -> int:
    """How many of an update's steps are believed: those of a usual update, and of twice the time that there was.

    They were made after the update before was sealed, for which there had to be room: ``updates_in_flight_max`` before
    that one had come.  A site that could not send goes on training, also while no syncer runs
    (``SyncerStarted.away_ns``).
    """
    line = state.sites[event.site].lines[event.fragment]
    if event.steps <= line.usual_steps:
        return event.steps
    elsewhere = _upper_median([each.usual_steps for each in _others(state, event) if each.usual_steps])
    usual_steps = min(line.usual_steps or elsewhere, UNEQUAL_MAX * (elsewhere or line.usual_steps)) or STEPS_MIN
    usual_ns = _upper_median([site.step_ns for site in state.sites.values() if site.step_ns])
    step_ns = max(state.sites[event.site].step_ns, usual_ns // UNEQUAL_MAX) or STEP_NS_MIN
    since_ns = line.arrivals_ns[-options.updates_in_flight_max - 1 :] or [0]
    elapsed_ns = state.now_ns + state.away_ns - since_ns[0]
    return min(event.steps, usual_steps + 2 * elapsed_ns // step_ns)


def arrived(state: OuterState, options: OuterOptions, event: UpdateArrived) -> None:
    """An update is accepted: the next one of its line is compared with it."""
    line = state.sites[event.site].lines[event.fragment]
    before = line.arrivals_ns or [0]  # A memory of an earlier release has none, not even when the site joined.
    line.arrivals_ns = [*before, state.now_ns + state.away_ns][-ARRIVALS_KEPT:]
    step_tokens = -(-event.tokens // event.steps)
    line.step_tokens = max(line.step_tokens, step_tokens) if options.unit_sequences else line.step_tokens or step_tokens


def fastest_step_ns(state: OuterState, live: Sequence[str]) -> int:
    """What an inner step takes at the fastest of the ``live`` sites; 0 before any is known."""
    known = [step_ns for name in live if (step_ns := state.sites[name].step_ns)]
    return max(min(known), _upper_median(known) // UNEQUAL_MAX) if known else 0


def period_ns(site: Site, index: int) -> int:
    """The usual time between two updates of ``site``: what it says of its steps, and no more than the syncer has seen
    between its updates; 0 before any came.  Before any was merged the first one stands for what is usual."""
    line = site.lines[index]
    steps = line.usual_steps or next((pending.steps for pending in line.undecided), 0)
    return min(steps * site.step_ns, seen_ns(site, index))


def seen_ns(site: Site, index: int) -> int:
    """The time between the last updates of ``site``, and before the first; 0 before any came."""
    arrivals = site.lines[index].arrivals_ns
    return (arrivals[-1] - arrivals[0]) // (len(arrivals) - 1) if len(arrivals) > 1 else 0


def _others(state: OuterState, event: UpdateArrived) -> list[Line]:
    return [site.lines[event.fragment] for name, site in state.sites.items() if name != event.site]


def _upper_median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


COSINE_SPREAD_MIN = 0.05
"""Of a window's cosines: a few that happen to be alike say little about what is usual."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How far an update is from what is usual.

    ``ratio`` and ``z`` are the milder ones of the two windows, None where neither is long enough; ``why`` is empty
    when nothing is wrong.
    """

    ratio: float | None
    z: float | None
    why: str = ""


NOTHING_WRONG = Finding(None, None)
"""With an update that nobody measured."""


def judge(options: HealthOptions, vital: Vital, own: Sequence[Vital], others: Sequence[Vital]) -> Finding:
    """Hold ``vital`` against the site's ``own`` recent updates and those of the ``others``."""
    windows = [window for window in (own, others) if len(window) >= options.history_min]
    ratio = min((_norm_ratio(vital, window) for window in windows), default=None)
    z = _score(options, vital, own, others)
    why: list[str] = []
    if ratio is not None and ratio > options.norm_ratio_max:
        why.append(f"its norm is {ratio:.3g} times the usual one, more than {options.norm_ratio_max:g}")
    if z is not None and vital.cosine is not None and vital.cosine < 0 and -z > options.cosine_z_max:
        below = f"{-z:.1f} spreads below the usual, more than {options.cosine_z_max:g}"
        why.append(f"its cosine {vital.cosine:.2f} is {below}")
    return Finding(ratio, z, "; ".join(why))


def _norm_ratio(vital: Vital, window: Sequence[Vital]) -> float:
    """The norm over the median of the window's, each raised to as many steps as this update has."""
    usual = _median([each.norm * max(1.0, vital.steps / each.steps) for each in window])
    return vital.norm / usual


def _score(options: HealthOptions, vital: Vital, own: Sequence[Vital], others: Sequence[Vital]) -> float | None:
    """The milder z of the two windows, once the site's own is full."""
    known = [[each.cosine for each in window if each.cosine is not None] for window in (own, others)]
    if vital.cosine is None or len(known[0]) < options.history:
        return None
    return max(_z(vital.cosine, cosines) for cosines in known if len(cosines) >= options.history)


def _z(cosine: float, cosines: Sequence[float]) -> float:
    mean = sum(cosines) / len(cosines)
    spread = sqrt(sum((each - mean) * (each - mean) for each in cosines) / len(cosines))
    return (cosine - mean) / max(spread, COSINE_SPREAD_MIN)


def _median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def looked_at(state: OuterState, event: UpdateArrived, vital: Vital) -> Finding:
    """Judge the ``vital`` signs of an update that may enter; nothing is wrong with one that nobody measured."""
    if event.norm <= 0:
        return NOTHING_WRONG
    own = state.sites[event.site].lines[event.fragment].vitals
    others = [
        vital
        for name in sorted(state.sites)
        if name != event.site
        for vital in state.sites[name].lines[event.fragment].vitals
    ]
    return judge(state.health, vital, own, others)


def vital_of(state: OuterState, options: OuterOptions, event: UpdateArrived) -> Vital:
    """The vital signs that came with an update, which are those of the steps that are believed."""
    return Vital(believed_steps(state, options, event), event.norm, event.cosine)


def held_from(state: OuterState, event: UpdateArrived, finding: Finding) -> Held:
    """What is remembered of an update that is held."""
    return Held(state.now_ns, event.norm, event.cosine, finding.ratio, finding.z, finding.why)


def remember(state: OuterState, site: str, fragment: int, vital: Vital) -> None:
    """An update is admitted: from now on it is part of what is usual."""
    line = state.sites[site].lines[fragment]
    line.vitals = [*line.vitals, vital][-state.health.history :]


def deadline_ns(state: OuterState, attendance: Attendance) -> int | None:
    """The instant at which the first held update has waited long enough."""
    if not any(attendance.holding):
        return None
    since = [pending.held.since_ns for _, _, pending in _held(state, attendance) if pending.held is not None]
    return min(since) + state.health.hold_ns


def expire(turn: Turn) -> None:
    """Refuse what nobody has decided in time; in the last round that is all that is held when its time is over."""
    state = turn.state
    over = state.final_deadline_ns is not None and state.now_ns >= state.final_deadline_ns
    for name, index, pending in _held(state, turn.attendance):
        assert pending.held is not None
        if over or state.now_ns >= pending.held.since_ns + state.health.hold_ns:
            refuse(turn, name, index, pending, Reason.OUTLIER)


def admitted(turn: Turn, event: UpdateAdmitted) -> None:
    """An operator's word: the update enters the round."""
    pending = _asked(turn, event)
    if pending is None:
        return
    if pending.held is not None:
        vital = Vital(pending.steps, pending.held.norm, pending.held.cosine)
        pending.held = None
        turn.attendance.line_changed(event.site, event.fragment)
        remember(turn.state, event.site, event.fragment, vital)
        what = f"an operator's word: sequence {pending.sequence}"
        turn.note("update_admitted", what, site=event.site, fragment=event.fragment)
    turn.effects.append(AnswerDone(event.call))


def withdrawn(turn: Turn, event: UpdateWithdrawn) -> None:
    """An operator's word: the update is never merged."""
    pending = _asked(turn, event, refused=True)
    if pending is None:
        return
    if pending.merging:
        turn.effects.append(AnswerDone(event.call, Reason.CONFLICT))
        return
    refuse(turn, event.site, event.fragment, pending, Reason.WITHDRAWN)
    turn.effects.append(AnswerDone(event.call))


def _asked(turn: Turn, event: UpdateAdmitted | UpdateWithdrawn, *, refused: bool = False) -> Pending | None:
    """The undecided update that is spoken of; otherwise None, and the operator is answered.

    A word that was carried out before is carried out: the fate that it asks for is an answer without a reason.
    """
    state = turn.state
    reason: Reason | None = None
    if event.site not in state.sites:
        reason = Reason.NOT_JOINED
    elif not 0 <= event.fragment < len(state.fragments):
        reason = Reason.BAD_BASE
    else:
        line = state.sites[event.site].lines[event.fragment]
        for pending in line.undecided:
            if pending.sequence == event.sequence:
                return pending
        fates = [fate for fate in line.fates if fate.sequence == event.sequence]
        if fates:
            reason = None if fates[0].merged != refused else Reason.CONFLICT
        else:
            reason = Reason.GAP if event.sequence > line.watermark else Reason.FORGOTTEN
    turn.effects.append(AnswerDone(event.call, reason))
    return None


def _held(state: OuterState, attendance: Attendance) -> list[tuple[str, int, Pending]]:
    """In site order, and then in that of the fragments."""
    if not any(attendance.holding):
        return []
    return [
        (name, index, pending)
        for name, index in sorted((name, index) for index, names in enumerate(attendance.holding) for name in names)
        for pending in state.sites[name].lines[index].undecided
        if pending.held is not None
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``outcome`` ACCEPTED means: may enter.  A known ``fate`` of a duplicate comes along."""

    outcome: Outcome
    reason: Reason | None = None
    fate: Fate | None = None


ACCEPTED = Verdict(Outcome.ACCEPTED)


def admit(
    state: OuterState,
    options: OuterOptions,
    site: str,
    incarnation: int,
    fragment: int,
    sequence: int,
    base_version: int,
    digest: str,
) -> Verdict:
    """Judge an update by its header alone; ``state`` is only read.

    What was accepted before is answered whoever asks (an old incarnation may learn of its own past); anything new
    is fenced by the site's present incarnation, must follow its predecessor, and must not be stale already.
    """
    member = state.sites.get(site)
    if member is None:
        return Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
    if not 0 <= fragment < len(state.fragments):
        return Verdict(Outcome.REFUSED, Reason.BAD_BASE)
    # What the number meant before the run was restored says nothing about what it means now.  The answer to a join may
    # still be on its way to the very process that speaks for the site: that is no stranger, and must not be told so.
    if not member.process or incarnation < member.since:
        return Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
    line = member.lines[fragment]
    if sequence <= line.watermark:
        return _known(state, site, fragment, sequence, digest)
    if member.status is Status.EVICTED:
        return Verdict(Outcome.REFUSED, Reason.EVICTED)
    if incarnation != member.incarnation or member.status is Status.LEFT:
        return Verdict(Outcome.REFUSED, Reason.FENCED)
    if state.phase is Phase.ENDED or (state.final_deadline_ns is not None and state.now_ns >= state.final_deadline_ns):
        return Verdict(Outcome.REFUSED, Reason.FINISHED)
    if sequence > line.watermark + 1:
        return Verdict(Outcome.RETRY, Reason.GAP)
    if digest in line.outliers:  # What is usual may be something else by now, but its site has thrown it away.
        return Verdict(Outcome.REFUSED, Reason.OUTLIER)
    version = state.fragments[fragment].version
    if not 0 <= base_version <= version:
        return Verdict(Outcome.REFUSED, Reason.BAD_BASE)
    if version - base_version > options.staleness_max:
        return Verdict(Outcome.REFUSED, Reason.STALE)
    if len(line.undecided) >= options.updates_in_flight_max:
        return Verdict(Outcome.RETRY, Reason.OVERLOAD)
    return ACCEPTED


def _known(state: OuterState, site: str, fragment: int, sequence: int, digest: str) -> Verdict:
    """The answer to a sequence that was accepted before: a duplicate, another content, or too long ago to tell."""
    line = state.sites[site].lines[fragment]
    for pending in line.undecided:
        if pending.sequence == sequence:
            same = pending.digest == digest
            return Verdict(Outcome.DUPLICATE) if same else Verdict(Outcome.REFUSED, Reason.CONFLICT)
    for fate in line.fates:
        if fate.sequence == sequence:
            same = fate.digest == digest
            return Verdict(Outcome.DUPLICATE, fate=fate) if same else Verdict(Outcome.REFUSED, Reason.CONFLICT)
    return Verdict(Outcome.REFUSED, Reason.FORGOTTEN)
