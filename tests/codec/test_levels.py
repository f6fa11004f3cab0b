"""Two levels: what they are, and what of them is refused."""

from __future__ import annotations

import struct

import pytest
import torch

from diloco.codec.base import DecodeError, level_values, magnitudes, two_levels, units
from diloco.codec.registry import make_codec

INT2 = make_codec("int2:8")


def levels_of(values: list[float], is_big: list[bool]) -> list[float]:
    rows = torch.tensor([values])
    found, top = units(magnitudes(rows, "x"))
    levels, fields = two_levels(found.to(torch.int64), top, torch.tensor([is_big]), rows < 0)
    return [float(x) for x in level_values(levels, fields)[0]]


def test_means_of_both_kinds() -> None:
    assert levels_of([1.0, -3.0, 10.0, -20.0], [False, False, True, True]) == [2, -2, 15, -15]
    assert levels_of([0.0, -0.0, 10.0, -0.0], [False, False, True, False]) == [0, 0, 10, 0]


def test_levels_that_are_equal_as_bf16_are_one() -> None:
    assert levels_of([1.0, 1.001], [False, True]) == [1, 1]


@pytest.mark.parametrize(
    ("low", "high", "fields", "why"),
    [
        (0x8000, 0, 0, "negative"),
        (0x7F80, 0, 0, "not finite"),
        (0, 0x7FC0, 1, "not finite"),
        (0x0001, 0, 0, "subnormal"),
        (0x3F80, 0x3F80, 1, "levels"),
        (0x3F80, 0x3F00, 1, "levels"),
        (0x3F80, 0x4000, 0, "levels"),
        (0x3F80, 0x4000, 0x5555, "levels"),
        (0x3F80, 0, 1, "levels"),
        (0, 0, 2, "sign without a value"),
        (0, 0x3F80, 9, "sign without a value"),
        (0, 0x3F80, 3, None),
    ],
)
def test_what_is_never_made_is_refused(low: int, high: int, fields: int, why: str | None) -> None:
    payload = struct.pack("<3H", low, high, fields)
    if why is None:
        assert INT2.decode(payload, 8).tolist() == [-1] + [0] * 7
        return
    with pytest.raises(DecodeError, match=why):
        INT2.decode(payload, 8)


def test_a_short_last_block_of_large_ones_is_refused_too() -> None:
    with pytest.raises(DecodeError, match="levels"):
        INT2.decode(struct.pack("<2HB", 0x3F00, 0x3F80, 0b0101), 2)
