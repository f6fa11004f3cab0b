"""What a site has learned and not yet sent, as a gradient points: uphill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def pseudo_gradient(base: Tensor, local: Tensor, in_flight: Sequence[Tensor]) -> Tensor:
    """Return ``base - local - in_flight[0] - in_flight[1] - ...``, in this order, as a new tensor.

    ``base`` is the version the site measures from, ``local`` where it is now, ``in_flight`` the decoded updates it
    has sent and whose fate it does not know, in sequence order; all flat fp32 of one shape.  With nothing in flight
    this is DiLoCo's pseudo-gradient (arXiv 2311.08105, algorithm 1).
    """
    remainder = torch.sub(base, local)
    for sent in in_flight:
        remainder.sub_(sent)
    return remainder


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite; one pass, no temporary of the tensor's size."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)  # NaN is passed on by both
    return bool(torch.isfinite(low) & torch.isfinite(high))
