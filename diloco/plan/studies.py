"""The expected goodput of a planned run whose chips fail, and published tables reproduced by this simulator.

Goodput is computed by a formula and by a fleet of the real machines.  A site whose chips are interrupted at ``rate``
per second resumes after R seconds each time, which leaves 1 / (1 + rate R) of its time.  With all chips in one job, and
where sites wait for each other (no overlap), the rate is that of all chips together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

from diloco.plan.bandwidth import GRID_GBPS, Exchange, Model, gbps_needed
from diloco.plan.estimate import LAYOUTS, SHARES, loads_of, merging_share, sizes, star_of, utilisation_found
from diloco.sim.fleet import simulate
from diloco.sim.fleet_plan import YEAR_S, FleetPlan, FleetSite
from diloco.sync.options import SECOND_NS, LearnerOptions, OuterOptions, even_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.plan.bandwidth import Load, Star
    from diloco.plan.estimate import Question

ROUNDS_MIN = 4
SITE_ROUNDS = 800
"""How many rounds of single sites are simulated, but at least ``ROUNDS_MIN`` rounds."""
INTERRUPTIONS = 300
"""How many interruptions of sites are simulated; each takes about two milliseconds."""
INTERRUPTIONS_OF_JOB = 600
"""The same for one job: each takes half of that time, and most may come while the job is stopped."""
FRAGMENTS_MAX = 8
"""The most fragments of a simulated fleet; more would change when something is exchanged, not how much."""
WHOLE_TIMES = 8
"""How many times as large a whole fp32 version is as a version's encoded differences."""
JOB = "one job of all chips"


@dataclass(frozen=True, slots=True)
class Expected:
    """A layout's goodput, the share of time spent training, and ``merged``, the merged share of the updates due."""

    syncer: str
    """Where the syncer is; "": there is none, because all chips are one job."""
    layout: str
    goodput: float | None
    """None: failures are not simulated where sites wait for each other, because a fleet's sites wait for ever."""
    goodput_formula: float
    merged: float
    merged_formula: float
    interruptions: int
    """The number of interruptions in the simulation."""


def expected(question: Question) -> list[Expected]:
    """Return what to expect of all chips as one job, and of sites with the syncer at one of them, in parts at each, and
    where the question places it."""
    asked = {question.syncer, "central"} | ({"sharded"} if 1 < question.sites <= question.fragments else set())
    rate, waits = rate_per_s(question), question.waits
    share, interruptions = (1.0, 0) if waits else _failing(question, question.sites, rate, INTERRUPTIONS)
    # One job resumes without the lost chips, and waits for no link.
    of_job = question.sites * rate
    left, stops = _failing(question, 1, of_job, INTERRUPTIONS_OF_JOB)
    found = [Expected("", JOB, left, 1 / (1 + of_job * question.away_s), 1.0, 1.0, stops)]
    for syncer in LAYOUTS:
        if syncer in asked:
            placed = replace(question, syncer=syncer)
            kept, merged = _on_links(placed)
            formula, in_time = _by_formula(placed)
            goodput = None if waits and rate else kept * share
            found.append(Expected(syncer, LAYOUTS[syncer], goodput, formula, merged, in_time, interruptions))
    return found


def rate_per_s(question: Question) -> float:
    """Return the interruptions of one site per second."""
    return question.chips * question.interruptions_per_chip_year / YEAR_S


def _by_formula(question: Question) -> tuple[float, float]:
    """Return the goodput, and the share of due updates that links and syncer can carry: 1 where sites wait."""
    trained, away = utilisation_found(question).formula, rate_per_s(question) * question.away_s
    assert trained is not None
    if question.waits:
        return 1 / (1 / trained + question.sites * away), 1.0
    period_s, (up, down) = star_of(question).period_s, question.link_gbps
    busy = (max(load.up / up, load.down / down) * 1e-9 / period_s for load in loads_of(question))
    return 1 / (1 + away), 1 / max(1.0, merging_share(question), *busy)


def _on_links(question: Question) -> tuple[float, float]:
    """Simulate without failures; return the share of time spent training, and the merged share of the updates due."""
    star, of = star_of(question), loads_of(question)
    count = max(1, min(question.fragments, FRAGMENTS_MAX, SITE_ROUNDS // (ROUNDS_MIN * question.sites)))
    few = replace(question, fragments=count, syncer="apart")
    size, rounds = sizes(few), max(ROUNDS_MIN, SITE_ROUNDS // (few.sites * few.fragments))
    sites = tuple(_site(question, star, of, index) for index in range(question.sites))
    plan = _plan(few, sites, size.update_bytes, size.version_bytes, rounds * star.period_s)
    # Sites that wait do so for every fragment's merge; otherwise a version is later by one fragment's merge.
    merge_s = (star.fragments / few.fragments if question.waits else 1) * star.merge_s
    found = simulate(replace(plan, merge_s=merge_s))
    due = sum(_due(few, site.steps) for site in found.sites)
    return found.goodput, min(1.0, found.site_rounds / due) if due else 0.0


def _failing(question: Question, sites: int, rate: float, interruptions: int) -> tuple[float, int]:
    """Simulate ``sites`` that fail and never wait; return the share of time left, and the number of interruptions.

    They exchange at most ``ROUNDS_MIN`` times in the simulated time.
    """
    if not rate:
        return 1.0, 0
    seconds = interruptions / (rate * sites)
    site = FleetSite(step_s=question.inner_step_s, interruptions_per_s=rate, away_s=question.away_s)
    alone = replace(question, fragments=1, syncer="apart", overlap_steps=1, inner_steps=max(2, question.inner_steps))
    plan = _plan(alone, (site,) * sites, (1,), (1,), seconds)
    rare = max(1, round(seconds / question.inner_step_s / ROUNDS_MIN))
    found = simulate(replace(plan, learner=replace(plan.learner, inner_steps=rare)))
    return found.goodput, sum(each.interruptions for each in found.sites)


def _due(question: Question, steps: int) -> int:
    """Return how many updates of a site must have been merged after ``steps``: those due a period or more ago or, where
    sites wait, an inner step ago."""
    by = steps - (1 if question.waits else question.inner_steps)
    firsts = even_offsets(question.fragments, question.inner_steps)
    return sum((by - first) // question.inner_steps + (first > 0) for first in firsts if by >= first)


def _site(question: Question, star: Star, of: list[Load], index: int) -> FleetSite:
    """Return a fleet's site whose link has the bandwidth left by the traffic that it carries for other sites."""
    ups, downs = question.up_gbps, question.down_gbps or question.up_gbps
    up, down = ups[index % len(ups)], downs[index % len(downs)]
    size = sizes(question)
    if question.waits:  # All send, and then all fetch.
        up_s = max(max(load.updates_up / up, load.updates_down / down) for load in of)
        down_s = max(max(load.versions_up / up, load.versions_down / down) for load in of)
    else:
        up_s = down_s = max(max(load.up / up, load.down / down) for load in of)
        up_s = max(up_s, 1e9 * merging_share(question) * star.period_s)  # Limited by the syncer's merging.
    return FleetSite(
        step_s=star.step_s,
        up_mbps=8e3 * size.up / up_s if up_s else 0.0,
        down_mbps=8e3 * size.down / down_s if down_s else 0.0,
        rtt_s=star.rtt_s,
    )


def _plan(
    question: Question, sites: tuple[FleetSite, ...], up: tuple[int, ...], down: tuple[int, ...], seconds: float
) -> FleetPlan:
    """Return a fleet's plan: quorum 1 and adaptive grace or, where sites wait, quorum "all"; sites have version 0."""
    in_flight = 1 if question.waits else 2
    outer = OuterOptions(
        num_fragments=question.fragments,
        quorum="all" if question.waits else 1,
        grace_ns=SECOND_NS,
        sites_max=len(sites),
        updates_in_flight_max=in_flight,
    )
    learner = LearnerOptions(
        num_fragments=question.fragments,
        inner_steps=question.inner_steps,
        updates_in_flight_max=in_flight,
        adopt="overwrite",
        lock_step=question.waits,
    )
    return FleetPlan(
        sites=sites,
        outer=outer,
        learner=learner,
        update_bytes=up,
        version_bytes=down,
        whole_bytes=tuple(WHOLE_TIMES * each for each in down),
        is_joined=True,
        seconds=seconds,
        seed=question.seed,
    )


MODELS: Mapping[str, tuple[Model, int]] = {
    "1B": (Model(parameters=1e9, layers=24, step_s=0.1), 8),
    "10B": (Model(parameters=10e9, layers=48, step_s=0.8), 16),
    "100B": (Model(parameters=100e9, layers=108, step_s=4.9), 36),
}
"""The models of table 1 of arXiv 2501.18512, each with its number of fragments."""
GBPS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "data_parallel": {
        "1B": (86.8, 152.6, 184.2, 222.3, 569),
        "10B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    "diloco": {
        "1B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10B": (1.7, 7.5, 16, 33.9, 104.8),
        "100B": (3, 11, 23.3, 49.4, 184.2),
    },
    "streaming": {
        "1B": (1.4, 5.2, 9.1, 16, 28.1),
        "10B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100B": (2.4, 6.2, 9.1, 11, 19.3),
    },
    "overlapped": {
        "1B": (1.4, 4.3, 6.2, 9.1, 11),
        "10B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    "overlapped_4_bits": {
        "1B": (0.4, 0.9, 1.7, 2, 3),
        "10B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""The published Gbit/s for ``SHARES`` of the time spent training, by way of exchange and model."""

CHIPS = (2_400_000, 1_200_000, 300_000)
ELASTIC_AWAY_S = 20.0
"""The cost of an interruption for a job that continues without the lost chips."""
DECOUPLED_AWAY_S = 23.0
"""The same for one site of several, which returns to later versions: the table gives 19 to 34 s, by its row."""
RESTART_AWAY_S = 70.0
"""The cost of an interruption where the whole job restarts."""
GOODPUT: Mapping[str, tuple[int, float, tuple[int, ...]]] = {
    "data_parallel": (1, RESTART_AWAY_S, (18, 27, 57)),
    "elastic_data_parallel": (1, ELASTIC_AWAY_S, (40, 58, 80)),
    "decoupled_2": (2, DECOUPLED_AWAY_S, (54, 70, 88)),
    "decoupled_4": (4, DECOUPLED_AWAY_S, (73, 82, 93)),
    "decoupled_8": (8, DECOUPLED_AWAY_S, (80, 88, 96)),
    "decoupled_16": (16, DECOUPLED_AWAY_S, (86, 93, 98)),
}
"""Sites, seconds of an interruption, and percent for ``CHIPS``, each interrupted once a year: Decoupled DiLoCo (arXiv
2604.21428), as its reviews quote it."""
HOURS = 20.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a table; ``off`` is the distance of ``found`` from ``published``, in the study's unit."""

    row: str
    column: str
    published: float
    found: float
    off: float


@dataclass(frozen=True, slots=True)
class Study:
    """A published table.  ``cells()`` computes its cells one by one; ``worst`` names the largest ``off``."""

    does: str
    unit: str
    worst: str
    cells: Callable[[], Iterator[Cell]]


def exchange_of(kind: str, fragments: int) -> Exchange:
    """Return the exchange of a method in the table of bandwidths."""
    return {
        "data_parallel": Exchange(inner_steps=1),
        "diloco": Exchange(inner_steps=100),
        "streaming": Exchange(inner_steps=100, fragments=fragments),
        "overlapped": Exchange(inner_steps=100, fragments=fragments, overlap_steps=1),
        "overlapped_4_bits": Exchange(inner_steps=100, fragments=fragments, overlap_steps=1, bits=4),
    }[kind]


def bandwidths() -> Iterator[Cell]:
    """Reproduce table 1 of Streaming DiLoCo."""
    for kind, models in GBPS.items():
        for name, published in models.items():
            model, fragments = MODELS[name]
            for share, wanted in zip(SHARES, published, strict=True):
                found = gbps_needed(model, exchange_of(kind, fragments), share)
                assert found is not None, (kind, name, share)
                yield Cell(kind, f"{name} {share:.0%}", wanted, round(found, 1), abs(_place(found) - _place(wanted)))


def _place(gbps: float) -> int:
    """Return the index of the nearest step of the grid."""
    return min(range(len(GRID_GBPS)), key=lambda index: abs(log(GRID_GBPS[index] / gbps)))


def goodputs() -> Iterator[Cell]:
    """Reproduce Decoupled DiLoCo's table of goodput with fleets whose sites share the chips."""
    for kind, (sites, away_s, published) in GOODPUT.items():
        for chips, wanted in zip(CHIPS, published, strict=True):
            site = FleetSite(step_s=5.0, rtt_s=0.05, interruptions_per_s=chips / sites / YEAR_S, away_s=away_s)
            plan = FleetPlan(
                sites=(site,) * sites,
                outer=OuterOptions(quorum=1, grace="adaptive", grace_ns=SECOND_NS, sites_max=sites),
                learner=LearnerOptions(inner_steps=24),
                update_bytes=(1000,),
                version_bytes=(1000,),
                whole_bytes=(8000,),
                seconds=3600 * HOURS,
            )
            found = 100 * simulate(plan).goodput
            yield Cell(kind, f"{chips:,} chips", wanted, round(found, 1), round(abs(found - wanted), 1))


STUDIES: Mapping[str, Study] = {
    "goodput_decoupled": Study(
        "goodput of millions of chips, each interrupted once a year (Decoupled DiLoCo, arXiv 2604.21428)",
        "points",
        "max_error_points",
        goodputs,
    ),
    "bandwidth_streaming": Study(
        "Gbit/s for a share of the time spent training (Streaming DiLoCo, arXiv 2501.18512, table 1)",
        "steps of the grid",
        "max_grid_steps",
        bandwidths,
    ),
}
