"""Every kind of outer optimizer over several steps, against its recursion, which is written once more here from its
paper, in plain fp64 numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from random import Random

import pytest
import torch

from diloco.codec.merging import State, outer_pass
from diloco.codec.registry import make_codec
from diloco.outer.optimizer import NOTHING, OUTER_KINDS, OuterOptimizerOptions, evaluated, outer_step

Points = Iterator[tuple[float, float]]
"""After each step where the sites train from, and what is evaluated."""
Recursion = Callable[[OuterOptimizerOptions, float, list[float]], Points]


def with_momentum(of: OuterOptimizerOptions, theta: float, gs: list[float]) -> Points:
    """sgd, heavy_ball and nesterov: torch.optim.SGD.  nesterov_ema: arXiv 2606.00271."""
    m, new = 0.0, 1 - of.momentum if of.kind == "nesterov_ema" else 1.0
    for g in gs:
        m = of.momentum * m + new * g
        theta -= of.lr * (g + of.momentum * m if of.kind.startswith("nesterov") else m)
        yield theta, theta


def delayed_nesterov(of: OuterOptimizerOptions, theta: float, gs: list[float]) -> Points:
    """arXiv 2401.09135, algorithm 4."""
    m = gathered = 0.0
    n, c = of.window, of.share_ahead
    for count, g in enumerate(gs, 1):
        gathered += g
        if count % n:
            theta -= of.lr * (c * of.momentum * m + g / n)
        else:
            m, gathered = of.momentum * m + gathered / n, 0.0
            theta -= of.lr * ((1 - c * (n - 1)) * of.momentum * m + g / n)
        yield theta, theta


def adamw(of: OuterOptimizerOptions, theta: float, gs: list[float]) -> Points:
    """arXiv 1711.05101, algorithm 2."""
    m = v = 0.0
    for count, g in enumerate(gs, 1):
        m = of.momentum * m + (1 - of.momentum) * g
        v = of.momentum_squares * v + (1 - of.momentum_squares) * g * g
        mean, square = m / (1 - of.momentum**count), v / (1 - of.momentum_squares**count)
        theta -= of.lr * of.weight_decay * theta + of.lr * mean / (sqrt(square) + of.epsilon)
        yield theta, theta


def averaged(of: OuterOptimizerOptions, theta: float, gs: list[float]) -> Points:
    """schedule_free: arXiv 2405.15682, equations 3 to 5; gpa: arXiv 2512.17131."""
    fast = average = theta
    for count, g in enumerate(gs, 1):
        fast -= of.lr * (g + of.weight_decay * fast)
        new = 1 / count if of.kind == "schedule_free" else 1 - of.momentum
        average += new * (fast - average)
        ahead = of.momentum if of.kind == "schedule_free" else of.momentum_ahead
        yield (1 - ahead) * fast + ahead * average, average


RECURSIONS: Mapping[str, Recursion] = {
    **dict.fromkeys(("sgd", "heavy_ball", "nesterov", "nesterov_ema"), with_momentum),
    "delayed_nesterov": delayed_nesterov,
    "adamw": adamw,
    **dict.fromkeys(("schedule_free", "gpa"), averaged),
}
OPTIONS = [
    OuterOptimizerOptions(kind="sgd", lr=0.7, momentum=0.0),
    OuterOptimizerOptions(kind="heavy_ball", lr=0.3, momentum=0.8),
    OuterOptimizerOptions(kind="nesterov"),
    OuterOptimizerOptions(kind="nesterov_ema", momentum=0.6),
    OuterOptimizerOptions(kind="delayed_nesterov", window=3, share_ahead=0.2),
    OuterOptimizerOptions(kind="delayed_nesterov", window=4),
    OuterOptimizerOptions(kind="adamw", lr=0.3, momentum_squares=0.25, epsilon=0.25, weight_decay=0.1),
    OuterOptimizerOptions(kind="schedule_free", lr=1.0, weight_decay=0.01),
    OuterOptimizerOptions(kind="gpa", lr=1.0, momentum=0.8, momentum_ahead=0.7, weight_decay=0.05),
]


def test_every_kind_is_here() -> None:
    assert set(RECURSIONS) == {each.kind for each in OPTIONS} == set(OUTER_KINDS)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: f"{each.kind}-{each.window}")
def test_nine_steps_are_those_of_the_recursion_and_so_are_the_fused_ones(options: OuterOptimizerOptions) -> None:
    random, numel = Random(7), 20
    start = [random.gauss(0, 1) for _ in range(numel)]
    along = [[random.gauss(0, 1) for _ in range(numel)] for _ in range(9)]
    each_value = [list(RECURSIONS[options.kind](options, start[at], [g[at] for g in along])) for at in range(numel)]
    theta, state, codec = torch.tensor(start, dtype=torch.float64), NOTHING, make_codec("fp32")
    fused = State(theta.float(), theta.float(), NOTHING)
    for step, values in enumerate(along):
        g = torch.tensor(values, dtype=torch.float64)
        theta, state = outer_step(theta, g, state, options)
        fused = outer_pass([(1.0, [(codec, codec.encode(g.float()))])], fused, options, codec).state
        wanted, shown = (torch.tensor([of[step][which] for of in each_value], dtype=torch.float64) for which in (0, 1))
        assert torch.allclose(theta, wanted, rtol=1e-12, atol=1e-12), step
        assert torch.allclose(evaluated(theta, state), shown, rtol=1e-12, atol=1e-12), step
        assert torch.allclose(fused.theta.double(), wanted, rtol=1e-5, atol=1e-5), step
        assert torch.allclose(evaluated(fused.theta, fused.optimizer).double(), shown, rtol=1e-5, atol=1e-5), step
