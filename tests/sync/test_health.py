"""What looks like no other update, and what only looks unusual."""

from __future__ import annotations

import pytest

from diloco.sync.admission import judge
from diloco.sync.options import HealthOptions
from diloco.sync.state import Vital

OPTIONS = HealthOptions()


def window(norm: float = 1.0, cosine: float | None = 0.5, steps: int = 10, count: int = 16) -> list[Vital]:
    """Updates that are alike, but for a tenth."""
    cosines = [None if cosine is None else cosine + 0.1 * (index % 3 - 1) for index in range(count)]
    return [Vital(steps, norm * (1 + 0.1 * (index % 3)), each) for index, each in enumerate(cosines)]


@pytest.mark.parametrize(
    ("norm", "steps", "flagged"),
    [
        (1.0, 10, False),
        (9.0, 10, False),
        (20.0, 10, True),
        (1e6, 10, True),
        (1e-9, 10, False),  # A small update does no harm.
        (20.0, 100, False),  # Ten times the steps may go ten times as far,
        (200.0, 100, True),  # and no further;
        (20.0, 1, True),  # fewer steps are no reason to expect less, or a last short update would be one.
        (9.0, 1, False),
    ],
)
def test_a_norm_is_held_against_the_usual_and_its_steps(norm: float, steps: int, flagged: bool) -> None:
    found = judge(OPTIONS, Vital(steps, norm, None), window(), window())
    assert bool(found.why) == flagged, found


@pytest.mark.parametrize(("cosine", "flagged"), [(0.5, False), (0.1, False), (-0.05, True), (-0.5, True)])
def test_a_direction_is_wrong_only_when_it_is_both_unusual_and_backwards(cosine: float, flagged: bool) -> None:
    assert bool(judge(OPTIONS, Vital(10, 1.0, cosine), window(), window()).why) == flagged
    around_nothing = window(cosine=0.0)
    assert not judge(OPTIONS, Vital(10, 1.0, -0.2), around_nothing, around_nothing).why, "here it says little"


def test_what_is_usual_for_the_site_or_for_the_others_is_no_outlier() -> None:
    large = Vital(10, 100.0, 0.5)
    assert judge(OPTIONS, large, window(), window()).why
    assert not judge(OPTIONS, large, window(norm=100.0), window()).why
    assert not judge(OPTIONS, large, window(), window(norm=100.0)).why
    assert judge(OPTIONS, large, [], window()).why, "a new site is held against the others"
    assert judge(OPTIONS, large, window(), []).why, "a lone site against itself"


def test_nobody_is_judged_before_there_is_a_history() -> None:
    short = window(count=OPTIONS.history_min - 1)
    found = judge(OPTIONS, Vital(10, 1e20, -1.0), short, short)
    assert (found.ratio, found.z, found.why) == (None, None, "")
    for too_few in (window(cosine=None), window(count=OPTIONS.history - 1)):
        assert judge(OPTIONS, Vital(10, 1.0, -1.0), too_few, window()).z is None


def test_one_bad_update_in_the_window_moves_what_is_usual_but_little() -> None:
    poisoned = [*window(count=7), Vital(10, 1e6, -1.0)]
    found = judge(OPTIONS, Vital(10, 1e6, None), poisoned, poisoned)
    assert found.ratio is not None
    assert found.ratio > 1e5
