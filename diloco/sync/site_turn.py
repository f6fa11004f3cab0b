"""One handling of an event by a site's machine: its memory, its rules, and what the site must do so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sync.effects import Fetch, LearnerEffect, Note, StopTraining
from diloco.sync.options import LearnerOptions
from diloco.sync.progress import LearnerState

if TYPE_CHECKING:
    from diloco.sync.events import Ending
    from diloco.sync.progress import Sent


@dataclass(slots=True)
class SiteTurn:
    """What the rules of a site's machine read and write; the mirror of ``Turn``."""

    options: LearnerOptions
    state: LearnerState
    effects: list[LearnerEffect] = field(default_factory=list)

    def note(self, what: str, why: str, fragment: int | None = None) -> None:
        """Say a decision and its reason."""
        self.effects.append(Note(what, why, fragment=fragment))

    def find(self, index: int, sequence: int) -> Sent | None:
        """The update of the in-flight list with that number."""
        for sent in self.state.fragments[index].in_flight:
            if sent.sequence == sequence:
                return sent
        return None

    def want(self, index: int) -> None:
        """Fetch the newest version unless it is here or on its way."""
        part = self.state.fragments[index]
        have = max(part.fetched, part.base_version)
        if part.published > have and not part.fetching:
            part.fetching = True
            self.effects.append(Fetch(index, have))

    def end(self, ending: Ending | None, why: str) -> None:
        """Stop training in good order: what is unsent still goes out."""
        self.state.ending = self.state.ending or ending
        if not self.state.stopping:
            self.state.stopping = True
            self.effects.append(StopTraining(ending, why))

    def stop(self, why: str) -> None:
        """Give up: this process must not, or cannot, go on."""
        self.state.stopping = self.state.left = True
        self.effects.append(StopTraining(None, why, failed=True))
