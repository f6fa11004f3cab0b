"""Train one cell of a laboratory, in its own process."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.config.errors import ConfigError
from diloco.lab.experiment import Cell, Found

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from diloco.sim.fleet_plan import FleetPlan

UNIT_S = 1.0
"""Virtual seconds that a step takes at speed 1."""
SLACK = 4
"""A run counts as stuck after this multiple of the time that the slowest site needs for its share."""


def run_cell(cell: Cell, folder: Path) -> Found:
    """Train ``cell``; ``folder`` has the warm start that all rows of its seed share."""
    import torch

    from diloco.config import build
    from diloco.lab.fleet import tokens_per_step
    from diloco.lab.training import Control, TrainedFleet, Warm
    from diloco.models.evaluate import Evaluator
    from diloco.sim.fleet import simulate

    torch.set_num_threads(1)
    began_s, config, row, speeds = time.monotonic(), cell.config, cell.row, cell.row.speeds
    text = build.corpus(config)
    warm = Warm.load(_warm_path(cell, folder)) if cell.warm_steps else None
    tokens, sites = config.run.tokens or 0, len(speeds)
    if row.control:
        control = Control(config, sites, tokens, warm)
        control.whole()
        loss, took_s = Evaluator(config, text).score(control.model).val_loss, time.monotonic() - began_s
        steps = -(-tokens // (sites * tokens_per_step(config)))
        seconds = steps * UNIT_S / min(speeds)
        return Found(
            row=cell.name, seed=cell.seed, loss=loss, tokens=tokens, seconds=seconds, bytes_up=0, took_s=took_s
        )
    names = [f"site-{index:05d}" for index in range(sites)]
    plan = _plan(cell, names)
    fleet = TrainedFleet(config, names, text, warm, cell.points)
    found = simulate(plan, fleet)
    points = [[each.progress, each.seconds, each.bytes_up, each.loss] for each in fleet.points]
    trained = sum(site.steps for site in found.sites) * tokens_per_step(config)
    if trained < tokens:
        raise ConfigError(
            f"row {cell.name}, seed {cell.seed}: {trained} of {tokens} tokens were trained in {plan.seconds or 0:,.0f}"
            f" s of virtual time, {SLACK} times what the slowest site needs: its links or faults hold it back"
        )
    ended_s = fleet.last_merge_s
    trained_s = sum(site.trained_s for site in found.sites)
    return Found(
        row=cell.name,
        seed=cell.seed,
        loss=fleet.score(),
        points=points,
        tokens=trained,
        seconds=ended_s,
        bytes_up=fleet.bytes_up,
        goodput=min(1.0, trained_s / (ended_s * sites)),
        versions=sum(found.versions),
        sites_per_version=found.sites_per_version,
        took_s=time.monotonic() - began_s,
    )


def _plan(cell: Cell, names: Sequence[str]) -> FleetPlan:
    """Return the sites of a row (not of a control), with their links, speeds and interruptions."""
    from diloco.config.schema import ClusterSite
    from diloco.lab.fleet import Told, fleet_of, tokens_per_step

    config, row, sites, tokens = cell.config, cell.row, len(names), cell.config.run.tokens or 0
    there = {name: ClusterSite(slowdown=1 / speed) for name, speed in zip(names, row.speeds, strict=True)}
    told = Told(
        step_s=UNIT_S,
        seconds=SLACK * tokens / (tokens_per_step(config) * sites) * UNIT_S / min(row.speeds),
        interruptions_per_day=24 * row.interruptions_per_hour,
        away_s=row.away_s or UNIT_S,
    )
    plan = fleet_of(replace(config, cluster=replace(config.cluster, sites=there)), told)
    linked = (
        replace(
            site,
            step_jitter=row.jitter,
            rtt_s=row.rtt_s,
            lost_share=row.lost_share,
            starts_s=phase * config.outer.inner_steps * site.step_s,
        )
        for site, phase in zip(plan.sites, row.phases or [0.0] * sites, strict=True)
    )
    return replace(plan, sites=tuple(linked), seed=cell.seed, tokens_trained=tokens)


def make_warm(cell: Cell, folder: Path) -> None:
    """Train the warm start that the rows of this seed share, unless it exists."""
    import torch

    from diloco.lab.training import Control, Warm

    path = _warm_path(cell, folder)
    if not cell.warm_steps or Warm.is_at(path):
        return
    torch.set_num_threads(1)
    control = Control(cell.warm, len(cell.row.speeds), 1)
    control.steps(cell.warm_steps)
    control.state().save(path)


def _warm_path(cell: Cell, folder: Path) -> Path:
    return folder / "warm" / f"{cell.warm_digest}.safetensors"
