"""The passes of ``blocks`` as Triton kernels, one read of each input and one write of each output.

Imported by ``device`` when a tensor of an accelerator asks for it; Triton is an extra (``pip install 'diloco[gpu]'``).
A program handles ``rows`` blocks of ``block`` values, each in a row of ``width`` columns (the next power of two).
``masked`` is off where all of a program's values exist, so that loads and stores are as wide as the memory's words.

Where the bits could differ from the plain definition, and why they do not:

- Division is ``div_rn``, IEEE round to nearest; subnormals are kept, because Triton flushes none unless it is asked to.
- Rounding half to even is adding and taking away ``1.5 * 2**23``, exact for the quotients, which are below ``2**22``.
- Peaks are compared as integers: without its sign bit an fp32 keeps its order, with infinity and NaN above all others,
  so that no maximum loses a NaN.
- No product is contracted with a sum that follows (``enable_fp_fusion`` is off at every launch), and ``code * scale``
  is exact besides.
- What is found wrong is told in ``fault``, as bits that are only ever set; the outputs are worth nothing then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diloco.codec import device

NON_FINITE = tl.constexpr(device.NON_FINITE)
BAD_SCALE = tl.constexpr(device.BAD_SCALE)
BAD_CODE = tl.constexpr(device.BAD_CODE)
BAD_FILLING = tl.constexpr(device.BAD_FILLING)
TOO_LARGE = tl.constexpr(device.TOO_LARGE)
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
def decode(
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

    Those are ``out - (base - local - merged...)``, as ``outer.adopt.rebase`` has them.
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
