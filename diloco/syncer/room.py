"""Whether the disk has room: who wants to bring something is told before its first byte, and everybody when it heals.

Two things count as full: less than the reserve is free, and a journal that found no room.  The reserve is for what
must still be written when nothing new is taken in: the journal, the mark, a snapshot's small files.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_EVERY_S = 1.0


class Room:
    """The disk that ``folder`` is on.  Any thread may ask; ``on_change`` hears in words that it is full, and None."""

    def __init__(self, folder: Path, reserve_bytes: int, on_change: Callable[[str | None], None]) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._on_change = on_change
        self._lock = threading.Lock()
        self._held: str | None = None
        self._told: str | None = None

    def wanting(self, more_bytes: int = 0) -> str | None:
        """Why nothing that needs ``more_bytes`` can be taken in now; None when it can."""
        return self._held or self._low(more_bytes)

    def held(self, why: str | None) -> None:
        """The decision loop waits for something that is wanting, or goes on."""
        self._held = why
        self.look()

    def look(self) -> None:
        """Tell of a change, each once."""
        with self._lock:
            why = self.wanting()
            if (why is None) != (self._told is None):
                self._told = why
                self._on_change(why)

    def run(self, stopping: threading.Event) -> None:
        """The thread that looks."""
        while not stopping.wait(LOOK_EVERY_S):
            self.look()

    def _low(self, more_bytes: int) -> str | None:
        if not self._reserve_bytes:
            return None
        found = os.statvfs(self._folder)
        free = found.f_bavail * found.f_frsize
        if free - more_bytes >= self._reserve_bytes:
            return None
        needs = f"{_mb(more_bytes)} more and " if more_bytes else ""
        return f"disk full: {_mb(free)} MB are free, {needs}{_mb(self._reserve_bytes)} MB in reserve are wanted"


def _mb(size: int) -> str:
    return f"{size / 1e6:.4g}"
