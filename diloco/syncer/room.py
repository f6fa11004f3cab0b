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
from diloco.syncer.readiness import Unready, Want

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_EVERY_S = 1.0


class FolderLostError(OSError):
    """The folder is not there any more, or it is another."""


class Room:
    """The disk that ``folder`` is on.  Any thread may ask; ``on_change`` hears what is wanting, and None.

    The caller holds the folder's lock, and so the file that says that it is still the same.
    """

    def __init__(self, folder: Path, reserve_bytes: int, on_change: Callable[[Want | None], None]) -> None:
        self._folder = folder
        self._lock_file = os.stat(folder / LOCK)
        self._reserve_bytes = reserve_bytes
        self._on_change = on_change
        self._lock = threading.Lock()
        self._held: Want | None = None
        self._told: Unready | None = None

    def wanting(self, more_bytes: int = 0) -> str | None:
        """Why nothing that needs ``more_bytes`` can be taken in now; None when it can."""
        held = self._held
        return self.lost() or (held.text if held is not None else self._low(more_bytes))

    def held(self, want: Want | None) -> None:
        """The decision loop waits for something that is wanting, or goes on."""
        self._held = want
        self.look()

    def look(self) -> None:
        """Tell of a change, each once: of room that is wanting, or of something of another kind."""
        with self._lock:
            want, low = self._held, self._low(0)
            if want is None and low is not None:
                want = Want(Unready.DISK_FULL, low)
            kind = want.kind if want is not None else None
            if kind is not self._told:
                self._told = kind
                self._on_change(want)

    def run(self, stopping: threading.Event, on_failure: Callable[[Exception], None]) -> None:
        """The thread that looks; it ends when it has told ``on_failure`` that the folder is lost, or cannot be read."""
        try:
            while not stopping.wait(LOOK_EVERY_S):
                if (why := self.lost()) is not None:
                    raise FolderLostError(why)
                self.look()
        except Exception as error:  # Also of who hears of a change: nobody looks any more, and so somebody must know.
            on_failure(error)

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
