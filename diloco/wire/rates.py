"""How much of something one caller may have each second.  Pure arithmetic but for one lock: time is an argument."""

from __future__ import annotations

import threading
from collections import OrderedDict


class Rates:
    """One bucket of credit for each caller: filled at its rate up to ``burst_s`` seconds' worth, spent at will.

    What is larger than the bucket passes when that is full, and its debt is paid off before anything else passes.  At
    most ``callers_max`` are remembered, the longest unused is forgotten.
    """

    def __init__(self, burst_s: float, least: float, callers_max: int = 4096) -> None:
        """``least``: a full bucket holds so much however low the rate."""
        self._burst_s = burst_s
        self._least = least
        self._callers_max = callers_max
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, caller: str, amount: float, per_s: float, now_s: float) -> float:
        """Take ``amount`` if there is credit for it; 0.0 when it was taken, else the seconds until there is."""
        with self._lock:
            credit = self._credit(caller, per_s, now_s)
            wanted = min(amount, self._full(per_s)) - 1e-9
            self._keep(caller, credit - amount if credit >= wanted else credit, now_s)
        return max(0.0, (wanted - credit) / per_s)

    def reserve(self, caller: str, amount: float, per_s: float, now_s: float, wait_max_s: float) -> float | None:
        """Take ``amount`` now for later: the seconds to wait until it is due, or None (and nothing taken) when that is
        more than ``wait_max_s``."""
        with self._lock:
            credit = self._credit(caller, per_s, now_s)
            wait_s = max(0.0, (min(amount, self._full(per_s)) - 1e-9 - credit) / per_s)
            if wait_s <= wait_max_s:
                self._keep(caller, credit - amount, now_s)
                return wait_s
        return None

    def charge(self, caller: str, amount: float, per_s: float, now_s: float) -> None:
        """Take ``amount`` whatever is there."""
        with self._lock:
            self._keep(caller, self._credit(caller, per_s, now_s) - amount, now_s)

    def _credit(self, caller: str, per_s: float, now_s: float) -> float:
        full = self._full(per_s)
        credit, at_s = self._buckets.get(caller, (full, now_s))
        return min(full, credit + max(0.0, now_s - at_s) * per_s)

    def _full(self, per_s: float) -> float:
        return max(self._least, per_s * self._burst_s)

    def _keep(self, caller: str, credit: float, now_s: float) -> None:
        # Threads bring their instants in any order, and no second is paid for twice.
        _, before_s = self._buckets.get(caller, (0.0, now_s))
        self._buckets[caller] = (credit, max(before_s, now_s))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._callers_max:
            self._buckets.popitem(last=False)
