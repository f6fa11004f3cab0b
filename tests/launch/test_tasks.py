"""What may be asked with --tasks, and where the harness is not installed; what it then gives is test_harness.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diloco.cli.main import main

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
