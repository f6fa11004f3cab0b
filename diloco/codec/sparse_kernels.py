"""Choosing and encoding the values that topk keeps, as one Triton kernel; what it keeps is packed behind it.

The smallest number of units that is kept is found bit by bit from the highest, by counting; of those that have as many
the first are kept.  So the choice is that of the definition in ``sparse``, and no sorting takes part in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diloco.codec.block_kernels import INFINITY, NON_FINITE, _store, measured, tell
from diloco.codec.grid_kernels import MAGNITUDE, is_negative, levels_of, two_fields, two_values, units


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
def encode(
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
