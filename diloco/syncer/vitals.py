"""The vital signs of a decoded update, measured block by block, as the blocks come.

Sums are made in fp64: the square of a value that fp32 holds may be one that it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.codec.sums import Sums

LARGEST = 2.0**100
"""Of any value of an update.  Finite ones beyond it could make a sum overflow, and the honest updates of that round
would be refused together with the one at fault; no training comes near."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """``norm`` is 0 and ``cosine`` None where the values are not ``finite``, that is, within ``LARGEST``."""

    finite: bool
    norm: float = 0.0
    cosine: float | None = None


class Measuring:
    """Takes the blocks of one update in order."""

    def __init__(self) -> None:
        self._finite = True
        self._squares = self._products = self._momentum_squares = 0.0

    def add(self, sums: Sums) -> None:
        """The next block has these ``sums``, against the same part of the momentum if there is one.

        An update may take longer on its way than a version: then its blocks are measured against the momentum as it was
        when they came, each against a later one, and the cosine is that to the vector made of those parts.
        """
        if not self._finite:
            return
        if sums.largest > LARGEST:
            self.not_finite()
            return
        self._squares += sums.squares
        self._products += sums.products
        self._momentum_squares += sums.against_squares

    def not_finite(self) -> None:
        """Of what is not finite nothing else is said."""
        self._finite = False

    def vitals(self) -> Vitals:
        """What was found in all blocks; where either vector is nothing there is no cosine."""
        if not self._finite:
            return Vitals(finite=False)
        lengths = sqrt(self._squares) * sqrt(self._momentum_squares)
        return Vitals(True, sqrt(self._squares), self._products / lengths if lengths > 0 else None)
