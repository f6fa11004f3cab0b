"""Codecs of single values (fp32, bf16), and of blocks with one or two scales (int8, int4, e3m0, int2, sign).

A block is ``block`` consecutive values of the fragment, counted from its start; the last may be shorter.

Byte layout, little-endian: first the scales of all blocks, then the fields of all values, packed by ``pack``.

int8 and int4 (:class:`IntCodec`) are symmetric, with one bf16 scale per block.  With ``code_max`` = 127 (int8) or 7
(int4) and ``peak`` = max |x| of the block::

    scale = 0                                    if peak is 0
          = max(bf16_up(fp32(peak / code_max)), 2**-126)   otherwise; bf16_up rounds to the next bf16 away from zero
    code  = round_half_even(fp32(x / scale))     which is in [-code_max, code_max]; 0 where scale is 0
    x'    = fp32(code * scale)

The scale is rounded up so that no code leaves its range.  It is never subnormal, so a kernel that flushes subnormals
to zero decodes the same bits.  ``code * scale`` has at most 7 + 8 significant bits and is exact in fp32.

A field of int8 is the code as a two's-complement byte, one of int4 is ``code + 8`` (1 to 15); where the number of
values of int4 is odd, the last four bits hold the code 0 (8).

Error: ``|x' - x| <= scale / 2``, and scale is at most ``(1 + 2**-7) peak / code_max`` (or 2**-126).  Rounding the
quotient to fp32 first adds no error: division keeps order and a tie is an fp32 number, so a quotient never crosses one;
and an x beside a tie is off it by an ulp of x, which is more than half an ulp of the quotient, so it never lands on
one.  One exception near the top of fp32: where ``code_max * scale`` overflows, the codes are limited to the largest
magnitude whose value is finite, and the error bound is one scale.

e3m0, int2 and sign round a block's values to a few points.  Different payloads mean different values: payloads that
their ``encode`` never makes are refused.

e3m0 (:class:`E3m0Codec`): a sign and three bits of exponent, so only powers of two (Streaming DiLoCo, arXiv
2501.18512).  Everything is arithmetic on the bits of fp32, so every machine gives the same result.  With ``bits`` those
of |x|::

    level = min((bits + 2**22) >> 23, 254)      the exponent of the nearest power of two; a tie (1.5 * 2**k) goes up
    top   = largest level of the block          which is its scale, one byte
    code  = level - (top - 7)                   where that is at least 1
          = 1                                   below that, where bits >> 23 >= top - 7: x is nearer to code 1 than to 0
          = 0                                   otherwise, and wherever level is 0
    x'    = 2**(top - 7 + code - 127)           with the sign of x; 0 for the code 0

A level of 0 means |x| below 2**-127, which becomes 0; nothing decodes to a subnormal.  The values of a block span
seven powers of two, a factor of 64; values below half of the smallest power become 0.

A field has 4 bits: the code in the low three, 1 for a negative x' in the fourth.  Refused on decoding: a top of 255, a
sign without a code, a code whose power is below 2**-126, a block without the code 7 whose top is not 0 (the same
values have a smaller top), and a block with any code whose top is 0.

Size: 4 bits a value and 8 a block: 4.0625 with blocks of 128.  Error: |x| / 3 from 0.75 * 2**(top - 133) on, at most
``2**(top - 134)`` below that; |x| / 2 from 1.5 * 2**127 on, where the power above would be infinite.  Rounding is to
the nearest value, not the nearest exponent: for data that is uniform between two powers this keeps the mean.

int2 and sign: a block's values are rounded to two levels or to one, which are means of magnitudes, computed in the
units below: whole numbers, whose sum does not depend on the order.

int2 (:class:`Int2Codec`) has two levels, as ``two_levels`` makes them::

    big   = more units than 5/4 of the block's mean, rounded up

5/4 of the mean is where the best two levels meet for Gaussian data (.98 standard deviations, Max 1960), which real
pseudo-gradients are close to in blocks of this size; and a block of one large value among small ones keeps both.

sign (:class:`SignCodec`) has one level (Seide et al. 2014; with feedback and this scale: Karimireddy et al. 2019, arXiv
1901.09847)::

    scale = mean |x|
    x'    = scale, with the sign of x (that of 0 is plus)

A field has 1 bit: 1 for a negative x.  Refused on decoding: a scale that is neither a normal bf16 nor 0, and a
field that is not 0 in a block of scale 0.

In a block with any level but 0, a value of 0 need not decode to 0: int2 and sign are made for error feedback, which
corrects that later.

Size: int2 2 bits a value and 32 a block, 2.125 with blocks of 256; sign 1 bit a value and 16 a block, 1.125 with blocks
of 128.  Error: ``max(|x|, level)`` for each value; in a block the sum of squares shrinks by ``count mean**2`` or more
(less the truncation of the levels), so that with feedback and no new input the residual goes to 0.

Fields.  A field has 1, 2, 4 or 8 bits.  Several share a byte, the earlier in the lower bits.

Units.  Magnitudes are counted as whole numbers, so that a mean of them is the same on every machine and in every order
of summation.  A group of values (a block, or a chunk of top-k) has a ``top``, the largest biased exponent of fp32 in
it.  Its unit is ``2**(top - 127 - 23)``, and a value of the group is ``u`` units, with its significand as a whole
number of 24 bits::

    u = significand >> (top - exponent)          which is at most 2**24 - 1; 0 for a subnormal

A sum of such numbers is exact.  The mean of ``count`` of them, times a fraction in some codecs, is rounded up to a
whole number m, so that it is 0 only if all are.  As a scale it is truncated to bf16::

    scale = 0                                                 if m is 0
          = max(bf16_down(m units), 2**-126)        otherwise; bf16_down cuts off the low 16 bits of the fp32 number

m is below 2**24, so it is an fp32 number, and never above the largest value of the group, so the scale is finite.  It
is never subnormal, so a kernel that flushes subnormals to zero reads the same value.

Two levels.  int2 rounds the magnitudes of a block to two levels, and topk those of the values that it keeps.  Each
codec has its own rule for which values are big; it never makes all values of a group big::

    low   = mean of those that are not big, high = mean of those that are, each as ``mean_scale`` makes it of units
    x'    = high where big, low otherwise, with the sign of x (that of 0 is plus)

Where none is big, or high is no larger than low once both are bf16, high is 0 and nothing is big.

A field has 2 bits: 1 for big, 2 for a negative x'.  Different (levels, fields) mean different values.  Refused on
decoding: a level that is neither a normal bf16 nor 0; a high that is neither 0 nor above low; a high of 0 with a big
value, and another high with no big value or only big ones; a sign on a value of 0.

The mean of a set minimises the sum of squared distances to it, so the sum of squares of a group shrinks by
``count mean**2`` or more (less the truncation of the levels, at most 2**-14 of it).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch

from diloco.codec.base import DecodeError, PlainCodec, refuse, refuse_where, require_finite
from diloco.codec.kernel_library import Kind, Status
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# --- Fields, units and levels -----------------------------------------------------------------------------------------


def packed_bytes(numel: int, bits: int) -> int:
    """Return the length of ``numel`` fields."""
    return (numel * bits + 7) // 8


WORDS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""By the number of fields in a byte: the integer type that holds them unpacked, one field in each of its bytes."""


def pack(fields: Tensor, bits: int, filling: int = 0) -> Tensor:
    """Return the packed bytes of flat uint8 ``fields``, each below ``2**bits``; ``filling`` pads the last byte."""
    per_byte = 8 // bits
    fields = torch.nn.functional.pad(fields, (0, -fields.numel() % per_byte), value=filling)
    words = fields.view(WORDS[per_byte])
    packed = words
    for place in range(1, per_byte):
        packed = packed | (words >> (place * (8 - bits)))
    return packed.to(torch.uint8)


def unpack(packed: Tensor, numel: int, bits: int, name: str, filling: int = 0) -> Tensor:
    """Return the ``numel`` fields of ``packed``; ``DecodeError`` where the last byte has another padding."""
    per_byte = 8 // bits
    words = found = packed.to(WORDS[per_byte])
    for place in range(1, per_byte):
        found = found | (words << (place * (8 - bits)))
    fields: Tensor = found.view(torch.uint8) & (2**bits - 1)
    refuse_where(fields[numel:] != filling, Status.BEHIND, name)
    return fields[:numel]


MAGNITUDE_BITS = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
SIGNIFICAND_BITS = 0x007FFFFF
HIDDEN_BIT = 0x00800000
EXPONENT_MAX = 254
EXPONENT_SHIFT = 23
SCALE_MIN_BITS = 0x0080  # the smallest normal bf16
SCALE_MAX_BITS = 0x7F7F


def magnitudes(values: Tensor, name: str) -> Tensor:
    """Return the bits of |x| as int32, which sort like |x|; ``NonFiniteError`` for a NaN or an infinity."""
    found = values.view(torch.int32) & MAGNITUDE_BITS
    require_finite(not found.numel() or int(found.max()) < INFINITY_BITS, name)
    return found


def is_negative(values: Tensor) -> Tensor:
    """Return where x is below 0: not for -0, but for subnormals even on a machine that flushes them."""
    bits = values.view(torch.int32)
    return (bits < 0) & ((bits & MAGNITUDE_BITS) != 0)


def units(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of ``magnitudes`` (groups, values) as int32 units, and the groups' ``top``."""
    exponents = found >> EXPONENT_SHIFT
    top = exponents.amax(dim=1)
    significands = torch.where(exponents > 0, (found & SIGNIFICAND_BITS) | HIDDEN_BIT, 0)
    return significands >> (top[:, None] - exponents).clamp_(max=31), top


def mean_scale(sums: Tensor, counts: Tensor | int, top: Tensor) -> Tensor:
    """Return the scale of each group, the upper 16 bits of its fp32 as int32, for ``sums / counts`` (int64) units."""
    means = -(-sums // counts)
    bits = means.to(torch.float32).view(torch.int32)
    # m as an fp32 number has the exponent 127 for one unit; the unit's own is top - 23.
    shifted = (bits >> 16) + ((top - 127 - EXPONENT_SHIFT) << 7)
    return torch.where(means > 0, shifted.clamp(min=SCALE_MIN_BITS), 0)


def scale_values(scale_bits: Tensor) -> Tensor:
    """Return scales (int32, the upper 16 bits) as fp32."""
    return (scale_bits << 16).view(torch.float32)


def check_scales(scale_bits: Tensor, name: str) -> None:
    """Refuse scales that ``mean_scale`` never makes: NaN, infinity, negatives (with -0) and subnormals."""
    legal = (scale_bits == 0) | ((scale_bits >= SCALE_MIN_BITS) & (scale_bits <= SCALE_MAX_BITS))
    refuse_where(~legal, Status.BAD_SCALE, name)


FIELD_BITS = 2
LEVELS_BYTES = 4
BIG, NEGATIVE = 1, 2


def two_levels(found: Tensor, top: Tensor, is_big: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels (groups, 2) as int32, the upper 16 bits of fp32, and the fields (groups, values) as uint8.

    ``found`` are units (int64), ``top`` is that of each group; ``is_big`` and ``negative`` are masks of the values.
    """
    num_big = is_big.sum(dim=1)
    sum_big = torch.where(is_big, found, 0).sum(dim=1)
    low = mean_scale(found.sum(dim=1) - sum_big, found.shape[1] - num_big, top)
    high = mean_scale(sum_big, num_big.clamp(min=1), top)
    high = torch.where(high > low, high, 0)
    is_big = is_big & (high > 0)[:, None]
    signs = negative & (is_big | (low > 0)[:, None])
    return torch.stack([low, high], dim=1), is_big.to(torch.uint8) * BIG + signs.to(torch.uint8) * NEGATIVE


def check_levels(levels: Tensor, fields: Tensor, name: str) -> None:
    """Raise ``DecodeError`` for levels and fields that ``two_levels`` never makes."""
    check_scales(levels, name)
    low, high = levels[:, 0], levels[:, 1]
    is_big = (fields & BIG) > 0
    num_big = is_big.sum(dim=1)
    two = (high > low) & (num_big > 0) & (num_big < fields.shape[1])
    refuse_where(~(two | ((high == 0) & (num_big == 0))), Status.BAD_LEVELS, name)
    refuse_where((fields == NEGATIVE) & (low == 0)[:, None], Status.BAD_SIGN, name)


def level_values(levels: Tensor, fields: Tensor) -> Tensor:
    """Return the fp32 values of checked levels and fields."""
    both = scale_values(levels)
    values = torch.where((fields & BIG) > 0, both[:, 1:], both[:, :1])
    return torch.where((fields & NEGATIVE) > 0, -values, values)


# --- Codecs of blocks -------------------------------------------------------------------------------------------------

FP32_MAX = torch.finfo(torch.float32).max
HALF_STEP = 1 << (EXPONENT_SHIFT - 1)
CODE_MAX = 7
SIGN_FIELD = 8


@dataclass(frozen=True, slots=True)
class BlockCodec(PlainCodec):
    """Blocks of ``block`` values; ``encode_rows`` gives the scales (blocks, scales), int32, and the fields, uint8."""

    name: str
    block: int

    bits: ClassVar[int]
    """Bits of a field: 1, 2, 4 or 8."""
    filling: ClassVar[int] = 0
    """The field that pads the last byte."""
    scales_type: ClassVar[torch.dtype] = torch.int16
    """The stored dtype of a scale: uint8, or int16 for the upper half of an fp32."""
    num_scales: ClassVar[int] = 1
    """Scales of a block."""
    sizes: ClassVar[tuple[int, int, str]] = (8, 4096, "a multiple of 8")
    """A block's size is a multiple of the first number and at most the second; the text is for errors."""

    def __post_init__(self) -> None:
        step, most, words = self.sizes
        if not (step <= self.block <= most and self.block % step == 0):
            raise ValueError(f"codec is {self.name!r}: its block must be {words} from {step} to {most}")

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, length) of the scales and the fields; ``start`` is that of a block, so of a whole byte."""
        size = self.scales_type.itemsize * self.num_scales
        first, last, ahead = [size * -(-each // self.block) for each in (start, stop, numel)]
        begin = start * self.bits // 8
        return (first, last - first), (ahead + begin, packed_bytes(stop, self.bits) - begin)

    def pack(self, *codes: Tensor) -> Sequence[Tensor]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        scales, fields = codes
        stored = scales.to(self.scales_type).view(-1).view(torch.uint8)
        return stored, pack(fields.view(-1), self.bits, self.filling)

    def unpack(self, pieces: Sequence[Tensor], rows: int, width: int) -> tuple[Tensor, ...]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        scales = pieces[0].view(self.scales_type).to(torch.int32).view(rows, self.num_scales)
        fields = unpack(pieces[1], rows * width, self.bits, self.name, self.filling).view(rows, width)
        self.check(scales, fields)
        return scales, fields

    @abstractmethod
    def check(self, scales: Tensor, fields: Tensor) -> None:
        """Raise ``DecodeError`` for scales and fields that ``encode_rows`` never returns."""


class IntCodec(BlockCodec):
    """int8 and int4; blocks of an even number of values."""

    __slots__ = ()
    sizes = (2, 65536, "an even number")
    code_max: ClassVar[int]
    """Largest magnitude of a code; the type's most negative number is unused, for symmetry."""

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See :class:`BlockCodec`."""
        peaks = torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())  # both propagate NaN
        require_finite(is_finite(peaks), self.name)
        rounded_up = ((peaks / self.code_max).view(torch.int32) + 0xFFFF) >> 16
        scale_bits = torch.where(peaks > 0, rounded_up.clamp_(min=SCALE_MIN_BITS), 0)[:, None]
        scales = scale_values(scale_bits)
        # Where the scale is 0 all values are 0, and 0 / 1 gives the code 0.
        divisors = torch.where(scales > 0, scales, 1.0)
        quotients = torch.div(rows, divisors).round_()
        if bool(torch.isinf(scales * self.code_max).any()):
            held = torch.floor(FP32_MAX / divisors)
            quotients = torch.minimum(torch.maximum(quotients, -held), held)
        return scale_bits, quotients.to(torch.int8).view(torch.uint8) + self.filling

    def check(self, scales: Tensor, fields: Tensor) -> None:
        """See :class:`BlockCodec`."""
        check_scales(scales, self.name)
        if int(self._codes(fields).min()) < -self.code_max:
            raise DecodeError(f"{self.name} payload holds a code below {-self.code_max}")

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """Return ``fp32(code * scale)``."""
        scales = scale_values(codes[0])
        values = self._codes(codes[1]).to(torch.float32).mul_(scales)
        if bool(torch.isinf(scales * self.code_max).any()) and not is_finite(values):
            refuse(Status.BEYOND, self.name)
        return values

    def _codes(self, fields: Tensor) -> Tensor:
        return (fields - self.filling if self.filling else fields).view(torch.int8)


class Int8Codec(IntCodec):
    """See the module for the format."""

    __slots__ = ()
    kind, bits, code_max = Kind.INT8, 8, 127


class Int4Codec(IntCodec):
    """See the module for the format."""

    __slots__ = ()
    kind, bits, filling, code_max = Kind.INT4, 4, 8, 7


class E3m0Codec(BlockCodec):
    """See the module for the format."""

    __slots__ = ()
    kind, bits, scales_type = Kind.E3M0, 4, torch.uint8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See :class:`BlockCodec`."""
        found = magnitudes(rows, self.name)
        levels = ((found + HALF_STEP) >> EXPONENT_SHIFT).clamp_(max=EXPONENT_MAX)
        top = levels.amax(dim=1, keepdim=True)
        lowest = top - CODE_MAX
        codes = torch.maximum(levels - lowest, (found >> EXPONENT_SHIFT >= lowest).to(torch.int32))
        codes = torch.where(levels > 0, codes.clamp_(min=0), 0)
        signs = (is_negative(rows) & (codes > 0)).to(torch.int32) * SIGN_FIELD
        return top, (codes + signs).to(torch.uint8)

    def check(self, scales: Tensor, fields: Tensor) -> None:
        """See :class:`BlockCodec`."""
        name, top = self.name, scales[:, 0]
        refuse_where(top > EXPONENT_MAX, Status.BAD_TOP, name)
        refuse_where(fields == SIGN_FIELD, Status.SIGN_ALONE, name)
        codes = fields & CODE_MAX
        refuse_where(codes.amax(dim=1) != torch.where(top > 0, CODE_MAX, 0), Status.OTHER_TOP, name)
        lowest = torch.where(codes > 0, codes, CODE_MAX).amin(dim=1)
        refuse_where((top > 0) & (top - CODE_MAX + lowest < 1), Status.TOO_SMALL, name)

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        scales, wide = codes[0], codes[1].to(torch.int32)
        powers = wide & CODE_MAX
        exponents = scales - CODE_MAX + powers
        signs = (wide & SIGN_FIELD) << 28  # Moves bit 3 of the field to the sign bit 31.
        return torch.where(powers > 0, (exponents << EXPONENT_SHIFT) | signs, 0).view(torch.float32)


class Int2Codec(BlockCodec):
    """See the module for the format."""

    __slots__ = ()
    kind, bits, num_scales = Kind.INT2, FIELD_BITS, 2

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See :class:`BlockCodec`."""
        found, top = units(magnitudes(rows, self.name))
        found = found.to(torch.int64)
        is_big = found > -(-5 * found.sum(dim=1) // (4 * rows.shape[1]))[:, None]
        return two_levels(found, top, is_big, is_negative(rows))

    def check(self, scales: Tensor, fields: Tensor) -> None:
        """See :class:`BlockCodec`."""
        check_levels(scales, fields, self.name)

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return level_values(*codes)


class SignCodec(BlockCodec):
    """See the module for the format."""

    __slots__ = ()
    kind, bits = Kind.SIGN, 1

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See :class:`BlockCodec`."""
        found, top = units(magnitudes(rows, self.name))
        scales = mean_scale(found.sum(dim=1, dtype=torch.int64), rows.shape[1], top)[:, None]
        return scales, (is_negative(rows) & (scales > 0)).to(torch.uint8)

    def check(self, scales: Tensor, fields: Tensor) -> None:
        """See :class:`BlockCodec`."""
        check_scales(scales, self.name)
        refuse_where((scales == 0) & (fields > 0), Status.SIGN_OF_ZERO, self.name)

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        scale = scale_values(codes[0])
        return torch.where(codes[1] > 0, -scale, scale)


# --- Codecs that cast each value by itself ---------------------------------------------------------------------------

BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class Fp32Codec(PlainCodec):
    """fp32, lossless.  Layout: the values, fp32 little-endian."""

    name: str = "fp32"
    block: int = 1

    kind = Kind.FP32
    stored: ClassVar[torch.dtype] = torch.float32
    """The dtype of a value in a payload."""

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the one piece."""
        size = self.stored.itemsize
        return ((size * start, size * (stop - start)),)

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows in the stored dtype."""
        require_finite(is_finite(rows), self.name)
        return (rows,)

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return codes[0].to(torch.float32)

    def pack(self, *codes: Tensor) -> Sequence[Tensor]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return (codes[0].view(-1).view(torch.uint8),)

    def unpack(self, pieces: Sequence[Tensor], rows: int, width: int) -> tuple[Tensor, ...]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        values = pieces[0].view(self.stored).view(rows, width)
        if not is_finite(values):
            refuse(Status.NOT_FINITE, self.name)
        return (values,)


@dataclass(frozen=True, slots=True)
class Bf16Codec(Fp32Codec):
    """Layout: the values, bfloat16 little-endian, rounded to nearest even.

    Values that would round to infinity (above 3.396e38) become the largest bf16 (3.390e38) of their sign.
    """

    name: str = "bf16"

    kind, stored = Kind.BF16, torch.bfloat16

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows in the stored dtype."""
        (finite,) = Fp32Codec.encode_rows(self, rows)  # ``super()`` fails: ``slots`` creates the class twice.
        return (finite.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16),)
