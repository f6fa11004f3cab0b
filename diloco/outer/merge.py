"""The merge of a round: one pseudo-gradient out of those of several sites.

Correction.  A contribution that does not go where the outer momentum goes may be corrected before it is merged
(:class:`Correction`).  As the merge does, it goes by inner products: from those of a tensor follow the two numbers that
correct it, and from these the products of what is corrected, so that the corrected tensor need not be there yet.

Merge.  All rules but one (:func:`trimmed_mean`) are a mean with other weights, times a number.  :func:`blend` says
which, from the products of the sites' contributions with each other, and so the contributions themselves need never be
in memory together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, exp, isfinite, pi, sqrt
from statistics import median, median_low
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    Change = tuple[float, float]
    from collections.abc import Iterable

CORRECTION_KINDS = ("none", "heloco")
CORRECTION_NUMBERS = ("cosine", "project", "project_max", "rotate", "doubt")
KEPT = (1.0, 0.0)
"""The change that is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """``heloco`` (HeLoCo, arXiv 2606.00271) compares each tensor D of a contribution with the outer momentum m of it.

    With u and v their directions, c the cosine between them and trust = |D| / (|D| + doubt |m|)::

        c >= cosine     D                                   it goes with the momentum, and is kept
        c < 0           D - p c |D| v                       p = min(project (-c) trust, project_max)
        else            |D| unit((1 - r) u + r v)           r = min(rotate (1 - c) trust, 1)

    What goes against the momentum is taken out of D, a share p of it; what goes elsewhere is turned and stays as long
    as it was.  A tensor of zeros, and one without momentum, is kept.  How long m is depends on the outer optimizer:
    that of nesterov_ema, which is the paper's, is a mean of updates, others are up to 1 / (1 - momentum) times longer
    and want a smaller ``doubt``.  A gate, which may be the paper's weight of an old update, comes after it.

    ``cosine`` is the paper's c_ok, ``project`` its k_s, ``project_max`` its b_max, ``rotate`` its k_d and ``doubt`` its
    kappa.  The formulas are the paper's; its values of the five are not verified, and the defaults are this project's
    own.
    """

    kind: str = "none"
    cosine: float = 0.2
    project: float = 1.0
    project_max: float = 1.0
    rotate: float = 0.25
    doubt: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in CORRECTION_KINDS:
            raise ValueError(f"correction is {self.kind!r}: one of {', '.join(CORRECTION_KINDS)}")
        for name in CORRECTION_NUMBERS:
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"correction_{name} is {value!r}: must not be negative")
            if name in ("cosine", "project_max") and value > 1:
                raise ValueError(f"correction_{name} is {value!r}: at most 1")

    @property
    def is_none(self) -> bool:
        """Whether it changes nothing."""
        return self.kind == "none"

    def change(self, square: float, product: float, momentum_square: float) -> Change:
        """Return (a, b): the corrected tensor is ``a D + b m``; the three are D D, D m and m m, in fp64."""
        if self.is_none or not (square > 0 and momentum_square > 0):
            return KEPT
        length, ahead = sqrt(square), sqrt(momentum_square)
        cosine, ratio, trust = product / (length * ahead), length / ahead, length / (length + self.doubt * ahead)
        if cosine >= self.cosine:
            return KEPT
        if cosine < 0:
            taken = min(self.project * -cosine * trust, self.project_max)
            return 1.0, -taken * cosine * ratio
        turned = min(self.rotate * (1 - cosine) * trust, 1.0)
        stays = 1 - turned
        together = sqrt(stays * stays + 2 * stays * turned * cosine + turned * turned)
        return stays / together, turned / together * ratio


UNCORRECTED = Correction()


def corrected(values: Tensor, momentum: Tensor, change: Change) -> Tensor:
    """Return ``a D + b m`` for (a, b) of :meth:`Correction.change`, and the very ``values`` where nothing changes.

    In fp64 and rounded once: b is beyond fp32 where a momentum has all but died away.
    """
    if change == KEPT:
        return values
    kept, ahead = change
    found, towards = (each.to(torch.float64, copy=True) for each in (values, momentum))
    return found.mul_(kept).add_(towards.mul_(ahead)).to(values.dtype)


def corrected_products(products: Sequence[Sequence[float]], changes: Sequence[Change]) -> list[list[float]]:
    """The products of the corrected contributions with each other; ``products`` have the momentum in the last place.

    A square is not below 0: what is taken out entirely may be less than its rounding.
    """
    square, count = products[-1][-1], len(changes)
    found = [[0.0] * count for _ in range(count)]
    for i, (kept, ahead) in enumerate(changes):
        for j, (stays, turned) in enumerate(changes):
            crossed = kept * turned * products[i][-1] + stays * ahead * products[j][-1]
            product = kept * stays * products[i][j] + crossed + ahead * turned * square
            found[i][j] = max(0.0, product) if i == j else product
    return found


T = TypeVar("T")
MERGE_KINDS = ("mean", "rda", "clip", "normalise", "clamp", "geometric_median", "trimmed_mean")
WEISZFELD_STEPS = 64
DEGENERATE = 1e-6
"""Of what unit vectors could add up to: a sum that is shorter has no direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    """How contributions become one; with each of them equal ones give themselves, whatever the weights.

    ``mean``              the weighted mean (DiLoCo, arXiv 2311.08105)
    ``rda``               the weighted mean of the directions, as long as the weighted mean of the lengths (Decoupled
                          DiLoCo, arXiv 2604.21428): M contributions that have nothing in common do not get sqrt(M)
                          times shorter, so it wants a smaller learning rate than the mean by up to as much
    ``clip``              the mean of contributions no longer than ``norm_ratio_max`` times the median length
    ``normalise``         the mean of contributions made as long as the median one
    ``clamp``             the mean of contributions no longer than the lower median length, each tensor on its own: the
                          form of SparseLoCo's code (arXiv 2508.15706, 2603.08163).  Where half of the contributions or
                          more are 0, nothing is left of the others
    ``geometric_median``  where the weighted sum of the distances is least (RFA, arXiv 1912.13445)
    ``trimmed_mean``      value by value, the mean without the ``trim_share`` largest and the ``trim_share`` smallest
                          (arXiv 1803.01498)
    """

    kind: str = "mean"
    norm_ratio_max: float = 1.0
    trim_share: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in MERGE_KINDS:
            raise ValueError(f"merge is {self.kind!r}: one of {', '.join(MERGE_KINDS)}")
        if not (isfinite(self.norm_ratio_max) and self.norm_ratio_max >= 1):
            raise ValueError(f"norm_ratio_max is {self.norm_ratio_max!r}: at least 1")
        if not 0 <= self.trim_share < 0.5:
            raise ValueError(f"trim_share is {self.trim_share!r}: from 0 to below 0.5")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A contribution is made smaller with its staleness: by exp(-``alpha`` staleness), smoothly to nothing at
    ``cutoff`` (both CGAD's, arXiv 2605.09126), and by (1 + staleness)^-``power`` (FedBuff's, arXiv 2106.06639).

    Unlike a weight, which takes from one what it gives to another, this makes the step itself smaller.  CGAD's form of
    the gate is that of its abstract; 0 for all three lets everything through as it is.
    """

    alpha: float = 0.0
    cutoff: int = 0
    power: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "power"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"gate_{name} is {value!r}: must not be negative")
        if self.cutoff < 0:
            raise ValueError(f"gate_cutoff is {self.cutoff!r}: 0 (none) or more")

    @property
    def is_open(self) -> bool:
        """Whether it changes nothing."""
        return self.alpha == 0 and self.cutoff == 0 and self.power == 0

    def factor(self, staleness: int) -> float:
        """What is left of a contribution that is so many versions old: 1 at 0, 0 from the cutoff on."""
        if self.cutoff and staleness >= self.cutoff:
            return 0.0
        gate = 0.5 * (1 + cos(pi * staleness / self.cutoff)) if self.cutoff else 1.0
        return float(gate * exp(-self.alpha * staleness) * (1 + staleness) ** -self.power)


MEAN = MergeOptions()
OPEN = Gate()
PAIRWISE = ("rda", "geometric_median")
"""The kinds that read the products of different contributions."""
BY_TENSOR = ("rda", "clamp")
"""The kinds that merge each tensor on its own; the others compare whole fragments."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The values ``[start, stop)`` of a fragment, which are merged on their own: a piece of a parameter, or all.

    ``cuts``, rising, are where its tensors meet, if each of them is to be corrected on its own.
    """

    start: int
    stop: int
    options: MergeOptions
    cuts: tuple[int, ...] = ()


def blend(
    options: MergeOptions,
    weights: Sequence[float],
    products: Sequence[Sequence[float]],
    factors: Sequence[float] | None = None,
) -> tuple[list[float], float]:
    """Return (weights', scale): what is merged is ``scale`` times the mean with ``weights'``; fp64 throughout.

    ``weights`` are positive, ``products[i][j]`` is the inner product of contributions i and j; only ``rda`` and
    ``geometric_median`` read those of different ones.  Where a rule has no answer, as for directions that cancel each
    other, it is the mean.  With ``factors``, of which one is above 0, the contributions are those made so much smaller.
    """
    if factors is not None:
        smaller = [
            [one * other * each for other, each in zip(factors, row, strict=True)]
            for one, row in zip(factors, products, strict=True)
        ]
        changed, scale = blend(options, weights, smaller)
        weighted = [weight * factor for weight, factor in zip(changed, factors, strict=True)]
        return weighted, scale * sum(weighted) / sum(changed)
    lengths = [sqrt(products[index][index]) for index in range(len(weights))]
    if options.kind == "clamp":
        return _shortened(weights, [min(1.0, median_low(lengths) / length) if length else 1.0 for length in lengths])
    if options.kind == "rda":
        return _rda(weights, products, lengths)
    if options.kind == "geometric_median":
        return _geometric_median(weights, products, lengths), 1.0
    assert options.kind in ("mean", "clip", "normalise"), options.kind
    usual = median(lengths)
    if options.kind == "mean" or usual == 0:
        return list(weights), 1.0
    factors = [usual / length if length else 1.0 for length in lengths]
    if options.kind == "clip":
        factors = [min(1.0, options.norm_ratio_max * factor) for factor in factors]
    return _shortened(weights, factors)


def _shortened(weights: Sequence[float], factors: Sequence[float]) -> tuple[list[float], float]:
    """The mean with ``weights`` of contributions that are ``factors`` times as long."""
    changed = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    return changed, sum(changed) / sum(weights)


def _rda(
    weights: Sequence[float], products: Sequence[Sequence[float]], lengths: Sequence[float]
) -> tuple[list[float], float]:
    changed = [weight / length if length else 0.0 for weight, length in zip(weights, lengths, strict=True)]
    squared = sum(one * other * products[i][j] for i, one in enumerate(changed) for j, other in enumerate(changed))
    together = sqrt(max(0.0, squared))
    if together <= DEGENERATE * sum(weights):
        return list(weights), 1.0
    length = sum(weight * length for weight, length in zip(weights, lengths, strict=True)) / sum(weights)
    return changed, length * sum(changed) / together


def _geometric_median(
    weights: Sequence[float], products: Sequence[Sequence[float]], lengths: Sequence[float]
) -> list[float]:
    """Weiszfeld's iteration, whose points are all means of the contributions, smoothed where it would meet one."""
    least = DEGENERATE * median(lengths)
    shares = [weight / sum(weights) for weight in weights]
    for _ in range(WEISZFELD_STEPS):
        towards = [sum(share * product for share, product in zip(shares, row, strict=True)) for row in products]
        square = sum(share * each for share, each in zip(shares, towards, strict=True))
        far = [sqrt(max(0.0, products[i][i] - 2 * each + square)) for i, each in enumerate(towards)]
        if max(far) <= least:
            return list(weights)
        raw = [weight / max(least, each) if least else weight for weight, each in zip(weights, far, strict=True)]
        shares = [each / sum(raw) for each in raw]
    return shares


def merge_mean(contributions: Sequence[tuple[float, Sequence[Tensor]]], out: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the sites' contributions, ``sum(w_i d_i) / sum(w_i)``, flat fp32.

    ``contributions`` holds (weight, updates) per site, already in site order; the updates of one site are added in
    sequence order into its d.  A site of weight 0, or without updates, is dropped before anything of it is read, so
    that not even a NaN of its can pass (0 * NaN is NaN).  ``out`` receives the result where it is given; it may be
    none of the updates.  ``ValueError`` for a negative or non-finite weight, or when no site is left.

    The mean runs (Welford 1962): with W the weights so far, ``m += (w_i / W) (d_i - m)``.  Equal d therefore give d
    bit for bit, whatever the weights, and nothing but m and one temporary is held.  Each operation rounds by itself
    (no fused multiply-add), so the bits depend neither on the machine nor on the number of threads.
    """
    mean: Tensor | None = None
    for share, updates in shares(contributions):
        if mean is None:
            mean = torch.empty_like(updates[0]) if out is None else out
            _add_up(updates, mean)
        else:
            contribution = updates[0] if len(updates) == 1 else _add_up(updates, torch.empty_like(mean))
            towards = torch.sub(mean, contribution)
            # Subtracted rather than added, so that the sign of a zero is kept too: -0 - 0 is -0, but -0 + 0 is +0.
            mean.sub_(towards.mul_(share))
    assert mean is not None
    return mean


def shares(contributions: Iterable[tuple[float, Sequence[T]]]) -> list[tuple[float, Sequence[T]]]:
    """Return (``w_i / W``, updates) of the sites that count, in their order, W the weights so far and theirs."""
    total, found = 0.0, []
    for weight, updates in counted(contributions):
        total += weight
        found.append((weight / total, updates))
    return found


def counted(contributions: Iterable[tuple[float, Sequence[T]]]) -> list[tuple[float, Sequence[T]]]:
    """Return those that count; see :func:`merge_mean` for who is dropped and what is refused."""
    found = []
    for weight, updates in contributions:
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"weight is {weight!r}: must be finite and not negative")
        if weight > 0 and updates:
            found.append((weight, updates))
    if not found:
        raise ValueError("no contribution has a positive weight")
    return found


def trimmed_mean(contributions: Sequence[tuple[float, Tensor]], trim_share: float, out: Tensor) -> Tensor:
    """Write into ``out``, value by value, the weighted mean without the largest and the smallest contributions.

    ``contributions`` holds (weight, values), each weight positive, in site order; of k of them ``trim_share`` k,
    rounded down, are left out at either end; the others keep their weights.  Of equal values the first sites' are the
    smaller ones.
    """
    values = torch.stack([each for _, each in contributions])
    weights = torch.tensor([weight for weight, _ in contributions], dtype=torch.float64)
    ordered, order = values.sort(dim=0, stable=True)
    less = int(trim_share * len(contributions))
    total = torch.zeros(out.shape, dtype=torch.float64)
    for rank in range(less, len(contributions) - less):
        weight = weights[order[rank]]
        total.add_(weight)
        towards = torch.sub(out, ordered[rank]) if rank > less else None
        if towards is None:
            out.copy_(ordered[rank])
        else:
            out.sub_(towards.mul_((weight / total).float()))
    return out


def _add_up(updates: Sequence[Tensor], out: Tensor) -> Tensor:
    out.copy_(updates[0])
    for update in updates[1:]:
        out.add_(update)
    return out
