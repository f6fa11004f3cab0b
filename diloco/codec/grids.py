"""Codecs that round a block's values to a few points: e3m0, int2 and sign.

A payload has one scale or two for each block, and a field for each value.  A block is ``block`` consecutive values of
the fragment, counted from its start; the last may be shorter.  A :class:`Grid` says what points there are.

Byte layout, little-endian: first the scales of all blocks, then the fields of all values, packed as ``base.pack``
does.  No two payloads mean the same values: a grid refuses what its ``encode`` never makes.

e3m0 (:class:`PowerGrid`): a sign and three bits of exponent, so powers of two and nothing between them (Streaming
DiLoCo, 2501.18512).  Everything is arithmetic on the bits of fp32, so every machine makes the same.  With ``bits``
those of |x|::

    level = min((bits + 2**22) >> 23, 254)      the exponent of the nearest power of two; a tie (1.5 * 2**k) goes up
    top   = largest level of the block          which is its scale, one byte
    code  = level - (top - 7)                   where that is at least 1
          = 1                                   below that, where bits >> 23 >= top - 7: x is nearer to code 1 than to 0
          = 0                                   otherwise, and wherever level is 0
    x'    = 2**(top - 7 + code - 127)           with the sign of x; 0 for the code 0

A level of 0 is less than 2**-127, which goes to 0; nothing decodes to a subnormal.  In a block the values reach over
seven powers of two, a factor of 64; what is smaller than half of the last goes to 0.

A field has 4 bits: the code in the low three, 1 for a negative x' in the fourth.  Refused on decoding: a top of 255, a
sign without a code, a code whose power is below 2**-126, and a block without the code 7 whose top is not 0 (the same
values have a smaller top), or with any where it is.

Size: 4 bits a value and 8 a block: 4.0625 with blocks of 128.  Error: |x| / 3 from 0.75 * 2**(top - 133) on, at most
``2**(top - 134)`` below that; |x| / 2 from 1.5 * 2**127 on, where the power above would be infinite.  Rounding is to
the nearest in value rather than in the exponent: on data that is uniform between two powers the mean is kept.

int2 and sign: a block's values at two levels or at one, which are means of their magnitudes.  The means are those of
the units of ``base``, whole numbers that do not depend on the order of summation.

int2 (:class:`Int2Grid`) has two levels, as ``base.two_levels`` makes them::

    big   = more units than 5/4 of the block's mean, rounded up

5/4 of the mean is where the best two levels meet for Gaussian data (.98 standard deviations, Max 1960), which real
pseudo-gradients are close to in blocks of this size; and a block of one large value among small ones keeps both.

sign (:class:`SignGrid`) has one level (Seide et al. 2014; with feedback and this scale: Karimireddy et al. 2019, arXiv
1901.09847)::

    scale = mean |x|
    x'    = scale, with the sign of x (that of 0 is plus)

A field has 1 bit: 1 for a negative x.  Refused on decoding: a scale that is no normal bf16 or 0, and a field that is
not 0 in a block of scale 0.

In a block that has any level but 0, a value of 0 need not decode to 0: int2 and sign are made for error feedback, which
takes it back.

Size: int2 2 bits a value and 32 a block, 2.125 with blocks of 256; sign 1 bit a value and 16 a block, 1.125 with blocks
of 128.  Error: ``max(|x|, level)`` for each value; in a block the sum of squares shrinks by ``count mean**2`` or more
(less what is cut off the levels), so that with feedback and nothing new the residual goes to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from diloco.codec.base import (
    EXPONENT_MAX,
    EXPONENT_SHIFT,
    FIELD_BITS,
    DecodeError,
    bytes_tensor,
    check_levels,
    check_scales,
    is_negative,
    level_values,
    magnitudes,
    mean_scale,
    pack,
    packed_bytes,
    scale_values,
    two_levels,
    units,
    unpack,
)
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


HALF_STEP = 1 << (EXPONENT_SHIFT - 1)
CODE_MAX = 7
SIGN_FIELD = 8


@dataclass(frozen=True, slots=True)
class PowerGrid:
    """The points of e3m0."""

    @property
    def kind(self) -> Kind:
        """Its own."""
        return Kind.E3M0

    @property
    def bits(self) -> int:
        """4."""
        return 4

    @property
    def scales_type(self) -> torch.dtype:
        """One byte."""
        return torch.uint8

    @property
    def num_scales(self) -> int:
        """1."""
        return 1

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """See :class:`~diloco.codec.grids.Grid`."""
        del counts
        found = magnitudes(rows, name)
        levels = _levels(found)
        top = levels.amax(dim=1)
        lowest = top[:, None] - CODE_MAX
        codes = torch.maximum(levels - lowest, (found >> EXPONENT_SHIFT >= lowest).to(torch.int32))
        codes = torch.where(levels > 0, codes.clamp_(min=0), 0)
        signs = (is_negative(rows) & (codes > 0)).to(torch.int32) * SIGN_FIELD
        return top[:, None], (codes + signs).to(torch.uint8)

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """See :class:`~diloco.codec.grids.Grid`."""
        del counts
        top = scales[:, 0]
        if bool((top > EXPONENT_MAX).any()):
            raise DecodeError(f"{name} payload holds a scale of 255")
        if bool((fields == SIGN_FIELD).any()):
            raise DecodeError(f"{name} payload holds a sign without a code")
        codes = fields & CODE_MAX
        if not torch.equal(codes.amax(dim=1), torch.where(top > 0, CODE_MAX, 0).to(torch.uint8)):
            raise DecodeError(f"{name} payload holds a scale that is not that of its block's largest code")
        lowest = torch.where(codes > 0, codes, CODE_MAX).amin(dim=1)
        if bool(((top > 0) & (top - CODE_MAX + lowest < 1)).any()):
            raise DecodeError(f"{name} payload holds a code below 2**-126")

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """See :class:`~diloco.codec.grids.Grid`."""
        wide = fields.to(torch.int32)
        codes = wide & CODE_MAX
        exponents = scales - CODE_MAX + codes
        signs = (wide & SIGN_FIELD) << 28  # The fourth bit becomes the thirty-second.
        return torch.where(codes > 0, (exponents << EXPONENT_SHIFT) | signs, 0).view(torch.float32)

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """A third of |x|, half at the top of fp32, or half of the block's smallest power."""
        del counts
        top = _levels(magnitudes(rows, name)).amax(dim=1)
        smallest = torch.ldexp(torch.ones(len(rows)), (top - CODE_MAX).clamp(min=0) - 127)
        size = rows.abs()
        share = torch.where(size >= 1.5 * 2.0**127, size / 2, size / 3)
        return torch.maximum(share, smallest[:, None])


def _levels(found: Tensor) -> Tensor:
    return ((found + HALF_STEP) >> EXPONENT_SHIFT).clamp_(max=EXPONENT_MAX)


@dataclass(frozen=True, slots=True)
class Int2Grid:
    """The points of int2."""

    @property
    def kind(self) -> Kind:
        """Its own."""
        return Kind.INT2

    @property
    def bits(self) -> int:
        """2."""
        return FIELD_BITS

    @property
    def scales_type(self) -> torch.dtype:
        """The upper 16 bits of fp32."""
        return torch.int16

    @property
    def num_scales(self) -> int:
        """Low and high."""
        return 2

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """See :class:`~diloco.codec.grids.Grid`."""
        found, top = units(magnitudes(rows, name))
        found = found.to(torch.int64)
        is_big = found > -(-5 * found.sum(dim=1) // (4 * counts))[:, None]
        return two_levels(found, top, is_big, counts, is_negative(rows))

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """See :class:`~diloco.codec.grids.Grid`."""
        check_levels(scales, fields, counts, name)

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """See :class:`~diloco.codec.grids.Grid`."""
        return level_values(scales, fields)

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """The larger of |x| and its level."""
        return torch.maximum(rows.abs(), self.values(*self.encode(rows, counts, name)).abs())


@dataclass(frozen=True, slots=True)
class SignGrid:
    """The points of sign."""

    @property
    def kind(self) -> Kind:
        """Its own."""
        return Kind.SIGN

    @property
    def bits(self) -> int:
        """1."""
        return 1

    @property
    def scales_type(self) -> torch.dtype:
        """The upper 16 bits of fp32."""
        return torch.int16

    @property
    def num_scales(self) -> int:
        """1."""
        return 1

    def encode(self, rows: Tensor, counts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """See :class:`~diloco.codec.grids.Grid`."""
        found, top = units(magnitudes(rows, name))
        scales = mean_scale(found.sum(dim=1, dtype=torch.int64), counts, top)[:, None]
        return scales, (is_negative(rows) & (scales > 0)).to(torch.uint8)

    def check(self, scales: Tensor, fields: Tensor, counts: Tensor, name: str) -> None:
        """See :class:`~diloco.codec.grids.Grid`."""
        del counts
        check_scales(scales, name)
        if bool(((scales == 0) & (fields > 0)).any()):
            raise DecodeError(f"{name} payload holds a sign in a block of scale 0")

    def values(self, scales: Tensor, fields: Tensor) -> Tensor:
        """See :class:`~diloco.codec.grids.Grid`."""
        scale = scale_values(scales)
        return torch.where(fields > 0, -scale, scale)

    def error_bound(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        """The larger of |x| and the scale."""
        return torch.maximum(rows.abs(), self.values(*self.encode(rows, counts, name)).abs())
