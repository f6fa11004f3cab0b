"""What becomes of an accepted update: exactly one fate, merged or refused with a reason that its site is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import unit_leases
from diloco.sync.effects import TellFate
from diloco.sync.events import DISCARDING, Fate, Reason

if TYPE_CHECKING:
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
        unit_leases.consumed(turn, name, index, pending)
    else:
        line.updates_refused[reason.value] = line.updates_refused.get(reason.value, 0) + 1
        if reason in DISCARDING:
            line.tokens_discarded += pending.tokens
        else:
            line.final = False  # The site kept the progress and sends it once more.
    unit_leases.decided(turn, name)
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
