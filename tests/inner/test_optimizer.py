from __future__ import annotations

import math

import pytest
import torch

from diloco.inner.model import ModelOptions, Transformer, next_token_loss
from diloco.inner.optimizer import InnerOptimizers, InnerOptions, build_optimizers, lr_factor


def tiny(tied: bool = False) -> Transformer:
    return Transformer(ModelOptions(vocab_size=40, layers=1, dim=16, heads=2, context=8, tied=tied), 1)


def take_steps(model: Transformer, optimizers: InnerOptimizers, num_steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        tokens = torch.randint(0, 40, (2, 8), generator=generator)
        next_token_loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        optimizers.clip()
        optimizers.step()
        optimizers.zero_grad()


def names_of(optimizers: InnerOptimizers) -> dict[str, set[str]]:
    tensors, _ = optimizers.state_dict()
    parts: dict[str, set[str]] = {}
    for path in tensors:
        part, rest = path.split("/", 1)
        parts.setdefault(part, set()).add(rest.rpartition("/")[0])
    return parts


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_hidden_matrices_and_adamw_all_else(tied: bool) -> None:
    model = tiny(tied)
    optimizers = build_optimizers(model, InnerOptions(optimizer="muon"))
    take_steps(model, optimizers, 1, 0)
    parts = names_of(optimizers)
    hidden = {name for name, parameter in model.named_parameters() if name.startswith("blocks") and parameter.ndim == 2}
    assert parts["muon"] == hidden
    assert parts["adamw"] == {name for name, _ in model.named_parameters()} - hidden


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_state_told_and_taken_over_continues_bit_for_bit(kind: str) -> None:
    options = InnerOptions(optimizer=kind)
    model, twin = tiny(), tiny()
    optimizers, twins = build_optimizers(model, options), build_optimizers(twin, options)
    take_steps(model, optimizers, 3, seed=1)
    twin.load_state_dict(model.state_dict())
    tensors, values = optimizers.state_dict()
    twins.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, dict(values))
    take_steps(model, optimizers, 2, seed=2)
    take_steps(twin, twins, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_state_of_another_model_is_refused_by_name() -> None:
    optimizers = build_optimizers(tiny(), InnerOptions())
    with pytest.raises(ValueError, match=r"adamw/nowhere/exp_avg"):
        optimizers.load_state_dict({"adamw/nowhere/exp_avg": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"muon/norm\.weight/momentum"):
        optimizers.load_state_dict({"muon/norm.weight/momentum": torch.zeros(1)}, {})


def test_writing_parameters_in_place_between_steps_is_seen_by_the_optimizer() -> None:
    model = tiny()
    optimizers = build_optimizers(model, InnerOptions(optimizer="sgd", lr=0.5, clip=0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
            parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    assert all(bool((parameter == -0.25).all()) for parameter in model.parameters())


def test_clip_returns_the_norm_before_and_bounds_it() -> None:
    model = tiny()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    wanted = math.sqrt(sum(parameter.numel() for parameter in model.parameters()))
    optimizers = build_optimizers(model, InnerOptions(clip=1.0))
    assert float(optimizers.clip()) == pytest.approx(wanted, rel=1e-5)
    assert float(optimizers.clip()) == pytest.approx(1.0, rel=1e-3)


def test_no_clip_leaves_the_gradient_alone() -> None:
    model = tiny()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    build_optimizers(model, InnerOptions(clip=0.0)).clip()
    grad = model.head.weight.grad
    assert grad is not None
    assert torch.equal(grad, torch.ones_like(grad))


def test_lr_factor_scales_every_group_from_its_peak() -> None:
    optimizers = build_optimizers(tiny(), InnerOptions(optimizer="muon", muon_lr=0.02))
    optimizers.set_lr_factor(0.5)
    assert optimizers.lr == pytest.approx(0.01)
    optimizers.set_lr_factor(1.0)
    assert optimizers.lr == pytest.approx(0.02)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "adam"),
        ("schedule", "linear"),
        ("lr", 0.0),
        ("muon_lr", -1.0),
        ("muon_momentum", 1.0),
        ("betas", [0.9]),
        ("betas", [0.9, 1.0]),
        ("weight_decay", -0.1),
        ("clip", math.inf),
        ("batch_sequences", 0),
        ("accumulation", 0),
        ("warmup_steps", -1),
        ("decay_share", 0.0),
        ("lr_floor", 1.5),
    ],
)
def test_a_wrong_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is "):
        InnerOptions(**{field: value})  # type: ignore[arg-type]
