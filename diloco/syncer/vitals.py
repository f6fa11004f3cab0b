"""The vital signs of a decoded update, measured in one pass over its values, block by block.

Sums are made in fp64: the square of a value that fp32 holds may be one that it does not.  Memory: the fp64 copies of
one block of the update and one of the momentum, whatever the fragment's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 2.0**100
"""Of any value of an update.  Finite ones beyond it could make a sum overflow, and the honest updates of that round
would be refused together with the one at fault; no training comes near."""
BLOCK = 1 << 18
"""Values measured at a time."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """``norm`` is 0 and ``cosine`` None where the values are not ``finite``, that is, within ``LARGEST``."""

    finite: bool
    norm: float = 0.0
    cosine: float | None = None


def measured(values: Tensor, momentum: Tensor | None) -> Vitals:
    """Measure ``values`` against ``momentum``, both flat fp32; where either is nothing there is no cosine."""
    squares = products = momentum_squares = 0.0
    for start in range(0, values.numel(), BLOCK):
        block = values[start : start + BLOCK]
        least, most = torch.aminmax(block)
        if not bool((least >= -LARGEST) & (most <= LARGEST)):  # False for a NaN as well.
            return Vitals(finite=False)
        exact = block.double()
        squares += float(torch.dot(exact, exact))
        if momentum is not None:
            against = momentum[start : start + BLOCK].double()
            products += float(torch.dot(exact, against))
            momentum_squares += float(torch.dot(against, against))
    lengths = sqrt(squares) * sqrt(momentum_squares)
    return Vitals(True, sqrt(squares), products / lengths if lengths > 0 else None)
