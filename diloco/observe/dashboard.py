"""The live page of a run: the report's pictures during the run, for ``diloco dashboard`` and ``diloco up``.

One thread reads the run's events and polls its syncer, makes the page every ``EVERY_S`` seconds while there is a
viewer, and all viewers get the same text.  A viewer gets the changed parts as server-sent events; behind a proxy that
holds those back, its page fetches ``state`` instead.  The page loads nothing from elsewhere.  It shows what sites
report as text, and the page's policy forbids every script but its own.

The page only reads, except for a person who gives an operator's token in it.  The page keeps the token and sends it as
a header of each order; its server hands it to the syncer, which decides.  An order comes from the page's own origin
only, and must be one that the page offers at that moment.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
import time
from contextlib import contextmanager
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diloco.config.errors import ConfigError, VerbError
from diloco.observe.eventlog import event_blocks
from diloco.observe.history import RunHistory
from diloco.observe.metrics import BoundedServer
from diloco.observe.report import FRAME, blocks_of, page, parts_of, section, table
from diloco.observe.summary import summarize
from diloco.observe.text import (
    ROUND_COLUMNS,
    clock,
    round_cells,
    run_facts,
    site_cells,
    standby_line,
    syncer_facts,
    troubles,
)
from diloco.wire.options import is_loopback, is_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from diloco.observe.eventlog import Event

EVERY_S = 2.0
BEAT_S = 4.0
"""Longest time between two messages to a viewer, so that its page can tell a lost connection from a quiet run."""
SEND_S = 10.0
"""Timeout of one read or write on a viewer's connection."""
READ_S = 1.0
"""Longest time to read events before the page is made of those read so far."""
FIRST_S = 60.0
"""Timeout for the next page."""
VIEWERS_MAX = 600
ORDER_BYTES_MAX = 1 << 14

Status = dict[str, Any]


class Dashboard:
    """Makes the page of a run.

    ``events`` is the run's file of events; None: the history is made from the answers of ``ask`` from now on.
    ``config`` is the text of the run's configuration.  ``ask`` returns the syncer's status, or None when it does not
    answer, and each syncer's own by its address (``sections_now``).  ``operate`` carries out an order (``orders_of``)
    for the bearer of a token, and yields where it is done; None: the page only reads.
    """

    def __init__(
        self,
        title: str,
        events: Path | None,
        config: str,
        ask: Callable[[], tuple[Status | None, dict[str, Status]]],
        operate: Callable[[Mapping[str, Any], str], Iterable[str]] | None = None,
    ) -> None:
        self.changed = threading.Condition()
        self.viewers = 0
        self.serial = 0
        """Counts how often the page was made."""
        self.parts: dict[str, tuple[int, str]] = {}
        """By the part's id in the page: the serial number of its last change, and its HTML."""
        self.whole = ""
        self._title, self._events, self._config = title, events, config
        self.ask, self.operate = ask, operate
        self._history = RunHistory()
        self._blocks = event_blocks(events) if events is not None else None
        self.reads = False
        """Whether there are events in the file that the page does not show yet."""
        self._polled: Status = {}
        self._news = ((0, 0), "{}")
        self.ended = False

    def run(self) -> None:
        """Make the page again and again while there are viewers, until ``end``."""
        while not self.ended:
            with self.changed:
                self.changed.wait_for(lambda: self.viewers > 0 or self.ended)
            try:
                blocks = {} if self.ended else self.made()
            except Exception as error:  # An older syncer's answer may lack a field: the page says so and is made again.
                blocks = blocks_of(f"this page could not be made: {error!r}", [], [], good=False)
            self._show(blocks)
            with self.changed:
                self.changed.wait_for(lambda: self.ended, 0.0 if self.reads else EVERY_S)

    def end(self) -> None:
        """Stop the thread and release the viewers."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    @contextmanager
    def viewed(self) -> Iterator[None]:
        """Count a viewer."""
        with self.changed:
            self.viewers += 1
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.viewers -= 1

    def page(self) -> str:
        """Wait for the next version of the whole page and return it; the last one, or "", after ``FIRST_S``."""
        with self.changed:
            serial = self.serial
            self.changed.wait_for(lambda: self.serial > serial or self.ended, FIRST_S)
            return self.whole

    def since(self, serial: int) -> tuple[int, str]:
        """Return the newest serial number, and the parts that have changed since ``serial`` as JSON.

        Wait for a change, at most ``BEAT_S``.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.serial > serial or self.ended, BEAT_S)
            if self._news[0] != (serial, self.serial):  # The first viewer's thread serializes it for all.
                changed = {name: text for name, (at, text) in self.parts.items() if at > serial}
                self._news = (serial, self.serial), json.dumps(changed)
            return self.serial, self._news[1]

    def made(self) -> dict[str, str]:
        """Return the parts of the page as of now."""
        status, found = self.ask()
        try:
            self._take(status)
        except Exception:  # Half of it is no history: read it again, and say the error again.
            self._history, self._polled = RunHistory(), {}
            self._blocks = event_blocks(self._events) if self._events is not None else None
            raise
        why = "The run has ended." if self._history.ending else "No syncer answers."
        now = sections_now({} if status is None and self._history.ending else found, why)
        summary = summarize(self._history, status, {})
        state = self._history.run_status or self._history.ending or ("running" if status else "no syncer answers")
        if self.reads:
            state = f"reads the run's events: {clock(self._history.seconds)} of the run so far"
        tiles, sections = parts_of(self._history, summary, self._config, now)
        blocks = blocks_of(state, tiles, sections, good=self.reads or state in ("ok", "running", "finished"))
        if self.operate is not None:
            buttons = [(escape(order), escape(words)) for order, words in orders_of(found).items()]
            blocks["orders"] = " ".join(f'<button data-order="{order}">{words}</button>' for order, words in buttons)
        return blocks

    def _take(self, status: Status | None) -> None:
        """Take what is new into the history; of a long file as much as ``READ_S`` allows: the page comes soon."""
        until_s = time.monotonic() + READ_S
        if self._blocks is None and status is not None:
            new, self._polled = as_events(status, self._polled, time.time()), status
            for event in new:
                self._history.take(event)
        for block in self._blocks or ():
            for event in block:
                self._history.take(event)
            self.reads = bool(block)
            if not block or time.monotonic() >= until_s:
                break

    def _show(self, blocks: dict[str, str]) -> None:
        """Hand the parts to all viewers."""
        with self.changed:
            self.serial += 1
            live = LIVE.format(script=SCRIPT, operator=OPERATOR if self.operate is not None else "")
            self.whole = page(self._title, blocks, live=live) if blocks else ""
            self.parts = {name: part for name, part in self.parts.items() if name in blocks}
            for name, text in blocks.items():
                if self.parts.get(name, (0, None))[1] != text:
                    self.parts[name] = (self.serial, text)
            self.changed.notify_all()


def as_events(status: Status, before: Status, at: float) -> Iterator[Event]:
    """Yield the changes between two answers of a syncer, as the events that a run's file would have.

    An answer has only the newest versions, no rounds, so the time line shows no rounds.
    """

    def event(what: str, **fields: object) -> Event:
        return {**fields, "at": at, "who": "syncer", "what": what}

    fragments, sites = status["fragments"], status["sites"]
    if status["epoch"] != before.get("epoch"):
        yield event("syncer_started", epoch=status["epoch"], versions=[each["version"] for each in fragments])
    for name, site in sites.items():
        earlier, present = before.get("sites", {}).get(name, {}).get("status"), site["status"]
        if earlier is None and present == "silent":
            yield event("site_joined", site=name)  # It was in the run before this first answer.
        if present != earlier:
            word = present if present != "live" else "back" if earlier == "silent" else "joined"
            yield event(f"site_{word}", site=name)
        if site["heard_seconds_ago"] is not None:
            yield event("reported", **site | {"site": name, "versions": site["base_versions"]})
    for index, fragment in enumerate(fragments):
        run = {"run_tokens": status["run_tokens"], "progress_ppm": round(status["progress"] * 1e6)}
        yield event("published", fragment=index, version=fragment["version"], **run)
    if status["ending"] is not None:
        yield event("final", ending=status["ending"])


# --- This moment, from the syncers' answers ---------------------------------------------------------------------------

SITE_COLUMNS = (
    *("site", "state", "step", "loss", "tokens/s", "stall", "stale", "in flight"),
    *("round trip", "Mbit/s up", "Mbit/s down", "codec", "heard"),
)
_SITES_NOTE = (
    "What each site reports in its heartbeats. Stale: versions behind. Mbit/s: the mean since the syncer's start, "
    "of the link's rate as the site has measured it."
)
_ROUNDS_NOTE = (
    "Which updates wait for the next version, and for which sites the round waits. Each syncer counts its own "
    "fragments from 0."
)
_SYNCERS_NOTE = "Each syncer that this page asks, with its sites; below a syncer the regions that are sites of it."


def sections_now(found: Mapping[str, Status], why: str) -> list[str]:
    """Return the sections on sites, open rounds and syncers; ``found`` has each syncer's answer by its address.

    An answer is a status, that of a standby, or ``{"unreachable": why}``.  Where no syncer answers they are ``why``.
    """
    known = {address: each for address, each in found.items() if "fragments" in each}
    named = ["syncer"] if len(known) > 1 else []
    sites = [{"syncer": address, **site_cells(each, name)} for address, each in known.items() for name in each["sites"]]
    sites.sort(key=lambda row: row["site"])
    rounds = [{"syncer": address, **cells} for address, each in known.items() for cells in round_cells(each)]

    def rows_of(title: str, columns: Sequence[str], rows: list[dict[str, str]], note: str, none: str) -> str:
        told = [columns[0], *named, *columns[1:]]
        return section(title, "", table(told, [[row[column] for column in told] for row in rows]), note, none)

    names = {region: each["upstream"]["site"] for region, each in known.items() if each.get("upstream")}
    below = {
        address: [region for region, name in names.items() if region != address and name in each["sites"]]
        for address, each in known.items()
    }
    left, regions = dict(found), {region for inner in below.values() for region in inner}
    tree = "".join(_branch(address, below, left) for address in sorted(found, key=regions.__contains__))
    syncers = section("Syncers", "", f"<ul>{tree}</ul>", _SYNCERS_NOTE) if found else ""
    if not known:
        return [f'<p class="soft">{escape(why)}</p>', "", syncers]
    return [
        rows_of("Sites", SITE_COLUMNS, sites, _SITES_NOTE, "No site has joined."),
        rows_of("Open rounds", ROUND_COLUMNS, rounds, _ROUNDS_NOTE, "No round is open: no update waits."),
        syncers,
    ]


def _branch(address: str, below: Mapping[str, Sequence[str]], left: dict[str, Status]) -> str:
    """Return a syncer as an item of a list, with the regions ``below`` it; take them out of ``left``."""
    if (status := left.pop(address, None)) is None:
        return ""
    if "fragments" not in status:
        return f"<li>{escape(status.get('unreachable') or standby_line(status))}</li>"
    held = [f"fragments {','.join(map(str, status['held']))}"] if status.get("held") else []
    facts = [f"syncer {address}", *held, *run_facts(status), *syncer_facts(status)]
    wrong = "".join(f'<p class="wrong">{escape(each)}</p>' for each in [*troubles(status), *status.get("others", [])])
    regions = "".join(_branch(each, below, left) for each in below[address])
    names = f"<li>sites: {escape(', '.join(status['sites']) or 'none yet')}</li>"
    return f"<li>{escape(' · '.join(facts))}{wrong}<ul>{names}{regions}</ul></li>"


def orders_of(found: Mapping[str, Status]) -> dict[str, str]:
    """Return what an operator can do now: each order as JSON, and the words on its button.

    An order is a verb of ``diloco``, the words after the syncer, and the ``syncers``: all of the run, or for an update
    the one that holds it.
    """
    runs: dict[str, list[str]] = {}
    for address, status in found.items():
        if "fragments" in status:
            runs.setdefault(status["run_id"], []).append(address)
    told: list[tuple[str, list[object], list[str]]] = []
    for syncers in runs.values():
        states = {name: site["status"] for each in syncers for name, site in found[each]["sites"].items()}
        told.append(("drain", [], syncers))
        told += [("readmit" if states[name] == "evicted" else "evict", [name], syncers) for name in sorted(states)]
        for each in syncers:
            for name, site in found[each]["sites"].items():
                for held in site.get("held", []):
                    words = [name, held["fragment"], held["sequence"]]
                    told += [(verb, words, [each]) for verb in ("admit", "refuse")]
    orders = {}
    for verb, words, syncers in told:
        where = f" at {', '.join(syncers)}" if len(found) > 1 else ""
        order = json.dumps({"verb": verb, "words": words, "syncers": syncers})
        orders[order] = " ".join(map(str, [verb, *words])) + where
    return orders


# --- The page's server -----------------------------------------------------------------------------------------------

LIVE = """<p><label>Of the events, show lines with <input id="filter" type="search" autocomplete="off"></label></p>
<p class="wrong" id="heard" role="alert"></p>
{operator}
<script>{script}</script>"""
OPERATOR = """<section id="operator"><h2>Operate</h2>
<p class="soft">With an operator's token there are buttons here. The page forgets the token when it is closed.</p>
<p><label>Operator's token <input id="token" type="password" autocomplete="off"></label></p>
<p id="orders" hidden></p>
<p id="done" role="status"></p></section>"""


SCRIPT = resources.files("diloco.observe").joinpath("dashboard.js").read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS: Mapping[str, str] = {
    # The page's own script and style, by their digests, and nothing else.
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_digest(SCRIPT)}'; "
        f"style-src 'sha256-{_digest(FRAME.split('<style>')[1].split('</style>')[0])}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Accel-Buffering": "no",  # nginx passes events on as they come.
    "X-Content-Type-Options": "nosniff",
}


class _Handler(BaseHTTPRequestHandler):
    """One request of a viewer, and its connection."""

    server: _Server
    timeout = SEND_S

    def do_GET(self) -> None:
        """Send the page, its state, or its events."""
        dashboard, path = self.server.dashboard, urlsplit(self.path).path
        if self._is_foreign(f"http://{self.headers.get('Host')}", f"https://{self.headers.get('Host')}", None):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page answers under its own address only\n")
        elif path not in ("/", "/state", "/events"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "the page is at /\n")
        else:
            with dashboard.viewed():
                if path == "/":
                    self._answer(HTTPStatus.OK, "text/html; charset=utf-8", dashboard.page())
                elif path == "/state":
                    dashboard.page()
                    self._answer(HTTPStatus.OK, "application/json", dashboard.since(-1)[1])
                else:
                    self._begin(HTTPStatus.OK, "text/event-stream")
                    serial = 0
                    while not dashboard.ended:
                        serial, parts = dashboard.since(serial)
                        self.wfile.write(f"data: {parts}\n\n".encode())

    def do_POST(self) -> None:
        """Have an order carried out for the bearer of an operator's token, and say what came of it."""
        dashboard, host = self.server.dashboard, self.headers.get("Host")
        length = self.headers.get("Content-Length", "")[:9]
        order = self.rfile.read(min(int(length), ORDER_BYTES_MAX)) if length.isdecimal() else b""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        # A browser names the page's origin in every POST.  A token crosses a network encrypted only.
        local = [f"http://{host}"] if self.server.is_local else []
        status, said = HTTPStatus.FORBIDDEN, ""
        if self._is_foreign(*local, f"https://{host}"):
            said = "orders come from this page only; from another machine by https:// or ssh -L"
        elif dashboard.operate is None or urlsplit(self.path).path != "/operate":
            status, said = HTTPStatus.NOT_FOUND, "no orders are taken here"
        elif scheme != "Bearer" or not is_token(token):
            said = "give an operator's token"
        elif (text := order.decode(errors="replace")) not in orders_of(dashboard.ask()[1]):
            status, said = HTTPStatus.CONFLICT, "this is no longer offered: look at the page again"
        else:
            done = list[str]()
            try:
                done += dashboard.operate(json.loads(text), token)
                status, said = HTTPStatus.OK, ""
            except (VerbError, ConfigError) as error:  # The other syncers have done it.
                said = str(error)
            said = "; ".join(filter(None, (f"done at {', '.join(done)}" if done else "", said)))
        self._answer(status, "text/plain; charset=utf-8", f"{said}\n")

    def _is_foreign(self, *origins: str | None) -> bool:
        """Return whether the request may come from another page, which asks in its viewer's name."""
        host = self.headers.get("Host", "")  # Another page may let a name of its own point here.
        local = is_loopback(host) or is_loopback(f"{host}:80") or not self.server.is_local
        return not local or self.headers.get("Origin") not in origins

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        self._begin(status, kind)
        self.wfile.write(text.encode())

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log no request."""


class _Server(BoundedServer):
    def __init__(self, host: str, port: int, dashboard: Dashboard) -> None:
        self.dashboard, self.is_local = dashboard, is_loopback(f"{host}:{port}")
        super().__init__(host, port, _Handler, VIEWERS_MAX)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless it comes from a viewer that went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def served(dashboard: Dashboard, host: str, port: int) -> Iterator[str]:
    """Serve the page at ``host:port`` (0: a free port); yield its URL.  Raises ``OSError`` where it cannot listen."""
    server = _Server(host, port, dashboard)
    thread = threading.Thread(target=dashboard.run, name="dashboard", daemon=True)
    thread.start()
    with server.running("dashboard-server") as url:
        try:
            yield url
        finally:
            dashboard.end()
            thread.join(SEND_S)
