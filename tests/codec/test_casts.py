"""fp32 and bf16: the bytes themselves."""

from __future__ import annotations

import struct

import pytest
import torch

from diloco.codec.base import DecodeError
from diloco.codec.blocks import BF16_MAX, Bf16Codec, Fp32Codec


def test_fp32_is_the_values_themselves() -> None:
    numbers = (1.5, -0.0, 3.0e38)
    assert Fp32Codec().encode(torch.tensor(numbers)) == struct.pack("<3f", *numbers)


def test_bf16_rounds_to_nearest_even() -> None:
    one, step = 0x3F80, 2.0**-7
    values = torch.tensor([1.0, 1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, -1.0])
    assert Bf16Codec().encode(values) == struct.pack("<5H", one, one, one + 2, one + 1, 0xBF80)


def test_bf16_stays_finite_at_the_top() -> None:
    top = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    assert Bf16Codec().decode(Bf16Codec().encode(top), 2).tolist() == [BF16_MAX, -BF16_MAX]


@pytest.mark.parametrize("code", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_bf16_refuses_what_is_not_finite(code: int) -> None:
    with pytest.raises(DecodeError, match="NaN or an infinity"):
        Bf16Codec().decode(struct.pack("<2H", 0, code), 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fp32_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(DecodeError, match="NaN or an infinity"):
        Fp32Codec().decode(struct.pack("<2f", 0.0, value), 2)
