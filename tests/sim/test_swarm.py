"""The machines under some seeds of faults, and figures that show that the seeds were worth something.

A seed replays exactly: in this process, in another, and under another hash seed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from diloco.sim.plan import GENTLE, HARSH, PAIR
from diloco.sim.swarm import Outcome, run_seed
from diloco.sim.world import Link
from tests.tidy_rules import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS = range(40)
"""Of the thousand that .ci/run takes."""
FAILED_ONCE = (
    500097,
    500320,
    501554,
    509386,
    701813,
    803082,
    912991,
    914170,
    925059,
    50645,
    60061,
    26111975,
    26113595,
    26114034,
    27111028,
    33005021,
    34009699,
    35000869,
)
LONG = (504502, 506599)
"""As long as nothing draws otherwise, each of them goes through what was wrong."""
BESIDE = (26, 37)
"""With those that failed once they inject every fault."""


@pytest.mark.parametrize(
    "seeds", [(*FAILED_ONCE, *BESIDE), pytest.param(SEEDS, marks=pytest.mark.slow)], ids=["a few", "the first"]
)
def test_seeds(seeds: Sequence[int]) -> None:
    outcomes = [run_seed(seed) for seed in seeds]
    failed = [f"make swarm SEEDS=1 ARGS='--seed {each.seed}'  # {each.failure}" for each in outcomes if each.failure]
    assert not failed, "\n" + "\n".join(failed)
    check_that_it_counts(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", LONG)
def test_a_long_seed_that_failed_once(seed: int) -> None:
    assert run_seed(seed).failure == ""


def check_that_it_counts(outcomes: list[Outcome]) -> None:
    """Seeds in which little happens prove little (etcd's rule)."""
    faults: Counter[str] = sum((each.faults for each in outcomes), Counter())
    fates: Counter[str] = sum((each.fates for each in outcomes), Counter())
    wanted = {*GENTLE, *HARSH, *PAIR}
    assert set(faults) == wanted, f"never injected: {sorted(wanted - set(faults))}"
    assert sum(each.promotions for each in outcomes) > len(outcomes) // 20
    assert fates["merged"] > 20 * len(outcomes), fates
    assert {"merged", "stale", "non_finite", "evicted"} <= set(fates), fates
    assert sum(each.restarts for each in outcomes) > len(outcomes)
    assert max(each.staleness_worst for each in outcomes) >= 4


REPLAYED = (1, 21)
PROGRAM = f"from diloco.sim.swarm import run_seed\nfor seed in {REPLAYED}: print(run_seed(seed).digest)"


def test_a_seed_replays_in_another_process_and_no_delay_that_is_not_from_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [run_seed(seed).digest for seed in REPLAYED]
    assert len(set(here)) == len(REPLAYED)
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == here, f"seeds {REPLAYED}"
    right, loose = Link._delay_ns, random.SystemRandom()
    monkeypatch.setattr(Link, "_delay_ns", lambda self: right(self) + loose.randrange(1000))
    assert all(run_seed(seed).digest != digest for seed, digest in zip(REPLAYED, here, strict=True))
