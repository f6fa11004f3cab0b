"""``/metrics`` for Prometheus: what both pages are made of, and the small server behind them.

A page is computed when it is asked for, from the same status and events that ``diloco status`` and the live view show.
What is not measured has no metric: a name that is absent is better than a number that means nothing.  So there is none
of a pseudo-gradient's cosine and of a site's drift (the syncer judges the health of updates, and ``diloco status`` has
it of those that are held); of device memory and utilisation; of durations and retries of single transfers (a link's
round trip and rates are told, calls refused and connections lost are counted); of a checkpoint's duration; of time for
data, checkpoints, recovery (``compute`` has them all but the outer world's); of evaluations, which ``diloco eval``
writes into the run's events; and of tokens saved, which is what ``diloco_wan_raw_bytes_total`` says beside
``diloco_wan_bytes_total``.

Labels are ``site``, ``state``, ``outcome``, ``direction``, ``kind`` and ``code``, whose values are few; none is a
tensor, a round or a rank.  The page asks nobody who they are, so it listens on loopback unless a host is given.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from diloco import __version__
from diloco.launch.errors import ConfigError
from diloco.sync.agreement import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from diloco.launch.schema import RunConfig

Labels = TypeVar("Labels", bound="tuple[str, ...]")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LINKS = (
    ("link_rtt_seconds", "rtt_ns", 1e-9, "Round trip of the site's control calls, smoothed."),
    ("link_up_bytes_per_second", "up_bytes_per_s", 1.0, "Rate at which the site's updates were carried lately."),
    ("link_down_bytes_per_second", "down_bytes_per_s", 1.0, "Rate at which versions were carried to it lately."),
)
"""What a site has measured of its link, on its own page and on the syncer's."""
VERSIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)


class Spread:
    """How often a value fell below each bound: a histogram of one set of labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def into(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add what was counted to ``family``."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, self._sum)


class Page(Collector):
    """Turns ``families`` into a page; nothing else in the process is on it."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's hook."""
        with self._lock:  # One page at a time: two that ask at once must not make the syncer answer twice.
            yield from list(self._families())


def gauge(name: str, meaning: str, values: Mapping[Labels, float], *labels: str) -> GaugeMetricFamily:
    """A gauge with one value for each set of labels."""
    family = GaugeMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def counter(name: str, meaning: str, values: Mapping[Labels, float], *labels: str) -> CounterMetricFamily:
    """A counter; ``_total`` is added to its name."""
    family = CounterMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, meaning: str, values: Mapping[Labels, Spread], *labels: str) -> HistogramMetricFamily:
    """A histogram with one spread for each set of labels."""
    family = HistogramMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, spread in values.items():
        spread.into(family, key)
    return family


def about(config: RunConfig) -> Iterator[Metric]:
    """Which program this is, and of which run."""
    build = {"version": __version__, "proto": str(PROTOCOL)}
    yield InfoMetricFamily("diloco_build", "Version of the program, and the protocol that it speaks.", build)
    model = f"{config.model.layers}x{config.model.dim}"
    run = {"run": config.run.name or "", "model": model, "mode": config.outer.adopt}
    yield InfoMetricFamily(
        "diloco_run", "The run: its name, its model's layers x width, how versions are adopted.", run
    )


def host_and_port(key: str, text: str) -> tuple[str, int]:
    """Where to listen; a port alone means loopback.  ``ConfigError`` names ``key``."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 65536:
        raise ConfigError(f"{key} is {text!r}: host:port, or a port for loopback only; empty: no metrics")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextmanager
def page_at(key: str, text: str, families: Callable[[], Iterator[Metric]]) -> Iterator[str]:
    """Serve a page at ``text`` while the context lasts; gives its address, or nothing for an empty ``text``."""
    if not text:
        yield ""
        return
    host, port = host_and_port(key, text)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page(families))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"{key} is {text!r}: it cannot be listened at: {error.strerror or error}") from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
