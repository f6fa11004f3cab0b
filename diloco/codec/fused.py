"""One version of a fragment in one pass: decode the updates, mean, outer step, encode the down-link, follow it.

Bit for bit ``merge_mean``, ``outer_step`` and ``publish`` one after the other, but by ranges of about ``RANGE_VALUES``
values: of the updates and of what lies between the stages only a range is ever there, and it stays in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import lcm, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.buffers import Buffers
from diloco.codec.casts import Fp32Codec
from diloco.codec.contract import Codec, NonFiniteError, Towards, accumulate_into, bytes_of, check_values
from diloco.codec.digests import hasher
from diloco.codec.merging import Merging, decoded, merge_into
from diloco.codec.native import Kernels, address, kernels, refuse, tile
from diloco.codec.structures import SUM_BLOCK, Layout, OuterJob, Place, Rule, Status, Update
from diloco.codec.sums import sum_of_products
from diloco.outer.merge import counted, shares
from diloco.outer.optimizer import TENSORS_KEPT, OuterOptimizerOptions, OuterState, linear_part, outer_step
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    import ctypes

RANGE_VALUES = 128 * 1024
RANGES_AT_ONCE = 4
"""That a thread is given where there are kernels: to hand it one takes as long as a part of its arithmetic."""
THETA = "theta is not finite after the outer step"
PUBLISHED = "what would be published is not finite"
RULES = MappingProxyType({"sgd": Rule.WITHOUT_MOMENTUM, "heavy_ball": Rule.HEAVY_BALL, "nesterov": Rule.NESTEROV})
"""The outer optimizers of which a whole step has a kernel."""
LINEAR = ("heavy_ball", "nesterov", "nesterov_ema")
"""Those of which a part of a step has one, beside sgd."""

Payload = tuple[Codec, bytes | memoryview]
"""An update as it came, and the codec that reads it."""
Range = tuple[int, int]
Ranges = Sequence[Range]
Spread = Callable[[Callable[[Ranges], list[float]], Iterable[Ranges]], Iterable[list[float]]]
"""``map`` or one that uses threads, as ``ThreadPoolExecutor.map``: it keeps the order and passes an error on."""


@dataclass(frozen=True, slots=True)
class State:
    """What the syncer holds of a fragment, flat fp32; ``optimizer`` is what its outer optimizer remembers."""

    theta: Tensor
    published: Tensor
    optimizer: OuterState


@dataclass(frozen=True, slots=True)
class Stepped:
    """The next version; ``payload`` is its down-link, ``norm`` the L2 norm of the merged pseudo-gradient.

    ``digest`` is that of what is published, where it was asked for.
    """

    state: State
    payload: memoryview
    norm: float
    digest: str


def outer_pass(
    contributions: Iterable[tuple[float, Sequence[Payload]]],
    state: State,
    optimizer: OuterOptimizerOptions,
    codec: Codec,
    spread: Spread = map,
    fast: Callable[[], Kernels | None] = kernels,
    buffers: Buffers | None = None,
    like: str | None = None,
    merging: Merging | None = None,
    share: float = 1,
) -> Stepped:
    """Return the version after ``state``, in tensors of its own out of ``buffers``; ``state`` stays as it is.

    ``contributions`` holds (weight, updates) per site in site order, as ``merge_mean`` takes them; ``codec`` is that
    of the down-link.  ``NonFiniteError`` when the new theta or what would be published is not finite, ``DecodeError``
    for a payload that nobody encoded, ``ValueError`` for weights that make no mean.  ``spread`` may give ranges to
    several threads; no bit, of the norm neither, depends on it, nor on ``fast``, which says where the kernels are.
    The digest is in the form of ``like``, made here of what is ready while those threads make the rest; None: there is
    none.  ``merging`` says how contributions are merged where that is not by the weighted mean: then they are merged
    first, and the pass is made with what came out.  ``share`` is the part of a full round that this one is, as
    ``outer_step`` takes it.

    What a lossless codec sends is theta itself: theta, what is published and the payload are then the same memory.

    Memory: the results (three fragments and a payload), every payload that has an entropy stage once more without it,
    and about three ranges for each thread.
    """
    numel = state.theta.numel()
    for each in (state.theta, state.published, *state.optimizer.tensors.values()):
        assert each.shape == (numel,)
        check_values(each)
    sites = [
        (weight, [each.opened(payload, numel) for each, payload in updates])
        for weight, updates in counted(contributions)
    ]
    room = buffers if buffers is not None else Buffers(0)
    if merging is not None:
        merged = room.values(numel)
        read = [codec for _, updates in sites for codec, _ in updates]
        merge_into(merged, sites, merging, ranges(numel, read), spread, state.optimizer.momentum)
        sites = [(1.0, [(Fp32Codec(), bytes_of(merged))])]
    theta, lossless = room.values(numel), codec.lossless
    new = State(
        theta,
        theta if lossless else room.values(numel),
        OuterState(state.optimizer.steps + share, {name: room.values(numel) for name in TENSORS_KEPT[optimizer.kind]}),
    )
    size = codec.plain.payload_bytes(numel)
    payload = theta.view(torch.uint8) if lossless else room.raw(size)
    assert payload.numel() == size, f"{codec.name} is lossless and does not send the values as they are"
    work = _Work(shares(sites), state, new, optimizer, share, codec.plain, payload)
    found, codecs = fast(), work.codecs()
    some_ranges, at_once, cut = work.plain_ranges, 1, ranges(numel, codecs)
    if (
        found is not None
        and work.rule() is not None
        and found.fits(*(each.layout for each in codecs), granule=SUM_BLOCK)
    ):
        some_ranges, at_once = functools.partial(work.native_ranges, found, work.native_updates()), RANGES_AT_ONCE
    squares, told = 0.0, None if like is None else hasher(like)
    some = [cut[at : at + at_once] for at in range(0, len(cut), at_once)]
    for ready, parts in zip(some, spread(some_ranges, some), strict=True):
        for part in parts:
            squares += part
        if told is not None:
            told.update(bytes_of(new.published[ready[0][0] : ready[-1][1]]))
    return Stepped(new, codec.closed(payload), sqrt(squares), "" if told is None else told.text())


def ranges(numel: int, codecs: Iterable[Codec], about: int | None = None) -> list[Range]:
    """Cut ``numel`` values where each of the codecs can be cut, about every ``about``, by default ``RANGE_VALUES``.

    Blocks whose sizes share no factor make the ranges longer, up to the whole.
    """
    step = lcm(SUM_BLOCK, *(codec.granule for codec in codecs))
    step *= max(1, (about or RANGE_VALUES) // step)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


@dataclass(frozen=True, slots=True)
class _Work:
    """One pass: what it reads, and the memory that it fills range by range."""

    sites: Sequence[tuple[float, Sequence[tuple[Codec, memoryview]]]]
    state: State
    new: State
    optimizer: OuterOptimizerOptions
    share: float
    codec: Codec
    payload: Tensor

    def rule(self) -> Rule | None:
        """Of the kernels; None: torch makes the step."""
        kind = self.optimizer.kind
        return Rule.PART if self.share < 1 and kind in LINEAR else RULES.get(kind)

    def codecs(self) -> list[Codec]:
        """All that are read or written."""
        return [self.codec, *(codec for _, updates in self.sites for codec, _ in updates)]

    def plain_ranges(self, some: Ranges) -> list[float]:
        """Ranges on torch, the definition; of each the sum of the squares of its merged pseudo-gradient."""
        return [self._plain_range(bounds) for bounds in some]

    def _plain_range(self, bounds: Range) -> float:
        state, new, part = self.state, self.new, slice(*bounds)
        merged = self._mean(bounds)
        theta, following = outer_step(state.theta[part], merged, state.optimizer.part(part), self.optimizer, self.share)
        if not is_finite(theta):
            raise NonFiniteError(THETA)
        new.theta[part] = theta
        for name, values in following.tensors.items():
            new.optimizer.tensors[name][part] = values
        published, before = new.published[part], state.published[part]
        numel = state.theta.numel()
        if not self.codec.lossless:
            self.codec.encode_difference(theta, before, self.payload, published, start=bounds[0], numel=numel)
            if not is_finite(published.add_(before)):
                raise NonFiniteError(PUBLISHED)
        return sum_of_products(merged, merged)

    def _mean(self, bounds: Range) -> Tensor:
        """The range of ``merge_mean``."""
        numel = self.state.theta.numel()
        mean: Tensor | None = None
        for share, updates in self.sites:
            if mean is not None and len(updates) == 1:
                codec, payload = updates[0]
                codec.decode_into(payload, numel, mean, bounds[0], Towards(share))
                continue
            contribution = decoded(updates, numel, bounds)
            if mean is None:
                mean = contribution
            else:
                accumulate_into(mean, contribution, Towards(share))
        assert mean is not None
        return mean

    def native_updates(self) -> ctypes.Array[Update]:
        """The updates as the kernels take them."""
        numel = self.state.theta.numel()
        updates = [
            Update(
                layout_of(codec).format(numel),
                address(payload),
                (0 if site else Place.IN_MEAN)
                | (0 if index else Place.OPENS_SITE)
                | (Place.ENDS_SITE if index == len(parts) - 1 else 0),
                share,
            )
            for site, (share, parts) in enumerate(self.sites)
            for index, (codec, payload) in enumerate(parts)
        ]
        return (Update * len(updates))(*updates)

    def native_ranges(self, fast: Kernels, updates: ctypes.Array[Update], some: Ranges) -> list[float]:
        """The same in one pass of the kernels for each."""
        numel, rule, options = self.state.theta.numel(), self.rule(), self.optimizer
        factors = (-options.lr * self.share, options.momentum, 0.0, 0.0)
        if rule is Rule.PART:
            part = linear_part(options, self.share)
            factors = (part.theta_by_g, part.momentum_stays, part.momentum_by_g, part.theta_by_momentum)
        job = OuterJob(
            0,
            0,
            tile(SUM_BLOCK, *(codec.granule for codec in self.codecs())),
            updates,
            len(updates),
            *(pointer(each) for each in (self.state.theta, self.state.published, self.state.optimizer.momentum)),
            *(pointer(each) for each in (self.new.theta, self.new.published, self.new.optimizer.momentum)),
            layout_of(self.codec).format(numel),
            pointer(self.payload),
            self.codec.lossless,
            rule,
            fast.fused,
            *factors,
        )
        return [self._native_range(fast, job, bounds) for bounds in some]

    def _native_range(self, fast: Kernels, job: OuterJob, bounds: Range) -> float:
        (job.start, job.stop), job.squares = bounds, 0.0
        status = fast.outer(job)
        if job.culprit >= 0:
            codec = [codec for _, parts in self.sites for codec, _ in parts][job.culprit]
            refuse(status, codec.name, layout_of(codec))
        if status is not Status.DONE:
            raise NonFiniteError(
                {Status.THETA_NOT_FINITE: THETA, Status.PUBLISHED_NOT_FINITE: PUBLISHED}.get(
                    status, f"{self.codec.name} was to encode a NaN or an infinity"
                )
            )
        return float(job.squares)


def layout_of(codec: Codec) -> Layout:
    """The layout of a codec that is known to have kernels."""
    assert codec.layout is not None, codec.name
    return codec.layout


def pointer(values: Tensor | None) -> int | None:
    """The address of a tensor, or null."""
    return None if values is None else values.data_ptr()
