"""A page of metrics is what Prometheus reads, on loopback unless told, and its labels cannot break it."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from diloco.launch.config import compose
from diloco.launch.errors import ConfigError
from diloco.launch.metrics import Spread, about, counter, gauge, histogram, host_and_port, page_at
from diloco.sync.agreement import PROTOCOL

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
        assert page["diloco_run_info"].samples[0].labels == {"run": "otter", "model": "4x128", "mode": "rebase"}
        assert page["diloco_build_info"].samples[0].labels["proto"] == str(PROTOCOL)
        assert not [name for name in page if not name.startswith("diloco_")], "nothing of the process is on it"
    with pytest.raises(OSError):  # noqa: PT011 — whichever way the system says that nobody listens
        read(address)


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
