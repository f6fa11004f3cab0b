from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from diloco.cli.main import main
from diloco.config import build
from diloco.config.compose import compose, write
from diloco.inner import checkpoint
from diloco.models.evaluate import Evaluator
from diloco.observe.eventlog import read_events
from diloco.outer.fragments import named_parameters_once
from tests.models.pasts import Hand, configured, with_a_past
from tests.runs.processes import TINY, Place
from tests.syncer.building import eventually


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
    told = run / "events.jsonl"

    def end() -> None:
        eventually(lambda: told.exists() and read_events(told)[0], "an evaluation", bound_s=60.0)
        hidden.rename(final)

    ending = threading.Thread(target=end)
    ending.start()
    assert main(["eval", str(run), "--follow"]) == 0
    ending.join()
    events, _ = read_events(told)
    assert [event["versions"] for event in events] == [[0], [7]]
    assert events[0]["val_loss"] == pytest.approx(5.5, abs=0.1)


def test_a_run_without_syncer_and_end_is_unreachable(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "syncer/final/final.json").unlink()
    assert main(["eval", str(run)]) == 3
    assert "the syncer of run ended does not answer" in capsys.readouterr().err


def test_a_syncer_alone_needs_the_name_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--syncer", "127.0.0.1:1", "--follow", *TINY]) == 2
    assert "run.name is null" in capsys.readouterr().err


def test_a_syncer_says_of_which_model_its_values_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    Place(tmp_path)
    text = [
        "data=text",
        "data.validation_sequences=32",
        f"data.path={tmp_path / 'text'}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    hand = Hand(configured(tmp_path / "runs", "model.rope_theta=70000", *text))
    try:
        assert main(["eval", "--syncer", hand.address, "--json", "inner.precision=fp32", *text]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["eval", "--syncer", hand.address, "model.rope_theta=10000", *text]) == 4
        assert "model.rope_theta is 70000.0 in run past and 10000.0 here" in capsys.readouterr().err
        config = hand.config
    finally:
        hand.stop()
    score = Evaluator(config, build.corpus(config)).score(build.build_model(config))
    assert found["versions"] == [0, 0]
    assert found["val_loss"] == pytest.approx(score.val_loss, abs=1e-6)


@pytest.fixture
def trained(run: Path) -> Path:
    """A checkpoint of the values that the run's final model has."""
    values = load_file(run / "syncer/final/model.safetensors")
    folder = run.parent / "warm" / "train" / "checkpoints"
    checkpoint.save(folder, "step-0000000001", {f"model/{name}": value for name, value in values.items()}, {})
    (folder.parents[1] / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    return folder


def test_what_lies_in_files_has_the_loss_of_the_run(
    run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--json"]) == 0
    of_run = json.loads(capsys.readouterr().out)
    assert of_run["versions"] == [7]
    assert main(["export", str(trained), "--to", "model"]) == 0
    capsys.readouterr()
    text = ["data=text", "data.path=text", "data.cache=cache", "inner.precision=fp32"]
    for source, settings in ((str(trained), []), ("warm", []), ("model", text)):
        assert main(["eval", source, *settings, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["whole"], source
        assert found["val_loss"] == pytest.approx(of_run["val_loss"], abs=1e-5), source
        assert found["val_bits_per_byte"] == pytest.approx(of_run["val_bits_per_byte"], abs=1e-5), source
        assert main(["eval", source, *settings]) == 0
        said = capsys.readouterr().out
        assert f"val loss {found['val_loss']:.4f} nats/token" in said
        assert said.endswith("(whole validation split), of the text text text\n"), "which text it is judged on"
    assert len(read_events(run / "events.jsonl")[0]) == 1, "only of the run itself"


@pytest.mark.slow
def test_an_earlier_version_is_evaluated_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Place(tmp_path)
    past = with_a_past(tmp_path / "runs", 2, f"data.path={tmp_path / 'text'}", f"data.cache={tmp_path / 'cache'}")
    losses = []
    for version in (0, 4):
        assert main(["eval", str(past), "--version", str(version), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["versions"] == [version, version]
        losses.append(found["val_loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("is evaluated as it lies", ["CHECKPOINT", "--follow"]),
        ("is evaluated as it lies", ["CHECKPOINT", "--syncer", "127.0.0.1:1"]),
        ("--version is 3: a syncer hands out its newest alone", ["--syncer", "127.0.0.1:1", "--version", "3"]),
        ("data: path is 'nowhere'", ["CHECKPOINT", "data.path=nowhere"]),
        ("of another model", ["CHECKPOINT", "model.dim=64"]),
    ],
)
def test_a_mistake_with_files_is_one_line(
    words: str, arguments: list[str], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(text.replace("CHECKPOINT", str(trained)) for text in arguments)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


# --- What may be asked with --tasks, and where the harness is not installed; what it then gives is test_harness.py ---

NOWHERE = ["eval", "nowhere", "--tasks", "pets"]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--fewshot is 2: it is for --tasks", ["eval", "nowhere", "--fewshot", "2"]),
        ("--limit is 2: it is for --tasks", ["eval", "nowhere", "--limit", "2"]),
        ("--include-path is there: it is for --tasks", ["eval", "nowhere", "--include-path", "there"]),
        ("--tasks are scored once: no --follow", [*NOWHERE, "--follow"]),
        ("--tasks is 'a,,b': names of different tasks", ["eval", "nowhere", "--tasks", "a,,b"]),
        ("--tasks is 'a, a': names of different tasks", ["eval", "nowhere", "--tasks", "a, a"]),
        ("--tasks is '': names of different tasks", ["eval", "nowhere", "--tasks", ""]),
        ("--include-path is 'there': a folder that is there", [*NOWHERE, "--include-path", "there"]),
        ("--fewshot is -1: at least 0", [*NOWHERE, "--fewshot", "-1"]),
        ("--limit is 0: at least 1", [*NOWHERE, "--limit", "0"]),
        ("--tasks are scored of nowhere or of what --syncer publishes", [*NOWHERE, "--syncer", "127.0.0.1:1"]),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    words: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_where_the_harness_is_not_installed_the_line_says_how_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "diloco.integrations.lm_eval", raising=False)
    assert main(NOWHERE) == 1
    said = capsys.readouterr().err
    assert "--tasks needs lm-evaluation-harness" in said
    assert said.endswith("pip install 'diloco[harness]'\n")
    assert said.count("\n") == 1
