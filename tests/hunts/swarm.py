"""``make swarm SEEDS=2000``: simulate the two machines under random faults, one run per seed, on every core; with
``ARGS="--syncers several"`` runs in which several syncers share the model.

Runs ``--seeds`` seeds or, with ``--minutes``, new ones until the time is up: the simulator's soak test.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from diloco.sim.swarm import CHECKERS, Checker, Outcome, Several, Swarm, draw_plan, draw_several
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

CHUNK = 50


def run_seed(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    return Swarm(draw_plan(seed), only).run()


def run_several(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    return Several(draw_several(seed), only).run()


RUNS = {"one": run_seed, "several": run_several}


def pieces(first: int, count: int) -> Iterator[range]:
    """Yield ``count`` seeds from ``first`` on, in pieces for the processes."""
    for start in range(first, first + count, CHUNK):
        yield range(start, min(start + CHUNK, first + count))


def outcomes(wanted: Iterable[range], jobs: int, syncers: str) -> Iterator[Outcome]:
    """Yield the outcomes of every piece; at most ``jobs`` pieces are submitted at a time."""
    with ProcessPoolExecutor(jobs) as pool:
        waiting = iter(wanted)
        running = {pool.submit(run_piece, piece, syncers) for piece in itertools.islice(waiting, jobs)}
        while running:
            done = next(as_completed(running))
            running.discard(done)
            running |= {pool.submit(run_piece, piece, syncers) for piece in itertools.islice(waiting, 1)}
            try:
                yield from done.result()
            except BrokenProcessPool as error:
                raise SystemExit(f"a process of the hunt died: {error}") from error


def run_piece(seeds: range, syncers: str) -> list[Outcome]:
    return [RUNS[syncers](seed) for seed in seeds]


@hunting(
    seeds=(200, "number of seeds"),
    minutes=(0.0, "run for this long instead"),
    jobs=(len(os.sched_getaffinity(0)), "processes"),
    syncers=("one", "syncers that share the model", RUNS),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    wanted = pieces(asked.seed, sys.maxsize if asked.minutes else asked.seeds)
    if asked.minutes:
        wanted = itertools.takewhile(lambda _: hunt.seconds() < 60 * asked.minutes, wanted)
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    staleness_worst = 0
    for outcome in outcomes(wanted, asked.jobs, asked.syncers):
        totals["seeds"] += 1
        totals += outcome.ran
        faults += outcome.faults
        fates += outcome.fates
        staleness_worst = max(staleness_worst, outcome.staleness_worst)
        if outcome.failure:
            hunt.violated(outcome.failure, seed=outcome.seed, seeds=1, minutes=0.0)
    ran = {"ran": dict(totals), "faults": dict(sorted(faults.items()))}
    return {**ran, "updates": dict(sorted(fates.items())), "staleness_worst": staleness_worst}
