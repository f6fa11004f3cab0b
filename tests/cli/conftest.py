"""What the tests of several verbs share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb sets in its environment ends with the test."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")})


@pytest.fixture
def here(own_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, in which its verbs run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Cli:
    """Runs verbs in this process, and looks at what they say."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def out(self, *arguments: str, code: int = 0) -> str:
        """What a verb prints that ends with ``code``."""
        assert main([*arguments]) == code
        return self.capsys.readouterr().out

    def json(self, *arguments: str) -> Any:
        """What a verb prints for a program."""
        return json.loads(self.out(*arguments, "--json"))

    def refuses(self, code: int, words: str, *arguments: str) -> str:
        """A verb ends with this code, prints nothing, and says these words in its one line, which is returned."""
        self.capsys.readouterr()
        assert main([*arguments]) == code
        said = self.capsys.readouterr()
        assert words in said.err
        assert said.err.count("\n") == 1, said.err
        assert arguments[0] == "doctor" or not said.out, "the doctor has looked at the machine before"
        return said.err.rstrip()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
