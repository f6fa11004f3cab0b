"""How the tests run a hunt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def hunted(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run a hunt with options; return its last line and all that it says.  Its exit code tells of violations."""

    def run(hunt: Any, *options: str) -> tuple[dict[str, Any], str]:
        code, said = hunt.main(list(options)), capsys.readouterr().out
        row: dict[str, Any] = json.loads(said.splitlines()[-1])
        assert code == (1 if row["violations"] else 0)
        return row, said

    return run
