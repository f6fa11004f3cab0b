"""Magnitudes as whole numbers, so that a mean of them is the same on every machine and in every order of summation.

A group of values (a block, or a chunk of top-k) has a ``top``, the largest biased exponent of fp32 in it.  Its unit is
``2**(top - 127 - 23)``, and a value of it is ``u`` units, with its significand as a whole number of 24 bits::

    u = significand >> (top - exponent)          which is at most 2**24 - 1; 0 for a subnormal

A sum of such numbers is exact.  The mean of ``count`` of them, times a fraction where a codec wants one, is rounded up
to a whole number m, so that it is 0 only if all are.  As a scale it is cut to bf16::

    scale = 0                                                 if m is 0
          = max(bf16_down(m units), 2**-126)        otherwise; bf16_down cuts off the low 16 bits of the fp32 number

m is below 2**24, an fp32 number therefore, and never above the largest value of the group: the scale is finite.  It is
never subnormal, so a kernel that flushes subnormals to zero reads the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import DecodeError, NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

MAGNITUDE_BITS = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
SIGNIFICAND_BITS = 0x007FFFFF
HIDDEN_BIT = 0x00800000
EXPONENT_MAX = 254
EXPONENT_SHIFT = 23
SCALE_MIN_BITS = 0x0080  # the smallest normal bf16
SCALE_MAX_BITS = 0x7F7F


def magnitudes(values: Tensor, name: str) -> Tensor:
    """Return the bits of |x| as int32, which are in the order of |x|; ``NonFiniteError`` for a NaN or an infinity."""
    found = values.view(torch.int32) & MAGNITUDE_BITS
    if found.numel() and int(found.max()) >= INFINITY_BITS:
        raise NonFiniteError(f"{name} was to encode a NaN or an infinity")
    return found


def is_negative(values: Tensor) -> Tensor:
    """Return where x is below 0, which -0 is not, subnormals included wherever the machine flushes them."""
    bits = values.view(torch.int32)
    return (bits < 0) & ((bits & MAGNITUDE_BITS) != 0)


def units(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of ``magnitudes`` (groups, values) as int32 units, and the groups' ``top``."""
    exponents = found >> EXPONENT_SHIFT
    top = exponents.amax(dim=1)
    significands = torch.where(exponents > 0, (found & SIGNIFICAND_BITS) | HIDDEN_BIT, 0)
    return significands >> (top[:, None] - exponents).clamp_(max=31), top


def mean_scale(sums: Tensor, counts: Tensor, top: Tensor) -> Tensor:
    """Return the scale of each group, the upper 16 bits of its fp32 as int32, for ``sums / counts`` (int64) units."""
    means = -(-sums // counts)
    bits = means.to(torch.float32).view(torch.int32)
    # m as an fp32 number has the exponent 127 for one unit; the unit's own is top - 23.
    shifted = (bits >> 16) + ((top - 127 - EXPONENT_SHIFT) << 7)
    return torch.where(means > 0, shifted.clamp(min=SCALE_MIN_BITS), 0)


def scale_values(scale_bits: Tensor) -> Tensor:
    """Return scales (int32, the upper 16 bits) as fp32."""
    return (scale_bits << 16).view(torch.float32)


def check_scales(scale_bits: Tensor, name: str) -> None:
    """Refuse what ``mean_scale`` never makes: NaN, infinity, negatives (with -0) and subnormals."""
    legal = (scale_bits == 0) | ((scale_bits >= SCALE_MIN_BITS) & (scale_bits <= SCALE_MAX_BITS))
    if not bool(legal.all()):
        raise DecodeError(f"{name} payload holds a scale that is negative, subnormal or not finite")
