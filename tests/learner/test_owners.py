"""Fragments are dealt evenly where ranks hold parts, and not at all where each has everything."""

from __future__ import annotations

import torch

from diloco.inner.parallel import SiteGroup
from diloco.learner.ranks import Dealt, all_mine, deal, owners_of
from diloco.outer.fragments import plan_layout
from tests.learner.held import held

LAYOUT = plan_layout([("a", (90,)), ("b", (50,)), ("c", (40,)), ("d", (30,)), ("e", (9,))], 5)


class Cut:
    """A model that is held in parts by ``world`` ranks."""

    def __init__(self, world: int, copied: bool = False) -> None:
        self.group, self._copied = SiteGroup(), copied
        self.group.world = world

    def is_copied(self, pieces: object) -> bool:
        return self._copied


def test_the_largest_first_each_to_who_has_least() -> None:
    found = owners_of(LAYOUT, Cut(2))  # type: ignore[arg-type]
    loads = [sum(part.numel for part in LAYOUT.fragments if found[part.index] == rank) for rank in (0, 1)]
    assert sorted(loads) == [99, 120]
    assert len(set(owners_of(LAYOUT, Cut(4)))) == 4  # type: ignore[arg-type]
    assert set(owners_of(LAYOUT, Cut(9))) == set(range(5)), "some own nothing"  # type: ignore[arg-type]


def test_where_all_have_everything_rank_0_owns_it_and_nobody_meets() -> None:
    assert owners_of(LAYOUT, Cut(4, copied=True)) == (0,) * 5  # type: ignore[arg-type]
    parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
    assert deal(LAYOUT, held(parameters)) == all_mine(LAYOUT) == Dealt((0,) * 5, {})


def test_a_rank_knows_its_own() -> None:
    assert Dealt((0, 2, 1, 2), {}).of(2) == [1, 3]
