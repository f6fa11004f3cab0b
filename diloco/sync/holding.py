"""An update that looks like no other: refused, held for an operator's word, or only noted, as the site's policy says.

A held update is accepted and durable.  It waits, and what its site sends after it waits behind it, until an operator
admits or refuses it, it is too stale to be merged, or its time is over.  Nobody waits for its site
meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.claims import believed_steps
from diloco.sync.effects import AnswerDone
from diloco.sync.events import Reason
from diloco.sync.fates import refuse
from diloco.sync.health import NOTHING_WRONG, Finding, Vital, judge
from diloco.sync.state import Held

if TYPE_CHECKING:
    from diloco.sync.attendance import Attendance
    from diloco.sync.events import UpdateAdmitted, UpdateArrived, UpdateWithdrawn
    from diloco.sync.options import OuterOptions
    from diloco.sync.state import OuterState, Pending
    from diloco.sync.turn import Turn


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
