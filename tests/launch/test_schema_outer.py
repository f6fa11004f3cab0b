from __future__ import annotations

from dataclasses import fields

import pytest

from diloco.launch.config import compose
from diloco.launch.keys import leaves, meanings
from diloco.launch.schema_outer import OuterSection
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
