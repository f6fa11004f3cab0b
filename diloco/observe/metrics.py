"""``/metrics`` for Prometheus: the common parts of the site's and the syncer's page, and the small server behind them.

A page is computed for each request, from the same status and events that ``diloco status`` and the live view show.
Values that are not measured have no metric: a missing name is better than a meaningless number.  So there is none for a
pseudo-gradient's cosine and a site's drift (the syncer judges the health of updates, and ``diloco status`` shows it for
held ones); device memory and utilisation; durations and retries of single transfers (a link's round trip and rates are
reported, refused calls and lost connections are counted); a checkpoint's duration; time for data, checkpoints and
recovery (``compute`` includes them all, except the outer exchange's); evaluations, which ``diloco eval`` writes into
the run's events; and bytes saved, which follow from ``diloco_wan_raw_bytes_total`` and ``diloco_wan_bytes_total``.

Labels are ``site``, ``state``, ``outcome``, ``direction``, ``kind`` and ``code``, with few values each; none is a
tensor, a round or a rank.  The page authenticates no callers, so it listens on loopback unless a host is given, and
bounds what its callers can use: connections (a silent one makes room for the next), concurrent pages, and the time of
both.
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

from diloco.config.errors import ConfigError
from diloco.sync.agreement import PROTOCOL
from diloco.version import __version__
from diloco.wire.channel import Guard, StallWatch
from diloco.wire.door import Gate, TurnedAway, WaitingRoom
from diloco.wire.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from diloco.config.schema import RunConfig

Labels = TypeVar("Labels", bound="tuple[str, ...]")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LINKS = (
    ("link_rtt_seconds", "rtt_ns", 1e-9, "Round trip of the site's control calls, smoothed."),
    ("link_up_bytes_per_second", "up_bytes_per_s", 1.0, "Rate at which the site's updates were carried lately."),
    ("link_down_bytes_per_second", "down_bytes_per_s", 1.0, "Rate at which versions were carried to it lately."),
)
"""A site's measurements of its link, on its own page and on the syncer's: name, field, factor, help text."""
CONNECTIONS_MAX = 32
"""Maximum number of open connections to one page."""
SILENT_MAX = 8
"""Maximum number of connections without a request yet; one more closes the one that has waited longest."""
PAGES_MAX = 8
"""Maximum number of pages made and sent at once; at most half of them for one address."""
REQUEST_S = 5.0
ANSWER_S = 15.0
VERSIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)


class Spread:
    """A histogram for one set of labels: counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def into(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the counts to ``family``."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, self._sum)


class Page(Collector):
    """Collects only ``families`` into a page, no other metrics of the process."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; prometheus_client calls this."""
        with self._lock:  # One page at a time: concurrent requests must not query the syncer concurrently.
            yield from list(self._families())


def gauge(name: str, meaning: str, values: Mapping[Labels, float], *labels: str) -> GaugeMetricFamily:
    """Return a gauge with one value for each set of labels."""
    family = GaugeMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def counter(name: str, meaning: str, values: Mapping[Labels, float], *labels: str) -> CounterMetricFamily:
    """Return a counter; ``_total`` is added to its name."""
    family = CounterMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, meaning: str, values: Mapping[Labels, Spread], *labels: str) -> HistogramMetricFamily:
    """Return a histogram with one ``Spread`` for each set of labels."""
    family = HistogramMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, spread in values.items():
        spread.into(family, key)
    return family


def about(config: RunConfig) -> Iterator[Metric]:
    """Yield the metrics with the program's version and protocol, and the run's name and model."""
    build = {"version": __version__, "proto": str(PROTOCOL)}
    yield InfoMetricFamily("diloco_build", "Version of the program, and the protocol that it speaks.", build)
    model = f"{config.model.layers}x{config.model.dim}"
    run = {"run": config.run.name or "", "model": model, "mode": config.outer.adopt}
    yield InfoMetricFamily(
        "diloco_run", "The run: its name, its model's layers x width, how versions are adopted.", run
    )


def host_and_port(key: str, text: str) -> tuple[str, int]:
    """Parse the address to listen on; a port alone means loopback.  ``ConfigError`` names ``key``."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 65536:
        raise ConfigError(f"{key} is {text!r}: host:port, or a port for loopback only; empty: no metrics")
    return host.strip("[]") or "127.0.0.1", int(port)


class _Handler(MetricsHandler):
    """Handles one connection: one request and its page."""

    server: _Server

    def handle(self) -> None:
        """Read the request within its timeout, and answer it."""
        with ExitStack() as self._silent, Guard(self.server.stalls, REQUEST_S, self._hang_up) as self._guard:
            self._silent.enter_context(self.server.silent.enter(self.client_address[0], self._hang_up))
            super().handle()

    def do_GET(self) -> None:  # noqa: N802 — the name that http.server wants
        """Send the page, or 503 with ``Retry-After``."""
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
        """Shut the connection down, from another thread: the handler then reads its end, or fails to write to it."""
        self.server.turned_away.add(f"the latest from {self.client_address[0]}, was silent or slow")
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It is over already.


class _Server(socketserver.ThreadingTCPServer):
    """Listens for requests for the page."""

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
        """Return whether one more connection is allowed; otherwise it is closed at once."""
        if self._places.acquire(blocking=False):
            return True
        self.turned_away.add(f"the latest from {client_address[0]}, when {CONNECTIONS_MAX} were open")
        return False

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the connection to its end, in its own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless it comes from a peer that disconnected."""
        if not isinstance(sys.exception(), OSError | ValueError):
            logging.getLogger(__name__).exception("a page of metrics could not be made")

    def service_actions(self) -> None:
        """Report refused connections; the server calls this twice a second, and after each connection."""
        self.turned_away.tell()

    def server_close(self) -> None:
        """Stop listening."""
        super().server_close()
        self.stalls.close()


@contextmanager
def page_at(
    key: str,
    text: str,
    families: Callable[[], Iterator[Metric]],
    emit: Callable[[str, dict[str, object]], None] = lambda what, fields: None,
) -> Iterator[str]:
    """Serve a page at address ``text`` while the context lasts; yield its URL, or "" for an empty ``text``.

    ``emit`` is called when connections were closed, at most once a minute.
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
