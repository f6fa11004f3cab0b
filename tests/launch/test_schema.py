from __future__ import annotations

from dataclasses import fields

from diloco.launch import build_syncer
from diloco.launch.config import GROUPS, settle
from diloco.launch.schema import RunConfig


def test_every_section_but_run_launch_and_upstream_is_a_group_and_scenario_is_a_file() -> None:
    names = [item.name for item in fields(RunConfig)]
    assert set(names) == {*GROUPS} - {"experiment"} | {"run", "launch", "upstream", "scenario"}


def test_the_defaults_alone_are_a_run_that_can_be_built() -> None:
    config = settle(RunConfig())
    config.run.name = "x"
    config.data.cache = "cache"
    build_syncer.check(config)
