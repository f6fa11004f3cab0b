"""One handling of an event by the outer machine: its memory, its rules, and what the world must do so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.sync.attendance import Attendance
from diloco.sync.effects import Note, OuterEffect
from diloco.sync.options import OuterOptions
from diloco.sync.state import OuterState


@dataclass(slots=True)
class Turn:
    """What the rules of the outer machine read and write; ``effects`` go out in the order in which they are added."""

    options: OuterOptions
    state: OuterState
    attendance: Attendance
    effects: list[OuterEffect] = field(default_factory=list)

    def note(
        self, what: str, why: str, *, site: str | None = None, fragment: int | None = None, version: int | None = None
    ) -> None:
        """Say a decision and its reason."""
        self.effects.append(Note(what, why, site, fragment, version))
