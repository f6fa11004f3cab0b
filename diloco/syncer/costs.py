"""What a round costs this process, stage by stage: for its events, its status and its metrics."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.effects import StartOuterStep, TakeVersion
    from diloco.syncer.executor import OuterResult

UPDATES_MAX = 4096
"""Updates of which it is remembered what they took, until they are merged; the oldest are forgotten first."""


class RoundCosts:
    """Seconds of each stage of the latest round of every fragment.  Any thread may call.

    ``receive_s`` is what this process was busy with the round's updates while they came: writing, decoding, measuring,
    the fsync; not the time that the network took.  ``read_s``, ``fused_s`` and ``digest_s`` are those of
    ``executor.Costs``.  ``publish_s`` is from there until sites are told: the journal, its fsync, a standby.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._received: dict[str, float] = {}
        self._latest: dict[int, dict[str, float]] = {}
        self._made_s: dict[int, float] = {}

    def received(self, reference: str, seconds: float) -> None:
        """The update with this payload was taken in."""
        with self._lock:
            self._received[reference] = self._received.pop(reference, 0.0) + seconds
            while len(self._received) > UPDATES_MAX:
                del self._received[next(iter(self._received))]

    def stepped(self, command: StartOuterStep | TakeVersion, result: OuterResult) -> dict[str, float]:
        """A version was made; its stages so far, of updates that an earlier process took in without that."""
        with self._lock:
            updates = [update.payload for part in command.contributions for update in part.updates]
            receive_s = sum(self._received.pop(payload, 0.0) for payload in updates)
            stages = {"receive_s": receive_s, **asdict(result.costs)}
            self._latest[command.fragment] = {name: round(seconds, 6) for name, seconds in stages.items()}
            self._made_s[command.fragment] = self._clock_s()
            return dict(self._latest[command.fragment])

    def published(self, fragment: int) -> dict[str, float]:
        """The version that was made last was told to everybody; the stage that this was."""
        with self._lock:
            stage = {"publish_s": round(self._clock_s() - self._made_s[fragment], 6)}
            self._latest[fragment] |= stage
            return stage

    def latest(self, fragment: int) -> dict[str, float] | None:
        """All stages of the latest round; None before the first of this process."""
        with self._lock:
            found = self._latest.get(fragment)
            return dict(found) if found is not None else None
