"""One version of a fragment in one pass: decode the updates, mean, outer step, encode the down-link, follow it.

Bit for bit ``merge_mean``, ``outer_step`` and ``publish`` one after the other, but by ranges of about ``RANGE_VALUES``
values: of the updates and of what lies between the stages only a range is ever there, and it stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import lcm, sqrt

import torch
from torch import Tensor

from diloco.codec.contract import Add, Codec, NonFiniteError, Towards, accumulate_into
from diloco.codec.sums import SUM_BLOCK, sum_of_products
from diloco.outer.merge import shares
from diloco.outer.optimizer import OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import is_finite

RANGE_VALUES = 128 * 1024

Payload = tuple[Codec, bytes | memoryview]
"""An update as it came, and the codec that reads it."""
Range = tuple[int, int]
Spread = Callable[[Callable[[Range], float], Iterable[Range]], Iterable[float]]
"""``map`` or one that uses threads, as ``ThreadPoolExecutor.map``: it keeps the order and passes an error on."""


@dataclass(frozen=True, slots=True)
class State:
    """What the syncer holds of a fragment, flat fp32; ``momentum`` is None before the first step and without any."""

    theta: Tensor
    published: Tensor
    momentum: Tensor | None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The next version; ``payload`` is its down-link, ``norm`` the L2 norm of the merged pseudo-gradient."""

    state: State
    payload: memoryview
    norm: float


def outer_pass(
    contributions: Iterable[tuple[float, Sequence[Payload]]],
    state: State,
    optimizer: OuterOptimizerOptions,
    codec: Codec,
    spread: Spread = map,
) -> Stepped:
    """Return the version after ``state``, in new tensors; ``state`` stays as it is.

    ``contributions`` holds (weight, updates) per site in site order, as ``merge_mean`` takes them; ``codec`` is that
    of the down-link.  ``NonFiniteError`` when the new theta or what would be published is not finite, ``DecodeError``
    for a payload that nobody encoded, ``ValueError`` for weights that make no mean.  ``spread`` may give ranges to
    several threads; no bit, of the norm neither, depends on it.

    Memory: the results (three fragments and a payload), every payload that has an entropy stage once more without it,
    and about three ranges for each thread.
    """
    numel = state.theta.numel()
    sites = [
        (share, [each.opened(payload, numel) for each, payload in updates]) for share, updates in shares(contributions)
    ]
    lossless = codec.lossless
    new = State(
        torch.empty_like(state.theta),
        torch.empty_like(state.published),
        None if optimizer.momentum == 0 else torch.empty_like(state.theta),
    )
    plain = codec.plain
    payload = torch.empty(plain.payload_bytes(numel), dtype=torch.uint8)

    def one_range(bounds: Range) -> float:
        part = slice(*bounds)
        merged = _mean(sites, numel, bounds)
        momentum = None if state.momentum is None else state.momentum[part]
        theta, following = outer_step(state.theta[part], merged, momentum, optimizer)
        if not is_finite(theta):
            raise NonFiniteError("theta is not finite after the outer step")
        new.theta[part] = theta
        if new.momentum is not None and following is not None:
            new.momentum[part] = following
        published = new.published[part]
        if lossless:
            plain.encode_into(theta, payload, published, start=bounds[0], numel=numel)
        else:
            before = state.published[part]
            plain.encode_difference(theta, before, payload, published, start=bounds[0], numel=numel)
            if not is_finite(published.add_(before)):
                raise NonFiniteError("what would be published is not finite")
        return sum_of_products(merged, merged)

    squares = 0.0
    for part in spread(one_range, ranges(numel, [plain, *(each for _, updates in sites for each, _ in updates)])):
        squares += part
    return Stepped(new, codec.closed(payload), sqrt(squares))


def ranges(numel: int, codecs: Iterable[Codec]) -> list[Range]:
    """Cut ``numel`` values where each of the codecs can be cut, about every ``RANGE_VALUES``.

    Blocks whose sizes share no factor make the ranges longer, up to the whole.
    """
    step = lcm(SUM_BLOCK, *(codec.granule for codec in codecs))
    step *= max(1, RANGE_VALUES // step)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def _mean(sites: Sequence[tuple[float, Sequence[tuple[Codec, memoryview]]]], numel: int, bounds: Range) -> Tensor:
    """The range of ``merge_mean``."""
    start, stop = bounds
    mean: Tensor | None = None
    for share, updates in sites:
        if mean is not None and len(updates) == 1:
            codec, payload = updates[0]
            codec.decode_into(payload, numel, mean, start, Towards(share))
            continue
        contribution = torch.empty(stop - start)
        for index, (codec, payload) in enumerate(updates):
            codec.decode_into(payload, numel, contribution, start, Add() if index else None)
        if mean is None:
            mean = contribution
        else:
            accumulate_into(mean, contribution, Towards(share))
    assert mean is not None
    return mean
