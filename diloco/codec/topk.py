"""topk: of each chunk the values of largest magnitude, by index, at one of two levels (SparseLoCo, arXiv 2508.15706).

A chunk is ``chunk`` consecutive values of the fragment (256, 4096 or 65536), counted from its start; the last may be
shorter.  Of a whole one ``k`` values are kept, of a last one of n values ``min(n, 4 ceil(n k / (4 chunk)))``.  With the
units of ``base``, which are whole numbers and those of the chunk's largest value::

    kept  = those of most units; of equal ones those of the lowest index
    big   = more units than the mean of the kept, rounded up

The kept values are at two levels, as ``base.two_levels`` makes them; the others are 0.

Byte layout, little-endian: first low and high of all chunks, bf16 (4 bytes a chunk); then the indices in their chunks
of all kept values, chunk by chunk and rising, of 8, 12 or 16 bits each; then their fields of 2 bits, packed as
``base.pack`` does: 1 for big, 2 for a negative x.  Of two indices of 12 bits, in three bytes, the earlier has the lower
bits; a last one alone has two bytes, of which the upper four bits are 0.

No two payloads mean the same values.  Refused on decoding, beside what ``base.check_levels`` refuses: indices that do
not rise or lie outside; and a kept value of 0 that has one before it which is not kept (values of 0 are kept only where
there are too few others, from the lowest index on).

Size: 2 bits and an index for each kept value, and 32 bits a chunk: 928 bits for 4096 values with ``k`` 64, or .227 bits
a value.  Error: |x| for what is not kept, ``max(|x|, level)`` for the rest: topk is made for error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import (
    BIG,
    FIELD_BITS,
    LEVELS_BYTES,
    DecodeError,
    bytes_tensor,
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
from diloco.codec.ranged import RangedCodec
from diloco.codec.structures import Kind, Layout

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BITS = MappingProxyType({256: 8, 4096: 12, 65536: 16})


@dataclass(frozen=True, slots=True)
class TopKCodec(RangedCodec):
    """The ``k`` largest of each ``chunk`` values, a multiple of 4; see the module for the format."""

    name: str
    chunk: int
    k: int

    def __post_init__(self) -> None:
        if self.chunk not in INDEX_BITS:
            raise ValueError(f"codec is {self.name!r}: its chunk must be 256, 4096 or 65536")
        if not (4 <= self.k <= self.chunk // 4 and self.k % 4 == 0):
            raise ValueError(f"codec is {self.name!r}: it keeps a multiple of 4 values, from 4 to {self.chunk // 4}")

    @property
    def granule(self) -> int:
        """Return the chunk."""
        return self.chunk

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        return Layout(Kind.TOPK, self.chunk, self.k)

    def encode_chunk(self, chunk: Tensor, payload: Tensor, numel: int, start: int, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        for first, rows in self._runs(chunk):
            indices, levels, fields = self._select(rows)
            pieces = (
                levels.to(torch.int16).view(-1).view(torch.uint8),
                _pack_indices(indices.view(-1), INDEX_BITS[self.chunk]),
                pack(fields.view(-1), FIELD_BITS),
            )
            places = self.sections(numel, start + first, start + first + rows.numel())
            for (at, size), piece in zip(places, pieces, strict=True):
                payload[at : at + size] = piece
            if decoded is not None:
                _scatter(indices, levels, fields, decoded[first : first + rows.numel()])

    def decode_chunk(self, payload: memoryview, numel: int, start: int, out: Tensor) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        for first, rows in self._runs(out):
            places = self.sections(numel, start + first, start + first + rows.numel())
            raw = [payload[at : at + size] for at, size in places]
            kept = self._kept(rows.shape[1])
            count = len(rows) * kept
            levels = bytes_tensor(raw[0], torch.int16).to(torch.int32).view(-1, 2)
            packed = bytes_tensor(raw[1], torch.uint8)
            indices = _unpack_indices(packed, count, INDEX_BITS[self.chunk], self.name).view(-1, kept)
            fields = unpack(bytes_tensor(raw[2], torch.uint8), count, FIELD_BITS, self.name).view(-1, kept)
            self._check(indices, levels, fields, rows.shape[1])
            _scatter(indices, levels, fields, rows.view(-1))

    def payload_bytes(self, numel: int) -> int:
        """Return 4 bytes a chunk, and an index and 2 bits for each kept value, both rounded up to a byte."""
        return self._fields_start(numel) + packed_bytes(self._num_kept(numel), FIELD_BITS)

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the places of the levels, the indices and the fields."""
        index_bits = INDEX_BITS[self.chunk]
        first, last = LEVELS_BYTES * (start // self.chunk), LEVELS_BYTES * -(-stop // self.chunk)
        before, count = self._num_kept(start), self._num_kept(stop) - self._num_kept(start)
        indices_start = self._indices_start(numel) + before * index_bits // 8
        fields_start = self._fields_start(numel) + before * FIELD_BITS // 8
        indices, fields = packed_bytes(count, index_bits), packed_bytes(count, FIELD_BITS)
        return (first, last - first), (indices_start, indices), (fields_start, fields)

    def error_bound(self, values: Tensor) -> Tensor:
        """The value itself, or its level where that is larger."""
        bound = values.abs()
        for start, rows in self._runs(values):
            indices, levels, fields = self._select(rows)
            _scatter(indices, levels, fields & BIG, reached := torch.empty(rows.numel()))
            bound[start : start + rows.numel()] = torch.maximum(rows.abs().view(-1), reached)
        return bound

    def _runs(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """View ``values`` as whole chunks, and what is left as one shorter chunk, each with its start."""
        whole = values.numel() // self.chunk * self.chunk
        runs = [(0, values[:whole].view(-1, self.chunk)), (whole, values[whole:].view(1, -1))]
        return [(start, rows) for start, rows in runs if rows.numel()]

    def _kept(self, count: int) -> int:
        """How many of a chunk of ``count`` values are kept."""
        return min(count, -(-count * self.k // (4 * self.chunk)) * 4)

    def _num_kept(self, numel: int) -> int:
        """How many of ``numel`` values are kept."""
        return numel // self.chunk * self.k + self._kept(numel % self.chunk)

    def _indices_start(self, numel: int) -> int:
        return LEVELS_BYTES * -(-numel // self.chunk)

    def _fields_start(self, numel: int) -> int:
        return self._indices_start(numel) + packed_bytes(self._num_kept(numel), INDEX_BITS[self.chunk])

    def _select(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kept indices (int64, rising), both levels (int32) and the fields (uint8) of each row."""
        width = rows.shape[1]
        found, top = units(magnitudes(rows, self.name))
        # No two keys are equal, so it does not matter how a machine's selection treats equal ones.
        keys = found.to(torch.int64) * width + torch.arange(width - 1, -1, -1)
        chosen = torch.topk(keys, self._kept(width), dim=1, sorted=False).values
        indices = (width - 1 - chosen % width).sort(dim=1).values
        kept = found.gather(1, indices).to(torch.int64)
        counts = torch.full((len(rows),), kept.shape[1], dtype=torch.int64)
        is_big = kept > -(-kept.sum(dim=1) // counts)[:, None]
        return indices, *two_levels(kept, top, is_big, counts, is_negative(rows.gather(1, indices)))

    def _check(self, indices: Tensor, levels: Tensor, fields: Tensor, width: int) -> None:
        """Raise ``DecodeError`` for what ``_select`` never makes."""
        check_levels(levels, fields, torch.tensor(fields.shape[1]), self.name)
        if not bool((indices[:, 1:] > indices[:, :-1]).all()) or int(indices.max()) >= width:
            raise DecodeError(f"{self.name} payload holds indices that do not rise or lie outside")
        nothing = ((fields & BIG) == 0) & (levels[:, :1] == 0)
        if bool((nothing & (indices != torch.arange(indices.shape[1]))).any()):
            raise DecodeError(f"{self.name} payload holds a value of 0 that is not the first")


def _scatter(indices: Tensor, levels: Tensor, fields: Tensor, out: Tensor) -> None:
    """Write what the chunks say to ``out``, flat."""
    out.zero_()
    out.view(len(indices), -1).scatter_(1, indices, level_values(levels, fields))


def _pack_indices(indices: Tensor, bits: int) -> Tensor:
    """Return the bytes of flat int64 ``indices``."""
    if bits != 12:
        return indices.to(torch.uint8) if bits == 8 else indices.to(torch.int16).view(torch.uint8)
    odd = indices.numel() % 2
    pairs = torch.nn.functional.pad(indices, (0, odd)).view(-1, 2)
    both = pairs[:, 0] | (pairs[:, 1] << 12)
    packed = torch.stack([both & 255, (both >> 8) & 255, both >> 16], dim=1).to(torch.uint8).view(-1)
    return packed[:-1] if odd else packed


def _unpack_indices(packed: Tensor, count: int, bits: int, name: str) -> Tensor:
    """Return ``count`` indices as int64; ``DecodeError`` where what fills up the last byte is not 0."""
    if bits == 8:
        return packed.to(torch.int64)
    if bits == 16:
        return packed.view(torch.int16).to(torch.int64) & 0xFFFF
    odd = count % 2
    triples = torch.nn.functional.pad(packed, (0, odd)).to(torch.int64).view(-1, 3)
    both = triples[:, 0] | (triples[:, 1] << 8) | (triples[:, 2] << 16)
    indices = torch.stack([both & 4095, both >> 12], dim=1).view(-1)
    if odd and int(indices[-1]) != 0:
        raise DecodeError(f"{name} payload holds something behind its last index")
    return indices[:count]
