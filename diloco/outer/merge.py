"""The merge of a round: one pseudo-gradient from those of several sites.

Correction.  A contribution whose direction differs from the outer momentum's may be corrected before the merge
(:class:`Correction`).  Like the merge, the correction needs only inner products: those of a tensor give the two numbers
that correct it, and these give the products of the corrected tensors, which need not be computed yet.

Merge.  All rules but one (:func:`trimmed_mean`) are a mean with changed weights, times a scale.  :func:`blend` returns
both from the inner products of the sites' contributions, so the contributions themselves are never in memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import cos, exp, isfinite, pi, sqrt
from statistics import median, median_low
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch

from diloco.sync.options import AT_LEAST_1, NOT_NEGATIVE, Bound, Natural, below, check_bounds, require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    Change = tuple[float, float]

CORRECTION_KINDS = ("none", "heloco")
CORRECTION_NUMBERS = ("cosine", "project", "project_max", "rotate", "doubt")
AT_MOST_1 = Bound(lambda value: value <= 1, "at most 1")
KEPT = (1.0, 0.0)
"""The identity change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """``heloco`` (HeLoCo, arXiv 2606.00271) compares each tensor D of a contribution with its outer momentum m.

    With u and v their directions, c the cosine between them and trust = |D| / (|D| + doubt |m|)::

        c >= cosine     D                                   along the momentum: kept
        c < 0           D - p c |D| v                       p = min(project (-c) trust, project_max)
        else            |D| unit((1 - r) u + r v)           r = min(rotate (1 - c) trust, 1)

    A share p of the component against the momentum is removed from D.  A tensor in another direction is turned and
    keeps its length.  A tensor of zeros, and one without momentum, is kept.  The length of m depends on the optimizer:
    the momentum of nesterov_ema, which is the paper's, is a mean of updates; others are up to 1 / (1 - momentum) times
    longer and need a smaller ``doubt``.  A gate, such as the paper's weight of an old update, is applied afterwards.

    ``cosine`` is the paper's c_ok, ``project`` its k_s, ``project_max`` its b_max, ``rotate`` its k_d and ``doubt`` its
    kappa.  The formulas are the paper's; its values of the five are not verified, and the defaults are this project's
    own.
    """

    kind: str = "none"
    cosine: Annotated[float, NOT_NEGATIVE, AT_MOST_1] = 0.2
    project: Annotated[float, NOT_NEGATIVE] = 1.0
    project_max: Annotated[float, NOT_NEGATIVE, AT_MOST_1] = 1.0
    rotate: Annotated[float, NOT_NEGATIVE] = 0.25
    doubt: Annotated[float, NOT_NEGATIVE] = 1.0

    def __post_init__(self) -> None:
        require(self.kind in CORRECTION_KINDS, "correction", self.kind, f"one of {', '.join(CORRECTION_KINDS)}")
        check_bounds(self, "correction_")

    def change(self, square: float, product: float, momentum_square: float) -> Change:
        """Return (a, b): the corrected tensor is ``a D + b m``; the arguments are D D, D m and m m, in fp64."""
        if self.kind == "none" or not (square > 0 and momentum_square > 0):
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
    """Return ``a D + b m`` for (a, b) of :meth:`Correction.change`, and ``values`` itself where nothing changes.

    Computed in fp64 and rounded once: b exceeds fp32 where a momentum has almost vanished.
    """
    if change == KEPT:
        return values
    kept, ahead = change
    found, towards = (each.to(torch.float64, copy=True) for each in (values, momentum))
    return found.mul_(kept).add_(towards.mul_(ahead)).to(values.dtype)


def corrected_products(products: Sequence[Sequence[float]], changes: Sequence[Change]) -> list[list[float]]:
    """Return the products of the corrected contributions with each other; the last row of ``products`` is the momentum.

    Squares are clamped to at least 0: after a full removal the remainder may be smaller than the rounding error.
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
"""A share of the longest possible sum of unit vectors: a shorter sum counts as without direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    """How contributions are merged; under every rule equal contributions give that contribution, whatever the weights.

    ``mean``              the weighted mean (DiLoCo, arXiv 2311.08105)
    ``rda``               the weighted mean of the directions, with the weighted mean of the lengths (Decoupled DiLoCo,
                          arXiv 2604.21428): M orthogonal contributions do not get sqrt(M) times shorter, so it needs a
                          learning rate up to sqrt(M) times smaller than with the mean
    ``clip``              the mean of contributions shortened to at most ``norm_ratio_max`` times the median length
    ``normalise``         the mean of contributions scaled to the median length
    ``clamp``             the mean of contributions shortened to at most the lower median length, tensor by tensor: the
                          form of SparseLoCo's code (arXiv 2508.15706, 2603.08163).  If half of the contributions or
                          more are 0, the result is 0
    ``geometric_median``  the point with the least weighted sum of distances (RFA, arXiv 1912.13445)
    ``trimmed_mean``      value by value, the mean without the ``trim_share`` largest and the ``trim_share`` smallest
                          (arXiv 1803.01498)
    """

    kind: str = "mean"
    norm_ratio_max: Annotated[float, AT_LEAST_1] = 1.0
    trim_share: Annotated[float, below(0.5)] = 0.2

    def __post_init__(self) -> None:
        require(self.kind in MERGE_KINDS, "merge", self.kind, f"one of {', '.join(MERGE_KINDS)}")
        check_bounds(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Scales a contribution down by its staleness: by exp(-``alpha`` staleness), by a cosine that reaches 0 at
    ``cutoff`` (both CGAD's, arXiv 2605.09126), and by (1 + staleness)^-``power`` (FedBuff's, arXiv 2106.06639).

    A weight only shifts influence between contributions; a gate makes the step itself smaller.  CGAD's form of the gate
    is that of its abstract.  With 0 for all three the gate changes nothing.
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    cutoff: Natural = 0
    power: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, "gate_")

    def factor(self, staleness: int) -> float:
        """Return the factor on a contribution ``staleness`` versions old: 1 at 0, 0 from the cutoff on."""
        if self.cutoff and staleness >= self.cutoff:
            return 0.0
        gate = 0.5 * (1 + cos(pi * staleness / self.cutoff)) if self.cutoff else 1.0
        return float(gate * exp(-self.alpha * staleness) * (1 + staleness) ** -self.power)


MEAN = MergeOptions()
OPEN = Gate()
PAIRWISE = ("rda", "geometric_median")
"""The kinds that need the products of different contributions."""
BY_TENSOR = ("rda", "clamp")
"""The kinds that merge each tensor on its own; the others compare whole fragments."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The values ``[start, stop)`` of a fragment, which are corrected on their own: a piece of a parameter, or all.

    Segments with one ``group`` are compared and weighted as a whole; all have the same ``options``.
    """

    start: int
    stop: int
    options: MergeOptions
    group: int = 0


@dataclass(frozen=True, slots=True)
class Merging:
    """How contributions are merged: ``segments`` partition the fragment in order; each contribution is corrected, and
    then multiplied by its factor in ``factors``, if given.  All contributions must then have a positive weight.
    """

    segments: Sequence[Segment]
    factors: Sequence[float] | None = None
    correction: Correction = UNCORRECTED


def blend(
    options: MergeOptions,
    weights: Sequence[float],
    products: Sequence[Sequence[float]],
    factors: Sequence[float] | None = None,
) -> tuple[list[float], float]:
    """Return (weights', scale): the merge is ``scale`` times the mean with ``weights'``; fp64 throughout.

    ``weights`` are positive, ``products[i][j]`` is the inner product of contributions i and j; only ``rda`` and
    ``geometric_median`` read those with i != j.  Where a rule has no result, as for directions that cancel each other,
    the mean is used.  With ``factors``, at least one above 0, each contribution is first multiplied by its factor.
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
    if options.kind == "rda":
        changed = [weight / length if length else 0.0 for weight, length in zip(weights, lengths, strict=True)]
        squared = sum(one * other * products[i][j] for i, one in enumerate(changed) for j, other in enumerate(changed))
        together = sqrt(max(0.0, squared))
        if together <= DEGENERATE * sum(weights):
            return list(weights), 1.0
        length = sum(weight * length for weight, length in zip(weights, lengths, strict=True)) / sum(weights)
        return changed, length * sum(changed) / together
    if options.kind == "geometric_median":
        return _geometric_median(weights, products, lengths), 1.0
    usual = median_low(lengths) if options.kind == "clamp" else median(lengths)
    if options.kind == "mean" or (usual == 0 and options.kind != "clamp"):
        return list(weights), 1.0
    scales = [usual / length if length else 1.0 for length in lengths]
    if options.kind != "normalise":  # clip and clamp only shorten.
        most = options.norm_ratio_max if options.kind == "clip" else 1.0
        scales = [min(1.0, most * scale) for scale in scales]
    changed = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
    return changed, sum(changed) / sum(weights)


def _geometric_median(
    weights: Sequence[float], products: Sequence[Sequence[float]], lengths: Sequence[float]
) -> list[float]:
    """Return the weights of the geometric median by Weiszfeld's iteration, whose iterates are all means of the
    contributions.  Distances have a lower bound, so that no iterate at a contribution causes a division by zero."""
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


def merge_mean(contributions: Sequence[tuple[float, Sequence[Tensor]]]) -> Tensor:
    """Return the weighted mean of the sites' contributions, ``sum(w_i d_i) / sum(w_i)``, flat fp32.

    ``contributions`` holds (weight, updates) per site, already in site order; the updates of one site are added in
    sequence order into its d.  A site of weight 0, or without updates, is dropped before its values are read, so that
    even its NaN has no effect (0 * NaN is NaN).  ``ValueError`` for a negative or non-finite weight, or when no site is
    left.

    It is a running mean (Welford 1962): with W the sum of the weights so far, ``m += (w_i / W) (d_i - m)``.  So equal d
    give d bit for bit, whatever the weights, and memory holds only m and one temporary.  Each operation rounds by
    itself (no fused multiply-add), so the bits depend neither on the machine nor on the number of threads.
    """
    mean: Tensor | None = None
    for share, updates in shares(contributions):
        contribution = reduce(torch.add, updates)
        if mean is None:
            mean = contribution.clone()
        else:
            towards = torch.sub(mean, contribution)
            # Subtract rather than add, to keep the sign of a zero too: -0 - 0 is -0, but -0 + 0 is +0.
            mean.sub_(towards.mul_(share))
    assert mean is not None
    return mean


def shares(contributions: Iterable[tuple[float, Sequence[T]]]) -> list[tuple[float, Sequence[T]]]:
    """Return (``w_i / W``, updates) of the counted sites in their order, W the sum of the weights up to that site."""
    total, found = 0.0, []
    for weight, updates in counted(contributions):
        total += weight
        found.append((weight / total, updates))
    return found


def counted(contributions: Iterable[tuple[float, Sequence[T]]]) -> list[tuple[float, Sequence[T]]]:
    """Return the contributions that count; :func:`merge_mean` defines which are dropped and which are refused."""
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

    ``contributions`` holds (weight, values), each weight positive, in site order.  Of k contributions ``trim_share`` k,
    rounded down, are left out at either end; the others keep their weights.  Equal values are ordered by site.
    """
    values = torch.stack([each for _, each in contributions])
    weights = torch.tensor([weight for weight, _ in contributions], dtype=torch.float64)
    ordered, order = values.sort(dim=0, stable=True)
    less = int(trim_share * len(contributions))
    total = weights[order[less]]
    out.copy_(ordered[less])
    for rank in range(less + 1, len(contributions) - less):
        weight = weights[order[rank]]
        total.add_(weight)
        out.sub_(torch.sub(out, ordered[rank]).mul_((weight / total).float()))
    return out
