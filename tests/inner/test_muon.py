from __future__ import annotations

import pytest
import torch

from diloco.inner.optimizer import Muon, orthogonalize, whole


@pytest.mark.parametrize("nesterov", [True, False])
def test_on_whole_matrices_it_is_torchs_muon(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 4), (4, 6), (5, 5))
    begun = [torch.randn(shape, generator=generator) for shape in shapes]
    steps = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    results = []
    for kind in (torch.optim.Muon, Muon):
        parameters = [torch.nn.Parameter(value.clone()) for value in [*begun, torch.zeros(2, 2)]]
        muon = kind(parameters, lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=nesterov)
        for gradients in steps:  # The last one never has a gradient.
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter.grad = gradient.clone()
            muon.step()  # type: ignore[no-untyped-call]
        results.append((parameters, muon.state_dict()["state"]))
    (ours, our_state), (theirs, their_state) = results[1], results[0]
    for here, there in zip(ours, theirs, strict=True):
        assert torch.allclose(here, there, rtol=1e-6, atol=1e-7)
    assert our_state.keys() == their_state.keys() == {0, 1, 2}
    for index in our_state:
        assert our_state[index].keys() == {"momentum_buffer"}
        assert torch.equal(our_state[index]["momentum_buffer"], their_state[index]["momentum_buffer"])


@pytest.mark.parametrize("rule", [None, "match_rms_adamw"])
def test_the_learning_rate_of_a_shape_is_torchs(rule: str | None) -> None:
    moved = []
    for kind in (torch.optim.Muon, Muon):
        parameter = torch.nn.Parameter(torch.zeros(6, 2))
        parameter.grad = torch.arange(12.0).view(6, 2)
        kind([parameter], lr=0.1, adjust_lr_fn=rule).step()  # type: ignore[no-untyped-call]
        moved.append(parameter.detach())
    assert torch.allclose(*moved, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2**-20), (torch.bfloat16, 2**-4)])
@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48)])
def test_newton_schulz_in_a_format_is_that_of_fp64_to_its_rounding(
    dtype: torch.dtype, error: float, shape: tuple[int, int]
) -> None:
    """Each of five steps rounds a few times and enlarges what was rounded before by its slope at 0, 3.4."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    wanted, found = (orthogonalize(matrix, each, (3.4445, -4.7750, 2.0315), 5, 1e-7) for each in (torch.float64, dtype))
    assert found.dtype == dtype
    assert float((found.double() - wanted).abs().max()) <= error
    values = torch.linalg.svdvals(wanted)
    assert 0.5 < float(values.median()) <= float(values.max()) < 1.5


def test_a_plain_tensor_is_whole() -> None:
    value = torch.ones(2, 3)
    assert whole(value) is value
