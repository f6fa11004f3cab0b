"""An update is here: it enters the fragment's round, or is answered at once.

A refusal changes nothing, so that nobody can make the syncer remember things by sending what it refuses, but for one:
what is refused as an outlier is remembered by its digest, and counted.  Every other reason holds for ever once it
holds, or is found again in the same bytes.  What is usual moves, and the same update that comes twice, or again after a
crash, must not be refused to its site, which throws it away, and then be merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import membership
from diloco.sync.admission import Verdict, admit
from diloco.sync.claims import arrived, implausible
from diloco.sync.effects import AnswerPush
from diloco.sync.events import Outcome, Reason, UpdateArrived
from diloco.sync.health import NOTHING_WRONG, Finding
from diloco.sync.holding import held_from, looked_at, remember, vital_of
from diloco.sync.quorum import smoothed
from diloco.sync.rounds import open_round
from diloco.sync.state import Pending

if TYPE_CHECKING:
    from diloco.sync.state import Line
    from diloco.sync.turn import Turn

OUTLIERS_REMEMBERED_MAX = 16
"""Of one number: a site whose updates are discarded in a row stops in words long before it has sent so many."""


def update_arrived(turn: Turn, event: UpdateArrived) -> None:
    """Judge an update that is whole and durable, and answer."""
    assert event.tokens > 0, event
    assert event.steps > 0, event
    state = turn.state
    verdict, finding = _judged(turn, event)
    known = 0 <= event.fragment < len(state.fragments)
    version = state.fragments[event.fragment].version if known else 0
    turn.effects.append(AnswerPush(event.call, verdict.outcome, version, verdict.reason, verdict.fate))
    if verdict.outcome is not Outcome.ACCEPTED:
        if finding.why and verdict.reason is not None:
            _refused(state.sites[event.site].lines[event.fragment], event.digest, verdict.reason)
        return
    membership.back(turn, event.site)
    site, fragment = state.sites[event.site], state.fragments[event.fragment]
    site.step_ns = smoothed(site.step_ns, event.step_ns)
    line, vital = site.lines[event.fragment], vital_of(state, turn.options, event)
    arrived(state, event)
    line.watermark, line.cursor, line.final = event.sequence, max(line.cursor, event.cursor), event.final
    line.outliers = []  # Whatever comes under this number again is a duplicate or a conflict.
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
    is_held = bool(finding.why) and state.health.policy_of(event.site) == "hold"
    pending.held = held_from(state, event, finding) if is_held else None
    turn.attendance.line_changed(event.site, event.fragment)
    if is_held:
        turn.note("update_held", _words(event, finding), site=event.site, fragment=event.fragment)
        return
    if finding.why:
        turn.note("outlier_admitted", _words(event, finding), site=event.site, fragment=event.fragment)
    if event.norm > 0:  # Somebody has measured it.
        remember(state, event.site, event.fragment, vital)
    if fragment.round is None:
        open_round(turn, event.fragment)


def _judged(turn: Turn, event: UpdateArrived) -> tuple[Verdict, Finding]:
    """By the header first: what may not enter is answered whatever it holds."""
    header = (event.site, event.incarnation, event.fragment, event.sequence, event.base_version, event.digest)
    verdict = admit(turn.state, turn.options, *header)
    if verdict.outcome is not Outcome.ACCEPTED:
        if verdict.reason is Reason.OUTLIER:
            why = f"sequence {event.sequence}: it was refused before"
            turn.note("outlier_again", why, site=event.site, fragment=event.fragment)
        return verdict, NOTHING_WRONG
    if not event.intact:
        return Verdict(Outcome.REFUSED, Reason.CORRUPT), NOTHING_WRONG
    if not event.finite:
        return Verdict(Outcome.REFUSED, Reason.NON_FINITE), NOTHING_WRONG
    state, reason = turn.state, Reason.IMPLAUSIBLE
    finding = Finding(None, None, implausible(state, turn.options, event))
    if not finding.why:
        finding, reason = looked_at(state, event, vital_of(state, turn.options, event)), Reason.OUTLIER
    if finding.why and state.health.policy_of(event.site) == "refuse":
        turn.note(f"{reason.value}_refused", _words(event, finding), site=event.site, fragment=event.fragment)
        return Verdict(Outcome.REFUSED, reason), finding
    return verdict, finding


def _refused(line: Line, digest: str, reason: Reason) -> None:
    line.outliers = [*line.outliers, digest][-OUTLIERS_REMEMBERED_MAX:]
    line.updates_refused[reason.value] = line.updates_refused.get(reason.value, 0) + 1


def _words(event: UpdateArrived, finding: Finding) -> str:
    return f"sequence {event.sequence}: {finding.why}"
