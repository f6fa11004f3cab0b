"""Whether an update may enter: the one rule, asked before its first payload byte and again when it is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sync.events import Fate, Outcome, Reason
from diloco.sync.state import OuterState, Phase, Status

if TYPE_CHECKING:
    from diloco.sync.options import OuterOptions


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
