from __future__ import annotations

import pytest

from diloco.observe.text import clock, count, size, times_less


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, "0"),
        (999, "999"),
        (999.9, "1.00k"),
        (12_345, "12.3k"),
        (999_700, "1.00M"),
        (1_050_000, "1.05M"),
        (27e9, "27.0G"),
        (2.1375e15, "2.14P"),
    ],
)
def test_count(value: float, wanted: str) -> None:
    assert count(value) == wanted
    assert len(count(value)) <= 5


def test_size() -> None:
    assert [size(value) for value in (12, 240_000, 10_400_000)] == ["12 B", "240 kB", "10.4 MB"]


def test_clock() -> None:
    assert [clock(value) for value in (0, 59.6, 61, 3600, -3)] == ["0:00", "1:00", "1:01", "1:00:00", "0:00"]


def test_times_less() -> None:
    assert [times_less(1, 64), times_less(10, 64), times_less(64, 32)] == ["1/64 of", "1/6.4 of", "2.0 times"]
    assert times_less(0, 5) == times_less(5, 0) == "-"
