"""The outer step is torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from diloco.outer.optimizer import OuterOptimizerOptions, outer_step


@pytest.mark.parametrize(
    ("kind", "lr", "momentum"),
    [("nesterov", 0.7, 0.9), ("nesterov", 0.4, 0.5), ("sgd", 1.0, 0.0), ("sgd", 0.7, 0.0), ("sgd", 0.3, 0.9)],
)
def test_bit_for_bit_as_torch(kind: str, lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(11)
    theta = torch.randn(10_007, generator=generator)
    parameter = torch.nn.Parameter(theta.clone())
    theirs = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=kind == "nesterov")
    options = OuterOptimizerOptions(kind=kind, lr=lr, momentum=momentum)
    ours: torch.Tensor | None = None
    for step in range(7):
        g = torch.randn(theta.shape, generator=generator) * 0.01
        parameter.grad = g.clone()
        theirs.step()
        theta, ours = outer_step(theta, g, ours, options)
        assert torch.equal(theta, parameter.detach()), f"seed 11, step {step}"
        if momentum:
            assert ours is not None
            assert torch.equal(ours, theirs.state[parameter]["momentum_buffer"]), f"seed 11, step {step}"
        else:
            assert ours is None


def test_the_first_momentum_is_the_gradient() -> None:
    g = torch.tensor([1.0, -2.0])
    theta, momentum = outer_step(torch.zeros(2), g, None, OuterOptimizerOptions(lr=0.5, momentum=0.5))
    assert momentum is not None
    assert momentum.tolist() == [1.0, -2.0]
    assert theta.tolist() == [-0.75, 1.5]  # gain lr (1 + mu)
    assert momentum.data_ptr() != g.data_ptr()


def test_constant_gradient_reaches_the_gain_of_torchs_form() -> None:
    options = OuterOptimizerOptions(lr=0.7, momentum=0.9)
    theta, g = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    momentum: torch.Tensor | None = None
    for _ in range(400):
        before = theta
        theta, momentum = outer_step(theta, g, momentum, options)
    assert (before - theta).item() == pytest.approx(0.7 / (1 - 0.9))


def test_pure() -> None:
    theta, g, momentum = torch.ones(5), torch.full((5,), 2.0), torch.full((5,), 3.0)
    outer_step(theta, g, momentum, OuterOptimizerOptions())
    assert (theta.sum(), g.sum(), momentum.sum()) == (5, 10, 15)


def test_the_number_of_threads_does_not_show() -> None:
    generator = torch.Generator().manual_seed(5)
    theta, g, momentum = (torch.randn(300_001, generator=generator) for _ in range(3))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(outer_step(theta, g, momentum, OuterOptimizerOptions()))
    finally:
        torch.set_num_threads(before)
    for new_theta, new_momentum in results[1:]:
        assert torch.equal(new_theta, results[0][0])
        assert new_momentum is not None
        assert results[0][1] is not None
        assert torch.equal(new_momentum, results[0][1])


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "adam"), ("lr", 0.0), ("lr", float("nan")), ("momentum", 1.0), ("momentum", -0.1), ("momentum", 0.0)],
)
def test_options_name_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        OuterOptimizerOptions(**{field: value})  # type: ignore[arg-type]
