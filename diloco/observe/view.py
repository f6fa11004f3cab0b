"""The display of ``diloco up`` while it runs: a live screen on a terminal, plain lines everywhere else.

``screen`` is pure: from a ``RunHistory`` it makes an object that rich can print.  The columns: state is what the
site's process does ("alone" trains without the syncer), base its versions, old how many versions they are behind, wait
its updates without a fate, stall the share of its time inside the agent.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.observe.text import clock, count, size, times_less, units_shortly

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from diloco.observe.history import RunHistory

PER_SECOND = 4
EVENTS_SHOWN = 9
WIDE = 90
PLAIN_EVERY_S = 10.0
COLUMNS = ("site", "state", "step", "tok/s", "loss", "base", "old", "wait", "link", "up", "down", "stall")
SPARKS = "▁▂▃▄▅▆▇█"
SPARKS_MAX = 30
BAR_WIDTH = 30
STATE_STYLES: Mapping[str, str] = {
    "training": "green",
    "alone": "yellow",
    "starting": "cyan",
    "killed": "bold red",
    "ended": "red",
    "frozen": "bold red",
    "done": "dim",
}
LINE_STYLES: Sequence[tuple[str, str]] = (("FAULT", "bold red"), ("RECOVERED", "bold green"), ("validation", "cyan"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts that do not change during the run."""

    name: str
    what: str
    """Model, data and rules in a few words."""
    seconds: float | None = None
    """The run's bound in seconds, if it has one."""


def screen(history: RunHistory, facts: Facts, width: int) -> Group:
    """Return the whole screen for a console of ``width`` columns (some table columns are left out below ``WIDE``)."""
    return Group(
        _head(history, facts),
        _progress(history, facts),
        _sites(history, wide=width >= WIDE),
        _syncer(history),
        _events(history),
    )


def _head(history: RunHistory, facts: Facts) -> Text:
    head = Text.assemble(("diloco ", "bold"), (facts.name, "bold cyan"), f"  {facts.what}")
    bits = [one.val_bits_per_byte for one in history.evaluations if one.val_bits_per_byte is not None]
    if bits:
        head.append("\nvalidation bits/byte  ")
        head.append(f"{bits[-1]:.3f}", "bold")
        head.append(f"  {sparkline(bits)}  from {bits[0]:.2f}")
        head.append("".join(f"   {name} {value:.2f}" for name, value in sorted(history.references.items())), "dim")
    return head


def sparkline(values: Sequence[float]) -> str:
    """Return the latest values as bars, scaled between the smallest and the largest."""
    shown = values[-SPARKS_MAX:]
    low, high = min(shown), max(shown)
    room = (high - low) or 1.0
    return "".join(SPARKS[round((value - low) / room * (len(SPARKS) - 1))] for value in shown)


def _progress(history: RunHistory, facts: Facts) -> Table:
    grid = Table.grid(padding=(0, 1))
    share = shown_progress(history, facts)
    left = time_left(history, facts)
    words = "starting" if history.first_step_s is None else f"{share:.0%}"
    if history.ending is not None:
        words = history.ending
    elif left is not None:
        words = f"{words}  {clock(left)} left"
    bar = ProgressBar(total=1.0, completed=share, width=BAR_WIDTH)
    grid.add_row(bar, f"{clock(history.seconds)}  {words}", f"  {count(history.run_tokens)} tokens merged")
    return grid


def shown_progress(history: RunHistory, facts: Facts) -> float:
    """Return the share of the run that is done: by the syncer's last report, or by the clock where that is further."""
    share = history.progress
    if facts.seconds:
        share = max(share, min(0.99, history.stepping_s / facts.seconds))
    return min(share, 1.0)


def time_left(history: RunHistory, facts: Facts) -> float | None:
    """Return the seconds to the end, by the bound of time or by the pace so far; None while neither is known."""
    if history.first_step_s is None or history.ending is not None:
        return None
    if facts.seconds:
        return max(0.0, facts.seconds * (1 - shown_progress(history, facts)))
    return history.stepping_s * (1 - history.progress) / history.progress if history.progress > 0.01 else None


def _sites(history: RunHistory, *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    left_out = () if wide else ("wait", "tok/s")
    names = [name for name in COLUMNS if name not in left_out]
    for name in names:
        table.add_column(name, justify="left" if name in ("site", "state") else "right", no_wrap=True)
    for name, site in sorted(history.sites.items()):
        state, train_s = site.state(), site.meter("train_s")
        alive = state in ("training", "alone", "frozen")
        base = " ".join(str(version) for _, version in sorted(site.base_versions.items())[:3])
        up = Text("up", "green") if site.joined and not site.out_of_reach else Text("down", "yellow")
        cells: dict[str, Text | str] = {
            "site": name,
            "state": Text(state, STATE_STYLES.get(state, "")),
            "step": f"{site.step:,}",
            "tok/s": count(site.tokens_per_s) if alive else "-",
            "loss": "-" if site.loss is None else f"{site.loss:.3f}",
            "base": base or "-",
            "old": str(history.staleness(site)),
            "wait": f"{site.meters.get(site.incarnation, {}).get('in_flight', 0):.0f}",
            "link": "-" if not alive else Text(site.cut, "bold red") if site.cut else up,
            "up": size(site.bytes_up),
            "down": size(site.bytes_down),
            "stall": f"{site.meter('stall_s') / train_s:.1%}" if train_s else "-",
        }
        table.add_row(*(cells[name] for name in names))
    return table


def _syncer(history: RunHistory) -> Text:
    versions = " ".join(map(str, history.versions)) or "-"
    up = Text("up", "green") if history.syncer_up else Text("down", "bold red")
    if history.ending is not None and not history.syncer_up:
        up = Text("done", "dim")
    total = sum(site.bytes_up + site.bytes_down for site in history.sites.values())
    text = Text.assemble("syncer ", up, f"  epoch {history.epoch}  versions {versions}  {history.num_rounds} rounds")
    if history.rounds:
        text.append(f"  last from {' '.join(sorted(history.rounds[-1].weights))}", "dim")
    text.append(f"\nwire   {size(total)}: {times_less(total, history.bytes_data_parallel())} data parallel")
    if history.units:
        text.append(f"\nunits  {units_shortly(history.units)}")
    return text


def _events(history: RunHistory) -> Panel:
    lines = list(history.lines)[-EVENTS_SHOWN:]
    shown = Text("\n".join([""] * (EVENTS_SHOWN - len(lines))), no_wrap=True, overflow="ellipsis")
    for at_s, _, line in lines:
        style = next((style for begin, style in LINE_STYLES if line.startswith(begin)), "")
        shown.append(f"{clock(at_s):>7}  ", "dim").append(line + "\n", style)
    shown.rstrip()
    return Panel(shown, title="what happens", title_align="left", box=box.ROUNDED, border_style="dim")


class LiveView(Live):
    """The live screen, drawn at most four times a second; a context."""

    def __init__(self, history: RunHistory, facts: Facts, console: Console) -> None:
        self._history, self._facts = history, facts
        self._next = 0.0
        super().__init__(screen(history, facts, console.width), console=console, auto_refresh=False, transient=True)

    def show(self) -> None:
        """Draw the screen again if it is due."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1 / PER_SECOND
            self.update(screen(self._history, self._facts, self.console.width), refresh=True)

    def say(self, line: str) -> None:
        """Print a line that stays, above the screen."""
        self.console.print(line, markup=False, highlight=False)


class PlainView:
    """Plain lines: events as they happen, and the state of the run every ten seconds of it; a context."""

    def __init__(self, history: RunHistory, facts: Facts, console: Console) -> None:
        self._history, self._facts = history, facts
        self._console = console
        self._told = 0
        self._next_s = PLAIN_EVERY_S

    def __enter__(self) -> PlainView:
        self.say(f"diloco {self._facts.name}  {self._facts.what}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.show()

    def show(self) -> None:
        """Print what is new."""
        new = min(self._history.num_lines - self._told, len(self._history.lines))
        for at_s, _, line in list(self._history.lines)[len(self._history.lines) - new :]:
            self.say(f"{clock(at_s):>7}  {line}")
        self._told = self._history.num_lines
        if self._history.seconds >= self._next_s:
            self._next_s = self._history.seconds - self._history.seconds % PLAIN_EVERY_S + PLAIN_EVERY_S
            for line in standing(self._history, self._facts):
                self.say(line)

    def say(self, line: str) -> None:
        """Print one line, never wrapped and without colours, so that it can be searched."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True, style=None)


def standing(history: RunHistory, facts: Facts) -> Iterable[str]:
    """Yield the state of the run in one line; in another one the units of the data, if any are leased."""
    left = time_left(history, facts)
    share = f"{shown_progress(history, facts):.0%}" + (f", {clock(left)} left" if left is not None else "")
    sites = "  ".join(
        f"{name} {site.state()}" + (f" step {site.step} loss {site.loss:.3f}" if site.loss is not None else "")
        for name, site in sorted(history.sites.items())
    )
    versions = " ".join(map(str, history.versions)) or "-"
    yield f"{clock(history.seconds):>7}  [{share}] versions {versions}  {sites}"
    if history.units:
        yield f"{'':>7}  units of the data: {units_shortly(history.units)}"


def make_view(history: RunHistory, facts: Facts) -> LiveView | PlainView:
    """Return the live screen on a terminal; plain lines when there is none, or under NO_COLOR, CI or TERM=dumb."""
    plain = any(os.environ.get(name) for name in ("NO_COLOR", "CI")) or os.environ.get("TERM") == "dumb"
    console = Console()
    if plain or not console.is_terminal:
        return PlainView(history, facts, Console(color_system=None, force_terminal=False, highlight=False))
    return LiveView(history, facts, console)
