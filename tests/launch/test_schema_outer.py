from __future__ import annotations

from dataclasses import fields

import pytest

from diloco.launch import build, build_syncer
from diloco.launch.config import compose, shared_config
from diloco.launch.errors import ConfigError
from diloco.launch.keys import leaves, meanings
from diloco.launch.schema_outer import OuterSection
from diloco.outer.merge import CORRECTION_NUMBERS, Correction
from diloco.outer.optimizer import OuterOptimizerOptions


def test_what_can_be_set_of_the_outer_side_is_listed_and_explained_with_all_the_rest() -> None:
    names = {f"outer.{item.name}" for item in fields(OuterSection)}
    assert names == {name for name, _, _ in leaves() if name.startswith("outer.")}
    assert meanings()["OuterSection", "quorum"].startswith("Distinct sites")


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
