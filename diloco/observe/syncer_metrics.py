"""The syncer's page of metrics: its status at that moment, and distributions of the events since it started."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from diloco.observe.history import number
from diloco.observe.metrics import LINKS, SECONDS, VERSIONS, Spread, about, counter, gauge, histogram
from diloco.sync.state import Status
from diloco.wire.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event


Standing = dict[str, Any]

GONE = (Status.LEFT, Status.EVICTED)
PRESENT = (
    ("site_staleness_versions", "staleness", "Versions that the site's oldest base is behind."),
    ("site_loss_nats", "loss", "Loss of recent steps as the site last said it, in nats per token."),
    ("site_tokens_per_second", "tokens_per_s", "Tokens a second since the site's process began."),
    ("site_stall_ratio", "stall_share", "Share of the site's time spent for the outer world, 0 to 1."),
)
"""Reported for present sites only: the last values of a site that is gone would stay for ever."""
STAGES = ("receive", "read", "fused", "digest", "publish")
"""The stages of a round, as in ``syncer.outer_step.RoundCosts``."""
SITE_COUNTERS = (
    ("site_tokens", "tokens_processed", "Tokens that the site has trained on."),
    ("site_tokens_merged", "tokens_merged", "Tokens of the site that are in the published model."),
    ("site_steps", "step", "Inner steps of the site."),
    ("updates_corrupt", "updates_corrupt", "Updates that decoded to other values here than at the site."),
    ("bases_differed", "bases_differed", "Bases that the site held other values for than were published."),
)


class SyncerMetrics:
    """Takes the syncer's events, and makes the page."""

    def __init__(self, config: RunConfig, status: Callable[[], Standing]) -> None:
        self._config = config
        self._status = status
        self._lock = threading.Lock()
        self._staleness: dict[str, Spread] = {}
        self._weights: dict[str, float] = {}
        self._norm: float | None = None
        self._step_s = Spread(SECONDS)
        self._stage_s = {stage: Spread(SECONDS) for stage in STAGES}
        self._snapshot_s = Spread(SECONDS)
        self._snapshot: tuple[float, float] | None = None

    def take(self, event: Event) -> None:
        """Take the next event, from the log's thread."""
        with self._lock:
            if event["what"] in ("outer_step", "published"):
                self._stages(event)
            if event["what"] == "outer_step":
                self._outer_step(event)
            elif event["what"] == "snapshot":
                self._snapshot_s.add(number(event, "seconds") or 0.0)
                self._snapshot = number(event, "at") or 0.0, number(event, "bytes") or 0.0

    def _stages(self, event: Event) -> None:
        for stage, spread in self._stage_s.items():
            if (seconds := number(event, f"{stage}_s")) is not None:
                spread.add(seconds)

    def _outer_step(self, event: Event) -> None:
        self._step_s.add(number(event, "seconds") or 0.0)
        self._norm = number(event, "norm")
        for site, staleness in _items(event, "staleness"):
            self._staleness.setdefault(site, Spread(VERSIONS)).add(staleness)
        self._weights = dict(_items(event, "sites"))

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
        yield from _of_units(status["units"])
        yield from _of_sites(status["sites"])
        yield from self._of_backup(status)
        yield from _of_replication(status["replication"])
        yield from _of_identity(status)
        yield from _of_calls(status["calls"])

    def _of_backup(self, status: Standing) -> Iterator[Metric]:
        backup = status["backup"]
        if backup is None:
            return
        yield gauge("backup_failing", "1 while the latest backup failed.", {(): float(bool(backup["failing"]))})
        every_s = self._config.cluster.syncer.backup_every_s
        yield gauge("backup_interval_seconds", "How often a backup is made.", {(): every_s})
        if (age_s := backup["age_s"]) is not None:
            yield gauge("backup_age_seconds", "Seconds since the last good backup of this process.", {(): age_s})
            good = time.time() - age_s
            yield gauge("backup_timestamp_seconds", "What the last good backup of this process holds.", {(): good})

    def _of_events(self) -> Iterator[Metric]:
        stale = {(site,): spread for site, spread in self._staleness.items()}
        yield histogram("update_staleness_versions", "Versions that merged updates were old.", stale, "site")
        weights = {(site,): weight for site, weight in self._weights.items()}
        yield gauge("update_weight_ratio", "Weight in the latest outer step.", weights, "site")
        yield histogram("outer_step_duration_seconds", "Time that an outer step took.", {(): self._step_s})
        stages = {(stage,): spread for stage, spread in self._stage_s.items()}
        meaning = "Time of one stage of a round: receive, read, fused (decode, merge, step, encode), digest, publish."
        yield histogram("round_stage_duration_seconds", meaning, stages, "stage")
        yield histogram("snapshot_duration_seconds", "Time that a snapshot took to be durable.", {(): self._snapshot_s})
        if self._norm is not None:
            yield gauge("merged_pseudo_gradient_norm", "Norm of what the latest outer step merged.", {(): self._norm})
        if self._snapshot is not None:
            at, size = self._snapshot
            yield gauge("snapshot_timestamp_seconds", "When the latest snapshot was durable.", {(): at})
            yield gauge("snapshot_bytes", "Its size.", {(): size})


def _of_run(status: Standing) -> Iterator[Metric]:
    versions = sum(fragment["version"] for fragment in status["fragments"])
    yield gauge("outer_version", "Outer steps published, over all fragments.", {(): versions})
    ready = float(not status["not_ready"])
    yield gauge("syncer_ready", "1 while updates are taken in; diloco status says why not.", {(): ready})
    yield gauge(
        "syncer_epoch",
        "Rises with every start, and by a million or more when a standby is promoted.",
        {(): status["epoch"]},
    )
    lineage = status["lineage"]
    yield gauge("run_lineage", "1; of a run that was restored a Unix time, or one more than before.", {(): lineage})
    if lineage > 1:
        yield gauge("run_restored_timestamp_seconds", "When the run was restored last.", {(): lineage})
    yield gauge("run_progress_ratio", "Share of the run that is done, 0 to 1.", {(): status["progress"]})
    yield counter("run_tokens", "Tokens in the published model.", {(): status["run_tokens"]})
    yield counter(
        "refused_at_the_door",
        "Updates refused before they were accepted; outcome is the reason, or the field that was wrong.",
        {(why,): count for why, count in status["refused_at_the_door"].items()},
        "outcome",
    )


def _of_units(units: Mapping[str, int] | None) -> Iterator[Metric]:
    """Yield the counts of the data's units by place; nothing where none are leased."""
    if units is None:
        return
    places = {(place,): float(units[place]) for place in ("merged", "partly", "in_hand", "given_back")}
    meaning = "Units of the data that were ever leased, by where they are: merged, partly, in_hand or given_back."
    yield gauge("data_units", meaning, places, "place")
    for name, meaning in (
        ("processed", "Units that accepted updates have gone through, as often as a site did."),
        ("reissued", "Units leased again, since their site was gone or has given them up."),
        ("repeated", "Units merged again, or drawn again by a site that had no other."),
    ):
        yield counter(f"data_units_{name}", meaning, {(): units[name]})


def _of_sites(sites: Mapping[str, Standing]) -> Iterator[Metric]:
    states: dict[tuple[str, ...], float] = {}
    fates: dict[tuple[str, ...], float] = {}
    for name, site in sites.items():
        states[site["status"],] = states.get((site["status"],), 0) + 1
        fates[name, "merged"] = site["updates_merged"]
        fates |= {(name, reason): count for reason, count in site["updates_refused"].items()}
    yield gauge("sites", "Sites by their state.", states, "state")
    yield counter("updates", "Accepted updates by their fate: merged, or the reason.", fates, "site", "outcome")
    restarts = {(name,): site["incarnation"] - 1 for name, site in sites.items()}
    yield counter("site_restarts", "Processes that have spoken for the site, less one.", restarts, "site")
    undecided = _told(sites, "undecided")
    yield gauge("site_updates_undecided", "Accepted updates of the site without a fate.", undecided, "site")
    held = {(name,): [float(each["seconds"]) for each in site["held"]] for name, site in sites.items()}
    meaning = "Updates that wait for an operator's word: diloco admit, diloco refuse."
    yield gauge("updates_held", meaning, {key: len(seconds) for key, seconds in held.items()}, "site")
    longest = {key: max(seconds, default=0.0) for key, seconds in held.items()}
    yield gauge("update_held_seconds", "How long the one of them has waited that came first.", longest, "site")
    present = {name: site for name, site in sites.items() if site["status"] not in GONE}
    for family, key, meaning in PRESENT:
        yield gauge(family, meaning, _told(present, key), "site")
    links = {name: site["link"] for name, site in present.items() if site.get("link")}
    for family, key, scale, meaning in LINKS:
        measured = {(name,): link[key] * scale for name, link in links.items() if link[key]}
        yield gauge(family, meaning, measured, "site")
    for family, key, meaning in SITE_COUNTERS:
        yield counter(family, meaning, _told(sites, key), "site")
    now = time.time()
    heard = {site: now - ago for site, ago in _told(present, "heard_seconds_ago").items()}
    yield gauge("site_heartbeat_timestamp_seconds", "When the site was last heard of.", heard, "site")


def _of_replication(replication: Standing) -> Iterator[Metric]:
    """Yield the standby's state as seen from here; nothing for a run without replication."""
    if replication["mode"] == "off":
        return
    for name, meaning in (
        ("following", "1 while a standby is heard."),
        ("detached", "1 while the run goes on with one disk and waits for no standby."),
        ("slow", "1 while the standby is heard and not waited for, since it takes too long."),
    ):
        yield gauge(f"replication_{name}", meaning, {(): float(replication[name])})
    away_s = replication["away_seconds"] or 0.0
    yield gauge("replication_away_seconds", "Since when no standby is heard; 0 while one is.", {(): away_s})
    if (behind := replication["behind_bytes"]) is not None:
        meaning = "Bytes of the journal that the standby lacks, while both write the same segment."
        yield gauge("replication_behind_bytes", meaning, {(): behind})


def _of_identity(status: Standing) -> Iterator[Metric]:
    """Yield whether the files for authentication are usable, and whether this process may lead."""
    complaints = len(status["identity_complaints"])
    meaning = "Files of certificates, tokens, permissions that cannot be used as they are now."
    yield gauge("identity_complaints", meaning, {(): complaints})
    lease = status["lease"]
    if lease is None:
        return
    for name, meaning, so in (
        ("valid", "1 while this process leads the run.", lease["valid"]),
        ("trouble", "1 while the lease cannot be renewed; diloco status says why.", bool(lease["trouble"])),
        ("heir", "1 while a standby takes over by itself if this process ends.", bool(lease["heir"])),
    ):
        yield gauge(f"lease_{name}", meaning, {(): float(so)})
    renewed = time.time() - lease["renewed_seconds_ago"]
    yield gauge("lease_renewed_timestamp_seconds", "When the lease was renewed last.", {(): renewed})


def _told(sites: Mapping[str, Standing], key: str) -> dict[tuple[str, ...], float]:
    """Return one figure by site, for the sites that have reported it."""
    return {(name,): float(site[key]) for name, site in sites.items() if site[key] is not None}


def _of_calls(calls: Mapping[str, int]) -> Iterator[Metric]:
    refused = {
        (name.removeprefix("refused_").upper(),): count for name, count in calls.items() if name.startswith("refused_")
    }
    yield counter("calls_refused", "Calls refused, by gRPC's code.", refused, "code")
    yield counter("calls_failed", "Calls that met a defect of the syncer.", {(): calls.get("internal", 0)})
    yield counter("calls_broken_off", "Streams whose other end went away.", {(): calls.get("broken_off", 0)})
    meaning = "Connections without a call under way that had to make room for others."
    yield counter("connections_hung_up", meaning, {(): calls.get("hung_up", 0)})
    moved = {("up",): calls.get("payload_bytes_in", 0), ("down",): calls.get("payload_bytes_out", 0)}
    yield counter("syncer_payload_bytes", "Payload that came from sites (up) and went to them.", moved, "direction")


def _items(event: Event, name: str) -> list[tuple[str, float]]:
    value = event.get(name)
    return list(value.items()) if isinstance(value, dict) else []


# --- A standby's page of metrics, until it is promoted and the syncer's page replaces it at the same address ---------


class StandbyMetrics:
    """Makes the page from the standby's status."""

    def __init__(self, config: RunConfig, status: Callable[[], dict[str, Any]]) -> None:
        self._config = config
        self._status = status

    def families(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        yield from about(self._config)
        status = self._status()
        following, failed = float(status["following"]), float(status["failed"] is not None)
        yield gauge("standby_following", "1 while this standby follows the syncer.", {(): following})
        yield gauge("standby_failed", "1 when it cannot follow any more; diloco status says why.", {(): failed})
        heard = time.time() - status["heard_seconds_ago"]
        yield gauge("standby_heard_timestamp_seconds", "When it last heard the syncer, or was started.", {(): heard})
        behind = status["turns_behind"]
        yield gauge("standby_turns_behind", "Turns that are durable here and to be carried out.", {(): behind})
        versions = sum(status["versions"])
        yield gauge("standby_outer_version", "Outer steps carried out here, over all fragments.", {(): versions})
        if (lease := status["lease"]) is not None:
            heir, read = float(lease["is_heir"]), float(lease["trouble"] is None)
            yield gauge("standby_is_heir", "1 while it takes over by itself if the lease runs out.", {(): heir})
            yield gauge("standby_lease_readable", "1 while it sees what the lease says.", {(): read})
