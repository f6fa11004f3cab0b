"""The outer step: the optimizer's step on one fragment, as a pure function, and the outer rule of a run.

Three different forms are called Nesterov, and a learning rate tuned for one is wrong for another by up to
1/(1 - momentum), so each has its own name here: ``nesterov`` is torch's, ``heavy_ball`` has no look-ahead, and
``nesterov_ema`` is HeLoCo's (arXiv 2606.00271).

``OuterRule`` is everything about an outer step that a run configures: how contributions are corrected and merged, and
the optimizer's step after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from math import sqrt
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from diloco.outer.merge import BY_TENSOR, MEAN, OPEN, UNCORRECTED, Correction, Gate, MergeOptions, Merging, Segment
from diloco.sync.options import ABOVE_0, NOT_NEGATIVE, Count, below, check_bounds, one_of, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.outer.fragments import Layout


TENSORS_KEPT: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "heavy_ball": ("momentum",),
    "nesterov": ("momentum",),
    "nesterov_ema": ("momentum",),
    "delayed_nesterov": ("momentum", "window"),
    "adamw": ("momentum", "squares"),
    "schedule_free": ("fast", "average"),
    "gpa": ("fast", "average"),
}
"""The state tensors that each kind keeps for a fragment between steps, each as large as the fragment."""
OUTER_KINDS = tuple(TENSORS_KEPT)
LINEAR = ("heavy_ball", "nesterov", "nesterov_ema")
"""The kinds whose step is linear in the values, the momentum and the pseudo-gradient, as is sgd's, without momentum.
``linear_part`` has their factors."""
ONLY_OF: Mapping[str, tuple[str, ...]] = {
    "window": ("delayed_nesterov",),
    "share_ahead": ("delayed_nesterov",),
    "momentum_squares": ("adamw",),
    "epsilon": ("adamw",),
    "weight_decay": ("adamw", "schedule_free", "gpa"),
    "momentum_ahead": ("gpa",),
}
"""The fields that only some kinds read, and these kinds."""


@dataclass(kw_only=True, slots=True)
class OuterOptimizerOptions:
    """``kind`` is one of ``OUTER_KINDS``; the defaults are DiLoCo's (arXiv 2311.08105).

    A field that the kind does not use must be at its default: ``ValueError``.
    """

    kind: Annotated[str, one_of(OUTER_KINDS)] = "nesterov"
    lr: Annotated[float, ABOVE_0] = 0.7
    momentum: Annotated[float, below(1)] = 0.9
    """β1 of adamw, β of schedule_free, μ_x of gpa."""
    window: Count = 1
    """N of delayed_nesterov: steps accumulated for one momentum step."""
    share_ahead: float = 0.0
    """c of delayed_nesterov, from 0 to 1/window: the share of the momentum that each step of a window applies."""
    momentum_squares: Annotated[float, below(1)] = 0.95
    """β2 of adamw."""
    epsilon: Annotated[float, ABOVE_0] = 0.1
    """ε of adamw, which is unstable with the usual 1e-8 (DiLoCo, appendix)."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """For adamw, schedule_free and gpa: decoupled, times the learning rate."""
    momentum_ahead: Annotated[float, below(1)] = 0.8
    """μ_y of gpa: where between the fast values (0) and their average (1) the sites train from."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.kind == "sgd":
            require(self.momentum == 0, "momentum", self.momentum, 'kind "sgd" has none, kind "heavy_ball" does')
        elif self.kind != "adamw":
            require(self.momentum > 0, "momentum", self.momentum, f'kind "{self.kind}" needs some, kind "sgd" none')
        most = 1 / self.window
        require(0 <= self.share_ahead <= most, "share_ahead", self.share_ahead, f"from 0 to 1/window, {most:g}")
        require(self.lr * self.weight_decay < 1, "weight_decay", self.weight_decay, "lr x weight_decay is below 1")
        for each in fields(self):
            kinds, value = ONLY_OF.get(each.name, OUTER_KINDS), getattr(self, each.name)
            require(self.kind in kinds or value == each.default, each.name, value, f"only for {' and '.join(kinds)}")


@dataclass(frozen=True, slots=True)
class OuterState:
    """An outer optimizer's state for one fragment: ``steps`` since the empty state, each counted by its share, and
    ``tensors`` by name (``TENSORS_KEPT``), flat fp32 of the fragment's length.
    """

    steps: float = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def momentum(self) -> Tensor | None:
        """The momentum; None before the first step and for kinds without one."""
        return self.tensors.get("momentum")

    def part(self, part: slice) -> OuterState:
        """Return the state of a part of the fragment, as views."""
        return OuterState(self.steps, {name: each[part] for name, each in self.tensors.items()})


NOTHING = OuterState()
"""The state before the first step."""


def outer_step(
    theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions, share: float = 1
) -> tuple[Tensor, OuterState]:
    """Return (theta', state') after one step along the merged pseudo-gradient ``g``; the inputs stay as they are.

    All flat, of one shape and dtype.  With m, the momentum, 0 before the first step (g in torch's two forms)::

        sgd               theta <- theta - lr g
        heavy_ball        m <- mu m + g;             theta <- theta - lr m
        nesterov          m <- mu m + g;             theta <- theta - lr (g + mu m)
        nesterov_ema      m <- mu m + (1 - mu) g;    theta <- theta - lr (g + mu m)         (arXiv 2606.00271)

    and :func:`_delayed_nesterov`, :func:`_adamw` and :func:`_averaged` for the others.  sgd, heavy_ball, nesterov and
    adamw equal torch's own bit for bit.  The additions with ``alpha`` are torch's, with one rounding where the
    processor has a fused multiply-add: bits are equal on machines of one kind, for any number of threads, and for any
    cut of a fragment into parts of whole vectors.

    ``share``, above 0 and at most 1, is the part of a full round that ``g`` is.  1 is the step above.  A smaller share
    takes that part of the step: with an unchanged g, a step of share s and one of share t give the theta and the m of
    one step of s + t (:func:`linear_part` and the others have the formulas).  So the result does not depend on which
    sites arrive together.  delayed_nesterov is made for single arrivals and takes no share.
    """
    assert 0 < share <= 1, share
    if options.kind == "delayed_nesterov":
        assert share == 1, share
        return _delayed_nesterov(theta, g, state, options)
    if options.kind == "adamw":
        return _adamw(theta, g, state, options, share)
    if options.kind in ("schedule_free", "gpa"):
        return _averaged(theta, g, state, options, share)
    steps, before = state.steps + share, state.momentum
    if options.kind == "sgd":
        return torch.add(theta, g, alpha=-options.lr * share), OuterState(steps)
    if share < 1:
        part = linear_part(options, share)
        theta, momentum = torch.add(theta, g, alpha=part.theta_by_g), g.mul(part.momentum_by_g)
        if before is not None:
            theta.add_(before, alpha=part.theta_by_momentum)
            momentum.add_(before, alpha=part.momentum_stays)
        return theta, OuterState(steps, {"momentum": momentum})
    if options.kind == "nesterov_ema":
        fresh = g.mul(1 - options.momentum)
        momentum = fresh if before is None else fresh.add_(before, alpha=options.momentum)
    else:
        momentum = g.clone() if before is None else before.mul(options.momentum).add_(g)
    direction = momentum if options.kind == "heavy_ball" else torch.add(g, momentum, alpha=options.momentum)
    return torch.add(theta, direction, alpha=-options.lr), OuterState(steps, {"momentum": momentum})


class LinearPart(NamedTuple):
    """The factors of a part of a step, in the kernels' order: of m and g in the new m, of m and g in theta's change."""

    theta_by_g: float
    momentum_stays: float
    momentum_by_g: float
    theta_by_momentum: float


def linear_part(options: OuterOptimizerOptions, share: float) -> LinearPart:
    """Return the factors for the share s of a step of heavy_ball, nesterov or nesterov_ema.

    A step is linear in (theta, m, g), and there is exactly one way to cut a linear step into parts that add up to it.
    With f = (1 - mu^s) / (1 - mu), which is 1 at s = 1::

        heavy_ball        m <- mu^s m + f g            theta <- theta - lr (mu f m   + (s - mu f) / (1 - mu) g)
        nesterov          m <- mu^s m + f g            theta <- theta - lr (mu^2 f m + (s - mu^2 f) / (1 - mu) g)
        nesterov_ema      m <- mu^s m + (1 - mu^s) g   theta <- theta - lr (mu^2 f m + ((1 + mu) s - mu^2 f) g)

    with m from before the step.  The total effect of a pseudo-gradient on theta, now and later through the momentum, is
    s times its effect in a full step.
    """
    mu, lr = options.momentum, options.lr
    stays = mu**share
    filled = _filled(mu, share)
    carried = (mu if options.kind == "heavy_ball" else mu * mu) * filled
    if options.kind == "nesterov_ema":
        return LinearPart(-lr * ((1 + mu) * share - carried), stays, 1 - stays, -lr * carried)
    return LinearPart(-lr * (share - carried) / (1 - mu), stays, filled, -lr * carried)


def _delayed_nesterov(
    theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions
) -> tuple[Tensor, OuterState]:
    """Delayed Nesterov (arXiv 2401.09135, algorithm 4): updates come one by one; the momentum takes one step on the
    mean of N of them, and meanwhile each moves theta by 1/N of itself::

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


def _adamw(
    theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions, share: float
) -> tuple[Tensor, OuterState]:
    """AdamW (arXiv 1711.05101) on pseudo-gradients, with torch's order of operations.

    A share s of a step uses beta^s for each beta, fractional ``steps`` for the two bias corrections, and the rate
    lr f(1 - lr wd, s) with f of :func:`_filled`; a constant g is then its own mean at any step.
    """
    steps, zeros = state.steps + share, torch.zeros_like(g)
    stays, squares_stay = options.momentum**share, options.momentum_squares**share
    momentum = state.tensors.get("momentum", zeros).lerp(g, 1 - stays)
    squares = state.tensors.get("squares", zeros).mul(squares_stay)
    squares.addcmul_(g, g, value=1 - squares_stay)
    scale = squares.sqrt().div_(sqrt(1 - options.momentum_squares**steps)).add_(options.epsilon)
    kept = 1 - options.lr * options.weight_decay
    theta = theta.mul(kept**share)
    theta.addcdiv_(momentum, scale, value=-options.lr * _filled(kept, share) / (1 - options.momentum**steps))
    return theta, OuterState(steps, {"momentum": momentum, "squares": squares})


def _averaged(
    theta: Tensor, g: Tensor, state: OuterState, options: OuterOptimizerOptions, share: float
) -> tuple[Tensor, OuterState]:
    """Schedule-Free SGD (arXiv 2405.15682), and GPA (arXiv 2512.17131), which is the same with an exponential average::

        z <- (1 - lr wd) z - lr g                                      the fast values
        x <- a x + (1 - a) z            a = 1 - 1/steps,  or mu_x      their average, which is evaluated
        y <- b x + (1 - b) z            b = mu,           or mu_y      theta, which is sent to the sites

    Before the first step all three are theta.  A share s of a step moves z by s and averages over the path of z.  With
    z from before the step, decayed by (1 - lr wd)^s, f as in :func:`linear_part` and fractional ``steps``, the parts
    below add up to the step exactly without decay, and nearly so with decay::

        schedule_free     x <- (1 - s/steps) x + s/steps (z - lr (1 + s)/2 g)
        gpa               x <- mu_x^s x + (1 - mu_x^s) z - lr (s - mu_x f) g
    """
    steps, is_steady = state.steps + share, options.kind == "gpa"
    average_stays = options.momentum**share if is_steady else 1 - share / steps
    ahead = options.momentum_ahead if is_steady else options.momentum
    fast = state.tensors.get("fast", theta).mul((1 - options.lr * options.weight_decay) ** share)
    average = state.tensors.get("average", theta)
    if share < 1:
        passed = share - options.momentum * _filled(options.momentum, share)
        passed = passed if is_steady else share / steps * (1 + share) / 2
        average = fast.lerp(average, average_stays).sub_(g, alpha=options.lr * passed)
        fast.sub_(g, alpha=options.lr * share)
    else:
        fast.sub_(g, alpha=options.lr)
        average = fast.lerp(average, average_stays)
    return fast.lerp(average, ahead), OuterState(steps, {"fast": fast, "average": average})


def _filled(stays: float, share: float) -> float:
    """Return f = (1 - stays^share) / (1 - stays), whose limit for ``stays`` 1 is ``share``."""
    return share if stays == 1 else (1 - stays**share) / (1 - stays)


def evaluated(theta: Tensor, state: OuterState) -> Tensor:
    """Return the parameters to evaluate and export: theta itself, or the average where the optimizer keeps one."""
    return state.tensors.get("average", theta)


@dataclass(frozen=True, slots=True)
class OuterRule:
    """A run's outer rule.  ``segments`` are by fragment; a fragment without any is merged by the weighted mean.

    ``averaged`` are the fragments of buffers, to which only :data:`AVERAGE` applies.
    """

    optimizer: OuterOptimizerOptions
    segments: tuple[tuple[Segment, ...], ...] = ()
    gate: Gate = OPEN
    correction: Correction = UNCORRECTED
    averaged: frozenset[int] = frozenset()

    def merging(self, fragment: int, staleness: Sequence[int]) -> Merging | None:
        """Return a fragment's merging for contributions of this ``staleness``; None for the weighted mean."""
        if not self.segments:
            return None
        factors = None if self.gate == OPEN else [self.gate.factor(each) for each in staleness]
        return Merging(self.segments[fragment], factors, self.correction)


def outer_rule(
    optimizer: OuterOptimizerOptions,
    merge: MergeOptions,
    layout: Layout,
    plain: Sequence[str] = (),
    gate: Gate = OPEN,
    correction: Correction = UNCORRECTED,
) -> OuterRule:
    """Return the rule of a run with ``layout``.

    ``rda`` and ``clamp`` work per parameter, because tensors differ in length by orders of magnitude.  Under ``rda``
    vectors, and parameters whose name matches one of ``plain`` (shell patterns), are merged by the mean: a row of an
    embedding moves only at sites that saw its token, so the sites share no direction.  The other kinds compare whole
    fragments, because an update is good or bad as a whole.  A correction works per parameter under all kinds.
    ``ValueError`` where a correction is set and the optimizer has no momentum.
    """
    if correction.kind != "none" and "momentum" not in TENSORS_KEPT[optimizer.kind]:
        kinds = " or ".join(kind for kind, kept in TENSORS_KEPT.items() if "momentum" in kept)
        raise ValueError(f"correction is {correction.kind!r}: kind {optimizer.kind!r} has no momentum, {kinds} do")
    if merge.kind == "mean" and gate == OPEN and correction.kind == "none":
        return OuterRule(optimizer, averaged=layout.averaged)
    means = [name for name, shape in layout.parameters if len(shape) < 2 or any(fnmatchcase(name, p) for p in plain)]
    options = {name: MEAN if merge.kind == "rda" and name in means else merge for name, _ in layout.parameters}
    segments: list[tuple[Segment, ...]] = []
    for fragment in layout.fragments:
        found, start, by_tensor = list[Segment](), 0, merge.kind in BY_TENSOR
        for piece in fragment.pieces:
            stop = start + piece.stop - piece.start
            found.append(Segment(start, stop, options[piece.name], start if by_tensor else 0))
            start = stop
        segments.append(tuple(found) if by_tensor or correction.kind != "none" else (Segment(0, start, merge),))
    return OuterRule(optimizer, tuple(segments), gate, correction, layout.averaged)


AVERAGE = OuterRule(OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0))
"""The rule of buffers: from 0, a step along the mean of negated values is the mean of the values."""
