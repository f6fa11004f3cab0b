"""What a round costs: added up over its updates, from the first byte to what everybody is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.outer.optimizer import NOTHING
from diloco.sync.effects import Contribution, StartOuterStep, UpdateRef
from diloco.syncer import outer_step as module
from diloco.syncer.outer_step import Costs, OuterResult, RoundCosts
from diloco.syncer.snapshots import FragmentValues
from tests.syncer.building import Events, eventually, join, push, serving, update

STAGES = {"receive_s", "read_s", "fused_s", "digest_s", "publish_s"}


def command(*payloads: str) -> StartOuterStep:
    parts = [Contribution(name, 1.0, 0, (UpdateRef(1, name, "fp32", "d"),)) for name in payloads]
    return StartOuterStep(2, 7, tuple(parts))


def result() -> OuterResult:
    values = FragmentValues(7, torch.zeros(1), torch.zeros(1), NOTHING, "d")
    return OuterResult(values, b"", "d", 1.0, 0.6, Costs(0.1, 0.2, 0.3))


def test_a_round_costs_what_its_updates_and_its_stages_took() -> None:
    now_s = [10.0]
    costs = RoundCosts(lambda: now_s[0])
    assert costs.latest(2) is None
    for name, seconds in (("a", 1.0), ("a", 0.5), ("b", 2.0), ("other", 40.0)):
        costs.received(name, seconds)
    stages = {"receive_s": 3.5, "read_s": 0.1, "fused_s": 0.2, "digest_s": 0.3}
    assert costs.stepped(command("a", "b", "of an earlier process"), result()) == stages
    now_s[0] += 0.25
    assert costs.published(2) == {"publish_s": 0.25}
    assert costs.latest(2) == {**stages, "publish_s": 0.25}
    assert costs.stepped(command("a"), result())["receive_s"] == 0.0, "an update is in one round"
    assert costs.latest(0) is None


def test_what_is_never_merged_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPDATES_MAX", 2)
    costs = RoundCosts()
    for name in ("a", "b", "c"):
        costs.received(name, 1.0)
    assert costs.stepped(command("a", "b", "c"), result())["receive_s"] == 2.0


def test_the_stages_of_a_round_are_in_events_and_status(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path, events) as syncer:
        join(syncer)
        status: dict[str, Any] = syncer.api.status()
        assert [each["costs"] for each in status["fragments"]] == [None, None]
        push(syncer, *update())
        (told,) = events.wait_for("published")
        (made,) = events.of("outer_step")
        eventually(lambda: "publish_s" in (syncer.tally.costs.latest(0) or {}), "it is told")
        status = syncer.api.status()
    found = status["fragments"][0]["costs"]
    assert set(found) == STAGES
    assert min(found.values()) > 0
    assert found == {name: made[name] for name in STAGES - {"publish_s"}} | {"publish_s": told["publish_s"]}
    assert status["fragments"][1]["costs"] is None
