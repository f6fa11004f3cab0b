"""Encoding with e3m0, int2 and sign as one Triton kernel, and what it shares with that of topk.

All is arithmetic on the bits of fp32 and on whole numbers (``powers``, ``units``, ``levels``), so the bytes do not
depend on how a machine rounds or in which order it adds.  The layout of a program is that of ``block_kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diloco.codec.block_kernels import INFINITY, NON_FINITE, _store, measured, tell

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGNIFICAND = tl.constexpr(0x007FFFFF)
HIDDEN_BIT = tl.constexpr(0x00800000)
HALF_STEP = tl.constexpr(1 << 22)
EXPONENT_MAX = tl.constexpr(254)
SCALE_MIN_BITS = tl.constexpr(0x0080)
BIG = tl.constexpr(1)
NEGATIVE = tl.constexpr(2)


@triton.jit
def units(found: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The magnitudes, as the bits of fp32, in units of their group, whose largest exponent is ``top``."""
    exponents = found >> 23
    significands = tl.where(exponents > 0, (found & SIGNIFICAND) | HIDDEN_BIT, 0)
    return significands >> tl.minimum(top[:, None] - exponents, 31)


@triton.jit
def mean_scale(sums: tl.tensor, counts: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The upper 16 bits of the fp32 that is the mean of each group, rounded up to a unit and cut to bf16."""
    means = (sums + counts - 1) // counts
    bits = means.to(tl.float32).to(tl.int32, bitcast=True)
    shifted = (bits >> 16) + ((top - 150) << 7)
    return tl.where(means > 0, tl.maximum(shifted, SCALE_MIN_BITS), 0)


@triton.jit
def levels_of(found: tl.tensor, is_big: tl.tensor, counts: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Low and high of each group, the latter in the upper half, as ``levels.two_levels`` makes them."""
    num_big = tl.sum(is_big.to(tl.int64), axis=1)
    sum_big = tl.sum(tl.where(is_big, found, 0), axis=1)
    low = mean_scale(tl.sum(found, axis=1) - sum_big, counts - num_big, top)
    high = mean_scale(sum_big, tl.maximum(num_big, 1), top)
    return low | (tl.where(high > low, high, 0) << 16)


@triton.jit
def two_fields(is_big: tl.tensor, negative: tl.tensor, both: tl.tensor) -> tl.tensor:
    """The fields, for ``both`` levels as ``levels_of`` gives them."""
    big = is_big & (both > 0xFFFF)[:, None]
    signed = negative & (big | ((both & 0xFFFF) > 0)[:, None])
    return tl.where(big, BIG, 0) | tl.where(signed, NEGATIVE, 0)


@triton.jit
def two_values(fields: tl.tensor, both: tl.tensor) -> tl.tensor:
    """What fields and levels mean."""
    bits = tl.where((fields & BIG) > 0, (both & -0x10000)[:, None], (both << 16)[:, None])
    return (bits | ((fields & NEGATIVE) << 30)).to(tl.float32, bitcast=True)


@triton.jit
def is_negative(x: tl.tensor) -> tl.tensor:
    """Where x is below 0, which -0 is not."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits < 0) & ((bits & MAGNITUDE) != 0)


@triton.jit
def powers(found: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """The fields of e3m0."""
    levels = tl.minimum((found + HALF_STEP) >> 23, EXPONENT_MAX)
    lowest = (tl.max(levels, axis=1) - 7)[:, None]
    codes = tl.maximum(levels - lowest, tl.where(found >> 23 >= lowest, 1, 0))
    codes = tl.where(levels > 0, tl.maximum(codes, 0), 0)
    return codes | tl.where(negative & (codes > 0), 8, 0)


@triton.jit
def power_values(fields: tl.tensor, level: tl.tensor) -> tl.tensor:
    """What fields of e3m0 mean in a block whose largest level is ``level``."""
    power = (level[:, None] - 7 + (fields & 7)) << 23
    return tl.where((fields & 7) > 0, power | ((fields & 8) << 28), 0).to(tl.float32, bitcast=True)


@triton.jit
def two_levels(found: tl.tensor, counts: tl.tensor, top: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """Levels and fields of int2; ``found`` are units of 64 bits."""
    is_big = found > ((5 * tl.sum(found, axis=1) + 4 * counts - 1) // (4 * counts))[:, None]
    both = levels_of(found, is_big, counts, top)
    return both, two_fields(is_big, negative, both)


@triton.jit(do_not_specialize=["numel", "first_program", "decay"])
def encode(
    values: tl.tensor,
    local: tl.tensor,
    sent_a: tl.tensor,
    sent_b: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    decoded: tl.tensor,
    left: tl.tensor,
    fault: tl.tensor,
    numel: tl.tensor,
    first_program: tl.tensor,
    decay: tl.tensor,
    bits: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    num_less: tl.constexpr,
    has_residual: tl.constexpr,
    has_decoded: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """As ``block_kernels.encode``; ``bits`` is 1 for sign, 2 for int2 and 4 for e3m0."""
    program = tl.program_id(0).to(tl.int64) + first_program
    start = program * (rows * block)
    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    offsets = row[:, None] * block + column[None, :]
    inside = (offsets + start < numel) & (column[None, :] < block)
    x = measured(values, local, sent_a, sent_b, residual, start, decay, offsets, inside, num_less, has_residual, masked)
    found = x.to(tl.int32, bitcast=True) & MAGNITUDE
    peaks = tl.max(found, axis=1)
    tl.atomic_or(fault, NON_FINITE, mask=tl.max(peaks, axis=0) >= INFINITY, sem="relaxed")
    first_block = program * rows
    exists = first_block + row < tl.cdiv(numel, block)
    counts = tl.minimum(tl.maximum(numel - start - row.to(tl.int64) * block, 1), block)
    negative = is_negative(x)
    if bits == 4:
        fields = powers(found, negative)
        level = tl.minimum((peaks + HALF_STEP) >> 23, EXPONENT_MAX)
        _store(scales + first_block, row, level.to(tl.uint8), exists, masked)
        sent = power_values(fields, level)
    elif bits == 2:
        both, fields = two_levels(units(found, peaks >> 23).to(tl.int64), counts, peaks >> 23, negative)
        _store(scales + 2 * first_block, row * 2, both.to(tl.int16), exists, masked)
        _store(scales + 2 * first_block + 1, row * 2, (both >> 16).to(tl.int16), exists, masked)
        sent = two_values(fields, both)
    else:
        level = mean_scale(tl.sum(units(found, peaks >> 23).to(tl.int64), axis=1), counts, peaks >> 23)
        fields = tl.where(negative & (level > 0)[:, None], 1, 0)
        _store(scales + first_block, row, level.to(tl.int16), exists, masked)
        sent = ((level << 16)[:, None] | (fields << 31)).to(tl.float32, bitcast=True)
    store_fields(codes, tl.where(inside, fields, 0), start, numel, bits, block, width, rows, masked)
    tell(decoded + start, left + start, offsets, x, sent, inside, has_decoded, has_residual, masked)


@triton.jit
def store_fields(
    codes: tl.tensor,
    fields: tl.tensor,
    start: tl.tensor,
    numel: tl.tensor,
    bits: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Store ``8 // bits`` fields to a byte, the earlier in the lower bits."""
    together: tl.constexpr = 8 // bits
    places = tl.arange(0, together) * bits
    packed = tl.sum(tl.reshape(fields, [rows, width // together, together]) << places[None, None, :], axis=2)
    column = tl.arange(0, width // together)
    offsets = tl.arange(0, rows)[:, None] * (block // together) + column[None, :]
    inside = (offsets * together + start < numel) & (column[None, :] * together < block)
    _store(codes + start // together, offsets, packed.to(tl.uint8), inside, masked)
