"""``report.html``: one file that opens offline in any browser, and shows a run; also a run that failed.

The charts are static SVG (``plot``).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

from diloco.durable import write_file
from diloco.observe.eventlog import read_events
from diloco.observe.history import RunHistory
from diloco.observe.plot import Axis, Bar, Line, Points, line_chart, time_line
from diloco.observe.summary import LEDGER, complaints, summarize
from diloco.observe.text import CAUSED, clock, count, size, times_less, units_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any


TIME = Axis("time, m:ss", clock, time=True)
LOSS = Axis("nats per token", lambda value: f"{value:.3g}")
BITS = Axis("bits per byte", LOSS.show)


def rebuild(run_dir: Path) -> tuple[dict[str, Any], RunHistory]:
    """Write ``run_dir/report.html`` from the run's events and its summary; return summary and history.

    A new summary is made from the events where ``summary.json`` is missing (the run was killed), lacks fields of a run
    of sites, or may be from before the run was restored.
    """
    from diloco.config.compose import read
    from diloco.config.errors import ConfigError

    history = RunHistory(read_events(run_dir / "events.jsonl"))
    paths = run_dir / "config.yaml", run_dir / "summary.json"
    config, told = (path.read_text("utf-8") if path.exists() else "" for path in paths)
    summary = json.loads(told) if told else {}
    if complaints(summary) or history.restored:
        settings: dict[str, object] = {}
        with suppress(ConfigError):  # There is no such file, or it cannot be read.
            settings = asdict(read(paths[0]))
        summary = summarize(history, None, settings)
    good = summary["status"] == "ok" or bool(history.whole_at)
    blocks = blocks_of(summary["status"], *parts_of(history, summary, config), good=good)
    write_file(run_dir / "report.html", page(run_dir.resolve().name, blocks).encode())
    return summary, history


def parts_of(
    history: RunHistory, summary: Mapping[str, Any], config: str, now: Sequence[str] = ()
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the page's tiles and sections; ``now`` are the sections on this moment, if any."""
    styled = [(name, series_style(number)) for number, name in enumerate(sorted(history.sites))]
    losses = legend([*styled, ("global model (validation)", "global")])
    marks = legend([*styled, ("fault", "bad"), ("outer step", "global")])
    data = f" Data in {units_text(summary['units'])}." if summary.get("units") else ""
    parts = [part.replace("_", " ") for part in ("processed", *LEDGER)]
    ledger = [
        [name, *(f"{site[f'tokens_{part}']:,}" for part in ("processed", *LEDGER))]
        for name, site in summary["sites"].items()
    ]
    known: Points = [
        (one.at_s, one.val_bits_per_byte) for one in history.evaluations if one.val_bits_per_byte is not None
    ]
    validation = line_chart([Line("global model", "global", known)], TIME, BITS, sorted(history.references.items()))
    faults = []
    for fault in summary["faults"]:
        healed = fault["healed_seconds"]
        lasted = "-" if healed is None else f"{healed - fault['at_seconds']:.1f} s"
        faults.append([fault["target"], CAUSED.get(fault["what"], fault["what"]), clock(fault["at_seconds"]), lasted])
    log = "\n".join(f"{clock(at_s):>7}  {who:<9} {line}" for at_s, who, line in history.lines)
    sections = [
        *now,
        section("Loss against time", losses, _loss(history, styled, 0, TIME), _LOSS_NOTE),
        section("Loss against tokens", losses, _loss(history, styled, 1, Axis("tokens", count)), _TOKENS_NOTE),
        section("Validation, bits per byte", "", validation, _BITS_NOTE + (_BY_HAND if history.by_hand else "")),
        section("Rounds, merges and faults", marks, _time_line(history), _TIME_NOTE),
        section("Bytes between the sites", legend(_WIRE), _wire(history), _WIRE_NOTE),
        section("Where every token went", "", table(["site", *parts], ledger), _LEDGER_NOTE + data),
        section("Time and wire of each site", "", _site_table(summary), ""),
        section("Faults", "", table(("target", "what happened", "at", "lasted"), faults), ""),
        f'<details><summary>What happened</summary><pre id="log" tabindex="0">{escape(log)}</pre></details>',
        f'<details><summary>Configuration</summary><pre tabindex="0">{escape(config)}</pre></details>',
    ]
    return _tiles(summary), sections


_LOSS_NOTE = "Sites: their own training loss, averaged over neighbouring steps. Global model: validation loss."
_BITS_NOTE = "The published values on text that no site has seen."
_BY_HAND = " diloco eval RUN_FOLDER records them here; with --follow, beside the run."
_TOKENS_NOTE = "Sites against the tokens they read themselves; the global model against all tokens merged into it."
_TIME_NOTE = (
    "A site's bar is its process; each tick on it is an update of that site merged into a version. The lowest row has "
    "one mark for each outer step, from the quorum to the publication. Of a long run only every second version has "
    "marks, or every fourth, and so on."
)
MARKS_MAX = 2000
"""Most marks of rounds in the time line: each is some 150 bytes of the page."""
_WIRE_NOTE = (
    "Bytes counted at the links, both directions, logarithmic. With fp32 codecs: four bytes for each value of each "
    "update and version that was exchanged. Data parallel: 2(N-1)/N × 4 bytes × parameters for each inner step of each "
    "site."
)
_LEDGER_NOTE = "Every token that a site processed counts in exactly one of the other columns."
_WIRE = (("on the links", "s0"), ("with fp32 codecs", "s1"), ("data parallel", "s2"))


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    reached, wire, sites = summary["global"], summary["wire"], summary["sites"].values()
    total = wire["bytes_up"] + wire["bytes_down"]
    bits, loss = reached["val_bits_per_byte"], reached["val_loss"]
    start = reached["val_loss_start"]
    processed = sum(site["tokens_processed"] for site in sites)
    return [
        (f"{bits:.3f}" if bits is not None else "-", "validation bits/byte"),
        (f"{loss:.3f}" if loss is not None else "-", f"nats/token, from {start:.3f}" if start else "nats/token"),
        (count(sum(site["tokens_merged"] for site in sites)), f"tokens merged of {count(processed)} processed"),
        (str(sum(summary["versions"])), "outer steps"),
        (size(total), f"{times_less(total, wire['bytes_data_parallel_equivalent'])} data parallel"),
        (clock(summary["wall_seconds"]), f"{len(summary['faults'])} faults"),
    ]


def _loss(history: RunHistory, styled: Sequence[tuple[str, str]], column: int, x: Axis) -> str:
    """Chart each site's training loss and the validation loss, against seconds (column 0) or tokens (column 1)."""
    lines = []
    for name, style in styled:
        points: Points = [(point[column], point[2]) if point else None for point in history.sites[name].losses.whole()]
        lines.append(Line(name, style, points))
    known = [(one.tokens if column else one.at_s, one.val_loss) for one in history.evaluations]
    lines.append(Line("global model", "global", list(known)))
    return line_chart(lines, x, LOSS)


def _wire(history: RunHistory) -> str:
    lines = [
        Line(label, style, [(point[0], point[number + 1]) if point else None for point in history.wire.whole()])
        for number, (label, style) in enumerate(_WIRE)
    ]
    return line_chart(lines, TIME, Axis("bytes so far", size, log=True))


def _time_line(history: RunHistory) -> str:
    names = sorted(history.sites)
    rows = [*names, "syncer", "outer steps"] if names else []
    lives = [(name, history.sites[name].spans, series_style(row)) for row, name in enumerate(names)]
    bars = []
    for row, (name, spans, style) in enumerate([*lives, ("syncer", history.syncer_spans, "global")]):
        for span in spans:
            end = history.seconds if span.end_s is None else span.end_s
            title = f"{name} runs, {clock(span.start_s)} to {clock(end)}"
            bars.append(Bar(row, span.start_s, end, f"life {style}", title))
    for fault in history.faults:
        if (target := fault.target.removeprefix("link:")) in rows:
            end = fault.healed_s if fault.healed_s is not None else history.seconds if fault.seconds else fault.at_s
            title = f"{fault.target} {CAUSED.get(fault.what, fault.what)}, {clock(fault.at_s)} to {clock(end)}"
            style = "fault" if end > fault.at_s else "shock"
            bars.append(Bar(rows.index(target), fault.at_s, end, style, title))
    every = 1
    while len(history.rounds) * (len(names) + 1) > MARKS_MAX * every:
        every *= 2  # By version: the next round moves no mark.
    for round_ in history.rounds:
        if round_.version % every:
            continue
        made = f"fragment {round_.fragment}, version {round_.version}"
        for name, weight in sorted(round_.weights.items()):
            stale = round_.staleness.get(name, 0)
            title = f"{name} in {made} at {clock(round_.at_s)}: weight {weight:.2f}, staleness {stale}"
            if name in names:
                row = names.index(name)
                bars.append(Bar(row, round_.at_s, round_.at_s, f"merge {series_style(row)}", title))
        begin = round_.at_s if round_.met_s is None else round_.met_s
        end = round_.at_s if round_.published_s is None else round_.published_s
        since = f"{end - begin:.2f} s since the quorum"
        title = f"{made} at {clock(end)}, from {', '.join(sorted(round_.weights))}; {since}"
        bars.append(Bar(len(names) + 1, begin, end, "round", title))
    return time_line(rows, bars, history.seconds, TIME)


def _site_table(summary: Mapping[str, Any]) -> str:
    head = ["site", "steps", "tokens/s", "products", "step p50", "step max", "stall", "longest", "updates", "refused"]
    head += ["restarts", "up", "down"]
    rows = []
    for name, site in summary["sites"].items():
        share = site["stall_seconds"] / site["train_seconds"] if site["train_seconds"] else 0.0
        speed = [count(site.get("tokens_per_second", 0)), site.get("products") or "-"]
        times = [f"{site['step_seconds'][part] * 1e3:.0f} ms" for part in ("p50", "max")]
        stall = [f"{share:.2%}", f"{site['after_step_seconds_max'] * 1e3:.1f} ms"]
        refused = ", ".join(f"{number} {reason}" for reason, number in sorted(site["updates_refused"].items())) or "0"
        merged = [str(site["updates_merged"]), refused, str(site["restarts"])]
        wire = [size(site["bytes_up"]), size(site["bytes_down"])]
        rows.append([name, f"{site['inner_steps']:,}", *speed, *times, *stall, *merged, *wire])
    return table(head, rows)


# --- The frame of our pages ------------------------------------------------------------------------------------------

STYLES = 8
FRAME = resources.files("diloco.observe").joinpath("report.html").read_text("utf-8")


def blocks_of(status: str, tiles: Sequence[tuple[str, str]], sections: Sequence[str], *, good: bool) -> dict[str, str]:
    """Return the HTML of each part of a page by its id there.  ``tiles`` are (figure, words), ``sections`` HTML."""
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{words}</span></div>' for value, words in tiles)
    mood = f'<span class="{"ok" if good else "wrong"}">{escape(status)}</span>'
    return {"status": mood, "tiles": shown, **{f"s{place}": text for place, text in enumerate(sections)}}


def page(title: str, blocks: Mapping[str, str], live: str = "") -> str:
    """Return the whole page; ``live`` is the HTML that keeps it up to date."""
    sections = [f'<section id="{name}">{text}</section>' for name, text in blocks.items() if name[1:].isdecimal()]
    return Template(FRAME).substitute(blocks, title=escape(title), sections="\n".join(sections), live=live)


def section(title: str, legend: str, picture: str, note: str, none: str = "Nothing was recorded.") -> str:
    """Return a section: its heading, note, legend and picture; ``none`` where there is no picture."""
    frame = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
    shown = f"{frame}{picture}</div>" if picture else f'<div class="empty">{escape(none)}</div>'
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    zoom = '<label class="zoom"><input type="checkbox"> three times as large</label>\n'
    return f"<h2>{escape(title)}</h2>\n{words}{legend}\n{zoom if picture.startswith('<svg') else ''}{shown}"


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
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table>"
