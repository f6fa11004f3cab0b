"""Ranks of somebody's own torchrun as one site."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.durable import locked
from tests.integrations.serving import PATIENT, serving

ROOT = Path(__file__).resolve().parents[2]


def both(address: str, folder: Path, layout: str) -> subprocess.CompletedProcess[str]:
    program = [str(ROOT / "tests/integrations/joined_rank.py"), address, str(folder), layout]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run([*torchrun, *program], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_what_keeps_rank_0_from_beginning_is_told_to_the_others(tmp_path: Path) -> None:
    with serving(tmp_path) as served, locked(tmp_path / "fra"):
        done = both(served.address, tmp_path, "held")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second, "none of them waits for one that has gone"
    assert "is it started twice?" in first


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "leased", "stages"])
def test_two_ranks_are_one_site(tmp_path: Path, layout: str) -> None:
    leased = ["data.leased=true", "data.unit_sequences=4"] if layout == "leased" else []
    with serving(tmp_path, "run.tokens=300", PATIENT, *leased) as served:
        done = both(served.address, tmp_path, layout)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    if layout == "stages":
        held = [sorted(each["held"]) for each in (first, second)]
        assert held == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]
        values = [value for each in (first, second) for part in each["held"].values() for value in _flat(part)]
        assert len(values) == 161, "none is missing"
        assert all(map(math.isfinite, values)), "they had only NaN before they joined"
    else:
        assert first["held"] == second["held"], "every rank holds the same model"
    assert first["steps"] == second["steps"] >= 30
    assert first["why"] == "the run is finished"
    assert second["why"], "every rank stops at the same step"
    assert first["progress"] == second["progress"]
    assert first["progress"][-1] > 0
    ledger = first["ledger"]
    assert ledger["processed"] == ledger["merged"] == 10 * first["steps"], "tokens of both ranks"
    assert second["ledger"] == {}
    if leased:
        read = [index for step in zip(first["read"], second["read"], strict=True) for pair in step for index in pair]
        assert len(read) == 4 * first["steps"], "each rank reads a part of each step"
        assert len(set(read[:400])) == len(read[:400]), "and no sample twice"


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, list):
        for each in values:
            yield from _flat(each)
    else:
        yield values
