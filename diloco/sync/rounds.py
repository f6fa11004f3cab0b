"""The rounds of a fragment: opened by an update, closed into one outer step, which gives the next version.

A round closes when its quorum is met and its grace is over, or when every live site has arrived (``standing``,
``grace_ns``).  A site's contribution enters the merge with its weight (``raw_weight``), and the merge moves the model
by its share of a whole step (``share``).

An update that arrives enters the fragment's round or is refused at once.  A refusal changes nothing, so that no caller
can make the syncer store what it refuses, with one exception: for an update refused as an outlier the syncer stores its
digest and counts it.  Every other reason stays true, or is found again in the same bytes.  But the statistics of usual
updates change: without the digest, an outlier that arrives twice, or again after a crash, could be refused at first, so
that its site throws its progress away, and merged later.

A ``Selection`` names a set of updates for an operator, in text that a person can type.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from diloco.sync import admission, fates, members, region
from diloco.sync.admission import ARRIVALS_KEPT, USUAL, Finding, Verdict
from diloco.sync.effects import AnswerPush, Contribution, PublishVersion, StartOuterStep, StopTraining, UpdateRef
from diloco.sync.events import Outcome, OuterStepDone, OuterStepFailed, Reason, UpdateArrived
from diloco.sync.options import OuterOptions, smoothed
from diloco.sync.state import Held, Machine, Pending, Phase, Round, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet


class QuorumStanding(NamedTuple):
    """``met``: enough distinct sites arrived.  ``complete``: every live site did, so no more can arrive."""

    met: bool
    complete: bool
    why: Callable[[], str]
    """Returns the reason as text; a function because the text costs more than the judgement."""


def standing(
    options: OuterOptions, members: Sequence[str], live: AbstractSet[str], arrived: AbstractSet[str], waiting: int
) -> QuorumStanding:
    """Return whether a round has its quorum and whether it is complete.

    ``members`` are the sites of the round (live when it opened and not lost since), ``live`` those live now,
    ``arrived`` those with at least one update waiting: an update counts even when its site has died meanwhile.
    ``waiting`` is the number of waiting updates.
    """
    here = len(arrived)
    if options.round_updates:
        # The live sites can send no more updates than this before one has its fate.
        wanted = min(options.round_updates, max(1, len(live)) * options.updates_in_flight_max)
        enough = waiting >= wanted
        return QuorumStanding(enough, enough, lambda: f"{waiting} updates are here, {wanted} make a round")
    complete = live <= arrived
    if here < options.quorum_min:
        return QuorumStanding(False, False, lambda: f"{here} of at least quorum_min={options.quorum_min} sites arrived")
    if isinstance(options.quorum, str):  # "all"
        if len(members) > here or not arrived >= set(members):
            all_of = f"of all {len(members)} members"
            return QuorumStanding(
                False, False, lambda: f"waiting for {', '.join(sorted(set(members) - arrived))} {all_of}"
            )
        return QuorumStanding(True, complete, lambda: f"all {len(members)} members arrived")
    if here < options.quorum:
        return QuorumStanding(False, False, lambda: f"{here} of quorum={options.quorum} sites arrived")
    return QuorumStanding(True, complete, lambda: f"quorum={options.quorum} met by {', '.join(sorted(arrived))}")


def grace_ns(options: OuterOptions, step_ns: int, quorum_ns: int, sync_ns: int, period_ns: int) -> int:
    """Return how long to wait for more sites once the quorum is met.

    Adaptive grace takes a share of the slack that the overlap leaves (Decoupled DiLoCo, arXiv 2604.21428:
    slack = τ·ξ_step − (ξ_quorum + ξ_sync)), at most ``options.grace_ns``, but no less than ``grace_period_percent`` of
    a period, which is enough to bring equally fast sites into one round.  ``step_ns`` is the slowest live site's usual
    step time, ``quorum_ns`` the usual time to the quorum, ``sync_ns`` the usual time of an outer step, ``period_ns``
    the fastest live site's usual time between two updates.
    """
    if options.grace == "fixed":
        return options.grace_ns
    slack_ns = options.overlap_steps * step_ns - (quorum_ns + sync_ns)
    wanted_ns = max(0, slack_ns) * options.grace_share_percent // 100
    return max(min(options.grace_ns, wanted_ns), period_ns * options.grace_period_percent // 100)


SHARE_LEAST = 1e-6
"""Smallest share of a round: a site still makes a step where others claim a million times its weight."""


def raw_weight(rule: str, tokens: int, steps: int) -> float:
    """Return the weight before normalising; ``tokens`` and ``steps`` count from the previous update, both positive.

    ``tokens2_per_step`` is Decoupled DiLoCo's tokens times tokens per step (arXiv 2604.21428): a site's weight grows
    with its tokens and with its batch size.  ``uniform`` is DiLoCo's plain mean (arXiv 2311.08105, alg. 1).
    """
    assert tokens > 0, tokens
    assert steps > 0, steps
    if rule == "tokens2_per_step":
        return tokens * tokens / steps
    if rule == "tokens":
        return float(tokens)
    assert rule == "uniform", rule
    return 1.0


def of_its_age(staleness: int, power: float) -> float:
    """Return the factor on the weight of a contribution ``staleness`` versions old: (1 + staleness)^-power (arXiv
    1903.03934, polynomial).

    The weights of a merge still sum to 1: this shifts weight from old to new contributions, and makes no step smaller.
    """
    assert staleness >= 0, staleness
    return float((1 + staleness) ** -power)


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return ``weights`` divided by their sum, so that they sum to 1 to within 1e-12."""
    total = sum(weights)
    assert total > 0 or not weights, weights
    return tuple(weight / total for weight in weights)


def share(merged: Collection[str], full_round: Mapping[str, float]) -> float:
    """Return which part of a full round the sites ``merged`` are: above 0, at most 1, exactly 1 for all of them.

    ``full_round`` has the usual weight of an update of each site that the round could have had.  A step scaled by this
    share moves the model by each site's pseudo-gradient as far as a step of all sites does, so the result does not
    depend on which sites arrive together, as long as their updates are of the usual length.  The share is of weights
    and not only of tokens, because weights decide in a merge with others; it is of usual weights, because the
    pseudo-gradient of an update of two periods is already about twice as long.
    """
    if not full_round:
        return 1.0
    part = sum(weight for name, weight in full_round.items() if name in merged) / sum(full_round.values())
    return max(SHARE_LEAST, part)


OUTLIERS_REMEMBERED_MAX = 16
"""Digests kept for one sequence number: a site stops with an error after far fewer discards in a row."""


def update_arrived(turn: Turn, event: UpdateArrived) -> None:
    """Judge an update whose payload is complete and durable, and answer its push."""
    assert event.tokens > 0, event
    assert event.steps > 0, event
    state = turn.state
    verdict, finding = _judged(turn, event)
    known = 0 <= event.fragment < len(state.fragments)
    version = state.fragments[event.fragment].version if known else 0
    turn.effects.append(AnswerPush(event.call, verdict.outcome, version, verdict.reason, verdict.fate))
    if verdict.outcome is not Outcome.ACCEPTED:
        if finding.why and verdict.reason is not None:
            line, reason = state.sites[event.site].lines[event.fragment], verdict.reason.value
            line.outliers = [*line.outliers, event.digest][-OUTLIERS_REMEMBERED_MAX:]
            line.updates_refused[reason] = line.updates_refused.get(reason, 0) + 1
        return
    members.came_back(turn, event.site)
    site, fragment = state.sites[event.site], state.fragments[event.fragment]
    site.step_ns = smoothed(site.step_ns, event.step_ns)
    line = site.lines[event.fragment]
    vital = admission.vital_of(turn, event) if event.norm > 0 else None  # 0: not measured.
    # The claims of the site's next update are compared with these.  State of an earlier release has no arrivals.
    line.arrivals_ns = [*(line.arrivals_ns or [0]), state.now_ns + state.away_ns][-ARRIVALS_KEPT:]
    if turn.options.unit_sequences or not line.step_tokens:
        line.step_tokens = max(line.step_tokens, -(-event.tokens // event.steps))
    line.watermark, line.cursor, line.final = event.sequence, max(line.cursor, event.cursor), event.final
    line.outliers = []  # From now on another update with this sequence number is a duplicate or a conflict.
    fragment.arrivals += 1
    pending = Pending(
        event.sequence,
        event.base_version,
        event.tokens,
        event.steps,
        event.digest,
        event.payload,
        event.encoding,
        spans=list(event.spans),
        arrival=fragment.arrivals,
    )
    line.undecided.append(pending)
    if finding.why and state.health.policy_of(event.site) == "hold":
        pending.held = Held(state.now_ns, event.norm, event.cosine, finding.ratio, finding.z, finding.why)
    turn.attendance.line_changed(event.site, event.fragment)
    if finding.why:
        what, why = "update_held" if pending.held else "outlier_admitted", f"sequence {event.sequence}: {finding.why}"
        turn.note(what, why, site=event.site, fragment=event.fragment)
    if vital is not None and pending.held is None:
        line.vitals = [*line.vitals, vital][-state.health.history :]


def _judged(turn: Turn, event: UpdateArrived) -> tuple[Verdict, Finding]:
    """Judge the header first: it may rule an update out whatever the values are.  Then judge claims and values."""
    header = (event.site, event.incarnation, event.fragment, event.sequence, event.base_version, event.digest)
    verdict = admission.admit(turn, *header)
    if verdict.outcome is not Outcome.ACCEPTED:
        if verdict.reason is Reason.OUTLIER:
            why = f"sequence {event.sequence}: it was refused before"
            turn.note("outlier_again", why, site=event.site, fragment=event.fragment)
        return verdict, USUAL
    if not event.intact:
        return Verdict(Outcome.REFUSED, Reason.CORRUPT), USUAL
    if not event.finite:
        return Verdict(Outcome.REFUSED, Reason.NON_FINITE), USUAL
    state, finding, reason = turn.state, USUAL, Reason.IMPLAUSIBLE
    if why := admission.implausible(turn, event):
        finding = Finding(why=why)
    elif event.norm > 0:  # 0: not measured.
        # A sum of floats depends on its order, and a replay must give the same.
        vitals = {name: state.sites[name].lines[event.fragment].vitals for name in sorted(state.sites)}
        own = vitals.pop(event.site)
        others = [vital for window in vitals.values() for vital in window]
        finding = admission.judge(state.health, admission.vital_of(turn, event), own, others)
        reason = Reason.OUTLIER
    if finding.why and state.health.policy_of(event.site) == "refuse":
        why = f"sequence {event.sequence}: {finding.why}"
        turn.note(f"{reason.value}_refused", why, site=event.site, fragment=event.fragment)
        return Verdict(Outcome.REFUSED, reason), finding
    return verdict, finding


def consider(turn: Turn, index: int) -> None:
    """Open the fragment's round where updates wait, close it if it may close; start its grace when the quorum is met.

    A merge under way keeps the round open, but quorum and grace do not wait for that merge.
    """
    state, fragment = turn.state, turn.state.fragments[index]
    arrived = turn.attendance.arrived[index]
    if not arrived:
        fragment.round = None  # Every update of the round was refused: there is nothing to merge.
        return
    if fragment.round is None:  # Its members are the live sites without a held update.
        fragment.round = Round(sorted(turn.attendance.awaited(index)), state.now_ns)
    collecting = fragment.round
    shrunk = _shrink(turn, index, collecting)
    # The rounds of a fragment stay open until its region has a base: progress merged before could never go up.
    upstream = state.upstream if state.phase is Phase.RUNNING else None
    lacks_base = upstream is not None and upstream.parts[index].progress.base_version < 0
    merging = fragment.merging_since_ns is not None or lacks_base
    if not merging and fates.all_final(turn, index):
        _close(turn, index, "the last round is complete")
        return
    waiting = len(turn.attendance.waiting(index)) if turn.options.round_updates else 0
    stand = standing(turn.options, collecting.members, turn.attendance.awaited(index), arrived, waiting)
    if not stand.met:
        collecting.met_ns = collecting.deadline_ns = None
        if shrunk and arrived >= set(collecting.members):
            turn.note("round_waits", stand.why(), fragment=index)
        return
    now_ns = state.now_ns
    if collecting.met_ns is None:
        collecting.met_ns = now_ns
        is_adaptive = turn.options.grace == "adaptive"  # A fixed grace needs no figures of the sites.
        live = [state.sites[name] for name in turn.attendance.live] if is_adaptive else []
        step_ns = max([site.step_ns for site in live], default=0)
        fastest_ns = min([each for site in live if (each := admission.period_ns(site, index))], default=0)
        wait_ns = grace_ns(turn.options, step_ns, fragment.quorum_ns, fragment.sync_ns, fastest_ns)
        collecting.deadline_ns = now_ns + wait_ns
        fragment.quorum_ns = smoothed(fragment.quorum_ns, now_ns - collecting.opened_ns)
        if wait_ns and not stand.complete:
            turn.note("grace", f"{stand.why()}; {wait_ns / 1e6:.0f} ms for more", fragment=index)
    assert collecting.deadline_ns is not None
    if merging:
        return
    if stand.complete:
        _close(turn, index, stand.why() if turn.options.round_updates else "every live site arrived")
    elif now_ns >= collecting.deadline_ns:
        _close(turn, index, f"{stand.why()}; grace over")


def _shrink(turn: Turn, index: int, collecting: Round) -> bool:
    """Drop members that are gone or held (their delivered updates still count); return whether any was dropped."""
    if not turn.attendance.missed[index]:
        return False
    turn.attendance.missed[index] = False
    waited_for = turn.attendance.awaited(index) | turn.attendance.arrived[index]
    gone = [name for name in collecting.members if name not in waited_for]
    for name in gone:
        collecting.members.remove(name)
        site = turn.state.sites[name]
        state = "an update of it is held" if site.lines[index].holding() else f"its status is {site.status.value}"
        why = f"{state}: {len(collecting.members)} members remain"
        turn.note("round_shrunk", why, site=name, fragment=index)
    return bool(gone)


STANDSTILL_PERIODS = 3


def standstill(machine: Machine, now_ns: int) -> dict[str, object] | None:
    """Return the facts of the round that has waited longest for sites, if it has waited too long.

    That is ``STANDSTILL_PERIODS`` periods of the slowest live site, and at least ``site_timeout_ns``, after which a
    silent site is dropped from the round.  The facts are the ``fragment`` that has no new version although updates
    wait, for how many ``seconds``, the sites that it ``waits_for``, and ``why``; None where no round stands still.
    """
    options, state, attendance = machine.options, machine.state, machine.attendance
    rounds = [(each.round, at) for at, each in enumerate(state.fragments) if each.round and not each.round.met_ns]
    if not rounds or state.phase is not Phase.RUNNING:
        return None
    collecting, index = min(rounds, key=lambda pair: pair[0].opened_ns)
    waited_ns = now_ns - collecting.opened_ns
    periods_ns = [admission.period_ns(state.sites[name], index) for name in sorted(attendance.live)]
    bound_ns = max(options.site_timeout_ns, STANDSTILL_PERIODS * max(periods_ns, default=0))
    if waited_ns < bound_ns:
        return None
    here, live = attendance.arrived[index], attendance.awaited(index)
    lacking = [name for name in sorted({*collecting.members, *live}) if name not in here]
    why = standing(options, collecting.members, live, here, len(attendance.waiting(index))).why()
    if options.quorum != "all" or len(here) < options.quorum_min:
        why += f"; waiting for {', '.join(lacking)}" if lacking else "; no other site is live"
    return {"fragment": index, "seconds": round(waited_ns / 1e9, 1), "waits_for": lacking, "why": why}


def _close(turn: Turn, index: int, why: str) -> None:
    state, fragment = turn.state, turn.state.fragments[index]
    for name, pending in turn.attendance.waiting(index)[: turn.options.round_updates or None]:
        assert fragment.version - pending.base_version <= turn.options.staleness_max, "stale at the merge"
        pending.merging = True
        turn.attendance.line_changed(name, index)
    fragment.round = None
    fragment.merging_since_ns = state.now_ns
    if turn.options.share_weighted:
        fragment.full_round = _full_round(turn, index, {name for name, _ in turn.attendance.merging(index)})
    step = outer_step(turn, index)
    part = "" if step.share == 1 else f"; {step.share:.3f} of a full round"
    turn.note("round_closed", why + part, fragment=index, version=step.version)
    turn.effects.append(step)


def _full_round(turn: Turn, index: int, merged: Collection[str]) -> dict[str, float]:
    """Return ``FragmentState.full_round``: usual weights come from earlier steps, so no update sets its own weight.

    Without an earlier step a site's first update gives its usual weight, at most the largest of the others'.  A site
    that has sent no update gets the mean of the others.
    """
    lines = {name: turn.state.sites[name].lines[index] for name in sorted({*merged, *turn.attendance.awaited(index)})}
    rule = turn.options.weights
    usual = [(name, line.usual_tokens, line.usual_steps) for name, line in lines.items() if line.usual_tokens]
    known = {name: raw_weight(rule, tokens, steps) for name, tokens, steps in usual}
    most = max(known.values(), default=inf)
    for name, line in lines.items():
        first = next((pending for pending in line.undecided if pending.merging), None)
        if name not in known and first is not None:
            known[name] = min(raw_weight(rule, first.tokens, first.steps), most)
    mean = sum(known.values()) / len(known)
    return {name: known.get(name, mean) for name in lines}


def outer_step(machine: Machine, index: int, leave_out: Collection[tuple[str, int]] = ()) -> StartOuterStep:
    """Return the outer step that is under way, from the memory alone, so that a restart gives the same one.

    With ``share_weighted`` a site has the weight of its usual update: the pseudo-gradient of an update of two periods
    is already about twice as long, and moves the model as far as two updates in two rounds do.

    ``leave_out`` names updates (site, sequence) to omit: the weights are then those of the others alone, as if the
    omitted ones had never come, and there may be no contribution left.
    """
    options, fragment = machine.options, machine.state.fragments[index]
    merging: dict[tuple[str, int], list[Pending]] = {}
    for name, pending in machine.attendance.merging(index):
        if (name, pending.sequence) not in leave_out:
            key = (name, pending.sequence if options.merge_by == "update" else 0)
            merging.setdefault(key, []).append(pending)
    version, full_round = fragment.version, fragment.full_round
    bases, raw, updates_of = [], [], []
    for (name, _), updates in merging.items():
        base = min([update.base_version for update in updates])
        tokens, steps = sum([update.tokens for update in updates]), sum([update.steps for update in updates])
        weight = full_round[name] if full_round else raw_weight(options.weights, tokens, steps)
        bases.append(base)
        raw.append(weight * of_its_age(version - base, options.staleness_power))
        updates_of.append(tuple([UpdateRef(u.sequence, u.payload, u.encoding, u.digest) for u in updates]))
    names = [name for name, _ in merging]
    contributions = tuple(map(Contribution, names, normalised(raw), bases, updates_of))
    part = share(set(names), full_round) if merging else 1.0
    return StartOuterStep(index, version + 1, contributions, part)


def outer_step_done(turn: Turn, event: OuterStepDone) -> None:
    """Publish the next version, tell the fates of its updates, refuse updates too stale for the version after it."""
    fragment = turn.state.fragments[event.fragment]
    assert fragment.merging_since_ns is not None, event
    assert event.version == fragment.version + 1, event
    fragment.version, fragment.digest = event.version, event.digest
    fragment.sync_ns = smoothed(fragment.sync_ns, turn.state.now_ns - fragment.merging_since_ns)
    fragment.merging_since_ns, fragment.full_round = None, {}
    merged = turn.attendance.merging(event.fragment)
    for name, pending in merged:
        line, tokens, steps = turn.state.sites[name].lines[event.fragment], pending.tokens, pending.steps
        if line.usual_tokens:  # An update of several periods, or an exaggerated claim, has a bounded effect.
            tokens, steps = min(tokens, 2 * line.usual_tokens), min(steps, 2 * line.usual_steps)
        line.usual_tokens, line.usual_steps = smoothed(line.usual_tokens, tokens), smoothed(line.usual_steps, steps)
    decided = [fates.decide(turn, name, event.fragment, pending, None) for name, pending in merged]
    turn.effects += [PublishVersion(event.fragment, event.version, event.digest), *decided]
    fates.refuse_stale(turn, event.fragment)
    region.stepped(turn, event.fragment, [pending for _, pending in merged])


def outer_step_failed(turn: Turn, event: OuterStepFailed) -> None:
    """Refuse the updates of an outer step that gave no finite values; a region that took a version stops."""
    fragment = turn.state.fragments[event.fragment]
    assert fragment.merging_since_ns is not None, event
    if region.taking(turn.state, event.fragment) is not None:
        # The next update would have no base to be measured from.  Another process of the region tries again.
        why = "blended with the version above the values, or what is published of them, are not finite"
        turn.effects.append(StopTraining(None, f"fragment {event.fragment}: {why}", failed=True))
        return
    fragment.merging_since_ns, fragment.full_round = None, {}
    for name, pending in turn.attendance.merging(event.fragment):
        fates.refuse(turn, name, event.fragment, pending, Reason.NON_FINITE)


KINDS = ("versions", "sequences")
WANTED = "site=NAME:versions=FIRST..LAST or site=NAME:sequences=FIRST..LAST, and :fragment=NUMBER for one alone"


@dataclass(frozen=True, slots=True)
class Selection:
    """Some updates of one site.

    ``kind`` "versions": those merged into versions ``first`` to ``last``; "sequences": those with sequence numbers
    ``first`` to ``last``.  ``fragment`` None means every fragment.
    """

    site: str
    kind: str
    first: int
    last: int
    fragment: int | None = None

    def takes(self, site: str, fragment: int, sequence: int, version: int) -> bool:
        """Return whether the update ``sequence`` of (``site``, ``fragment``), merged into ``version``, is selected."""
        number = version if self.kind == "versions" else sequence
        return self.of(site, fragment) and self.first <= number <= self.last

    def of(self, site: str, fragment: int) -> bool:
        """Return whether any update of (``site``, ``fragment``) can be selected."""
        return site == self.site and self.fragment in (None, fragment)

    def __str__(self) -> str:
        where = "" if self.fragment is None else f":fragment={self.fragment}"
        return f"site={self.site}:{self.kind}={self.first}..{self.last}{where}"


def parse_selection(text: str) -> Selection:
    """Return the selection that ``text`` describes; ``ValueError`` says what is wrong with the text."""
    fields: dict[str, str] = {}
    for part in text.split(":"):
        name, equals, value = part.partition("=")
        if not equals or not value or name not in ("site", "fragment", *KINDS):
            raise ValueError(f"{text!r} has {part!r}: {WANTED}")
        if name in fields:
            raise ValueError(f"{text!r} says {name} twice")
        fields[name] = value
    kinds = [kind for kind in KINDS if kind in fields]
    if "site" not in fields or len(kinds) != 1:
        raise ValueError(f"{text!r} selects nothing: {WANTED}")
    kind = kinds[0]
    first, dots, last = fields[kind].partition("..")
    numbers = {"first": first, "last": last if dots else first, "fragment": fields.get("fragment", "0")}
    for name, value in numbers.items():
        if not value.isascii() or not value.isdecimal():
            raise ValueError(f"{text!r} has {name if name in fields else kind}={value}: a whole number")
    least, most, fragment = map(int, numbers.values())
    if least < 1 or most < least:
        raise ValueError(f"{text!r} has {kind}={fields[kind]}: from 1 on, and the first is not above the last")
    return Selection(fields["site"], kind, least, most, fragment if "fragment" in fields else None)
