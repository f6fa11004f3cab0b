"""How much a site's contribution counts in a merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


SHARE_LEAST = 1e-6
"""Of a round, for a site beside which others claim to be a million times as much: its step is still one."""


def raw_weight(rule: str, tokens: int, steps: int) -> float:
    """The weight before normalising: ``tokens`` and ``steps`` since the fragment's previous update, both positive.

    ``tokens2_per_step`` is Decoupled DiLoCo's tokens times tokens per step (arXiv 2604.21428): a site counts by how
    much it read and by how large its batches were.  ``uniform`` is DiLoCo's plain mean (arXiv 2311.08105, alg. 1).
    """
    assert tokens > 0, tokens
    assert steps > 0, steps
    if rule == "tokens2_per_step":
        return tokens * tokens / steps
    if rule == "tokens":
        return float(tokens)
    assert rule == "uniform", rule
    return 1.0


def of_its_age(staleness: int, power: float) -> float:
    """What a contribution so many versions old counts of its weight: (1 + staleness)^-power (arXiv 1903.03934,
    polynomial).

    The weights of a merge still sum to 1: this takes from the old what it gives to the new, and makes no step smaller.
    """
    assert staleness >= 0, staleness
    return float((1 + staleness) ** -power)


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """``weights`` divided by their sum, so that they sum to 1 to within 1e-12."""
    total = sum(weights)
    assert total > 0 or not weights, weights
    return tuple(weight / total for weight in weights)


def share(merged: Collection[str], full_round: Mapping[str, float]) -> float:
    """Which part of a full round the sites ``merged`` are, above 0 and at most 1; exactly 1 for all of them.

    ``full_round`` has the usual weight of an update of each site that the round could have had.  A step that is taken
    by this share moves the model by each site's pseudo-gradient as far as a step of all of them does, so the result
    does not depend on which sites arrive together, as long as their updates are of the usual length.  Weights and not
    only tokens, because that is what a site counts in a merge with others; the usual ones, because an update of two
    periods is as much longer already.
    """
    if not full_round:
        return 1.0
    part = sum(weight for name, weight in full_round.items() if name in merged) / sum(full_round.values())
    return max(SHARE_LEAST, part)
