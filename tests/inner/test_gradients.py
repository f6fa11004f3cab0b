from __future__ import annotations

import math

import pytest
import torch

from diloco.inner.optimizer import InnerOptimizers, InnerOptions
from diloco.inner.parallel import SiteGroup


def optimizers_of(parameters: list[torch.nn.Parameter], bound: float) -> InnerOptimizers:
    sgd = torch.optim.SGD(parameters)
    return InnerOptimizers({"sgd": (sgd, [str(index) for index in range(len(parameters))])}, InnerOptions(clip=bound))


@pytest.mark.parametrize("group", [None, SiteGroup(device="cpu")])
def test_plain_gradients_are_clipped_as_torch_does(group: SiteGroup | None) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
    assert optimizers_of(parameters, 0.0).clip(group) == pytest.approx(4.0)
    assert parameters[0].grad.tolist() == [2.0] * 3
    assert optimizers_of(parameters, 1.0).clip(group) == pytest.approx(4.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.5] * 3)
    assert parameters[1].grad.flatten().tolist() == pytest.approx([0.25] * 4)


def test_a_gradient_that_is_not_finite_is_told() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, torch.nan, 0.0])
    assert math.isnan(optimizers_of([parameter], 1.0).clip())
