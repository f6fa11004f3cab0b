"""The numbers that stand for tensors in the simulator: integers, so that no error can hide in rounding.

A fragment is a ``Value`` of three integers.  The first is what a site has learned: each inner step adds a random
amount, and the codec rounds it coarsely.  The second counts tokens: each step adds its tokens and no codec rounds it,
so that checkers can compare an update's content with the tokens it declares.  The third is 1 in a site's own random
initialisation, before it adopts a version, and 0 in every version: no update may contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Value = tuple[int, int, int]
ZERO: Value = (0, 0, 0)
COLD: Value = (10**12 + 7, 10**9 + 7, 1)
WEIGHT_UNIT = 1 << 53
PARTS = 1_000_000
"""The resolution of an outer step's ``share``: millionths."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Outer SGD with heavy-ball momentum, in tenths: ``lr_tenths`` 10 and ``momentum_tenths`` 0 is the plain mean.

    ``published_quantum`` is the rounding step of the down-link's codec; 1 is lossless.
    """

    lr_tenths: int = 10
    momentum_tenths: int = 0
    published_quantum: int = 1


def plus(a: Value, b: Value) -> Value:
    """``a + b``."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def minus(a: Value, b: Value) -> Value:
    """``a - b``."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def total(values: Iterable[Value]) -> Value:
    """Return the sum of ``values``."""
    result = ZERO
    for value in values:
        result = plus(result, value)
    return result


def quantised(value: Value, quantum: int) -> Value:
    """Encode and decode ``value``: round its first number to a multiple of ``quantum``."""
    return ((value[0] + quantum // 2) // quantum * quantum, value[1], value[2])


def merged(contributions: Sequence[tuple[float, Sequence[Value]]]) -> Value:
    """Return the weighted mean of each contribution's sum of updates.

    Equal contributions give exactly that contribution, and a single one gives itself.
    """
    weights = [max(1, int(weight * WEIGHT_UNIT)) for weight, _ in contributions]
    sums = [total(updates) for _, updates in contributions]
    whole = sum(weights)
    first, second, third = (
        sum(weight * each[place] for weight, each in zip(weights, sums, strict=True)) // whole for place in range(3)
    )
    return (first, second, third)


def outer_step(
    theta: Value, momentum: Value, gradient: Value, rule: OuterRule, share: float = 1
) -> tuple[Value, Value]:
    """Return ``theta`` and ``momentum`` after an outer step down ``gradient``, scaled by ``share`` to the millionth."""
    first, second, third = (was * rule.momentum_tenths // 10 + now for was, now in zip(momentum, gradient, strict=True))
    kept, parts = (first, second, third), rule.lr_tenths * max(1, round(share * PARTS))
    return minus(theta, (first * parts // (10 * PARTS), second * parts // (10 * PARTS), third)), kept


def blended(local: Value, new: Value, alpha_tenths: int) -> Value:
    """Return ``new + α (local - new)``."""
    first, second, third = (b + (a - b) * alpha_tenths // 10 for a, b in zip(local, new, strict=True))
    return (first, second, third)
