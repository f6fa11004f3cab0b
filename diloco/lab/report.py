"""The report of a laboratory: a table for the terminal, and a page with curves."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from diloco.observe.plot import Axis, Line, Points, line_chart
from diloco.observe.report import legend, page, section, series_style
from diloco.observe.report import table as html_table
from diloco.observe.text import count, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.lab.experiment import Found, Laboratory
    from diloco.lab.experiment import Line as Row

LOSS = Axis("nats per token", lambda value: f"{value:.3f}")
PROGRESS, SECONDS, BYTES, LOSSES = range(4)
HEAD = (
    "row",
    "loss",
    "seeds",
    "against",
    "difference",
    "least",
    "most",
    "virtual time",
    "up",
    "goodput",
    "sites/merge",
)


def cells(line: Row) -> tuple[str, ...]:
    """Return a line of the table as text; differences are between runs with the same seed."""
    off = list(line.off.values())
    shares = (f"{fmean(off):+.2%}", f"{min(off):+.2%}", f"{max(off):+.2%}") if off else ("", "", "")
    communicates = any(each.versions for each in line.found)
    return (
        line.name,
        f"{line.loss:.4f}",
        str(len(line.losses)),
        line.against if off else "",
        *shares,
        f"{fmean(each.seconds for each in line.found):,.0f}",
        size(fmean(each.bytes_up for each in line.found)) if communicates else "",
        f"{fmean(each.goodput for each in line.found):.1%}",
        f"{fmean(each.sites_per_version for each in line.found):.2f}" if communicates else "",
    )


def table(lines: Sequence[Row]) -> str:
    """Return the table for the terminal."""
    rows = [HEAD, *(cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(text.ljust(width) if column == 0 else text.rjust(width)
                  for column, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    )  # fmt: skip


def html(lab: Laboratory, lines: Sequence[Row]) -> str:
    """Return the HTML page."""
    named = [(line.name, series_style(number)) for number, line in enumerate(lines)]
    tokens = max((each.tokens for line in lines for each in line.found), default=0)
    axes: tuple[tuple[str, int, Axis, Callable[[Found, float], float]], ...] = (
        ("Loss against tokens", PROGRESS, Axis("tokens", count), lambda each, value: value * each.tokens),
        ("Loss against virtual time", SECONDS, Axis("virtual seconds", count), lambda each, value: value),
        ("Loss against bytes", BYTES, Axis("bytes up, all sites", size), lambda each, value: value),
    )
    pictures = [
        section(title, legend(named), _curves(lines, column, axis, scale), NOTE) for title, column, axis, scale in axes
    ]
    shown = html_table(HEAD, [cells(line) for line in lines])
    seeds = sorted({seed for line in lines for seed in line.losses})
    tiles = [(str(len(lines)), "rows"), (str(len(seeds)), "seeds"), (count(tokens), "tokens")]
    does = html_table(
        ("row", "is", "settings"), [(line.name, line.does, " ".join(lab.rows[line.name].settings)) for line in lines]
    )
    sections = [
        section("Beside each other", "", shown, TABLE),
        *pictures,
        section("Rows", "", does, " ".join(lab.settings)),
    ]
    return page(lab.title, lab.name, tiles, sections, good=True)


NOTE = "Each seed is a line of its own: how far lines of one colour lie apart is what a difference must exceed."
TABLE = "Mean loss of the final model; differences are of runs with the same seed, their mean, least and most."


def _curves(lines: Sequence[Row], column: int, axis: Axis, scale: Callable[[Found, float], float]) -> str:
    drawn = []
    for number, line in enumerate(lines):
        for each in line.found:
            last = [1.0, each.seconds, each.bytes_up, each.loss]
            points: Points = [(scale(each, point[column]), point[LOSSES]) for point in [*each.points, last]]
            if each.points:
                drawn.append(Line(f"{line.name}, seed {each.seed}", series_style(number), points))
    return line_chart(drawn, axis, LOSS)
