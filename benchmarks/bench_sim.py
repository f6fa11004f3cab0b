"""How many site-rounds per second does the simulator make on one core, without tensors?

A site-round is one update of a site: trained, sealed, pushed, merged and adopted, by the machines of a real run.  The
fleets are those of ``diloco sim`` with sites of unequal speed: all sites in lock-step, and quorum 1 with grace and one
or four fragments.  ``heap`` is a plain loop that, for each site-round, takes the earliest of as many timestamps as
there are sites and puts the next one back: the floor of any event simulation in Python.  Each seed is a repeat; rates
are at the median and at the slow end (the 95th percentile of the time).  Run as ``python -m benchmarks.bench_sim``.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser_of, percentile, record
from diloco.config import compose as configs
from diloco.lab.fleet import Told, fleet_of, with_sites
from diloco.sim.fleet import simulate

if TYPE_CHECKING:
    from diloco.sim.fleet_plan import FleetPlan

SETTINGS = ("cluster=local4", "network=transatlantic", "outer.sites_max=1000")
FLEETS = {
    "lock-step": ("outer=diloco",),
    "1 fragment": ("outer=decoupled", "outer.adopt=rebase", "outer.num_fragments=1"),
    "4 fragments": ("outer=decoupled", "outer.adopt=rebase", "outer.num_fragments=4"),
}
SITES = (20, 100, 1000)
SITE_HOURS = {"lock-step": 1200.0, "1 fragment": 800.0, "4 fragments": 260.0}
"""The simulated hours of each fleet times its sites: a few seconds of a core each."""


def fleet(settings: tuple[str, ...], sites: int, seconds: float, seed: int) -> FleetPlan:
    """Return a fleet of ``sites`` for ``seconds``, with inner steps of a second where a site is not slowed."""
    config = with_sites(configs.compose([*SETTINGS, *settings, f"run.seed={seed}"]), sites)
    return fleet_of(config, Told(step_s=1.0, seconds=seconds))


def heap(sites: int, rounds: int) -> None:
    """Only process the timestamps, in order: the floor."""
    planned = [(index, index) for index in range(sites)]
    for _ in range(rounds):
        now, index = planned[0]
        heapq.heapreplace(planned, (now + sites + index, index))


def measured(name: str, sites: int, seconds: float, seeds: range) -> dict[str, Any]:
    """Simulate a fleet of each seed, with the floor after it, and return the row."""
    plans = [fleet(FLEETS[name], sites, seconds, seed) for seed in seeds]
    simulate(plans[0])
    rates, floors, rounds = [], [], 0
    for plan in plans:
        began_s = time.perf_counter()
        rounds = simulate(plan).site_rounds
        simulated_s = time.perf_counter()
        heap(sites, rounds)
        rates.append((simulated_s - began_s) / rounds)
        floors.append((time.perf_counter() - simulated_s) / rounds)
    p50_s, p95_s, floor_s = percentile(rates, 50), percentile(rates, 95), percentile(floors, 50)
    return {
        "what": name,
        "sites": sites,
        "hours": round(seconds / 3600, 3),
        "site_rounds": rounds,
        "p50_site_rounds_per_s": round(1 / p50_s),
        "p95_site_rounds_per_s": round(1 / p95_s),
        "heap_per_s": round(1 / floor_s),
        "times_heap": round(p50_s / floor_s, 1),
    }


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    # With a small share of the hours, a large fleet would not close any round.
    share, repeats, sizes = (0.02, 2, SITES[:2]) if arguments.quick else (1.0, 5, SITES)
    seeds = range(arguments.seed, arguments.seed + repeats)
    rows = []
    for name, site_hours in SITE_HOURS.items():
        for sites in sizes:
            rows.append(row := measured(name, sites, 3600 * share * site_hours / sites, seeds))
            print(
                f"{name:12s} {sites:5,d} sites {row['p50_site_rounds_per_s']:>8,} site-rounds/s at the median,"
                f" {row['p95_site_rounds_per_s']:>8,} at the slow end; {row['times_heap']:6.1f} times the heap's time"
            )
    fleets = {name: " ".join((*SETTINGS, *settings)) for name, settings in FLEETS.items()}
    config = {"fleets": fleets, "site_hours": {name: share * each for name, each in SITE_HOURS.items()}}
    finish(record("sim", config, rows, arguments.seed, repeats=repeats), save=arguments.save)


if __name__ == "__main__":
    main()
