"""Whether the syncer takes updates at present, and why not: the health service's answer, and the room on the disk.

Readiness is not liveness.  A syncer that drains or waits for room on its disk is well and must not be killed for it, so
the server itself (the empty name) answers SERVING all the while, and the run and the service do not.

Room.  A sender is told before its first byte that the disk is full, and all are told when there is room again.  Two
things count as full: less than the reserve is free, and a journal that found no room.  The reserve is for what must
still be written when nothing new is taken in: the journal, the mark, a snapshot's small files.

A folder that is gone, or has another in its place, never heals: what this process still writes to files that it holds
open is kept nowhere.  So the process ends, and the run is restored.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from diloco.durable import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Unready(StrEnum):
    """Why no updates are taken in."""

    STARTING = "starting"
    DRAINING = "draining"
    DISK_FULL = "disk_full"
    STANDBY = "standby"
    STANDBY_AWAY = "standby_away"
    LEASE_LOST = "lease_lost"


@dataclass(frozen=True, slots=True)
class Want:
    """What has to be there before the syncer goes on: of which kind it is, and in words."""

    kind: Unready
    text: str


class Readiness:
    """The reasons that hold now, said by any thread.  It begins with ``STARTING``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons = {Unready.STARTING}
        self._tell: Callable[[bool], None] = lambda ready: None

    def told_to(self, tell: Callable[[bool], None]) -> None:
        """From now on call ``tell`` with every change, and with how it stands first."""
        with self._lock:
            self._tell = tell
            tell(not self._reasons)

    def begins(self, reason: Unready) -> None:
        """From now on ``reason`` holds."""
        with self._lock:
            self._reasons.add(reason)
            self._tell(False)

    def ends(self, reason: Unready) -> None:
        """``reason`` holds no more."""
        with self._lock:
            self._reasons.discard(reason)
            self._tell(not self._reasons)

    def reasons(self) -> list[str]:
        """Why not, in a fixed order; empty when updates are taken in."""
        with self._lock:
            return [reason.value for reason in Unready if reason in self._reasons]


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
