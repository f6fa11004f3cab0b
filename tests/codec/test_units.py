"""Magnitudes as whole numbers, and the scales made of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from diloco.codec.base import (
    DecodeError,
    NonFiniteError,
    check_scales,
    is_negative,
    magnitudes,
    mean_scale,
    scale_values,
    units,
)
from tests.codec.slow import slow_scale, slow_units
from tests.codec.test_contract import samples


@pytest.mark.parametrize("kind", sorted(samples(0)))
def test_against_exact_arithmetic(kind: str) -> None:
    rows = samples(0)[kind][: 24 * 17].view(24, 17)
    found, top = units(magnitudes(rows, "x"))
    scales = mean_scale(found.sum(dim=1, dtype=torch.int64) * 5, torch.full((24,), 17 * 8), top)
    for row, mine, scale in zip(rows.tolist(), found.tolist(), scales.tolist(), strict=True):
        expected, unit = slow_units(row)
        assert mine == expected
        assert scale == slow_scale(Fraction(5 * sum(expected), 8 * 17), unit)[0]
    assert bool((scale_values(scales) <= rows.abs().amax(dim=1).clamp(min=2.0**-126)).all())


def test_a_mean_is_nothing_only_where_all_are() -> None:
    rows = torch.tensor([[1.0] + [0.0] * 4095, [2.0**-126] + [0.0] * 4095, [2.0**-127] * 4096, [-0.0] * 4096])
    found, top = units(magnitudes(rows, "x"))
    scales = scale_values(mean_scale(found.sum(dim=1, dtype=torch.int64), torch.full((4,), 4096), top))
    assert scales.tolist() == [2.0**-12, 2.0**-126, 0.0, 0.0]


def test_minus_zero_is_not_negative_and_a_subnormal_is() -> None:
    assert is_negative(torch.tensor([-0.0, 0.0, -(2.0**-149), 2.0**-149, -1.0])).tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_has_no_magnitude(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="x was to encode a NaN or an infinity"):
        magnitudes(torch.tensor([0.0, bad]), "x")


@pytest.mark.parametrize("bits", [1, 0x7F, 0x7F80, 0x7FC0, -1, -0x8000])
def test_a_scale_that_is_never_made_is_refused(bits: int) -> None:
    with pytest.raises(DecodeError, match="scale"):
        check_scales(torch.tensor([0x3F80, bits]), "x")
    check_scales(torch.tensor([0, 0x80, 0x7F7F]), "x")
