from __future__ import annotations

import pytest

from diloco.sync.links import CHANNELS_MAX, SECOND_NS, channels_for, later_rate

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
