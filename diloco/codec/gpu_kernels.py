"""The passes of ``blocks`` and ``topk`` as Triton kernels: each input read once, each output written once.

``gpu`` imports this file at the first launch of a kernel; Triton is an extra
(``pip install 'diloco[gpu]'``).  A program handles ``rows`` blocks of ``block`` values, each in a row of ``width``
columns (the next power of two).  ``masked`` is off where all of a program's values exist, so that loads and stores have
full width.

Where the bits could differ from the plain definition, and why they do not:

- Division is ``div_rn``, IEEE round to nearest; subnormals are kept, because Triton flushes none by default.
- Adding and subtracting ``1.5 * 2**23`` rounds half to even, exactly for the quotients, which are below ``2**22``.
- Peaks are compared as integers: without its sign bit an fp32 keeps its order, with infinity and NaN above all others,
  so that no maximum loses a NaN.
- No product is contracted with a sum that follows (``enable_fp_fusion`` is off at every launch), and ``code * scale``
  is exact anyway.
- A kernel reports a value that is not finite in ``fault``; the outputs are then undefined.

int8, int4, e3m0, int2 and sign are encoded by one kernel (``encode_blocks``); topk uses its helpers too.  Except for
int8 and int4 all of it is arithmetic on fp32 bits and on whole numbers, as in ``blocks`` and ``base``, so the bytes do
not depend on a machine's rounding or order of addition.

topk (``encode_sparse``): one kernel chooses and encodes the kept values; ``gpu`` packs them afterwards.  The kernel
finds the smallest kept number of units bit by bit from the highest, by counting; of the values with that number it
keeps the first.  So the choice is that of the definition in ``topk``, and needs no sorting.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
SCALE_MIN = tl.constexpr(0x00800000)  # 2**-126
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: between 2**23 and 2**24 an fp32 counts by ones
ROUNDER_BITS = tl.constexpr(0x4B400000)
NEAR_TOP = tl.constexpr(0x7F000000)  # 2**127
FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _load(pointer: tl.tensor, offsets: tl.tensor, inside: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    if masked:
        return tl.load(pointer + offsets, mask=inside, other=0)
    return tl.load(pointer + offsets)


@triton.jit
def _store(pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, inside: tl.tensor, masked: tl.constexpr) -> None:
    if masked:
        tl.store(pointer + offsets, value, mask=inside)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def _remainder(
    first: tl.tensor,
    less_a: tl.tensor,
    less_b: tl.tensor,
    less_c: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    num_less: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tensor:
    """Return ``first - less_a - less_b - less_c`` in this order, with only the first ``num_less`` of them."""
    found = _load(first, offsets, inside, masked)
    if num_less > 0:
        found = found - _load(less_a, offsets, inside, masked)
    if num_less > 1:
        found = found - _load(less_b, offsets, inside, masked)
    if num_less > 2:
        found = found - _load(less_c, offsets, inside, masked)
    return found


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
    """Return magnitudes, given as fp32 bits, in units of their group, whose largest exponent is ``top``."""
    exponents = found >> 23
    significands = tl.where(exponents > 0, (found & SIGNIFICAND) | HIDDEN_BIT, 0)
    return significands >> tl.minimum(top[:, None] - exponents, 31)


@triton.jit
def mean_scale(sums: tl.tensor, counts: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return the upper 16 fp32 bits of each group's mean, rounded up to a unit and truncated to bf16."""
    means = (sums + counts - 1) // counts
    bits = means.to(tl.float32).to(tl.int32, bitcast=True)
    shifted = (bits >> 16) + ((top - 150) << 7)
    return tl.where(means > 0, tl.maximum(shifted, SCALE_MIN_BITS), 0)


@triton.jit
def levels_of(found: tl.tensor, is_big: tl.tensor, counts: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return low and high (in the upper half) of each group, as ``blocks.two_levels`` makes them."""
    num_big = tl.sum(is_big.to(tl.int64), axis=1)
    sum_big = tl.sum(tl.where(is_big, found, 0), axis=1)
    low = mean_scale(tl.sum(found, axis=1) - sum_big, counts - num_big, top)
    high = mean_scale(sum_big, tl.maximum(num_big, 1), top)
    return low | (tl.where(high > low, high, 0) << 16)


@triton.jit
def two_fields(is_big: tl.tensor, negative: tl.tensor, both: tl.tensor) -> tl.tensor:
    """Return the fields for the levels ``both`` of ``levels_of``."""
    big = is_big & (both > 0xFFFF)[:, None]
    signed = negative & (big | ((both & 0xFFFF) > 0)[:, None])
    return tl.where(big, BIG, 0) | tl.where(signed, NEGATIVE, 0)


@triton.jit
def two_values(fields: tl.tensor, both: tl.tensor) -> tl.tensor:
    """Return the fp32 values of fields and levels."""
    bits = tl.where((fields & BIG) > 0, (both & -0x10000)[:, None], (both << 16)[:, None])
    return (bits | ((fields & NEGATIVE) << 30)).to(tl.float32, bitcast=True)


@triton.jit
def is_negative(x: tl.tensor) -> tl.tensor:
    """Return where x is below 0; -0 is not."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits < 0) & ((bits & MAGNITUDE) != 0)


@triton.jit
def powers(found: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """Return the fields of e3m0."""
    levels = tl.minimum((found + HALF_STEP) >> 23, EXPONENT_MAX)
    lowest = (tl.max(levels, axis=1) - 7)[:, None]
    codes = tl.maximum(levels - lowest, tl.where(found >> 23 >= lowest, 1, 0))
    codes = tl.where(levels > 0, tl.maximum(codes, 0), 0)
    return codes | tl.where(negative & (codes > 0), 8, 0)


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


@triton.jit
def _int_codes(
    x: tl.tensor,
    peaks: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    code_max: tl.constexpr,
    held_from: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tensor:
    """Store the scales of int8 or int4; return the codes and their values.

    ``held_from`` is the smallest scale, as the bits of an fp32, at which ``code_max * scale`` overflows.
    """
    quotients = tl.div_rn(peaks.to(tl.float32, bitcast=True), tl.full([rows], code_max, tl.float32))
    # Add 2**16 - 1 and keep the upper half: this rounds away from zero to bf16.
    rounded_up = (quotients.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale_bits = tl.where(peaks > 0, tl.maximum(rounded_up, SCALE_MIN), 0)
    scale = scale_bits.to(tl.float32, bitcast=True)
    _store(scales, row, (scale_bits >> 16).to(tl.int16), exists, masked)
    divisor = tl.where(scale_bits > 0, scale, 1.0)[:, None]
    quotient = tl.div_rn(x, tl.broadcast_to(divisor, [rows, width]))
    if tl.max(peaks, axis=0) >= NEAR_TOP:  # Below it no scale times code_max overflows; above, codes are limited.
        at_top = (scale_bits >= held_from)[:, None]
        finite = tl.div_rn(tl.full([rows, 1], FP32_MAX, tl.float32), tl.where(at_top, divisor, FP32_MAX))
        most = tl.where(at_top, finite.to(tl.int32), code_max).to(tl.float32)
        quotient = tl.minimum(tl.maximum(quotient, -most), most)
    rounded = quotient + ROUNDER
    return rounded.to(tl.int32, bitcast=True) - ROUNDER_BITS, (rounded - ROUNDER) * scale[:, None]


# One compilation for all sizes: Triton specialises only on the alignment of addresses.
@triton.jit(do_not_specialize=["numel", "first_program"])
def encode_blocks(
    values: tl.tensor,
    local: tl.tensor,
    sent_a: tl.tensor,
    sent_b: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    decoded: tl.tensor,
    fault: tl.tensor,
    numel: tl.tensor,
    first_program: tl.tensor,
    bits: tl.constexpr,
    code_max: tl.constexpr,
    held_from: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    num_less: tl.constexpr,
    has_decoded: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Encode x = ``values`` [- ``local`` - sent...]; write x' to ``decoded`` if requested.

    With a ``code_max`` it is int8 or int4; without one ``bits`` is 1 for sign, 2 for int2 and 4 for e3m0.
    """
    program = tl.program_id(0).to(tl.int64) + first_program
    start = program * (rows * block)
    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    offsets = row[:, None] * block + column[None, :]
    inside = (offsets + start < numel) & (column[None, :] < block)
    x = _remainder(values + start, local + start, sent_a + start, sent_b + start, offsets, inside, num_less, masked)
    found = x.to(tl.int32, bitcast=True) & MAGNITUDE
    peaks = tl.max(found, axis=1)
    tl.atomic_or(fault, 1, mask=tl.max(peaks, axis=0) >= INFINITY, sem="relaxed")
    first_block = program * rows
    exists = first_block + row < tl.cdiv(numel, block)
    if code_max > 0:
        code, sent = _int_codes(x, peaks, scales + first_block, row, exists, code_max, held_from, width, rows, masked)
        if bits == 8:
            _store(codes + start, offsets, code.to(tl.int8), inside, masked)
        else:
            store_fields(codes, code + 8, start, numel, bits, block, width, rows, masked)
    else:
        counts = tl.minimum(tl.maximum(numel - start - row.to(tl.int64) * block, 1), block)
        negative = is_negative(x)
        if bits == 4:
            fields = powers(found, negative)
            level = tl.minimum((peaks + HALF_STEP) >> 23, EXPONENT_MAX)
            _store(scales + first_block, row, level.to(tl.uint8), exists, masked)
            power = (level[:, None] - 7 + (fields & 7)) << 23
            sent = tl.where((fields & 7) > 0, power | ((fields & 8) << 28), 0).to(tl.float32, bitcast=True)
        elif bits == 2:
            wide = units(found, peaks >> 23).to(tl.int64)
            is_big = wide > ((5 * tl.sum(wide, axis=1) + 4 * counts - 1) // (4 * counts))[:, None]
            both = levels_of(wide, is_big, counts, peaks >> 23)
            fields = two_fields(is_big, negative, both)
            _store(scales + 2 * first_block, row * 2, both.to(tl.int16), exists, masked)
            _store(scales + 2 * first_block + 1, row * 2, (both >> 16).to(tl.int16), exists, masked)
            sent = two_values(fields, both)
        else:
            level = mean_scale(tl.sum(units(found, peaks >> 23).to(tl.int64), axis=1), counts, peaks >> 23)
            fields = tl.where(negative & (level > 0)[:, None], 1, 0)
            _store(scales + first_block, row, level.to(tl.int16), exists, masked)
            sent = ((level << 16)[:, None] | (fields << 31)).to(tl.float32, bitcast=True)
        store_fields(codes, tl.where(inside, fields, 0), start, numel, bits, block, width, rows, masked)
    if has_decoded:
        _store(decoded + start, offsets, sent, inside, masked)


@triton.jit
def _is_kept(found: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Return the mask of the ``kept`` largest of each row's ``found``, which are below 2**24; of equal ones the first.

    Entries of -1 do not count.
    """
    least = tl.zeros_like(kept).to(tl.int32)
    for step in range(24):
        tried = least | (1 << (23 - step))
        enough = tl.sum((found >= tried[:, None]).to(tl.int32), axis=1) >= kept
        least = tl.where(enough, tried, least)
    above = found > least[:, None]
    equal = found == least[:, None]
    wanted = (kept - tl.sum(above.to(tl.int32), axis=1))[:, None]
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= wanted))


@triton.jit(do_not_specialize=["numel", "first_program"])
def encode_sparse(
    values: tl.tensor,
    local: tl.tensor,
    sent_a: tl.tensor,
    sent_b: tl.tensor,
    levels: tl.tensor,
    indices: tl.tensor,
    fields: tl.tensor,
    decoded: tl.tensor,
    fault: tl.tensor,
    numel: tl.tensor,
    first_program: tl.tensor,
    k: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    num_less: tl.constexpr,
    has_decoded: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Write levels, and for each kept value its index in its chunk (int16) and its field (uint8), in order."""
    program = tl.program_id(0).to(tl.int64) + first_program
    start = program * (rows * block)
    row = tl.arange(0, rows)
    column = tl.arange(0, block)
    offsets = row[:, None] * block + column[None, :]
    inside = offsets + start < numel
    x = _remainder(values + start, local + start, sent_a + start, sent_b + start, offsets, inside, num_less, masked)
    magnitudes = x.to(tl.int32, bitcast=True) & MAGNITUDE
    peaks = tl.max(magnitudes, axis=1)
    tl.atomic_or(fault, 1, mask=tl.max(peaks, axis=0) >= INFINITY, sem="relaxed")
    counts = tl.minimum(tl.maximum(numel - start - row.to(tl.int64) * block, 0), block).to(tl.int32)
    kept = tl.minimum(counts, (counts * k + 4 * block - 1) // (4 * block) * 4)
    found = tl.where(inside, units(magnitudes, peaks >> 23), -1)
    is_kept = _is_kept(found, kept)
    wide = tl.where(is_kept, found, 0).to(tl.int64)
    num_kept = tl.maximum(kept, 1).to(tl.int64)
    is_big = is_kept & (wide > ((tl.sum(wide, axis=1) + num_kept - 1) // num_kept)[:, None])
    both = levels_of(wide, is_big, num_kept, peaks >> 23)
    found_fields = two_fields(is_big, is_negative(x), both)
    first_chunk = program * rows
    exists = first_chunk + row < tl.cdiv(numel, block)
    _store(levels + 2 * first_chunk, row * 2, both.to(tl.int16), exists, masked)
    _store(levels + 2 * first_chunk + 1, row * 2, (both >> 16).to(tl.int16), exists, masked)
    places = row[:, None] * k + tl.cumsum(is_kept.to(tl.int32), axis=1) - 1
    which = tl.broadcast_to(column[None, :], [rows, block])
    tl.store(indices + first_chunk * k + places, which.to(tl.int16), mask=is_kept)
    tl.store(fields + first_chunk * k + places, found_fields.to(tl.uint8), mask=is_kept)
    if has_decoded:
        sent = tl.where(is_kept, two_values(found_fields, both), 0.0)
        _store(decoded + start, offsets, sent, inside, masked)
