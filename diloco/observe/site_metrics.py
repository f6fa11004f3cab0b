"""A site's page of metrics, from its own events and its newest checkpoint."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.observe.history import number, whole
from diloco.observe.metrics import LINKS, SECONDS, Spread, about, counter, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prometheus_client.metrics_core import Metric

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event

FP32_BYTES = 4


class SiteMetrics:
    """Takes the site's events, and makes the page.  ``numels`` has the number of values of each fragment."""

    def __init__(self, config: RunConfig, numels: Sequence[int], checkpoints: Path) -> None:
        self._config = config
        self._site = config.site.id
        self._numels = numels
        self._checkpoints = checkpoints
        self._lock = threading.Lock()
        self._last: dict[str, Event] = {}
        """The latest event of each kind whose fields are totals or the present state."""
        self._step_s = Spread(SECONDS)
        self._pushes: dict[str, int] = {}
        self._canaries: dict[str, int] = {}
        self._raw = {"up": 0, "down": 0}
        self._connected = False
        self._out_of_reach: set[object] = set()
        """Of several syncers: the numbers of those that are lost."""
        self._disconnects = 0
        self._norm: float | None = None

    def take(self, event: Event) -> None:
        """Take the next event, from the log's thread."""
        with self._lock:
            match event["what"]:
                case "step" | "meter" as what:
                    self._last[str(what)] = event
                    if what == "step":
                        self._step_s.add(number(event, "step_s") or 0.0)
                case "sealed":
                    self._norm = number(event, "norm")
                case "pushed":
                    self._pushed(event)
                case "fetched":
                    self._raw["down"] += self._fp32_bytes(event)
                case "connected":
                    self._out_of_reach.discard(event.get("of_syncer"))
                    self._connected = not self._out_of_reach
                case "disconnected":
                    self._out_of_reach.add(event.get("of_syncer"))
                    self._connected = False
                    self._disconnects += 1
                case "canary":
                    outcome = {True: "same", False: "different"}.get(event.get("same"), "failed")  # type: ignore[call-overload]
                    self._canaries[outcome] = self._canaries.get(outcome, 0) + 1

    def _pushed(self, event: Event) -> None:
        outcome = str(event.get("outcome"))
        self._pushes[outcome] = self._pushes.get(outcome, 0) + 1
        if outcome == "accepted":
            self._raw["up"] += self._fp32_bytes(event)

    def _fp32_bytes(self, event: Event) -> int:
        return FP32_BYTES * self._numels[whole(event, "fragment")]

    def families(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        yield from about(self._config)
        with self._lock:
            yield from self._of_steps()
            yield from self._of_exchange()
        yield from self._of_checkpoint()

    def _of_steps(self) -> Iterator[Metric]:
        site = (self._site,)
        yield histogram("site_step_duration_seconds", "Time that an inner step took.", {site: self._step_s}, "site")
        step, meter = self._last.get("step"), self._last.get("meter")
        if step is not None:
            for name, key, meaning in (
                ("site_step_loss_nats", "loss", "Loss of the latest step, in nats per token."),
                ("site_grad_norm", "grad_norm", "Norm of its gradient, before clipping."),
                ("site_learning_rate", "lr", "Its learning rate."),
            ):
                value = number(step, key)
                yield gauge(name, meaning, {} if value is None else {site: value}, "site")
        if meter is not None:
            train_s, stall_s = number(meter, "train_s") or 0.0, number(meter, "stall_s") or 0.0
            spent = {(*site, "compute"): max(0.0, train_s - stall_s), (*site, "sync_wait"): stall_s}
            yield counter("site_time_seconds", "What the training loop's time went into.", spent, "site", "state")
            in_flight = {site: whole(meter, "in_flight")}
            yield gauge("site_updates_in_flight", "Updates sent and without a fate here.", in_flight, "site")

    def _of_exchange(self) -> Iterator[Metric]:
        site, meter = (self._site,), self._last.get("meter")
        labels = ("site", "direction", "kind")
        if meter is not None:
            moved = {
                (*site, "up", "update"): whole(meter, "bytes_up"),
                (*site, "down", "version"): whole(meter, "bytes_down"),
            }
            yield counter("wan_bytes", "Bytes of updates sent and versions received, re-sent ones too.", moved, *labels)
            for family, key, scale, meaning in LINKS:
                value = number(meter, f"link_{key}")
                yield gauge(family, meaning, {site: value * scale} if value else {}, "site")
        raw = {(*site, "up", "update"): self._raw["up"], (*site, "down", "version"): self._raw["down"]}
        yield counter("wan_raw_bytes", "What the same updates and versions are in fp32.", raw, *labels)
        pushes = {(*site, outcome): count for outcome, count in self._pushes.items()}
        yield counter("site_pushes", "Answers to updates that were sent.", pushes, "site", "outcome")
        canaries = {(*site, outcome): count for outcome, count in self._canaries.items()}
        yield counter("canaries", "Canaries by what they found: same, different, failed.", canaries, "site", "outcome")
        yield gauge("site_connected", "1 while the syncer is heard.", {site: float(self._connected)}, "site")
        yield counter("site_disconnects", "Times that the syncer was lost.", {site: self._disconnects}, "site")
        if self._norm is not None:
            yield gauge("pseudo_gradient_norm", "Norm of the latest update.", {site: self._norm}, "site")

    def _of_checkpoint(self) -> Iterator[Metric]:
        """Yield the metrics of the newest whole checkpoint: it gets its name only once it is durable."""
        from diloco.inner import checkpoint

        for name in reversed(checkpoint.names(self._checkpoints)):
            path = self._checkpoints / name
            try:
                at, size = path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir())
            except FileNotFoundError:
                continue  # A newer one has just replaced it.
            site = (self._site,)
            yield gauge("checkpoint_timestamp_seconds", "When the newest checkpoint was written.", {site: at}, "site")
            yield gauge("checkpoint_bytes", "Its size.", {site: size}, "site")
            return
