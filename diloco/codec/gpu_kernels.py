"""The passes of ``blocks``, ``grids`` and ``topk`` as Triton kernels: each input read once, each output written once.

``gpu`` imports this file when a tensor of an accelerator asks for it; Triton is an extra
(``pip install 'diloco[gpu]'``).  A program handles ``rows`` blocks of ``block`` values, each in a row of ``width``
columns (the next power of two).  ``masked`` is off where all of a program's values exist, so that loads and stores are
as wide as the memory's words.

Where the bits could differ from the plain definition, and why they do not:

- Division is ``div_rn``, IEEE round to nearest; subnormals are kept, because Triton flushes none unless it is asked to.
- Rounding half to even is adding and taking away ``1.5 * 2**23``, exact for the quotients, which are below ``2**22``.
- Peaks are compared as integers: without its sign bit an fp32 keeps its order, with infinity and NaN above all others,
  so that no maximum loses a NaN.
- No product is contracted with a sum that follows (``enable_fp_fusion`` is off at every launch), and ``code * scale``
  is exact besides.
- A kernel tells in ``fault`` what it finds wrong, as bits that are only ever set; the outputs are worth nothing then.

int8 and int4 (``encode_blocks``, ``decode_blocks``) are encoded and decoded.

e3m0, int2 and sign (``encode_grid``) are only encoded, by one kernel; topk uses its helpers too.  All is arithmetic on
the bits of fp32 and on whole numbers, as in ``grids`` and ``base``, so the bytes do not depend on how a machine rounds
or in which order it adds.

topk (``encode_sparse``): one kernel chooses and encodes the values that are kept; ``gpu`` packs them behind it.  The
kernel finds the smallest number of units that is kept bit by bit from the highest, by counting; of the values that have
as many it keeps the first.  So the choice is that of the definition in ``topk``, and no sorting takes part in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diloco.codec import base

NON_FINITE = tl.constexpr(base.NON_FINITE)
BAD_SCALE = tl.constexpr(base.BAD_SCALE)
BAD_CODE = tl.constexpr(base.BAD_CODE)
BAD_FILLING = tl.constexpr(base.BAD_FILLING)
TOO_LARGE = tl.constexpr(base.TOO_LARGE)
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
    """``first - less_a - less_b - less_c``, as many of them as there are, in this order."""
    found = _load(first, offsets, inside, masked)
    if num_less > 0:
        found = found - _load(less_a, offsets, inside, masked)
    if num_less > 1:
        found = found - _load(less_b, offsets, inside, masked)
    if num_less > 2:
        found = found - _load(less_c, offsets, inside, masked)
    return found


@triton.jit
def measured(
    values: tl.tensor,
    local: tl.tensor,
    sent_a: tl.tensor,
    sent_b: tl.tensor,
    residual: tl.tensor,
    start: tl.tensor,
    decay: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    num_less: tl.constexpr,
    has_residual: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tensor:
    """``values`` [- ``local`` - sent...] [+ ``decay * residual``]; 0 where there is no value."""
    x = _remainder(values + start, local + start, sent_a + start, sent_b + start, offsets, inside, num_less, masked)
    if has_residual:
        x = x + _load(residual + start, offsets, inside, masked) * decay
    return x


@triton.jit
def tell(
    decoded: tl.tensor,
    left: tl.tensor,
    offsets: tl.tensor,
    x: tl.tensor,
    sent: tl.tensor,
    inside: tl.tensor,
    has_decoded: tl.constexpr,
    has_residual: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Store what was sent, and what is left of ``x``, where they are wanted."""
    if has_decoded:
        _store(decoded, offsets, sent, inside, masked)
    if has_residual:
        _store(left, offsets, x - sent, inside, masked)


@triton.jit
def _scale_bits(peaks: tl.tensor, code_max: tl.tensor) -> tl.tensor:
    """The scale of each block as the bits of an fp32, from the bits of its peak."""
    quotients = tl.div_rn(peaks.to(tl.float32, bitcast=True), code_max)
    # Plus 2**16 - 1 and cut to the upper half: rounded away from zero to bf16.
    rounded_up = (quotients.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return tl.where(peaks > 0, tl.maximum(rounded_up, SCALE_MIN), 0)


@triton.jit
def _store_codes(
    codes: tl.tensor,
    code: tl.tensor,
    start: tl.tensor,
    numel: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    code_max: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Store the codes as bytes, or for int4 two to a byte."""
    if code_max > 7:
        _store(codes + start, offsets, code.to(tl.int8), inside, masked)
    else:
        low, high = tl.split(tl.reshape(code + 8, [rows, width // 2, 2]))
        pair = tl.arange(0, width // 2)
        pairs = tl.arange(0, rows)[:, None] * (block // 2) + pair[None, :]
        pair_inside = (2 * pairs + start < numel) & (2 * pair[None, :] < block)
        _store(codes + start // 2, pairs, (low | (high << 4)).to(tl.uint8), pair_inside, masked)


# One build for all sizes: only where an address lies is told apart.
@triton.jit(do_not_specialize=["numel", "first_program", "decay"])
def encode_blocks(
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
    code_max: tl.constexpr,
    held_from: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    num_less: tl.constexpr,
    has_residual: tl.constexpr,
    has_decoded: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Encode x = ``values`` [- ``local`` - sent...] [+ ``decay * residual``].

    x' goes to ``decoded`` and x - x' to ``left``, where they are wanted.
    ``held_from`` is the smallest scale, as the bits of an fp32, at which ``code_max * scale`` overflows.
    """
    program = tl.program_id(0).to(tl.int64) + first_program
    start = program * (rows * block)
    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    offsets = row[:, None] * block + column[None, :]
    inside = (offsets + start < numel) & (column[None, :] < block)
    x = measured(values, local, sent_a, sent_b, residual, start, decay, offsets, inside, num_less, has_residual, masked)
    peaks = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    worst = tl.max(peaks, axis=0)
    tl.atomic_or(fault, NON_FINITE, mask=worst >= INFINITY, sem="relaxed")
    scale_bits = _scale_bits(peaks, tl.full([rows], code_max, tl.float32))
    scale = scale_bits.to(tl.float32, bitcast=True)
    block_exists = program * rows + row < tl.cdiv(numel, block)
    _store(scales + program * rows, row, (scale_bits >> 16).to(tl.int16), block_exists, masked)
    divisor = tl.where(scale_bits > 0, scale, 1.0)[:, None]
    quotient = tl.div_rn(x, tl.broadcast_to(divisor, [rows, width]))
    if worst >= NEAR_TOP:  # Below it no scale times code_max overflows; above, codes are held to what is finite.
        at_top = (scale_bits >= held_from)[:, None]
        finite = tl.div_rn(tl.full([rows, 1], FP32_MAX, tl.float32), tl.where(at_top, divisor, FP32_MAX))
        most = tl.where(at_top, finite.to(tl.int32), code_max).to(tl.float32)
        quotient = tl.minimum(tl.maximum(quotient, -most), most)
    rounded = quotient + ROUNDER
    code = rounded.to(tl.int32, bitcast=True) - ROUNDER_BITS
    _store_codes(codes, code, start, numel, offsets, inside, code_max, block, width, rows, masked)
    sent = (rounded - ROUNDER) * scale[:, None]
    tell(decoded + start, left + start, offsets, x, sent, inside, has_decoded, has_residual, masked)


@triton.jit
def _decoded(
    scales: tl.tensor,
    codes: tl.tensor,
    fault: tl.tensor,
    numel: tl.tensor,
    program: tl.tensor,
    code_max: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    masked: tl.constexpr,
) -> tl.tensor:
    """The program's values as the payload says them, checked."""
    start = program * (rows * block)
    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    offsets = row[:, None] * block + column[None, :]
    inside = (offsets + start < numel) & (column[None, :] < block)
    block_exists = program * rows + row < tl.cdiv(numel, block)
    scale_bits = _load(scales + program * rows, row, block_exists, masked).to(tl.int32) << 16
    if code_max > 7:
        code = _load(codes + start, offsets, inside, masked).to(tl.int32)
    else:
        pair = tl.arange(0, width // 2)
        pairs = row[:, None] * (block // 2) + pair[None, :]
        if masked:
            pair_inside = (2 * pairs + start < numel) & (2 * pair[None, :] < block)
            packed = tl.load(codes + start // 2 + pairs, mask=pair_inside, other=0x88).to(tl.int32)
        else:
            packed = tl.load(codes + start // 2 + pairs).to(tl.int32)
        code = tl.reshape(tl.join(packed & 15, packed >> 4), [rows, width]) - 8
    found = code.to(tl.float32) * scale_bits.to(tl.float32, bitcast=True)[:, None]
    # What is wrong is gathered by blocks first, so that a program's threads meet once.
    largest = tl.max(found.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    legal = (scale_bits == 0) | ((scale_bits >= SCALE_MIN) & (scale_bits < INFINITY))
    wrong = tl.where(legal, 0, BAD_SCALE) | tl.where(largest >= INFINITY, TOO_LARGE, 0)
    wrong = wrong | tl.where(tl.min(code, axis=1) < -code_max, BAD_CODE, 0)
    if masked:  # Behind the last of an odd number of int4 values stands the code 0.
        wrong = wrong | tl.where(tl.max(tl.where(inside, 0, tl.abs(code)), axis=1) > 0, BAD_FILLING, 0)
    worst = tl.max(wrong, axis=0)
    tl.atomic_or(fault, worst, mask=worst > 0, sem="relaxed")
    return found


@triton.jit(do_not_specialize=["numel", "first_program"])
def decode_blocks(
    scales: tl.tensor,
    codes: tl.tensor,
    held: tl.tensor,
    local: tl.tensor,
    base: tl.tensor,
    merged_a: tl.tensor,
    merged_b: tl.tensor,
    out: tl.tensor,
    adopted: tl.tensor,
    fault: tl.tensor,
    numel: tl.tensor,
    first_program: tl.tensor,
    code_max: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    follows: tl.constexpr,
    rebases: tl.constexpr,
    num_merged: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Write x' to ``out``, or with ``follows`` x' + ``held``; with ``rebases`` also the model's values to ``adopted``.

    Those are ``out - (base - local - merged...)``, as ``outer.pseudo_gradient.rebase`` has them.
    """
    program = tl.program_id(0).to(tl.int64) + first_program
    start = program * (rows * block)
    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    offsets = row[:, None] * block + column[None, :]
    inside = (offsets + start < numel) & (column[None, :] < block)
    found = _decoded(scales, codes, fault, numel, program, code_max, block, width, rows, masked)
    if follows:
        found = found + _load(held + start, offsets, inside, masked)
    if rebases:
        unsent = _remainder(
            base + start, local + start, merged_a + start, merged_b + start, offsets, inside, num_merged + 1, masked
        )
        _store(adopted + start, offsets, found - unsent, inside, masked)
    _store(out + start, offsets, found, inside, masked)


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
    """Low and high of each group, the latter in the upper half, as ``base.two_levels`` makes them."""
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
def encode_grid(
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
    """As ``encode_blocks``; ``bits`` is 1 for sign, 2 for int2 and 4 for e3m0."""
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


@triton.jit
def _least_kept(found: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """The ``kept``-th largest of each row's ``found``, which are below 2**24; those of -1 do not count."""
    least = tl.zeros_like(kept).to(tl.int32)
    for step in range(24):
        tried = least | (1 << (23 - step))
        enough = tl.sum((found >= tried[:, None]).to(tl.int32), axis=1) >= kept
        least = tl.where(enough, tried, least)
    return least


@triton.jit
def _is_kept(found: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Those above the least that is kept, and of those equal to it the first."""
    least = _least_kept(found, kept)[:, None]
    above = found > least
    equal = found == least
    wanted = (kept - tl.sum(above.to(tl.int32), axis=1))[:, None]
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= wanted))


@triton.jit(do_not_specialize=["numel", "first_program", "decay"])
def encode_sparse(
    values: tl.tensor,
    local: tl.tensor,
    sent_a: tl.tensor,
    sent_b: tl.tensor,
    residual: tl.tensor,
    levels: tl.tensor,
    indices: tl.tensor,
    fields: tl.tensor,
    decoded: tl.tensor,
    left: tl.tensor,
    fault: tl.tensor,
    numel: tl.tensor,
    first_program: tl.tensor,
    decay: tl.tensor,
    k: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    num_less: tl.constexpr,
    has_residual: tl.constexpr,
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
    x = measured(values, local, sent_a, sent_b, residual, start, decay, offsets, inside, num_less, has_residual, masked)
    magnitudes = x.to(tl.int32, bitcast=True) & MAGNITUDE
    peaks = tl.max(magnitudes, axis=1)
    tl.atomic_or(fault, NON_FINITE, mask=tl.max(peaks, axis=0) >= INFINITY, sem="relaxed")
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
    sent = tl.where(is_kept, two_values(found_fields, both), 0.0)
    tell(decoded + start, left + start, offsets, x, sent, inside, has_decoded, has_residual, masked)
