from __future__ import annotations

import random

from diloco.wire.channel import Backoff


def test_delays_grow_to_the_cap_and_start_anew_after_reset() -> None:
    backoff = Backoff(base_s=0.5, cap_s=4.0)
    assert [backoff.next_s(0.0) for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    backoff.reset()
    assert backoff.next_s(0.0) == 0.25


def test_jitter_spreads_over_the_upper_half() -> None:
    seed = 5
    chance = random.Random(seed)
    delays = [Backoff(base_s=1.0, cap_s=1.0).next_s(chance.random()) for _ in range(1000)]
    assert 0.5 <= min(delays) < 0.52, f"seed {seed}"
    assert 0.98 < max(delays) < 1.0, f"seed {seed}"


def test_pushback_is_respected_and_failures_never_overflow() -> None:
    backoff = Backoff(base_s=0.2, cap_s=5.0, failures=100_000)
    assert backoff.next_s(0.999) <= 5.0
    assert backoff.next_s(0.0, at_least_s=9.0) == 9.0


def test_what_the_other_end_asks_for_is_kept_and_spread() -> None:
    """It asks all whom it refuses for the same: without chance they would all come back at one instant."""
    delays = [Backoff(0.2, 3.0).next_s(chance / 10, at_least_s=4.0) for chance in range(10)]
    assert min(delays) == 4.0
    assert len(set(delays)) == 10
    assert max(delays) < 6.0
