"""What links bring to the sites of a fleet, worked out once for all sites that have the same link."""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.fleet_plan import FleetPlan


ANY = 1 << 62
"""Above every version."""


def carry_ns(size: int, mbps: float) -> int:
    """What so many bytes take of a link; 0 ``mbps`` is one without bound."""
    return round(size * 8e3 / mbps) if mbps else 0


def fetch_bytes(plan: FleetPlan, fragment: int, have: int, version: int) -> int:
    """What a version costs who has an earlier one: the differences, or all of it where that is less."""
    whole = 0 if have < 0 and plan.is_joined else plan.whole_bytes[fragment]
    return whole if have < 0 else min((version - have) * plan.version_bytes[fragment], whole)


class Arrivals:
    """When versions are there for who fetches each as soon as it is heard of, one at a time of a fragment."""

    def __init__(self, plan: FleetPlan, published_ns: Sequence[Sequence[int]], half_ns: int, mbps: float) -> None:
        """``published_ns`` are the instants of each fragment's versions, which may grow; ``half_ns`` is half an rtt."""
        self._plan, self._published_ns, self._half_ns, self._mbps = plan, published_ns, half_ns, mbps
        fragments = range(len(published_ns))
        self._have = [0 for _ in fragments]
        self._free_ns = 0
        self._asks: list[tuple[int, int]] = []
        self._here: list[list[tuple[int, int]]] = [[(0, 0)] for _ in fragments]

    def published(self, fragment: int) -> None:
        """There is a version; it is asked for unless an earlier one is on its way."""
        if self._have[fragment] + 2 == len(self._published_ns[fragment]):
            self._ask(fragment)

    def newest(self, fragment: int, now_ns: int) -> tuple[int, int]:
        """Since when the newest version is there, and which it is; ``now_ns`` never falls."""
        while self._asks and self._asks[0][0] + self._half_ns <= now_ns:
            self._carry(*heappop(self._asks))
        here = self._here[fragment]
        return here[bisect_right(here, (now_ns, ANY)) - 1]

    def _ask(self, fragment: int) -> None:
        heard_ns = self._published_ns[fragment][self._have[fragment] + 1] + self._half_ns
        heappush(self._asks, (max(heard_ns, self._here[fragment][-1][0]), fragment))

    def _carry(self, asked_ns: int, fragment: int) -> None:
        there_ns, have = asked_ns + self._half_ns, self._have[fragment]
        version = bisect_right(self._published_ns[fragment], there_ns) - 1
        size = fetch_bytes(self._plan, fragment, have, version)
        self._free_ns = max(self._free_ns, there_ns) + carry_ns(size, self._mbps)
        self._have[fragment] = version
        self._here[fragment].append((self._free_ns + self._half_ns, version))
        if version + 1 < len(self._published_ns[fragment]):
            self._ask(fragment)
