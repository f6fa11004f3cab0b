from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from diloco.cli.main import main
from diloco.config import compose as configs
from diloco.config import run_dir
from diloco.durable import locked
from diloco.observe.eventlog import read_events
from tests.runs.processes import ROOT, TINY, Place, wait_for


@pytest.fixture
def place(here: Path) -> Place:
    return Place(here)


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
    assert Path("runs/latest").readlink() == Path("base")
    told = capsys.readouterr().out
    assert told.count("taken anew") == 1
    assert "taken anew: run.tokens is 9000 and was 6400" in told
    assert main(["train", *TINY, "run.name=base", "run.tokens=9000", "run.seed=7"]) == 4
    assert "run.seed is 7 now and 0 in runs/base/config.yaml: another run.name" in capsys.readouterr().err
    assert main(["train", *TINY, "run.name=base", "run.tokens=9000", "run.resume=never"]) == 2


def test_what_cannot_be_trained_here_is_refused_and_nothing_is_touched(
    place: Place, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "inner.kernels is 'liger': its kernels are for accelerators"
    refused(2, words, "train", *TINY, "run.name=base", "inner.kernels=liger", "site.device=cpu")
    assert not Path("runs/base").exists()
    Path("runs/sites/syncer").mkdir(parents=True)
    Path("runs/sites/config.yaml").write_text("of the syncer")
    words = "run.name is 'sites': a run of sites, see runs/sites/syncer"
    refused(2, words, "train", *TINY, "run.name=sites")
    assert Path("runs/sites/config.yaml").read_text() == "of the syncer"
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    with locked(Path("runs/held")):
        refused(1, f"in use by process {os.getpid()}: is it started twice?", "train", *TINY, "run.name=held")


@pytest.mark.slow
def test_seconds_are_counted_over_restarts(place: Place) -> None:
    assert main(["train", *TINY, "run.name=timed", "run.seconds=0.3"]) == 0
    done = steps("timed")
    assert done
    assert main(["train", *TINY, "run.name=timed", "run.seconds=0.3"]) == 0
    # Whether the time is over is asked after a step, so that a second start makes one.
    assert len(steps("timed")) <= len(done) + 1


def test_training_that_was_asked_to_stop_is_drained(place: Place) -> None:
    def ask() -> None:
        wait_for(lambda: Path("runs/asked/events.jsonl").is_file() and bool(steps("asked")), "a step")
        signal.raise_signal(signal.SIGTERM)

    asking = Thread(target=ask)
    asking.start()
    assert main(["train", *TINY, "run.name=asked"]) == 75
    asking.join()
    assert json.loads(Path("runs/asked/summary.json").read_text())["status"] == "drained"


@pytest.mark.slow
def test_ranks_that_hold_it_in_parts_train_it_and_one_process_goes_on(place: Place) -> None:
    settings = [*TINY, "run.name=parts", "run.tokens=6400", "inner.batch_sequences=2"]
    configs.write(configs.compose([*settings, "site.parallel=fsdp"]), Path("parts.yaml"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "diloco", "train", "--config", "parts.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    assert "reached 6400 tokens; 50 steps" in said.stdout
    parts = json.loads(Path("runs/parts/summary.json").read_text())["global"]
    assert parts["val_loss"] < parts["val_loss_start"] - 1
    (newest,) = Path("runs/parts/train/checkpoints").glob("*-end")
    assert sorted(file.name for file in newest.glob("rank-*.json")) == ["rank-00000.json", "rank-00001.json"]
    assert main(["train", *TINY, "run.name=on", "run.tokens=640", f"run.init_from={newest}"]) == 0
    on = json.loads(Path("runs/on/summary.json").read_text())["global"]
    assert on["val_loss_start"] == pytest.approx(parts["val_loss"], rel=0.05)
    assert main(["train", *settings, "inner.batch_sequences=4", "run.tokens=9000"]) == 0
    assert steps("parts") == list(range(1, 72))
    assert json.loads(Path("runs/parts/summary.json").read_text())["global"]["val_loss"] < parts["val_loss"]
