"""The end of a run, or of this part of it: one last round per fragment, then the final versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.effects import AnnounceFinal, MarkFinal
from diloco.sync.events import Ending
from diloco.sync.state import OuterState, Phase

if TYPE_CHECKING:
    from diloco.sync.options import OuterOptions
    from diloco.sync.turn import Turn


def run_end_ns(options: OuterOptions, state: OuterState) -> int | None:
    """The instant at which the run's time is over, if it has one."""
    if not options.run_ns or state.started_ns is None:
        return None
    return state.started_ns + options.run_ns


def begin(turn: Turn, ending: Ending, why: str) -> None:
    """Announce the last round, once."""
    state = turn.state
    if state.phase is not Phase.RUNNING:
        return
    state.phase, state.ending = Phase.ENDING, ending
    state.final_deadline_ns = state.now_ns + turn.options.final_wait_ns
    turn.effects.append(AnnounceFinal(ending))
    turn.note("last_round", why)


def begin_when_due(turn: Turn) -> None:
    """Announce the last round when the run has reached its bound in tokens or in time."""
    options, state = turn.options, turn.state
    if state.phase is not Phase.RUNNING:
        return
    if options.token_budget and turn.attendance.run_tokens() >= options.token_budget:
        begin(turn, Ending.FINISHED, f"{state.run_tokens()} tokens are merged")
    end_ns = run_end_ns(options, state)
    if end_ns is not None and state.now_ns >= end_ns:
        begin(turn, Ending.FINISHED, f"{options.run_ns / 1e9:g} s have passed")


def finish_when_final(turn: Turn) -> None:
    """The run is over once every fragment has its final version."""
    state = turn.state
    if state.phase is Phase.ENDING and all(is_final(turn, index) for index in range(len(state.fragments))):
        state.phase = Phase.ENDED
        mark_final(turn)


def mark_final(turn: Turn) -> None:
    """Say which versions are the final ones."""
    assert turn.state.ending is not None
    turn.effects.append(MarkFinal(turn.state.ending, tuple(f.version for f in turn.state.fragments)))


def resume(state: OuterState) -> None:
    """Go on after an end: sites may come back and send again."""
    state.phase, state.ending, state.final_deadline_ns = Phase.RUNNING, None, None
    for site in state.sites.values():
        for line in site.lines:
            line.final = False


def all_final(turn: Turn, index: int) -> bool:
    """Whether nothing more can arrive for the fragment in the last round before it closes.

    A site whose window is full is no reason to wait: it sends its last update after the fates that a close brings.
    """
    state = turn.state
    if state.phase is not Phase.ENDING:
        return False
    assert state.final_deadline_ns is not None
    if state.now_ns >= state.final_deadline_ns:
        return True
    lines = [state.sites[name].lines[index] for name in state.awaited(index)]
    return all(line.final or len(line.undecided) >= turn.options.updates_in_flight_max for line in lines)


def is_final(turn: Turn, index: int) -> bool:
    """Whether the fragment has its final version."""
    state, fragment = turn.state, turn.state.fragments[index]
    if fragment.merging_since_ns is not None or state.arrived(index):
        return False
    held = any(site.lines[index].holding() for site in state.sites.values())
    return not held and all_final(turn, index)
