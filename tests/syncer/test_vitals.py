"""What is measured of an update."""

from __future__ import annotations

import math

import pytest
import torch

from diloco.codec.merging import sums_of
from diloco.syncer.api import LARGEST, Measuring, Vitals


def measured(values: torch.Tensor, momentum: torch.Tensor | None, block: int = 8) -> Vitals:
    measuring = Measuring()
    for start in range(0, values.numel(), block):
        against = momentum[start : start + block] if momentum is not None else None
        measuring.add(sums_of(values[start : start + block], against))
    return measuring.vitals()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_a_norm_and_a_cosine_are_the_same_whatever_the_blocks(count: int) -> None:
    dice = torch.Generator().manual_seed(count)
    values, momentum = torch.randn(count, generator=dice), torch.randn(count, generator=dice)
    found = measured(values, momentum)
    assert found.finite
    assert found.norm == pytest.approx(float(torch.linalg.vector_norm(values)), rel=1e-6)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(values, momentum, dim=0)), abs=1e-6)


def test_the_largest_values_have_a_norm() -> None:
    found = measured(torch.full((1000,), LARGEST), torch.full((1000,), -LARGEST))
    assert found.norm == pytest.approx(LARGEST * math.sqrt(1000))
    assert found.cosine == pytest.approx(-1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LARGEST * 1.01, -LARGEST * 1.01])
@pytest.mark.parametrize("place", [0, 11, 19])
def test_of_what_is_not_finite_nothing_else_is_said(bad: float, place: int) -> None:
    values = torch.ones(20)
    values[place] = bad
    found = measured(values, torch.ones(20))
    assert (found.finite, found.norm, found.cosine) == (False, 0.0, None)


def test_nothing_has_no_direction() -> None:
    assert measured(torch.zeros(5), torch.ones(5)) == Vitals(True, 0.0, None)
    assert measured(torch.ones(5), torch.zeros(5)).cosine is None
    assert measured(torch.ones(5), None).cosine is None


def test_blocks_that_came_before_there_was_a_momentum_have_no_part_in_the_cosine() -> None:
    measuring = Measuring()
    measuring.add(sums_of(torch.tensor([0.0, 0.0, 3.0]), None))
    measuring.add(sums_of(torch.tensor([4.0]), torch.tensor([0.5])))
    found = measuring.vitals()
    assert found.norm == 5.0
    assert found.cosine == pytest.approx(0.8)
