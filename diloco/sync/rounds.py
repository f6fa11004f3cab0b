"""The rounds of a fragment: opened by an update, closed into one outer step, which gives the next version."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from diloco.sync import ending, upstream
from diloco.sync.claims import period_ns, seen_ns
from diloco.sync.effects import Contribution, PublishVersion, StartOuterStep, UpdateRef
from diloco.sync.events import Reason
from diloco.sync.fates import decide, refuse, refuse_stale
from diloco.sync.quorum import grace_ns, smoothed, standing
from diloco.sync.state import Line, OuterState, Pending, Phase, Round
from diloco.sync.weights import normalised, of_its_age, raw_weight, share

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from diloco.sync.events import OuterStepDone, OuterStepFailed
    from diloco.sync.options import OuterOptions
    from diloco.sync.turn import Turn


def open_round(turn: Turn, index: int) -> Round:
    """The fragment's round from now on; its members are the sites that are waited for at this instant."""
    attendance = turn.attendance
    members = [name for name in attendance.live if name not in attendance.holding[index]]
    opened = turn.state.fragments[index].round = Round(members=members, opened_ns=turn.state.now_ns)
    attendance.missed[index] = False
    return opened


def consider(turn: Turn, index: int) -> None:
    """Close the fragment's round if it may close; start its grace when the quorum is met.

    A merge under way keeps the round open, but quorum and grace do not wait for it.
    """
    state, fragment = turn.state, turn.state.fragments[index]
    arrived = turn.attendance.arrived[index]
    if not arrived:
        fragment.round = None  # Every update of it was refused: no version is made of nothing.
        return
    collecting = fragment.round or open_round(turn, index)
    shrunk = _shrink(turn, index, collecting)
    merging = fragment.merging_since_ns is not None or upstream.waits_for_base(state, index)
    if not merging and ending.all_final(turn, index):
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
        wait_ns = _grace_ns(turn, index)
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
    """A member that is gone is waited for no more; what it has delivered still counts."""
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


@dataclass(frozen=True, slots=True)
class Standstill:
    """A fragment of which no version is made since ``since_ns`` although updates wait, and the sites that lack."""

    fragment: int
    since_ns: int
    waits_for: tuple[str, ...]
    why: str


def standstill(options: OuterOptions, state: OuterState, now_ns: int) -> Standstill | None:
    """The round that has waited longest for sites, if that is too long: ``STANDSTILL_PERIODS`` of the slowest of them
    and the time after which a site that is gone is waited for no more."""
    rounds = [
        (each.round.opened_ns, at) for at, each in enumerate(state.fragments) if each.round and not each.round.met_ns
    ]
    if not rounds or state.phase is not Phase.RUNNING:
        return None
    since_ns, index = min(rounds)
    periods_ns = []
    for site in (state.sites[name] for name in state.live()):
        line = site.lines[index]
        steps = max([line.usual_steps, *(pending.steps for pending in line.undecided)])
        periods_ns.append(min(steps * site.step_ns, seen_ns(site, index)))
    bound_ns = max(options.site_timeout_ns, STANDSTILL_PERIODS * max(periods_ns, default=0))
    if now_ns - since_ns < bound_ns:
        return None
    collecting, here, live = state.fragments[index].round, set(state.arrived(index)), state.awaited(index)
    assert collecting is not None
    lacking = tuple(name for name in sorted({*collecting.members, *live}) if name not in here)
    why = standing(options, collecting.members, {*live}, here, len(state.waiting(index))).why()
    if options.quorum != "all" or len(here) < options.quorum_min:
        why += f"; waiting for {', '.join(lacking)}" if lacking else "; no other site is live"
    return Standstill(index, since_ns, lacking, why)


def _grace_ns(turn: Turn, index: int) -> int:
    fragment, live = turn.state.fragments[index], [turn.state.sites[name] for name in turn.attendance.live]
    step_ns = max([site.step_ns for site in live], default=0)
    periods_ns = [period_ns(site, index) for site in live]
    fastest_ns = min([each for each in periods_ns if each], default=0)
    return grace_ns(turn.options, step_ns, fragment.quorum_ns, fragment.sync_ns, fastest_ns)


def _close(turn: Turn, index: int, why: str) -> None:
    state, fragment = turn.state, turn.state.fragments[index]
    for name, pending in turn.attendance.waiting(index)[: turn.options.round_updates or None]:
        assert fragment.version - pending.base_version <= turn.options.staleness_max, "stale at the merge"
        pending.merging = True
        turn.attendance.line_changed(name, index)
    fragment.round = None
    fragment.merging_since_ns = state.now_ns
    merged = {name for name, _ in under_merge(state, index, turn.attendance.undecided[index])}
    fragment.full_round = _full_round(turn, index, merged) if turn.options.share_weighted else {}
    step = outer_step(turn.options, state, index, among=turn.attendance.undecided[index])
    part = "" if step.share == 1 else f"; {step.share:.3f} of a full round"
    turn.note("round_closed", why + part, fragment=index, version=step.version)
    turn.effects.append(step)


def _full_round(turn: Turn, index: int, merged: Collection[str]) -> dict[str, float]:
    """See ``FragmentState.full_round``: what is usual is that of earlier steps, so that no update says what it counts.

    Where there is none, a site's first update stands for it, but for no more than the largest of the others, and for a
    site that has sent none their mean.
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


def _usual(line: Line, pending: Pending) -> None:
    """An update has been merged.  One of several periods, or a claim, at most doubles a sample of what is usual."""
    tokens, steps = pending.tokens, pending.steps
    if line.usual_tokens:
        tokens, steps = min(tokens, 2 * line.usual_tokens), min(steps, 2 * line.usual_steps)
    line.usual_tokens, line.usual_steps = smoothed(line.usual_tokens, tokens), smoothed(line.usual_steps, steps)


def outer_step(
    options: OuterOptions,
    state: OuterState,
    index: int,
    leave_out: Collection[tuple[str, int]] = (),
    among: Iterable[str] | None = None,
) -> StartOuterStep:
    """The outer step that is under way, from the memory alone, so that a restart gives the same one.

    Where steps are taken by their share, a site counts as its usual update does: one of two periods is as much longer
    already, and moves the model as far as two updates in two rounds do.  ``among`` as in ``under_merge``.

    ``leave_out`` names updates (site, sequence) without which it is wanted: the weights are then those of the others
    alone, as if these had never come, and there may be no contribution left.
    """
    merging: list[tuple[str, list[Pending]]] = []
    for name, pending in under_merge(state, index, among):
        if (name, pending.sequence) in leave_out:
            continue
        if options.merge_by == "site" and merging and merging[-1][0] == name:
            merging[-1][1].append(pending)
        else:
            merging.append((name, [pending]))
    version = state.fragments[index].version
    bases = [min([update.base_version for update in updates]) for _, updates in merging]
    full_round = state.fragments[index].full_round
    raw = [
        (
            full_round[name]
            if full_round
            else raw_weight(options.weights, sum([u.tokens for u in updates]), sum([u.steps for u in updates]))
        )
        * of_its_age(version - base, options.staleness_power)
        for (name, updates), base in zip(merging, bases, strict=True)
    ]
    contributions = tuple(
        Contribution(
            name,
            weight,
            base,
            tuple([UpdateRef(u.sequence, u.payload, u.encoding, u.digest) for u in updates]),
        )
        for (name, updates), base, weight in zip(merging, bases, normalised(raw), strict=True)
    )
    part = share(dict(merging), full_round) if merging else 1.0
    return StartOuterStep(index, version + 1, contributions, part)


def outer_step_done(turn: Turn, event: OuterStepDone) -> None:
    """The next version: announce it, tell the fates of what it holds, refuse what is too old for the one after it."""
    fragment = turn.state.fragments[event.fragment]
    assert fragment.merging_since_ns is not None, event
    assert event.version == fragment.version + 1, event
    fragment.version, fragment.digest = event.version, event.digest
    fragment.sync_ns = smoothed(fragment.sync_ns, turn.state.now_ns - fragment.merging_since_ns)
    fragment.merging_since_ns, fragment.full_round = None, {}
    merged = under_merge(turn.state, event.fragment, turn.attendance.undecided[event.fragment])
    for name, pending in merged:
        _usual(turn.state.sites[name].lines[event.fragment], pending)
    fates = [decide(turn, name, event.fragment, pending, event.version, None) for name, pending in merged]
    turn.effects += [PublishVersion(event.fragment, event.version, event.digest), *fates]
    refuse_stale(turn, event.fragment)
    upstream.stepped(turn, event.fragment, [pending for _, pending in merged])


def outer_step_failed(turn: Turn, event: OuterStepFailed) -> None:
    """There is no finite version: what would have been in it is refused."""
    fragment = turn.state.fragments[event.fragment]
    assert fragment.merging_since_ns is not None, event
    if upstream.cannot_take(turn, event.fragment):
        return
    fragment.merging_since_ns, fragment.full_round = None, {}
    for name, pending in under_merge(turn.state, event.fragment):
        refuse(turn, name, event.fragment, pending, Reason.NON_FINITE)


def under_merge(state: OuterState, index: int, among: Iterable[str] | None = None) -> list[tuple[str, Pending]]:
    """The updates of the outer step that is under way, each with its site, in the order of the merge.

    ``among`` are sites without which there is none, where somebody knows them.
    """
    sites = state.sites
    names = sorted(sites if among is None else among)
    return [(name, p) for name in names for p in list(sites[name].lines[index].undecided) if p.merging]
