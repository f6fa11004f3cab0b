"""e3m0: the bytes themselves, against the nearest of eight points in exact arithmetic, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from diloco.codec.base import DecodeError
from diloco.codec.registry import make_codec
from tests.codec.slow import exponent_of, packed, power
from tests.codec.test_contract import samples

CODEC = make_codec("e3m0:8")


def slow_level(value: float) -> int:
    """The biased exponent of the nearest power of two, the larger of two as near; 0 below half of the smallest."""
    if abs(value) < 2.0**-127:
        return 0
    k = exponent_of(value)
    return min(max(k + (abs(value) >= 1.5 * 2.0**k) + 127, 1), 254)


def slow_encode(values: list[float], block: int) -> bytes:
    tops, fields = [], []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        top = max(slow_level(x) for x in part)
        tops.append(top)
        points = {code: power(top - 7 + code - 127) for code in range(1, 8) if top - 7 + code >= 1}
        for x in part:
            size = abs(Fraction(x))
            away = {0: size} | {code: abs(size - point) for code, point in points.items()}
            code = max(away, key=lambda code, away=away: (-away[code], code))
            fields.append(code | 8 if x < 0 and code else code)
    return bytes(tops) + packed(fields, 4)


@pytest.mark.parametrize("kind", sorted(samples(0)))
def test_against_the_nearest_point(kind: str) -> None:
    values = samples(0)[kind][:203]
    assert CODEC.encode(values) == slow_encode(values.tolist(), 8)


def test_bytes() -> None:
    payload = CODEC.encode(torch.tensor([1.0, -1.5, 0.7, 0.75, 2.0**-5, -(2.0**-6), 2.0**-6 * 0.999, -0.0, 3.0]))
    # 1.5 is a tie and goes up to 2, whose exponent 128 is the top; 2**-6 is half of the smallest point and goes up.
    assert payload == bytes([128, 129, 0xF6, 0x65, 0x91, 0x00, 0x07])
    assert CODEC.decode(payload, 9).tolist() == [1, -2, 0.5, 1, 2**-5, -(2**-5), 0, 0, 4]


def test_the_top_of_fp32_stays_finite() -> None:
    top = torch.finfo(torch.float32).max
    assert CODEC.decode(CODEC.encode(torch.tensor([top, -top])), 2).tolist() == [2.0**127, -(2.0**127)]


@pytest.mark.parametrize(
    ("scale", "first", "why"),
    [
        (255, 0x07, "scale of 255"),
        (100, 0x87, "sign without a code"),
        (100, 0x66, "not that of its block's largest code"),
        (0, 0x01, "not that of its block's largest code"),
        (7, 0x17 - 0x10, None),
        (6, 0x17, "below 2"),
        (1, 0x67, "below 2"),
    ],
)
def test_what_encode_never_makes_is_refused(scale: int, first: int, why: str | None) -> None:
    payload = bytes([scale, first, 0, 0, 0])
    if why is None:
        CODEC.decode(payload, 8)
        return
    with pytest.raises(DecodeError, match=why):
        CODEC.decode(payload, 8)


def test_what_is_decoded_is_encoded_to_the_same_bytes() -> None:
    for kind, values in samples(1).items():
        payload = CODEC.encode(values)
        assert CODEC.encode(CODEC.decode(payload, values.numel())) == payload, kind


def test_values_spread_evenly_keep_their_mean() -> None:
    values = torch.linspace(1, 2, 4097)[:4096]
    decoded = make_codec("e3m0").decode(make_codec("e3m0").encode(values), 4096)
    assert decoded.mean().item() == pytest.approx(values.mean().item(), rel=1e-3)
