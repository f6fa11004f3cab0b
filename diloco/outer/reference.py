"""Naive lock-step DiLoCo, the definition that everything else is tested against.

No network, no codec, no overlap, one fragment: read this function to know what the system computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def reference_diloco(
    theta0: Tensor,
    sites: Sequence[Callable[[Tensor, int], Tensor]],
    weights: Sequence[float],
    rounds: int,
    optimizer: OuterOptimizerOptions,
) -> list[Tensor]:
    """Run ``rounds`` rounds of DiLoCo (arXiv 2311.08105, algorithm 1) and return the versions 0 to ``rounds``.

    ``theta0`` is flat fp32, version 0.  ``sites`` are in site order; ``site(local, round_index)`` trains its own copy
    ``local`` for the round's inner steps and returns the result, flat fp32 of the same shape.  Each site keeps the
    state of its inner optimizer from round to round.  ``weights`` has one weight per site.
    """
    versions = [theta0]
    state = NOTHING
    for round_index in range(rounds):
        theta = versions[-1]
        contributions = []
        for site, weight in zip(sites, weights, strict=True):
            local = site(theta.clone(), round_index)
            contributions.append((weight, [pseudo_gradient(theta, local, in_flight=[])]))
        g = merge_mean(contributions)
        theta, state = outer_step(theta, g, state, optimizer)
        versions.append(theta)
    return versions
