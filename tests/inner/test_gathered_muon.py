from __future__ import annotations

import pytest
import torch

from diloco.inner.gathered_muon import GatheredMuon, whole


@pytest.mark.parametrize("nesterov", [True, False])
def test_on_whole_matrices_it_is_torchs_muon(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 4), (4, 6), (5, 5))
    begun = [torch.randn(shape, generator=generator) for shape in shapes]
    steps = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    results = []
    for kind in (torch.optim.Muon, GatheredMuon):
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


def test_a_plain_tensor_is_whole() -> None:
    value = torch.ones(2, 3)
    assert whole(value) is value
