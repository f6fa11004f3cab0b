"""An update is here: it enters the fragment's round, or is answered at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import membership
from diloco.sync.admission import Verdict, admit
from diloco.sync.effects import AnswerPush
from diloco.sync.events import Outcome, Reason, UpdateArrived
from diloco.sync.quorum import smoothed
from diloco.sync.rounds import open_round
from diloco.sync.state import Pending

if TYPE_CHECKING:
    from diloco.sync.turn import Turn


def update_arrived(turn: Turn, event: UpdateArrived) -> None:
    """Judge an update that is whole and durable, and answer."""
    assert event.tokens > 0, event
    assert event.steps > 0, event
    state = turn.state
    verdict = _judged(turn, event)
    known = 0 <= event.fragment < len(state.fragments)
    version = state.fragments[event.fragment].version if known else 0
    turn.effects.append(AnswerPush(event.call, verdict.outcome, version, verdict.reason, verdict.fate))
    if verdict.outcome is not Outcome.ACCEPTED:
        return
    membership.back(turn, event.site)
    site = state.sites[event.site]
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
    if state.fragments[event.fragment].round is None:
        open_round(state, event.fragment)


def _judged(turn: Turn, event: UpdateArrived) -> Verdict:
    """By the header first: what may not enter is answered whatever it holds."""
    header = (event.site, event.incarnation, event.fragment, event.sequence, event.base_version, event.digest)
    verdict = admit(turn.state, turn.options, *header)
    if verdict.outcome is not Outcome.ACCEPTED:
        return verdict
    if not event.intact:
        return Verdict(Outcome.REFUSED, Reason.CORRUPT)
    if not event.finite:
        return Verdict(Outcome.REFUSED, Reason.NON_FINITE)
    return verdict
