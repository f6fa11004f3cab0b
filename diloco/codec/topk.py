"""topk: the values of largest magnitude in each chunk, by index, at one of two levels (SparseLoCo, arXiv 2508.15706).

A chunk is ``chunk`` consecutive values of the fragment (256, 4096 or 65536), counted from its start; the last may be
shorter.  A whole chunk keeps ``k`` values, a last one of n values ``min(n, 4 ceil(n k / (4 chunk)))``.  With the units
of ``blocks``, whole numbers relative to the chunk's largest value::

    kept  = the values with most units; of equal ones those with the lowest index
    big   = more units than the mean of the kept, rounded up

The kept values are rounded to two levels, as ``blocks.two_levels`` makes them; the others are 0.

Byte layout, little-endian: first low and high of all chunks, bf16 (4 bytes a chunk); then the indices, within their
chunks, of all kept values, chunk by chunk and ascending, of 8, 12 or 16 bits each; then their fields of 2 bits, packed
as ``blocks.pack`` does: 1 for big, 2 for a negative x.  Two indices of 12 bits share three bytes, the earlier in the
lower bits; a single last one has two bytes, of which the upper four bits are 0.

Different payloads mean different values.  Refused on decoding, beside what ``blocks.check_levels`` refuses: indices
that do not ascend or are out of range; and a kept value of 0 after a value that is not kept (values of 0 are kept only
where there are too few others, from the lowest index on).

Size: 2 bits and an index for each kept value, and 32 bits a chunk: 928 bits for 4096 values with ``k`` 64, or .227 bits
a value.  Error: |x| for a value not kept, ``max(|x|, level)`` for a kept one: topk is made for error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import PlainCodec, refuse_where
from diloco.codec.blocks import (
    BIG,
    FIELD_BITS,
    LEVELS_BYTES,
    check_levels,
    is_negative,
    level_values,
    magnitudes,
    pack,
    packed_bytes,
    two_levels,
    units,
    unpack,
)
from diloco.codec.kernel_library import Kind, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

INDEX_BITS = MappingProxyType({256: 8, 4096: 12, 65536: 16})


@dataclass(frozen=True, slots=True)
class TopKCodec(PlainCodec):
    """The ``k`` largest of each chunk of ``block`` values, a multiple of 4; see the module for the format."""

    name: str
    block: int
    k: int

    kind = Kind.TOPK

    def __post_init__(self) -> None:
        if self.block not in INDEX_BITS:
            raise ValueError(f"codec is {self.name!r}: its chunk must be 256, 4096 or 65536")
        if not (4 <= self.k <= self.block // 4 and self.k % 4 == 0):
            raise ValueError(f"codec is {self.name!r}: it keeps a multiple of 4 values, from 4 to {self.block // 4}")

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, length) of the levels, the indices and the fields."""
        index_bits = INDEX_BITS[self.block]
        first, last = LEVELS_BYTES * (start // self.block), LEVELS_BYTES * -(-stop // self.block)
        before, count = self._num_kept(start), self._num_kept(stop) - self._num_kept(start)
        indices_start = LEVELS_BYTES * -(-numel // self.block)
        fields_start = indices_start + packed_bytes(self._num_kept(numel), index_bits)
        return (
            (first, last - first),
            (indices_start + before * index_bits // 8, packed_bytes(count, index_bits)),
            (fields_start + before * FIELD_BITS // 8, packed_bytes(count, FIELD_BITS)),
        )

    def _kept(self, count: int) -> int:
        """Return how many values of a chunk of ``count`` are kept."""
        return min(count, -(-count * self.k // (4 * self.block)) * 4)

    def _num_kept(self, numel: int) -> int:
        """Return how many of ``numel`` values are kept."""
        return numel // self.block * self.k + self._kept(numel % self.block)

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return each row's two levels (int32), fields (uint8), kept indices (int64, ascending), and zeros."""
        width = rows.shape[1]
        found, top = units(magnitudes(rows, self.name))
        # No two keys are equal, so the result does not depend on how ``torch.topk`` orders equal values.
        keys = found.to(torch.int64) * width + torch.arange(width - 1, -1, -1)
        chosen = torch.topk(keys, self._kept(width), dim=1, sorted=False).values
        indices = (width - 1 - chosen % width).sort(dim=1).values
        kept = found.gather(1, indices).to(torch.int64)
        is_big = kept > -(-kept.sum(dim=1) // kept.shape[1])[:, None]
        levels, fields = two_levels(kept, top, is_big, is_negative(rows.gather(1, indices)))
        return levels, fields, indices, torch.zeros_like(rows)

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        levels, fields, indices, values = codes
        return values.scatter_(1, indices, level_values(levels, fields))

    def pack(self, *codes: Tensor) -> Sequence[Tensor]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        levels, fields, indices, _ = codes
        stored = levels.to(torch.int16).view(-1).view(torch.uint8)
        return stored, pack_indices(indices.view(-1), INDEX_BITS[self.block]), pack(fields.view(-1), FIELD_BITS)

    def unpack(self, pieces: Sequence[Tensor], rows: int, width: int) -> tuple[Tensor, ...]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        kept = self._kept(width)
        levels = pieces[0].view(torch.int16).to(torch.int32).view(-1, 2)
        indices = _unpack_indices(pieces[1], rows * kept, INDEX_BITS[self.block], self.name).view(-1, kept)
        fields = unpack(pieces[2], rows * kept, FIELD_BITS, self.name).view(-1, kept)
        check_levels(levels, fields, self.name)
        refuse_where(indices[:, 1:] <= indices[:, :-1], Status.BAD_INDEX, self.name)
        refuse_where(indices >= width, Status.BAD_INDEX, self.name)
        nothing = ((fields & BIG) == 0) & (levels[:, :1] == 0)
        refuse_where(nothing & (indices != torch.arange(kept)), Status.NOT_FIRST, self.name)
        return levels, fields, indices, torch.zeros(rows, width, dtype=torch.float32)


def pack_indices(indices: Tensor, bits: int) -> Tensor:
    """Return the packed bytes of flat ``indices``, of any integer dtype."""
    if bits != 12:
        return indices.to(torch.uint8) if bits == 8 else indices.to(torch.int16).view(torch.uint8)
    odd = indices.numel() % 2
    pairs = torch.nn.functional.pad(indices.to(torch.int32), (0, odd)).view(-1, 2)
    both = pairs[:, 0] | (pairs[:, 1] << 12)
    packed = both.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
    return packed[:-1] if odd else packed


def _unpack_indices(packed: Tensor, count: int, bits: int, name: str) -> Tensor:
    """Return ``count`` indices as int64; ``DecodeError`` where the padding of the last byte is not 0."""
    if bits == 8:
        return packed.to(torch.int64)
    if bits == 16:
        return packed.view(torch.int16).to(torch.int64) & 0xFFFF
    odd = count % 2
    triples = torch.nn.functional.pad(packed, (0, odd)).to(torch.int64).view(-1, 3)
    both = triples[:, 0] | (triples[:, 1] << 8) | (triples[:, 2] << 16)
    indices = torch.stack([both & 4095, both >> 12], dim=1).view(-1)
    refuse_where(indices[count:] != 0, Status.BEHIND_INDEX, name)
    return indices[:count]
