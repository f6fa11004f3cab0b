"""topk: the bytes themselves, ties, and what is refused; ``test_blocks`` has the bytes of many values."""

from __future__ import annotations

import contextlib
import struct

import pytest
import torch

from diloco.codec.base import DecodeError
from diloco.codec.registry import make_codec
from tests.codec.values import ALL, running

SMALL = make_codec("topk:256x4")


@pytest.mark.parametrize(("chunk", "bits"), [(4096, 12), (65536, 16)])
def test_bytes(chunk: int, bits: int) -> None:
    codec, values, places = make_codec(f"topk:{chunk}x4"), torch.zeros(chunk), [1, 2, 4000, chunk - 1]
    values[torch.tensor(places)] = torch.tensor([-1.0, 4.0, 1.0, -4.0])
    payload = codec.encode(values)
    indices = sum(place << number * bits for number, place in enumerate(places)).to_bytes(bits // 2, "little")
    assert payload == struct.pack("<2H", 0x3F80, 0x4080) + indices + bytes([0b11_00_01_10])
    assert torch.equal(codec.decode(payload, chunk), values)
    values = torch.zeros(256)  # Of equal ones the first are kept.
    values[200] = -3.0
    payload = SMALL.encode(values)
    assert payload == struct.pack("<2H", 0, 0x4040) + bytes([0, 1, 2, 200, 0b11_00_00_00])
    assert torch.equal(SMALL.decode(payload, 256), values)


@pytest.mark.parametrize(
    ("low", "high", "indices", "fields", "numel", "why"),
    [
        (0x3F80, 0, [3, 2, 7, 9], 0, 256, "do not rise"),
        (0x3F80, 0, [3, 3, 7, 9], 0, 256, "do not rise"),
        (0x3F80, 0x3F80, [1, 2, 7, 9], 1, 256, "levels"),
        (0x3F80, 0x3F00, [1, 2, 7, 9], 1, 256, "levels"),
        (0x3F80, 0x4000, [1, 2, 7, 9], 0, 256, "levels"),
        (0x3F80, 0x4000, [1, 2, 7, 9], 0b01_01_01_01, 256, "levels"),
        (0x3F80, 0, [1, 2, 7, 9], 1, 256, "levels"),
        (0, 0, [0, 1, 2, 3], 0b10, 256, "sign without a value"),
        (0, 0x3F80, [0, 1, 3, 9], 0b01_00_00_00, 256, "not the first"),
        (0, 0x3F80, [0, 1, 3, 9], 0b01_01_00_00, 256, None),
        (0x8000, 0, [0, 1, 2, 3], 0, 256, "scale"),
        (0, 0x7FC0, [0, 1, 2, 3], 1, 256, "scale"),
        (0x3F80, 0, [1, 2, 7, 100], 0, 101, None),
        (0x3F80, 0, [1, 2, 7, 100], 0, 100, "outside"),
    ],
)
@pytest.mark.parametrize("level", ALL)
def test_what_encode_never_makes_is_refused(
    low: int, high: int, indices: list[int], fields: int, numel: int, why: str | None, level: str
) -> None:
    payload = struct.pack("<2H", low, high) + bytes(indices) + bytes([fields])
    with running(level), pytest.raises(DecodeError, match=why) if why else contextlib.nullcontext():
        SMALL.decode(payload, numel)


@pytest.mark.parametrize("level", ALL)
def test_what_fills_up_the_last_index_and_the_last_field_is_nothing(level: str) -> None:
    codec = make_codec("topk:4096x4")
    good = codec.encode(torch.tensor([1.0, 2.0, 3.0]))
    for at, bit, words in ((8, 0x10, "behind its last index"), (9, 0x40, "behind its last value")):
        with running(level), pytest.raises(DecodeError, match=words):
            codec.decode(good[:at] + bytes([good[at] | bit]) + good[at + 1 :], 3)
