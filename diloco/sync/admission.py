"""Admission of updates: ``admit`` judges the header before the first payload byte, and again when the update is whole.

Claims.  The syncer cannot count these figures of an update itself, so it bounds how much of them it believes:

- *steps*: as many as there was time for since the site's previous updates (:func:`believed_steps`).
  Norms are compared by the believed steps.  More than ``STEPS_RATIO_MAX`` times as many are implausible.
- *tokens* of a step: at most ``TOKENS_RATIO_MAX`` times those of the site's first update, which may have at most
  ``NEWCOMER_RATIO_MAX`` times those of the others, or ``STEP_TOKENS_MIN``.  More are implausible.  Where units of the
  data are leased, a step may read data that counts no more, so a site's first update says nothing about its next one:
  the largest values of the others bound all of them.
- *step_ns*: at least a part of what is usual at the other sites (:func:`fastest_step_ns`), and where it sets a grace
  at most the time between the site's updates (:func:`period_ns`).
- *cursor*: not bounded, because it moves only the site's own data.  *spans*: ``fates`` counts only leased units.
- The syncer measures the norm, the cosine and the digest of the values itself.

An honest site is far from each bound.  Only the first update of a run has nothing to be compared with: its steps are
bounded by the time since its site joined, its tokens by ``STEP_TOKENS_MAX`` a step.

Health.  An update has two vital signs, measured by the shell when it decodes the payload: the L2 norm of the
pseudo-gradient, and its cosine with the fragment's outer momentum.  Each is compared with two windows of recent
admitted updates of the same fragment: the site's own and those of all others.  An update is an *outlier* only if it is
far from both (from the one that is long enough, where only one is), because a site with other batches always differs
from the others, and a site after a long absence differs once from its own past.

*Norm ratio*: the norm over the median norm of a window.  Only a large ratio is too far: a small update does no harm,
and learning rates decay.  An update of more steps than one of the window may be larger in proportion (AdamW moves every
parameter by at most about the learning rate in each step), so each norm of the window is raised by the steps' ratio,
and never lowered for fewer.

*Cosine z-score*: how many spreads the cosine lies below the mean of a window, the spread being at least
``COSINE_SPREAD_MIN``.  Only a negative cosine can be too far: an update along the momentum is no danger.  Cosines fall
fast while the momentum is young, and an outer step that is too large reverses them at all sites, so direction is not
judged before the site's own window is full.

The rule is robust aggregation turned into admission: screening by norm and by direction against usual updates (arXiv
1703.02757, 1803.01498).  It cannot detect a bad update of usual size and direction; the harm of such an update is
bounded by its site's weight.

Measured before the defaults were chosen, by an earlier and larger ``tests/hunts/pseudo_gradients.py``:
14,960 pseudo-gradients of a byte-level transformer trained with AdamW at 1 to 4 sites, in 2 fragments, with 2 to 8
inner steps and more; all rounds from the first, long and short warm-up, decay to nothing, a learning rate of 0.01,
different texts and batch sizes at each site, a site that joins half-way, restarts with an empty optimizer, updates of
ten times the usual steps after a partition, lock-step and asynchronous.  The largest norm ratio was 2.5.  The lowest z
of a negative cosine was -4.3; with windows of 4 updates it was -15, and where sites pull against each other -9
(``tests/loopback/toy.py`` under Nesterov).  With the defaults none is an outlier.  With reversed sign 28 % of the same
updates are outliers: for most of the others the cosine is too close to zero to judge.

Everything here uses only additions, products, quotients and square roots, so that every machine judges alike.

Holding.  By the site's policy an outlier is refused, held for an operator's decision, or only noted.  A held update is
accepted and durable.  It waits, and the site's later updates wait behind it, until an operator admits or refuses it, it
becomes too stale to be merged, or ``hold_ns`` is over.  Rounds do not wait for its site meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import median, median_high, median_low
from typing import TYPE_CHECKING

from diloco.sync.effects import AnswerDone
from diloco.sync.events import Fate, Outcome, Reason, UpdateAdmitted, UpdateArrived, UpdateWithdrawn
from diloco.sync.fates import refuse
from diloco.sync.state import Line, Machine, OuterState, Pending, Phase, Site, Status, Turn, Vital

if TYPE_CHECKING:
    from diloco.sync.options import HealthOptions

STEPS_RATIO_MAX = 64
"""Claimed over believed steps: a syncer whose clock was wrong while it was down may believe too few."""
TOKENS_RATIO_MAX = 16
"""Batches grow in the course of a run, and a site may restart with another batch size."""
NEWCOMER_RATIO_MAX = 64
STEP_TOKENS_MIN, STEP_TOKENS_MAX = 1 << 16, 1 << 26
ARRIVALS_KEPT = 16
STEPS_MIN, STEP_NS_MIN = 1000, 10_000
"""Where no usual values exist yet: ``STEPS_MIN`` steps, and one step per ``STEP_NS_MIN``, are always believed."""
AWAY_UNKNOWN_NS = 10 * 365 * 86_400 * 1_000_000_000
"""Assumed time without a syncer (10 years) where it is unknown: any steps that sites claim for it are believed."""
UNEQUAL_MAX = 8
"""Most times by which a site may exceed most others, in steps per update and in steps per time."""


def implausible(machine: Machine, event: UpdateArrived) -> str:
    """Return why the claims of an update cannot be true; empty where they can."""
    state = machine.state
    line = state.sites[event.site].lines[event.fragment]
    believed = believed_steps(machine, event)
    if event.steps > STEPS_RATIO_MAX * believed:
        return f"steps is {event.steps}, and there was time for {believed}"
    bound, why = STEP_TOKENS_MAX, "as at any site"
    if line.step_tokens and not machine.options.unit_sequences:
        bound, why = TOKENS_RATIO_MAX * line.step_tokens, f"{TOKENS_RATIO_MAX} times its first {line.step_tokens}"
    elif known := [other.step_tokens for other in _others(state, event) if other.step_tokens]:
        others = median_low(known)  # The lower of two, so that two sites cannot raise their own bound.
        bound, why = NEWCOMER_RATIO_MAX * others, f"{NEWCOMER_RATIO_MAX} times the {others} of others"
        if bound < STEP_TOKENS_MIN:
            bound, why = STEP_TOKENS_MIN, "as at any site that others say little of"
    if event.tokens > bound * believed:
        return f"tokens is {event.tokens}, and {believed} steps have at most {bound} each, {why}"
    return ""


def believed_steps(machine: Machine, event: UpdateArrived) -> int:
    """Return how many of an update's steps are believed: those of a usual update plus those of twice the elapsed time.

    The steps were made after the previous update was sealed, and sealing it needed room in the window, so the elapsed
    time counts from the arrival ``updates_in_flight_max`` updates before it.  A site that cannot send continues
    training, also while no syncer runs (``SyncerStarted.away_ns``).
    """
    state = machine.state
    line = state.sites[event.site].lines[event.fragment]
    if event.steps <= line.usual_steps:
        return event.steps
    usual_ns = median_high([site.step_ns for site in state.sites.values() if site.step_ns] or [0])
    step_ns = max(state.sites[event.site].step_ns, usual_ns // UNEQUAL_MAX) or STEP_NS_MIN
    since_ns = line.arrivals_ns[-machine.options.updates_in_flight_max - 1 :] or [0]
    in_time = 2 * (state.now_ns + state.away_ns - since_ns[0]) // step_ns
    if event.steps <= in_time:
        return event.steps
    elsewhere = median_high([each.usual_steps for each in _others(state, event) if each.usual_steps] or [0])
    usual_steps = min(line.usual_steps or elsewhere, UNEQUAL_MAX * (elsewhere or line.usual_steps)) or STEPS_MIN
    return min(event.steps, usual_steps + in_time)


def fastest_step_ns(state: OuterState) -> int:
    """Return the inner step time of the fastest live site; 0 before any is known.

    It is at least 1/``UNEQUAL_MAX`` of the median.
    """
    known = [site.step_ns for site in state.sites.values() if site.status is Status.LIVE and site.step_ns]
    return max(min(known), median_high(known) // UNEQUAL_MAX) if known else 0


def period_ns(site: Site, index: int) -> int:
    """Return the usual time between two updates of ``site``: its steps times its claimed step time, at most the mean
    time between its last arrivals, its join included; 0 before any update came.  Before any was merged the first update
    gives the usual steps."""
    line, arrivals = site.lines[index], site.lines[index].arrivals_ns
    steps = line.usual_steps or next((pending.steps for pending in line.undecided), 0)
    seen_ns = (arrivals[-1] - arrivals[0]) // (len(arrivals) - 1) if len(arrivals) > 1 else 0
    return min(steps * site.step_ns, seen_ns)


def _others(state: OuterState, event: UpdateArrived) -> list[Line]:
    return [site.lines[event.fragment] for name, site in state.sites.items() if name != event.site]


COSINE_SPREAD_MIN = 0.05
"""Smallest spread of a window's cosines: a few cosines that happen to be alike would give too small a spread."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How far an update is from usual ones.

    ``ratio`` and ``z`` are the milder values of the two windows, None where neither is long enough; ``why`` is empty
    when nothing is wrong.
    """

    ratio: float | None = None
    z: float | None = None
    why: str = ""


USUAL = Finding()


def judge(options: HealthOptions, vital: Vital, own: list[Vital], others: list[Vital]) -> Finding:
    """Compare ``vital`` with the site's ``own`` recent updates and with those of the ``others``."""
    windows = [window for window in (own, others) if len(window) >= options.history_min]
    # Each norm of a window is raised in proportion where this update has more steps.
    usual = [median([each.norm * max(1.0, vital.steps / each.steps) for each in window]) for window in windows]
    ratio = min([vital.norm / norm for norm in usual], default=None)
    z, cosines = None, [[each.cosine for each in window if each.cosine is not None] for window in (own, others)]
    if vital.cosine is not None and len(cosines[0]) >= options.history:  # Until its own window is full there is no z.
        z = max([_z(vital.cosine, window) for window in cosines if len(window) >= options.history])
    why: list[str] = []
    if ratio is not None and ratio > options.norm_ratio_max:
        why.append(f"its norm is {ratio:.3g} times the usual one, more than {options.norm_ratio_max:g}")
    if z is not None and vital.cosine is not None and vital.cosine < 0 and -z > options.cosine_z_max:
        below = f"{-z:.1f} spreads below the usual, more than {options.cosine_z_max:g}"
        why.append(f"its cosine {vital.cosine:.2f} is {below}")
    return Finding(ratio, z, "; ".join(why))


def _z(cosine: float, window: list[float]) -> float:
    """Return how many spreads ``cosine`` lies above the mean of the cosines in ``window``."""
    mean = sum(window) / len(window)
    spread = sqrt(sum((each - mean) * (each - mean) for each in window) / len(window))
    return (cosine - mean) / max(spread, COSINE_SPREAD_MIN)


def vital_of(machine: Machine, event: UpdateArrived) -> Vital:
    """Return the vital signs of an update, with its believed steps."""
    return Vital(believed_steps(machine, event), event.norm, event.cosine)


def expire(turn: Turn) -> None:
    """Refuse held updates that are not decided within ``hold_ns``; all of them at the deadline of the last round."""
    state = turn.state
    over = state.final_deadline_ns is not None and state.now_ns >= state.final_deadline_ns
    for name, index, pending, expires_ns in held_updates(turn):
        if over or state.now_ns >= expires_ns:
            refuse(turn, name, index, pending, Reason.OUTLIER)


def admitted(turn: Turn, event: UpdateAdmitted) -> None:
    """Handle an operator's admission: the held update enters the round."""
    pending = _asked(turn, event)
    if pending is None:
        return
    if pending.held is not None:
        line = turn.state.sites[event.site].lines[event.fragment]
        vital = Vital(pending.steps, pending.held.norm, pending.held.cosine)
        line.vitals = [*line.vitals, vital][-turn.state.health.history :]
        pending.held = None
        turn.attendance.line_changed(event.site, event.fragment)
        what = f"an operator's word: sequence {pending.sequence}"
        turn.note("update_admitted", what, site=event.site, fragment=event.fragment)
    turn.effects.append(AnswerDone(event.call))


def withdrawn(turn: Turn, event: UpdateWithdrawn) -> None:
    """Handle an operator's withdrawal: refuse the update; CONFLICT where it is being merged already."""
    pending = _asked(turn, event, refused=True)
    if pending is None:
        return
    if not pending.merging:
        refuse(turn, event.site, event.fragment, pending, Reason.WITHDRAWN)
    turn.effects.append(AnswerDone(event.call, Reason.CONFLICT if pending.merging else None))


def _asked(turn: Turn, event: UpdateAdmitted | UpdateWithdrawn, *, refused: bool = False) -> Pending | None:
    """Return the undecided update that the operator names; where there is none, answer the operator and return None.

    A repeated request succeeds: where the update already has the fate asked for, the answer has no reason.
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


def held_updates(machine: Machine) -> list[tuple[str, int, Pending, int]]:
    """Return (site, fragment, update, instant at which it expires) of each held update, by site and then fragment."""
    state, holding = machine.state, machine.attendance.holding
    if not any(holding):
        return []
    return [
        (name, index, pending, pending.held.since_ns + state.health.hold_ns)
        for name, index in sorted((name, index) for index, names in enumerate(holding) for name in names)
        for pending in state.sites[name].lines[index].undecided
        if pending.held is not None
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of an update: one that is ACCEPTED may enter a round.  ``fate``: of a duplicate, where known."""

    outcome: Outcome
    reason: Reason | None = None
    fate: Fate | None = None


ACCEPTED = Verdict(Outcome.ACCEPTED)


def admit(
    machine: Machine, site: str, incarnation: int, fragment: int, sequence: int, base_version: int, digest: str
) -> Verdict:
    """Judge an update by its header alone; the machine is only read.

    For an update accepted before, any incarnation gets the answer (an old one may learn about its own past).  A new
    update must come from the site's present incarnation, follow its predecessor, and not be stale already.
    """
    state, options = machine.state, machine.options
    member = state.sites.get(site)
    if member is None:
        return Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
    if not 0 <= fragment < len(state.fragments):
        return Verdict(Outcome.REFUSED, Reason.BAD_BASE)
    # Sequence numbers of the lineage before a restore mean nothing now.  From ``since`` on an incarnation is of this
    # lineage: that process may not have its join's answer yet, but it must not be told that it has not joined.
    if not member.process or incarnation < member.since:
        return Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
    line = member.lines[fragment]
    if sequence <= line.watermark:
        return _known(line, sequence, digest)
    if member.status is Status.EVICTED:
        return Verdict(Outcome.REFUSED, Reason.EVICTED)
    if incarnation != member.incarnation or member.status is Status.LEFT:
        return Verdict(Outcome.REFUSED, Reason.FENCED)
    if state.phase is Phase.ENDED or (state.final_deadline_ns is not None and state.now_ns >= state.final_deadline_ns):
        return Verdict(Outcome.REFUSED, Reason.FINISHED)
    if sequence > line.watermark + 1:
        return Verdict(Outcome.RETRY, Reason.GAP)
    if digest in line.outliers:  # It might pass by now, but its site has thrown its progress away.
        return Verdict(Outcome.REFUSED, Reason.OUTLIER)
    version = state.fragments[fragment].version
    if not 0 <= base_version <= version:
        return Verdict(Outcome.REFUSED, Reason.BAD_BASE)
    if version - base_version > options.staleness_max:
        return Verdict(Outcome.REFUSED, Reason.STALE)
    if len(line.undecided) >= options.updates_in_flight_max:
        return Verdict(Outcome.RETRY, Reason.OVERLOAD)
    return ACCEPTED


def _known(line: Line, sequence: int, digest: str) -> Verdict:
    """Answer a sequence number that was accepted before: DUPLICATE, CONFLICT (another content), or FORGOTTEN."""
    accepted: list[Pending | Fate] = [*line.undecided, *line.fates]
    for known in accepted:
        if known.sequence == sequence:
            if known.digest != digest:
                return Verdict(Outcome.REFUSED, Reason.CONFLICT)
            return Verdict(Outcome.DUPLICATE, fate=known if isinstance(known, Fate) else None)
    return Verdict(Outcome.REFUSED, Reason.FORGOTTEN)
