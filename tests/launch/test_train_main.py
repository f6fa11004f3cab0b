from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.durable import locked
from diloco.launch import run_dir
from diloco.launch.cli import main
from diloco.launch.eventlog import read_events
from tests.launch.processes import TINY, Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield Place(tmp_path)
    os.environ.clear()
    os.environ.update(before)


def steps(name: str) -> list[int]:
    events, _ = read_events(Path("runs") / name / "events.jsonl")
    return [int(str(event["step"])) for event in events if event["what"] == "step"]


def test_training_alone_learns_goes_on_and_leaves_a_summary(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "run.name=base", "run.tokens=6400"]) == 0
    assert "reached 6400 tokens; 50 steps" in capsys.readouterr().out
    summary = json.loads(Path("runs/base/summary.json").read_text())
    assert summary["status"] == "ok"
    assert summary["sites"]["train"]["inner_steps"] == 50
    assert summary["global"]["val_loss"] < summary["global"]["val_loss_start"] - 1
    assert steps("base") == list(range(1, 51))
    # The same command again has nothing to do; a larger budget goes on.
    assert main(["train", *TINY, "run.name=base", "run.tokens=6400"]) == 0
    assert steps("base") == list(range(1, 51))
    assert main(["train", *TINY, "run.name=base", "run.tokens=9000"]) == 0
    assert steps("base") == list(range(1, 72))
    assert main(["train", *TINY, "run.name=base", "run.tokens=9000", "run.resume=never"]) == 2


def test_the_baseline_begins_where_it_is_told_to(place: Place) -> None:
    assert main(["train", *TINY, "run.name=warm", "run.tokens=6400"]) == 0
    assert main(["train", *TINY, "run.name=on", "run.tokens=640", "run.init_from=runs/warm/train/checkpoints"]) == 0
    warm, on = (json.loads(Path(f"runs/{name}/summary.json").read_text())["global"] for name in ("warm", "on"))
    assert on["val_loss_start"] == pytest.approx(warm["val_loss"], rel=0.1)
    assert on["val_loss_start"] < warm["val_loss_start"] - 1


def test_seconds_are_counted_over_restarts(place: Place) -> None:
    assert main(["train", *TINY, "run.name=timed", "run.seconds=0.3"]) == 0
    done = steps("timed")
    assert done
    assert main(["train", *TINY, "run.name=timed", "run.seconds=0.3"]) == 0
    # Whether the time is over is asked after a step, so that a second start makes one.
    assert len(steps("timed")) <= len(done) + 1


def test_two_at_once_in_one_folder_are_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    with locked(Path("runs/held/train")):
        assert main(["train", *TINY, "run.name=held"]) == 1
    assert f"in use by process {os.getpid()}: is it started twice?" in capsys.readouterr().err
