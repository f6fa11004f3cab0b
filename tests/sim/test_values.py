from __future__ import annotations

import pytest

from diloco.sim import world
from diloco.sim.world import OuterRule


def test_one_site_and_equal_sites_give_their_own_value_whatever_the_weights() -> None:
    update = (-987, -30, 0)
    assert world.merged([(1.0, [update])]) == update
    assert world.merged([(0.1, [update]), (0.7, [update]), (0.2, [update])]) == update
    assert world.merged([(1.0, [(1, 2, 0), (3, 4, 0)])]) == (4, 6, 0)


def test_mean_is_weighted() -> None:
    assert world.merged([(0.25, [(0, 0, 0)]), (0.75, [(400, 8, 0)])]) == (300, 6, 0)


@pytest.mark.parametrize("number", [0, 7, -7, 32, -32, 1000, -1000])
def test_quantised_is_near_and_keeps_tokens(number: int) -> None:
    rounded = world.quantised((number, 5, 0), 64)
    assert rounded[0] % 64 == 0
    assert abs(rounded[0] - number) <= 32
    assert rounded[1:] == (5, 0)
    assert world.quantised((number, 5, 0), 1) == (number, 5, 0)


def test_plain_outer_step_takes_the_gradient_off_and_nothing_is_rounded() -> None:
    assert world.outer_step((10, 0, 0), (5, 5, 0), (3, -2, 0), OuterRule()) == ((7, 2, 0), (3, -2, 0))


def test_momentum_and_rate_work_in_tenths() -> None:
    assert world.outer_step((0, 0, 0), (100, 0, 0), (10, 0, 0), OuterRule(5, 9)) == ((-50, 0, 0), (100, 0, 0))


def test_blend() -> None:
    assert world.blended((100, 10, 0), (0, 0, 0), 3) == (30, 3, 0)
