"""``python -m diloco.sim``: run seeds, print one line for each that fails, and say how fast it was."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from diloco.sim.several import run_several
from diloco.sim.swarm import run_seed


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds asked for; the exit code is 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m diloco.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--several", action="store_true", help="runs in which several syncers hold the model")
    asked = parser.parse_args(arguments)
    started_ns = time.perf_counter_ns()
    faults: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    apart: Counter[str] = Counter()
    failures, events, simulated_ns, restarts, versions, staleness_worst = [], 0, 0, 0, 0, 0
    for seed in range(asked.first, asked.first + asked.seeds):
        outcome = run_several(seed) if asked.several else run_seed(seed)
        faults += outcome.faults
        fates += outcome.fates
        apart += outcome.apart()
        events += outcome.events
        simulated_ns += outcome.simulated_ns
        restarts += outcome.restarts
        versions += outcome.versions
        staleness_worst = max(staleness_worst, outcome.staleness_worst)
        if outcome.failure:
            failures.append(seed)
            which = " --several" if asked.several else ""
            sys.stdout.write(f"python -m diloco.sim --first {seed} --seeds 1{which}  # {outcome.failure}\n")
            sys.stdout.flush()
    seconds = (time.perf_counter_ns() - started_ns) / 1e9
    summary = {
        "seeds": asked.seeds,
        "first": asked.first,
        "failures": failures,
        "events": events,
        "events_per_s": round(events / seconds),
        "seconds": round(seconds, 2),
        "simulated_seconds": round(simulated_ns / 1e9),
        "restarts": restarts,
        "versions": versions,
        "updates": dict(sorted(fates.items())),
        "staleness_worst": staleness_worst,
        "faults": dict(sorted(faults.items())),
        **apart,
    }
    if asked.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        sys.stdout.write(
            f"{asked.seeds} seeds, {len(failures)} failed, {events} events at {summary['events_per_s']} a second\n"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
