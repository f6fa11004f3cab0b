"""What papers have published of goodput and of bandwidth, and the same found by this simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.sim.bandwidth import GRID_GBPS, Exchange, Model, gbps_needed
from diloco.sim.fleet import simulate
from diloco.sim.fleet_plan import YEAR_S, FleetPlan, FleetSite
from diloco.sync.options import SECOND_NS, LearnerOptions, OuterOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
MODELS: Mapping[str, tuple[Model, int]] = MappingProxyType(
    {
        "1B": (Model(parameters=1e9, layers=24, step_s=0.1), 8),
        "10B": (Model(parameters=10e9, layers=48, step_s=0.8), 16),
        "100B": (Model(parameters=100e9, layers=108, step_s=4.9), 36),
    }
)
"""Of table 1 of arXiv 2501.18512, each with its number of fragments."""
GBPS: Mapping[str, Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
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
)
"""Gbit/s for ``SHARES`` of the time spent training, as published."""

CHIPS = (2_400_000, 1_200_000, 300_000)
GOODPUT: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "data_parallel": (18, 27, 57),
        "elastic_data_parallel": (40, 58, 80),
        "decoupled_2": (54, 70, 88),
        "decoupled_4": (73, 82, 93),
        "decoupled_8": (80, 88, 96),
        "decoupled_16": (86, 93, 98),
    }
)
"""Percent for ``CHIPS``, each interrupted once a year: Decoupled DiLoCo (arXiv 2604.21428), as its reviews quote it."""
ELASTIC_AWAY_S = 20.0
"""What an interruption costs who goes on without the lost chips."""
DECOUPLED_AWAY_S = 23.0
"""The same of one site of several, which comes back to later versions: the table gives 19 to 34 s by its row."""
RESTART_AWAY_S = 70.0
"""What it costs where everything starts again."""
HOURS = 20.0


@dataclass(frozen=True, slots=True)
class Cell:
    """``off`` is how far what was found lies from what was published, in the study's own unit."""

    row: str
    column: str
    published: float
    found: float
    off: float


@dataclass(frozen=True, slots=True)
class Study:
    """``cells(seed)`` are found one by one; ``worst`` is the name of the largest ``off``."""

    name: str
    does: str
    unit: str
    worst: str
    cells: Callable[[int], Iterator[Cell]]


def exchange_of(kind: str, fragments: int) -> Exchange:
    """How a column of the table of bandwidths exchanges."""
    return {
        "data_parallel": Exchange(inner_steps=1),
        "diloco": Exchange(inner_steps=100),
        "streaming": Exchange(inner_steps=100, fragments=fragments),
        "overlapped": Exchange(inner_steps=100, fragments=fragments, overlap_steps=1),
        "overlapped_4_bits": Exchange(inner_steps=100, fragments=fragments, overlap_steps=1, bits=4),
    }[kind]


def bandwidths(seed: int) -> Iterator[Cell]:
    """Table 1 of Streaming DiLoCo; nothing is drawn."""
    del seed
    for kind, models in GBPS.items():
        for name, published in models.items():
            model, fragments = MODELS[name]
            for share, wanted in zip(SHARES, published, strict=True):
                found = gbps_needed(model, exchange_of(kind, fragments), share)
                assert found is not None, (kind, name, share)
                yield Cell(kind, f"{name} {share:.0%}", wanted, round(found, 1), abs(_place(found) - _place(wanted)))


def _place(gbps: float) -> int:
    """The step of the grid that is nearest."""
    return min(range(len(GRID_GBPS)), key=lambda index: abs(log(GRID_GBPS[index] / gbps)))


def goodputs(seed: int) -> Iterator[Cell]:
    """Decoupled DiLoCo's table of goodput, by fleets of sites that share the chips."""
    for kind, published in GOODPUT.items():
        sites = int(kind.rpartition("_")[2]) if kind.startswith("decoupled") else 1
        away_s = {"data_parallel": RESTART_AWAY_S, "elastic_data_parallel": ELASTIC_AWAY_S}.get(kind, DECOUPLED_AWAY_S)
        for chips, wanted in zip(CHIPS, published, strict=True):
            found = 100 * simulate(decoupled(sites, chips / sites / YEAR_S, away_s, seed)).goodput
            yield Cell(kind, f"{chips:,} chips", wanted, round(found, 1), round(abs(found - wanted), 1))


def decoupled(sites: int, interruptions_per_s: float, away_s: float, seed: int) -> FleetPlan:
    """Quorum 1 and adaptive grace, a step of five seconds and 24 of them between two updates."""
    site = FleetSite(step_s=5.0, rtt_s=0.05, interruptions_per_s=interruptions_per_s, away_s=away_s)
    return FleetPlan(
        sites=(site,) * sites,
        outer=OuterOptions(quorum=1, grace="adaptive", grace_ns=SECOND_NS, sites_max=sites),
        learner=LearnerOptions(inner_steps=24),
        update_bytes=(1000,),
        version_bytes=(1000,),
        whole_bytes=(8000,),
        seconds=3600 * HOURS,
        seed=seed,
    )


STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "goodput_decoupled": Study(
            "goodput_decoupled",
            "goodput of millions of chips, each interrupted once a year (Decoupled DiLoCo, arXiv 2604.21428)",
            "points",
            "max_error_points",
            goodputs,
        ),
        "bandwidth_streaming": Study(
            "bandwidth_streaming",
            "Gbit/s for a share of the time spent training (Streaming DiLoCo, arXiv 2501.18512, table 1)",
            "steps of the grid",
            "max_grid_steps",
            bandwidths,
        ),
    }
)
