"""What becomes of an accepted update, and of the units of data that it has consumed.

An update has exactly one fate: merged, or refused with a reason that its site is told.

A unit is leased to a site that asks, counted when an update of it is merged, and leased again when its site is gone.

A site draws the units of its list in order, and its updates name the sequences that they have consumed in its own
count, so nothing has to be said of a unit but once, when it is leased.  A site says with each ask up to where nothing
of its own can still be merged: what it skipped, or what was thrown away of it, is given back or partly from then on.

A site that comes back takes up its list where it was.  What of it is still free is its own again; what another site has
by then is merged for the site whose update is merged first, and counts as repeated for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.data_units import (
    SKIPPED,
    Columns,
    Holder,
    Span,
    Units,
    added,
    columns,
    common,
    first_of,
    in_units,
    joined,
    pieces_from,
    size,
    units_at,
    without,
)
from diloco.sync.effects import AnswerUnits, TellFate
from diloco.sync.events import DISCARDING, Fate, Reason
from diloco.sync.state import OuterState, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.events import UnitsAsked
    from diloco.sync.options import OuterOptions
    from diloco.sync.state import Pending
    from diloco.sync.turn import Turn


def decide(turn: Turn, name: str, index: int, pending: Pending, version: int, reason: Reason | None) -> TellFate:
    """Give an accepted update its one fate."""
    line = turn.state.sites[name].lines[index]
    line.undecided.remove(pending)
    turn.attendance.line_changed(name, index)
    fate = Fate(index, pending.sequence, version, pending.tokens, pending.digest, reason)
    line.fates.append(fate)
    del line.fates[: -turn.options.fates_kept_max]
    if reason is None:
        line.tokens_merged += pending.tokens
        turn.attendance.tokens_merged += pending.tokens
        line.updates_merged += 1
        consumed(turn, name, index, pending)
    else:
        line.updates_refused[reason.value] = line.updates_refused.get(reason.value, 0) + 1
        if reason in DISCARDING:
            line.tokens_discarded += pending.tokens
        else:
            line.final = False  # The site kept the progress and sends it once more.
    decided(turn, name)
    return TellFate(name, fate)


def refuse(turn: Turn, name: str, index: int, pending: Pending, reason: Reason) -> None:
    """Refuse an accepted update, and say so."""
    version = turn.state.fragments[index].version
    turn.effects.append(decide(turn, name, index, pending, version, reason))
    turn.note("update_refused", f"{reason.value}: sequence {pending.sequence}", site=name, fragment=index)


def refuse_stale(turn: Turn, index: int) -> None:
    """Staleness is judged against the version that the next outer step begins from."""
    version = turn.state.fragments[index].version
    for name in sorted(turn.attendance.undecided[index]):
        for pending in turn.state.sites[name].lines[index].unmerged():
            if version - pending.base_version > turn.options.staleness_max:
                refuse(turn, name, index, pending, Reason.STALE)


HELD_MAX = 1 << 16
"""Places of a site's list that are not over."""
PIECES_TOLD_MAX = 512
"""In one answer; who wants more asks again."""


def asked(turn: Turn, event: UnitsAsked) -> None:
    """Lease what is asked for, and answer with the site's list from the first place on that it does not know."""
    state, unit = turn.state, turn.options.unit_sequences
    reason = refusal(state, event)
    if reason is not None:
        turn.effects.append(AnswerUnits(event.call, 0, (), reason))
        return
    units = state.units
    assert units is not None
    holder = _holder(state, event.site)
    before = units.reissued
    _give_up(turn, event.site, event.floor // unit)
    holder.again = max(holder.again, event.again)
    _skip(holder, event.begin)
    _lease(units, holder, min(event.upto, holder.first + HELD_MAX) - holder.end)
    turn.effects.append(_told(holder, event.call, event.known))
    if units.reissued > before:
        turn.note("units_reissued", f"{units.reissued - before} units that were given back", site=event.site)


def known_already(options: OuterOptions, state: OuterState, event: UnitsAsked) -> AnswerUnits | None:
    """The answer to an ask that changes nothing; None where it does, so that it is the machine's to decide."""
    reason = refusal(state, event)
    if reason is not None:
        return AnswerUnits(event.call, 0, (), reason)
    units, unit = state.units, options.unit_sequences
    assert units is not None
    holder = units.holders.get(event.site)
    if holder is None or holder.gone or max(event.begin, min(event.upto, holder.first + HELD_MAX)) > holder.end:
        return None
    if _floor(state, unit, event.site, event.floor // unit) > holder.first:
        return None
    return _told(holder, event.call, event.known)


def consumed(turn: Turn, name: str, index: int, pending: Pending) -> None:
    """An update is merged: what it has consumed is, for its fragment.  What it names beyond its list is nothing."""
    units = turn.state.units
    if units is None or not pending.spans:
        return
    holder, unit = _holder(turn.state, name), turn.options.unit_sequences
    given_up = [(0, holder.first * unit)]
    new = common(pending.spans, [(holder.first * unit, holder.end * unit)])
    _late(units, holder, in_units(common(pending.spans, given_up), unit), first=index == 0)
    holder.merged[index] = added(holder.merged[index], new)
    units.begun = without(added(units.begun, _units_of(holder, in_units(new, unit))), units.over)
    _count(turn, name)


def decided(turn: Turn, name: str) -> None:
    """An update of ``name`` has its fate: what it kept in hand of a site that is gone is not in hand any more."""
    units = turn.state.units
    holder = units.holders.get(name) if units is not None else None
    if units is not None and holder is not None and holder.gone:
        _release(turn.state, turn.options, _units_of(holder, holder.open()))


def gone(turn: Turn, name: str, why: str) -> None:
    """``name`` is gone: what it has in hand is given back, but for what its undecided updates have consumed."""
    units = turn.state.units
    holder = units.holders.get(name) if units is not None else None
    if units is None or holder is None or holder.gone:
        return
    before = size(units.free)
    holder.gone, holder.silent_ns = True, None
    _release(turn.state, turn.options, _units_of(holder, holder.open()))
    turn.note("units_given_back", f"{size(units.free) - before} units: {why}", site=name)


def silent(turn: Turn, name: str) -> None:
    """Nothing is heard of ``name``: its lease runs out some time from now."""
    holder = turn.state.units.holders.get(name) if turn.state.units is not None else None
    if holder is not None and not holder.gone:
        holder.silent_ns = turn.state.now_ns


def returned(turn: Turn, name: str) -> None:
    """``name`` is there again: what is free of its list is its own again."""
    units = turn.state.units
    holder = units.holders.get(name) if units is not None else None
    if units is not None and holder is not None:
        holder.gone, holder.silent_ns = False, None
        units.free = without(units.free, _units_of(holder, holder.open()))


def expire(turn: Turn) -> None:
    """The leases of sites that have been silent for too long are over."""
    if turn.state.units is None:
        return
    for name in sorted(turn.state.units.holders):
        since_ns = turn.state.units.holders[name].silent_ns
        if since_ns is not None and turn.state.now_ns >= since_ns + turn.options.lease_ns:
            gone(turn, name, f"silent for {turn.options.lease_ns / 1e9:g} s")


def deadline_ns(options: OuterOptions, state: OuterState) -> int | None:
    """The instant at which the next lease runs out."""
    if state.units is None:
        return None
    silent = (h.silent_ns for h in state.units.holders.values() if h.silent_ns is not None)
    return min((since_ns + options.lease_ns for since_ns in silent), default=None)


def columns_of(options: OuterOptions, state: OuterState) -> Columns:
    """Where the units are."""
    assert state.units is not None
    return columns(state.units, in_hand(options, state))


def in_hand(options: OuterOptions, state: OuterState) -> list[Span]:
    """The units that a site has which is there, or an update that has no fate yet."""
    assert state.units is not None
    found: list[Span] = []
    for name, holder in state.units.holders.items():
        places = holder.open()
        if holder.gone:
            places = common(places, in_units(_pending(state, name), options.unit_sequences))
        found += _units_of(holder, places)
    return without(found, state.units.over)


def refusal(state: OuterState, event: UnitsAsked) -> Reason | None:
    """Why nobody who asks like that is told anything; None for a site that is there."""
    site = state.sites.get(event.site)
    if state.units is None or site is None:
        return Reason.NOT_JOINED
    there = site.incarnation == event.incarnation and site.status not in (Status.LEFT, Status.EVICTED)
    return None if there else Reason.FENCED


# --- the parts of it ------------------------------------------------------------------------------------------------


def _told(holder: Holder, call: int, known: int) -> AnswerUnits:
    """The list from place ``known`` on, or from its first place that is not over."""
    first = max(known, holder.first)
    return AnswerUnits(call, first, tuple(pieces_from(holder.pieces, first - holder.first)[:PIECES_TOLD_MAX]))


def _holder(state: OuterState, name: str) -> Holder:
    assert state.units is not None
    found = state.units.holders.get(name)
    if found is None:
        found = state.units.holders[name] = Holder(merged=[[] for _ in state.fragments])
    return found


def _units_of(holder: Holder, places: Sequence[Span]) -> list[Span]:
    return units_at(holder.first, holder.pieces, places)


def _pending(state: OuterState, name: str) -> list[Span]:
    """What the undecided updates of ``name`` have consumed."""
    return [span for line in state.sites[name].lines for pending in line.undecided for span in pending.spans]


def _floor(state: OuterState, unit: int, name: str, floor: int) -> int:
    """The first place of ``name`` of which something can still be merged, where it says that it is ``floor``."""
    assert state.units is not None
    return min([floor, state.units.holders[name].end, *(start // unit for start, _ in _pending(state, name))])


def _give_up(turn: Turn, name: str, floor: int) -> None:
    """Nothing before place ``floor`` will be merged any more that is not yet."""
    units = turn.state.units
    assert units is not None
    holder, unit = units.holders[name], turn.options.unit_sequences
    floor = _floor(turn.state, unit, name, floor)
    if floor <= holder.first:
        return
    dropped = _units_of(holder, common(holder.open(), [(0, floor)]))
    holder.cut(floor, unit)
    _release(turn.state, turn.options, dropped)
    listed = [span for each in units.holders.values() for span in _units_of(each, each.open())]
    ended = without(common(dropped, units.begun), listed)
    units.over, units.begun = added(units.over, ended), without(units.begun, ended)
    units.partly += size(ended)


def _skip(holder: Holder, begin: int) -> None:
    """The site has drawn something else at the places before ``begin`` that nothing was leased for."""
    if begin > holder.end:
        holder.pieces = joined([*holder.pieces, (SKIPPED, begin - holder.end)])


def _late(units: Units, holder: Holder, places: Sequence[Span], *, first: bool) -> None:
    """A process that went on from before another one of its site has sent what that one had given up.

    It is begun now, and so never leased again.  What is not free is a repeat: somebody else has it, or has had it.
    """
    begins = holder.first - sum(count for _, count in holder.past)
    late = units_at(begins, holder.past, places)
    begun = common(late, units.free)
    units.free, units.over = without(units.free, begun), added(units.over, begun)
    units.partly += size(begun)
    units.begun = added(units.begun, without(late, units.over))
    units.repeated += size(late) - size(begun) if first else 0


def _lease(units: Units, holder: Holder, count: int) -> None:
    """``count`` units more for ``holder``: first those that were given back."""
    again = first_of(units.free, count)
    units.free = without(units.free, again)
    units.reissued += size(again)
    fresh = max(0, count - size(again))
    more = [(start, stop - start) for start, stop in again] + [(units.fresh, fresh)]
    units.fresh += fresh
    holder.pieces = joined([*holder.pieces, *more])


def _count(turn: Turn, name: str) -> None:
    """Count what is merged in every fragment by now, each unit once."""
    units = turn.state.units
    assert units is not None
    holder, unit = units.holders[name], turn.options.unit_sequences
    new = without(holder.whole(unit), holder.counted)
    if not new:
        return
    here = _units_of(holder, new)
    first_time = without(here, units.over)
    units.repeated += size(here) - size(first_time)
    units.over = added(units.over, first_time)
    units.begun = without(units.begun, first_time)
    units.free = without(units.free, first_time)
    holder.counted = added(holder.counted, new)
    if holder.counted[0][0] <= holder.first:
        holder.cut(holder.counted[0][1], unit)


def _release(state: OuterState, options: OuterOptions, dropped: Sequence[Span]) -> None:
    """Nobody has ``dropped`` any more, but for others who have: what is wholly unmerged is given back."""
    units = state.units
    assert units is not None
    again = without(without(without(dropped, units.over), units.begun), in_hand(options, state))
    units.free = added(units.free, again)
