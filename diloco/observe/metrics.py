"""``/metrics`` for Prometheus: the pages of a site, of the syncer and of a standby, and the small server behind them.

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
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from diloco.config.errors import ConfigError
from diloco.observe.history import FP32_BYTES, mapping
from diloco.observe.text import number, whole
from diloco.sync.options import PROTOCOL
from diloco.sync.state import Status
from diloco.version import __version__
from diloco.wire.channel import Guard, StallWatch
from diloco.wire.door import Gate, TurnedAway, WaitingRoom
from diloco.wire.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prometheus_client.metrics_core import Metric

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event


T = TypeVar("T")
Kind = TypeVar("Kind", GaugeMetricFamily, CounterMetricFamily)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LINKS = (
    ("link_rtt_seconds", "rtt_ns", 1e-9, "Round trip of the site's control calls, smoothed."),
    ("link_up_bytes_per_second", "up_bytes_per_s", 1.0, "Recent rate of the site's updates."),
    ("link_down_bytes_per_second", "down_bytes_per_s", 1.0, "Recent rate of the versions sent to it."),
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
STOP_S = 10.0


class Spread:
    """A histogram for one set of labels: ``counts`` of the values up to each of ``bounds``."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Page(Collector):
    """Collects only ``families`` into a page, no other metrics of the process."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; prometheus_client calls this."""
        with self._lock:  # One page at a time: concurrent requests must not query the syncer concurrently.
            yield from list(self._families())


def _labelled(values: Mapping[Any, T] | T | None) -> dict[tuple[str, ...], T]:
    """Return ``values`` by their labels: a text is one label, a value alone has none, and None is no value."""
    if not isinstance(values, Mapping):
        return {} if values is None else {(): values}
    return {(key,) if isinstance(key, str) else key: value for key, value in values.items()}


def _family(
    kind: type[Kind], name: str, meaning: str, values: Mapping[Any, float] | float | None, *labels: str
) -> Kind:
    """Return a family with the values of ``_labelled``; ``_total`` is added to a counter's name."""
    family = kind(f"diloco_{name}", meaning, labels=labels)
    for key, value in _labelled(values).items():
        family.add_metric(key, value)
    return family


gauge = partial(_family, GaugeMetricFamily)
counter = partial(_family, CounterMetricFamily)


def histogram(name: str, meaning: str, values: Mapping[Any, Spread] | Spread, *labels: str) -> HistogramMetricFamily:
    """Return a histogram with the spreads of ``_labelled``."""
    family = HistogramMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for key, spread in _labelled(values).items():
        bounds = [*map(str, spread.bounds), "+Inf"]
        family.add_metric(key, list(zip(bounds, accumulate(spread.counts), strict=True)), spread.sum)
    return family


def about(config: RunConfig) -> Iterator[Metric]:
    """Yield the metrics with the program's version and protocol, and the run's name and model."""
    build = {"version": __version__, "proto": str(PROTOCOL)}
    yield InfoMetricFamily("diloco_build", "Version of the program, and the protocol that it speaks.", build)
    model = f"{config.model.layers}x{config.model.dim}"
    run = {"run": config.run.name or "", "model": model, "mode": config.outer.adopt}
    meaning = "The run: its name, its model's layers x width, how versions are adopted."
    yield InfoMetricFamily("diloco_run", meaning, run)


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
        with suppress(OSError):  # It may be over already.
            self.connection.shutdown(socket.SHUT_RDWR)


class BoundedServer(socketserver.ThreadingTCPServer):
    """Handles at most ``connections_max`` connections at once, each in its own thread; one more is closed at once."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: Callable[..., Any], connections_max: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._host = f"[{host}]" if ":" in host else host
        self._places = threading.BoundedSemaphore(connections_max)
        super().__init__((host, port), handler)

    @contextmanager
    def running(self, name: str) -> Iterator[str]:
        """Serve in a thread ``name``, which ends with the context; yield the URL."""
        thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        thread.start()
        try:
            yield f"http://{self._host}:{self.server_address[1]}/"
        finally:
            self.shutdown()
            self.server_close()
            thread.join(STOP_S)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether one more connection is allowed."""
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Server(BoundedServer):
    """Listens for requests for the page."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, tell: Callable[[str], None]) -> None:
        self.stalls = StallWatch("stalls-metrics")
        self.silent = WaitingRoom(SILENT_MAX)
        self.pages = Gate("page of metrics", PAGES_MAX, PAGES_MAX // 2, pushback_ms=1000)
        self.turned_away = TurnedAway(tell)
        super().__init__(host, port, _Handler.factory(registry), CONNECTIONS_MAX)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether one more connection is allowed; count those that are not."""
        if super().verify_request(request, client_address):
            return True
        self.turned_away.add(f"the latest from {client_address[0]}, when {CONNECTIONS_MAX} were open")
        return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless it comes from a peer that disconnected."""
        if not isinstance(sys.exception(), OSError | ValueError):
            logging.getLogger(__name__).exception("a page of metrics could not be made")

    def service_actions(self) -> None:
        """Report refused connections; the server calls this twice a second, and after each connection."""
        self.turned_away.tell()


@contextmanager
def page_at(
    key: str,
    text: str,
    families: Callable[[], Iterator[Metric]],
    emit: Callable[[str, dict[str, object]], None] = lambda what, fields: None,
) -> Iterator[str]:
    """Serve a page at address ``text`` (host:port; a port alone means loopback); yield its URL, or "" for no ``text``.

    ``emit`` is called when connections were closed, at most once a minute.  ``ConfigError`` names ``key``.
    """
    if not text:
        yield ""
        return
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 65536:
        raise ConfigError(f"{key} is {text!r}: host:port, or a port for loopback only; empty: no metrics")
    host = host.strip("[]") or "127.0.0.1"
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page(families))
    try:
        server = _Server(
            host, int(port), registry, lambda why: emit("note", {"note": "crowded", "why": f"{key}: {why}"})
        )
    except OSError as error:
        raise ConfigError(f"{key} is {text!r}: cannot listen there: {error.strerror or error}") from error
    with closing(server.stalls), server.running("metrics") as url:
        yield f"{url}metrics"


# --- A site's page of metrics, from its own events and its newest checkpoint -----------------------------------------


class SiteMetrics:
    """Takes the site's events, and makes the page.  ``numels`` has the number of values of each fragment."""

    def __init__(self, config: RunConfig, numels: Sequence[int], checkpoints: Path) -> None:
        self._config = config
        self._numels = numels
        self._checkpoints = checkpoints
        self._lock = threading.Lock()
        self._last: dict[str, Event] = {}
        """The latest event of each kind."""
        self._step_s = Spread(SECONDS)
        self._pushes = Counter[str]()
        self._canaries = Counter[str]()
        self._raw = {("up", "update"): 0, ("down", "version"): 0}
        self._out_of_reach: set[object] = set()
        """Of several syncers: the numbers of those that are lost."""
        self._disconnects = 0

    def take(self, event: Event) -> None:
        """Take the next event, from the log's thread."""
        with self._lock:
            self._last[str(event["what"])] = event
            match event["what"]:
                case "step":
                    self._step_s.add(number(event, "step_s") or 0.0)
                case "pushed":
                    outcome = str(event.get("outcome"))
                    self._pushes[outcome] += 1
                    if outcome == "accepted":
                        self._raw["up", "update"] += FP32_BYTES * self._numels[whole(event, "fragment")]
                case "fetched":
                    self._raw["down", "version"] += FP32_BYTES * self._numels[whole(event, "fragment")]
                case "connected":
                    self._out_of_reach.discard(event.get("of_syncer"))
                case "disconnected":
                    self._out_of_reach.add(event.get("of_syncer"))
                    self._disconnects += 1
                case "canary":
                    outcome = {True: "same", False: "different"}.get(event.get("same"), "failed")  # type: ignore[call-overload]
                    self._canaries[outcome] += 1

    def families(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        yield from about(self._config)
        with self._lock:
            yield from self._of_events()
        yield from self._of_checkpoint()

    def _of_events(self) -> Iterator[Metric]:
        of, moves = self._of_site, ("direction", "kind")
        yield of(histogram, "site_step_duration_seconds", "Time that an inner step took.", self._step_s)
        for what, name, key, meaning in (
            ("step", "site_step_loss_nats", "loss", "Loss of the latest step, in nats per token."),
            ("step", "site_grad_norm", "grad_norm", "Norm of its gradient, before clipping."),
            ("step", "site_learning_rate", "lr", "Its learning rate."),
            ("sealed", "pseudo_gradient_norm", "norm", "Norm of the latest update."),
        ):
            yield of(gauge, name, meaning, number(self._last.get(what, {}), key))
        if (meter := self._last.get("meter")) is not None:
            train_s, stall_s = number(meter, "train_s") or 0.0, number(meter, "stall_s") or 0.0
            spent = {"compute": max(0.0, train_s - stall_s), "sync_wait": stall_s}
            yield of(counter, "site_time_seconds", "Time of the training loop, by its use.", spent, "state")
            meaning = "Updates sent whose fate is not known here."
            yield of(gauge, "site_updates_in_flight", meaning, whole(meter, "in_flight"))
            moved = {("up", "update"): whole(meter, "bytes_up"), ("down", "version"): whole(meter, "bytes_down")}
            meaning = "Bytes of updates sent and versions received, re-sent ones too."
            yield of(counter, "wan_bytes", meaning, moved, *moves)
            for name, key, scale, meaning in LINKS:
                value = number(meter, f"link_{key}")
                yield of(gauge, name, meaning, value * scale if value else None)
        yield of(counter, "wan_raw_bytes", "Bytes of the same updates and versions in fp32.", self._raw, *moves)
        yield of(counter, "site_pushes", "Answers to updates that were sent.", self._pushes, "outcome")
        meaning = "Canaries by what they found: same, different, failed."
        yield of(counter, "canaries", meaning, self._canaries, "outcome")
        connected = float("connected" in self._last and not self._out_of_reach)
        yield of(gauge, "site_connected", "1 while the site hears the syncer.", connected)
        yield of(counter, "site_disconnects", "Times that the site lost the syncer.", self._disconnects)

    def _of_site(self, family: Callable[..., Metric], name: str, meaning: str, values: Any, *labels: str) -> Metric:
        """Return a family with the site as its first label."""
        of_site = {(self._config.site.id, *key): value for key, value in _labelled(values).items()}
        return family(name, meaning, of_site, "site", *labels)

    def _of_checkpoint(self) -> Iterator[Metric]:
        """Yield the metrics of the newest whole checkpoint: it gets its name only once it is durable."""
        from diloco.inner import checkpoint

        for name in reversed(checkpoint.names(self._checkpoints)):
            path = self._checkpoints / name
            try:
                at, size = path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir())
            except FileNotFoundError:
                continue  # A newer one has just replaced it.
            yield self._of_site(gauge, "checkpoint_timestamp_seconds", "When the newest checkpoint was written.", at)
            yield self._of_site(gauge, "checkpoint_bytes", "Its size.", size)
            return


# --- The syncer's page of metrics ------------------------------------------------------------------------------------

VERSIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)


class SyncerMetrics:
    """Takes the syncer's events, and makes the page."""

    def __init__(self, config: RunConfig, status: Callable[[], dict[str, Any]]) -> None:
        self._config = config
        self._status = status
        self._lock = threading.Lock()
        self._last: dict[str, Event] = {}
        """The latest event of each kind."""
        self._staleness: dict[str, Spread] = {}
        self._step_s = Spread(SECONDS)
        # As in ``syncer.status.Tally``.
        self._stage_s = {stage: Spread(SECONDS) for stage in ("receive", "read", "fused", "digest", "publish")}
        self._snapshot_s = Spread(SECONDS)

    def take(self, event: Event) -> None:
        """Take the next event, from the log's thread."""
        with self._lock:
            self._last[str(event["what"])] = event
            match event["what"]:
                case "outer_step" | "published" as what:
                    for stage, spread in self._stage_s.items():
                        if (seconds := number(event, f"{stage}_s")) is not None:
                            spread.add(seconds)
                    if what == "outer_step":
                        self._step_s.add(number(event, "seconds") or 0.0)
                        for site, staleness in mapping(event, "staleness").items():
                            self._staleness.setdefault(site, Spread(VERSIONS)).add(staleness)
                case "snapshot":
                    self._snapshot_s.add(number(event, "seconds") or 0.0)

    def families(self) -> Iterator[Metric]:
        """Yield all metrics as of now; none of the run while the syncer starts or stops."""
        yield from about(self._config)
        with self._lock:
            yield from self._of_events()
        try:
            status = self._status()
        except Refusal:
            return
        yield from _of_run(status)
        yield from _of_sites(status["sites"])
        yield from _of_safety(status, self._config.cluster.syncer.backup_every_s)

    def _of_events(self) -> Iterator[Metric]:
        yield histogram("update_staleness_versions", "Age of merged updates, in versions.", self._staleness, "site")
        step, snapshot = self._last.get("outer_step", {}), self._last.get("snapshot", {})
        yield gauge("update_weight_ratio", "Weight in the latest outer step.", mapping(step, "sites"), "site")
        yield histogram("outer_step_duration_seconds", "Time that an outer step took.", self._step_s)
        meaning = "Time of one stage of a round: receive, read, fused (decode, merge, step, encode), digest, publish."
        yield histogram("round_stage_duration_seconds", meaning, self._stage_s, "stage")
        yield histogram("snapshot_duration_seconds", "Time that a snapshot took to be durable.", self._snapshot_s)
        for event, name, key, meaning in (
            (step, "merged_pseudo_gradient_norm", "norm", "Norm of the latest merged pseudo-gradient."),
            (snapshot, "snapshot_timestamp_seconds", "at", "When the latest snapshot was durable."),
            (snapshot, "snapshot_bytes", "bytes", "Its size."),
        ):
            yield gauge(name, meaning, number(event, key))


def _of_run(status: Mapping[str, Any]) -> Iterator[Metric]:
    versions = sum(fragment["version"] for fragment in status["fragments"])
    yield gauge("outer_version", "Outer steps published, over all fragments.", versions)
    ready = float(not status["not_ready"])
    yield gauge("syncer_ready", "1 while updates are taken in; diloco status says why not.", ready)
    for name, key, meaning in (
        ("syncer_epoch", "epoch", "Rises with every start, and by a million or more when a standby is promoted."),
        ("run_lineage", "lineage", "1, or of a restored run a Unix time or one more than before."),
        ("syncer_disk_free_bytes", "disk_free_bytes", "Free space on the disk of the syncer's data."),
        ("syncer_memory_bytes_max", "memory_bytes_max", "Memory that the run may take at the syncer at most."),
        ("staleness_max_versions", "staleness_max", "Versions that an update may be behind: outer.staleness_max."),
        ("run_progress_ratio", "progress", "Share of the run that is done, 0 to 1."),
    ):
        yield gauge(name, meaning, status[key])
    if (lineage := status["lineage"]) > 1:
        yield gauge("run_restored_timestamp_seconds", "When the run was restored last.", lineage)
    yield counter("run_tokens", "Tokens in the published model.", status["run_tokens"])
    meaning = "Updates refused before they were accepted; outcome is the reason, or the field that was wrong."
    yield counter("refused_at_the_door", meaning, status["refused_at_the_door"], "outcome")
    if (units := status["units"]) is not None:
        places = {place: float(units[place]) for place in ("merged", "partly", "in_hand", "given_back")}
        meaning = "Units of the data that were ever leased, by where they are: merged, partly, in_hand or given_back."
        yield gauge("data_units", meaning, places, "place")
        for name, meaning in (
            ("processed", "Units that accepted updates have gone through, as often as a site did."),
            ("reissued", "Units leased again, after their site was gone or had given them up."),
            ("repeated", "Units merged again, or drawn again by a site that had no other."),
        ):
            yield counter(f"data_units_{name}", meaning, units[name])
    calls = status["calls"]
    refused = [name for name in calls if name.startswith("refused_")]
    codes = {name.removeprefix("refused_").upper(): calls[name] for name in refused}
    yield counter("calls_refused", "Calls refused, by gRPC's code.", codes, "code")
    for name, key, meaning in (
        ("calls_failed", "internal", "Calls that met a defect of the syncer."),
        ("calls_broken_off", "broken_off", "Streams whose other end went away."),
        ("connections_hung_up", "hung_up", "Idle connections that were closed to make room for others."),
    ):
        yield counter(name, meaning, calls.get(key, 0))
    moved = {"up": calls.get("payload_bytes_in", 0), "down": calls.get("payload_bytes_out", 0)}
    yield counter("syncer_payload_bytes", "Payload that came from sites (up) and went to them.", moved, "direction")


def _of_sites(sites: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    fates: dict[tuple[str, str], float] = {}
    for name, site in sites.items():
        fates[name, "merged"] = site["updates_merged"]
        fates |= {(name, reason): count for reason, count in site["updates_refused"].items()}
    yield gauge("sites", "Sites by their state.", Counter(site["status"] for site in sites.values()), "state")
    yield counter("updates", "Accepted updates by their fate: merged, or the reason.", fates, "site", "outcome")
    restarts = {name: site["incarnation"] - 1 for name, site in sites.items()}
    yield counter("site_restarts", "Processes that have joined as the site, less one.", restarts, "site")
    meaning = "Accepted updates of the site without a fate."
    yield gauge("site_updates_undecided", meaning, _told(sites, "undecided"), "site")
    held = {name: [float(each["seconds"]) for each in site["held"]] for name, site in sites.items()}
    meaning = "Updates that wait for an operator's decision: diloco admit, diloco refuse."
    yield gauge("updates_held", meaning, {name: len(seconds) for name, seconds in held.items()}, "site")
    longest = {name: max(seconds, default=0.0) for name, seconds in held.items()}
    yield gauge("update_held_seconds", "Seconds that the oldest of them has waited.", longest, "site")
    # Of present sites only: the last values of a site that is gone would stay for ever.
    present = {name: site for name, site in sites.items() if site["status"] not in (Status.LEFT, Status.EVICTED)}
    for family, key, meaning in (
        ("site_staleness_versions", "staleness", "Versions that the site's oldest base is behind."),
        ("site_loss_nats", "loss", "Loss of recent steps in the site's last heartbeat, in nats per token."),
        ("site_tokens_per_second", "tokens_per_s", "Tokens a second since the site's process began."),
        ("site_stall_ratio", "stall_share", "Share of the site's time spent in the outer exchange, 0 to 1."),
    ):
        yield gauge(family, meaning, _told(present, key), "site")
    links = {name: site["link"] for name, site in present.items() if site.get("link")}
    for family, key, scale, meaning in LINKS:
        yield gauge(family, meaning, {name: link[key] * scale for name, link in links.items() if link[key]}, "site")
    for family, key, meaning in (
        ("site_tokens", "tokens_processed", "Tokens that the site has trained on."),
        ("site_tokens_merged", "tokens_merged", "Tokens of the site that are in the published model."),
        ("site_steps", "step", "Inner steps of the site."),
        ("updates_corrupt", "updates_corrupt", "Updates that decoded to other values here than at the site."),
        ("bases_differed", "bases_differed", "Bases whose values at the site differed from the published ones."),
    ):
        yield counter(family, meaning, _told(sites, key), "site")
    now = time.time()
    heard = {site: now - ago for site, ago in _told(present, "heard_seconds_ago").items()}
    yield gauge("site_heartbeat_timestamp_seconds", "When the syncer last heard the site.", heard, "site")


def _of_safety(status: Mapping[str, Any], backup_every_s: float) -> Iterator[Metric]:
    """Yield the state of backups, the standby, the files for authentication, and the lease; none where one is off."""
    if (backup := status["backup"]) is not None:
        yield gauge("backup_failing", "1 while the latest backup failed.", float(bool(backup["failing"])))
        yield gauge("backup_interval_seconds", "How often a backup is made.", backup_every_s)
        meaning = "Seconds since the last good backup of this process; before its first, since it began."
        yield gauge("backup_age_seconds", meaning, backup["without_s"])
        if (age_s := backup["age_s"]) is not None:
            yield gauge("backup_timestamp_seconds", "Time of this process's last good backup.", time.time() - age_s)
    if (replication := status["replication"])["mode"] != "off":
        for name, meaning in (
            ("following", "1 while a standby is heard."),
            ("detached", "1 while the run continues on one disk and waits for no standby."),
            ("slow", "1 while the syncer hears the standby but does not wait for it, since it takes too long."),
        ):
            yield gauge(f"replication_{name}", meaning, float(replication[name]))
        away_s = replication["away_seconds"] or 0.0
        yield gauge("replication_away_seconds", "Seconds without a standby; 0 while one is heard.", away_s)
        if (behind := replication["behind_bytes"]) is not None:
            meaning = "Bytes of the journal that the standby lacks, while both write the same segment."
            yield gauge("replication_behind_bytes", meaning, behind)
    meaning = "Files of certificates, tokens or permissions that cannot be used now."
    yield gauge("identity_complaints", meaning, len(status["identity_complaints"]))
    if (lease := status["lease"]) is not None:
        for name, key, meaning in (
            ("lease_valid", "valid", "1 while this process leads the run."),
            ("lease_trouble", "trouble", "1 while the lease cannot be renewed; diloco status says why."),
            ("lease_heir", "heir", "1 while a standby takes over by itself if this process ends."),
        ):
            yield gauge(name, meaning, float(bool(lease[key])))
        renewed = time.time() - lease["renewed_seconds_ago"]
        yield gauge("lease_renewed_timestamp_seconds", "When the lease was renewed last.", renewed)


def _told(sites: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, float]:
    """Return one figure by site, for the sites that have reported it."""
    return {name: float(site[key]) for name, site in sites.items() if site[key] is not None}


# --- A standby's page of metrics, until it is promoted and the syncer's page replaces it at the same address ---------


def standby_metrics(config: RunConfig, status: Callable[[], dict[str, Any]]) -> Iterator[Metric]:
    """Yield all metrics as of now, from the standby's ``status``."""
    yield from about(config)
    standing = status()
    for name, value, meaning in (
        ("following", float(standing["following"]), "1 while this standby follows the syncer."),
        ("failed", float(standing["failed"] is not None), "1 when it can no longer follow; diloco status says why."),
        ("turns_behind", standing["turns_behind"], "Turns that are durable here and to be carried out."),
        ("outer_version", sum(standing["versions"]), "Outer steps carried out here, over all fragments."),
    ):
        yield gauge(f"standby_{name}", meaning, value)
    heard = time.time() - standing["heard_seconds_ago"]
    yield gauge("standby_heard_timestamp_seconds", "When it last heard the syncer, or was started.", heard)
    if (lease := standing["lease"]) is not None:
        heir, read = float(lease["is_heir"]), float(lease["trouble"] is None)
        yield gauge("standby_is_heir", "1 while it takes over by itself if the lease runs out.", heir)
        yield gauge("standby_lease_readable", "1 while it sees what the lease says.", read)
