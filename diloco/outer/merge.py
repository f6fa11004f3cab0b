"""The merge of a round: one pseudo-gradient out of those of several sites."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

T = TypeVar("T")


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
    """Return (``w_i / W``, updates) of the sites that count, in their order, with W the weights up to and with theirs.

    See :func:`merge_mean` for who is dropped and what is refused.
    """
    total = 0.0
    counted = []
    for weight, updates in contributions:
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"weight is {weight!r}: must be finite and not negative")
        if weight == 0 or not updates:
            continue
        total += weight
        counted.append((weight / total, updates))
    if not counted:
        raise ValueError("no contribution has a positive weight")
    return counted


def _add_up(updates: Sequence[Tensor], out: Tensor) -> Tensor:
    out.copy_(updates[0])
    for update in updates[1:]:
        out.add_(update)
    return out
