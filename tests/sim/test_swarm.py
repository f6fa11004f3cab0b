"""The machines under some seeds of faults, and figures that show that the seeds were worth something."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from diloco.sim.plan import GENTLE, HARSH, PAIR
from diloco.sim.swarm import Outcome, run_seed

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

outcome_of = functools.cache(run_seed)


@pytest.mark.parametrize(
    "seeds", [(*FAILED_ONCE, *BESIDE), pytest.param(SEEDS, marks=pytest.mark.slow)], ids=["a few", "the first"]
)
def test_seeds(seeds: Sequence[int]) -> None:
    outcomes = [outcome_of(seed) for seed in seeds]
    failed = [f"make swarm SEEDS=1 ARGS='--seed {each.seed}'  # {each.failure}" for each in outcomes if each.failure]
    assert not failed, "\n" + "\n".join(failed)
    check_that_it_counts(outcomes)


@pytest.mark.parametrize("seed", [*FAILED_ONCE, *(pytest.param(seed, marks=pytest.mark.slow) for seed in LONG)])
def test_a_seed_that_failed_once(seed: int) -> None:
    assert outcome_of(seed).failure == ""


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


def test_failure_is_reported_and_not_raised() -> None:
    outcome = outcome_of(BESIDE[1])
    assert (outcome.failure, outcome.checker) == ("", "")
    assert outcome.events > 100
    assert outcome.versions > 0
