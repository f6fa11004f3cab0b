"""A fleet for the simulator out of the configuration of a run: the same sites, links, fragments, codecs and rules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.codec.registry import make_codec
from diloco.launch import build, connecting
from diloco.launch.errors import ConfigError
from diloco.sim.fleet_plan import FleetPlan, FleetSite

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig

DAY_S = 86_400.0


def fleet_of(
    config: RunConfig,
    *,
    step_s: float,
    seconds: float | None,
    interruptions_per_day: float,
    away_s: float,
    merge_s: float,
) -> FleetPlan:
    """The sites of ``cluster.sites`` with the links of ``network``, and what each fragment takes in ``codec``.

    ``step_s`` is an inner step of a site that is not slowed down; ``interruptions_per_day`` are of each site.  The run
    lasts ``seconds``, or None: as long as its own configuration says.
    """
    told = {"--step-s": step_s, "--away-s": away_s} | ({} if seconds is None else {"--hours": seconds / 3600})
    for name, value in told.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value:g}: must be above 0")
    for name, value in {"--interruptions-per-day": interruptions_per_day, "--merge-s": merge_s}.items():
        if not value >= 0:
            raise ConfigError(f"{name} is {value:g}: must not be negative")
    if not config.cluster.sites:
        raise ConfigError("cluster.sites is empty: a simulation needs at least one site")
    # Leases of data say who draws what, which is nothing here; and several syncers are as one that is fast enough.
    whole = replace(config.outer, num_syncers=1, syncer_mbps=[])
    config = replace(config, outer=whole, data=replace(config.data, leased=False))
    outer = build.outer_options(config)
    if seconds is not None:
        outer = replace(outer, run_ns=0, token_budget=0)
    elif not (outer.run_ns or outer.token_budget):
        raise ConfigError("run.seconds and run.tokens are null: nothing ends this run, and --hours says how long it is")
    layout = build.layout_of(config)
    up, down = make_codec(config.codec.up), make_codec(config.codec.down)
    numels = [fragment.numel for fragment in layout.fragments]
    inner = config.inner
    tokens = inner.batch_sequences * inner.accumulation * (inner.sequence_length or 0)
    sites = []
    for name, site in config.cluster.sites.items():
        link = connecting.link_options(config, name)
        sites.append(
            FleetSite(
                step_s=step_s * site.slowdown,
                tokens_per_step=tokens * site.nproc,
                up_mbps=link.mbps if config.network.emulate else 0.0,
                down_mbps=link.mbps if config.network.emulate else 0.0,
                rtt_s=link.rtt_ms / 1e3 if config.network.emulate else 0.0,
                interruptions_per_s=interruptions_per_day / DAY_S,
                away_s=away_s,
            )
        )
    return FleetPlan(
        sites=tuple(sites),
        outer=outer,
        learner=build.learner_options(config),
        update_bytes=tuple(up.payload_bytes_max(numel) for numel in numels),
        version_bytes=tuple(down.payload_bytes_max(numel) for numel in numels),
        whole_bytes=tuple(4 * numel for numel in numels),
        merge_s=merge_s,
        seconds=seconds,
        seed=config.run.seed,
    )
