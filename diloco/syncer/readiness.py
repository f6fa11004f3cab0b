"""Whether the syncer takes updates in at present, and why not: what a probe of the health service is told.

Readiness is not liveness: a syncer that drains or waits for room on its disk is well and must not be killed for it, so
the server itself (the empty name) answers SERVING all the while, and the run and the service do not.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
