"""A page of metrics is what Prometheus reads, on loopback unless told, and its labels cannot break it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.observe import metrics
from diloco.observe.metrics import Spread, about, counter, gauge, histogram, host_and_port, page_at
from diloco.sync.agreement import PROTOCOL
from tests.runs.processes import wait_for

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
