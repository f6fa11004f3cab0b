"""The formats that are told in whole numbers, written a second time: value by value, in exact arithmetic."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

SMALLEST_NORMAL = Fraction(1, 2**126)


def fp32_bits(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def exponent_of(value: float) -> int:
    """The whole k with 2**k <= |value| < 2**(k + 1)."""
    return math.frexp(value)[1] - 1


def slow_units(values: list[float]) -> tuple[list[int], Fraction]:
    """How many units each magnitude has, and the unit; subnormals have none."""
    normal = [abs(x) >= 2.0**-126 for x in values]
    top = max((exponent_of(x) for x, is_normal in zip(values, normal, strict=True) if is_normal), default=-127)
    # Scaling by a power of two is exact in fp64, which has a far wider range than fp32.
    return [int(math.ldexp(abs(x), 23 - top)) if n else 0 for x, n in zip(values, normal, strict=True)], power(top - 23)


def slow_scale(total: Fraction, unit: Fraction) -> tuple[int, Fraction]:
    """The upper 16 bits of the scale of ``total`` units, rounded up to whole ones first, and its value."""
    whole = -int(-total // 1)
    if whole == 0:
        return 0, Fraction(0)
    exact = whole * unit
    if exact < SMALLEST_NORMAL:
        return 0x0080, SMALLEST_NORMAL
    bits = fp32_bits(float(exact)) >> 16
    (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return bits, Fraction(value)


def slow_levels(
    values: list[float], found: list[int], unit: Fraction, is_big: list[bool]
) -> tuple[list[int], list[int]]:
    """Low and high, and the fields."""
    big = [u for u, large in zip(found, is_big, strict=True) if large]
    rest = [u for u, large in zip(found, is_big, strict=True) if not large]
    low = slow_scale(Fraction(sum(rest), len(rest)), unit)[0]
    high = slow_scale(Fraction(sum(big), len(big)), unit)[0] if big else 0
    if high <= low:
        high, is_big = 0, [False] * len(values)
    signs = [x < 0 and (large or low > 0) for x, large in zip(values, is_big, strict=True)]
    return [low, high], [large + 2 * sign for large, sign in zip(is_big, signs, strict=True)]


def packed(fields: list[int], bits: int) -> bytes:
    number = sum(field << (bits * place) for place, field in enumerate(fields))
    return number.to_bytes((len(fields) * bits + 7) // 8, "little")
