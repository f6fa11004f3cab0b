"""``diloco sim``: simulate a run without tensors in virtual time, or reproduce a published table."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config.arguments import load_config, settings_parser
from diloco.config.errors import ConfigError, ExitCode, options_of, refusing, require
from diloco.config.keys import hint
from diloco.config.run_dir import RunDir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from diloco.sim.fleet_plan import FleetPlan, FleetResult

SCENARIO = "+scenario="
SEEDS_MAX = 1000


def main(arguments: Sequence[str]) -> ExitCode:
    """Simulate the sites, links and rules of a run without tensors, by the state machines of a real run: which site
    trains, waits or is away, and what crosses the links.  Hours pass in seconds.

      diloco sim experiment=decoupled cluster=local4 network=transatlantic --step-s 0.5 --hours 24
      diloco sim outer.quorum=all --interruptions-per-day 20 --away-s 120
      diloco sim --hours 24 --region site-a,site-b --region-interruptions-per-day 2
      diloco sim --hours 168 --chips 20000 --interruptions-per-chip-year 1 --away-s 900 --seeds 3
      diloco sim experiment=halos --above outer=halos_global --above codec=fp32 --above network=transatlantic --hours 24
      diloco sim scenario=demo                        with the faults that diloco up plays
      diloco sim --like runs/latest                   a finished run and its simulation, side by side
      diloco sim +scenario=goodput_decoupled          a published table, and the same table simulated
      diloco sim +scenario=bandwidth_streaming --json

    Sites, slowdowns and links come from cluster.sites and network, sizes from model and codec.  The run ends after
    --hours, or else by run.seconds or run.tokens.  Each --above is a setting of a syncer above: its cluster.sites are
    then regions over its network, and each has all the sites of this one.  Model, text, fragments, seed and, unless
    --above says otherwise, the run's length are the same for both.
    """
    parser = settings_parser("sim", main.__doc__)
    parser.add_argument("--step-s", type=float, default=0.1, help="an inner step of a site without slowdown (0.1)")
    parser.add_argument("--hours", type=float, help="length of the run (default: by run.seconds or run.tokens)")
    parser.add_argument("--interruptions-per-day", type=float, default=0.0, help="of each site (0)")
    parser.add_argument("--away-s", type=float, default=60.0, help="duration of each interruption (60)")
    parser.add_argument("--region", action="append", default=[], metavar="SITE,SITE", help="sites that fail together")
    parser.add_argument("--region-interruptions-per-day", type=float, default=0.0, help="of each --region (0)")
    parser.add_argument("--chips", type=int, default=0, metavar="N", help="chips at each site (0)")
    parser.add_argument("--interruptions-per-chip-year", type=float, default=0.0, help="each stops its site (0)")
    parser.add_argument("--maintenance-every-h", type=float, default=0.0, help="of each site, one after the other (0)")
    parser.add_argument("--maintenance-s", type=float, default=0.0, help="duration of each maintenance (0)")
    parser.add_argument("--step-jitter", type=float, default=0.0, help="share by which steps are longer or shorter (0)")
    parser.add_argument("--merge-s", type=float, default=0.0, help="duration of an outer step (0)")
    parser.add_argument("--sites", type=int, metavar="N", help="number of sites, repeating those of cluster.sites")
    parser.add_argument("--above", action="append", default=[], metavar="KEY=VALUE", help="of a syncer above regions")
    parser.add_argument(
        "--regions", type=int, metavar="N", help="number of regions, repeating those of --above cluster.sites"
    )
    parser.add_argument("--like", type=Path, metavar="FOLDER", help="of a finished run: simulate it, and compare")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run.seed and the N - 1 after it (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    named = [each.removeprefix(SCENARIO) for each in arguments if each.startswith(SCENARIO)]
    given = parser.parse_args([each for each in arguments if not each.startswith(SCENARIO)])
    if len(named) > 1:
        raise ConfigError(f"+scenario is {' and '.join(named)}: one at a time")
    if named:
        kept = {"json", "settings"}
        told = [key for key, value in vars(given).items() if key not in kept and value != parser.get_default(key)]
        if told:
            flag = f"--{told[0].replace('_', '-')}"
            raise ConfigError(f"{flag} and +scenario={named[0]}: a published table takes no option but --json")
        _study(named[0], given)
    else:
        _fleet(given)
    return ExitCode.OK


def _study(name: str, given: argparse.Namespace) -> None:
    from diloco.plan.studies import STUDIES

    if name not in STUDIES:
        raise ConfigError(f"+scenario is {name!r}: {hint(name, STUDIES)}")
    if given.settings:
        raise ConfigError(f"{given.settings[0]}: +scenario={name} is a published table, and takes no settings")
    study, began_s = STUDIES[name], time.monotonic()
    cells = []
    if not given.json:
        print(study.does)
        print(f"{'':<24}{'':<16}{'published':>12}{'found':>12}{'off':>8}  ({study.unit})", flush=True)
    for cell in study.cells():
        cells.append(cell)
        if not given.json:
            print(f"{cell.row:<24}{cell.column:<16}{cell.published:>12g}{cell.found:>12g}{cell.off:>8g}", flush=True)
    worst = max(cell.off for cell in cells)
    if given.json:
        seconds, rows = round(time.monotonic() - began_s, 1), [asdict(cell) for cell in cells]
        print(json.dumps({"scenario": name, study.worst: worst, "seconds": seconds, "cells": rows}))
    else:
        print(f"at most {worst:g} {study.unit} off")


def _fleet(given: argparse.Namespace) -> None:
    if given.like is not None:
        if given.config is not None:
            raise ConfigError("--config and --like: the configuration is that of the run")
        if given.sites is not None:
            raise ConfigError("--sites and --like: the sites are those of the run")
        if given.seeds != 1:
            raise ConfigError("--seeds and --like: the seed is that of the run")
        if given.above or given.regions is not None:
            raise ConfigError("--above, --regions and --like: only a run without regions can be compared")
        given.config = given.like / "config.yaml"
    config = load_config(given)
    require(1 <= given.seeds <= SEEDS_MAX, "--seeds", given.seeds, f"must be from 1 to {SEEDS_MAX}")
    from diloco.config import build_syncer
    from diloco.lab.compare import as_made, read_made, simulated
    from diloco.lab.fleet import Told, above_of, fleet_of, not_simulated, tree_of, with_sites
    from diloco.sim.fleet import EndlessError, simulate

    seconds = None if given.hours is None else 3600 * given.hours
    told = options_of(Told, given, "sim", seconds=seconds, regions=given.region)
    if given.sites is not None:
        config = with_sites(config, given.sites)
    names, above = list(config.cluster.sites), None
    if given.above or given.regions is not None:
        above = above_of(config, given.above, given.regions)
    if given.like is None:  # The settings of a finished run are valid.
        build_syncer.check(config)
    else:
        config.scenario = None  # The run's events have the faults that happened.
    plan = fleet_of(config, told) if above is None else tree_of(config, above, told)
    made = None if given.like is None else read_made(RunDir(given.like))
    plan = plan if made is None else as_made(plan, names, made)
    began_s = time.monotonic()
    with refusing(EndlessError, end=": this run does not end; --hours sets how much of it to simulate"):
        found = simulate(plan)
        regions = [] if above is None else list(above.cluster.sites)
        left_out = not_simulated(config)
        if above is not None:
            left_out += [f"above: {each}" for each in not_simulated(above)]
        figures = summary(names, plan, found, time.monotonic() - began_s, regions) | {"not_simulated": left_out}
        others = {seed: simulate(replace(plan, seed=seed)) for seed in range(plan.seed + 1, plan.seed + given.seeds)}
    each = {plan.seed: found, **others}
    figures["goodput_by_seed"] = {str(seed): round(one.goodput, 5) for seed, one in each.items()}
    if made is not None:
        figures["like"] = {
            "versions": {"run": sum(made.versions), "simulation": sum(found.versions)},
            "sites": {
                name: {"run": asdict(made.columns[name]), "simulation": asdict(column)}
                for name, column in simulated(found, names).items()
            },
        }
    print(json.dumps(figures) if given.json else "\n".join(lines(figures)))


def compared(told: Mapping[str, Any]) -> list[str]:
    """Return the comparison as lines of text."""
    versions, sites = told["versions"], told["sites"]
    head = f"{'':<14}{'':<12}{'steps':>9}{'merged':>9}{'MB up':>10}{'MB down':>10}{'idle':>8}"
    table = [
        f"{name if which == 'run' else '':<14}{which:<12}{site['steps']:>9,}{site['updates_merged']:>9,}"
        f"{site['bytes_up'] / 1e6:>10,.2f}{site['bytes_down'] / 1e6:>10,.2f}{site['idle_share']:>8.1%}"
        for name, both in sites.items()
        for which, site in both.items()
    ]
    return [head, *table, f"versions: {versions['run']:,} in the run, {versions['simulation']:,} in the simulation"]


def summary(
    names: Sequence[str], plan: FleetPlan, found: FleetResult, took_s: float, regions: Sequence[str]
) -> dict[str, Any]:
    """Return a fleet's result as plain values; shares are of the simulated time.  ``names`` are those of its sites, or
    of the sites in each of ``regions``."""
    figures: dict[str, Any] = {
        "goodput": round(found.goodput, 5),
        "versions": list(found.versions),
        "sites_per_version": round(found.sites_per_version, 3),
        "simulated_s": found.seconds,
        "took_s": round(took_s, 3),
        "site_rounds_per_s": round(found.site_rounds / max(took_s, 1e-9)),
        "seed": plan.seed,
    }
    if not regions:
        return figures | {"sites": _sites(names, plan, found)}
    sites: dict[str, dict[str, float]] = {}
    told: dict[str, dict[str, object]] = {}
    for place, (region, site, account) in enumerate(zip(regions, plan.sites, found.sites, strict=True)):
        assert site.region is not None
        assert account.region is not None
        below = _sites([f"{region}/{name}" for name in names], site.region.plan, account.region)
        sites |= below
        told[region] = {
            "version_0_s": round(_version_0_s(plan, place), 3),
            "goodput": round(account.region.goodput, 5),
            "versions": list(account.region.versions),
            "updates_merged": account.rounds,
            "bytes_up": account.bytes_up,
            "bytes_down": account.bytes_down,
        }
    return figures | {"sites": sites, "regions": told}


def _sites(names: Sequence[str], plan: FleetPlan, found: FleetResult) -> dict[str, dict[str, float]]:
    return {
        name: {
            "version_0_s": round(_version_0_s(plan, place), 3),
            "trained_share": round(site.trained_s / found.seconds, 5),
            "waited_share": round(site.waited_s / found.seconds, 5),
            "away_share": round(site.away_s / found.seconds, 5),
            "steps": site.steps,
            "updates_merged": site.rounds,
            "interruptions": site.interruptions,
            "bytes_up": site.bytes_up,
            "bytes_down": site.bytes_down,
        }
        for place, (name, site) in enumerate(zip(names, found.sites, strict=True))
    }


def _version_0_s(plan: FleetPlan, place: int) -> float:
    """Return the seconds that joining and fetching version 0 take on the site's link alone."""
    site = plan.sites[place]
    return 2 * site.rtt_s + (sum(plan.whole_bytes) * 8e-6 / site.down_mbps if site.down_mbps else 0.0)


def lines(told: Mapping[str, Any]) -> list[str]:
    """Return the summary as lines of text."""
    sites, regions = told["sites"], told.get("regions", {})
    wide = max(14, *(len(name) + 2 for name in sites))
    head = f"{'':<{wide}}{'trained':>9}{'waited':>9}{'away':>9}{'steps':>12}{'merged':>9}{'MB up':>12}{'MB down':>12}"
    table = [
        f"{name:<{wide}}{site['trained_share']:>9.1%}{site['waited_share']:>9.1%}{site['away_share']:>9.1%}"
        f"{site['steps']:>12,}{site['updates_merged']:>9,}"
        f"{site['bytes_up'] / 1e6:>12,.1f}{site['bytes_down'] / 1e6:>12,.1f}"
        for name, site in sites.items()
    ]
    if regions:
        table.append(f"{'':<{wide}}{'goodput':>9}{'':>30}{'merged':>9}{'MB up':>12}{'MB down':>12}  (above)")
    table += [
        f"{name:<{wide}}{site['goodput']:>9.1%}{'':>30}{site['updates_merged']:>9,}"
        f"{site['bytes_up'] / 1e6:>12,.1f}{site['bytes_down'] / 1e6:>12,.1f}"
        for name, site in regions.items()
    ]
    table.append(
        f"goodput {told['goodput']:.1%}; {sum(told['versions']):,} versions, of {told['sites_per_version']} "
        f"{'regions' if regions else 'sites'} each; {told['simulated_s']:,.0f} s in {told['took_s']} s"
    )
    for rows, did, origin in ((sites, "made no step", ""), (regions, "merged nothing", " from above")):
        for name, row in rows.items():
            if row["version_0_s"] > told["simulated_s"]:
                table.append(f"{name} {did}: version 0 takes {row['version_0_s']:,.0f} s to arrive{origin}")
    like, left_out, by_seed = told.get("like"), told["not_simulated"], told["goodput_by_seed"]
    if len(by_seed) > 1:
        shares = list(by_seed.values())
        table.append(
            f"goodput of seeds {' '.join(by_seed)}: {sum(shares) / len(shares):.1%} on average, "
            f"{min(shares):.1%} to {max(shares):.1%}; the table is of the first"
        )
    if left_out:
        table.append(f"not simulated: {', '.join(left_out)}")
    return [head, *table, *(["", *compared(like)] if like else [])]
