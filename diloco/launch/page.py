"""The frame of our pages: one HTML file that opens offline in any browser, with static SVG (``plot``) and tables.

Its template is ``report.html`` beside this module.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STYLES = 8


def page(title: str, status: str, tiles: Sequence[tuple[str, str]], sections: Sequence[str], *, good: bool) -> str:
    """Return the whole page.  ``tiles`` are (figure, words); ``sections`` are HTML."""
    filled = Template(resources.files("diloco.launch").joinpath("report.html").read_text("utf-8"))
    return filled.substitute(
        title=escape(title),
        mood="ok" if good else "wrong",
        status=escape(status),
        tiles="".join(f'<div class="tile"><b>{value}</b><span>{words}</span></div>' for value, words in tiles),
        sections="\n".join(sections),
    )


def section(title: str, legend: str, picture: str, note: str) -> str:
    """Return a section: its heading, note, legend and picture."""
    shown = picture or '<div class="empty">Nothing was recorded.</div>'
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<h2>{escape(title)}</h2>\n{words}{legend}\n{shown}"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend; ``entries`` are (label, style)."""
    items = "".join(f'<span class="{style}"><i></i><span>{escape(label)}</span></span>' for label, style in entries)
    return f'<div class="legend">{items}</div>'


def series_style(number: int) -> str:
    """Return the style class of series ``number``."""
    return f"s{number % STYLES}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; "" without a row."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>'
