"""The units of the data at a site: its list, what it asks for, and what its updates have consumed.

The place of a unit in the list is the data cursor divided by the unit, so that a batch needs nothing else.  A site
never waits for the syncer: where its list ends it draws units over again that it has drawn already.  Its updates do
not name these, so that nobody takes them for others, and the next ask says how many there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from diloco.sync.data_units import (
    SKIPPED,
    Piece,
    Span,
    added,
    common,
    first_of,
    joined,
    leased_places,
    pieces_before,
    pieces_from,
    size,
    units_at,
)

if TYPE_CHECKING:
    from diloco.sync.events import StepDone, UnitsTold
    from diloco.sync.options import LearnerOptions
    from diloco.sync.progress import LearnerState, SiteTurn

REMEMBERED = 64
"""Places before the present one that a site keeps, to draw them over again."""
SPANS_MAX = 16
"""In one update; what an update would name beyond that counts as thrown away."""


@dataclass(frozen=True, slots=True)
class UnitAsk:
    """What ``UnitsAsked`` is made of."""

    known: int
    begin: int
    upto: int
    floor: int
    again: int


def ask_of(options: LearnerOptions, state: LearnerState) -> UnitAsk:
    """What the site asks for where it stands."""
    unit, units = options.unit_sequences, state.units
    place = state.cursor // unit
    known, begin = units.known, units.end
    if units.end <= place:  # What another process of the site was leased there is told; a unit begun is not leased.
        known, begin = place, -(-state.cursor // unit)
    upto = begin if state.stopping else place + options.units_ahead
    if not units.real():  # It cannot begin without one, wherever that is.
        upto = max(upto, begin + 1)
    return UnitAsk(known, begin, upto, floor_of(state), units.again)


def floor_of(state: LearnerState) -> int:
    """The first sequence whose progress can still be merged without being sent again, or is still to be sent."""
    starts = [state.cursor]
    for part in state.fragments:
        pending = [*part.unsent_spans, *(span for sent in part.undecided() for span in sent.spans)]
        starts += [start for start, _ in pending]
    return min(starts)


def wants_soon(options: LearnerOptions, state: LearnerState) -> bool:
    """Whether so little of the list is left that the next heartbeat should not be waited for."""
    if state.stopping:
        return False
    place = state.cursor // options.unit_sequences
    return state.units.end - place < options.units_ahead // 2


def told(turn: SiteTurn, event: UnitsTold) -> None:
    """The syncer told more of the list; what was told before, or was drawn over again meanwhile, stays as it is."""
    units = turn.state.units
    upto = event.first + sum(count for _, count in event.pieces)
    if upto <= units.end:
        units.known = max(units.known, min(upto, units.end))
        return
    if event.first > units.end or not units.pieces:
        units.first, units.pieces = event.first, []
    more = pieces_from(event.pieces, units.end - event.first)
    units.pieces, units.known = joined([*units.pieces, *more]), upto
    units.spare = first_of(units_at(units.first, units.pieces, [(units.first, upto)]) or units.spare, REMEMBERED)


def drawn(turn: SiteTurn, event: StepDone) -> None:
    """A step has read sequences: every fragment's next update carries their progress."""
    options, state = turn.options, turn.state
    if not options.unit_sequences:
        return
    unit = options.unit_sequences
    leased = leased_places(state.units.first, state.units.pieces)
    read = event.sequences or event.tokens // options.sequence_tokens
    named = common(
        [(event.cursor - read, event.cursor)],
        [(start * unit, stop * unit) for start, stop in leased],
    )
    for part in state.fragments:
        part.unsent_spans = added(part.unsent_spans, named)[-SPANS_MAX:]
    place = event.cursor // options.unit_sequences
    skip = place - REMEMBERED - state.units.first
    if skip > 0:
        state.units.pieces = pieces_from(state.units.pieces, skip)
        state.units.first += skip


def start_over(options: LearnerOptions, state: LearnerState) -> None:
    """The run was restored: who knows which units the syncer has leased in this past.

    The rest of a unit that is begun is nobody's: it is drawn over from another, and not named.
    """
    if not options.unit_sequences:
        return
    units, place = state.units, state.cursor // options.unit_sequences
    begun = [(SKIPPED, 1)] if state.cursor % options.unit_sequences and units.end > place >= units.first else []
    units.pieces = joined([*pieces_before(units.pieces, place - units.first), *begun])
    units.known = min(units.known, units.end)


def units_from(state: LearnerState, place: int, count: int) -> tuple[list[Piece], bool]:
    """``count`` units from ``place`` on, at least one and fewer where fewer are known, and whether they are repeats.

    Where none is known, one that the site has drawn before is drawn again.
    """
    units = state.units
    if place >= units.end:
        units.again += 1
        units.pieces = joined([*units.pieces, (SKIPPED, place + 1 - units.end)])
    here = pieces_before(pieces_from(units.pieces, place - units.first), count) if place >= units.first else []
    found = list(takewhile(lambda piece: piece[0] != SKIPPED, here))
    if found:
        return found, False
    real = units.real()
    assert real, "a site that was leased no unit does not train"
    return [(_at(real, place % size(real)), 1)], True


def _at(spans: list[Span], number: int) -> int:
    for start, stop in spans:
        if number < stop - start:
            return start + number
        number -= stop - start
    raise AssertionError("beyond the spans")
