"""A site's page says what its events and its newest checkpoint say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from diloco.config.compose import compose
from diloco.observe.metrics import SiteMetrics
from tests.observe.test_syncer_metrics import values

STEP = {"step": 7, "loss": 2.5, "grad_norm": 0.5, "lr": 0.01, "step_s": 0.2}
METER = {"train_s": 100.0, "stall_s": 2.0, "bytes_up": 10, "bytes_down": 20, "in_flight": 1}
EVENTS: list[dict[str, Any]] = [
    {"what": "connected"},
    {"what": "step", **STEP},
    {"what": "step", **STEP, "loss": None, "step": 8},
    {"what": "meter", **METER},
    {"what": "sealed", "norm": 3.5},
    {"what": "pushed", "fragment": 1, "outcome": "accepted"},
    {"what": "pushed", "fragment": 1, "outcome": "retry"},
    {"what": "fetched", "fragment": 0},
    {"what": "disconnected"},
    {"what": "canary", "same": True},
    {"what": "canary", "same": None},
    {"what": "something else"},
]


def page_of_a_site(folder: Path) -> list[Metric]:
    (folder / "step-0000000004").mkdir()
    (folder / "step-0000000004" / "model.safetensors").write_bytes(b"x" * 100)
    metrics = SiteMetrics(compose(["run.name=x", "site.id=a"]), [10, 30], folder)
    for event in EVENTS:
        metrics.take({"at": 1.0, "who": "a", **event})
    return list(metrics.families())


def test_the_page_of_a_site(tmp_path: Path) -> None:
    found = values(page_of_a_site(tmp_path))
    assert found["site_step_duration_seconds_count", "a"] == 2
    assert found["site_step_duration_seconds_sum", "a"] == 0.4
    assert (found["site_grad_norm", "a"], found["site_learning_rate", "a"]) == (0.5, 0.01)
    assert ("site_step_loss_nats", "a") not in found, "the latest loss was no number"
    assert found["site_time_seconds_total", "a", "compute"] == 98.0
    assert found["site_time_seconds_total", "a", "sync_wait"] == 2.0
    assert found["wan_bytes_total", "a", "up", "update"] == 10
    assert found["wan_bytes_total", "a", "down", "version"] == 20
    assert found["wan_raw_bytes_total", "a", "up", "update"] == 120, "what was sent and not accepted is sent again"
    assert found["wan_raw_bytes_total", "a", "down", "version"] == 40
    assert (found["site_pushes_total", "a", "accepted"], found["site_pushes_total", "a", "retry"]) == (1, 1)
    assert (found["site_connected", "a"], found["site_disconnects_total", "a"]) == (0, 1)
    assert (found["canaries_total", "a", "same"], found["canaries_total", "a", "failed"]) == (1, 1)
    assert found["pseudo_gradient_norm", "a"] == 3.5
    assert found["checkpoint_bytes", "a"] == 100
    assert found["site_updates_in_flight", "a"] == 1


def test_a_site_that_has_just_begun(tmp_path: Path) -> None:
    found = values(list(SiteMetrics(compose(["run.name=x", "site.id=a"]), [1], tmp_path / "none").families()))
    assert found["site_connected", "a"] == 0
    assert not [key for key in found if key[0] in ("checkpoint_bytes", "site_grad_norm", "wan_bytes_total")]


def test_a_site_is_connected_when_it_hears_every_syncer(tmp_path: Path) -> None:
    metrics = SiteMetrics(compose(["run.name=x", "site.id=a"]), [10, 30], tmp_path)

    def after(what: str, syncer: int) -> float:
        metrics.take({"at": 1.0, "who": "a", "what": what, "of_syncer": syncer})
        return values(list(metrics.families()))["site_connected", "a"]

    assert after("connected", 0) == 1
    assert after("disconnected", 0) == 0
    assert after("disconnected", 1) == 0
    assert after("connected", 0) == 0, "the other is still away"
    assert after("connected", 1) == 1
