"""int2 and sign: a block's values at two levels or at one, which are means of their magnitudes.

The means are those of ``units``, whole numbers that do not depend on the order of summation.

int2, two levels as ``levels`` says::

    big   = more units than 5/4 of the block's mean, rounded up

5/4 of the mean is where the best two levels meet for Gaussian data (.98 standard deviations, Max 1960), which real
pseudo-gradients are close to in blocks of this size; and a block of one large value among small ones keeps both.

sign, one level (Seide et al. 2014; with feedback and this scale: Karimireddy et al. 2019, arXiv 1901.09847)::

    scale = mean |x|
    x'    = scale, with the sign of x (that of 0 is plus)

A field has 1 bit: 1 for a negative x.  Refused on decoding: a scale that is no normal bf16 or 0, and a field that is
not 0 in a block of scale 0.

In a block that has any level but 0, a value of 0 need not decode to 0: these codecs are made for error feedback, which
takes it back.

Size: 2 bits a value and 32 a block, 2.125 with blocks of 256; 1 bit a value and 16 a block, 1.125 with blocks of 128.
Error: ``max(|x|, level)`` for each value; in a block the sum of squares shrinks by ``count mean**2`` or more (less what
is cut off the levels), so that with feedback and nothing new the residual goes to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import DecodeError
from diloco.codec.levels import FIELD_BITS, check_levels, level_values, two_levels
from diloco.codec.structures import Kind
from diloco.codec.units import check_scales, is_negative, magnitudes, mean_scale, scale_values, units

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int2Grid:
    """The points of int2."""

    @property
    def kind(self) -> Kind:
        """Its own."""
        return Kind.INT2

    @property
    def bits(self) -> int:
        """2."""
        return FIELD_BITS

    @property
    def scales_type(self) -> torch.dtype:
        """The upper 16 bits of fp32."""
        return torch.int16

    @property
    def num_scales(self) -> int:
        """Low and high."""
        return 2

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """See :class:`~diloco.codec.gridded.Grid`."""
        found, top = units(magnitudes(rows, name))
        found = found.to(torch.int64)
        is_big = found > -(-5 * found.sum(dim=1) // (4 * counts))[:, None]
        return two_levels(found, top, is_big, counts, is_negative(rows))

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """See :class:`~diloco.codec.gridded.Grid`."""
        check_levels(scales, fields, counts, name)

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """See :class:`~diloco.codec.gridded.Grid`."""
        return level_values(scales, fields)

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """The larger of |x| and its level."""
        return torch.maximum(rows.abs(), self.values(*self.encode(rows, counts, name)).abs())


@dataclass(frozen=True, slots=True)
class SignGrid:
    """The points of sign."""

    @property
    def kind(self) -> Kind:
        """Its own."""
        return Kind.SIGN

    @property
    def bits(self) -> int:
        """1."""
        return 1

    @property
    def scales_type(self) -> torch.dtype:
        """The upper 16 bits of fp32."""
        return torch.int16

    @property
    def num_scales(self) -> int:
        """1."""
        return 1

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """See :class:`~diloco.codec.gridded.Grid`."""
        found, top = units(magnitudes(rows, name))
        scales = mean_scale(found.sum(dim=1, dtype=torch.int64), counts, top)[:, None]
        return scales, (is_negative(rows) & (scales > 0)).to(torch.uint8)

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """See :class:`~diloco.codec.gridded.Grid`."""
        del counts
        check_scales(scales, name)
        if bool(((scales == 0) & (fields > 0)).any()):
            raise DecodeError(f"{name} payload holds a sign in a block of scale 0")

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """See :class:`~diloco.codec.gridded.Grid`."""
        scale = scale_values(scales)
        return torch.where(fields > 0, -scale, scale)

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """The larger of |x| and the scale."""
        return torch.maximum(rows.abs(), self.values(*self.encode(rows, counts, name)).abs())
