"""``make swarm SEEDS=2000``: simulate the two machines under random faults, one run per seed, on every core; with
``ARGS="--syncers several"`` runs in which several syncers share the model.

Runs ``--seeds`` seeds or, with ``--minutes``, new ones until the time is up: the simulator's soak test.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from diloco.sim.swarm import CHECKERS, Checker, Outcome, Several, Swarm, draw_plan, draw_several
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

WAVE = 20
"""The seeds that each process gets before the time is looked at again."""


def run_seed(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    return Swarm(draw_plan(seed), only).run()


def run_several(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    return Several(draw_several(seed), only).run()


RUNS = {"one": run_seed, "several": run_several}


def outcomes(hunt: Hunt, asked: Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of all seeds, in order, in waves for the processes."""
    seeds = itertools.count(asked.seed) if asked.minutes else iter(range(asked.seed, asked.seed + asked.seeds))
    with ProcessPoolExecutor(asked.jobs) as pool:
        while not asked.minutes or hunt.seconds() < 60 * asked.minutes:
            wave = list(itertools.islice(seeds, WAVE * asked.jobs))
            if not wave:
                return
            yield from pool.map(RUNS[asked.syncers], wave, chunksize=5)


@hunting(
    seeds=(200, "number of seeds"),
    minutes=(0.0, "run for this long instead"),
    jobs=(len(os.sched_getaffinity(0)), "processes"),
    syncers=("one", "syncers that share the model", RUNS),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    staleness_worst = 0
    for outcome in outcomes(hunt, asked):
        totals["seeds"] += 1
        totals += outcome.ran
        faults += outcome.faults
        fates += outcome.fates
        staleness_worst = max(staleness_worst, outcome.staleness_worst)
        if outcome.failure:
            hunt.violated(outcome.failure, seed=outcome.seed, seeds=1, minutes=0.0)
    ran = {"ran": dict(totals), "faults": dict(sorted(faults.items()))}
    return {**ran, "updates": dict(sorted(fates.items())), "staleness_worst": staleness_worst}
