"""e3m0: a sign and three bits of exponent, so powers of two and nothing between them (Streaming DiLoCo, 2501.18512).

Everything is arithmetic on the bits of fp32, so every machine makes the same.  With ``bits`` those of |x|::

    level = min((bits + 2**22) >> 23, 254)      the exponent of the nearest power of two; a tie (1.5 * 2**k) goes up
    top   = largest level of the block          which is its scale, one byte
    code  = level - (top - 7)                   where that is at least 1
          = 1                                   below that, where bits >> 23 >= top - 7: x is nearer to code 1 than to 0
          = 0                                   otherwise, and wherever level is 0
    x'    = 2**(top - 7 + code - 127)           with the sign of x; 0 for the code 0

A level of 0 is less than 2**-127, which goes to 0; nothing decodes to a subnormal.  In a block the values reach over
seven powers of two, a factor of 64; what is smaller than half of the last goes to 0.

A field has 4 bits: the code in the low three, 1 for a negative x' in the fourth.  Refused on decoding: a top of 255, a
sign without a code, a code whose power is below 2**-126, and a block without the code 7 whose top is not 0 (the same
values have a smaller top), or with any where it is.

Size: 4 bits a value and 8 a block: 4.0625 with blocks of 128.  Error: |x| / 3 from 0.75 * 2**(top - 133) on, at most
``2**(top - 134)`` below that; |x| / 2 from 1.5 * 2**127 on, where the power above would be infinite.  To the nearest
in value rather than in the exponent: on data that is uniform between two powers the mean is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import DecodeError
from diloco.codec.structures import Kind
from diloco.codec.units import EXPONENT_MAX, EXPONENT_SHIFT, is_negative, magnitudes

if TYPE_CHECKING:
    from torch import Tensor

HALF_STEP = 1 << (EXPONENT_SHIFT - 1)
CODE_MAX = 7
SIGN_FIELD = 8


@dataclass(frozen=True, slots=True)
class PowerGrid:
    """The points of e3m0."""

    @property
    def kind(self) -> Kind:
        """Its own."""
        return Kind.E3M0

    @property
    def bits(self) -> int:
        """4."""
        return 4

    @property
    def scales_type(self) -> torch.dtype:
        """One byte."""
        return torch.uint8

    @property
    def num_scales(self) -> int:
        """1."""
        return 1

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """See :class:`~diloco.codec.gridded.Grid`."""
        del counts
        found = magnitudes(rows, name)
        levels = _levels(found)
        top = levels.amax(dim=1)
        lowest = top[:, None] - CODE_MAX
        codes = torch.maximum(levels - lowest, (found >> EXPONENT_SHIFT >= lowest).to(torch.int32))
        codes = torch.where(levels > 0, codes.clamp_(min=0), 0)
        signs = (is_negative(rows) & (codes > 0)).to(torch.int32) * SIGN_FIELD
        return top[:, None], (codes + signs).to(torch.uint8)

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """See :class:`~diloco.codec.gridded.Grid`."""
        del counts
        top = scales[:, 0]
        if bool((top > EXPONENT_MAX).any()):
            raise DecodeError(f"{name} payload holds a scale of 255")
        if bool((fields == SIGN_FIELD).any()):
            raise DecodeError(f"{name} payload holds a sign without a code")
        codes = fields & CODE_MAX
        if not torch.equal(codes.amax(dim=1), torch.where(top > 0, CODE_MAX, 0).to(torch.uint8)):
            raise DecodeError(f"{name} payload holds a scale that is not that of its block's largest code")
        lowest = torch.where(codes > 0, codes, CODE_MAX).amin(dim=1)
        if bool(((top > 0) & (top - CODE_MAX + lowest < 1)).any()):
            raise DecodeError(f"{name} payload holds a code below 2**-126")

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """See :class:`~diloco.codec.gridded.Grid`."""
        wide = fields.to(torch.int32)
        codes = wide & CODE_MAX
        exponents = scales - CODE_MAX + codes
        signs = (wide & SIGN_FIELD) << 28  # The fourth bit becomes the thirty-second.
        return torch.where(codes > 0, (exponents << EXPONENT_SHIFT) | signs, 0).view(torch.float32)

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """A third of |x|, half at the top of fp32, or half of the block's smallest power."""
        del counts
        top = _levels(magnitudes(rows, name)).amax(dim=1)
        smallest = torch.ldexp(torch.ones(len(rows)), (top - CODE_MAX).clamp(min=0) - 127)
        size = rows.abs()
        share = torch.where(size >= 1.5 * 2.0**127, size / 2, size / 3)
        return torch.maximum(share, smallest[:, None])


def _levels(found: Tensor) -> Tensor:
    return ((found + HALF_STEP) >> EXPONENT_SHIFT).clamp_(max=EXPONENT_MAX)
