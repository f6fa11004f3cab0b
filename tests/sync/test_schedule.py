"""When a fragment is due."""

from __future__ import annotations

import pytest

from diloco.sync.schedule import is_due, offset


@pytest.mark.parametrize(("fragments", "steps"), [(1, 1), (1, 15), (3, 3), (3, 15), (4, 15), (24, 24), (5, 7)])
def test_every_fragment_is_due_once_in_a_period(fragments: int, steps: int) -> None:
    for fragment in range(fragments):
        due = [step for step in range(1, 2 * steps + 1) if is_due(step, offset(fragment, fragments, steps), steps)]
        assert len(due) == 2
        assert due[1] - due[0] == steps


@pytest.mark.parametrize(("fragments", "steps"), [(3, 15), (4, 15), (24, 24), (5, 7)])
def test_no_two_fragments_are_due_at_once_and_the_load_is_flat(fragments: int, steps: int) -> None:
    offsets = sorted(offset(fragment, fragments, steps) for fragment in range(fragments))
    assert len(set(offsets)) == fragments
    gaps = [b - a for a, b in zip(offsets, [*offsets[1:], offsets[0] + steps], strict=True)]
    assert max(gaps) - min(gaps) <= 1, gaps


def test_one_fragment_is_due_after_every_period() -> None:
    assert [step for step in range(40) if is_due(step, offset(0, 1, 15), 15)] == [15, 30]


def test_nothing_is_due_before_the_first_step() -> None:
    assert not is_due(0, 0, 15)
