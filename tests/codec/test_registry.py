"""Codecs by name, and the defaults' figures."""

from __future__ import annotations

import random
from fractions import Fraction
from math import inf, nan

import pytest
import torch

from diloco.codec.base import DecodeError, NonFiniteError, digest
from diloco.codec.blocks import E3m0Codec, Int2Codec, Int4Codec, Int8Codec, SignCodec
from diloco.codec.entropy import EntropyCodec
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import CODEC_NAMES, Coded, coded, make_codec, values_of
from diloco.codec.site_pass import rebase_pieces, seal_pieces
from diloco.codec.topk import TopKCodec
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from tests.codec.levels import ALL, running
from tests.codec.slow import exponent_of, packed, power
from tests.codec.test_contract import samples
from tests.codec.test_ranged import same

NEW = ["e3m0:32", "int2:64", "sign:256+zstd", "topk:256x4", "topk:65536x16384+zstd3", "int4:32+auto", "topk+auto3"]


@pytest.mark.parametrize(
    "name", [*CODEC_NAMES, "int8:64", "int4:32", "int4:32+zstd1", "fp32+zstd", "bf16+zstd19", *NEW]
)
def test_the_name_is_kept(name: str) -> None:
    assert make_codec(name).name == name


def test_defaults() -> None:
    for name, kind, block in (
        ("int8", Int8Codec, 128),
        ("int4", Int4Codec, 32),
        ("e3m0", E3m0Codec, 128),
        ("int2", Int2Codec, 256),
        ("sign", SignCodec, 128),
    ):
        assert make_codec(name) == kind(name, block)
    assert make_codec("topk") == TopKCodec("topk", chunk=4096, k=64)
    staged = make_codec("int4+zstd")
    assert isinstance(staged, EntropyCodec)
    assert staged.level == 1
    assert staged.inner == make_codec("int4")


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("e3m0", 4.0625),
        ("e3m0:32", 4.25),
        ("int2", 2.125),
        ("sign", 1.125),
        ("topk", 928 / 4096),
        ("topk:256x16", 0.75),
    ],
)
def test_bits_a_value(name: str, bits: float) -> None:
    numel = 65536 * 3
    assert 8 * make_codec(name).payload_bytes(numel) / numel == bits


def test_lossless() -> None:
    assert [name for name in (*CODEC_NAMES, "fp32+zstd", "int4+zstd") if make_codec(name).lossless] == [
        "fp32",
        "fp32+zstd",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "int3",
            "int4:",
            "int4:-2",
            "int4+",
            "int4+zstd1.5",
            "int4+auto20",
            "int4+auto+zstd",
            "INT4",
            "int4 ",
            "int4\n",
            "fp32:32",
            "bf16:2",
        ),
        *("zstd", "topk:4096", "topk:x64", "topk:4096x", "int4:32x4", "fp32:4x4", "sign:x", "topk:1000x64"),
        *("topk:4096x63", "topk:4096x0", "topk:4096x2048", "e3m0:0", "int2:4", "sign:12", "sign:8192"),
    ],
)
def test_an_unknown_name_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(ValueError, match="codec is ") as caught:
        make_codec(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "gauss", "student"),
    [
        ("int4:32", 0.097, 0.145),
        ("int4:256", 0.127, 0.278),
        ("int8:128", 0.0065, 0.0138),
        ("int8:256", 0.0070, 0.0174),
        ("e3m0", 0.194, 0.196),
        ("int2", 0.343, 0.586),
        ("sign", 0.600, 0.763),
        ("topk", 0.939, 0.808),
    ],
)
def test_relative_errors_that_the_defaults_were_chosen_by(name: str, gauss: float, student: float) -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, 1_000_000, generator=generator)
    codec = make_codec(name)
    # Student's t with three degrees of freedom, as a normal over the root of a mean of three squares.
    for values, expected in ((normal[0], gauss), (normal[0] / normal[1:].square().mean(dim=0).sqrt(), student)):
        values = values.contiguous()
        error = (codec.decode(codec.encode(values), values.numel()) - values).norm() / values.norm()
        assert error.item() == pytest.approx(expected, rel=0.05)


# --- A payload stands for the values that it decodes to --------------------------------------------------------------


def test_values_and_payloads_stand_for_each_other() -> None:
    values = torch.randn(333, generator=torch.Generator().manual_seed(1))
    codec = make_codec("int4")
    held = Coded(codec, codec.encode(values), 333)
    assert same(values_of(held), codec.decode(codec.encode(values), 333))
    assert coded(held) is held
    assert values_of(values) is values
    assert coded(values).codec.lossless
    assert same(coded(values).values(), values)


# --- What all codecs of fields share ---------------------------------------------------------------------------------

NAMES = ["e3m0:8", "int2:8", "sign:8", "topk:256x4", "topk:256x64", "topk:4096x64"]


@pytest.mark.parametrize("name", NAMES)
def test_no_two_payloads_mean_the_same(name: str) -> None:
    """Whatever is changed in a payload is refused or changes a value."""
    codec = make_codec(name)
    for seed in range(300):
        rng = random.Random(seed)
        numel = rng.choice([9, 300, 520])
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        values[torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < rng.choice([0, 0.5, 0.95])] = 0.0
        good = codec.encode(values)
        decoded = codec.decode(good, numel)
        damaged = bytearray(good)
        damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        try:
            other = codec.decode(bytes(damaged), numel)
        except DecodeError:
            continue
        assert not torch.equal(other, decoded), f"{name}, seed {seed}"
        assert not bool((other.view(torch.int32) == -(2**31)).any()), f"{name}, seed {seed}: a minus zero"


@pytest.mark.parametrize("name", ["e3m0:8", "int2:8", "sign:8"])
def test_a_range_is_checked_for_its_own_bytes_only(name: str) -> None:
    codec = make_codec(name).plain
    payload = bytearray(codec.encode(torch.randn(64, generator=torch.Generator().manual_seed(0))))
    width = 1 if name.startswith("e3m0") else 2
    payload[:width] = b"\xff" * width
    codec.decode_into(memoryview(payload), 64, torch.empty(56), 8)
    with pytest.raises(DecodeError):
        codec.decode_into(memoryview(payload), 64, torch.empty(8), 0)


@pytest.mark.parametrize("name", ["e3m0:0", "int2:12", "sign:4104"])
def test_block_is_checked(name: str) -> None:
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 4096"):
        make_codec(name)


# --- A site's passes over a model in pieces --------------------------------------------------------------------------

SIZES = [[1], [0, 17], [4096], [1, 1, 4095, 0, 3], [2048, 2048, 2049], [5000, 1, 333, 7000]]
SENT = [[], ["int4:32"], ["int8", "fp32", "topk:256x8"]]


def draw(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def in_flight(names: list[str], numel: int) -> list[Coded]:
    codecs = [make_codec(name) for name in names]
    return [Coded(codec, codec.encode(draw(numel, 50 + at, 1e-3)), numel) for at, codec in enumerate(codecs)]


def cut(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Pieces with memory of their own, at places that are no multiple of anything."""
    return [torch.cat([torch.zeros(at % 3), each])[at % 3 :] for at, each in enumerate(values.split(sizes))]


@pytest.mark.parametrize("codec_name", ["int4:32", "int8", "bf16", "fp32", "topk:256x8", "e3m0"])
@pytest.mark.parametrize("sent", SENT, ids=len)
def test_what_is_sealed_is_the_pseudo_gradient(codec_name: str, sent: list[str]) -> None:
    codec = make_codec(codec_name)
    for sizes in [*SIZES, [RANGE_VALUES, 1001]]:
        numel = sum(sizes)
        base, held = draw(numel, 1), in_flight(sent, numel)
        local = base - draw(numel, 2, 1e-3)
        pieces = cut(local, sizes)
        wanted = codec.encode(pseudo_gradient(base, local, [each.values() for each in held]))
        decoded, norms = codec.decode(wanted, numel), set()
        for level in ALL:
            payload = torch.full((codec.payload_bytes(numel),), 0xA5, dtype=torch.uint8)
            with running(level):
                found = seal_pieces(pieces, base, held, codec, payload)
            assert payload.numpy().tobytes() == wanted, (sizes, level)
            assert found.digest == digest(decoded)
            norms.add(found.norm)
        assert norms.pop() == pytest.approx(float(decoded.double().norm()), rel=1e-9, abs=1e-12)
        assert same(torch.cat(pieces), local), "the model was written to"


def test_values_of_every_kind_are_sealed_as_they_are_encoded() -> None:
    codec = make_codec("int4:32")
    for kind, values in samples(5).items():
        numel = values.numel()
        if not numel:
            continue
        wanted = codec.encode(values)
        for level in ALL:
            payload = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
            with running(level):
                seal_pieces([torch.zeros(numel)], values, [], codec, payload)
            assert payload.numpy().tobytes() == wanted, kind


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_not_sealed(bad: float) -> None:
    codec, local = make_codec("int4"), torch.zeros(5000)
    local[4321] = bad
    for level in ALL:
        payload = torch.empty(codec.payload_bytes(5000), dtype=torch.uint8)
        with running(level), pytest.raises(NonFiniteError):
            seal_pieces([local], torch.zeros(5000), [], codec, payload)


@pytest.mark.parametrize("merged", SENT, ids=len)
def test_a_version_is_taken_as_rebase_defines(merged: list[str]) -> None:
    for sizes in [*SIZES, [RANGE_VALUES, 1001]]:
        numel = sum(sizes)
        old, new, held = draw(numel, 3), draw(numel, 4), in_flight(merged, numel)
        local = old - draw(numel, 5, 1e-3)
        wanted = rebase(local, old, new, [each.values() for each in held])
        before = [old.clone(), new.clone()]
        for level in ALL:
            pieces = cut(local, sizes)
            with running(level):
                rebase_pieces(pieces, old, new, held)
            assert same(torch.cat(pieces), wanted), (sizes, level)
        assert same(old, before[0])
        assert same(new, before[1])


def test_nothing_trained_is_the_new_base_with_its_zeros() -> None:
    old, new = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([-0.0, 0.0, -0.0])
    for level in ALL:
        local = old.clone()
        with running(level):
            rebase_pieces([local], old, new, [])
        assert same(local, new)


def test_a_payload_that_nobody_made_is_refused() -> None:
    codec = make_codec("int4:32")
    payload = bytearray(codec.encode(torch.ones(64)))
    payload[1] |= 0x80  # A negative scale.
    ruined = Coded(codec, memoryview(payload), 64)
    for level in ALL:
        with running(level), pytest.raises(DecodeError):
            rebase_pieces([torch.zeros(64)], torch.zeros(64), torch.zeros(64), [ruined])


# --- e3m0 ------------------------------------------------------------------------------------------------------------

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
