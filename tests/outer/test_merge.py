"""The weighted mean; what DESIGN promises of it is in tests/numerics."""

from __future__ import annotations

import pytest
import torch

from diloco.outer.merge import merge_mean


def test_weighted_mean_of_exact_numbers() -> None:
    merged = merge_mean([(1.0, [torch.tensor([4.0, 0.0])]), (3.0, [torch.tensor([8.0, -4.0])])])
    assert merged.tolist() == [7.0, -3.0]


def test_close_to_the_mean_in_double() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        deltas = [torch.randn(1001, generator=generator) for _ in range(7)]
        weights = [float(w) for w in torch.rand(7, generator=generator) + 0.1]
        exact = sum(w * d.double() for w, d in zip(weights, deltas, strict=True)) / sum(weights)
        merged = merge_mean([(w, [d]) for w, d in zip(weights, deltas, strict=True)])
        assert torch.allclose(merged.double(), exact, rtol=0, atol=1e-6), f"seed {seed}"


def test_updates_of_one_site_are_added_in_sequence_order() -> None:
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    other = torch.tensor([0.0])
    # 2**24 + 1 rounds to 2**24, so the order of a site's three updates can be seen in the bits.
    for place in (0, 1):
        for updates, total in (([big, small, -big], 0.0), ([big, -big, small], 1.0)):
            contributions = [(1.0, [other])]
            contributions.insert(place, (1.0, updates))
            assert merge_mean(contributions).item() == total / 2, f"place {place}"


def test_the_updates_stay_as_they_are() -> None:
    deltas = [torch.randn(33, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    before = [d.clone() for d in deltas]
    out = torch.empty(33)
    merged = merge_mean([(1.0, deltas[:2]), (2.0, deltas[2:3]), (0.5, deltas[3:])], out=out)
    assert merged is out
    assert torch.equal(out, merge_mean([(1.0, deltas[:2]), (2.0, deltas[2:3]), (0.5, deltas[3:])]))
    assert all(torch.equal(d, b) for d, b in zip(deltas, before, strict=True))


@pytest.mark.parametrize("contributions", [[], [(0.0, [torch.ones(2)])], [(1.0, [])]])
def test_nothing_to_merge_is_an_error(contributions: list[tuple[float, list[torch.Tensor]]]) -> None:
    with pytest.raises(ValueError, match="no contribution has a positive weight"):
        merge_mean(contributions)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_an_error(weight: float) -> None:
    with pytest.raises(ValueError, match="weight is"):
        merge_mean([(1.0, [torch.ones(2)]), (weight, [torch.ones(2)])])
