"""How fast bulk may go, so that a link is left to others as well: what a site sets for itself.

Of a link's rate as its operator gives it bulk gets all but ``CONTROL_SHARE``, which is what heartbeats and events find
free however long a transfer takes.  A rate that was learned (``learned``) leaves them less, and in transfers that try
for more nothing.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from diloco.wire.messages import CHUNK_BYTES_MIN
from diloco.wire.rates import Rates

if TYPE_CHECKING:
    from diloco.wire.stall import Guard

CONTROL_SHARE = 0.05
"""Of a link, kept free of bulk."""
BURST_S = 0.05
"""So much of the rate may go at once: what is longer would stand in the link's queue before a heartbeat."""
WAIT_MAX_S = 3600.0
_LOOK_S = 0.5


def bulk_bytes_per_s(mbps: float) -> int:
    """What bulk may take of a link of ``mbps``; 0 where the link has no bound."""
    return int(mbps * 1e6 / 8 * (1.0 - CONTROL_SHARE))


class Pacer:
    """One bucket for everything that goes one way; used by many threads.  0 bytes a second: nothing is held back."""

    def __init__(self, bytes_per_s: int) -> None:
        self._per_s = bytes_per_s
        self._rates = Rates(burst_s=BURST_S, least=1.0, callers_max=1)
        self._ended = threading.Event()

    def keep_to(self, bytes_per_s: int) -> None:
        """From now on."""
        self._per_s = bytes_per_s

    def chunk_bytes(self, bytes_max: int) -> int:
        """The longest chunk that goes at this rate without more of a burst than ``BURST_S`` allows."""
        return max(CHUNK_BYTES_MIN, min(bytes_max, int(self._per_s * BURST_S))) if self._per_s else bytes_max

    def wait(self, count: int, guard: Guard) -> None:
        """Until ``count`` bytes may go; ``guard`` is told that whoever waits here is not stuck."""
        if not (per_s := self._per_s):
            return
        wait_s = self._rates.reserve("", count, per_s, time.monotonic(), WAIT_MAX_S)
        left_s = WAIT_MAX_S if wait_s is None else wait_s
        while left_s > 0 and not self._ended.wait(min(left_s, _LOOK_S)):
            left_s -= _LOOK_S
            guard.touch()

    def close(self) -> None:
        """Whoever waits goes on."""
        self._ended.set()
