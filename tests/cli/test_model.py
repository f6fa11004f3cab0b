"""``diloco export``: what it says, what it leaves behind, and what it says of nonsense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from diloco.cli.main import main
from diloco.cli.model import size_of
from diloco.config.errors import ConfigError
from diloco.config.model_files import read_options, read_values
from diloco.models.read import take
from tests.models.pasts import Hand, configured, with_a_past
from tests.syncer.building import files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_past(tmp_path_factory.mktemp("exported"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(("asked", "version"), [pytest.param([], 8, marks=pytest.mark.slow), (["--version", "3"], 3)])
def test_a_version_of_a_run_becomes_a_folder(
    asked: list[str], version: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    out = tmp_path / "model"
    assert main(["export", str(run), "--to", str(out), *asked]) == 0
    assert f"{out}: version {version} of past, " in capsys.readouterr().out
    assert files(run) == before, "the run is only read"
    found = read_values(str(out), read_options(str(out)))
    wanted = take(str(run), version=version).parameters
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_it_can_be_rounded_and_cut(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["export", str(run), "--to", str(out), "--dtype", "bf16", "--shard-size", "20kB"]) == 0
    assert "bytes of bf16" in capsys.readouterr().out
    assert len(list(out.glob("*.safetensors"))) > 1
    values = read_values(str(out), read_options(str(out)))
    assert {value.dtype for value in values.values()} == {torch.bfloat16}


def test_a_running_syncer_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand = Hand(configured(tmp_path))
    config = str(tmp_path / "past" / "config.yaml")
    try:
        asked = ["export", "--syncer", hand.address, "--config", config, "--to", str(tmp_path / "model")]
        assert main(asked) == 0
        assert "version 0 of past" in capsys.readouterr().out
        assert main([*asked[:-1], str(tmp_path / "other"), "model.dim=64"]) == 4
        assert "by the settings here: give the run's own" in capsys.readouterr().err
        assert main([*asked[:-1], str(tmp_path / "other"), "--version", "2"]) == 2
        assert "--version is 2: a syncer hands out its newest alone" in capsys.readouterr().err
    finally:
        hand.stop()
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_syncer_says_of_which_model_its_values_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand = Hand(configured(tmp_path))
    try:
        hand.join("a")
        hand.push("a", 0)
        assert main(["export", "--syncer", hand.address, "--to", str(tmp_path / "model")]) == 0
        assert "versions 1 0 of past" in capsys.readouterr().out
        assert main(["export", "--syncer", hand.address, "--to", str(tmp_path / "x"), "model.heads=1"]) == 4
        assert "model.heads is 2 in run past and 1 here" in capsys.readouterr().err
    finally:
        hand.stop()
    wanted = take(str(tmp_path / "past")).parameters
    found = read_values(str(tmp_path / "model"), read_options(str(tmp_path / "model")))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("words", "code", "arguments"),
    [
        ("give one run folder", 2, ["--to", "x"]),
        ("give one run folder", 2, ["RUN", "RUN", "--to", "x"]),
        ("--to is missing", 2, ["RUN"]),
        ("it exists already", 2, ["RUN", "--to", "RUN"]),
        ("--version is 'last': a number from 0 on, or newest", 2, ["RUN", "--to", "x", "--version", "last"]),
        ("holds no more than version 8", 1, ["RUN", "--to", "x", "--version", "9"]),
        ("--shard-size is '5': a size", 2, ["RUN", "--to", "x", "--shard-size", "5"]),
        ("invalid choice: 'int4'", 2, ["RUN", "--to", "x", "--dtype", "int4"]),
        ("'nowhere' is no run folder", 2, ["nowhere", "--to", "x"]),
        ("unknown key model.dimm", 2, ["RUN", "--to", "x", "model.dimm=3"]),
        ("is of another model, or of other fragments, than", 2, ["RUN", "--to", "x", "model.tied=true"]),
        ("does not answer", 3, ["--syncer", "127.0.0.1:1", "--to", "x"]),
        ("does not answer", 3, ["--syncer", "127.0.0.1:1", "--to", "x", "run.name=past"]),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    code: int,
    arguments: list[str],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(text.replace("RUN", str(run)) for text in arguments)]) == code
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_sizes() -> None:
    assert [size_of(text) for text in ("5GB", "1.5 MB", "20kB")] == [5 * 10**9, 1_500_000, 20_000]
    for text in ("", "0GB", "-1GB", "5 TB", "GB"):
        with pytest.raises(ConfigError, match="--shard-size"):
            size_of(text)
