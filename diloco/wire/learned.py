"""The rate that bulk keeps to, one way: what the operator told of the link, or what was learned of it.

Only a far link is learned: on a near one a queue is short, and what bounds a transfer are the machines.

What was learned may be too little: the link has become faster, or it was never the link that held the bytes back but a
machine that had no time to send them.  So one transfer in ``LOOK_AGAIN`` goes unheld, and where it arrives much faster
everything begins anew.
"""

from __future__ import annotations

import threading
import time

from diloco.sync.links import later_rate
from diloco.sync.pace import SPAN_MIN_NS, Pace
from diloco.wire.messages import MIB
from diloco.wire.pacing import bulk_bytes_per_s

FAR_S = 0.01
BYTES_MIN = 2 * MIB
"""Of a transfer by which a link is judged."""
LOOK_AGAIN = 20
"""Transfers that were held; the next one goes unheld, and so do those after it until one is long enough to judge by."""
FASTER_PERCENT = 110
"""Of the rate that was learned: whoever arrives faster unheld shows that it was too little."""


class Arrival:
    """When how many bytes of one transfer had arrived.  For any thread."""

    def __init__(self, sent_at: int) -> None:
        """It goes at ``sent_at`` bytes a second; 0: as fast as it can."""
        self.sent_at = sent_at
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int]] = []

    def held(self, count: int) -> None:
        """So many bytes are at the other end by now."""
        with self._lock:
            self._seen.append((time.monotonic_ns(), max(count, self._seen[-1][1] if self._seen else 0)))

    def more(self, count: int) -> None:
        """So many bytes more have come."""
        with self._lock:
            self._seen.append((time.monotonic_ns(), count + (self._seen[-1][1] if self._seen else 0)))

    def rate(self) -> int:
        """Bytes a second, once it is under way; 0 where it was too short to tell."""
        with self._lock:
            seen = list(self._seen)
        if not seen or seen[-1][0] - seen[0][0] < SPAN_MIN_NS or seen[-1][1] - seen[0][1] < BYTES_MIN:
            return 0
        return int(later_rate(seen))


class Learned:
    """One way of a link; for any thread."""

    def __init__(self, mbps: float) -> None:
        """``mbps`` is what was told of it; 0: nothing."""
        self._told = mbps > 0
        self._lock = threading.Lock()
        self._pace, self._held = Pace(), 0
        self.bytes_per_s = bulk_bytes_per_s(mbps)

    def begin(self, rtt_s: float) -> Arrival | None:
        """A transfer begins over ``rtt_s`` (0: not known), at ``bytes_per_s`` from now on; None where nothing is to be
        learned from it."""
        if self._told or rtt_s <= 0:
            return None
        if rtt_s < FAR_S:
            self.forget()
            return None
        with self._lock:
            self._held += self.bytes_per_s > 0
            if self._held > LOOK_AGAIN:
                self.bytes_per_s = 0
            return Arrival(self.bytes_per_s)

    def over(self, arrival: Arrival | None) -> None:
        """It came to its end."""
        if arrival is None or not (rate := arrival.rate()):
            return
        with self._lock:
            if arrival.sent_at or not self._pace.bytes_per_s:
                self._pace.carried(rate, arrival.sent_at)
            else:
                self._held = 0
                if 100 * rate > FASTER_PERCENT * self._pace.bytes_per_s:
                    self._pace = Pace()
                    self._pace.carried(rate, 0)
            if self._held <= LOOK_AGAIN:
                self.bytes_per_s = self._pace.bytes_per_s

    def forget(self) -> None:
        """It is another link."""
        if not self._told:
            with self._lock:
                self._pace, self._held, self.bytes_per_s = Pace(), 0, 0
