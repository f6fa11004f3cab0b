"""Two levels for the magnitudes of a group: what int2 makes of a block, and topk of the values that it keeps.

A value is big or it is not, by a rule of the codec's own under which never all of a group are.  With ``units``::

    low   = mean of those that are not big, high = mean of those that are, each as ``units.mean_scale`` makes it
    x'    = high where big, low otherwise, with the sign of x (that of 0 is plus)

Where none is big, or high is no larger than low once both are bf16, high is 0 and nothing is big.

A field has 2 bits: 1 for big, 2 for a negative x'.  No two (levels, fields) mean the same values.  Refused on decoding:
a level that is no normal bf16 or 0; a high that is neither 0 nor above low; a high of 0 with a big value, and another
with none or with nothing else; a sign on a value of 0.

The mean of a set is the point with the least squares to it, so the sum of squares of a group shrinks by
``count mean**2`` or more (less what is cut off the levels, at most 2**-14 of it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import DecodeError
from diloco.codec.units import check_scales, mean_scale, scale_values

if TYPE_CHECKING:
    from torch import Tensor

FIELD_BITS = 2
LEVELS_BYTES = 4
BIG, NEGATIVE = 1, 2


def two_levels(found: Tensor, top: Tensor, is_big: Tensor, counts: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels (groups, 2) as int32, the upper 16 bits of fp32, and the fields (groups, values) as uint8.

    ``found`` are units (int64, 0 behind a group's ``counts``) and ``top`` those of the group; ``is_big`` and
    ``negative`` say so of each value.
    """
    num_big = is_big.sum(dim=1)
    sum_big = torch.where(is_big, found, 0).sum(dim=1)
    low = mean_scale(found.sum(dim=1) - sum_big, counts - num_big, top)
    high = mean_scale(sum_big, num_big.clamp(min=1), top)
    high = torch.where(high > low, high, 0)
    is_big = is_big & (high > 0)[:, None]
    signs = negative & (is_big | (low > 0)[:, None])
    return torch.stack([low, high], dim=1), is_big.to(torch.uint8) * BIG + signs.to(torch.uint8) * NEGATIVE


def check_levels(levels: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
    """Raise ``DecodeError`` for what ``two_levels`` never makes."""
    check_scales(levels, name)
    low, high = levels[:, 0], levels[:, 1]
    is_big = (fields & BIG) > 0
    num_big = is_big.sum(dim=1)
    two = (high > low) & (num_big > 0) & (num_big < counts)
    if not bool((two | ((high == 0) & (num_big == 0))).all()):
        raise DecodeError(f"{name} payload holds levels that are not those of its values")
    if bool(((fields == NEGATIVE) & (low == 0)[:, None]).any()):
        raise DecodeError(f"{name} payload holds a sign without a value")


def level_values(levels: Tensor, fields: Tensor) -> Tensor:
    """Return what checked levels and fields say, fp32."""
    both = scale_values(levels)
    values = torch.where((fields & BIG) > 0, both[:, 1:], both[:, :1])
    return torch.where((fields & NEGATIVE) > 0, -values, values)
