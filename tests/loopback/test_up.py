"""``diloco up`` with real children: a run from start to end, a drain and its resumption, and nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any
from urllib.request import urlopen

import pytest

from tests.runs.processes import TINY, Place, Verb, wait_for
from tests.runs.test_supervise import alive

SITES = ["cluster=one", "cluster.sites.site-b.slowdown=1.3", "network.rtt_ms=20"]
UP = [*TINY, *SITES, "outer.final_wait_s=5"]
BOUND_S = 120.0


def summary_of(place: Place) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((place.folder / "runs/otter/summary.json").read_text())
    return told


def merging(place: Place, verb: Verb, updates: int = 3) -> None:
    """Wait until the run has taken so many outer steps in all."""
    verb.until(lambda: len(place.seen("otter", "syncer", "outer_step")) >= updates, "outer steps", BOUND_S)


@pytest.mark.slow
def test_a_drained_run_goes_on_and_two_interrupts_end_it_at_once(place: Place) -> None:
    settings = [*UP, "run.name=otter", "scenario=none", "run.track=jsonl"]
    first = place.start("first", "up", *settings)
    merging(place, first)
    (url,) = re.findall(r"watch it at (\S+)", first.text())
    with urlopen(url, timeout=BOUND_S) as page:
        text = page.read().decode()
    assert "site-b" in text
    assert "tokens merged" in text, "what the syncer says"
    first.signal(signal.SIGINT)
    assert first.end(BOUND_S) == 75, first.text()
    before = summary_of(place)
    assert before["status"].startswith("drained")

    again = place.start("again", "up", *settings)
    merging(place, again, sum(before["versions"]) + 3)
    assert "resumes" in again.text()
    wait_for(lambda: place.seen("otter", "site-a", "resumed"), "site-a goes on where it was", again.text)
    again.signal(signal.SIGINT)
    time.sleep(0.4)
    again.signal(signal.SIGINT)
    asked = time.monotonic()
    assert again.end(BOUND_S) == 1, again.text()
    assert time.monotonic() - asked < 10
    assert "at once" in summary_of(place)["status"]
    curve = (place.folder / "runs/otter/track/jsonl/metrics.jsonl").read_text().splitlines()
    losses = [row["global/val_loss"] for row in map(json.loads, curve) if "global/val_loss" in row]
    scored = [event["val_loss"] for event in place.events("otter") if event["what"] == "eval"]
    assert losses == scored, "once each, of both parts of the run"
    started = [event["pid"] for event in place.seen("otter", "up", "process") if event["state"] == "started"]
    assert not [pid for pid in started if alive(int(str(pid)))]


@pytest.mark.slow
def test_children_do_not_outlive_a_killed_parent(place: Place) -> None:
    verb = place.start("up", "up", *UP, "run.name=otter", "scenario=none")
    merging(place, verb, 1)
    started = [event["pid"] for event in place.seen("otter", "up", "process") if event["state"] == "started"]
    pids = [int(str(pid)) for pid in started]
    assert len(pids) == 4
    verb.process.kill()
    verb.process.wait(10)
    wait_for(lambda: not any(alive(pid) for pid in pids), "the children's end", bound_s=10)
