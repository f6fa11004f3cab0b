"""Looks after the files that say who may come in, while the syncer runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.door import Door
    from diloco.wire.watched import Watched

_LOOK_S = 0.5


class Keeper:
    """A thread: a change is in force for new calls, and for those under way, within a second.

    ``note`` is told of each change, of each file that cannot be used, and of everybody who was put out.
    """

    def __init__(
        self,
        watched: Sequence[Watched[Any]],
        door: Door,
        note: Callable[[str], None],
        stopping: threading.Event,
    ) -> None:
        self._watched = watched
        self._door = door
        self._note = note
        self._stopping = stopping
        self._thread = threading.Thread(target=self._run, name="identity-files", daemon=True)
        if watched:
            self._thread.start()

    def complaints(self) -> list[str]:
        """What is wrong with the files now."""
        return [each.complaint for each in self._watched if each.complaint]

    def close(self) -> None:
        """End the thread; ``stopping`` is set."""
        if self._watched:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            said = [text for each in self._watched if (text := each.refresh()) is not None]
            # Looked at each time, and not only after a change: a call may have come in on what was read before it.
            for text in [*said, *self._door.put_out()]:
                self._note(text)
