"""What crosses the links of a simulated fleet: bytes, their time, and when versions arrive."""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from diloco.sync.options import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.fleet_plan import FleetPlan


def to_ns(seconds: float) -> int:
    """Return ``seconds`` in whole nanoseconds."""
    return round(seconds * SECOND_NS)


ANY = 1 << 62
"""Larger than every version."""


def carry_ns(size: int, mbps: float) -> int:
    """Return the time that ``size`` bytes occupy a link, in ns; 0 ``mbps`` is an unlimited link."""
    return round(size * 8e3 / mbps) if mbps else 0


def fetch_bytes(plan: FleetPlan, fragment: int, have: int, version: int) -> int:
    """Return the bytes of ``version`` for a site that has version ``have``: the differences, or the whole if less."""
    whole = 0 if have < 0 and plan.is_joined else plan.whole_bytes[fragment]
    return whole if have < 0 else min((version - have) * plan.version_bytes[fragment], whole)


class Arrivals:
    """When versions arrive at a site that requests each once it is announced, one request at a time per fragment."""

    def __init__(self, plan: FleetPlan, published_ns: Sequence[Sequence[int]], half_ns: int, mbps: float) -> None:
        """``published_ns`` has by fragment the instants of its versions, and may grow; ``half_ns`` is half an rtt."""
        self._plan, self._published_ns, self._half_ns, self._mbps = plan, published_ns, half_ns, mbps
        fragments = range(len(published_ns))
        self._have = [0 for _ in fragments]
        self._free_ns = 0
        self._asks: list[tuple[int, int]] = []
        self._here: list[list[tuple[int, int]]] = [[(0, 0)] for _ in fragments]

    def published(self, fragment: int) -> None:
        """Note a new version, and request it unless an earlier one is under way."""
        if self._have[fragment] + 2 == len(self._published_ns[fragment]):
            self._ask(fragment)

    def newest(self, fragment: int, now_ns: int) -> tuple[int, int]:
        """Return when the newest version arrived, and its number; ``now_ns`` must not fall between calls."""
        while self._asks and self._asks[0][0] + self._half_ns <= now_ns:
            asked_ns, asked = heappop(self._asks)
            there_ns, have = asked_ns + self._half_ns, self._have[asked]
            version = bisect_right(self._published_ns[asked], there_ns) - 1
            size = fetch_bytes(self._plan, asked, have, version)
            self._free_ns = max(self._free_ns, there_ns) + carry_ns(size, self._mbps)
            self._have[asked] = version
            self._here[asked].append((self._free_ns + self._half_ns, version))
            if version + 1 < len(self._published_ns[asked]):
                self._ask(asked)
        here = self._here[fragment]
        return here[bisect_right(here, (now_ns, ANY)) - 1]

    def _ask(self, fragment: int) -> None:
        heard_ns = self._published_ns[fragment][self._have[fragment] + 1] + self._half_ns
        heappush(self._asks, (max(heard_ns, self._here[fragment][-1][0]), fragment))
