"""A fleet is the run that the configuration says."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from diloco.codec.registry import make_codec
from diloco.config import build
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.schema import RunConfig
from diloco.lab.fleet import Told, above_of, fleet_of, tree_of, with_sites
from diloco.sim.fleet_plan import FleetFault, Region
from tests.runs.processes import TINY


@pytest.fixture
def three() -> RunConfig:
    return compose([*TINY, "cluster=local3"])


def test_chips_regions_and_sites_fail_and_steps_vary_as_told(three: RunConfig) -> None:
    told = replace(TIMES, interruptions_per_day=2.0, chips=1461, interruptions_per_chip_year=0.5, step_jitter=0.25)
    told = replace(told, regions=["site-c,site-a"], region_interruptions_per_day=86_400.0)
    plan = fleet_of(three, told)
    assert [site.interruptions_per_s * 86_400 for site in plan.sites] == pytest.approx([4.0] * 3)
    assert [site.step_jitter for site in plan.sites] == [0.25] * 3
    assert plan.regions == (Region(sites=(2, 0), interruptions_per_s=1.0, away_s=1.0),)
    with pytest.raises(ConfigError, match=r"--region site-a,site-z has 'site-z': one of site-a, site-b, site-c"):
        fleet_of(three, replace(told, regions=["site-a,site-z"]))


TIMES = Told(step_s=0.5, away_s=1.0)


def test_sites_links_sizes_and_rules_are_the_runs() -> None:
    config = compose(
        [*TINY, "cluster=local4", "network=wan_bad", "outer.num_fragments=3", "cluster.sites.site-b.slowdown=2"]
    )
    plan = fleet_of(config, TIMES)
    assert [site.step_s for site in plan.sites][:2] == [0.5, 1.0]
    assert (plan.sites[0].up_mbps, plan.sites[0].rtt_s) == (20.0, 0.15)
    assert plan.sites[3].rtt_s == 0.2
    numels = [fragment.numel for fragment in build.layout_of(config).fragments]
    assert plan.update_bytes == tuple(make_codec(config.codec.up).payload_bytes_max(numel) for numel in numels)
    assert plan.whole_bytes == tuple(4 * numel for numel in numels)
    config.data.leased = False
    assert (plan.outer, plan.learner) == (build.outer_options(config), build.learner_options(config))


def test_maintenance_goes_from_site_to_site_as_long_as_the_run_lasts(three: RunConfig) -> None:
    told = replace(TIMES, seconds=9000.0, maintenance_every_h=1.0, maintenance_s=60.0)
    assert [site.planned for site in fleet_of(three, told).sites] == [
        ((1200.0, 1260.0), (4800.0, 4860.0), (8400.0, 8460.0)),
        ((2400.0, 2460.0), (6000.0, 6060.0)),
        ((3600.0, 3660.0), (7200.0, 7260.0)),
    ]
    assert fleet_of(three, TIMES).sites[0].planned == ()
    with pytest.raises(ConfigError, match=r"--maintenance-s is 1201: .* each of 3 sites gets only 1200 s"):
        fleet_of(three, replace(told, maintenance_s=1201.0))


def test_each_site_of_the_run_above_is_a_region_with_the_sites_of_this_one() -> None:
    settings = [*TINY, "experiment=halos", "cluster=local3", "network=wan", "run.tokens=1000", "upstream.updates=5"]
    config = compose([*settings, "outer.num_fragments=2", "run.seed=7"])
    asked = ["cluster=local4", "network=transatlantic", "outer=halos_global", "codec=int8", "outer.sites_max=9"]
    above = above_of(config, asked)
    assert (above.model, above.run) == (config.model, config.run), "what is said of the region is of both"
    assert above_of(config, [*asked, "run.seconds=60"]).run == replace(config.run, seconds=60, tokens=None)
    assert len(above_of(config, asked, 12).cluster.sites) == 12
    above = above_of(config, [*asked, "run.tokens=5000"])
    plan = tree_of(config, above, TIMES)
    assert (plan.seed, plan.outer.num_fragments) == (7, 2)
    numels = [fragment.numel for fragment in build.layout_of(config).fragments]
    assert plan.update_bytes == tuple(make_codec(above.codec.up).payload_bytes_max(numel) for numel in numels)
    assert (plan.outer.token_budget, plan.outer.run_ns, plan.outer.sites_max, plan.seconds) == (5000, 0, 9, None)
    assert [site.rtt_s for site in plan.sites] == [site.rtt_s for site in fleet_of(above, TIMES).sites]
    for site in plan.sites:
        assert site.region is not None
        assert (site.region.updates, site.region.alpha) == (5, 0.25)
        below = site.region.plan
        assert (below.outer.token_budget, below.outer.run_ns, below.seconds) == (0, 0, None)
        assert below.sites == fleet_of(config, TIMES).sites
        assert below.update_bytes == tuple(4 * numel for numel in numels)


def test_regions_of_several_syncers_are_as_those_of_one() -> None:
    settings, asked = [*TINY, "experiment=halos", "outer.num_fragments=2"], ["outer=halos_global", "codec=fp32"]
    one, two = compose(settings), compose([*settings, "outer.num_syncers=2", "outer.syncer_mbps=[2,1]"])
    above = above_of(two, asked)
    assert (above.outer.num_syncers, above.outer.syncer_mbps) == (2, [2, 1])
    assert tree_of(two, above, TIMES) == tree_of(one, above_of(one, asked), TIMES)


def test_maintenance_goes_through_all_regions_and_what_fails_together_is_in_each() -> None:
    config = compose([*TINY, "experiment=halos", "cluster=local3"])
    told = replace(TIMES, seconds=3600.0, maintenance_every_h=1.0, maintenance_s=60.0)
    told = replace(told, regions=["site-a,site-c"], region_interruptions_per_day=86_400.0)
    plan = tree_of(config, above_of(config, ["outer=halos_global", "codec=fp32"], 4), told)
    below = [site.region.plan for site in plan.sites if site.region is not None]
    begins = [site.planned[0][0] for each in below for site in each.sites if site.planned]
    assert begins == [300.0 * turn for turn in range(1, 12)], "the last one would begin as the run ends"
    together = (Region(sites=(0, 2), interruptions_per_s=1.0, away_s=1.0),)
    assert [each.regions for each in below] == [together] * 4
    assert plan.regions == ()


def test_a_run_lasts_as_long_as_is_asked_for_or_until_it_ends_by_itself() -> None:
    config = compose([*TINY, "cluster=local3", "run.seconds=30", "run.tokens=1000"])
    plan = fleet_of(config, TIMES)
    assert (plan.seconds, plan.outer.run_ns, plan.outer.token_budget) == (None, 30 * 10**9, 1000)
    plan = fleet_of(config, replace(TIMES, seconds=60.0))
    assert (plan.seconds, plan.outer.run_ns, plan.outer.token_budget) == (60.0, 0, 0)
    config.run.seconds = config.run.tokens = None
    with pytest.raises(ConfigError, match=r"run\.seconds and run\.tokens are null"):
        fleet_of(config, TIMES)
    config.cluster.sites = {}
    with pytest.raises(ConfigError, match=r"cluster\.sites is empty"):
        fleet_of(config, TIMES)


def test_a_scenario_of_a_run_is_one_of_its_fleet(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(
        "- {at_s: 30, do: kill, target: site-b, for_s: 8}\n"
        "- {at_progress: 0.5, do: partition, target: 'link:site-a', for_s: 10}\n"
        "- {at_s: 40, do: kill, target: syncer, for_s: 3}\n"
        "- {at_s: 50, do: start, target: site-c}\n"
    )
    plan = fleet_of(compose([*TINY, "cluster=local3", f"scenario={file}"]), TIMES)
    assert plan.faults == (
        FleetFault(kind="away", site=1, at_s=30.0, lasts_s=8.0),
        FleetFault(kind="cut", site=0, at_share=0.5, lasts_s=10.0),
        FleetFault(kind="down", site=None, at_s=40.0, lasts_s=3.0),
        FleetFault(kind="start", site=2, at_s=50.0),
    )
    assert [site.starts_s for site in plan.sites] == [0.0, 0.0, inf]
    file.write_text("- {at_s: 30, do: reset, target: 'link:site-b'}")
    with pytest.raises(
        ConfigError, match=r"line 1 of the scenario has do: reset: the simulation knows one of kill, stop,"
    ):
        fleet_of(compose([*TINY, "cluster=local3", f"scenario={file}"]), TIMES)
    assert fleet_of(compose([*TINY, "cluster=local3"]), TIMES).faults == (), "the demo is for diloco up"


def test_many_sites_are_those_that_there_are_over_and_over(three: RunConfig) -> None:
    many = with_sites(three, 20)
    assert " ".join(list(many.cluster.sites)[:7]) == "site-a site-b site-c site-a-2 site-b-2 site-c-2 site-a-3"
    steps = [site.step_s for site in fleet_of(many, TIMES).sites]
    assert steps == pytest.approx([0.5 * (1.0, 1.25, 1.6)[place % 3] for place in range(20)])
    assert many.outer.sites_max == 20
    assert list(with_sites(three, 2).cluster.sites) == ["site-a", "site-b"]
