"""int8 and int4: the bytes themselves, against a second, slow writing of the format in exact arithmetic."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import pytest
import torch

from diloco.codec.base import DecodeError
from diloco.codec.blocks import Int4Codec, Int8Codec

INT8, INT4 = Int8Codec("int8:4", 4), Int4Codec("int4:4", 4)


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def bf16_up(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int((bits + 0xFFFF) >> 16)


def slow_encode(values: list[float], bits: int, block: int) -> bytes:
    """The module's docstring, value by value, the quotient exact where the module rounds it to fp32 first."""
    code_max = 2 ** (bits - 1) - 1
    scales, codes = [], []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        peak = max(abs(x) for x in part)
        scale_bits = max(bf16_up(fp32(peak / code_max)), 0x0080) if peak else 0
        (scale,) = struct.unpack("<f", struct.pack("<I", scale_bits << 16))
        scales.append(scale_bits)
        codes += [round(Fraction(x) / Fraction(scale)) if scale else 0 for x in part]
    if bits == 8:
        return struct.pack(f"<{len(scales)}H{len(codes)}b", *scales, *codes)
    nibbles = [code + 8 for code in codes] + [8] * (len(codes) % 2)
    packed = [low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)]
    return struct.pack(f"<{len(scales)}H{len(packed)}B", *scales, *packed)


@pytest.mark.parametrize(("bits", "block"), [(8, 4), (8, 128), (4, 4), (4, 32)])
def test_against_the_format_written_slowly(bits: int, block: int) -> None:
    codec = Int8Codec("x", block) if bits == 8 else Int4Codec("x", block)
    for seed in range(40):
        rng = random.Random(seed)
        spread = rng.choice([0, 3, 120])
        values = [fp32(rng.gauss(0, 1) * 2.0 ** rng.randint(-spread, spread)) for _ in range(rng.randint(1, 300))]
        if seed % 3 == 0:
            values = [round(v) / 2 for v in values] if spread == 3 else values
        expected = slow_encode(values, bits, block)
        assert codec.encode(torch.tensor(values)) == expected, f"seed {seed}"


def test_values_beside_a_tie_go_to_their_own_side() -> None:
    """For every mantissa that a scale can have and every tie: the two neighbours of the tie, and the tie itself."""
    codec = Int8Codec("int8:2", 2)
    scales = (1 + torch.arange(128) / 128)[:, None]
    ties = scales * (torch.arange(127) + 0.5)
    below, above = (torch.nextafter(ties, torch.tensor(end)) for end in (0.0, float("inf")))
    for x, expected in (
        (below, torch.arange(127)),
        (above, torch.arange(127) + 1),
        (ties, torch.arange(127) + torch.arange(127) % 2),
    ):
        values = torch.stack([(scales * 127).expand_as(x), x], dim=-1).reshape(-1)  # the first of two sets the scale
        payload = codec.encode(values)
        codes = torch.frombuffer(bytearray(payload[values.numel() :]), dtype=torch.int8)
        assert torch.equal(codes.view(128, 127, 2)[..., 1], expected.to(torch.int8).expand(128, 127))


def test_int8_bytes() -> None:
    # The peak 127 gives scale 1 (bf16 0x3F80); 2.5 and 3.5 are ties and go to the even neighbour.
    payload = INT8.encode(torch.tensor([127.0, 2.5, 3.5, -1.0, 0.0, -0.0]))
    assert payload == struct.pack("<2H6b", 0x3F80, 0, 127, 2, 4, -1, 0, 0)
    assert INT8.decode(payload, 6).tolist() == [127, 2, 4, -1, 0, 0]


def test_int4_bytes_with_an_odd_end() -> None:
    payload = INT4.encode(torch.tensor([7.0, 2.5, -7.0, -1.0, 14.0]))
    assert payload == struct.pack("<2H", 0x3F80, 0x4000) + bytes([0xAF, 0x71, 0x8F])
    assert INT4.decode(payload, 5).tolist() == [7, 2, -7, -1, 14]
    assert INT4.payload_bytes(5) == 7


def test_scale_is_rounded_up() -> None:
    peak = 127 * (1 + 2.0**-23)
    (scale_bits,) = struct.unpack("<H", INT8.encode(torch.tensor([peak]))[:2])
    assert scale_bits == 0x3F81


def test_bits_a_value() -> None:
    numel = 128 * 1000
    assert 8 * Int8Codec("x", 128).payload_bytes(numel) / numel == 8.125
    assert 8 * Int4Codec("x", 32).payload_bytes(numel) / numel == 4.5


def test_a_product_is_exact_so_every_kernel_has_the_same_bits() -> None:
    values = torch.randn(4001, generator=torch.Generator().manual_seed(4))
    payload = INT8.encode(values)
    decoded = INT8.decode(payload, 4001)
    scales = struct.unpack("<1001H", payload[:2002])
    codes = struct.unpack("<4001b", payload[2002:])
    for i, (code, value) in enumerate(zip(codes, decoded.tolist(), strict=True)):
        (scale,) = struct.unpack("<f", struct.pack("<I", scales[i // 4] << 16))
        assert Fraction(value) == Fraction(scale) * code


@pytest.mark.parametrize(
    ("scale", "why"),
    [(0x7F80, "inf"), (0x7FC0, "nan"), (0xFF80, "-inf"), (0xBF80, "-1"), (0x8000, "-0"), (0x0001, "subnormal")],
)
def test_a_scale_that_encode_never_makes_is_refused(scale: int, why: str) -> None:
    for codec, codes in ((INT8, bytes(4)), (INT4, bytes([0x88, 0x88]))):
        with pytest.raises(DecodeError, match="scale"):
            codec.decode(struct.pack("<H", scale) + codes, 4)


def test_a_code_that_encode_never_makes_is_refused() -> None:
    with pytest.raises(DecodeError, match="below -127"):
        INT8.decode(struct.pack("<H4b", 0x3F80, 0, 0, -128, 0), 4)
    for byte in (0x80, 0x08):
        with pytest.raises(DecodeError, match="below -7"):
            INT4.decode(struct.pack("<H", 0x3F80) + bytes([0x88, byte]), 4)


def test_a_product_beyond_fp32_is_refused() -> None:
    with pytest.raises(DecodeError, match="beyond fp32"):
        INT8.decode(struct.pack("<H4b", 0x7F00, 0, 127, 0, 0), 4)
    assert INT8.decode(struct.pack("<H4b", 0x7F00, 0, 1, 0, 0), 4).tolist() == [0, 2.0**127, 0, 0]


def test_filling_that_is_not_zero_is_refused() -> None:
    good = INT4.encode(torch.tensor([1.0, 2.0, 3.0]))
    assert good[-1] >> 4 == 8
    with pytest.raises(DecodeError, match="behind its last value"):
        INT4.decode(good[:-1] + bytes([good[-1] & 0x0F | 0x90]), 3)


@pytest.mark.parametrize("block", [0, 1, 3, 65538])
def test_block_is_checked(block: int) -> None:
    with pytest.raises(ValueError, match="even number from 2 to 65536"):
        Int4Codec("int4:x", block)
