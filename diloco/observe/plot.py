"""Line charts and time lines as static SVG text: no script, no font, no network; colours are classes of the page.

Points and bars have a ``<title>``, which a browser shows when the pointer rests on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from diloco.observe.text import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 880, 300
LEFT, RIGHT, TOP, BOTTOM = 82, 16, 14, 44
BINS = 150
HOVERS = 90
NAME_PX = 24
LABEL_CHARS = 11
CHAR_PX, LINE_PX = 6.6, 14
"""Of the labels' text, at its widest."""

STYLE = """
:root { --paper: #ffffff; --ink: #1b1f24; --soft: #667080; --edge: #d5dae1;
  --s0: #1f6feb; --s1: #d0660a; --s2: #16876a }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e4e8ee; --soft: #98a2b0; --edge: #333a44;
  --s0: #6ba6ff; --s1: #f2a057; --s2: #52c9a2 } }
svg { background: var(--paper) }
text { fill: var(--ink); font: 12px system-ui, sans-serif } text.soft { fill: var(--soft) }
.grid { stroke: var(--edge) } .axis { stroke: var(--soft) }
.line { fill: none; stroke: currentColor; stroke-width: 1.7 } .dot { fill: currentColor } .hidden { opacity: 0 }
text.named { fill: currentColor } .s0 { color: var(--s0) } .s1 { color: var(--s1) } .s2 { color: var(--s2) }
"""
"""The style of a picture in its own file; the report's page has its own copy."""

Points = list[tuple[float, float] | None]


@dataclass(frozen=True, slots=True)
class Line:
    """A series: None among the points breaks the line.  ``style`` is a class of the page's style sheet."""

    label: str
    style: str
    points: Points


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis's label and scale; ``show`` makes a tick's text.  ``time``: in seconds from 0, with a clock's ticks."""

    label: str
    show: Callable[[float], str]
    log: bool = False
    time: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch in one row of a time line; with ``end`` equal to ``start``, a tick."""

    row: int
    start: float
    end: float
    style: str
    title: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``, to a tenth."""
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start_px + share * (self.end_px - self.start_px), 1)


@dataclass(slots=True)
class _Drawing:
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.parts.append(f'<line class="{style}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def done(self, label: str) -> str:
        body = "\n".join(self.parts)
        return f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def standalone(svg: str) -> str:
    """Return ``svg`` as the text of a standalone file."""
    head, body = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>{STYLE}</style>{body}\n'


def ticks(low: float, high: float) -> list[float]:
    """Return about six round values (1, 2 or 5 times a power of ten apart) inside [``low``, ``high``]."""
    if not high > low:
        return [low]
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def clock_ticks(high: float) -> list[float]:
    """Return at most nine instants from 0 to ``high`` seconds, at steps that are round on a clock."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((step for step in steps if high / step <= 8), 86400 * math.ceil(high / 86400 / 8))
    return [float(number * step) for number in range(int(high / step) + 1)]


def thinned(points: Points) -> Points:
    """Return about ``BINS`` points, each the mean of its neighbours in an unbroken part."""
    thin: Points = []
    part: list[tuple[float, float]] = []
    wide = max(1, math.ceil(sum(point is not None for point in points) / BINS))
    for point in [*points, None]:
        if point is not None:
            part.append(point)
            continue
        groups = [part[begin : begin + wide] for begin in range(0, len(part), wide)]
        thin += [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
        thin.append(None)
        part = []
    return thin[:-1]


def line_chart(
    lines: Sequence[Line], x: Axis, y: Axis, rules: Sequence[tuple[str, float]] = (), *, named: bool = False
) -> str:
    """Return an SVG with a line for each series, axes with grid, and dots titled with their values; "" without a point.

    ``rules`` are labels and heights of horizontal lines to compare with.

    With ``named`` each line has its label over its end, or below it where another line ends just above, for a picture
    without a legend.
    """
    drawn = []
    for line in lines:
        points = [None if point is None or (y.log and point[1] <= 0) else point for point in thinned(line.points)]
        drawn.append(Line(line.label, line.style, points))
    xs = [point[0] for line in drawn for point in line.points if point]
    ys = [point[1] for line in drawn for point in line.points if point] + [value for _, value in rules]
    if not xs:
        return ""
    drawing = _Drawing(HEIGHT)
    labels = [(value, f"{name} {y.show(value)}") for name, value in sorted(rules, key=lambda rule: -rule[1])]
    right = WIDTH - RIGHT - math.ceil(CHAR_PX * max((len(text) for _, text in labels), default=0))
    across = Scale(0.0 if x.time else min(*xs, 0.0), max(*xs, 1e-9), LEFT, right)
    low, high = min(ys), max(ys)
    if y.log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high * 1.0001))
    else:
        room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        low, high = low - room, high + room
    up = Scale(low, high, HEIGHT - BOTTOM, TOP, y.log)
    _axes(drawing, across, up, x, y)
    lowest = 0.0
    for value, text in labels:  # Beside the curves, and below each other.
        drawing.line(LEFT, up(value), right, up(value), "rule")
        lowest = max(up(value) + 4, lowest + LINE_PX)
        drawing.text(right + 6, lowest, text, "start", ' class="soft"')
    for line in drawn:
        drawing.parts.append(f'<path class="line {line.style}" d="{_path(line.points, across, up)}"/>')
    for line in drawn:
        there = [point for point in line.points if point is not None]
        dots = "dot" if len(there) <= HOVERS / 2 else "dot hidden"
        for at, value in [*there[: -1 : max(1, math.ceil(len(there) / HOVERS))], *there[-1:]]:
            title = escape(f"{line.label}: {y.show(value)} at {x.show(at)}")
            place = f'cx="{across(at):g}" cy="{up(value):g}"'
            drawing.parts.append(f'<circle class="{dots} {line.style}" {place} r="3.5"><title>{title}</title></circle>')
    ends = [(line, last) for line in drawn if line.points and (last := line.points[-1])]
    for line, (at, value) in ends if named else ():
        crowded = any(0 < up(value) - up(other) < NAME_PX for _, (_, other) in ends)
        below = 15 if crowded else -6
        drawing.text(across(at), up(value) + below, line.label, "end", f' class="named {line.style}"')
    last_values = ", ".join(f"{line.label} {y.show(value)}" for line, (_, value) in ends)
    return drawing.done(f"{y.label} against {x.label}; at the end: {last_values}")


def _axes(drawing: _Drawing, across: Scale, up: Scale, x: Axis, y: Axis) -> None:
    if y.log:
        y_ticks = [10.0**power for power in range(round(math.log10(up.low)), round(math.log10(up.high)) + 1)]
    else:
        y_ticks = ticks(up.low, up.high)
    for value in y_ticks:
        drawing.line(LEFT, up(value), across.end_px, up(value), "grid")
        drawing.text(LEFT - 8, up(value) + 4, y.show(value), "end")
    for value in clock_ticks(across.high) if x.time else ticks(across.low, across.high):
        drawing.line(across(value), HEIGHT - BOTTOM, across(value), HEIGHT - BOTTOM + 5, "axis")
        drawing.text(across(value), HEIGHT - BOTTOM + 18, x.show(value))
    drawing.line(LEFT, HEIGHT - BOTTOM, across.end_px, HEIGHT - BOTTOM, "axis")
    drawing.text((LEFT + across.end_px) / 2, HEIGHT - 6, x.label, more=' class="soft"')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    drawing.text(13, middle, y.label, more=f' class="soft" transform="rotate(-90 13 {middle:g})"')


def _path(points: Points, across: Scale, up: Scale) -> str:
    words, pen_down = [], False
    for point in points:
        if point is not None:
            words.append(f"{'L' if pen_down else 'M'}{across(point[0]):g} {up(point[1]):g}")
        pen_down = point is not None
    return "".join(words)


def time_line(rows: Sequence[str], bars: Sequence[Bar], seconds: float, x: Axis) -> str:
    """Return an SVG with a row for each name and its bars and ticks, over 0 to ``seconds``; "" without a row."""
    if not rows:
        return ""
    row_px, bar_px = 30, 16
    bottom = TOP + row_px * len(rows)
    drawing = _Drawing(bottom + BOTTOM)
    left = LEFT + 8
    across = Scale(0.0, max(seconds, 1e-9), left, WIDTH - RIGHT)
    for value in clock_ticks(seconds):
        drawing.line(across(value), TOP, across(value), bottom + 5, "grid")
        drawing.text(across(value), bottom + 18, x.show(value))
    for number, name in enumerate(rows):
        drawing.text(left - 8, TOP + row_px * (number + 0.5) + 4, shortened(name, LABEL_CHARS), "end")
        drawing.line(left, TOP + row_px * (number + 1), WIDTH - RIGHT, TOP + row_px * (number + 1), "grid")
    for bar in bars:
        top = TOP + row_px * (bar.row + 0.5) - bar_px / 2
        wide = max(across(bar.end) - across(bar.start), 1.6)
        place = f'x="{across(bar.start):g}" y="{top:g}" width="{wide:g}" height="{bar_px}"'
        drawing.parts.append(f'<rect class="{bar.style}" {place}><title>{escape(bar.title)}</title></rect>')
    drawing.text((left + WIDTH - RIGHT) / 2, bottom + BOTTOM - 6, x.label, more=' class="soft"')
    return drawing.done(f"{', '.join(rows)} against {x.label}")
