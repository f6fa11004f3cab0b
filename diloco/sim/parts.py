"""A site of a run that has several syncers: a process for each of them, and one training loop that steps them all.

The processes are whole ones, with their own disk, link and machine, for the fragments that their syncer holds; they
live and die together.  What is one for the site is its step and its data cursor: a step begins when no part is in the
middle of one, and each part that still trains is told of it at the same instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.site_process import SiteProcess
from diloco.sync.effects import LearnerEffect, StopTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from diloco.sim.network import Heap


class PartProcess(SiteProcess):
    """A site's process towards one of the syncers; ``trainer`` is that of the site."""

    trainer: Trainer

    def kill(self) -> None:
        """End as by SIGKILL."""
        super().kill()
        self.trainer.look()

    def take_step(self, step_ns: int) -> None:
        """A step that all parts made."""
        self._step(step_ns)

    def rest(self) -> None:
        """There will be no step any more."""
        self._next_step()

    def _begin_step(self) -> None:
        self.trainer.ready(self)

    def _carry_out(self, effect: LearnerEffect) -> None:
        super()._carry_out(effect)
        if isinstance(effect, StopTraining):
            self.trainer.look()


class Trainer:
    """The training loop of one life of a site."""

    def __init__(self, heap: Heap, random: Random, stepped: Callable[[Sequence[PartProcess]], None]) -> None:
        """``stepped`` is shown who has just made a step."""
        self._heap, self._random, self._stepped = heap, random, stepped
        self.parts: list[PartProcess] = []
        self._waiting: list[PartProcess] = []

    def ready(self, part: PartProcess) -> None:
        """``part`` stands between two steps and would go on."""
        self._waiting.append(part)
        self.look()

    def look(self) -> None:
        """Begin the next step if every part that will ever make one is ready for it."""
        stopped = [part for part in self._waiting if part.alive and part.stopping]
        self._waiting = [part for part in self._waiting if self.goes_on(part)]
        for part in stopped:
            part.deliver(part.rest)
        if not self._waiting or not self.complete(self._waiting):
            return
        takers, self._waiting = self._waiting, []
        cursor, plan = max(part.cursor for part in takers), takers[0].plan
        step_ns = int(plan.step_ns * (1 + plan.step_jitter * self._random.random()))
        for part in takers:
            part.cursor = cursor
            part.checkers.step_begun(part, step_ns)
        self._heap.after(step_ns, lambda: self._step(takers, step_ns))

    def goes_on(self, part: PartProcess) -> bool:
        """Whether ``part`` trains, or will."""
        return part.alive and not part.stopping

    def complete(self, ready: Sequence[PartProcess]) -> bool:
        """Whether nobody else is to be waited for: one who cannot reach its syncer trains on like the others."""
        return all(part in ready for part in self.parts if self.goes_on(part))

    def _step(self, takers: Sequence[PartProcess], step_ns: int) -> None:
        for part in takers:
            part.deliver(lambda part=part: part.take_step(step_ns))  # type: ignore[misc]
        self._stepped(takers)
