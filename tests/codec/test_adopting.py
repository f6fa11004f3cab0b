"""Rebase in one pass: the bits of the definition, wherever the result is written."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.adopting import rebase_into
from diloco.outer.adopt import rebase
from tests.codec.test_ranged import same


@pytest.mark.parametrize("numel", [0, 1, 17, 4096, 4097, 10_000])
@pytest.mark.parametrize("num_merged", [0, 1, 3])
def test_against_the_definition(numel: int, num_merged: int) -> None:
    generator = torch.Generator().manual_seed(numel + num_merged)
    local, old, new, *merged = (torch.randn(numel, generator=generator) for _ in range(3 + num_merged))
    expected = rebase(local, old, new, merged)
    out = torch.full((numel,), 7.0)
    rebase_into(local, old, new, merged, out)
    assert same(out, expected)
    for place in range(3 + num_merged):
        held = [each.clone() for each in (local, old, new, *merged)]
        rebase_into(held[0], held[1], held[2], held[3:], held[place])
        assert same(held[place], expected), f"written to {place}"


def test_nothing_trained_is_the_new_base_with_its_zeros() -> None:
    old, new = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([-0.0, 0.0, -0.0])
    rebase_into(old, old, new, [], out := torch.empty(3))
    assert same(out, new)
