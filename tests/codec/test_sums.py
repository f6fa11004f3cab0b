"""Sums of products: the order that the module writes down, value by value, and what does not show."""

from __future__ import annotations

import math

import pytest
import torch

from diloco.codec.kernel_library import LANES, SUM_BLOCK
from diloco.codec.merging import Sums, sum_of_products, sum_plain, sums_of


def slow_sum(a: torch.Tensor, b: torch.Tensor) -> float:
    """The module's docstring in Python's floats, which are fp64."""
    products = [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    total = 0.0
    for start in range(0, len(products), SUM_BLOCK):
        block = products[start : start + SUM_BLOCK]
        block += [0.0] * (SUM_BLOCK - len(block))
        lanes = [0.0] * LANES
        for index, product in enumerate(block):
            lanes[index % LANES] += product
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
        total += lanes[0]
    return total


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 262_144 + 1500])
def test_against_the_order_written_slowly(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    a, b = (
        torch.randn(numel, generator=generator) * torch.exp2(torch.randint(-60, 60, (numel,), generator=generator))
        for _ in range(2)
    )
    for x, y in ((a, a), (a, b)):
        found = sum_plain(x, y)
        assert found.hex() == slow_sum(x, y).hex(), f"seed {numel}"
        assert sum_of_products(x, y).hex() == found.hex(), f"seed {numel}"
        exact = math.fsum(p * q for p, q in zip(x.tolist(), y.tolist(), strict=True))
        scale = math.fsum(abs(p * q) for p, q in zip(x.tolist(), y.tolist(), strict=True))
        assert abs(found - exact) <= 1e-12 * scale


def test_squares_beyond_fp32_have_a_sum() -> None:
    values = torch.full((3000,), 3e38)
    assert sum_of_products(values, values) == pytest.approx(3000 * 9e76)


def test_nothing_is_plus_zero() -> None:
    assert math.copysign(1.0, sum_of_products(torch.full((3,), -0.0), torch.ones(3))) == 1.0


def test_what_is_not_finite_has_no_sums() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        assert sums_of(torch.tensor([1.0, bad]), None) == Sums(largest=math.inf)
