"""A page of metrics is what Prometheus reads, on loopback unless told, and its labels cannot break it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.observe import metrics
from diloco.observe.metrics import Spread, about, counter, gauge, histogram, host_and_port, page_at
from diloco.sync.options import PROTOCOL
from tests.observe.test_site_metrics import page_of_a_site
from tests.observe.test_syncer_metrics import page_in_trouble, page_of_a_run
from tests.observe.test_syncer_metrics_standby import page_of_a_standby
from tests.runs.processes import ROOT, wait_for

NASTY = 'a"b\\c\nd'


def read(address: str) -> dict[str, Metric]:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def some() -> Iterator[Metric]:
    yield from about(compose(["run.name=otter"]))
    spread = Spread((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        spread.add(value)
    yield gauge("a", "A gauge.", {(NASTY,): 1.5}, "site")
    yield counter("b", "A counter.", {(): 3})
    yield histogram("c_seconds", "A histogram.", {("x",): spread}, "site")


def test_a_page_is_what_prometheus_reads_and_escapes_what_it_must() -> None:
    with page_at("site.metrics", "0", some) as address:
        assert address.startswith("http://127.0.0.1:")
        page = read(address)
        assert page["diloco_a"].samples[0].labels == {"site": NASTY}
        assert [(sample.name, sample.value) for sample in page["diloco_b"].samples] == [("diloco_b_total", 3.0)]
        buckets = {s.labels.get("le"): s.value for s in page["diloco_c_seconds"].samples if s.name.endswith("bucket")}
        assert buckets == {"1.0": 2.0, "2.0": 3.0, "+Inf": 4.0}
        assert page["diloco_run_info"].samples[0].labels == {"run": "otter", "model": "2x128", "mode": "rebase"}
        assert page["diloco_build_info"].samples[0].labels["proto"] == str(PROTOCOL)
        assert not [name for name in page if not name.startswith("diloco_")], "nothing of the process is on it"
    with pytest.raises(OSError):  # noqa: PT011 — whichever way the system says that nobody listens
        read(address)


def dialled(address: str, count: int) -> list[socket.socket]:
    host, _, port = address.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    return [socket.create_connection((host, int(port)), timeout=20) for _ in range(count)]


def is_over(connection: socket.socket, timeout_s: float) -> bool:
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def scraped(address: str) -> dict[str, Metric]:
    """A page; asked for again where the scrape was itself taken for a silent connection before its request was read."""
    for _ in range(10):
        with suppress(OSError):
            return read(address)
    raise AssertionError("a crowd of silent connections keeps every scrape out")


def test_silent_connections_make_room_and_a_scrape_is_answered_all_the_same() -> None:
    told: list[dict[str, object]] = []
    page = page_at("site.metrics", "0", some, lambda what, fields: told.append({"what": what, **fields}))
    with page as address, ExitStack() as open_sockets:
        silent = [open_sockets.enter_context(each) for each in dialled(address, 3 * metrics.CONNECTIONS_MAX)]
        assert "diloco_a" in scraped(address)
        left = [each for each in silent if not is_over(each, 0.05)]
        assert len(left) <= metrics.SILENT_MAX
        assert "diloco_a" in read(address)
        wait_for(lambda: told, "a word of it")
        (note,) = told
        assert (note["what"], note["note"]) == ("note", "crowded")
        assert "site.metrics: " in str(note["why"])
        assert "connections hung up on so far" in str(note["why"])


def test_who_sends_a_byte_now_and_then_is_hung_up_on_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.3)
    with page_at("site.metrics", "0", some) as address:
        (slow,) = dialled(address, 1)
        for byte in b"GET /metrics HTTP/1.1\r\n":
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                break
            if is_over(slow, 0.1):
                break
        else:
            pytest.fail("it was listened to for ever")
        slow.close()


def test_one_page_too_many_is_told_to_come_back() -> None:
    making, made = threading.Event(), threading.Event()

    def slow() -> Iterator[Metric]:
        making.set()
        made.wait(20)
        yield gauge("a", "A gauge.", {(): 1.0})

    with page_at("site.metrics", "0", slow) as address:
        asked = dialled(address, metrics.PAGES_MAX // 2)
        for each in asked:
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert making.wait(20)
        time.sleep(0.2)  # For the others, whose pages wait for the first.
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address, timeout=20)
        with caught.value as refused:
            assert (refused.code, refused.headers["Retry-After"]) == (503, "1")
            assert b"come back" in refused.read()
        made.set()
        assert all(each.recv(8) == b"HTTP/1.0" for each in asked)
        for each in asked:
            each.close()


def test_no_page_is_served_unless_one_is_asked_for() -> None:
    with page_at("site.metrics", "", some) as address:
        assert address == ""


def test_a_port_alone_is_loopback_and_a_host_must_be_named() -> None:
    assert host_and_port("x", "9100") == ("127.0.0.1", 9100)
    assert host_and_port("x", ":9100") == ("127.0.0.1", 9100)
    assert host_and_port("x", "0.0.0.0:9100") == ("0.0.0.0", 9100)
    assert host_and_port("x", "[::1]:9100") == ("::1", 9100)


@pytest.mark.parametrize("text", ["host", "host:", "host:port", "1.2.3.4:70000", "::x"])
def test_an_address_that_is_none_is_named_with_its_key(text: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"cluster\.syncer\.metrics is .*: host:port, or a port"),
        page_at("cluster.syncer.metrics", text, some),
    ):
        pass


def test_an_address_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be listened at"), page_at("site.metrics", text, some):
            pass


# --- The example alerts and dashboard speak of metrics that exist, with labels that they have ------------------------

NAME = re.compile(r"\bdiloco_[a-z_]+")
GROUPED = re.compile(r"\b(?:by|on)\s*\(([a-z, ]*)\)")
SELECTED = re.compile(r"(diloco_[a-z_]+)\{([a-z_]+)(?:!=|=~|=)\"[^\"]*\"\}")


def alerts() -> list[dict[str, Any]]:
    plain = yaml.safe_load((ROOT / "configs" / "monitoring" / "alerts.yaml").read_text())
    assert [group["name"] for group in plain["groups"]] == ["diloco"]
    return list(plain["groups"][0]["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads((ROOT / "configs" / "monitoring" / "dashboard.json").read_text())["panels"])


def expressions() -> list[str]:
    return [rule["expr"] for rule in alerts()] + [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every name that a page can have, with its labels."""
    made: Path = tmp_path_factory.mktemp("pages")
    (made / "checkpoints").mkdir()
    families: list[Metric] = [*page_of_a_run(made / "syncer")[0], *page_in_trouble()]
    families += [*page_of_a_site(made / "checkpoints"), *page_of_a_standby()]
    names = {family.name + ("_total" if family.type == "counter" else ""): set[str]() for family in families}
    for family in families:
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def test_every_metric_that_is_mentioned_is_on_a_page(exported: dict[str, set[str]]) -> None:
    mentioned = {name for expression in expressions() for name in NAME.findall(expression)}
    assert mentioned
    assert mentioned <= set(exported), mentioned - set(exported)


def test_every_label_that_is_mentioned_is_one_that_its_metrics_have(exported: dict[str, set[str]]) -> None:
    # A family without a sample in this small run shows no labels; those are on the page of every real one.
    bare = {"diloco_updates_corrupt_total", "diloco_calls_refused_total"}
    for expression in expressions():
        for name, label in SELECTED.findall(expression):
            assert label in exported[name], expression
        labels = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")} - {""}
        having = set().union(*(exported[name] for name in NAME.findall(expression)))
        assert labels <= having or set(NAME.findall(expression)) & bare, expression


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_a_rule_is_whole(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "warn")
    assert set(rule["annotations"]) == {"summary", "what"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


@pytest.mark.parametrize(
    "metric",
    [
        "updates_held",
        "backup_failing",
        "backup_age_seconds",
        "replication_following",
        "replication_detached",
        "replication_slow",
        "replication_behind_bytes",
        "identity_complaints",
        "lease_valid",
        "lease_trouble",
        "lease_heir",
        "standby_following",
        "standby_failed",
    ],
)
def test_what_an_operator_must_act_on_has_an_alert_and_a_panel(metric: str) -> None:
    assert [rule for rule in alerts() if f"diloco_{metric}" in NAME.findall(rule["expr"])]
    assert [panel for panel in panels() for each in panel["targets"] if f"diloco_{metric}" in each["expr"]]


def test_expressions_are_balanced() -> None:
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
        assert re.search(r"\[\d+[smh]\]", expression) or "rate(" not in expression, expression


def test_panels_do_not_lie_on_each_other() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels()]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)
