"""Build a fleet for the simulator from a run's configuration: the same sites, links, fragments, codecs and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from diloco.codec.registry import make_codec
from diloco.config import build, build_syncer, connecting, regional
from diloco.config import compose as configs
from diloco.config.errors import ConfigError, refusing, require
from diloco.config.schema import UpstreamSection
from diloco.config.syncer_settings import OF_THE_MODEL
from diloco.runs.scenario import Step, late_sites, scenario_of
from diloco.sim.fleet_plan import YEAR_S, FleetFault, FleetPlan, FleetSite, Region, RegionPlan

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig

DAY_S = 86_400.0
ABOVE = ("experiment", "outer", "codec", "network", "cluster", "run.seconds", "run.tokens")
"""The settings that may be given for the run above regions."""
CHIPS_MAX = 100_000_000
FAULTS: Mapping[str, str] = {
    "kill": "away",
    "stop": "away",
    "partition": "cut",
    "half_open": "cut",
    "start": "start",
    "leave": "leave",
}
"""The fleet's kind of fault for each action of a scenario: a stopped site is away, a half-open link carries nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """Simulation inputs that the configuration lacks.  ``step_s`` is one inner step of a site that is not slowed down.

    ``interruptions_per_day`` is per site, ``interruptions_per_chip_year`` per chip of a site's ``chips``, and
    ``region_interruptions_per_day`` per region in ``regions`` (each is comma-separated names of sites); all keep sites
    away for ``away_s``.  Every ``maintenance_every_h`` hours each site is away for ``maintenance_s``, one after the
    other.  ``step_jitter`` is the share by which the steps between two boundaries may be longer or shorter.
    ``seconds`` None: the run's length from the configuration.
    """

    step_s: float = 0.1
    seconds: float | None = None
    interruptions_per_day: float = 0.0
    away_s: float = 60.0
    merge_s: float = 0.0
    regions: Sequence[str] = ()
    region_interruptions_per_day: float = 0.0
    chips: int = 0
    interruptions_per_chip_year: float = 0.0
    maintenance_every_h: float = 0.0
    maintenance_s: float = 0.0
    step_jitter: float = 0.0

    def __post_init__(self) -> None:
        every_h, lasts_s, per_year = self.maintenance_every_h, self.maintenance_s, self.interruptions_per_chip_year
        bounds = [
            ("--step-s", self.step_s, 1e-6, 1e9),
            ("--away-s", self.away_s, 1e-6, 1e9),
            ("--hours", 1.0 if self.seconds is None else self.seconds / 3600, 1e-6, 1e9),
            ("--interruptions-per-day", self.interruptions_per_day, 0, DAY_S),
            ("--merge-s", self.merge_s, 0, DAY_S),
            ("--region-interruptions-per-day", self.region_interruptions_per_day, 0, DAY_S),
            ("--interruptions-per-chip-year", per_year, 0, DAY_S),
        ]
        if every_h or lasts_s:
            bounds.append(("--maintenance-every-h", every_h, 1e-3, 1e6))
        for name, value, least, most in bounds:
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value:g}: must be from {least:g} to {most:g}")
        if self.regions and not self.region_interruptions_per_day:
            raise ConfigError(f"--region is {self.regions[0]}: --region-interruptions-per-day is 0: give a rate")
        if self.region_interruptions_per_day and not self.regions:
            per_day = f"{self.region_interruptions_per_day:g}"
            raise ConfigError(f"--region-interruptions-per-day is {per_day}: name the sites with --region")
        require(0 <= self.chips <= CHIPS_MAX, "--chips", self.chips, f"must be from 0 to {CHIPS_MAX}")
        never = "--interruptions-per-chip-year is 0, so they never fail"
        require(not self.chips or per_year > 0, "--chips", self.chips, never)
        if per_year and not self.chips:
            raise ConfigError(f"--interruptions-per-chip-year is {per_year:g}: give a site's chips with --chips")
        often = f"that is {self.interruptions_per_s() * DAY_S:g} interruptions of a site in a day, above {DAY_S:g}"
        require(self.interruptions_per_s() <= 1, "--chips", self.chips, often)
        if every_h and not 0 < lasts_s < 3600 * every_h:
            raise ConfigError(f"--maintenance-s is {lasts_s:g}: must be above 0 and below --maintenance-every-h")
        if every_h and self.seconds is None:
            raise ConfigError(f"--maintenance-every-h is {every_h:g}: give the simulated time with --hours")
        if not 0 <= self.step_jitter < 1:
            raise ConfigError(f"--step-jitter is {self.step_jitter:g}: must be from 0 to below 1")

    def interruptions_per_s(self) -> float:
        """Return the interruptions per second of one site: its own and those of its chips."""
        return self.interruptions_per_day / DAY_S + self.chips * self.interruptions_per_chip_year / YEAR_S

    def maintenance(self, place: int, sites: int) -> tuple[tuple[float, float], ...]:
        """Return (begin, end) of each maintenance of site number ``place`` of ``sites``, in seconds from the start."""
        if not self.maintenance_s:
            return ()
        assert self.seconds is not None, self
        every_s = 3600 * self.maintenance_every_h
        if self.maintenance_s > every_s / sites:
            each = f"each of {sites} sites gets only {every_s / sites:g} s"
            raise ConfigError(f"--maintenance-s is {self.maintenance_s:g}: in --maintenance-every-h {each}")
        first_s = every_s * (place + 1) / sites
        begins = (first_s + every_s * number for number in range(int(self.seconds / every_s) + 1))
        return tuple((begin_s, begin_s + self.maintenance_s) for begin_s in begins if begin_s < self.seconds)


def tokens_per_step(config: RunConfig) -> int:
    """Return the tokens of one inner step of one rank."""
    inner = config.inner
    return inner.batch_sequences * inner.accumulation * (inner.sequence_length or 0)


def with_sites(config: RunConfig, count: int, flag: str = "--sites") -> RunConfig:
    """Return ``config`` with ``count`` sites, repeating those of ``cluster.sites``."""
    require(count >= 1, flag, count, "at least 1")
    known = list(config.cluster.sites.items())
    if not known:
        raise ConfigError("cluster.sites is empty: there is no site to repeat")
    sites = dict(known[:count])
    for place in range(len(known), count):
        name, site = known[place % len(known)]
        sites[f"{name}-{place // len(known) + 1}"] = site
    outer = replace(config.outer, sites_max=max(config.outer.sites_max, count))
    return replace(config, outer=outer, cluster=replace(config.cluster, sites=sites))


def fleet_of(config: RunConfig, told: Told) -> FleetPlan:
    """Return the fleet: the sites of ``cluster.sites``, the links of ``network``, the fragments' bytes in ``codec``.

    Faults at fixed times come from ``scenario``, where it is set.
    """
    _check_own(config)
    plan = _plan(config, told)
    names = list(config.cluster.sites)
    steps = [] if config.scenario is None else scenario_of(config)
    late = late_sites(steps)
    sites = (_site(config, told, place, len(names), late=name in late) for place, name in enumerate(names))
    together = _failing_together(names, told)
    return replace(plan, sites=tuple(sites), faults=faults_of(steps, names), regions=together)


def tree_of(config: RunConfig, above: RunConfig, told: Told) -> FleetPlan:
    """Return a fleet of two levels: each site of ``above`` is a region, a syncer with the sites of ``config``.

    A region has the link of its site in ``above``.  Failures are independent in each region.
    """
    _check_own(config)
    require(config.scenario is None, "scenario", config.scenario, "--above simulates no scenario")
    region = replace(_of_one(config), upstream=replace(config.upstream, endpoint="above:1", site_id="region"))
    build_syncer.check(region)
    whole, names, count = _plan(above, told), list(config.cluster.sites), len(above.cluster.sites)
    below = replace(_plan(region, told, ends=False), regions=_failing_together(names, told))

    def site_above(index: int, name: str) -> FleetSite:
        places = range(index * len(names), (index + 1) * len(names))
        sites = tuple(_site(config, told, place, count * len(names), late=False) for place in places)
        plan = replace(below, sites=sites)
        upstream = config.upstream
        from_blend = upstream.counted_from == "blend"
        region = RegionPlan(plan=plan, updates=upstream.updates, alpha=upstream.alpha, from_blend=from_blend)
        return replace(_linked(above, name), region=region)

    return replace(whole, sites=tuple(site_above(index, name) for index, name in enumerate(above.cluster.sites)))


def above_of(config: RunConfig, settings: Sequence[str], count: int | None = None) -> RunConfig:
    """Return the configuration of the run above ``count`` regions that each are ``config``.

    It has the regions' model, text and fragments, and their run length unless ``settings`` give one; all else comes
    from ``settings``.
    """
    with refusing(ConfigError, begin="--above: "):
        above = configs.compose(settings)
        said = {text.partition("=")[0]: text for text in settings}
        for key, text in said.items():
            if not key.startswith(ABOVE) or key.startswith(OF_THE_MODEL):
                raise ConfigError(f"{text}: the region decides this; --above takes {', '.join(ABOVE)}")
        run = config.run
        if {"run.seconds", "run.tokens"} & said.keys():
            run = replace(run, seconds=above.run.seconds, tokens=above.run.tokens)
        own = config.outer
        outer = replace(above.outer, num_fragments=own.num_fragments, num_syncers=own.num_syncers)
        outer.syncer_mbps = own.syncer_mbps
        above = replace(above, model=config.model, data=config.data, inner=config.inner, run=run, outer=outer)
        above.upstream = UpstreamSection()
        if why := regional.not_above(above):
            raise ConfigError(f"{why}: not built for regions")
        above = above if count is None else with_sites(above, count, "--regions")
        build_syncer.check(above)
    return above


def _check_own(config: RunConfig) -> None:
    wanted = "leave it out (null); --above describes the run above regions"
    require(config.upstream.endpoint is None, "upstream.endpoint", config.upstream.endpoint, wanted)


def _plan(config: RunConfig, told: Told, *, ends: bool = True) -> FleetPlan:
    """Return the fleet's plan without sites and faults; ``ends`` False: another run decides when this one ends."""
    if not config.cluster.sites:
        raise ConfigError("cluster.sites is empty: a simulation needs at least one site")
    # Leases decide which data a site draws, which the simulation ignores.
    config = replace(_of_one(config), data=replace(config.data, leased=False))
    outer = build.outer_options(config)
    if told.seconds is not None or not ends:
        outer = replace(outer, run_ns=0, token_budget=0)
    elif not (outer.run_ns or outer.token_budget):
        raise ConfigError("run.seconds and run.tokens are null: nothing ends this run; give its length with --hours")
    numels = [fragment.numel for fragment in build.layout_of(config).fragments]
    with refusing(ValueError, begin="codec: "):
        up, down = make_codec(config.codec.up), make_codec(config.codec.down)
    return FleetPlan(
        sites=(),
        outer=outer,
        learner=build.learner_options(config),
        update_bytes=tuple(up.payload_bytes_max(numel) for numel in numels),
        version_bytes=tuple(down.payload_bytes_max(numel) for numel in numels),
        whole_bytes=tuple(4 * numel for numel in numels),
        merge_s=told.merge_s,
        seconds=told.seconds if ends else None,
        seed=config.run.seed,
    )


def _of_one(config: RunConfig) -> RunConfig:
    """Return ``config`` with one syncer: several syncers equal one that is fast enough."""
    return replace(config, outer=replace(config.outer, num_syncers=1, syncer_mbps=[]))


def _site(config: RunConfig, told: Told, place: int, count: int, *, late: bool) -> FleetSite:
    """Return site number ``place`` of ``count``, which repeat those of ``config``."""
    names = list(config.cluster.sites)
    name = names[place % len(names)]
    site = config.cluster.sites[name]
    return replace(
        _linked(config, name),
        step_s=told.step_s * site.slowdown,
        tokens_per_step=tokens_per_step(config) * site.nproc,
        interruptions_per_s=told.interruptions_per_s(),
        away_s=told.away_s,
        step_jitter=told.step_jitter,
        starts_s=inf if late else 0.0,
        planned=told.maintenance(place, count),
    )


def _linked(config: RunConfig, name: str) -> FleetSite:
    """Return a site with only its link set."""
    link = connecting.link_options(config, name)
    if not config.network.emulate:
        return FleetSite(step_s=0.0)
    return FleetSite(step_s=0.0, up_mbps=link.mbps, down_mbps=link.mbps, rtt_s=link.rtt_ms / 1e3)


def _failing_together(names: Sequence[str], told: Told) -> tuple[Region, ...]:
    per_s = told.region_interruptions_per_day / DAY_S
    return tuple(
        Region(sites=_places(names, region), interruptions_per_s=per_s, away_s=told.away_s) for region in told.regions
    )


def faults_of(steps: Sequence[Step], names: Sequence[str]) -> tuple[FleetFault, ...]:
    """Turn a scenario of ``diloco up`` into faults of a fleet of these sites; ``ConfigError`` if it is unsupported."""
    faults = []
    for step in steps:
        if step.do not in FAULTS:
            wanted = f"one of {', '.join(FAULTS)}"
            raise ConfigError(f"line {step.line} of the scenario has do: {step.do}: the simulation knows {wanted}")
        kind, site = FAULTS[step.do], names.index(step.site) if step.site else None
        if site is None:
            kind = "down" if step.do == "kill" else "pause"
        when = {"at_s": step.at_s, "at_share": step.at_progress}
        faults.append(FleetFault(kind=kind, site=site, lasts_s=step.for_s, **when))
    return tuple(faults)


def not_simulated(config: RunConfig) -> list[str]:
    """Return the settings that affect a run but not its simulation."""
    found = [] if config.outer.num_syncers == 1 else [f"outer.num_syncers={config.outer.num_syncers}"]
    for name in ("jitter_ms", "stall_percent"):
        of = {getattr(connecting.link_options(config, site), name) for site in config.cluster.sites}
        if config.network.emulate and of != {0}:
            found.append(f"network.{name}={max(of):g}")
    return found


def _places(names: Sequence[str], region: str) -> tuple[int, ...]:
    sites = region.split(",")
    for site in sites:
        if site not in names:
            raise ConfigError(f"--region {region} has {site!r}: one of {', '.join(names)}")
    if len(set(sites)) < len(sites):
        raise ConfigError(f"--region {region} has a site twice")
    return tuple(names.index(site) for site in sites)
