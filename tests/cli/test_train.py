from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest

from diloco.cli.main import main
from diloco.config import compose as configs
from diloco.config import run_dir
from diloco.config.errors import ExitCode
from diloco.durable import locked
from diloco.models.evaluate import Evaluator, Score
from diloco.observe.eventlog import read_events
from diloco.syncer.server import Syncer
from tests.cli.conftest import Cli
from tests.runs.processes import ROOT, TINY, Place, wait_for
from tests.syncer.building import dice, eventually, join, push, serving, update


@pytest.fixture
def place(here: Path) -> Place:
    return Place(here)


def steps(name: str) -> list[int]:
    events = list(read_events(Path("runs") / name / "events.jsonl"))
    return [int(str(event["step"])) for event in events if event["what"] == "step"]


def test_training_alone_learns_goes_on_and_leaves_a_summary(place: Place, cli: Cli) -> None:
    base = ["train", *TINY, "run.name=base"]
    assert "reached 6400 tokens; 50 steps" in cli.out(*base, "run.tokens=6400")
    summary = json.loads(Path("runs/base/summary.json").read_text())
    assert summary["status"] == "ok"
    assert summary["sites"]["train"]["inner_steps"] == 50
    assert summary["global"]["val_loss"] < summary["global"]["val_loss_start"] - 1
    assert steps("base") == list(range(1, 51))
    # The same command again has nothing to do; a larger budget goes on.
    out = cli.out(*base, "run.tokens=6400")
    assert "base has finished, see runs/base/summary.json" in out
    assert "changed: " not in out
    assert steps("base") == list(range(1, 51))
    assert "changed: run.tokens is 9000 and was 6400" in cli.out(*base, "run.tokens=9000")
    assert steps("base") == list(range(1, 72))
    assert Path("runs/latest").readlink() == Path("base")
    assert cli.out("runs").split()[:2] == ["base", "finished"]
    assert cli.out("runs").endswith("step 71, 9,088 tokens\n")
    assert "eval: " in cli.out("logs", "base")
    cli.refuses(2, "is a run of diloco train; its figures are in runs/base/summary.json", "report", "base")
    words = "run.seed is 7 now and 0 in runs/base/config.yaml: give another run.name"
    cli.refuses(4, words, *base, "run.tokens=9000", "run.seed=7")
    assert main([*base, "run.resume=never"]) == 2
    cli.out(*base, "run.tokens=null", "run.seconds=0.001")
    assert steps("base") == list(range(1, 72)), "its time is over, too"


def test_a_folder_of_a_run_of_sites_or_in_use_is_refused_and_not_touched(
    place: Place, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    Path("runs/sites/syncer").mkdir(parents=True)
    Path("runs/sites/config.yaml").write_text("of the syncer")
    words = "run.name is 'sites': a run of sites, see runs/sites/syncer"
    cli.refuses(2, words, "train", *TINY, "run.name=sites")
    assert Path("runs/sites/config.yaml").read_text() == "of the syncer"
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    with locked(Path("runs/held")):
        cli.refuses(1, f"in use by process {os.getpid()}: is it started twice?", "train", *TINY, "run.name=held")


def test_training_that_was_asked_to_stop_is_drained(
    place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Mock(side_effect=lambda *_, whole=False, **__: Score(6.0, 2.0 + whole))
    monkeypatch.setattr(Evaluator, "score", scored)
    summary = Path("runs/asked/summary.json")
    summary.parent.mkdir(parents=True)
    summary.write_text("of an earlier end")

    def ask() -> None:
        wait_for(lambda: Path("runs/asked/events.jsonl").is_file() and bool(steps("asked")), "a step")
        earlier.append(summary.is_file())
        signal.raise_signal(signal.SIGTERM)

    earlier: list[bool] = []
    asking = Thread(target=ask)
    asking.start()
    assert main(["train", *TINY, "run.name=asked"]) == 75
    asking.join()
    assert earlier == [False]
    assert json.loads(summary.read_text())["status"] == "drained"
    events = map(json.loads, Path("runs/asked/events.jsonl").read_text().splitlines())
    told = [(event["whole"], event["val_bits_per_byte"]) for event in events if event["what"] == "eval"]
    assert told == [(False, 2.0)], "the whole text takes long"
    capfd.readouterr()
    assert main(["runs"]) == main(["logs", "asked"]) == 0
    out = capfd.readouterr().out
    assert out.split()[:2] == ["asked", "stopped"]
    assert "eval: " in out, "followed until it has ended"


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
    assert main(["train", *settings, "inner.batch_sequences=4", "run.tokens=9000"]) == 0
    assert steps("parts") == list(range(1, 72))
    assert json.loads(Path("runs/parts/summary.json").read_text())["global"]["val_loss"] < parts["val_loss"]


# --- An operator's words, said with the verbs to a real syncer -------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "end", "other", "words"),
    [
        ("admit", "merged", "refuse", "is in version 5 already"),
        ("refuse", "withdrawn", "admit", "was refused: withdrawn"),
    ],
)
def test_a_held_update_gets_the_fate_that_was_said(
    tmp_path: Path, verb: str, end: str, other: str, words: str, cli: Cli
) -> None:
    with serving(tmp_path, health={"policy": "hold"}) as syncer:

        def version() -> int:
            return syncer.core.ask(lambda machine: machine.state.fragments[0].version)

        def fate() -> str | None:
            fates = syncer.core.ask(lambda machine: machine.state.sites["a"].lines[0].fates)
            return next((str(each.reason or "merged") for each in fates if each.sequence == 5), None)

        join(syncer)
        for sequence in range(1, 6):
            values = dice(sequence, 0) * (1e6 if sequence == 5 else 1)
            push(syncer, *update(sequence=sequence, values=values, base_version=sequence - 1))
            if sequence < 5:
                eventually(lambda merged=sequence: version() == merged, "merged")
        words_of_it = [address(syncer), "a", "0", "5"]
        cli.out(verb, *words_of_it)
        eventually(lambda: fate() == end, "decided")
        told = cli.json(verb, *words_of_it)
        assert (told["verb"], told["site"], told["fragment"], told["sequence"]) == (verb, "a", "0", "5")
        cli.refuses(ExitCode.FAILED, words, other, *words_of_it)


def test_what_is_said_to_a_run_is_said_to_all_its_syncers(tmp_path: Path, cli: Cli) -> None:
    with serving(tmp_path / "one") as one, serving(tmp_path / "other") as other:
        join(one)
        join(other)
        where = f"{address(one)}/{address(other)}"
        told = cli.out("evict", where, "a").splitlines()
        assert [line.split(": ")[0] for line in told] == [address(one), address(other)]
        cli.refuses(ExitCode.USAGE, "each counts its own fragments from 0", "admit", where, "a", "0", "5")
    with serving(tmp_path / "third") as third:
        join(third)
        said = cli.out("evict", f"{address(one)}/{address(third)}", "a", code=ExitCode.UNREACHABLE)
        assert said.startswith(address(third)), "one that is away keeps no other from hearing it"


def address(syncer: Syncer) -> str:
    assert syncer._server is not None
    return syncer._server.address


def test_a_site_is_put_out_and_let_in_again_and_a_run_is_drained(tmp_path: Path, cli: Cli) -> None:
    with serving(tmp_path) as syncer:
        join(syncer)
        where = address(syncer)
        for verb, status in (("evict", "evicted"), ("evict", "evicted"), ("readmit", "left"), ("readmit", "left")):
            told = cli.out(verb, where, "a")
            assert syncer.api.status()["sites"]["a"]["status"] == status  # type: ignore[index]
        assert "a may join" in told
        join(syncer, process="feedbeef01")
        for said, verb, *words in (
            ("site_id is 'nobody': the run has no such site", "admit", "nobody", "0", "5"),
            ("fragment is 9: the run has no such fragment", "refuse", "a", "9", "5"),
            ("sequence is 77: a has sent no such update of fragment 0", "admit", "a", "0", "77"),
            ("site_id is 'nobody': the run has no such site", "readmit", "nobody"),
        ):
            cli.refuses(ExitCode.FAILED, said, verb, where, *words)
    with serving(tmp_path / "drained") as syncer:
        (killed := tmp_path / "killed").mkdir()
        (killed / "config.yaml").write_text("run: {name: killed}")
        (killed / "syncer.address").write_text(address(syncer))
        said = f"no syncer of {killed} is running: {address(syncer)} serves run "
        cli.refuses(ExitCode.UNREACHABLE, said, "drain", str(killed))
        assert syncer.wait(0) is None
        assert "can be resumed" in cli.out("drain", address(syncer))
        assert syncer.wait(10.0) is not None


@pytest.mark.slow
def test_seconds_are_counted_over_restarts(place: Place) -> None:
    assert main(["train", *TINY, "run.name=timed", "run.seconds=0.3"]) == 0
    done = steps("timed")
    assert done
    assert main(["train", *TINY, "run.name=timed", "run.seconds=0.3"]) == 0
    # Whether the time is over is asked after a step, so that a second start makes one.
    assert len(steps("timed")) <= len(done) + 1
