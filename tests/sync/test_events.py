"""Every event is frozen and survives a file."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.sync import events
from diloco.sync.events import DISCARDING, Fate, LearnerEvent, OuterEvent, Reason
from diloco.sync.plain import from_plain, records_in, to_plain
from tests.sync.driving import through_json
from tests.sync.examples import example

KINDS = {**records_in(events, OuterEvent), **records_in(events, LearnerEvent)}.values()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_there_and_back(kind: type) -> None:
    value = example(kind)
    assert from_plain(kind, through_json(to_plain(value))) == value
    fields = dataclasses.fields(kind)
    if fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, fields[0].name, None)


def test_refusals_that_throw_progress_away_are_few() -> None:
    assert {str(reason) for reason in DISCARDING} == {
        "non_finite",
        "outlier",
        "evicted",
        "restored",
        "corrupt",
        "withdrawn",
        "implausible",
    }


def test_a_fate_is_merged_or_has_a_reason() -> None:
    assert Fate(0, 1, 2, 3, "d").merged
    assert not Fate(0, 1, 2, 3, "d", Reason.STALE).merged
