"""A value that cannot work is refused where it is written down, by name."""

from __future__ import annotations

import re

import pytest

from diloco.sync.options import LearnerOptions, OuterOptions


def test_defaults_work() -> None:
    OuterOptions()
    LearnerOptions()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_fragments", 0),
        ("quorum", 0),
        ("quorum", "most"),
        ("quorum_min", 0),
        ("grace", "none"),
        ("grace_ns", -1),
        ("grace_share_percent", 100),
        ("grace_share_percent", -1),
        ("overlap_steps", -1),
        ("weights", "loudness"),
        ("staleness_max", -1),
        ("updates_in_flight_max", 0),
        ("site_timeout_ns", 0),
        ("final_wait_ns", 0),
        ("token_budget", -1),
        ("run_ns", -1),
        ("fates_kept_max", 19),
        ("fates_kept_max", 1025),
        ("sites_max", 0),
    ],
)
def test_outer_options_name_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value!r}: "):
        OuterOptions(**{field: value})


def test_quorum_below_its_minimum() -> None:
    with pytest.raises(ValueError, match="quorum is 1: not below quorum_min=2"):
        OuterOptions(quorum=1, quorum_min=2)
    OuterOptions(quorum="all", quorum_min=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_fragments", 0),
        ("inner_steps", 0),
        ("adopt", "steal"),
        ("updates_in_flight_max", 0),
        ("discards_max", 0),
        ("offsets", (0, 1)),
        ("offsets", (15,)),
    ],
)
def test_learner_options_name_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"{field} is {value!r}: ")):
        LearnerOptions(**{field: value})


def test_fragments_need_a_step_each() -> None:
    with pytest.raises(ValueError, match="inner_steps is 3: at least one step for each of num_fragments=4"):
        LearnerOptions(num_fragments=4, inner_steps=3)


def test_a_machine_with_part_of_the_fragments_is_told_when_they_are_due() -> None:
    whole = LearnerOptions(num_fragments=4, inner_steps=8)
    part = LearnerOptions(num_fragments=2, inner_steps=8, offsets=whole.due_at[1::2])
    assert whole.due_at == (2, 4, 6, 0)
    assert part.due_at == (4, 0)
