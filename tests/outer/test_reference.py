"""The reference against DiLoCo written out with torch's own optimizer."""

from __future__ import annotations

import pytest
import torch

from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.reference import reference_diloco


def test_against_torchs_optimizer_on_the_mean() -> None:
    """Two equal-weight sites with linear moves; the mean of two is exact up to one rounding, as is torch's."""
    theta0 = torch.randn(101, generator=torch.Generator().manual_seed(0))
    goals = [torch.full((101,), 1.0), torch.full((101,), -3.0)]

    def site(goal: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda local, round_index: local + (goal - local) * 0.1 * (round_index + 1)

    versions = reference_diloco(theta0, [site(goal) for goal in goals], [2.0, 2.0], 4, OuterOptimizerOptions())
    assert len(versions) == 5
    assert versions[0] is theta0
    parameter = torch.nn.Parameter(theta0.clone())
    outer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_index in range(4):
        start = parameter.detach().clone()
        deltas = [start - site(goal)(start.clone(), round_index) for goal in goals]
        parameter.grad = torch.stack(deltas).mean(dim=0)
        outer.step()
        assert torch.allclose(versions[round_index + 1], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_site_keeps_its_inner_state_and_may_change_its_copy() -> None:
    calls: list[int] = []

    def site(local: torch.Tensor, round_index: int) -> torch.Tensor:
        calls.append(round_index)
        return local.sub_(float(len(calls)))  # in place, and another move in each round

    versions = reference_diloco(torch.zeros(2), [site], [1.0], 3, OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0))
    assert [v[0].item() for v in versions] == [0, -1, -3, -6]
    assert calls == [0, 1, 2]
    with pytest.raises(ValueError, match="zip"):
        reference_diloco(torch.zeros(1), [site], [1.0, 1.0], 1, OuterOptimizerOptions())
