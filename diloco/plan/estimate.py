"""Estimate a run before any machine is rented: bytes, link speeds, timing, and the share of time spent training.

The bytes are those of the codecs.  Each figure is computed twice from them: by a formula, and by a simulation, of the
links alone (``bandwidth``) or with the machines of a run (``studies``).

With V bits of an update and W of a version, F fragments, H inner steps of t seconds, a share x of the time spent
training and a link of B bit/s each way, a fragment's exchange takes c = (V + W)/(F B) + round trip + merge.  The site
trains on for τ steps in the meantime, so that x = H t / (H t + F max(0, c - τ t)); and no link carries more than B, so
that x <= H t B / (bits through it in a round).  Where several fragments are under way at once their waits overlap, and
the formula asks for more than the simulation.

Among N sites with a syncer in S parts, each at one site, a site that holds a part carries (S - 1)/S of its own update
and version, and (N - 1)/S of the other sites' updates and versions.  With S = N that is less than V + W each way for
any N; with S = 1 it is N - 1 times what another site carries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Annotated

from diloco.config.errors import ConfigError
from diloco.plan.bandwidth import FORWARD_SHARE, Exchange, Load, Model, Star, least, star_utilisation
from diloco.plan.bandwidth import gbps_needed as gbps_of_grid
from diloco.sync.options import ABOVE_0, AT_LEAST_1, NOT_NEGATIVE, Bound, Count, check_bounds, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


LAYOUTS: Mapping[str, str] = {
    "central": "sites, the syncer at one of them",
    "sharded": "sites, a part of the syncer at each",
    "apart": "sites, the syncer apart",
}
"""The places of the syncer, in words."""
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_GBPS = tuple(10 ** (-4 + index / 200) for index in range(2001))
"""The bandwidths that the simulation tries, in Gbit/s: 0.1 Mbit/s to 1 Pbit/s, 1.2 % apart."""
CODECS = (("int8:128", "int8:128"), ("int4:32", "int4:32"), ("int2:256", "int4:32"), ("topk:4096x64", "int4:32"))
"""(up, down) codecs to try, the most exact first, where the requested ones are too large."""
FRAGMENTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
OVERLAP_STEPS = (0, 1, 2, 5)
"""Up to five cost nothing in Streaming DiLoCo (arXiv 2501.18512, section 4.4)."""
INNER_STEPS_ADVISED = 500
"""DiLoCo's own H (arXiv 2311.08105); beyond it learning suffers."""
INNER_STEPS_MAX = 5000
STEPS_S = (1e-6, 1e6)
"""The least and the greatest time of an inner step."""


def at_most(most: float) -> Bound:
    """Require a value of at most ``most``."""
    return Bound(lambda value: value <= most, f"at most {most:g}")


SHARE = Bound(lambda value: 0 < value < 1, "between 0 and 1")
Few = Annotated[int, AT_LEAST_1, at_most(1000)]
"""With more a simulation takes minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question of a plan: a model, its sites, their links, and how they exchange."""

    parameters: Annotated[float, ABOVE_0]
    """Parameters of the whole model."""
    active_parameters: Annotated[float, NOT_NEGATIVE] = 0.0
    """Parameters that one token uses, to compute step_s from flops; 0: all."""
    layers: Few = 48
    """Layers of the model: the most fragments to advise, and the grain at which data parallel overlaps."""
    step_s: Annotated[float, NOT_NEGATIVE] = 0.0
    """Seconds of an inner step; 0: 6 x active_parameters x tokens_per_step / flops."""
    tokens_per_step: Annotated[float, NOT_NEGATIVE] = 0.0
    """Tokens of one inner step of one site."""
    flops: Annotated[float, NOT_NEGATIVE] = 0.0
    """Useful operations per second of one site: its chips' peak times their utilisation."""
    sites: Few = 4
    """Number of sites; each trains the whole model."""
    chips: Annotated[int, NOT_NEGATIVE] = 0
    """Chips of one site; 0: leave interruptions out."""
    up_gbps: tuple[float, ...] = (10.0,)
    """Rate of a site's link to the syncer, Gbit/s: one for all sites, or one for each, separated by commas."""
    down_gbps: tuple[float, ...] = ()
    """Rate from the syncer to a site, Gbit/s; empty: as up_gbps."""
    rtt_ms: Annotated[float, NOT_NEGATIVE] = 100.0
    """Round-trip time to the farthest site, ms."""
    inner_steps: Annotated[int, AT_LEAST_1, at_most(INNER_STEPS_MAX)] = 100
    """H, the inner steps between two updates of one fragment (outer.inner_steps)."""
    fragments: Few = 16
    """Fragments, exchanged in turn (outer.num_fragments)."""
    overlap_steps: Annotated[int, NOT_NEGATIVE] = 2
    """Inner steps that an exchange may take (site.overlap_steps); 0: sites wait for it (outer.lock_step)."""
    codec_up: str = "int4:32"
    """Codec of updates (codec.up)."""
    codec_down: str = "int4:32"
    """Codec of versions (codec.down)."""
    outer_kind: str = "nesterov"
    """Outer optimizer (outer.kind), for the memory of its state."""
    syncer: str = "central"
    """Where the syncer runs: central (at one site), sharded (a part at each, outer.num_syncers) or apart (at none)."""
    downlinks_kept: Count = 32
    """Versions that a site may lag behind (cluster.syncer.downlinks_kept), for the syncer's memory."""
    host_gb: Annotated[float, ABOVE_0] = 2000.0
    """Memory of a machine that runs a part of the syncer, GB."""
    merge_values_per_s: Annotated[float, AT_LEAST_1] = 1e10
    """Values per second that a part of the syncer merges; one core merges about 2.5e9."""
    utilisation: Annotated[float, SHARE] = 0.95
    """Share of the time that a site should spend training, as far as links decide."""
    interruptions_per_chip_year: Annotated[float, NOT_NEGATIVE, at_most(10_000)] = 1.0
    """Interruptions of one chip per year; each stops its site for away_s."""
    away_s: Annotated[float, NOT_NEGATIVE, at_most(1e8)] = 23.0
    """Seconds of an interruption; 23 fits the table of Decoupled DiLoCo (arXiv 2604.21428)."""
    dollars_per_gb: Annotated[float, NOT_NEGATIVE] = 0.02
    """Price of a GB that leaves a site or the syncer, dollars."""
    seed: int = 0
    """Seed of the simulation."""

    def __post_init__(self) -> None:
        check_bounds(self)
        told = self.step_s > 0 or (self.flops > 0 and self.tokens_per_step > 0)
        require(told, "step_s", self.step_s, "above 0, or flops and tokens_per_step")
        step_s, wanted = self.inner_step_s, f"the seconds of an inner step, from {STEPS_S[0]:g} to {STEPS_S[1]:g}"
        require(STEPS_S[0] <= step_s <= STEPS_S[1], "step_s", step_s, wanted)
        wanted = f"at least fragments={self.fragments}"
        require(self.parameters >= self.fragments, "parameters", self.parameters, wanted)
        wanted = f"from 1 to inner_steps={self.inner_steps}"
        require(self.fragments <= self.inner_steps, "fragments", self.fragments, wanted)
        wanted = f"below inner_steps={self.inner_steps}"
        require(self.overlap_steps < self.inner_steps, "overlap_steps", self.overlap_steps, wanted)
        require(self.syncer in LAYOUTS, "syncer", self.syncer, f"one of {', '.join(LAYOUTS)}")
        wanted = f"at least sites={self.sites}, where each holds a part of the syncer"
        require(self.shards <= self.fragments, "fragments", self.fragments, wanted)
        for name, gbps in (("up_gbps", self.up_gbps), ("down_gbps", self.down_gbps or self.up_gbps)):
            require(len(gbps) in (1, self.sites), name, gbps, f"one value, or one for each of {self.sites} sites")
            require(all(0 < each < inf for each in gbps), name, gbps, "above 0 and finite")

    @property
    def shards(self) -> int:
        """The number of sites that hold a part of the syncer."""
        return {"apart": 0, "central": 1, "sharded": self.sites}[self.syncer]

    @property
    def waits(self) -> bool:
        """Whether sites wait for each exchange."""
        return self.overlap_steps == 0

    @property
    def inner_step_s(self) -> float:
        """``step_s``, or the estimate for a transformer: 6 operations for each parameter and token."""
        return self.step_s or 6 * (self.active_parameters or self.parameters) * self.tokens_per_step / self.flops

    @property
    def numels(self) -> tuple[int, ...]:
        """The number of values in each fragment, divided as evenly as possible."""
        each, more = divmod(round(self.parameters), self.fragments)
        return tuple(each + (index < more) for index in range(self.fragments))

    @property
    def link_gbps(self) -> tuple[float, float]:
        """The slowest site's bandwidth up and down: an exchange ends when the last site has it."""
        return min(self.up_gbps), min(self.down_gbps or self.up_gbps)


PRESETS: Mapping[str, Question] = {
    "100t_20dc": Question(
        parameters=100e12,
        active_parameters=5e12,
        layers=200,
        step_s=15.0,
        tokens_per_step=30e6,
        sites=20,
        chips=150_000,
        up_gbps=(400.0,),
        rtt_ms=60.0,
        inner_steps=200,
        fragments=200,
        overlap_steps=5,
        syncer="sharded",
        downlinks_kept=2,
        host_gb=24_000.0,
        merge_values_per_s=1e12,
    ),
    "gpt3_4dc": Question(
        parameters=175e9,
        layers=96,
        tokens_per_step=3.2e6,
        flops=4e17,
        sites=4,
        chips=1024,
        inner_steps=100,
        fragments=24,
        overlap_steps=2,
        syncer="sharded",
    ),
    "10b_8dc": Question(
        parameters=10e9,
        layers=48,
        step_s=0.8,
        sites=8,
        chips=256,
        up_gbps=(2.0,),
        inner_steps=100,
        fragments=16,
        overlap_steps=5,
        syncer="sharded",
    ),
}
"""``100t_20dc``: a sparse model of 100T parameters at 20 data centres, each with enough chips (4e14 useful operations a
second) for a step in 15 s, and machines of 24 TB for the syncer.  ``gpt3_4dc``: GPT-3's size and batch (arXiv
2005.14165) at each of four sites.  ``10b_8dc``: the 10B model of Streaming DiLoCo (arXiv 2501.18512) at eight sites."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Encoded bytes of each fragment's update and version; an upper bound for codecs that compress."""

    update_bytes: tuple[int, ...]
    version_bytes: tuple[int, ...]

    @property
    def up(self) -> int:
        """Bytes up in a whole round."""
        return sum(self.update_bytes)

    @property
    def down(self) -> int:
        """Bytes down in a whole round."""
        return sum(self.version_bytes)


def sizes(question: Question) -> Sizes:
    """Return the exact bytes that a site sends and receives in a round; raise ``ValueError`` for an unknown codec."""
    from diloco.codec.registry import make_codec  # Imports torch, which --help does not need.

    up, down = make_codec(question.codec_up), make_codec(question.codec_down)
    by_numel = {numel: (up.payload_bytes_max(numel), down.payload_bytes_max(numel)) for numel in set(question.numels)}
    both = [by_numel[numel] for numel in question.numels]
    return Sizes(tuple(each[0] for each in both), tuple(each[1] for each in both))


def loads(sites: int, shards: int, up_bits: float, down_bits: float) -> list[Load]:
    """Return the loads of a site that holds a part of the syncer, and of one that does not, as far as they exist."""
    found = []
    if shards:
        own, others = (shards - 1) / shards, (sites - 1) / shards
        held = Load(
            updates_up=own * up_bits,
            updates_down=others * up_bits,
            versions_up=others * down_bits,
            versions_down=own * down_bits,
        )
        found.append(held)
    if shards < sites:
        found.append(Load(updates_up=up_bits, versions_down=down_bits))
    return found


def star_of(question: Question) -> Star:
    """Return the timing; a fragment belongs to one part of the syncer, which merges one update of it from each site."""
    return Star(
        inner_steps=question.inner_steps,
        step_s=question.inner_step_s,
        fragments=question.fragments,
        overlap_steps=question.overlap_steps,
        rtt_s=question.rtt_ms / 1e3,
        merge_s=question.sites * question.parameters / question.fragments / question.merge_values_per_s,
    )


def merging_share(question: Question) -> float:
    """Return the share of a round that a part of the syncer spends merging: above 1, merging is the bottleneck."""
    star = star_of(question)
    return star.merge_s * question.fragments / max(1, question.shards) / star.period_s


def formula_utilisation(star: Star, load: Load, up_gbps: float, down_gbps: float) -> float:
    """Return the share of the time that a site trains, by the formula of this module's docstring."""
    up_s, down_s = 1e-9 / up_gbps, 1e-9 / down_gbps
    serial_s = max(load.updates_up * up_s, load.updates_down * down_s)
    serial_s += max(load.versions_up * up_s, load.versions_down * down_s)
    exchange_s = serial_s / star.fragments + star.rtt_s + star.merge_s
    exposed_s = star.fragments * max(0.0, exchange_s - star.overlap_steps * star.step_s)
    return star.period_s / max(star.period_s + exposed_s, load.up * up_s, load.down * down_s)


def formula_gbps(star: Star, load: Load, share: float) -> float | None:
    """Return the formula's bandwidth each way for ``share`` of the time spent training, in Gbit/s; None where round
    trips and merges alone take too long for any link."""
    serial = max(load.updates_up, load.updates_down) + max(load.versions_up, load.versions_down)
    room_s = star.period_s * (1 / share - 1) / star.fragments + star.overlap_steps * star.step_s
    room_s -= star.rtt_s + star.merge_s
    if room_s <= 0:
        return None
    return max(serial / star.fragments / room_s, max(load.up, load.down) * share / star.period_s) / 1e9


def simulated_gbps(star: Star, load: Load, share: float) -> float | None:
    """Return that bandwidth by simulation, rounded up to a step of ``GRID_GBPS``."""
    return least(GRID_GBPS, lambda gbps: _reached(star_utilisation(star, load, gbps, gbps), share))


@dataclass(frozen=True, slots=True)
class Found:
    """A figure by formula and by simulation; None: impossible."""

    formula: float | None
    simulated: float | None


def gbps_needed(question: Question, share: float) -> Found:
    """Return the Gbit/s each way that the busiest site's link needs for ``share`` of the time spent training."""
    star, of = star_of(question), loads_of(question)
    if merging_share(question) * share > 1:
        return Found(None, None)
    return Found(
        _most([formula_gbps(star, load, share) for load in of]),
        _most([simulated_gbps(star, load, share) for load in of]),
    )


def utilisation_found(question: Question) -> Found:
    """Return the share of the time that a site trains on the given links."""
    star, of, (up, down) = star_of(question), loads_of(question), question.link_gbps
    most = 1 / max(1.0, merging_share(question))
    return Found(
        min(most, *(formula_utilisation(star, load, up, down) for load in of)),
        min(most, *(star_utilisation(star, load, up, down) for load in of)),
    )


def inner_steps_needed(question: Question) -> Found:
    """Return the least H with which the given links suffice, with H fragments where H is below their number; None: not
    even ``INNER_STEPS_MAX`` suffices."""

    def found(inner_steps: float) -> Found:
        steps = int(inner_steps)
        return utilisation_found(replace(question, inner_steps=steps, fragments=min(steps, question.fragments)))

    grid = range(max(1, question.shards, question.overlap_steps + 1), INNER_STEPS_MAX + 1)
    return Found(
        least(grid, lambda steps: _reached(found(steps).formula, question.utilisation)),
        least(grid, lambda steps: _reached(found(steps).simulated, question.utilisation)),
    )


def advised(question: Question) -> Question | None:
    """Return settings with which the given links suffice: the question's own or else the simplest timing with at least
    its fragments, in the same encodings or else the most exact ones; None: no settings suffice.

    The inner steps stay as long as a smaller encoding helps; then they double up to ``INNER_STEPS_ADVISED``.
    """
    reached = (each for each in _rhythms(question) if _reached(utilisation_found(each).simulated, question.utilisation))
    return next(reached, None)


def _reached(share: float | None, wanted: float) -> bool:
    """Return whether ``share`` is at least ``wanted``, up to the rounding of a sum over many steps."""
    return share is not None and share >= wanted - 1e-9


def _rhythms(question: Question) -> Iterator[Question]:
    """Yield ``question``, and then the settings to try in its place, in the order of ``advised``."""
    yield question
    inner_steps, codecs = question.inner_steps, [(question.codec_up, question.codec_down), *CODECS]
    while True:
        most = min(inner_steps, question.layers)
        counts = sorted({question.fragments, *(count for count in FRAGMENTS if question.fragments < count <= most)})
        for (up, down), overlap, count in product(codecs, OVERLAP_STEPS, counts):
            if overlap < inner_steps:
                coded = replace(question, codec_up=up, codec_down=down)
                yield replace(coded, inner_steps=inner_steps, overlap_steps=overlap, fragments=count)
        if inner_steps >= INNER_STEPS_ADVISED:
            return
        inner_steps = min(2 * inner_steps, INNER_STEPS_ADVISED)


def loads_of(question: Question) -> list[Load]:
    """Return ``loads`` for the encoded sizes, in bits."""
    size = sizes(question)
    return loads(question.sites, question.shards, 8 * size.up, 8 * size.down)


def _most(found: list[float | None]) -> float | None:
    known = [each for each in found if each is not None]
    return max(known) if len(known) == len(found) else None


def data_parallel_gbps(question: Question, share: float) -> Found:
    """Return the Gbit/s each way that a site needs for a ring all-reduce of bf16 gradients over all sites each step.

    Gradients leave layer by layer during the backward pass, two thirds of a step, and the last layer's after it: a step
    waits V / B - 2/3 t, or V / (layers B) where that is more.
    """
    bits = 16.0 * 2 * (question.sites - 1) / question.sites
    step_s, whole = question.inner_step_s, bits * question.parameters
    waits_s = step_s * (1 / share - 1)
    formula = max(whole / ((1 - FORWARD_SHARE) * step_s + waits_s), whole / question.layers / waits_s) / 1e9
    model = Model(parameters=question.parameters, layers=question.layers, step_s=step_s)
    return Found(formula, gbps_of_grid(model, Exchange(inner_steps=1, bits=bits), share, GRID_GBPS))


@dataclass(frozen=True, slots=True)
class Scaled:
    """Bytes of a round through one link, in the busier direction, for one size of model and number of sites."""

    parameters: float
    sites: int
    site: int
    """The link of a site with the syncer elsewhere."""
    central: int
    """The link of one syncer apart from the sites."""
    sharded: int
    """The link of a site where each site holds a part of the syncer."""


def scaled(question: Question, parameters: Sequence[float], sites: Sequence[int]) -> list[Scaled]:
    """Return the bytes for each of ``parameters`` at each number of ``sites``."""
    found = []
    for values in parameters:
        size = sizes(replace(question, parameters=values))
        for count in sites:
            (part, *_) = loads(count, count, size.up, size.down)
            most = max(size.up, size.down)
            found.append(Scaled(values, count, most, count * most, round(max(part.up, part.down))))
    return found


# --- Links measured by ``diloco doctor``, for ``diloco plan`` --------------------------------------------------------

MADE_BY = "run diloco doctor HOST:PORT --json > FILE at the site"
DIGITS = 4
"""Significant digits of a measured value: one measurement is no more exact."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A site's link to the first syncer of its file that carried filler both ways, on one connection."""

    file: str
    up_gbps: float
    down_gbps: float
    rtt_ms: float


def settings_of(links: Sequence[MeasuredLink], stated: Mapping[str, object]) -> dict[str, object]:
    """Return the links' settings, to add to those ``stated``; a single link stands for all sites."""
    for key in ("up_gbps", "down_gbps", "rtt_ms"):
        if key in stated:
            raise ConfigError(f"{key} is set, and --link measures it: give one of the two")
    several = {"sites": len(links)} if len(links) > 1 else {}
    if several and stated.get("sites", len(links)) != len(links):
        given = f"sites is {stated['sites']}, and {len(links)} links are given"
        raise ConfigError(f"{given}: give one for all, or one for each")
    return {
        **several,
        "up_gbps": tuple(link.up_gbps for link in links),
        "down_gbps": tuple(link.down_gbps for link in links),
        "rtt_ms": max(link.rtt_ms for link in links),
    }


def read_link(file: Path) -> MeasuredLink:
    """Return the link that ``file`` describes; raise a one-line ConfigError for an invalid file."""
    try:
        checks = json.loads(file.read_bytes())["checks"]
        found = {(each["check"], each["address"]): each["figures"] for each in checks}
        for (check, address), figures in found.items():
            if check == "bandwidth" and figures.get("up_bytes_per_s") and figures.get("down_bytes_per_s"):
                up, down = (_rounded(figures[f"{way}_bytes_per_s"] * 8e-9) for way in ("up", "down"))
                return MeasuredLink(str(file), up, down, _rounded(found["rtt", address]["median_ms"]))
    except OSError as error:
        raise ConfigError(f"--link {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--link {file}: not what diloco doctor prints: {MADE_BY}") from error
    raise ConfigError(f"--link {file}: no rate was measured both ways: {MADE_BY}")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
