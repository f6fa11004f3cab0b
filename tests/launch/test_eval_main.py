from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from diloco.launch import build
from diloco.launch.cli import main
from diloco.launch.config import compose, write
from diloco.launch.eventlog import read_events
from diloco.outer.fragments import named_parameters_once
from tests.launch.processes import TINY, Place


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    Place(tmp_path)
    config = compose([*TINY, "run.name=ended"])
    folder = tmp_path / "runs" / "ended"
    write(config, folder / "config.yaml")
    final = folder / "syncer" / "final"
    final.mkdir(parents=True)
    parameters = named_parameters_once(build.build_model(config))
    save_file({name: value.detach() for name, value in parameters.items()}, final / "model.safetensors")
    (final / "final.json").write_text(json.dumps({"versions": [7], "digests": ["0"]}))
    before = dict(os.environ)
    yield folder
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_a_finished_run_is_evaluated_on_the_whole_validation_split(
    run: Path, follow: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), *follow]) == 0
    assert "versions 7: val loss 5.5" in capsys.readouterr().out
    (event,) = read_events(run / "events.jsonl")[0]
    assert (event["who"], event["what"], event["versions"], event["whole"]) == ("eval", "eval", [7], True)


def test_one_who_follows_begins_with_version_zero(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run has left version 0 behind before it can be fetched."""
    final = run / "syncer/final/final.json"
    hidden = final.rename(final.with_suffix(".later"))
    threading.Timer(1.5, hidden.rename, (final,)).start()
    assert main(["eval", str(run), "--follow"]) == 0
    events, _ = read_events(run / "events.jsonl")
    assert [event["versions"] for event in events] == [[0], [7]]
    assert events[0]["val_loss"] == pytest.approx(5.5, abs=0.1)


def test_a_run_without_syncer_and_end_is_unreachable(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "syncer/final/final.json").unlink()
    assert main(["eval", str(run)]) == 3
    assert "the syncer of run ended does not answer" in capsys.readouterr().err


def test_a_syncer_alone_needs_the_name_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--syncer", "127.0.0.1:1", *TINY]) == 2
    assert "run.name is null" in capsys.readouterr().err
