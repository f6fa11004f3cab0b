"""One handling of an event by the outer machine: its memory, its rules, and what the world must do so far.

``Attendance`` counts along what is asked at every event (which sites are live, have an update in a fragment, or wait
for a word), so that an event costs about the same however many sites there are.  All of it follows from the state: the
rules that change a site or a line say so to it, and nothing of it is remembered.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sync.effects import Note, OuterEffect
from diloco.sync.options import OuterOptions
from diloco.sync.state import OuterState, Status

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from diloco.sync.state import Pending


class Attendance:
    """The sites of an ``OuterState`` by where they stand; sets are asked and counted, and walked only when sorted."""

    def __init__(self, state: OuterState) -> None:
        fragments = range(len(state.fragments))
        self._state = state
        self.live = state.live()
        """In site order."""
        self._live = set(self.live)
        self.arrived: list[set[str]] = [set() for _ in fragments]
        """For each fragment the sites with an update that waits for its round."""
        self.undecided: list[set[str]] = [set() for _ in fragments]
        """For each fragment the sites with an update that has no fate."""
        self.holding: list[set[str]] = [set() for _ in fragments]
        """For each fragment the sites of which an update is held."""
        self.missed = [True for _ in fragments]
        """For each fragment whether a member of its round may be gone since that was looked at."""
        self.tokens_merged = sum(line.tokens_merged for site in state.sites.values() for line in site.lines)
        """Of all sites and fragments."""
        for name in state.sites:
            for index in fragments:
                self.line_changed(name, index)

    def site_changed(self, name: str) -> None:
        """The site is new, or its status is another."""
        live = self._state.sites[name].status is Status.LIVE
        if live and name not in self._live:
            self._live.add(name)
            insort(self.live, name)
        elif not live and name in self._live:
            self._live.remove(name)
            del self.live[bisect_left(self.live, name)]
            self.missed = [True for _ in self.missed]

    def line_changed(self, name: str, index: int) -> None:
        """One of the site's updates of the fragment came, is merged now, has its fate, or is held no more."""
        line = self._state.sites[name].lines[index]
        if not line.undecided:  # The usual one: its only update has its fate.
            self.missed[index] = self.missed[index] or name in self.arrived[index]
            self.undecided[index].discard(name)
            self.arrived[index].discard(name)
            self.holding[index].discard(name)
            return
        waiting, holding = bool(line.waiting()), line.holding()
        if holding or (not waiting and name in self.arrived[index]):
            self.missed[index] = True
        for names, is_in in (self.undecided, line.undecided), (self.arrived, waiting), (self.holding, holding):
            if is_in:
                names[index].add(name)
            else:
                names[index].discard(name)

    def awaited(self, index: int) -> AbstractSet[str]:
        """As ``OuterState.awaited``, in no order."""
        return self._live - self.holding[index] if self.holding[index] else self._live

    def run_tokens(self) -> int:
        """As ``OuterState.run_tokens``."""
        return self.tokens_merged // len(self._state.fragments)

    def waiting(self, index: int) -> list[tuple[str, Pending]]:
        """As ``OuterState.waiting``, each with its site."""
        sites = self._state.sites
        found = [(name, each) for name in self.arrived[index] for each in sites[name].lines[index].waiting()]
        return sorted(found, key=lambda pair: (pair[1].arrival, pair[0]))


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
