"""How long to wait before trying again: capped exponential growth with full-range jitter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Delays between ``base_s / 2`` and ``cap_s``; pure arithmetic, the caller brings the chance.

    The n-th delay is drawn evenly from the upper half of ``min(cap_s, base_s · 2ⁿ)``, so that many sites that lost the
    syncer at one instant do not come back at one instant.
    """

    base_s: float = 0.2
    cap_s: float = 5.0
    failures: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.base_s <= self.cap_s:
            raise ValueError(f"base_s is {self.base_s!r}: positive and not above cap_s={self.cap_s!r}")

    def next_s(self, chance: float, at_least_s: float = 0.0) -> float:
        """The next delay in seconds; ``chance`` is in [0, 1), ``at_least_s`` what the other end asked for.

        The other end asks all whom it refuses for the same, so that what it asked for is spread by half of it as well.
        """
        span_s = min(self.cap_s, self.base_s * 2.0 ** min(self.failures, 60))
        self.failures += 1
        return max(at_least_s * (1.0 + 0.5 * chance), span_s * (0.5 + 0.5 * chance))

    def reset(self) -> None:
        """Something worked: begin anew."""
        self.failures = 0
