from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from html import unescape
from itertools import pairwise, product
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import pytest

from diloco.cli.status import commanded
from diloco.observe import dashboard, eventlog
from diloco.observe.dashboard import Dashboard, as_events, orders_of, sections_now, served
from diloco.observe.eventlog import Event
from diloco.observe.history import RunHistory
from diloco.observe.report import MARKS_MAX
from diloco.observe.text import site_cells
from diloco.syncer.server import Syncer
from tests.loopback.cluster import SiteThread, closed_port, eventually, serving
from tests.loopback.toy import Toy
from tests.observe.recorded import Recorder, append
from tests.wire.certificates import ADMIN, OBSERVER, A, written

BOUND_S = 30.0


class Run:
    """A run's folder and what its syncer answers; counts how often it is asked."""

    def __init__(self, folder: Path, events: list[Event]) -> None:
        self.file = folder / "events.jsonl"
        self.answer: dict[str, Any] | None = None
        self.asked = 0
        append(self.file, events)
        self.page = Dashboard("quiet-otter", self.file, "seed: 1", self.ask)

    def ask(self) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
        self.asked += 1
        return self.answer, {"a:1": self.answer} if self.answer and "fragments" in self.answer else {}


def connected(url: str) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=BOUND_S))


def got(url: str, path: str = "/", order: str | None = None, **headers: str) -> tuple[int, dict[str, str], str]:
    with connected(url) as connection:
        connection.request("GET" if order is None else "POST", path, order, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()


def posted(url: str, order: str, **headers: str) -> tuple[int, str]:
    """As the page does it, with the origin that a browser names, unless ``headers`` say otherwise."""
    status, _, said = got(url, "/operate", order, **{"Origin": url.rstrip("/"), **headers})
    return status, said


def messages(answer: http.client.HTTPResponse) -> Iterator[dict[str, str]]:
    """The parts in each of a stream's events."""
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def test_the_page_shows_the_run_loads_nothing_and_allows_its_own_script_alone(tmp_path: Path) -> None:
    with served(Run(tmp_path, Recorder(30).record()).page, "127.0.0.1", 0) as url:
        status, headers, text = got(url)
        assert status == 200
        for words in ("quiet-otter", "Loss against time", "Where every token went", "site-b", "The run has ended."):
            assert words in text
        assert not re.findall(r"""(?:src|href)=|\bstyle=|\bon[a-z]+=""", text)
        for tag, source in (("script", "script-src"), ("style", "style-src")):
            (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
            assert f"{source} 'sha256-{digest}'" in headers["Content-Security-Policy"]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert got(url, "/elsewhere")[0] == 404
        assert json.loads(got(url, "/state")[2]).keys() >= {"status", "tiles", "s0", "s1"}


def test_another_page_gets_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, Recorder(5).record())
    others: list[dict[str, str]] = [{"Host": "rebound.example"}, {"Origin": "http://a.example"}, {"Origin": "null"}]
    with served(run.page, "127.0.0.1", 0) as url:
        for headers, path in product(others, ("/", "/state", "/events")):
            status, _, text = got(url, path, **headers)
            assert (status, "otter" in text) == (403, False)
    assert run.asked == 0


def test_what_a_site_says_is_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    events = Recorder(5).record()
    at = events[-1]["at"]
    events += [
        {"at": at, "who": "syncer", "what": "site_joined", "site": bad},
        {"at": at, "who": bad, "what": "joined", "incarnation": 1, "versions": []},
        {"at": at, "who": bad, "what": "note", "note": "failed", "why": bad},
    ]
    run = Run(tmp_path, events)
    site = {**SITE, "status": bad, "link": {**SITE["link"], "up_codec": bad}}  # type: ignore[dict-item]
    arrived = {**OPEN, "arrived": [bad], "merging": False}
    run.answer = {**ANSWER, "run_id": bad, "sites": {bad: site}, "fragments": [arrived]}
    with served(run.page, "127.0.0.1", 0) as url:
        text = got(url)[2]
        assert "this page could not be made" not in text
        assert "&lt;script&gt;alert(1)" in text
        assert text.count("<script>") == 1
        assert bad not in "".join(json.loads(got(url, "/state")[2]).values())


SITE = {
    **{"status": "live", "step": 120, "loss": 2.5, "tokens_per_s": 8120.0, "tokens_processed": 9, "tokens_merged": 8},
    **{"staleness": 3, "stall_share": 0.0123, "payload_bytes_up": 1_250_000, "payload_bytes_down": 0, "held": []},
    "link": {"rtt_ns": 8e7, "up_bytes_per_s": 12_500_000, "down_bytes_per_s": 0, "up_codec": "int4:32", "why": ""},
    "heard_seconds_ago": 0.4,
}
OPEN = {"version": 4, "arrived": ["fra"], "awaited": ["iad"], "open_seconds": 2.5, "grace_seconds_left": 1.5}
ANSWER: dict[str, Any] = {
    **{"run_id": "otter", "phase": "running", "ending": None, "progress": 0.25, "run_tokens": 12_000, "epoch": 3},
    **{"up_seconds": 10.0, "memory_bytes": 3e8, "memory_bytes_max": 2e8, "disk_free_bytes": 4e10, "units": None},
    **{"journal": {"segment": 2, "bytes": 1e6}, "fragments": [{**OPEN, "merging": False}], "not_ready": ["disk_full"]},
    "sites": {"fra": SITE, "iad": {**SITE, "link": None}},
    "lease": {"place": "etcd", "valid": True, "renewed_seconds_ago": 1.2, "heir": "osl", "trouble": ""},
    "replication": {"mode": "sync", "standby": "osl", "following": True, "away_seconds": None, "detached": False},
}


def texts_of(sections: list[str]) -> list[str]:
    return [" ".join(re.sub("<[^>]*>", " ", each).split()) for each in sections]


def test_this_moment_has_each_site_the_open_rounds_and_each_syncer() -> None:
    sites, rounds, syncers = texts_of(sections_now({"a:1": ANSWER}, ""))
    assert "fra live 120 2.5000 8,120 1.23% 3 - 80 ms 1 of 100 - int4:32 0.4 s ago" in sites
    assert rounds.endswith("0 5 fra iad 2.5 s 1.5 s")
    for words in ("memory 300 MB", "disk 40.0 GB free", "journal 1.00 MB", "lease etcd renewed 1 s ago, heir osl"):
        assert words in syncers
    assert "standby osl follows TAKES NO UPDATES: disk_full sites: fra, iad" in syncers
    assert texts_of(sections_now({}, "It ended")) == ["It ended", "", ""]


def test_the_link_of_diloco_status_has_what_is_measured_and_chosen() -> None:
    chosen = {**SITE["link"], "why": "it is slow", "overlap_steps": 3}  # type: ignore[dict-item]
    links = SITE["link"], chosen, {**chosen, "rtt_ns": 0}, None
    told = [site_cells({**ANSWER, "sites": {"fra": {**SITE, "link": link}}}, "fra")["link"] for link in links]
    assert told == ["80 ms 100 Mbit/s/?", "80 ms 100 Mbit/s/? int4:32 overlap 3", "-", "-"]


def test_regions_stand_below_their_syncer_and_one_that_is_away_is_named() -> None:
    above = {"site": "fra", "base_versions": [3]}
    region = {**ANSWER, "run_id": "east", "upstream": above, "sites": {"east-1": SITE, "fra": SITE}}
    found = {"b:2": region, "a:1": ANSWER, "c:3": {"unreachable": "c:3 does not answer"}}
    sites, _, syncers = sections_now(found, "")
    assert sites.count("<td>b:2</td>") == 2
    top, below = re.findall(r"syncer (a:1|b:2)", syncers), syncers.index("b:2")
    assert top == ["a:1", "b:2"]
    assert syncers[:below].count("<ul>") - syncers[:below].count("</ul>") == 2, "it is inside the other's list"
    assert "site fra of the run above, based on its versions 3" in syncers
    assert "<li>c:3 does not answer</li>" in syncers
    mirrored = {"a:1": {**ANSWER, "upstream": {"site": "east-1", "base_versions": []}}, "b:2": region}
    assert len(re.findall("syncer [ab]:", sections_now(mirrored, "")[2])) == 2, "each once, whatever they say"


def test_all_viewers_hear_what_is_new_and_the_syncer_is_asked_for_all_of_them_at_once(tmp_path: Path) -> None:
    events = Recorder(30).record()
    run = Run(tmp_path, events[: len(events) // 2])
    run.answer = {"sites": {}, "units": None}
    with served(run.page, "127.0.0.1", 0) as url, ExitStack() as stack:
        viewers = [stack.enter_context(connected(url)) for _ in range(20)]
        for each in viewers:
            each.request("GET", "/events")
        streams = [messages(each.getresponse()) for each in viewers]
        for each in streams:
            assert next(each)["status"] == '<span class="ok">running</span>'
        append(run.file, events[len(events) // 2 :])
        for each in streams:
            changed = next(parts for parts in each if "status" in parts)
            assert "finished" in changed["status"]
            assert "site-c" in changed["s3"], "the chart of the losses"
        asked = run.asked
        unchanged = next(parts for parts in streams[0] if "tiles" not in parts)
        assert unchanged.keys() <= {"s0"}, "only what has changed is sent"
        assert run.asked <= asked + 3
    for each in streams:
        assert list(each) is not None, "the server's end is the end of each stream"


def test_a_page_that_cannot_be_made_says_so_and_the_next_one_may_be(tmp_path: Path) -> None:
    run = Run(tmp_path, Recorder(5).record())
    with served(run.page, "127.0.0.1", 0) as url:
        assert "Loss against time" in got(url)[2]
        run.answer = {"sites": {"site-a": 3}}  # No syncer answers so.
        eventually(lambda: "this page could not be made: TypeError" in got(url)[2], BOUND_S, "it says so")
        assert json.loads(got(url, "/state")[2]).keys() == {"status", "tiles"}, "no part without a place in the page"
        run.answer = None
        eventually(lambda: "Loss against time" in got(url)[2], BOUND_S, "it is made again")


def test_without_a_viewer_nothing_is_read_and_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    events = Recorder(5).record()
    at = float(str(events[-1]["at"]))
    for version in range(3, 4000):
        facts = {"fragment": 0, "version": version}
        weights = {"sites": {"site-a": 0.5, "site-b": 0.5}, "staleness": {"site-a": 0}}
        events.append({"at": at + version, "who": "syncer", "what": "outer_step", **facts, **weights})
        events.append({"at": at + version, "who": "syncer", "what": "published", **facts, "run_tokens": version})
    run = Run(tmp_path, events)
    with served(run.page, "127.0.0.1", 0) as url:
        assert run.asked == 0
        text = got(url)[2]
        assert len(text) < 500_000
        assert MARKS_MAX / 4 < len(re.findall('<rect class="(?:merge|round)', text)) <= MARKS_MAX


def test_the_page_of_a_long_file_comes_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "READ_S", 0.0)
    monkeypatch.setattr(eventlog, "BLOCK_BYTES", 10_000)
    page = Run(tmp_path, Recorder(30).record()).page
    first = page.made()
    assert "reads the run&#x27;s events: 0:" in first["status"]
    assert "Loss against time" in first["s3"]
    pages = 1
    while "reads" in (last := page.made())["status"]:
        pages += 1
    assert pages > 3
    assert "finished" in last["status"]


def test_a_syncers_answers_alone_make_the_history_of_its_run(tmp_path: Path) -> None:
    toy = Toy(folder=str(tmp_path), outer={"token_budget": 4000, "quorum": "all", "quorum_min": 2})
    history, before = RunHistory(), dict[str, Any]()
    with serving(toy) as (syncer, address, _):
        sites = [SiteThread(toy, name, address, step_s=0.01) for name in ("a", "b")]
        at, ended = 1000.0, False
        while not ended:
            ended = syncer.wait(0.3) is not None and at >= 1002
            for each in sites if ended else ():
                each.join(BOUND_S)
            status = json.loads(json.dumps(syncer.status()))
            for event in as_events(status, before, at):
                history.take(event)
            before, at = status, at + 1
            assert at < 1000 + BOUND_S / 0.3, "the run did not end"
    assert history.ending == "finished"
    assert history.versions == [fragment["version"] for fragment in status["fragments"]]
    assert history.run_tokens >= 4000
    assert history.progress == 1.0
    assert {name: site.step > 0 for name, site in history.sites.items()} == {"a": True, "b": True}


@pytest.mark.parametrize(
    ("statuses", "events", "left", "spans"),
    [
        ("live silent live", "joined silent back", False, [(0, None)]),
        ("silent live", "joined silent back", False, [(0, None)]),
        ("live left live", "joined left joined", False, [(0, 1), (2, None)]),
        ("live evicted", "joined evicted", True, [(0, 1)]),
        ("live left evicted", "joined left evicted", True, [(0, 1)]),
        ("left", "left", True, []),
    ],
)
def test_a_site_that_a_syncer_calls_silent_has_not_left(
    statuses: str, events: str, left: bool, spans: list[tuple[float, float | None]]
) -> None:
    """Its tokens of unknown fate may come back; those of a site that left or was evicted may not."""

    def answer(status: str) -> dict[str, Any]:
        sites = {"a": {"status": status, "heard_seconds_ago": None, "base_versions": [0]}}
        return {"epoch": 1, "fragments": [], "sites": sites, "ending": None}

    history, told = RunHistory(), list[str]()
    for at, (before, now) in enumerate(pairwise([None, *statuses.split()])):
        for event in as_events(answer(now), answer(before) if before else {}, at):
            history.take(event)
            told.append(event["what"])
    assert [what for what in told if what.startswith("site_")] == [f"site_{word}" for word in events.split()]
    site = history.sites["a"]
    assert (site.left, [(span.start_s, span.end_s) for span in site.spans]) == (left, spans)


# --- An operator at the page -----------------------------------------------------------------------------------------


@contextmanager
def operated(folder: Path, tokens: str = "") -> Iterator[tuple[Syncer, str, Dashboard]]:
    """A real syncer with the sites a and b, its page as `diloco dashboard` serves it, and the page's address."""
    toy = Toy(folder=str(folder), tokens=tokens, token=A)
    settings = [f"site.token_file={written(folder / 'own', OBSERVER)}"] if tokens else []
    with serving(toy) as (syncer, address, _), SiteThread(toy, "site-a", address, step_s=0.01) as site:
        site.log.wait_for("connected", 1, BOUND_S)

        def ask() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
            status = json.loads(json.dumps(syncer.status()))
            return status, {address: status}

        def operate(order: Mapping[str, Any], token: str) -> Iterator[str]:
            return commanded(order["verb"], order["words"], order["syncers"], settings, token)

        page = Dashboard("toy", None, "", ask, operate)
        with served(page, "127.0.0.1", 0) as url:
            yield syncer, url, page


def test_only_the_bearer_of_an_operators_token_operates_and_only_from_the_page(tmp_path: Path) -> None:
    with operated(tmp_path, written(tmp_path / "tokens.json")) as (syncer, url, page):
        assert ADMIN not in got(url)[2]
        parts = json.loads(got(url, "/state")[2])
        orders = [unescape(each) for each in re.findall('<button data-order="(.*?)">', parts["orders"])]
        drain, evict = orders
        assert json.loads(evict)["words"] == ["site-a"]
        [syncer_at] = page.ask()[1]
        bearer = {"Authorization": f"Bearer {ADMIN}"}
        for order in orders:
            for headers, words in (
                ({}, "give an operator's token"),
                ({"Authorization": "Bearer "}, "give an operator's token"),
                ({"Authorization": f"Bearer {OBSERVER}"}, "only an admin may"),
                ({"Authorization": f"Bearer {A}"}, "only an admin may"),
                ({"Authorization": "Bearer unknown-token-0123"}, "the token is not known"),
                ({**bearer, "Origin": "http://elsewhere.example"}, "orders come from this page only"),
                ({**bearer, "Origin": "null"}, "orders come from this page only"),
                ({**bearer, "Host": "rebound.example", "Origin": "http://rebound.example"}, "from this page only"),
            ):
                status, said = posted(url, order, **headers)
                assert (status, words in said) == (403, True), said
        assert got(url, "/operate")[0] == 404
        for other in ("", "{}", evict.replace("site-a", "site-b"), evict.replace("evict", "promote")):
            assert posted(url, other, **bearer) == (409, "this is no longer offered: look at the page again\n")
        status = syncer.status()
        assert (status["phase"], status["sites"]["site-a"]["status"]) == ("running", "live")  # type: ignore[index]
        assert posted(url, evict, **bearer) == (200, f"done at {syncer_at}\n")
        assert syncer.status()["sites"]["site-a"]["status"] == "evicted"  # type: ignore[index]
        assert posted(url, evict, **bearer)[0] == 409, "its button is another one now"
        assert posted(url, evict.replace("evict", "readmit"), **bearer) == (200, f"done at {syncer_at}\n")
        own, away = [f"site.token_file={tmp_path / 'own'}"], f"127.0.0.1:{closed_port()}"
        page.operate = lambda order, token: commanded(order["verb"], order["words"], [syncer_at, away], own, token)
        status, said = posted(url, drain, **bearer)
        assert (status, said.startswith(f"done at {syncer_at}; ")) == (403, True), "not all of the syncers did it"
        assert "does not answer" in said
        assert syncer.status()["phase"] != "running"


def test_a_syncer_that_lets_any_caller_in_takes_no_order_from_the_page(tmp_path: Path) -> None:
    with operated(tmp_path) as (syncer, url, page):
        for order in orders_of(page.ask()[1]):
            status, said = posted(url, order, Authorization=f"Bearer {ADMIN}")
            assert (status, "lets any caller in" in said) == (403, True), said
        assert syncer.status()["phase"] == "running"
    with served(Run(tmp_path, Recorder(5).record()).page, "127.0.0.1", 0) as url:
        assert "Operator" not in got(url)[2]
        assert posted(url, "{}", Authorization=f"Bearer {ADMIN}")[0] == 404, "the page of diloco up only reads"


def test_what_is_offered_is_for_all_syncers_of_a_run_or_for_the_one_that_holds_the_update() -> None:
    held = {"fragment": 0, "sequence": 17, "seconds": 3.0, "why": "norm"}
    one = {**ANSWER, "sites": {"fra": {**SITE, "held": [held]}}}
    other = {**ANSWER, "sites": {"fra": SITE, "iad": {**SITE, "status": "evicted"}}}
    found = {"a:1": one, "b:2": other, "c:3": {**ANSWER, "run_id": "east"}, "d:4": {"unreachable": "it is away"}}
    offered = {words: json.loads(order) for order, words in orders_of(found).items()}
    assert set(offered) == {
        *("drain at a:1, b:2", "evict fra at a:1, b:2", "readmit iad at a:1, b:2"),
        *("admit fra 0 17 at a:1", "refuse fra 0 17 at a:1", "drain at c:3", "evict fra at c:3", "evict iad at c:3"),
    }
    assert offered["admit fra 0 17 at a:1"] == {"verb": "admit", "words": ["fra", 0, 17], "syncers": ["a:1"]}


class Browser:
    """One page of a headless Chromium, told what to do over a pipe (the DevTools protocol)."""

    def __init__(self, to: int, messages: BinaryIO, width: int) -> None:
        self._to, self._messages, self._count = to, messages, 0
        self._session: dict[str, object] = {}
        self.said: list[str] = []
        """What the page's console has, its refusals too, but no advice."""
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._do("Emulation.setDeviceMetricsOverride", **size)
        self._do("Log.enable")

    def _do(self, method: str, **parameters: object) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            text = b""
            while not text.endswith(b"\0"):
                byte = self._messages.read(1)
                assert byte, "the browser has ended"
                text += byte
            answer = json.loads(text[:-1])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] != "verbose":
                self.said.append(str(answer["params"]["entry"]))
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def open(self, url: str) -> None:
        self._do("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        return self._do("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")


@contextmanager
def browsing(folder: Path, width: int) -> Iterator[Browser]:
    theirs_in, to = os.pipe()
    ours, theirs_out = os.pipe()
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    command += [f"--user-data-dir={folder}", "about:blank"]
    # It reads its pipe at 3 and writes it at 4.
    start = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
    with os.fdopen(ours, "rb") as messages:
        process = subprocess.Popen(
            start, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(to, messages, width)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(BOUND_S)
            os.close(to)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_keeps_the_page_up_to_date(tmp_path: Path, width: int) -> None:
    events = Recorder(30).record()
    run = Run(tmp_path, events[: len(events) // 2])
    run.answer = {"sites": {}, "units": None}
    status, heard = (f"document.getElementById('{name}').textContent" for name in ("status", "heard"))
    with browsing(tmp_path / "browser", width) as browser:
        with served(run.page, "127.0.0.1", 0) as url:
            browser.open(url)
            # Only its script, at the end, opens the log: what is folded away takes no focus.
            ready = f"document.readyState + ' ' + {status}"
            eventually(lambda: browser.value(ready) == "complete running", BOUND_S, "the page")
            browser.value("document.getElementById('log').focus()")
            browser.value("document.querySelector('.zoom input').click()")
            append(run.file, events[len(events) // 2 :])
            eventually(lambda: browser.value(status) == "finished", BOUND_S, "what came after the page was loaded")
            browser.value("filter.value = 'FAULT'; filter.dispatchEvent(new Event('input'))")
            lines = browser.value("document.getElementById('log').textContent").splitlines()
            assert lines
            assert all("FAULT" in line for line in lines)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "nothing overflows"
            assert browser.value("document.getElementById('log').parentElement.open")
            assert browser.value("document.activeElement.id") == "log", "a reader stays in place"
            of = "[...document.querySelectorAll('svg')].map((each) => {}.getBoundingClientRect().{})"
            first, *others = browser.value(of.format("each", "width"))
            assert first > 2.5 * max(others), "and the picture that was enlarged is as large"
            assert min(browser.value(of.format("each.querySelector('text')", "height"))) > 10, "its text can be read"
            scrolled = "[...document.querySelectorAll('pre, .scroll')]"
            assert browser.value(f"{scrolled}.every((each) => each.tabIndex === 0)"), "the keyboard reaches all of it"
            assert browser.said == [], "neither an error nor a refusal of the page's policy"
        eventually(lambda: "No answer since" in (browser.value(heard) or ""), BOUND_S, "the server has gone")
        with served(run.page, "127.0.0.1", int(str(urlsplit(url).port))):
            run.page.ended = False
            eventually(lambda: browser.value(heard) == "", BOUND_S, "it is back")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_in_a_browser_the_buttons_come_with_a_token_and_an_order_is_confirmed(tmp_path: Path) -> None:
    with operated(tmp_path, written(tmp_path / "tokens.json")) as (syncer, url, _), ExitStack() as stack:
        browser = stack.enter_context(browsing(tmp_path / "browser", 1280))
        browser.open(url)
        eventually(lambda: browser.value("orders.childElementCount") == 2, BOUND_S, "drain, and evict of a site")
        assert browser.value("orders.hidden")
        browser.value("confirm = (text) => { asked = text; return false; }")
        browser.value(f"token.value = '{ADMIN}'; token.dispatchEvent(new Event('input'))")
        assert not browser.value("orders.hidden")
        browser.value("orders.lastElementChild.click()")
        assert browser.value("asked") == "evict site-a: do it?"
        assert browser.value("done.textContent") == ""
        browser.value("confirm = () => true; orders.lastElementChild.click()")
        eventually(lambda: "evict site-a: done" in browser.value("done.textContent"), BOUND_S, "it is done")
        assert syncer.status()["sites"]["site-a"]["status"] == "evicted"  # type: ignore[index]
        eventually(lambda: browser.value("orders.textContent") == "drain readmit site-a", BOUND_S, "it can be undone")
        assert browser.said == [], "neither an error nor a refusal of the page's policy"
