"""Whether the disk has room: who wants to bring something is told before its first byte, and everybody when it heals.

Two things count as full: less than the reserve is free, and a journal that found no room.  The reserve is for what
must still be written when nothing new is taken in: the journal, the mark, a snapshot's small files.

A folder that is gone, or has another in its place, never heals: what this process still writes to files that it holds
open is kept nowhere.  So the process ends, and the run is restored.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from diloco.durable import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_EVERY_S = 1.0


class FolderLostError(OSError):
    """The folder is not there any more, or it is another."""


class Room:
    """The disk that ``folder`` is on.  Any thread may ask; ``on_change`` hears in words that it is full, and None.

    The caller holds the folder's lock, and so the file that says that it is still the same.
    """

    def __init__(self, folder: Path, reserve_bytes: int, on_change: Callable[[str | None], None]) -> None:
        self._folder = folder
        self._lock_file = os.stat(folder / LOCK)
        self._reserve_bytes = reserve_bytes
        self._on_change = on_change
        self._lock = threading.Lock()
        self._held: str | None = None
        self._told: str | None = None

    def wanting(self, more_bytes: int = 0) -> str | None:
        """Why nothing that needs ``more_bytes`` can be taken in now; None when it can."""
        return self.lost() or self._held or self._low(more_bytes)

    def held(self, why: str | None) -> None:
        """The decision loop waits for something that is wanting, or goes on."""
        self._held = why
        self.look()

    def look(self) -> None:
        """Tell of a change, each once."""
        with self._lock:
            why = self._held or self._low(0)
            if (why is None) != (self._told is None):
                self._told = why
                self._on_change(why)

    def run(self, stopping: threading.Event, on_loss: Callable[[FolderLostError], None]) -> None:
        """The thread that looks; it ends when it has told ``on_loss`` that the folder is lost."""
        while not stopping.wait(LOOK_EVERY_S):
            if (why := self.lost()) is not None:
                on_loss(FolderLostError(why))
                return
            self.look()

    def lost(self) -> str | None:
        """Why nothing that is written is kept; None as long as the folder is the one whose lock was taken.

        No other file can have the lock's number while we hold that open.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(self._folder / LOCK), self._lock_file):
                return None
            return f"{self._folder} is another folder now than the one that this process serves from"
        return f"{self._folder} is gone, or was emptied, under this process"

    def _low(self, more_bytes: int) -> str | None:
        if not self._reserve_bytes:
            return None
        try:
            found = os.statvfs(self._folder)
        except FileNotFoundError:
            return None  # That is no matter of room.
        free = found.f_bavail * found.f_frsize
        if free - more_bytes >= self._reserve_bytes:
            return None
        needs = f"{_mb(more_bytes)} more and " if more_bytes else ""
        return f"disk full: {_mb(free)} MB are free, {needs}{_mb(self._reserve_bytes)} MB in reserve are wanted"


def _mb(size: int) -> str:
    return f"{size / 1e6:.4g}"
