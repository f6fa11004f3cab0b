"""The outer steps are those of their papers, and where torch has one, torch's bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from diloco.outer.optimizer import (
    NOTHING,
    OUTER_KINDS,
    TENSORS_KEPT,
    OuterOptimizerOptions,
    OuterState,
    outer_step,
)

EVERY = {
    "sgd": OuterOptimizerOptions(kind="sgd", lr=0.7, momentum=0.0),
    "heavy_ball": OuterOptimizerOptions(kind="heavy_ball", lr=0.3, momentum=0.9),
    "nesterov": OuterOptimizerOptions(),
    "nesterov_ema": OuterOptimizerOptions(kind="nesterov_ema", lr=0.7, momentum=0.6),
    "delayed_nesterov": OuterOptimizerOptions(kind="delayed_nesterov", window=3, share_ahead=0.2),
    "adamw": OuterOptimizerOptions(kind="adamw", lr=0.3, weight_decay=0.1),
    "schedule_free": OuterOptimizerOptions(kind="schedule_free", lr=1.0, weight_decay=0.01),
    "gpa": OuterOptimizerOptions(kind="gpa", lr=1.0, momentum=0.8, momentum_ahead=0.7),
}


def drawn(shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def steps(
    theta: Tensor, gradients: list[Tensor], options: OuterOptimizerOptions, state: OuterState = NOTHING
) -> tuple[Tensor, OuterState]:
    for g in gradients:
        theta, state = outer_step(theta, g, state, options)
    return theta, state


def torchs(options: OuterOptimizerOptions, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    if options.kind == "adamw":
        betas = (options.momentum, options.momentum_squares)
        return torch.optim.AdamW(
            [parameter], options.lr, betas, options.epsilon, options.weight_decay, foreach=False, fused=False
        )
    nesterov = options.kind == "nesterov"
    return torch.optim.SGD([parameter], options.lr, options.momentum, nesterov=nesterov, foreach=False, fused=False)


@pytest.mark.parametrize(
    "options",
    [
        EVERY["nesterov"],
        EVERY["sgd"],
        EVERY["heavy_ball"],
        EVERY["adamw"],
        OuterOptimizerOptions(kind="adamw", lr=0.1, momentum=0.0, momentum_squares=0.999),
    ],
    ids=str,
)
def test_bit_for_bit_as_torch(options: OuterOptimizerOptions) -> None:
    theta, state = drawn(10_007, 11), NOTHING
    parameter = torch.nn.Parameter(theta.clone())
    theirs = torchs(options, parameter)
    names = (
        {"momentum": "exp_avg", "squares": "exp_avg_sq"} if options.kind == "adamw" else {"momentum": "momentum_buffer"}
    )
    for step in range(7):
        g = drawn(10_007, 100 + step) * 0.01
        parameter.grad = g.clone()
        theirs.step()
        theta, state = outer_step(theta, g, state, options)
        assert torch.equal(theta, parameter.detach()), f"step {step}"
        assert state.steps == step + 1
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor, theirs.state[parameter][names[name]]), f"step {step}, {name}"


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_4_delayed_nesterov_with_window_1_is_nesterov_bit_for_bit(ahead: float) -> None:
    gradients = [drawn(1003, seed) for seed in range(6)]
    delayed = OuterOptimizerOptions(kind="delayed_nesterov", window=1, share_ahead=ahead)
    mine, state = steps(drawn(1003, 9), gradients, delayed)
    theirs, wanted = steps(drawn(1003, 9), gradients, OuterOptimizerOptions())
    assert torch.equal(mine, theirs)
    assert torch.equal(state.tensors["momentum"], wanted.tensors["momentum"])


def test_4_a_full_window_is_one_nesterov_step_on_the_mean() -> None:
    window = 3
    delayed = OuterOptimizerOptions(kind="delayed_nesterov", lr=0.7, momentum=0.9, window=window)
    mine = theirs = drawn(501, 1, torch.float64)
    state = wanted = NOTHING
    for turn in range(5):
        gradients = [drawn(501, 10 * turn + each, torch.float64) for each in range(window)]
        mine, state = steps(mine, gradients, delayed, state)
        theirs, wanted = outer_step(theirs, torch.stack(gradients).mean(0), wanted, OuterOptimizerOptions())
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12), turn
        assert torch.allclose(state.tensors["momentum"], wanted.tensors["momentum"], rtol=0, atol=1e-12), turn
        assert not state.tensors["window"].any(), turn


WHOLE = {
    "sgd": ({"momentum": 0.0}, [-1.0, -2.5, -1.5]),
    "heavy_ball": ({"momentum": 0.5}, [-1.0, -3.0, -3.0]),
    "nesterov": ({"momentum": 0.5}, [-1.5, -4.0, -3.0]),
    "nesterov_ema": ({"momentum": 0.5}, [-1.25, -3.25, -2.25]),
    "delayed_nesterov": ({"momentum": 0.5, "window": 2, "share_ahead": 0.25}, [-0.5, -1.71875, -1.375]),
    "schedule_free": ({"momentum": 0.5}, [-1.0, -2.125]),
    "gpa": ({"momentum": 0.5, "momentum_ahead": 0.5}, [-0.75, -2.0, -1.5]),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_19_a_full_round_gives_the_bits_that_it_always_gave(kind: str) -> None:
    """Pseudo-gradients 2, 3, -2 at lr 1/2: made before there were shares, and exact on any processor.

    (The third step of schedule_free divides by 3.)
    """
    told, wanted = WHOLE[kind]
    options = OuterOptimizerOptions(kind=kind, lr=0.5, **told)  # type: ignore[arg-type]
    theta, state, seen = torch.zeros(1), NOTHING, []
    for g, _ in zip((2.0, 3.0, -2.0), wanted, strict=False):
        theta, state = outer_step(theta, torch.tensor([g]), state, options, share=1.0)
        seen.append(theta.item())
    assert seen == wanted


PARTS = [[0.25, 0.75], [0.1] * 10, [0.999, 0.001]]
SHARED = [kind for kind in OUTER_KINDS if kind != "delayed_nesterov"]


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("kind", SHARED)
def test_19_the_parts_of_a_round_are_the_round(kind: str, parts: list[float]) -> None:
    """Whatever came before; but adamw's step is no linear one, and is cut exactly where g has always been the same."""
    told = {name: getattr(EVERY[kind], name) for name in ("lr", "momentum", "momentum_ahead")}
    options = OuterOptimizerOptions(kind=kind, **told)
    g = drawn(97, 60, torch.float64)
    before = [g, g] if kind == "adamw" else [drawn(97, 50 + each, torch.float64) for each in range(3)]
    theta, state = steps(drawn(97, 1, torch.float64), before, options)
    mine, mine_state = theta, state
    for _ in range(2):
        theta, state = outer_step(theta, g, state, options)
        for part in parts:
            mine, mine_state = outer_step(mine, g, mine_state, options, part)
    torch.testing.assert_close(mine, theta, rtol=0, atol=1e-12)
    assert mine_state.steps == pytest.approx(state.steps, abs=1e-12)
    for name, tensor in state.tensors.items():
        torch.testing.assert_close(mine_state.tensors[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "schedule_free", "gpa"])
def test_19_parts_decay_as_the_round_does(kind: str) -> None:
    theta, state = torch.ones(1, dtype=torch.float64), NOTHING
    options = OuterOptimizerOptions(kind=kind, lr=0.5, momentum=0.5, weight_decay=0.2)
    for _ in range(8):
        theta, state = outer_step(theta, torch.zeros_like(theta), state, options, 0.25)
    fast = state.tensors.get("fast", theta)
    assert fast.item() == pytest.approx((1 - 0.5 * 0.2) ** 2)


@pytest.mark.parametrize("kind", OUTER_KINDS)
def test_pure_and_of_the_tensors_that_are_said(kind: str) -> None:
    theta, state = drawn(67, 0), NOTHING
    for step in range(5):
        g = drawn(67, step + 1)
        before = [each.clone() for each in (theta, g, *state.tensors.values())]
        following, after = outer_step(theta, g, state, EVERY[kind])
        for held, old in zip((theta, g, *state.tensors.values()), before, strict=True):
            assert torch.equal(held, old), "an input was written to"
        made = [following, *after.tensors.values()]
        assert len({each.data_ptr() for each in (*made, theta, g)}) == len(made) + 2
        assert tuple(after.tensors) == TENSORS_KEPT[kind]
        assert (after.steps, {each.dtype for each in made}) == (step + 1, {torch.float32})
        theta, state = following, after


@pytest.mark.parametrize("kind", OUTER_KINDS)
def test_neither_threads_nor_cuts_into_parts_show(kind: str) -> None:
    numel, cuts = 140_001, (0, 1024, 65_536, 131_072, 140_001)
    theta, gradients = drawn(numel, 5), [drawn(numel, 6 + step) for step in range(4)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(steps(theta, gradients, EVERY[kind]))
    finally:
        torch.set_num_threads(before)
    parts = [slice(*each) for each in pairwise(cuts)]
    pieces = [steps(theta[part], [g[part] for g in gradients], EVERY[kind]) for part in parts]
    joined = {name: torch.cat([state.tensors[name] for _, state in pieces]) for name in TENSORS_KEPT[kind]}
    found.append((torch.cat([values for values, _ in pieces]), OuterState(4, joined)))
    for values, state in found[1:]:
        assert torch.equal(values, found[0][0])
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor, found[0][1].tensors[name]), name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "adam"}, "kind is 'adam': one of sgd, heavy_ball, nesterov"),
        ({"lr": 0.0}, "lr is 0.0: positive and finite"),
        ({"momentum": 1.0}, "momentum is 1.0: from 0 to below 1"),
        ({"momentum": -0.1}, "momentum is -0.1: from 0 to below 1"),
        ({"momentum": 0.0}, 'momentum is 0.0: kind "nesterov" needs some'),
        ({"kind": "sgd"}, 'momentum is 0.9: kind "sgd" has none, kind "heavy_ball" does'),
        ({"window": 4}, "window is 4: only for delayed_nesterov"),
        ({"kind": "delayed_nesterov", "window": 0}, "window is 0: at least 1"),
        ({"kind": "delayed_nesterov", "window": 4, "share_ahead": 0.3}, "share_ahead is 0.3: from 0 to 1/window, 0.25"),
        ({"kind": "delayed_nesterov", "epsilon": 0.5}, "epsilon is 0.5: only for adamw"),
        ({"kind": "adamw", "epsilon": 0.0}, "epsilon is 0.0: positive and finite"),
        ({"kind": "adamw", "momentum_squares": 1.0}, "momentum_squares is 1.0: from 0 to below 1"),
        ({"weight_decay": 0.1}, "weight_decay is 0.1: only for adamw and schedule_free and gpa"),
        ({"kind": "gpa", "weight_decay": -1.0}, "weight_decay is -1.0: not negative, and finite"),
        ({"kind": "gpa", "weight_decay": 2.0}, "weight_decay is 2.0: lr x weight_decay is below 1"),
        ({"kind": "gpa", "momentum_ahead": 1.0}, "momentum_ahead is 1.0: from 0 to below 1"),
    ],
)
def test_options_name_the_field_and_the_value(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OuterOptimizerOptions(**given)  # type: ignore[arg-type]
