"""A standby's page says how it follows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from diloco.config.compose import compose
from diloco.observe.metrics import StandbyMetrics
from tests.loopback.cluster import eventually, serving
from tests.observe.test_syncer_metrics import values
from tests.syncer.test_standby import BOUND_S, a_toy
from tests.syncer.test_standby_alone import standing_by

ALONE: dict[str, Any] = {
    "role": "standby",
    "name": "iad",
    "following": False,
    "heard_seconds_ago": 40.0,
    "versions": [3, 4],
    "epoch": 1,
    "turns_behind": 7,
    "trouble": "no route",
    "failed": "other bits",
    "primary": "fra:1",
    "lease": {"place": "/x", "epoch": 1, "holder": "fra", "is_heir": True, "vacant": False, "trouble": "no server"},
}


def page_of_a_standby(**changes: Any) -> list[Metric]:
    return list(StandbyMetrics(compose(["run.name=x"]), lambda: ALONE | changes).families())


def test_the_page_of_one_that_follows(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with serving(toy) as (_, first, log):
        standing = standing_by(toy, first, 0)
        metrics = StandbyMetrics(compose(["run.name=x"]), standing.status)
        standing.start()
        try:
            log.wait_for("standby_follows", 1, BOUND_S)
            eventually(lambda: values(list(metrics.families()))["standby_following",] == 1, BOUND_S, "that it follows")
            found = values(list(metrics.families()))
        finally:
            standing.stop()
    assert found["standby_failed",] == 0
    assert 0 <= time.time() - found["standby_heard_timestamp_seconds",] < BOUND_S
    assert ("standby_is_heir",) not in found, "there is no lease"
    assert not [name for name, *_ in found if name.startswith(("syncer", "outer", "site"))]


def test_one_that_is_alone_says_so() -> None:
    found = values(page_of_a_standby())
    assert (found["standby_following",], found["standby_failed",], found["standby_turns_behind",]) == (0, 1, 7)
    assert 40 <= time.time() - found["standby_heard_timestamp_seconds",] < 60
    assert found["standby_outer_version",] == 7
    assert (found["standby_is_heir",], found["standby_lease_readable",]) == (1, 0)
