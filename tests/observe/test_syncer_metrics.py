"""The syncer's page says what its status and its events say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from diloco.config.compose import compose
from diloco.observe.metrics import SyncerMetrics
from diloco.sync.events import Reason
from diloco.syncer.core import CoreStopped
from tests.syncer.building import eventually, join, new_syncer, push, report, update

OUTER_STEP = {"what": "outer_step", "sites": {"a": 0.75, "b": 0.25}, "staleness": {"a": 0, "b": 4}, "norm": 2.5}
UNITS = {"processed": 9, "merged": 5, "partly": 1, "in_hand": 2, "given_back": 0, "reissued": 4, "repeated": 3}
SNAPSHOT = {"what": "snapshot", "at": 1234.5, "seconds": 0.2, "bytes": 4096}


def values(families: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("diloco_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def page_of_a_run(folder: Path) -> tuple[list[Metric], list[Metric]]:
    """The families of a syncer after one merged update, one refused, and a heartbeat; and after it has stopped."""
    told: list[dict[str, Any]] = []
    syncer = new_syncer(folder, lambda what, fields: told.append({"at": time.time(), "what": what, **fields}))
    metrics = SyncerMetrics(compose(["run.name=x"]), syncer.status)
    assert {family.name for family in metrics.families()} >= {"diloco_run"}, "it can be asked before the start"
    syncer.start()
    try:
        join(syncer)
        push(syncer, *update())
        eventually(lambda: syncer.holdings.values[0].version == 1, "a version")
        push(syncer, *update(sequence=2, base_version=7))
        syncer.api.report(report("a", tokens_processed=500, step=50, versions=(0, 0)))
        syncer.api.snapshot()
        eventually(lambda: any(event["what"] == "snapshot" for event in told), "a snapshot's event")
        for event in [*told, {**OUTER_STEP, "at": 1.0, "seconds": 0.02}, SNAPSHOT]:
            metrics.take(event)
        running = list(metrics.families())
    finally:
        syncer.stop(0.1)
    return running, list(metrics.families())


def test_the_page_of_a_run(tmp_path: Path) -> None:
    running, stopped = page_of_a_run(tmp_path)
    found = values(running)
    assert found["outer_version",] == 1
    assert found["updates_total", "a", "merged"] == 1
    assert found["refused_at_the_door_total", Reason.BAD_BASE.value] == 1
    assert found["sites", "live"] == 1
    assert (found["site_tokens_total", "a"], found["site_steps_total", "a"]) == (500, 50)
    assert found["site_staleness_versions", "a"] == 1
    assert 0 <= time.time() - found["site_heartbeat_timestamp_seconds", "a"] < 60
    assert (found["update_weight_ratio", "a"], found["update_weight_ratio", "b"]) == (0.75, 0.25)
    assert found["update_staleness_versions_bucket", "b", "3.0"] == 0
    assert found["update_staleness_versions_bucket", "b", "5.0"] == 1
    assert found["outer_step_duration_seconds_count",] == 2
    for stage in ("receive", "read", "fused", "digest", "publish"):
        assert found["round_stage_duration_seconds_count", stage] == 1
        assert found["round_stage_duration_seconds_sum", stage] > 0
    assert (found["snapshot_timestamp_seconds",], found["snapshot_bytes",]) == (1234.5, 4096)
    assert (found["syncer_ready",], found["syncer_epoch",], found["run_lineage",]) == (1, 1, 1)
    assert ("run_restored_timestamp_seconds",) not in found, "it never was"
    after = values(stopped)
    assert after["outer_step_duration_seconds_count",] == 2
    assert ("outer_version",) not in after, "what is not known is not said"


def in_trouble() -> dict[str, Any]:
    """What a restored syncer says that an operator must look after."""
    status: dict[str, Any] = {
        "units": UNITS,
        "fragments": [],
        "not_ready": ["disk_full"],
        "epoch": 1,
        "lineage": 1_795_235_467,
        "progress": 0.0,
        "run_tokens": 0,
        "refused_at_the_door": {},
        "calls": {"refused_not_found": 3, "internal": 1, "payload_bytes_in": 7},
        "sites": {
            "quiet": {"status": "silent", "updates_merged": 0, "updates_refused": {"stale": 2}, "incarnation": 3}
        },
    }
    keys = ("staleness", "loss", "tokens_per_s", "stall_share", "tokens_processed", "step", "heard_seconds_ago")
    status["sites"]["quiet"] |= dict.fromkeys(keys)
    status["sites"]["quiet"] |= {"undecided": 0, "tokens_merged": 0, "updates_corrupt": 1, "bases_differed": 2}
    held = {"fragment": 0, "norm": 9.0, "ratio": None, "cosine": None, "z": None, "why": "its norm"}
    status["sites"]["quiet"]["held"] = [
        {**held, "sequence": sequence, "seconds": seconds} for sequence, seconds in ((3, 12.5), (4, 2.0))
    ]
    status["identity_complaints"] = ["tokens.yaml cannot be read"]
    status["backup"] = {"url": "vault", "age_s": 100.0, "last": "x", "failing": "no route"}
    status["replication"] = {
        "mode": "sync",
        "standby": "iad",
        "following": False,
        "slow": True,
        "away_seconds": 9.5,
        "detached": False,
        "behind_bytes": 4096,
    }
    status["lease"] = {
        "place": "/x",
        "epoch": 4,
        "valid": False,
        "heir": "",
        "renewed_seconds_ago": 3.0,
        "trouble": "no server",
    }
    return status


def test_what_an_operator_must_act_on_is_on_the_page() -> None:
    found = values(page_in_trouble())
    assert (found["updates_held", "quiet"], found["update_held_seconds", "quiet"]) == (2, 12.5)
    assert found["identity_complaints",] == 1
    assert found["backup_failing",] == 1
    assert 100 <= time.time() - found["backup_timestamp_seconds",] < 160
    assert found["backup_age_seconds",] == 100, "without a clock, which may be another than Prometheus's"
    assert found["backup_interval_seconds",] == compose(["run.name=x"]).cluster.syncer.backup_every_s
    names = ("following", "detached", "slow", "away_seconds", "behind_bytes")
    assert [found[f"replication_{name}",] for name in names] == [0, 0, 1, 9.5, 4096]
    assert (found["lease_valid",], found["lease_trouble",], found["lease_heir",]) == (0, 1, 0)
    assert 3 <= time.time() - found["lease_renewed_timestamp_seconds",] < 60
    assert [found["data_units", place] for place in ("merged", "partly", "in_hand", "given_back")] == [5, 1, 2, 0]
    names = ("processed", "reissued", "repeated")
    assert [found[f"data_units_{name}_total",] for name in names] == [9, 4, 3]


def test_what_is_not_used_or_not_known_has_no_metric() -> None:
    replication = in_trouble()["replication"]
    none = {"backup": None, "lease": None, "replication": {**replication, "mode": "off"}, "identity_complaints": []}
    found = values(page_in_trouble(**none, units=None))
    assert not [name for name, *_ in found if name.startswith(("backup", "lease", "replication", "data_units"))]
    assert found["identity_complaints",] == 0
    backup = {**in_trouble()["backup"], "age_s": None, "failing": ""}
    following = {**replication, "following": True, "away_seconds": None, "behind_bytes": None}
    found = values(page_in_trouble(backup=backup, replication=following))
    assert found["backup_failing",] == 0
    assert ("backup_timestamp_seconds",) not in found, "none was made yet"
    assert (found["replication_following",], found["replication_away_seconds",]) == (1, 0)
    assert ("replication_behind_bytes",) not in found, "it is whole segments behind"


def page_in_trouble(**changes: Any) -> list[Metric]:
    return list(SyncerMetrics(compose(["run.name=x"]), lambda: in_trouble() | changes).families())


def test_a_site_that_has_said_nothing_has_no_figures() -> None:
    found = values(page_in_trouble())
    assert not [key for key in found if key[0] in ("site_loss_nats", "site_heartbeat_timestamp_seconds")]
    assert found["updates_total", "quiet", "stale"] == 2
    assert found["syncer_ready",] == 0
    assert found["run_lineage",] == found["run_restored_timestamp_seconds",] == 1_795_235_467
    assert found["site_restarts_total", "quiet"] == 2
    assert (found["updates_corrupt_total", "quiet"], found["bases_differed_total", "quiet"]) == (1, 2)
    assert (found["calls_refused_total", "NOT_FOUND"], found["calls_failed_total",]) == (3, 1)
    assert found["syncer_payload_bytes_total", "up"] == 7


def test_of_a_site_that_is_gone_nothing_is_said_in_the_present(tmp_path: Path) -> None:
    syncer = new_syncer(tmp_path, lambda what, fields: None)
    metrics = SyncerMetrics(compose(["run.name=x"]), syncer.status)
    syncer.start()
    try:
        for name in "abc":
            join(syncer, name)
            syncer.api.report(report(name, tokens_processed=500, step=50, versions=(0, 0)))
        syncer.api.leave("a", 1)
        syncer.api.evict("b")
        found = values(list(metrics.families()))
    finally:
        syncer.stop(0.1)
    assert (found["sites", "left"], found["sites", "evicted"], found["sites", "live"]) == (1, 1, 1)
    for name in ("heartbeat_timestamp_seconds", "tokens_per_second", "staleness_versions", "stall_ratio"):
        said = {key[1] for key in found if key[0] == f"site_{name}"}
        assert said == {"c"}, name
    assert found["site_tokens_total", "a"] == found["site_tokens_total", "b"] == 500


def test_a_syncer_that_ends_is_no_error() -> None:
    def gone() -> dict[str, Any]:
        raise CoreStopped

    assert ("run_info",) in {key[:1] for key in values(list(SyncerMetrics(compose(["run.name=x"]), gone).families()))}
