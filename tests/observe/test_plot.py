from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from diloco.observe.plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    Rule,
    clock_ticks,
    line_chart,
    standalone,
    thinned,
    ticks,
    time_line,
)
from diloco.observe.text import clock

X, Y = Axis("time", clock), Axis("loss", lambda value: f"{value:.2f}")


def elements(svg: str, kind: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag == kind]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (ticks(0, 10), [0, 2, 4, 6, 8, 10]),
        (ticks(2.4, 7.1), [3, 4, 5, 6, 7]),
        (ticks(0, 0.031), [0, 0.01, 0.02, 0.03]),
        (ticks(-1, 1), [-1, -0.5, 0, 0.5, 1]),
        (ticks(3, 3), [3]),
        (clock_ticks(0.0), [0.0]),
    ],
)
def test_ticks_are_round_and_inside_and_a_clock_has_few(found: list[float], wanted: list[float]) -> None:
    assert found == pytest.approx(wanted)
    for high in (1.0, 61.0, 150.0, 7000.0, 1e6, 1e8):
        assert 1 <= len(clock_ticks(high)) <= 10
        assert clock_ticks(high)[-1] <= high


def test_thinning_keeps_means_and_breaks() -> None:
    first = [(float(x), 2.0 * x) for x in range(1000)]
    second = [(float(x), 2.0 * x) for x in range(2000, 2500)]
    thin = thinned([*first, None, *second], bins=100)
    assert thin.count(None) == 1
    there = [point for point in thin if point is not None]
    assert 60 <= len(there) <= 102
    assert all(y == pytest.approx(2 * x) for x, y in there)
    assert thinned([]) == []


def test_a_chart_is_well_formed_and_stays_in_its_frame() -> None:
    line = Line("site-a <b>", "s0", [(0.0, 5.0), (30.0, 4.0), None, (60.0, 2.0), (90.0, 1.0)])
    svg = line_chart([line], X, Y, [Rule("zlib", 3.0)], time=True)
    dots = elements(svg, "circle")
    assert len(dots) == 4
    for dot in dots:
        assert LEFT <= float(dot.attrib["cx"]) <= WIDTH - RIGHT
        assert TOP <= float(dot.attrib["cy"]) <= HEIGHT - BOTTOM
    heights = [float(dot.attrib["cy"]) for dot in dots]
    assert heights == sorted(heights), "a smaller loss stands lower"
    titles = [title.text for title in elements(svg, "title")]
    assert titles[0] == "site-a <b>: 5.00 at 0:00"
    assert titles[-1] == "site-a <b>: 1.00 at 1:30"
    (path,) = elements(svg, "path")
    assert path.attrib["d"].count("M") == 2, "the line is drawn across a break"
    assert "zlib 3.00" in [text.text for text in elements(svg, "text")]


@pytest.mark.parametrize("points", [[], [None], [(3.0, 3.0)], [(0.0, 1.0), (0.0, 1.0)]])
def test_few_points_make_a_chart_or_none(points: list[tuple[float, float] | None]) -> None:
    for axis in (Y, Axis("bytes", str, log=True)):
        svg = line_chart([Line("a", "s0", points)], X, axis, time=True)
        assert bool(svg) == any(points)
        assert "nan" not in svg
    assert time_line([], [], 10.0, X) == ""


def test_a_picture_by_itself_has_a_style_and_names_its_lines_apart() -> None:
    far, near = Line("far", "s0", [(0.0, 1.0), (9.0, 9.0)]), Line("near", "s1", [(0.0, 1.0), (9.0, 8.8)])
    svg = standalone(line_chart([far, near], X, Y, named=True))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[0].tag.endswith("style")
    names = {text.text: float(text.attrib["y"]) for text in root.iter() if text.text in ("far", "near")}
    assert names["near"] - names["far"] > 12, "one name lies on the other"
    assert "far</text>" not in line_chart([far, near], X, Y)
