"""What a process of the simulator can suffer: it can be stopped for a while, and it can die."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Died(Exception):
    """The process ends in the middle of what it was doing; nothing after this instant of it happens."""


class Process:
    """Everything that happens to a process comes through ``deliver``."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self.alive = True
        self.frozen = False
        self._inside = False
        self._backlog: list[Callable[[], None]] = []
        self._on_death = on_death

    def deliver(self, action: Callable[[], None]) -> None:
        """Run ``action`` in this process: now, after the thaw when it is frozen, never when it is dead.

        One that is delivered by another is a part of it: where it dies, the rest of the other does not happen either.
        """
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(action)
            return
        if self._inside:
            action()
            return
        self._inside = True
        try:
            action()
        except Died:
            self.kill()
            self._on_death()
        finally:
            self._inside = False

    def freeze(self) -> None:
        """Stop as by SIGSTOP: nothing is lost, everything waits."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on, with what has waited first."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.deliver(action)

    def kill(self) -> None:
        """End as by SIGKILL."""
        self.alive = False
        self._backlog.clear()
