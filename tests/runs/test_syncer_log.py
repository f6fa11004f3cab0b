"""One of several syncers writes into two places, in the numbers of each."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from diloco.config import build
from diloco.config.compose import compose
from diloco.observe.console import syncer_log
from diloco.observe.eventlog import read_events


def test_a_syncers_own_numbers_and_the_whole_models(tmp_path: Path) -> None:
    config = compose(["outer.num_fragments=4", "outer.num_syncers=2", "run.name=x", f"run.dir={tmp_path}"])
    config.cluster.syncer.index = 1
    held = build.held_of(config)
    with ExitStack() as stack:
        log = syncer_log(config, stack)
        log.emit("published", {"fragment": 1, "version": 7})
        log.emit("syncer_started", {"versions": [5, 6]})
    own, _ = read_events(tmp_path / "x/syncers/1/events.jsonl")
    whole, _ = read_events(tmp_path / "x/events.jsonl")
    assert [event["who"] for event in own + whole] == ["syncer-1"] * 4
    assert [event.get("fragment") for event in own] == [1, None]
    assert [event.get("fragment") for event in whole] == [held[1], None]
    assert whole[1]["fragments"] == list(held)
    assert {event["of_syncer"] for event in whole} == {1}


def test_one_syncer_alone_writes_into_the_runs(tmp_path: Path) -> None:
    config = compose(["run.name=x", f"run.dir={tmp_path}"])
    with ExitStack() as stack:
        syncer_log(config, stack).emit("published", {"fragment": 0, "version": 7})
    (event,), _ = read_events(tmp_path / "x/events.jsonl")
    assert (event["who"], event["fragment"]) == ("syncer", 0)
    assert "of_syncer" not in event
