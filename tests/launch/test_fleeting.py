"""A fleet is the run that the configuration says."""

from __future__ import annotations

import pytest

from diloco.codec.registry import make_codec
from diloco.launch import build
from diloco.launch.config import compose
from diloco.launch.errors import ConfigError
from diloco.launch.fleeting import fleet_of
from tests.launch.processes import TINY

TIMES = {"step_s": 0.5, "seconds": None, "interruptions_per_day": 0.0, "away_s": 1.0, "merge_s": 0.0}


def test_sites_links_sizes_and_rules_are_the_runs() -> None:
    config = compose(
        [*TINY, "cluster=local4", "network=wan_bad", "outer.num_fragments=3", "cluster.sites.site-b.slowdown=2"]
    )
    plan = fleet_of(config, **TIMES)
    assert [site.step_s for site in plan.sites][:2] == [0.5, 1.0]
    assert (plan.sites[0].up_mbps, plan.sites[0].rtt_s) == (20.0, 0.15)
    assert plan.sites[3].rtt_s == 0.2
    numels = [fragment.numel for fragment in build.layout_of(config).fragments]
    assert plan.update_bytes == tuple(make_codec(config.codec.up).payload_bytes_max(numel) for numel in numels)
    assert plan.whole_bytes == tuple(4 * numel for numel in numels)
    config.data.leased = False
    assert (plan.outer, plan.learner) == (build.outer_options(config), build.learner_options(config))


def test_no_sites_are_no_fleet() -> None:
    config = compose(TINY)
    config.cluster.sites = {}
    with pytest.raises(ConfigError, match=r"cluster\.sites is empty"):
        fleet_of(config, **TIMES)


def test_a_run_lasts_as_long_as_is_asked_for_or_until_it_ends_by_itself() -> None:
    config = compose([*TINY, "cluster=local3", "run.seconds=30", "run.tokens=1000"])
    plan = fleet_of(config, **TIMES)
    assert (plan.seconds, plan.outer.run_ns, plan.outer.token_budget) == (None, 30 * 10**9, 1000)
    plan = fleet_of(config, **{**TIMES, "seconds": 60.0})
    assert (plan.seconds, plan.outer.run_ns, plan.outer.token_budget) == (60.0, 0, 0)
    config.run.seconds = config.run.tokens = None
    with pytest.raises(ConfigError, match=r"run\.seconds and run\.tokens are null"):
        fleet_of(config, **TIMES)
