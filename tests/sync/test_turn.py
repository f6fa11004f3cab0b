"""One handling of an event."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync.options import OuterOptions
from diloco.sync.state import Attendance, FragmentState, OuterState, Turn


def test_notes_stand_among_the_effects_in_order() -> None:
    state = OuterState([FragmentState()])
    turn = Turn(OuterOptions(), state, Attendance(state))
    turn.effects.append(fx.AnswerDone(1))
    turn.note("grace", "for more", fragment=0)
    assert turn.effects == [fx.AnswerDone(1), fx.Note("grace", "for more", fragment=0)]
