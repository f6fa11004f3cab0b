from __future__ import annotations

import math

import pytest
import torch

from diloco.inner.optimizer import (
    InnerOptimizers,
    InnerOptions,
    Muon,
    build_optimizers,
    lr_factor,
    orthogonalize,
)
from diloco.inner.parallel import SiteGroup
from tests.inner.conftest import tiny


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_hidden_matrices_and_adamw_all_else(tied: bool) -> None:
    model = tiny(tied=tied)
    optimizers = build_optimizers(model, InnerOptions(optimizer="muon"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    parts: dict[str, set[str]] = {"muon": set(), "adamw": set()}
    for path in optimizers.state_dict():
        part, name, _ = path.split("/")
        parts[part].add(name)
    hidden = {name for name, parameter in model.named_parameters() if name.startswith("blocks") and parameter.ndim == 2}
    assert parts == {"muon": hidden, "adamw": {name for name, _ in model.named_parameters()} - hidden}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny()
    groups = build_optimizers(model, InnerOptions(weight_decay=0.1))._groups
    decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    assert decays == {name: 0.1 * (each.ndim == 2) for name, each in model.named_parameters()}


def test_state_of_another_model_is_refused_by_name() -> None:
    optimizers = build_optimizers(tiny(), InnerOptions())
    for name in ("adamw/nowhere/exp_avg", "muon/norm.weight/momentum"):
        with pytest.raises(ValueError, match=name):
            optimizers.load_state_dict({name: torch.zeros(1)})


def test_the_rate_that_is_told_is_muons() -> None:
    optimizers = build_optimizers(tiny(), InnerOptions(optimizer="muon", muon_lr=0.02))
    assert optimizers.set_lr_factor(0.5) == pytest.approx(0.01)
    assert [group["lr"] for group in optimizers._groups] == pytest.approx([0.01, 0.0015, 0.0015])


def test_schedules_warm_up_by_own_steps_and_anneal_by_progress() -> None:
    wsd = InnerOptions(schedule="wsd", warmup_steps=4, decay_share=0.4, lr_floor=0.1)
    assert [lr_factor(wsd, 0.0, step) for step in (0, 1, 3, 9)] == pytest.approx([0.25, 0.5, 1.0, 1.0])
    shape = [lr_factor(wsd, progress, 99) for progress in (0.6, 0.8, 1.0, 1.7, -1.0)]
    assert shape == pytest.approx([1.0, 0.55, 0.1, 0.1, 1.0])
    cosine = InnerOptions(schedule="cosine", warmup_steps=0, lr_floor=0.1)
    assert [lr_factor(cosine, progress, 0) for progress in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.55, 0.1])
    constant = InnerOptions(schedule="constant", warmup_steps=0)
    assert lr_factor(constant, 1.0, 0) == 1.0
    with pytest.raises(ValueError, match="progress is nan"):
        lr_factor(constant, math.nan, 0)


@pytest.mark.parametrize("group", [None, SiteGroup(device="cpu")])
def test_gradients_are_clipped_as_torch_does_and_one_that_is_not_finite_is_told(group: SiteGroup | None) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)

    def clipped(bound: float) -> float:
        sgd = torch.optim.SGD(parameters)
        return float(InnerOptimizers({"sgd": sgd}, InnerOptions(clip=bound)).clip(group))

    assert clipped(0.0) == pytest.approx(4.0)
    assert parameters[0].grad.tolist() == [2.0] * 3
    assert clipped(1.0) == pytest.approx(4.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.5] * 3)
    assert parameters[1].grad.flatten().tolist() == pytest.approx([0.25] * 4)
    parameters[0].grad[1] = torch.nan
    assert math.isnan(clipped(1.0))


@pytest.mark.parametrize("nesterov", [True, False])
def test_on_whole_matrices_it_is_torchs_muon(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 2), (4, 6), (5, 5))
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
