"""``diloco launch``: what it writes, what it calls, and what it says of nonsense."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from diloco.cli.launch import TOOLS, write
from diloco.cli.main import main
from diloco.config.errors import ConfigError
from tests.cli.conftest import Cli
from tests.deploy.rendered import AWAY, OPEN, SOURCE

EVERY = [*AWAY, *OPEN, "launch.secrets=false"]


@pytest.fixture(autouse=True)
def place(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose tools write down how they are called."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS.values():
        file = tmp_path / "bin" / tool
        file.write_text(f'#!/bin/sh\necho "{tool} $@ in $PWD" >> {tmp_path}/called\n[ ! -e {tmp_path}/fails ]\n')
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    return tmp_path


def called(place: Path) -> list[str]:
    return (place / "called").read_text().splitlines() if (place / "called").exists() else []


@pytest.mark.parametrize("kind", TOOLS)
def test_the_tool_is_called_where_the_files_are(kind: str, place: Path, cli: Cli) -> None:
    told = cli.out("launch", kind, "--yes", *EVERY)
    folder = place / "runs" / "First.run" / "launch" / kind
    assert told.startswith(f"runs/First.run/launch/{kind}: ")
    wanted = {
        "docker": [f"docker build --tag diloco:latest --file Dockerfile {SOURCE}"],
        "slurm": [f"sbatch {name}.sbatch" for name in ("syncer", "site-a", "fra")],
        "kubernetes": [f"kubectl apply --filename {name}.yaml" for name in ("syncer", "site-a", "fra")],
        "skypilot": [
            f"sky {launch} first-run-{name} --yes --detach-run --workdir {SOURCE} {name}.sky.yaml"
            for name, launch in (
                ("syncer", "launch --cluster"),
                ("site-a", "jobs launch --name"),
                ("fra", "jobs launch --name"),
            )
        ],
    }[kind]
    assert called(place) == [f"{line} in {folder}" for line in wanted]
    assert all(f"  {line}\n" in told for line in wanted), "it is said before it is done"


def test_what_is_printed_is_what_is_written_and_the_same_again_changes_nothing(place: Path, cli: Cli) -> None:
    text = cli.out("launch", "slurm", "--dry-run", *EVERY)
    assert main(["launch", "slurm", "--dry-run", "--to", "out", *EVERY]) == 0
    files = sorted((place / "out").iterdir())
    assert files
    for file in files:
        assert f"# --- {file.name} ---\n{file.read_text()}" in text
    assert text.count("# --- ") == len(files)
    assert called(place) == []
    same = files[0].name
    write(place / "out", {same: files[0].read_text()})
    with pytest.raises(ConfigError, match=f"out/{same} exists with other content"):
        write(place / "out", {"b": "text", same: "other"})
    assert not (place / "out" / "b").exists(), "all or none"


def test_the_first_failure_is_the_last_call(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "fails").touch()
    assert main(["launch", "slurm", "--yes", *EVERY]) == 1
    assert "sbatch syncer.sbatch ended with code 1; no later command was run" in capsys.readouterr().err
    assert len(called(place)) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_user_must_agree(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for stdin, code, calls in ((Terminal("\n"), 0, 0), (io.StringIO(), 2, 0), (Terminal("y\n"), 0, 3)):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["launch", "slurm", *EVERY]) == code
        assert len(called(place)) == calls
        told = capsys.readouterr().err
        assert ("there is no terminal to ask on: --yes runs the commands" in told) is (code == 2)


def test_a_file_of_the_users_or_a_tool_that_is_not_there_is_named_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "out").mkdir()
    (place / "out" / "site-a.sbatch").write_text("mine")
    (place / "bin" / "sky").unlink()
    for words, code, arguments in (
        ("out/site-a.sbatch exists with other content", 2, ["slurm", "--dry-run", "--to", "out", *AWAY]),
        ("sky is not installed here: --dry-run writes the files", 1, ["skypilot", *AWAY]),
    ):
        assert main(["launch", *arguments]) == code
        *notes, told = capsys.readouterr().err.splitlines()
        assert words in told
        said = [
            note.startswith("note: no files for the syncer, since other machines cannot reach it") for note in notes
        ]
        assert said == [True] * (arguments[0] == "slurm"), "a missing tool is named first"
    assert [(file.name, file.read_text()) for file in (place / "out").iterdir()] == [("site-a.sbatch", "mine")]
