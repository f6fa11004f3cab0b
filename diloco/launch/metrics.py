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
tensor, a round or a rank.  The page asks nobody who they are, so it listens on loopback unless a host is given, and
bounds what its callers can take up: connections, of which a silent one makes room for the next, pages that are made at
once, and the time of either.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
from bisect import bisect_left
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from diloco import __version__
from diloco.launch.errors import ConfigError
from diloco.sync.agreement import PROTOCOL
from diloco.wire.channel import StallWatch
from diloco.wire.door import Gate, TurnedAway, WaitingRoom
from diloco.wire.messages import Refusal

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
CONNECTIONS_MAX = 32
"""Of one page, open at once."""
SILENT_MAX = 8
"""Of them, those that have not said yet what they want; one more sends away who has waited longest."""
PAGES_MAX = 8
"""Made and sent at once; half of them for one address."""
REQUEST_S = 5.0
ANSWER_S = 15.0
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


class _Handler(MetricsHandler):
    """One connection: a request, its page, the end."""

    server: _Server

    def handle(self) -> None:
        """Read the request within its time, and answer it."""
        with ExitStack() as self._silent, self.server.stalls.guard(REQUEST_S, self._hang_up) as self._guard:
            self._silent.enter_context(self.server.silent.enter(self.client_address[0], self._hang_up))
            super().handle()

    def do_GET(self) -> None:  # noqa: N802 — the name that http.server wants
        """The page, or 503 with a time to come back."""
        self._silent.close()
        self._guard.limit(ANSWER_S)
        try:
            with self.server.pages.enter(self.client_address[0]):
                super().do_GET()
        except Refusal:
            self.server.turned_away.add(f"the latest from {self.client_address[0]}, when {PAGES_MAX} pages were made")
            body = b"too many pages are being made at once: come back in a second\n"
            self.send_response(503)
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _hang_up(self) -> None:
        """From another thread: this one reads the end of the connection, or cannot write to it."""
        self.server.turned_away.add(f"the latest from {self.client_address[0]}, was silent or slow")
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It is over already.


class _Server(socketserver.ThreadingTCPServer):
    """Listens for those who want the page."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry, tell: Callable[[str], None]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.stalls = StallWatch("stalls-metrics")
        self.silent = WaitingRoom(SILENT_MAX)
        self.pages = Gate("page of metrics", PAGES_MAX, PAGES_MAX // 2, pushback_ms=1000)
        self.turned_away = TurnedAway(tell)
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__((host, port), _Handler.factory(registry))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is a place for one more connection; where there is none it ends at once."""
        if self._places.acquire(blocking=False):
            return True
        self.turned_away.add(f"the latest from {client_address[0]}, when {CONNECTIONS_MAX} were open")
        return False

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread, to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away is no error of ours."""
        if not isinstance(sys.exception(), OSError | ValueError):
            logging.getLogger(__name__).exception("a page of metrics could not be made")

    def service_actions(self) -> None:
        """Twice a second, and after each connection."""
        self.turned_away.tell()

    def server_close(self) -> None:
        """Listen no more."""
        super().server_close()
        self.stalls.close()


@contextmanager
def page_at(
    key: str,
    text: str,
    families: Callable[[], Iterator[Metric]],
    emit: Callable[[str, dict[str, object]], None] = lambda what, fields: None,
) -> Iterator[str]:
    """Serve a page at ``text`` while the context lasts; gives its address, or nothing for an empty ``text``.

    ``emit`` is told when connections were hung up on, once a minute at most.
    """
    if not text:
        yield ""
        return
    host, port = host_and_port(key, text)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page(families))
    try:
        server = _Server(host, port, registry, lambda why: emit("note", {"note": "crowded", "why": f"{key}: {why}"}))
    except OSError as error:
        raise ConfigError(f"{key} is {text!r}: it cannot be listened at: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
