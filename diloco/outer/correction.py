"""What becomes of a contribution that does not go where the outer momentum goes, before it is merged.

As the merge does, it goes by inner products: from those of a tensor follow the two numbers that correct it, and from
these the products of what is corrected, so that it need not be there yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    Change = tuple[float, float]

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
