"""Loops that fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.launch.forking import SUPPORT
from tests.launch.serving import serving

ROOT = Path(__file__).resolve().parents[2]


def in_a_new_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != SUPPORT}
    whole = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], env=whole, capture_output=True, text=True, timeout=120)


def test_who_joins_has_said_so_before_grpc_is_imported() -> None:
    ask = "import sys, os, diloco; assert 'grpc' not in sys.modules; diloco.JoinFailed; print(os.environ.get({!r}))"
    assert in_a_new_process("-c", ask.format(SUPPORT)).stdout == "0\n"
    assert in_a_new_process("-c", ask.format(SUPPORT), **{SUPPORT: "1"}).stdout == "1\n"
    unused = f"import os, diloco; print(os.environ.get({SUPPORT!r}))"
    assert in_a_new_process("-c", unused).stdout == "None\n"


@pytest.mark.slow
def test_a_loaders_workers_are_forked_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with serving(tmp_path, "run.tokens=100000", "data.leased=true", "data.unit_sequences=8") as served:
        done = in_a_new_process(str(ROOT / "tests/launch/loader_workers.py"), served.address)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "120 0 60\n"
        units = served.syncer.api.status()["units"]
        assert isinstance(units, dict)
        assert (units["merged"], units["repeated"]) == (15, 0), "what was drawn ahead counts for nothing"
