from __future__ import annotations

import pytest

from diloco.observe.history import SERIES_MAX, Series, SiteHistory


def test_a_long_series_is_thinned_and_keeps_its_end() -> None:
    series = Series()
    for number in range(10 * SERIES_MAX):
        series.add(float(number), 1.0)
        if number == 100:
            series.cut()
    points = series.whole()
    assert SERIES_MAX / 4 < len(points) < SERIES_MAX + 2
    assert points[-1] == (10 * SERIES_MAX - 1.0, 1.0)
    assert None in points
    firsts = [point[0] for point in points if point is not None]
    assert firsts == sorted(firsts)


def test_a_short_series_is_kept_whole() -> None:
    series = Series()
    assert series.whole() == []
    series.add(1.0, 2.0)
    series.cut()
    series.cut()
    series.add(2.0, 1.0)
    assert series.whole() == [(1.0, 2.0), None, (2.0, 1.0)]


def test_figures_over_several_processes_of_a_site() -> None:
    site = SiteHistory("site-a")
    assert (site.meter("stall_s"), site.meter_max("step_s_max"), site.meter_by_steps("step_s_p50")) == (0, 0, 0)
    site.meters = {
        1: {"inner_steps": 30.0, "stall_s": 1.0, "step_s_p50": 0.1, "step_s_max": 0.9},
        2: {"inner_steps": 10.0, "stall_s": 0.5, "step_s_p50": 0.5, "step_s_max": 0.7},
    }
    assert site.meter("stall_s") == 1.5
    assert site.meter_max("step_s_max") == 0.9
    assert site.meter_by_steps("step_s_p50") == pytest.approx(0.2)


def test_bytes_add_up_over_sessions() -> None:
    site = SiteHistory("site-a", links={1: (10, 1), 2: (5, 2)})
    assert (site.bytes_up, site.bytes_down) == (15, 3)


def test_without_an_emulated_link_the_sites_own_count_stands() -> None:
    site = SiteHistory("site-a")
    site.meters = {1: {"bytes_up": 10.0, "bytes_down": 1.0}, 2: {"bytes_up": 5.0, "bytes_down": 2.0}}
    assert (site.bytes_up, site.bytes_down) == (15, 3)
    site.links = {1: (100, 50)}
    assert (site.bytes_up, site.bytes_down) == (100, 50)
