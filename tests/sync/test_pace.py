"""Links that carry what they are given up to their rate, and what a site learns of them."""

from __future__ import annotations

import pytest

from diloco.sync.link import LEFT_ALONE, RATE_MAX, TRANSFERS_KEPT, Pace

LINK = 24_000_000


def sent(pace: Pace, transfers: int, link: int = LINK, at_first: float = 0.7) -> list[int]:
    """The rates of transfers over ``link``, of which one that goes unheld gets only the share ``at_first``."""
    rates = []
    for _ in range(transfers):
        rates.append(pace.bytes_per_s)
        pace.carried(min(link, rates[-1]) if rates[-1] else int(at_first * link), rates[-1])
    return rates


@pytest.mark.parametrize("at_first", [0.3, 0.72, 0.9, 1.0])
def test_the_rate_of_a_link_is_found_and_kept_to(at_first: float) -> None:
    pace = Pace()
    sent(pace, 15, at_first=at_first)
    rates = sent(pace, 60)
    assert all(0.9 * LINK <= rate <= 1.12 * LINK for rate in rates)
    assert sum(rate <= LINK for rate in rates) >= 60 * (LEFT_ALONE - 1) / (LEFT_ALONE + 1), "more is tried seldom"
    assert any(rate > LINK for rate in rates), "and is tried"


def test_one_slow_transfer_says_nothing() -> None:
    pace = Pace()
    sent(pace, 20)
    before = pace.bytes_per_s
    pace.carried(LINK // 5, before)
    assert pace.bytes_per_s >= 0.9 * before


def test_a_link_that_has_slowed_down_is_followed_and_one_that_recovers_too() -> None:
    pace = Pace()
    sent(pace, 20)
    sent(pace, TRANSFERS_KEPT + 1, LINK // 3)
    assert pace.bytes_per_s <= 1.12 * LINK / 3
    sent(pace, 40)
    assert pace.bytes_per_s >= 0.9 * LINK


def test_what_is_faster_than_machines_care_for_is_not_held_back() -> None:
    pace = Pace()
    pace.carried(RATE_MAX + 1, 0)
    assert pace.bytes_per_s == 0


def test_the_same_transfers_give_the_same_rate() -> None:
    one, other = Pace(), Pace()
    for rate in (5, 7, 7, 3, 9, 9, 9, 0):
        one.carried(rate * 1_000_000, one.bytes_per_s)
        other.carried(rate * 1_000_000, other.bytes_per_s)
    assert one.bytes_per_s == other.bytes_per_s > 0


def test_a_transfer_is_judged_by_the_rate_that_it_was_sent_at() -> None:
    pace = Pace()
    pace.carried(LINK // 3, 0)
    sent_at = pace.bytes_per_s
    pace.carried(sent_at, sent_at)
    faster = pace.bytes_per_s
    pace.carried(sent_at, sent_at)  # Asked for before the rate rose.
    assert pace.bytes_per_s >= faster > sent_at
