"""The fate of an accepted update, the lease of its units of data, and the end of a run.

An update has exactly one fate: merged, or refused with a reason that the syncer tells its site.

The syncer leases a unit to a site that asks, counts it when an update with its data is merged, and leases it again when
its site is gone.

A site draws the units of its list in order, and its updates name the sequences that they consumed by the site's own
count, so a unit is sent only once, when it is leased.  With each request a site sends a floor: nothing of its data
before that can still be merged.  Units before the floor that it skipped or whose progress was thrown away become given
back (nothing of them merged) or partly merged.

A site that comes back continues its list.  Units of the list that are still free are its own again.  A unit that
another site has by then counts as merged for the site whose update is merged first, and as repeated for the other.

A run, or this part of it, ends with one last round per fragment and then the final versions.
"""

from __future__ import annotations

from diloco.sync.data_units import (
    SKIPPED,
    Columns,
    Holder,
    Span,
    UnitList,
    Units,
    added,
    common,
    first_of,
    in_units,
    joined,
    pieces_at,
    size,
    without,
)
from diloco.sync.effects import AnnounceFinal, AnswerUnits, MarkFinal, TellFate
from diloco.sync.events import DISCARDING, Ending, Fate, Reason, UnitsAsked
from diloco.sync.state import Machine, OuterState, Pending, Phase, Status, Turn


def decide(turn: Turn, name: str, index: int, pending: Pending, reason: Reason | None) -> TellFate:
    """Give an accepted update its one fate: merged in the present version where ``reason`` is None, else refused."""
    line = turn.state.sites[name].lines[index]
    line.undecided.remove(pending)
    turn.attendance.line_changed(name, index)
    version = turn.state.fragments[index].version
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
            line.final = False  # The site keeps the progress and sends it again.
    holder = holders_of(turn.state).get(name)
    if holder is not None and holder.gone:  # Of a gone site only the undecided updates keep units in hand.
        _release(turn, holder.units(holder.open()))
    return TellFate(name, fate)


def refuse(turn: Turn, name: str, index: int, pending: Pending, reason: Reason) -> None:
    """Refuse an accepted update, tell its site, and log it."""
    turn.effects.append(decide(turn, name, index, pending, reason))
    turn.note("update_refused", f"{reason.value}: sequence {pending.sequence}", site=name, fragment=index)


def refuse_stale(turn: Turn, index: int) -> None:
    """Refuse unmerged updates that are too stale for the next outer step, which begins from the present version."""
    version = turn.state.fragments[index].version
    for name, pending in turn.attendance.updates(index):
        if not pending.merging and version - pending.base_version > turn.options.staleness_max:
            refuse(turn, name, index, pending, Reason.STALE)


HELD_MAX = 1 << 16
"""Most places in a site's list that are not over."""
PIECES_TOLD_MAX = 512
"""Most pieces in one answer; a site that needs more asks again."""


def asked(turn: Turn, event: UnitsAsked) -> None:
    """Lease the units asked for, and answer with the site's list from the first place that the site does not know.

    The request has no ``refusal``.
    """
    state, unit = turn.state, turn.options.unit_sequences
    units, holder = _units(state), _holder(state, event.site)
    floor = _floor(state, unit, event.site, event.floor // unit)
    if floor > holder.first:  # Cut the list there: places before it that are not merged by now never will be.
        dropped = holder.units(common(holder.open(), [(0, floor)]))
        holder.cut(floor, unit)
        _release(turn, dropped)
        listed = [span for each in units.holders.values() for span in each.units(each.open())]
        ended = without(common(dropped, units.begun), listed)
        units.over, units.begun = added(units.over, ended), without(units.begun, ended)
        units.partly += size(ended)
    holder.again = max(holder.again, event.again)
    if event.begin > holder.end:  # The site drew old units again at these places; nothing was leased for them.
        holder.pieces = joined([*holder.pieces, (SKIPPED, event.begin - holder.end)])
    # Lease the units that are wanted: first those that were given back, then fresh ones.
    count = min(event.upto, holder.first + HELD_MAX) - holder.end
    again = first_of(units.free, count)
    units.free = without(units.free, again)
    units.reissued += size(again)
    fresh = max(0, count - size(again))
    holder.pieces = joined([*holder.pieces, *((start, stop - start) for start, stop in again), (units.fresh, fresh)])
    units.fresh += fresh
    turn.effects.append(_told(holder, event.call, event.known))
    if again:
        turn.note("units_reissued", f"{size(again)} units that were given back", site=event.site)


def known_already(machine: Machine, event: UnitsAsked) -> AnswerUnits | None:
    """Return the answer to a request that changes nothing; None where it changes something and must be an event."""
    state, unit = machine.state, machine.options.unit_sequences
    reason = refusal(state, event)
    if reason is not None:
        return AnswerUnits(event.call, 0, (), reason)
    holder = holders_of(state).get(event.site)
    if holder is None or holder.gone or max(event.begin, min(event.upto, holder.first + HELD_MAX)) > holder.end:
        return None
    if _floor(state, unit, event.site, event.floor // unit) > holder.first:
        return None
    return _told(holder, event.call, event.known)


def consumed(turn: Turn, name: str, index: int, pending: Pending) -> None:
    """Count the data of a merged update, and each unit that is merged in every fragment by now, once.

    Spans outside the site's list are ignored.
    """
    units = turn.state.units
    if units is None or not pending.spans:
        return
    holder, unit = _holder(turn.state, name), turn.options.unit_sequences
    new = common(pending.spans, [(holder.first * unit, holder.end * unit)])
    _late(units, holder, index, common(pending.spans, [(holder.begin * unit, holder.first * unit)]), unit)
    holder.merged[index] = added(holder.merged[index], new)
    units.begun = without(added(units.begun, holder.units(in_units(new, unit))), units.over)
    ended = common(without(holder.whole(unit), holder.counted), [(holder.first, holder.end)])
    if not ended:
        return
    here = holder.units(ended)
    first_time = without(here, units.over)
    units.repeated += size(here) - size(first_time)
    units.over = added(units.over, first_time)
    units.begun = without(units.begun, first_time)
    units.free = without(units.free, first_time)
    holder.counted = added(holder.counted, ended)
    if holder.counted[0][0] <= holder.first:
        holder.cut(holder.counted[0][1], unit)


def gone(turn: Turn, name: str, why: str) -> None:
    """Give back the units of ``name``, which is gone, except those that its undecided updates have consumed."""
    holder = holders_of(turn.state).get(name)
    if holder is None or holder.gone:
        return
    units = _units(turn.state)
    before = size(units.free)
    holder.gone, holder.silent_ns = True, None
    _release(turn, holder.units(holder.open()))
    turn.note("units_given_back", f"{size(units.free) - before} units: {why}", site=name)


def returned(turn: Turn, name: str) -> None:
    """Give ``name``, which is back, the units of its list that are still free."""
    holder = holders_of(turn.state).get(name)
    if holder is not None:
        units = _units(turn.state)
        holder.gone, holder.silent_ns = False, None
        units.free = without(units.free, holder.units(holder.open()))


def expire(turn: Turn) -> None:
    """End the unit leases of sites that have been silent for ``lease_ns``."""
    for name, since_ns in sorted(silent_since(turn.state).items()):
        if turn.state.now_ns >= since_ns + turn.options.lease_ns:
            gone(turn, name, f"silent for {turn.options.lease_ns / 1e9:g} s")


def silent_since(state: OuterState) -> dict[str, int]:
    """Return the instants at which the silent sites whose unit leases still run became silent."""
    if state.units is None:
        return {}
    return {name: each.silent_ns for name, each in state.units.holders.items() if each.silent_ns is not None}


def columns_of(machine: Machine) -> Columns:
    """Return the counts of the units by state."""
    units, held = _units(machine.state), in_hand(machine)
    return Columns(
        leased=units.fresh,
        merged=size(units.over) - units.partly,
        partly=units.partly + size(without(units.begun, held)),
        in_hand=size(held),
        given_back=size(units.free),
        reissued=units.reissued,
        repeated=units.repeated + sum(holder.again for holder in units.holders.values()),
    )


def in_hand(machine: Machine) -> list[Span]:
    """Return the units in the open places of present sites, and those in undecided updates of sites that are gone."""
    units, found = _units(machine.state), list[Span]()
    for name, holder in units.holders.items():
        places = holder.open()
        if holder.gone:
            places = common(places, in_units(_pending(machine.state, name), machine.options.unit_sequences))
        found += holder.units(places)
    return without(found, units.over)


def refusal(state: OuterState, event: UnitsAsked) -> Reason | None:
    """Return why the request is refused; None for a site that is in the run with this incarnation."""
    site = state.sites.get(event.site)
    if state.units is None or site is None:
        return Reason.NOT_JOINED
    there = site.incarnation == event.incarnation and site.status not in (Status.LEFT, Status.EVICTED)
    return None if there else Reason.FENCED


# --- helpers of the unit leases -------------------------------------------------------------------------------------


def _told(holder: Holder, call: int, known: int) -> AnswerUnits:
    """Return the answer with the list from place ``known`` on, or from its first place that is not over."""
    first = max(known, holder.first)
    return AnswerUnits(call, first, tuple(pieces_at(holder.pieces, first - holder.first)[:PIECES_TOLD_MAX]))


def _units(state: OuterState) -> Units:
    assert state.units is not None
    return state.units


def holders_of(state: OuterState) -> dict[str, Holder]:
    """Return the lists of all sites; empty where no unit is leased in this run."""
    return state.units.holders if state.units is not None else {}


def _holder(state: OuterState, name: str) -> Holder:
    return _units(state).holders.setdefault(name, Holder(merged=[[] for _ in state.fragments]))


def _pending(state: OuterState, name: str) -> list[Span]:
    """Return the spans that the undecided updates of ``name`` have consumed."""
    return [span for line in state.sites[name].lines for pending in line.undecided for span in pending.spans]


def _floor(state: OuterState, unit: int, name: str, floor: int) -> int:
    """Return the first place of ``name`` with data that can still be merged; the site itself claims ``floor``."""
    return min([floor, _units(state).holders[name].end, *(start // unit for start, _ in _pending(state, name))])


def _late(units: Units, holder: Holder, index: int, spans: list[Span], unit: int) -> None:
    """Count merged data of places that the site had already given up: another of its processes resumed before them.

    Free units among them are partly merged now, so they are never leased again.  Another site has or had the others:
    they are repeats once the site has merged them in every fragment, and whenever the first fragment is merged again.
    """
    past = UnitList(holder.begin, holder.past)
    late = past.units(in_units(spans, unit))
    begun = common(late, units.free)
    units.free, units.over = without(units.free, begun), added(units.over, begun)
    units.partly += size(begun)
    units.begun = added(units.begun, without(late, units.over))
    before, again = holder.whole(unit), common(spans, holder.merged[0]) if index == 0 else []
    holder.merged[index] = added(holder.merged[index], spans)
    places = added(without(holder.whole(unit), before), in_units(again, unit))
    units.repeated += size(without(past.units(places), begun))


def _release(turn: Turn, dropped: list[Span]) -> None:
    """Give back the units of ``dropped`` of which nothing is merged and which no other site or update has."""
    units = _units(turn.state)
    again = without(without(without(dropped, units.over), units.begun), in_hand(turn))
    units.free = added(units.free, again)


def begin_last_round(turn: Turn, ending: Ending, why: str) -> None:
    """Announce the last round, once."""
    state = turn.state
    if state.phase is not Phase.RUNNING:
        return
    state.phase, state.ending = Phase.ENDING, ending
    state.final_deadline_ns = state.now_ns + turn.options.final_wait_ns
    turn.effects.append(AnnounceFinal(ending))
    turn.note("last_round", why)


def begin_last_round_when_due(turn: Turn) -> None:
    """Announce the last round when the run has reached its bound in tokens or in time."""
    options, state, attendance = turn.options, turn.state, turn.attendance
    if options.token_budget and attendance.run_tokens() >= options.token_budget:
        begin_last_round(turn, Ending.FINISHED, f"{attendance.run_tokens()} tokens are merged")
    if options.run_ns and state.started_ns is not None and state.now_ns >= state.started_ns + options.run_ns:
        begin_last_round(turn, Ending.FINISHED, f"{options.run_ns / 1e9:g} s have passed")


def finish_when_final(turn: Turn) -> None:
    """End the run once every fragment has its final version."""
    state, attendance = turn.state, turn.attendance
    if state.phase is not Phase.ENDING:
        return
    for index, fragment in enumerate(state.fragments):
        is_open = fragment.merging_since_ns is not None or attendance.arrived[index] or attendance.holding[index]
        if is_open or not all_final(turn, index):
            return
    state.phase = Phase.ENDED
    mark_final(turn)


def mark_final(turn: Turn) -> None:
    """Emit ``MarkFinal`` with the final version of each fragment."""
    assert turn.state.ending is not None
    turn.effects.append(MarkFinal(turn.state.ending, tuple(f.version for f in turn.state.fragments)))


def resume(state: OuterState) -> None:
    """Resume the run after its end: sites may come back and send again."""
    state.phase, state.ending, state.final_deadline_ns = Phase.RUNNING, None, None
    for site in state.sites.values():
        for line in site.lines:
            line.final = False


def all_final(turn: Turn, index: int) -> bool:
    """Return whether nothing more can arrive for the fragment in the last round before it closes.

    A site with ``updates_in_flight_max`` undecided updates is not waited for: it sends its last update after the fates
    that closing the round brings.
    """
    state = turn.state
    if state.phase is not Phase.ENDING:
        return False
    assert state.final_deadline_ns is not None
    if state.now_ns >= state.final_deadline_ns:
        return True
    lines = [state.sites[name].lines[index] for name in turn.attendance.awaited(index)]
    return all(line.final or len(line.undecided) >= turn.options.updates_in_flight_max for line in lines)
