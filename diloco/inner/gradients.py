"""The norm of all gradients of a site, wherever their parts lie, and its bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from diloco.inner.pieces import is_cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.inner.parallel import SiteGroup

STEADY = 1e-6
"""What torch adds to a norm before it divides by it."""


def clip(parameters: Sequence[Tensor], bound: float, group: SiteGroup | None) -> float:
    """Scale the gradients to a global 2-norm of at most ``bound``, and return what it was; the same on every rank.

    Where parameters are sharded every rank gives the squares of what it holds, each shared by as many ranks as hold
    the same: one collective, whatever the layout.
    """
    if group is None or not any(is_cut(parameter) for parameter in parameters):
        return float(clip_grad_norm_(parameters, bound))
    by_holders: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_holders.setdefault(_holders(parameter.grad, group.world), []).append(_local(parameter.grad))
    mine = sum(float(get_total_norm(parts)) ** 2 / holders for holders, parts in by_holders.items())
    norm = math.sqrt(group.all_reduce_sum([mine])[0])
    factor = min(1.0, bound / (norm + STEADY))
    with torch.no_grad():
        for parts in by_holders.values():
            torch._foreach_mul_(parts, factor)
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if is_cut(gradient) else gradient


def _holders(gradient: Tensor, world: int) -> int:
    """How many ranks hold the same part of ``gradient``."""
    if not is_cut(gradient):
        return world
    mesh, parts = gradient.device_mesh, 1
    for side, placement in enumerate(gradient.placements):
        assert not placement.is_partial(), "a gradient is summed by the time that it is clipped"
        parts *= 1 if placement.is_replicate() else mesh.size(side)
    return world // parts
