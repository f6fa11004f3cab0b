"""Every effect is frozen and survives a file."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.sync import effects
from diloco.sync.effects import LearnerEffect, OuterEffect
from diloco.sync.journal import from_plain, records_in, to_plain
from tests.sync.driving import through_json
from tests.sync.examples import example

KINDS = {**records_in(effects, OuterEffect), **records_in(effects, LearnerEffect)}.values()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_there_and_back(kind: type) -> None:
    value = example(kind)
    assert from_plain(kind, through_json(to_plain(value))) == value
    fields = dataclasses.fields(kind)
    if fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, fields[0].name, None)
