from __future__ import annotations

import pytest

from diloco.sync.link import (
    CHANNELS_MAX,
    LEFT_ALONE,
    RATE_MAX,
    ROUND_TRIPS_KEPT,
    SECOND_NS,
    TRANSFER_BYTES_MIN,
    TRANSFERS_KEPT,
    LinkEstimate,
    LinkEstimator,
    Pace,
    channels_for,
    later_rate,
)

STOCK_WMEM = 4 << 20
MBIT = 1e6 / 8


@pytest.mark.parametrize(
    ("rtt_s", "bytes_per_s", "window_bytes", "channels"),
    [
        (0.1, 1000 * MBIT, STOCK_WMEM, 5),
        (0.1, 200 * MBIT, STOCK_WMEM, 1),
        (0.05, 1000 * MBIT, STOCK_WMEM, 3),
        (0.1, 1000 * MBIT, 64 << 20, 1),
        (0.3, 10_000 * MBIT, STOCK_WMEM, CHANNELS_MAX),
        (0.0, 1000 * MBIT, STOCK_WMEM, 1),
        (0.1, 0.0, STOCK_WMEM, 1),
        (1.0, 65.0, 100, 1),
        (1.0, 65.1, 100, 2),
    ],
)
def test_as_many_connections_as_fill_the_link(
    rtt_s: float, bytes_per_s: float, window_bytes: int, channels: int
) -> None:
    assert channels_for(rtt_s, bytes_per_s, window_bytes) == channels


@pytest.mark.parametrize(("rtt_s", "bytes_per_s", "window_bytes"), [(-1, 1, 1), (1, float("nan"), 1), (1, 1, 0)])
def test_figures_that_cannot_be_are_a_defect(rtt_s: float, bytes_per_s: float, window_bytes: int) -> None:
    with pytest.raises(AssertionError):
        channels_for(rtt_s, bytes_per_s, window_bytes)


@pytest.mark.parametrize(
    ("seen", "rate"),
    [
        ([(0, 100)], 0.0),
        ([(7, 100), (7, 200)], 0.0),
        ([(0, 100), (SECOND_NS, 200)], 100.0),
        # Slow at first: only the later half counts.
        ([(0, 0), (SECOND_NS, 10), (2 * SECOND_NS, 20), (3 * SECOND_NS, 1020), (4 * SECOND_NS, 2020)], 1000.0),
        # Few large steps: the middle lies in none of them.
        ([(0, 0), (3 * SECOND_NS, 300), (4 * SECOND_NS, 400)], 100.0),
    ],
)
def test_the_later_half_says_what_the_link_carries(seen: list[tuple[int, int]], rate: float) -> None:
    assert later_rate(seen) == rate


MS = 1_000_000


def test_nothing_measured_is_nothing_known() -> None:
    assert LinkEstimator().estimate() == LinkEstimate()


def test_the_way_is_the_shortest_round_trip_lately() -> None:
    link = LinkEstimator()
    for rtt_ns in (100 * MS, 300 * MS, 80 * MS, 500 * MS):
        link.answered(rtt_ns)
    assert link.estimate().rtt_min_ns == 80 * MS
    assert link.estimate().rtt_ns == 320 * MS  # Each counts half of all before it.
    for _ in range(ROUND_TRIPS_KEPT):
        link.answered(120 * MS)
    assert link.estimate().rtt_min_ns == 120 * MS, "a way that has become longer is known to be, in the end"


def test_the_rate_is_the_fastest_transfer_lately_less_the_waiting() -> None:
    link = LinkEstimator()
    link.answered(100 * MS)
    link.carried(10_000_000, 1100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 10_000_000
    link.carried(10_000_000, 5100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 10_000_000, "one that was slow may have waited for anything"
    for _ in range(TRANSFERS_KEPT - 1):
        link.carried(10_000_000, 5100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 2_000_000, "a link that has become slow is known to be"
    link.carried(10_000_000, 1100 * MS, up=True)
    assert link.estimate().up_bytes_per_s == 10_000_000, "and one that is fast again, at once"
    assert link.estimate().down_bytes_per_s == 0


def test_a_small_transfer_says_nothing_and_a_short_one_no_more_than_twice_what_it_was() -> None:
    link = LinkEstimator()
    link.answered(100 * MS)
    link.carried(TRANSFER_BYTES_MIN - 1, 1, up=False)
    assert link.estimate().down_bytes_per_s == 0
    link.carried(TRANSFER_BYTES_MIN, 110 * MS, up=False)
    assert link.estimate().down_bytes_per_s == TRANSFER_BYTES_MIN * SECOND_NS // (55 * MS)
    link.carried(TRANSFER_BYTES_MIN, 50 * MS, round_trips=0, up=False)
    assert link.estimate().down_bytes_per_s == TRANSFER_BYTES_MIN * SECOND_NS // (50 * MS)


def test_the_same_samples_give_the_same_estimate() -> None:
    def measured() -> LinkEstimate:
        link = LinkEstimator()
        for index in range(200):
            link.answered(1 + index * 7919 % (90 * MS))
            link.carried(100_000 + index, 1 + index * 104729 % SECOND_NS, up=True)
        return link.estimate()

    assert measured() == measured()


# --- Links that carry what they are given up to their rate, and what a site learns of them ---------------------------

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
