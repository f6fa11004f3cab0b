"""How much a site's contribution counts in a merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
