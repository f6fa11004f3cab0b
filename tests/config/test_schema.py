from __future__ import annotations

from dataclasses import fields

import pytest

from diloco.config import build, build_syncer
from diloco.config.compose import GROUPS, compose, settle, shared_config
from diloco.config.errors import ConfigError
from diloco.config.keys import default_text, leaves, meanings, nearest, type_of, unknown, wanted
from diloco.config.schema import OuterSection, RunConfig
from diloco.outer.merge import CORRECTION_NUMBERS, Correction
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.plan import estimate


def test_every_section_but_run_launch_and_upstream_is_a_group_and_scenario_is_a_file() -> None:
    names = [item.name for item in fields(RunConfig)]
    assert set(names) == {*GROUPS} - {"experiment"} | {"run", "launch", "upstream", "scenario"}


def test_the_defaults_alone_are_a_run_that_can_be_built() -> None:
    config = settle(RunConfig())
    config.run.name = "x"
    config.data.cache = "cache"
    build_syncer.check(config)


def test_every_option_of_the_outer_optimizer_can_be_set_and_is_as_the_optimizer_has_it() -> None:
    outer = compose([]).outer
    assert {item.name for item in fields(OuterOptimizerOptions)} <= {item.name for item in fields(OuterSection)}
    for item in fields(OuterOptimizerOptions):
        assert item.name in ("kind", "momentum", "lr") or getattr(outer, item.name) == item.default, item.name


@pytest.mark.parametrize("name", CORRECTION_NUMBERS)
def test_every_number_of_a_correction_can_be_set_and_is_shared_and_what_is_not_said_is_as_the_correction_has_it(
    name: str,
) -> None:
    usual, key = getattr(Correction(), name), f"outer.correction_{name}"
    assert {item.name for item in fields(Correction)} == {"kind", *CORRECTION_NUMBERS}
    for settings, value in ([], usual), ([f"{key}=0.75"], 0.75):
        config = compose(["experiment=heloco", *settings])
        assert build.rule(config, build.layout_of(config)).correction == Correction(kind="heloco", **{name: value})
        shared = shared_config(config)
        assert (shared["outer.correction"], shared.get(key)) == ("heloco", "0.75" if settings else None)


def test_every_leaf_has_a_type_that_can_be_put_in_words() -> None:
    for key, _, _ in leaves():
        assert type_of(key.replace("<name>", "anything")) is not None
        assert "section" not in wanted(key)


def test_free_names_take_any_name_and_no_other_key_does() -> None:
    assert nearest("zzzz", ["outer.lr", "inner.lr"]) == "", "it is near to none"
    assert type_of("cluster.sites.anything.slowdown") is float
    for key in ("cluster.sites.a.b", "run.anything", "", "run.", "run..name", "run.name.x"):
        with pytest.raises(ConfigError, match="unknown key"):
            type_of(key)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("inner.batchsequences", "inner.batch_sequences"),
        ("sede", "run.seed"),
        ("seed", "run.seed"),
        ("cluster.syncer.listn", "cluster.syncer.listen"),
        ("modle", "model"),
    ],
)
def test_the_nearest_name_is_the_one_meant(typed: str, meant: str) -> None:
    assert unknown(typed) == f"unknown key {typed}: did you mean {meant}?"


def test_meanings_and_defaults_are_read_from_the_source() -> None:
    told = meanings()
    assert told["OuterSection", "inner_steps"] == "H: inner steps between two updates of one fragment."
    assert told["OuterSection", ""] == "The outer optimizer, and how sites and the syncer exchange."
    assert meanings(estimate)["Question", "layers"].startswith("No more fragments")
    defaults = {key: default_text(item) for key, _, item in leaves()}
    assert defaults["run.name"] == "null"
    assert defaults["outer.lock_step"] == "false"
    assert defaults["inner.betas"] == "[0.9, 0.95]"
    assert defaults["data.path"] == '""'
