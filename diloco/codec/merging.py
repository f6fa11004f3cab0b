"""Making the next version of a fragment from updates, by ranges: sums, merges, the outer step; reading an update.

Sums of products are fp64 and defined to the bit, because norms, cosines and the decisions by them must be the same
everywhere.  A floating-point sum depends on its order, so the order is part of the definition.  Values are taken in
blocks of ``SUM_BLOCK`` from the first one, the last block padded with zeros, and a block as rows of ``LANES``.  Each
lane adds its products row by row, beginning with +0; then the lanes' upper half is added to the lower until one is
left; then the blocks' sums are added up in order, beginning with +0.  A product of two fp32 is exact in fp64, so a
fused multiply-add changes nothing.

Merges other than the mean (:func:`merge_into`) read the updates twice, by ranges, so that memory holds at most a range
of each site.  The first pass computes the products of the contributions with each other, segment by segment, from which
``blend`` computes the weights of each group of segments; the second pass merges with these.  Where contributions are
corrected by the outer momentum, the products include those with the momentum.  Segments and ranges cut each other into
parts: sums are taken as above over each part, and added up in the order of the parts.  No bit depends on threads, nor
on whether there are kernels.

:func:`outer_pass` makes a version in one pass: it decodes the updates, takes their mean and the outer step, encodes the
down-link and adds it to the published values.  The result is bit for bit that of ``merge_mean``, ``outer_step`` and
``site_pass.publish`` one after the other, but computed by ranges of about ``RANGE_VALUES`` values: of updates and
intermediate results only a range exists at a time, and it stays in the cache.

One update (:class:`Reading`) is read by ranges in order: decoded, measured and hashed in one pass, and not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite, lcm, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.codec.base import (
    CHUNK_VALUES,
    Buffers,
    Codec,
    Hasher,
    NonFiniteError,
    PlainCodec,
    address,
    bytes_of,
    check_values,
    fold_into,
    hashing,
    kernels,
    pointer,
    refuse,
    require_finite,
    tile,
)
from diloco.codec.blocks import Fp32Codec
from diloco.codec.kernel_library import (
    LANES,
    SUM_BLOCK,
    Fold,
    Kernels,
    MeasureJob,
    OuterJob,
    Place,
    Rule,
    Status,
    Update,
)
from diloco.outer.merge import (
    PAIRWISE,
    Merging,
    Segment,
    blend,
    corrected,
    corrected_products,
    counted,
    shares,
    trimmed_mean,
)
from diloco.outer.optimizer import LINEAR, TENSORS_KEPT, OuterOptimizerOptions, OuterState, linear_part, outer_step
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping

    from diloco.outer.merge import Change

    Sites = Sequence[tuple[float, Sequence[tuple[PlainCodec, memoryview]]]]
    Blends = Mapping[int, tuple[list[float], float]]

RANGE_VALUES = 128 * 1024
Payload = tuple[Codec, bytes | memoryview]
"""The codec of an update, and the update's payload as received."""
Range = tuple[int, int]
Ranges = Sequence[Range]
Spread = Callable[..., Iterable[Any]]
"""``map``, or a threaded one such as ``ThreadPoolExecutor.map``: it keeps the order and propagates errors."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over values x and m: ``largest`` is max |x|, the others are the sums of x x, x m and m m.

    Where an x is not finite, ``largest`` is infinite and the sums are meaningless.
    """

    largest: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    against_squares: float = 0.0


@functools.cache
def torch_fuses() -> bool:
    """Return whether torch computes ``a + alpha b`` with one rounding on this machine; the kernels then do the same.

    Only with one rounding is the result below not 0.
    """
    b = torch.full((64,), 1 + 2.0**-12, dtype=torch.float32)
    a = torch.full((64,), -1 - 2.0**-11, dtype=torch.float32)
    return bool(torch.add(a, b, alpha=1 + 2.0**-12)[0] != 0)


def sum_of_products(a: Tensor, b: Tensor) -> float:
    """Return ``sum(a * b)`` of two flat fp32 tensors of one size, in the order of this module."""
    check_values(a)
    check_values(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    fast = kernels()
    if fast is not None:
        return float(fast.library.diloco_sum_products(fast.level, a.data_ptr(), b.data_ptr(), a.numel(), 0.0))
    total = 0.0  # In torch: the definition.
    for start in range(0, a.numel(), CHUNK_VALUES):
        products = a[start : start + CHUNK_VALUES].double().mul_(b[start : start + CHUNK_VALUES])
        products = torch.nn.functional.pad(products, (0, -products.numel() % SUM_BLOCK))
        rows = products.view(-1, SUM_BLOCK // LANES, LANES)
        lanes = torch.zeros(rows.shape[0], LANES, dtype=torch.float64)
        for row in range(rows.shape[1]):
            lanes.add_(rows[:, row])
        width = LANES
        while width > 1:
            width //= 2
            lanes[:, :width].add_(lanes[:, width : 2 * width])
        for block in lanes[:, 0].tolist():
            total += block
    return total


def sums_of(values: Tensor, against: Tensor | None) -> Sums:
    """Return the sums of ``values`` and ``against``, flat fp32 of one size."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not isfinite(largest):
        return Sums(largest=inf)
    squares = sum_of_products(values, values)
    if against is None:
        return Sums(largest, squares)
    return Sums(largest, squares, sum_of_products(values, against), sum_of_products(against, against))


def decoded(updates: Sequence[tuple[PlainCodec, bytes | memoryview]], numel: int, bounds: Range) -> Tensor:
    """Return a range of one site's contribution: its updates added up in their order."""
    contribution = torch.empty(bounds[1] - bounds[0], dtype=torch.float32)
    for index, (codec, payload) in enumerate(updates):
        codec.decode_into(payload, numel, contribution, bounds[0], Fold.ADD if index else Fold.WRITE)
    return contribution


def merge_into(
    out: Tensor, sites: Sites, merging: Merging, cut: Ranges, spread: Spread, momentum: Tensor | None = None
) -> None:
    """Merge ``sites`` (weight, updates) into ``out``, flat fp32 of the fragment's size.

    ``cut`` are ranges at which all codecs can be cut; ``momentum``, of the form of ``out``, corrects contributions, and
    is None before the first outer step.  ``NonFiniteError`` where the result is not finite.
    """
    segments = merging.segments
    assert [0, *(each.stop for each in segments)] == [*(each.start for each in segments), out.numel()], "no partition"
    work = _Merge(out, sites, merging, None if merging.correction.kind == "none" else momentum)
    totals = {segment: [0.0] * len(work.pairs(segment)) for segment in segments}
    for _, found in zip(cut, spread(work.products, cut), strict=True):
        for segment, products in found.items():
            totals[segment] = [total + each for total, each in zip(totals[segment], products, strict=True)]
    changes, blends = work.decided(totals)
    for _ in spread(functools.partial(work.write, changes, blends), cut):
        pass


@dataclass(frozen=True, slots=True)
class _Merge:
    """One merge; the momentum, if any, comes after the sites in the product matrix."""

    out: Tensor
    sites: Sites
    merging: Merging
    momentum: Tensor | None

    def pairs(self, segment: Segment) -> list[tuple[int, int]]:
        """Return the (row, column) pairs whose products a segment needs."""
        kind, count = segment.options.kind, len(self.sites)
        pairs = [(row, column) for row in range(count) for column in range(row, count)]
        if kind not in PAIRWISE:
            pairs = [(row, column) for row, column in pairs if row == column]
        if self.momentum is not None:
            return [*pairs, *((row, count) for row in range(count + 1))]
        return [] if kind == "trimmed_mean" else pairs

    def products(self, bounds: Range) -> dict[Segment, list[float]]:
        """Return the products of each segment in one range."""
        values, found = self._read(bounds), {}
        if self.momentum is not None:
            values.append(self.momentum[slice(*bounds)])
        for segment, part in self._parts(bounds):
            here = [each[part] for each in values]
            found[segment] = [sum_of_products(here[row], here[column]) for row, column in self.pairs(segment)]
        if not all(map(isfinite, chain.from_iterable(found.values()))):
            raise NonFiniteError("the updates of one site add up to values that are not finite")
        return found

    def decided(self, totals: Mapping[Segment, Sequence[float]]) -> tuple[dict[Segment, list[Change]], Blends]:
        """Return the change of each contribution in each segment, and (weights, scale) of each group."""
        sites = range(len(self.sites))
        changes: dict[Segment, list[Change]] = {}
        products: dict[int, list[list[float]]] = {}
        for segment, found in totals.items():
            square = [[0.0] * (len(sites) + 1) for _ in range(len(sites) + 1)]
            for (row, column), product in zip(self.pairs(segment), found, strict=True):
                square[row][column] = square[column][row] = product
            correction = self.merging.correction
            mine = [correction.change(square[site][site], square[site][-1], square[-1][-1]) for site in sites]
            together = products.setdefault(segment.group, [[0.0] * len(sites) for _ in sites])
            for so_far, more in zip(together, corrected_products(square, mine), strict=True):
                so_far[:] = [total + each for total, each in zip(so_far, more, strict=True)]
            changes[segment] = mine
        weights, options = [weight for weight, _ in self.sites], {each.group: each.options for each in totals}
        return changes, {
            group: blend(options[group], weights, found, self.merging.factors) for group, found in products.items()
        }

    def write(self, changes: Mapping[Segment, Sequence[Change]], blends: Blends, bounds: Range) -> None:
        """Merge one range into ``out``."""
        values, out = self._read(bounds), self.out[slice(*bounds)]
        weights, factors = [weight for weight, _ in self.sites], self.merging.factors
        for segment, part in self._parts(bounds):
            here, mine = out[part], [each[part] for each in values]
            if self.momentum is not None:
                ahead = self.momentum[slice(*bounds)][part]
                for each, change in zip(mine, changes[segment], strict=True):
                    each.copy_(corrected(each, ahead, change))
            options = segment.options
            if options.kind == "trimmed_mean":  # It has no use for a blend.
                for each, factor in zip(mine, factors or (), strict=factors is not None):
                    each.mul_(factor)
                trimmed_mean(list(zip(weights, mine, strict=True)), options.trim_share, here)
                continue
            changed, scale = blends[segment.group]
            fold = Fold.WRITE
            for share, (each,) in shares([(weight, (each,)) for weight, each in zip(changed, mine, strict=True)]):
                fold_into(here, each, fold, share)
                fold = Fold.TOWARDS
            here.mul_(scale)
        if not is_finite(out):
            raise NonFiniteError("the merged values are not finite")

    def _read(self, bounds: Range) -> list[Tensor]:
        return [decoded(updates, self.out.numel(), bounds) for _, updates in self.sites]

    def _parts(self, bounds: Range) -> list[tuple[Segment, slice]]:
        """Return the segments with values in a range, each with its slice of the range."""
        return [
            (each, slice(max(each.start, bounds[0]) - bounds[0], min(each.stop, bounds[1]) - bounds[0]))
            for each in self.merging.segments
            if each.start < bounds[1] and each.stop > bounds[0]
        ]


RANGES_AT_ONCE = 4
"""Ranges per task of a thread with kernels: handing over a single range costs a large share of its computation."""
RULES = MappingProxyType({"sgd": Rule.WITHOUT_MOMENTUM, "heavy_ball": Rule.HEAVY_BALL, "nesterov": Rule.NESTEROV})
"""The outer optimizers with a kernel for a whole step."""


@dataclass(frozen=True, slots=True)
class State:
    """The syncer's values of a fragment, flat fp32; ``optimizer`` is the state of its outer optimizer."""

    theta: Tensor
    published: Tensor
    optimizer: OuterState


@dataclass(frozen=True, slots=True)
class Stepped:
    """The next version; ``payload`` is its down-link, ``norm`` the L2 norm of the merged pseudo-gradient.

    ``digest`` is that of the published values, where requested, else empty.
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
    buffers: Buffers | None = None,
    like: str | None = None,
    merging: Merging | None = None,
    share: float = 1,
) -> Stepped:
    """Return the version after ``state``, in its own tensors from ``buffers``; ``state`` is not changed.

    ``contributions`` holds (weight, updates) per site in site order, as ``merge_mean`` takes them; ``codec`` is that
    of the down-link.  ``NonFiniteError`` when the new theta or the published values would not be finite,
    ``DecodeError`` for an invalid payload, ``ValueError`` for weights without a mean.  ``spread`` may give ranges to
    several threads; no bit, not even of the norm, depends on it, nor on whether there are kernels.  The
    digest has the form of ``like``, and is computed here from finished ranges while those threads make the rest; None:
    no digest.  ``merging`` is set for a merge other than the weighted mean: the contributions are then merged first,
    and the pass runs on the result.  ``share`` is the part of a full round that this one is, as in ``outer_step``.

    A lossless codec sends theta itself: theta, the published values and the payload then share memory.

    Memory: the results (three fragments and a payload), for every payload with an entropy stage a copy without that
    stage, and about three ranges for each thread.
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
    payload = theta.view(torch.uint8) if lossless else room.raw(codec.plain.payload_bytes(numel))
    rule = Rule.PART if share < 1 and optimizer.kind in LINEAR else RULES.get(optimizer.kind)
    weighed = shares(sites)
    codecs = [codec.plain, *(each for _, updates in weighed for each, _ in updates)]
    work = _Work(weighed, state, new, optimizer, share, codec.plain, payload, codecs, rule)
    found = kernels(*codecs, step=SUM_BLOCK) if rule is not None else None
    some_ranges, at_once, cut = work.plain_ranges, 1, ranges(numel, codecs)
    if found is not None:
        some_ranges, at_once = functools.partial(work.native_ranges, found, work.native_updates()), RANGES_AT_ONCE
    squares, told = 0.0, None if like is None else Hasher(like)
    some = [cut[at : at + at_once] for at in range(0, len(cut), at_once)]
    for ready, parts in zip(some, spread(some_ranges, some), strict=True):
        for part in parts:
            squares += part
        if told is not None:
            told.update(bytes_of(new.published[ready[0][0] : ready[-1][1]]))
    return Stepped(new, codec.closed(payload), sqrt(squares), "" if told is None else told.text())


def ranges(numel: int, codecs: Iterable[PlainCodec], about: int | None = None) -> list[Range]:
    """Return ranges of ``numel`` values, cut where all codecs can be cut, about every ``about`` (``RANGE_VALUES``).

    Block sizes without a common factor make the ranges longer, up to the whole.
    """
    step = lcm(SUM_BLOCK, *[codec.block for codec in codecs])
    step *= max(1, (about or RANGE_VALUES) // step)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


@dataclass(frozen=True, slots=True)
class _Work:
    """One outer pass: its inputs, and the memory that it fills range by range."""

    sites: Sequence[tuple[float, Sequence[tuple[PlainCodec, memoryview]]]]
    state: State
    new: State
    optimizer: OuterOptimizerOptions
    share: float
    codec: PlainCodec
    payload: Tensor
    codecs: Sequence[PlainCodec]
    """All codecs that the pass writes or reads; first ``codec``, then those of the updates in their order."""
    rule: Rule | None
    """The kernels' rule for the step; None: torch makes the step."""

    def plain_ranges(self, some: Ranges) -> list[float]:
        """Compute ranges in torch, the definition; return each one's sum of squares of the merged pseudo-gradient."""
        state, new, numel, squares = self.state, self.new, self.state.theta.numel(), []
        for bounds in some:
            part, merged = slice(*bounds), self._mean(bounds)
            optimizer = state.optimizer.part(part)
            theta, following = outer_step(state.theta[part], merged, optimizer, self.optimizer, self.share)
            if not is_finite(theta):
                raise NonFiniteError(Status.THETA_NOT_FINITE.text)
            new.theta[part] = theta
            for name, values in following.tensors.items():
                new.optimizer.tensors[name][part] = values
            published, before = new.published[part], state.published[part]
            if not self.codec.lossless:
                self.codec.encode_into((theta, before), self.payload, published, start=bounds[0], numel=numel)
                if not is_finite(published.add_(before)):
                    raise NonFiniteError(Status.PUBLISHED_NOT_FINITE.text)
            squares.append(sum_of_products(merged, merged))
        return squares

    def _mean(self, bounds: Range) -> Tensor:
        """Return the range of ``merge_mean``."""
        numel = self.state.theta.numel()
        (_, first), *others = self.sites
        mean = decoded(first, numel, bounds)
        for share, updates in others:
            if len(updates) == 1:
                [(codec, payload)] = updates
                codec.decode_into(payload, numel, mean, bounds[0], Fold.TOWARDS, share)
            else:
                fold_into(mean, decoded(updates, numel, bounds), Fold.TOWARDS, share)
        return mean

    def native_updates(self) -> ctypes.Array[Update]:
        """Return the updates in the form of the kernels."""
        numel = self.state.theta.numel()
        updates = [
            Update(
                codec.format(numel),
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
        """Compute what ``plain_ranges`` does, with one pass of the kernels for each range."""
        numel, rule, options = self.state.theta.numel(), self.rule, self.optimizer
        factors: tuple[float, ...] = (-options.lr * self.share, options.momentum, 0.0, 0.0)
        if rule is Rule.PART:
            factors = linear_part(options, self.share)
        job = OuterJob(
            0,
            0,
            tile(SUM_BLOCK, self.codecs),
            updates,
            len(updates),
            *(pointer(each) for each in (self.state.theta, self.state.published, self.state.optimizer.momentum)),
            *(pointer(each) for each in (self.new.theta, self.new.published, self.new.optimizer.momentum)),
            self.codec.format(numel),
            pointer(self.payload),
            self.codec.lossless,
            rule,
            torch_fuses(),
            *factors,
        )
        found = []
        for bounds in some:
            (job.start, job.stop), job.squares = bounds, 0.0
            status = fast.run(job)
            if job.culprit >= 0:
                codec = self.codecs[1 + job.culprit]
                refuse(status, codec.name, codec.kind)
            if status in (Status.THETA_NOT_FINITE, Status.PUBLISHED_NOT_FINITE):
                raise NonFiniteError(status.text)
            require_finite(status is Status.DONE, self.codec.name)
            found.append(float(job.squares))
        return found


READ_VALUES = 4 * RANGE_VALUES
"""Values of a range with kernels, which never hold its decoded values in memory as a whole."""


class Reading:
    """Reads one update of ``numel`` values, encoded by ``codec``, range by range."""

    def __init__(self, codec: PlainCodec, numel: int, like: str = "") -> None:
        """The digest of the values gets the form of ``like``."""
        self._codec = codec
        self._numel = numel
        self._digest = hashing(4 * numel, like, codec)

    def ranges(self) -> list[Range]:
        """Return the ranges in which :meth:`read` must be called."""
        return ranges(self._numel, [self._codec], None if isinstance(self._digest, Hasher) else READ_VALUES)

    def read(
        self, payload: bytes | memoryview, numel: int, start: int, count: int, against: Tensor | None = None
    ) -> Sums:
        """Read the next ``count`` values, from ``start`` of a ``payload`` of ``numel``; return their sums."""
        codec, made = self._codec, self._digest
        if isinstance(made, Hasher):
            values = torch.empty(count, dtype=torch.float32)
            codec.decode_into(payload, numel, values, start)
            made.update(bytes_of(values))
            return sums_of(values, against)
        codec.opened(payload, numel)  # Refuses another length.
        codec.check_place(count, start, numel)
        if against is not None:
            check_values(against)
            assert against.shape == (count,), (against.shape, count)
        job = MeasureJob(
            codec.format(numel),
            start,
            count,
            tile(SUM_BLOCK, [codec]),
            address(payload),
            pointer(against),
            digest=made.address,
        )
        refuse(made.kernels.run(job), codec.name, codec.kind)
        return Sums(job.largest, job.squares, job.products, job.against_squares)

    def digest(self) -> str:
        """Return the digest of the values, once all are read."""
        return self._digest.text()
