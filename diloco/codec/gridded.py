"""Blocks whose values are rounded to a few points: one scale or two for each block, and a field for each value.

A block is ``block`` consecutive values of the fragment, counted from its start; the last may be shorter.  What points
there are is said by a :class:`Grid`: e3m0 in ``powers``, int2 and sign in ``means``.

Byte layout, little-endian: first the scales of all blocks, then the fields of all values, packed as
``fields`` says.  No two payloads mean the same values: a grid refuses what its ``encode`` never makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from diloco.codec.contract import bytes_tensor
from diloco.codec.fields import pack, packed_bytes, unpack
from diloco.codec.ranged import RangedCodec
from diloco.codec.structures import Kind, Layout

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_MAX = 4096


class Grid(Protocol):
    """The points of one kind of codec.  Rows are blocks; ``counts`` (int64) says how many values each really has.

    Values behind a row's count are 0, and so are their fields.
    """

    @property
    def kind(self) -> Kind:
        """How the compiled kernels know it."""
        ...

    @property
    def bits(self) -> int:
        """Of a field: 1, 2 or 4."""
        ...

    @property
    def scales_type(self) -> torch.dtype:
        """Of a scale as it is stored: uint8 or int16."""
        ...

    @property
    def num_scales(self) -> int:
        """Of a block."""
        ...

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return the scales (blocks, num_scales) as int32 and the fields as uint8; ``NonFiniteError`` if it must."""
        ...

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """Raise ``DecodeError`` for anything that ``encode`` never makes."""
        ...

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """Return what checked scales and fields say, fp32, exactly."""
        ...

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """Return the largest error of each value."""
        ...


@dataclass(frozen=True, slots=True)
class GridCodec(RangedCodec):
    """Blocks of ``block`` values, a multiple of 8, on ``grid``; see the module for the layout."""

    name: str
    block: int
    grid: Grid

    def __post_init__(self) -> None:
        if not (8 <= self.block <= BLOCK_MAX and self.block % 8 == 0):
            raise ValueError(f"codec is {self.name!r}: its block must be a multiple of 8 from 8 to {BLOCK_MAX}")

    @property
    def granule(self) -> int:
        """Return the block."""
        return self.block

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        return Layout(self.grid.kind, self.block)

    def encode_chunk(self, chunk: Tensor, payload: Tensor, numel: int, start: int, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        rows, counts = self._rows(chunk)
        scales, fields = self.grid.encode(rows, counts, self.name)
        stored = scales.to(self.grid.scales_type).view(-1).view(torch.uint8)
        packed = pack(fields.view(-1)[: chunk.numel()], self.grid.bits)
        places = self.sections(numel, start, start + chunk.numel())
        for (at, size), piece in zip(places, (stored, packed), strict=True):
            payload[at : at + size] = piece
        if decoded is not None:
            decoded.copy_(self.grid.values(scales, fields).view(-1)[: chunk.numel()])

    def decode_chunk(self, payload: memoryview, numel: int, start: int, out: Tensor) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        raw = [payload[at : at + size] for at, size in self.sections(numel, start, start + out.numel())]
        scales = bytes_tensor(raw[0], self.grid.scales_type).to(torch.int32).view(-1, self.grid.num_scales)
        packed = bytes_tensor(raw[1], torch.uint8)
        fields, counts = self._rows(unpack(packed, out.numel(), self.grid.bits, self.name))
        self.grid.check(scales, fields, counts, self.name)
        out.copy_(self.grid.values(scales, fields).view(-1)[: out.numel()])

    def payload_bytes(self, numel: int) -> int:
        """Return the scales of each block and a field for each value, rounded up to a byte."""
        return self._scales_bytes(numel) + packed_bytes(numel, self.grid.bits)

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the place of the scales and that of the fields."""
        first, last = self._scales_bytes(start), self._scales_bytes(stop)
        codes_start, codes_stop = self._codes_place(numel, start, stop - start)
        return (first, last - first), (codes_start, codes_stop - codes_start)

    def error_bound(self, values: Tensor) -> Tensor:
        """Return what the grid says."""
        bound = torch.empty_like(values)
        for start, stop in self.chunks(values.numel()):
            rows, counts = self._rows(values[start:stop])
            bound[start:stop] = self.grid.error_bound(rows, counts, self.name).view(-1)[: stop - start]
        return bound

    def _scales_bytes(self, numel: int) -> int:
        """Of the blocks of ``numel`` values."""
        return self.grid.scales_type.itemsize * self.grid.num_scales * -(-numel // self.block)

    def _codes_place(self, numel: int, start: int, count: int) -> tuple[int, int]:
        """Where the fields of ``count`` values from ``start`` lie; ``start`` is one of a block's, a whole byte's."""
        codes, bits = self._scales_bytes(numel), self.grid.bits
        return codes + start * bits // 8, codes + packed_bytes(start + count, bits)

    def _rows(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """View the chunk as (blocks, block), the last block filled up with zeros, and say how many values each has."""
        missing = -chunk.numel() % self.block
        if missing:
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        rows = chunk.view(-1, self.block)
        counts = torch.full((len(rows),), self.block, dtype=torch.int64)
        counts[-1] -= missing
        return rows, counts
