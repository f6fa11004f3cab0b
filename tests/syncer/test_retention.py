"""What stays of the past: enough to replay what was promised, not much more, never beyond the bound."""

from __future__ import annotations

import random

import pytest

from diloco.syncer.snapshots import Choice, Point, Retention, choose


def point(number: int, steps: int, size: int = 10) -> Point:
    return Point(number, steps, number, size)


def nothing(segments: range) -> int:
    return 0


def numbers(choice: Choice) -> list[int]:
    return [each.number for each in choice.kept]


def test_without_retention_the_newest_two_stay() -> None:
    points = [point(number, 16 * number) for number in range(1, 8)]
    for count in range(1, 8):
        choice = choose(points[:count], Retention(), nothing)
        assert numbers(choice) == [each.number for each in points[:count][-2:]]
        assert not choice.cut


@pytest.mark.parametrize("every", [1, 3, 16, 100, 300])
@pytest.mark.parametrize("steps", [1, 64, 256])
def test_any_step_within_retention_can_be_replayed_at_any_time_and_few_snapshots_do_for_that(
    every: int, steps: int
) -> None:
    kept: tuple[Point, ...] = ()
    now = 0
    dice = random.Random(every)
    for number in range(1, 200):
        now += every + dice.randrange(2)
        choice = choose([*kept, point(number, now)], Retention(steps, 1 << 40), nothing)
        kept = choice.kept
        assert not choice.cut
        assert kept[-1].number == number
        assert kept[0].number == 1 or now - kept[0].steps >= steps
        assert len(kept) <= 7, kept
        assert kept[0].number == 1 or now - kept[0].steps <= 2 * steps + 4 * (every + 1), "not much more than promised"


def test_the_oldest_goes_first_where_the_bound_is_reached_and_that_is_said() -> None:
    points = [point(number, 100 * number) for number in range(1, 8)]
    behind = {1: 400, 2: 300, 3: 200, 4: 100, 5: 50}
    seen = []
    for bound in (10_000, 400, 200, 70, 0):
        choice = choose(points, Retention(600, bound), lambda segments: behind[segments.start])
        assert choice.kept[-2:] == tuple(points[-2:])
        past = choice.kept[:-2]
        assert not past or sum(each.size for each in past) + behind[past[0].number] <= bound
        seen.append((len(choice.kept), choice.cut))
    assert seen[0] == (4, False), "every 300 steps one, from 600 steps back"
    assert seen[-1] == (2, True)
    assert [count for count, _ in seen] == sorted((count for count, _ in seen), reverse=True)


def test_the_newest_two_stay_whatever_they_take() -> None:
    points = [point(1, 10, 1 << 40), point(2, 20, 1 << 40)]
    assert numbers(choose(points, Retention(5, 1), nothing)) == [1, 2]
