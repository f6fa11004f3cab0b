"""A seed replays exactly: in this process, in another, and under another hash seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from diloco.sim.swarm import run_seed
from diloco.sim.world import Link
from tests.tidy_rules import ROOT

SEEDS = (1, 21)
PROGRAM = f"from diloco.sim.swarm import run_seed\nfor seed in {SEEDS}: print(run_seed(seed).digest)"


def digests() -> list[str]:
    return [run_seed(seed).digest for seed in SEEDS]


@pytest.fixture(scope="module")
def here() -> list[str]:
    return digests()


@pytest.mark.parametrize("hash_seed", [pytest.param("0", marks=pytest.mark.slow), "4711"])
def test_seed_replays_in_another_process(hash_seed: str, here: list[str]) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == here, f"seeds {SEEDS} under PYTHONHASHSEED={hash_seed}"


def test_digest_sees_a_delay_that_is_not_from_the_seed(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right, loose = Link._delay_ns, random.SystemRandom()
    monkeypatch.setattr(Link, "_delay_ns", lambda self: right(self) + loose.randrange(1000))
    assert all(a != b for a, b in zip(here, digests(), strict=True))


def test_seeds_differ(here: list[str]) -> None:
    assert len(set(here)) == len(SEEDS)
