"""Symmetric blockwise integer codecs: int8 and int4, one bf16 scale per block.

A block is ``block`` consecutive values of the fragment, counted from its start; the last may be shorter.  With
``code_max`` = 127 (int8) or 7 (int4) and ``peak`` = max |x| of the block::

    scale = 0                                    if peak is 0
          = max(bf16_up(fp32(peak / code_max)), 2**-126)   otherwise; bf16_up rounds to the next bf16 away from zero
    code  = round_half_even(fp32(x / scale))     which is in [-code_max, code_max]; 0 where scale is 0
    x'    = fp32(code * scale)

The scale is rounded up so that no code leaves its range.  It is never subnormal, so a kernel that flushes subnormals
to zero decodes the same bits.  ``code * scale`` has at most 7 + 8 significant bits and is exact in fp32.

Byte layout, little-endian: first the scales of all blocks, bf16 (2 bytes each), then the codes of all values.  int8:
one two's-complement byte each.  int4: ``code + 8`` (1 to 15), two to a byte: value 2i in the low four bits of byte i,
value 2i + 1 in the high four; where the number of values is odd, the last four bits hold the code 0 (8).

Error: ``|x' - x| <= scale / 2``, and scale is at most ``(1 + 2**-7) peak / code_max`` (or 2**-126).  Rounding the
quotient to fp32 first costs nothing: division keeps order and a tie is an fp32 number, so a quotient never crosses one;
and an x beside a tie is off it by an ulp of x, which makes more than half an ulp of the quotient, so it never lands on
one.  One exception near the top of fp32: where ``code_max * scale`` overflows, the codes are held to the largest
magnitude whose value is finite, and the bound is one scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import DecodeError, NonFiniteError, bytes_tensor
from diloco.codec.ranged import RangedCodec
from diloco.codec.structures import Kind, Layout
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from torch import Tensor

SCALE_MIN = 2.0**-126  # the smallest normal fp32 and bf16
FP32_MAX = torch.finfo(torch.float32).max
SCALE_BYTES = 2
INT4_ZERO = 8  # what stands for the code 0 in four bits
BLOCK_MAX = 65536


@dataclass(frozen=True, slots=True)
class BlockCodec(RangedCodec):
    """int8 or int4 (``bits``) in blocks of ``block`` values, an even number; see the module for the format."""

    name: str
    bits: int
    block: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8)
        if not (2 <= self.block <= BLOCK_MAX and self.block % 2 == 0):
            raise ValueError(f"codec is {self.name!r}: its block must be an even number from 2 to {BLOCK_MAX}")

    @property
    def granule(self) -> int:
        """Return the block."""
        return self.block

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        return Layout(Kind.INT8 if self.bits == 8 else Kind.INT4, self.block)

    @property
    def code_max(self) -> int:
        """Largest magnitude of a code; the most negative number of the type is not used, for symmetry."""
        return int(2 ** (self.bits - 1) - 1)

    def encode_chunk(self, chunk: Tensor, payload: Tensor, numel: int, start: int, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        blocks = self._blocks(chunk)
        scales = self._scales(blocks)
        codes = self._codes(blocks, scales).view(-1)[: chunk.numel()]
        scale_bits = (scales.view(torch.int32) >> 16).to(torch.int16)
        first = start // self.block * SCALE_BYTES
        payload[first : first + SCALE_BYTES * len(scales)] = scale_bits.view(torch.uint8)
        codes_start, codes_stop = self._codes_place(numel, start, chunk.numel())
        payload[codes_start:codes_stop] = codes.view(torch.uint8) if self.bits == 8 else _pack(codes)
        if decoded is not None:
            self._multiply(codes, scales, out=decoded)

    def decode_chunk(self, payload: memoryview, numel: int, start: int, out: Tensor) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        first, last = start // self.block, -(-(start + out.numel()) // self.block)
        scale_bits = bytes_tensor(payload[SCALE_BYTES * first : SCALE_BYTES * last], torch.int16)
        scales = (scale_bits.to(torch.int32) << 16).view(torch.float32)
        self._check_scales(scales)
        codes_start, codes_stop = self._codes_place(numel, start, out.numel())
        raw = bytes_tensor(payload[codes_start:codes_stop], torch.uint8)
        codes = raw.view(torch.int8) if self.bits == 8 else _unpack(raw, out.numel())
        if int(codes.min()) < -self.code_max:
            raise DecodeError(f"{self.name} payload holds a code below {-self.code_max}")
        self._multiply(codes, scales, out=out)

    def payload_bytes(self, numel: int) -> int:
        """Return 2 bytes a block and ``bits`` a value, rounded up to a byte."""
        return self._scales_bytes(numel) + (numel * self.bits + 7) // 8

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the place of the scales and that of the codes."""
        first, last = start // self.block, -(-stop // self.block)
        codes_start, codes_stop = self._codes_place(numel, start, stop - start)
        return (SCALE_BYTES * first, SCALE_BYTES * (last - first)), (codes_start, codes_stop - codes_start)

    def error_bound(self, values: Tensor) -> Tensor:
        """Return half the scale of the value's block, or the whole where the codes had to be held."""
        bound = torch.empty_like(values)
        for start, stop in self.chunks(values.numel()):
            scales = self._scales(self._blocks(values[start:stop]))
            share = torch.where(torch.isinf(scales * self.code_max), 1.0, 0.5)
            bound[start:stop] = (scales * share).repeat_interleave(self.block)[: stop - start]
        return bound

    def _scales_bytes(self, numel: int) -> int:
        return SCALE_BYTES * -(-numel // self.block)

    def _codes_place(self, numel: int, start: int, count: int) -> tuple[int, int]:
        """Where the codes of ``count`` values from ``start`` lie."""
        codes = self._scales_bytes(numel)
        return codes + start * self.bits // 8, codes + ((start + count) * self.bits + 7) // 8

    def _blocks(self, chunk: Tensor) -> Tensor:
        """View the chunk as (blocks, block), the last block filled up with zeros, which change no peak."""
        missing = -chunk.numel() % self.block
        if missing:
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        return chunk.view(-1, self.block)

    def _scales(self, blocks: Tensor) -> Tensor:
        """Return one scale per block, fp32 whose low 16 bits are zero."""
        peaks = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_())  # both pass a NaN on
        if not is_finite(peaks):
            raise NonFiniteError(f"{self.name} was to encode a NaN or an infinity")
        scale_bits = (peaks / self.code_max).view(torch.int32)
        rounded_up = ((scale_bits + 0xFFFF) & -0x10000).view(torch.float32)
        return torch.where(peaks > 0, rounded_up.clamp_(min=SCALE_MIN), 0.0)

    def _codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        # Where the scale is 0 all values are, and 0 / 1 is the code 0.
        divisors = torch.where(scales > 0, scales, 1.0)
        quotients = torch.div(blocks, divisors[:, None]).round_()
        if bool(torch.isinf(scales * self.code_max).any()):
            held = torch.floor(FP32_MAX / divisors)[:, None]
            quotients = torch.minimum(torch.maximum(quotients, -held), held)
        return quotients.to(torch.int8)

    def _check_scales(self, scales: Tensor) -> None:
        """Refuse what ``encode`` never makes: NaN, infinity, negatives (with -0) and subnormals."""
        if scales.numel() == 0:
            return
        legal = (scales.view(torch.int32) == 0) | ((scales >= SCALE_MIN) & (scales <= FP32_MAX))
        if not bool(legal.all()):
            raise DecodeError(f"{self.name} payload holds a scale that is negative, subnormal or not finite")

    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write ``fp32(code * scale)`` into ``out``; refuse a product that is not finite."""
        whole = codes.numel() // self.block * self.block
        out.copy_(codes)
        out[:whole].view(-1, self.block).mul_(scales[: whole // self.block, None])
        if whole < codes.numel():
            out[whole:].mul_(scales[-1])
        if bool(torch.isinf(scales * self.code_max).any()) and not is_finite(out):
            raise DecodeError(f"{self.name} payload holds a value beyond fp32")


def _pack(codes: Tensor) -> Tensor:
    """Pack int8 codes in [-7, 7] into bytes, the earlier of each two in the low four bits."""
    nibbles = codes + INT4_ZERO
    if nibbles.numel() % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=INT4_ZERO)
    pairs = nibbles.view(torch.int16)  # low byte: the earlier nibble; high byte: the later one
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _unpack(packed: Tensor, numel: int) -> Tensor:
    """Return the int8 codes in [-8, 7] of ``packed``; ``DecodeError`` where the filling is not the code 0."""
    pairs = packed.to(torch.int16)
    codes = ((pairs | (pairs << 4)) & 0x0F0F).view(torch.int8) - INT4_ZERO
    if codes.numel() > numel and int(codes[-1]) != 0:
        raise DecodeError("int4 payload holds something behind its last value")
    return codes[:numel]
