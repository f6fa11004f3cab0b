"""The outer optimizer: one step on one fragment, as a pure function.

Three forms go under the name of Nesterov, and a learning rate tuned in one is wrong in the next by up to
1/(1 - momentum), so each has a name of its own here: ``nesterov`` is torch's, ``heavy_ball`` looks ahead nowhere, and
``nesterov_ema`` is HeLoCo's (arXiv 2606.00271).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite, sqrt
from types import MappingProxyType

import torch
from torch import Tensor

TENSORS_KEPT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sgd": (),
        "heavy_ball": ("momentum",),
        "nesterov": ("momentum",),
        "nesterov_ema": ("momentum",),
        "delayed_nesterov": ("momentum", "window"),
        "adamw": ("momentum", "squares"),
        "schedule_free": ("fast", "average"),
        "gpa": ("fast", "average"),
    }
)
"""By kind, what is remembered of a fragment between its steps: so many times the memory of the fragment itself."""
OUTER_KINDS = tuple(TENSORS_KEPT)
ONLY_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "window": ("delayed_nesterov",),
        "share_ahead": ("delayed_nesterov",),
        "momentum_squares": ("adamw",),
        "epsilon": ("adamw",),
        "weight_decay": ("adamw", "schedule_free", "gpa"),
        "momentum_ahead": ("gpa",),
    }
)
"""The fields that not every kind reads, and the kinds that do."""


@dataclass(kw_only=True, slots=True)
class OuterOptimizerOptions:
    """``kind`` is one of ``OUTER_KINDS``; the defaults are DiLoCo's (arXiv 2311.08105).

    A field that the kind has no use for is at its default, or is refused.
    """

    kind: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    """β1 of adamw, β of schedule_free, μ_x of gpa."""
    window: int = 1
    """N of delayed_nesterov: steps that are gathered for one step of the momentum."""
    share_ahead: float = 0.0
    """c of delayed_nesterov, from 0 to 1/window: how much of the momentum each step of a window takes."""
    momentum_squares: float = 0.95
    """β2 of adamw."""
    epsilon: float = 0.1
    """Of adamw, which is not stable with the usual 1e-8 (DiLoCo, appendix)."""
    weight_decay: float = 0.0
    """Of adamw, schedule_free and gpa: decoupled, times the learning rate."""
    momentum_ahead: float = 0.8
    """μ_y of gpa: where between the fast values (0) and their average (1) the sites train from."""

    def __post_init__(self) -> None:
        _require(self.kind in OUTER_KINDS, "kind", self.kind, f"one of {', '.join(OUTER_KINDS)}")
        _require(isfinite(self.lr) and self.lr > 0, "lr", self.lr, "must be above 0")
        _require(isfinite(self.momentum) and 0 <= self.momentum < 1, "momentum", self.momentum, "from 0 to below 1")
        if self.kind == "sgd":
            _require(self.momentum == 0, "momentum", self.momentum, 'kind "sgd" has none, kind "heavy_ball" does')
        elif self.kind != "adamw":
            _require(self.momentum > 0, "momentum", self.momentum, f'kind "{self.kind}" needs some, kind "sgd" none')
        _require(self.window >= 1, "window", self.window, "at least 1")
        most = 1 / self.window
        _require(0 <= self.share_ahead <= most, "share_ahead", self.share_ahead, f"from 0 to 1/window, {most:g}")
        for name, value in (("momentum_squares", self.momentum_squares), ("momentum_ahead", self.momentum_ahead)):
            _require(isfinite(value) and 0 <= value < 1, name, value, "from 0 to below 1")
        _require(isfinite(self.epsilon) and self.epsilon > 0, "epsilon", self.epsilon, "must be above 0")
        decays = isfinite(self.weight_decay) and self.weight_decay >= 0
        _require(decays, "weight_decay", self.weight_decay, "must not be negative")
        _require(self.lr * self.weight_decay < 1, "weight_decay", self.weight_decay, "lr x weight_decay is below 1")
        for each in fields(self):
            kinds, value = ONLY_OF.get(each.name, OUTER_KINDS), getattr(self, each.name)
            _require(self.kind in kinds or value == each.default, each.name, value, f"only for {' and '.join(kinds)}")


@dataclass(frozen=True, slots=True)
class OuterState:
    """What an outer optimizer remembers of a fragment: ``steps`` made since it remembered nothing, and ``tensors`` by
    name (``TENSORS_KEPT``), flat fp32 of the fragment's length.
    """

    steps: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def momentum(self) -> Tensor | None:
        """The direction of the recent pseudo-gradients, where there is one."""
        return self.tensors.get("momentum")

    def part(self, part: slice) -> OuterState:
        """The same of a part of the fragment."""
        return OuterState(self.steps, {name: each[part] for name, each in self.tensors.items()})


NOTHING = OuterState()
"""Before the first step."""


def outer_step(
    theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions
) -> tuple[Tensor, OuterState]:
    """Return (theta', state') after one step along the merged pseudo-gradient ``g``; the inputs stay as they are.

    All flat, of one shape and dtype.  With m, the momentum, 0 before the first step (g in torch's two forms)::

        sgd               theta <- theta - lr g
        heavy_ball        m <- mu m + g;             theta <- theta - lr m
        nesterov          m <- mu m + g;             theta <- theta - lr (g + mu m)
        nesterov_ema      m <- mu m + (1 - mu) g;    theta <- theta - lr (g + mu m)         (arXiv 2606.00271)

    and :func:`_delayed_nesterov`, :func:`_adamw` and :func:`_averaged` for the others.  sgd, heavy_ball, nesterov and
    adamw are torch's own bit for bit.  The additions with ``alpha`` are those of torch, one rounding where the
    processor has a fused multiply-add: bits are equal on machines of one kind, for any number of threads, and however
    a fragment is cut into parts of whole vectors.
    """
    if options.kind == "delayed_nesterov":
        return _delayed_nesterov(theta, g, state, options)
    if options.kind == "adamw":
        return _adamw(theta, g, state, options)
    if options.kind in ("schedule_free", "gpa"):
        return _averaged(theta, g, state, options)
    steps = state.steps + 1
    if options.kind == "sgd":
        return torch.add(theta, g, alpha=-options.lr), OuterState(steps)
    before = state.momentum
    if options.kind == "nesterov_ema":
        fresh = g.mul(1 - options.momentum)
        momentum = fresh if before is None else fresh.add_(before, alpha=options.momentum)
    else:
        momentum = g.clone() if before is None else before.mul(options.momentum).add_(g)
    direction = momentum if options.kind == "heavy_ball" else torch.add(g, momentum, alpha=options.momentum)
    return torch.add(theta, direction, alpha=-options.lr), OuterState(steps, {"momentum": momentum})


def _delayed_nesterov(
    theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions
) -> tuple[Tensor, OuterState]:
    """Delayed Nesterov (arXiv 2401.09135, algorithm 4): where updates come one by one, the momentum takes one step on
    the mean of N of them, and each of them moves theta by its own N-th meanwhile::

        B <- B + g
        N-th of a window:  m <- mu m + B/N;  theta <- theta - lr ((1 - c N + c) mu m + g/N);  B <- 0
        the others:        theta <- theta - lr (c mu m + g/N)

    With c = 0 a whole window is one Nesterov step on the mean of its pseudo-gradients.
    """
    count, ahead = options.window, options.share_ahead
    gathered = g if state.steps % count == 0 else state.tensors["window"].add(g)
    momentum = state.momentum
    ends = (state.steps + 1) % count == 0
    if ends:
        mean = gathered.div(count)
        momentum = mean if momentum is None else momentum.mul(options.momentum).add_(mean)
    share = (1 - ahead * count + ahead if ends else ahead) * options.momentum
    direction = g.div(count)
    if momentum is not None and share:
        direction.add_(momentum, alpha=share)
    momentum = torch.zeros_like(g) if momentum is None else momentum
    window = torch.zeros_like(g) if ends else gathered.clone() if gathered is g else gathered
    tensors = {"momentum": momentum, "window": window}
    return torch.add(theta, direction, alpha=-options.lr), OuterState(state.steps + 1, tensors)


def _adamw(theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions) -> tuple[Tensor, OuterState]:
    """AdamW (arXiv 1711.05101) on pseudo-gradients, in the order of operations of torch's own."""
    steps, zeros = state.steps + 1, torch.zeros_like(g)
    momentum = state.tensors.get("momentum", zeros).lerp(g, 1 - options.momentum)
    squares = state.tensors.get("squares", zeros).mul(options.momentum_squares)
    squares.addcmul_(g, g, value=1 - options.momentum_squares)
    scale = squares.sqrt().div_(sqrt(1 - options.momentum_squares**steps)).add_(options.epsilon)
    theta = theta.mul(1 - options.lr * options.weight_decay)
    theta.addcdiv_(momentum, scale, value=-options.lr / (1 - options.momentum**steps))
    return theta, OuterState(steps, {"momentum": momentum, "squares": squares})


def _averaged(theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions) -> tuple[Tensor, OuterState]:
    """Schedule-Free SGD (arXiv 2405.15682) and GPA (arXiv 2512.17131), which is the same with a steady average::

        z <- (1 - lr wd) z - lr g                                      the fast values
        x <- a x + (1 - a) z            a = 1 - 1/steps,  or mu_x      their average, which is what is evaluated
        y <- b x + (1 - b) z            b = mu,           or mu_y      what is sent to the sites: theta

    Before the first step all three are theta.
    """
    steps = state.steps + 1
    average_stays = 1 - 1 / steps if options.kind == "schedule_free" else options.momentum
    ahead = options.momentum if options.kind == "schedule_free" else options.momentum_ahead
    fast = state.tensors.get("fast", theta).mul(1 - options.lr * options.weight_decay).sub_(g, alpha=options.lr)
    average = fast.lerp(state.tensors.get("average", theta), average_stays)
    return fast.lerp(average, ahead), OuterState(steps, {"fast": fast, "average": average})


def evaluated(theta: Tensor, state: OuterState) -> Tensor:
    """The parameters that stand for the model: theta itself, or the average where the optimizer keeps one."""
    return state.tensors.get("average", theta)


def _require(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")
