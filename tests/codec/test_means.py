"""int2 and sign: the bytes themselves, against a second, slow writing, what is refused, and that residuals shrink."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from diloco.codec.base import DecodeError
from diloco.codec.registry import make_codec
from tests.codec.slow import packed, slow_levels, slow_scale, slow_units
from tests.codec.test_contract import samples

INT2, SIGN = make_codec("int2:8"), make_codec("sign:8")


def slow_encode(values: list[float], block: int, bits: int) -> bytes:
    scales: list[int] = []
    fields: list[int] = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        found, unit = slow_units(part)
        if bits == 1:
            scale = slow_scale(Fraction(sum(found), len(part)), unit)[0]
            scales.append(scale)
            fields += [int(scale > 0 and x < 0) for x in part]
        else:
            limit = math.ceil(Fraction(5 * sum(found), 4 * len(part)))
            levels, mine = slow_levels(part, found, unit, [u > limit for u in found])
            scales += levels
            fields += mine
    return struct.pack(f"<{len(scales)}H", *scales) + packed(fields, bits)


@pytest.mark.parametrize("kind", sorted(samples(0)))
def test_against_the_format_written_slowly(kind: str) -> None:
    values = samples(0)[kind][:395]
    for codec, bits in ((INT2, 2), (SIGN, 1)):
        assert codec.encode(values) == slow_encode(values.tolist(), 8, bits), codec.name


def test_int2_bytes() -> None:
    # The mean is 1.5, so from 1.875 on a value is a large one; the means of both kinds are 1 and 3.
    values = torch.tensor([1.75, -1.75, 1.0, -1.0, 0.5, -0.0, 3.5, -2.5, 1.0])
    payload = INT2.encode(values)
    assert payload == struct.pack("<4H", 0x3F80, 0x4040, 0x3F80, 0) + bytes([0b10_00_10_00, 0b11_01_00_00, 0])
    assert INT2.decode(payload, 9).tolist() == [1, -1, 1, -1, 1, 1, 3, -3, 1]


def test_one_large_value_and_nothing_else_is_kept_as_it_is() -> None:
    values = torch.zeros(256)
    values[3] = -1.5e30
    assert torch.equal(make_codec("int2").decode(make_codec("int2").encode(values), 256), values.bfloat16().float())


def test_sign_bytes() -> None:
    payload = SIGN.encode(torch.tensor([2.0, -2.0, 1.0, -0.0, 0.0, 0.0, -3.0, 0.0, -7.0]))
    assert payload == struct.pack("<2H", 0x3F80, 0x40E0) + bytes([0b0100_0010, 1])
    assert SIGN.decode(payload, 9).tolist() == [1, -1, 1, 1, 1, 1, -1, 1, -7]


def test_sign_refuses_what_encode_never_makes() -> None:
    with pytest.raises(DecodeError, match="scale 0"):
        SIGN.decode(struct.pack("<HB", 0, 1), 8)
    with pytest.raises(DecodeError, match="behind its last value"):
        SIGN.decode(struct.pack("<HB", 0x3F80, 0b100), 2)


@pytest.mark.parametrize("name", ["int2:8", "int2", "sign:8", "sign"])
def test_the_squares_of_a_residual_shrink_by_what_is_promised(name: str) -> None:
    codec = make_codec(name)
    for kind, values in samples(2).items():
        if float(values.abs().max()) < 1e-30:
            continue  # Where the smallest scale is larger than the values.
        whole = values[: 4096 // codec.granule * codec.granule].double()
        residual = whole - codec.decode(codec.encode(values), values.numel())[: whole.numel()].double()
        blocks, left = whole.view(-1, codec.granule), residual.view(-1, codec.granule)
        promised = codec.granule * blocks.abs().mean(dim=1).square()
        large = blocks.abs().amax(dim=1) < 1e38
        shrunk = blocks.square().sum(dim=1) - left.square().sum(dim=1)
        assert bool((shrunk >= promised * 0.999)[large].all()), kind
