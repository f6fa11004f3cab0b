"""What the tests of several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """A verb ends with this code, prints nothing, and says these words in its one line."""

    def ends(code: int, words: str, *arguments: str) -> None:
        capsys.readouterr()
        assert main([*arguments]) == code
        said = capsys.readouterr()
        assert words in said.err
        assert said.err.count("\n") == 1, said.err
        assert arguments[0] == "doctor" or not said.out, "the doctor has looked at the machine before"

    return ends
