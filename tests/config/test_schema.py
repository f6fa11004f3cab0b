from __future__ import annotations

from dataclasses import fields

import pytest

from diloco.config import build, build_syncer
from diloco.config.compose import GROUPS, compose, settle, shared_config
from diloco.config.errors import ConfigError
from diloco.config.schema import OuterSection, RunConfig
from diloco.outer.merge import CORRECTION_NUMBERS, Correction
from diloco.outer.optimizer import OuterOptimizerOptions


def test_every_section_but_run_launch_and_upstream_is_a_group_and_scenario_is_a_file() -> None:
    names = [item.name for item in fields(RunConfig)]
    assert set(names) == {*GROUPS} - {"experiment"} | {"run", "launch", "upstream", "scenario"}


def test_the_defaults_alone_are_a_run_that_can_be_built() -> None:
    config = settle(RunConfig())
    config.run.name = "x"
    config.data.cache = "cache"
    build_syncer.check(config)


def test_every_option_of_the_outer_optimizer_can_be_set() -> None:
    assert {item.name for item in fields(OuterOptimizerOptions)} <= {item.name for item in fields(OuterSection)}


@pytest.mark.parametrize(
    "field", sorted({item.name for item in fields(OuterOptimizerOptions)} - {"kind", "momentum", "lr"})
)
def test_what_is_not_said_is_as_the_optimizer_has_it(field: str) -> None:
    assert getattr(compose([]).outer, field) == OuterOptimizerOptions.__dataclass_fields__[field].default


@pytest.mark.parametrize("name", CORRECTION_NUMBERS)
def test_every_number_of_a_correction_can_be_set_and_is_shared_and_what_is_not_said_is_as_the_correction_has_it(
    name: str,
) -> None:
    usual, key = getattr(Correction(), name), f"outer.correction_{name}"
    assert {item.name for item in fields(Correction)} == {"kind", *CORRECTION_NUMBERS}
    for settings, wanted in ([], usual), ([f"{key}=0.75"], 0.75):
        config = compose(["experiment=heloco", *settings])
        assert build.rule(config, build.layout_of(config)).correction == Correction(kind="heloco", **{name: wanted})
        shared = shared_config(config)
        assert (shared["outer.correction"], shared.get(key)) == ("heloco", "0.75" if settings else None)


def test_a_correction_without_a_momentum_is_refused_in_words() -> None:
    config = compose(["outer=async", "outer.correction=heloco"])
    with pytest.raises(ConfigError, match=r"outer\.correction is 'heloco': kind 'sgd' has no momentum"):
        build_syncer.check(config)
