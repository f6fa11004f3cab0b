"""What every codec promises, checked for every codec: bound, exact length, zeros, refusal of what is not finite."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import struct

import pytest
import torch

from diloco.codec.base import Codec, DecodeError, NonFiniteError, digest, digest_of
from diloco.codec.registry import make_codec
from tests.codec.bounds import error_bound

FP32_MAX = torch.finfo(torch.float32).max
PLAIN = ["fp32", "bf16", "int8", "int8:256", "int8:2", "int4", "int4:256", "int4:2"]
PLAIN += ["e3m0", "e3m0:8", "int2", "int2:32", "sign", "sign:256", "topk", "topk:256x4", "topk:65536x1024"]
STAGED = ["fp32+zstd", "bf16+zstd1", "int8+zstd3", "int4:32+zstd1", "e3m0+zstd1", "topk+auto", "int8+auto3"]


@functools.cache
def samples(seed: int) -> dict[str, torch.Tensor]:
    """Random, adversarial and pseudo-gradient-like values, of lengths that fill no block; they are only read."""
    generator = torch.Generator().manual_seed(seed)
    numel = 4099 + seed
    gauss = torch.randn(numel, generator=generator)
    wide = gauss * torch.exp2(torch.randint(-149, 128, (numel,), generator=generator).double()).float()
    wide = wide.clamp(-FP32_MAX, FP32_MAX)
    spike = gauss * 1e-6
    spike[numel // 2] = 1e6
    ties = torch.randint(-300, 301, (numel,), generator=generator).float() / 2  # many quotients end on a half
    any_bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    any_bits = torch.where(any_bits.isfinite(), any_bits, 1.0)
    signs = torch.where(gauss > 0, 1.0, -1.0)
    return {
        "gauss": gauss,
        "pseudo-gradient": gauss * torch.exp(torch.randn(numel, generator=generator)) * 1e-4,
        "wide": wide,
        "any bits": any_bits,
        "spike": spike,
        "ties": ties,
        "constant": torch.full((numel,), 0.1),
        "constants": signs * 0.1,
        "minus zero": torch.full((numel,), -0.0),
        "one subnormal": torch.zeros(numel).index_fill_(0, torch.tensor([7]), 2.0**-149),
        "subnormals": torch.randint(-(2**23), 2**23, (numel,), generator=generator).float() * 2.0**-149,
        "smallest normals": signs * 2.0**-126 * (1 + gauss.abs()),
        "largest": signs * FP32_MAX,
        "near the largest": signs * FP32_MAX * (1 - gauss.abs() * 0.01).clamp(0, 1),
        "largest and small": torch.where(gauss > 2, FP32_MAX, gauss),
        "tail": gauss / (torch.rand(numel, generator=generator) + 1e-6),
    }


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_error_bound_length_and_determinism(name: str) -> None:
    codec = make_codec(name)
    for kind, values in samples(0).items():
        where = f"{name}, {kind}"
        payload = codec.encode(values)
        assert len(payload) <= codec.payload_bytes_max(values.numel()), where
        if name in PLAIN:
            assert len(payload) == codec.payload_bytes(values.numel()), where
        decoded = codec.decode(payload, values.numel())
        assert decoded.dtype == torch.float32, where
        assert decoded.shape == values.shape, where
        assert bool(decoded.isfinite().all()), where
        error = (decoded.double() - values.double()).abs()
        excess = error - error_bound(codec, values).double()
        assert float(excess.max()) <= 0, f"{where}: {float(excess.max())} over at {int(excess.argmax())}"
        assert codec.encode(values) == payload, where
        assert torch.equal(codec.decode(memoryview(payload), values.numel()), decoded), where
        if codec.lossless:
            assert torch.equal(decoded.view(torch.int32), values.view(torch.int32)), where


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_every_length(name: str) -> None:
    codec = make_codec(name)
    for numel in (0, 1, 2, 31, 32, 33, 127, 129, 262_144, 262_277):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        payload = codec.encode(values)
        decoded = codec.decode(payload, numel)
        assert len(payload) <= codec.payload_bytes_max(numel), numel
        assert decoded.shape == (numel,)
        assert bool(((decoded - values).abs() <= error_bound(codec, values)).all()), numel


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_what_is_not_finite_is_never_encoded(name: str) -> None:
    places = ((1, 0), (1000, 0), (1000, 999), (300_001, 299_000))
    for (numel, at), bad in itertools.product(places, (math.nan, math.inf, -math.inf)):
        values = torch.zeros(numel)
        values[at] = bad
        with pytest.raises(NonFiniteError, match="NaN or an infinity"):
            make_codec(name).encode(values)


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_the_number_of_threads_does_not_show(name: str) -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    codec = make_codec(name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        payload = codec.encode(values)
        decoded = codec.decode(payload, values.numel())
        torch.set_num_threads(3)
        assert codec.encode(values) == payload
        assert torch.equal(codec.decode(payload, values.numel()), decoded)
    finally:
        torch.set_num_threads(before)


def accepts_only_finite(codec: Codec, payload: bytes, numel: int) -> bool:
    """Return whether it was decoded; anything but a finite tensor or a DecodeError fails the test."""
    try:
        decoded = codec.decode(payload, numel)
    except DecodeError:
        return False
    assert decoded.shape == (numel,)
    assert bool(decoded.isfinite().all())
    return True


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_hostile_payloads(name: str) -> None:
    codec = make_codec(name)
    numel = 131
    good = codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    for wrong in (numel - 40, numel + 40, 0):
        if codec.payload_bytes(wrong) == codec.payload_bytes(numel):
            continue  # top-k keeps as many of these; how many values there are is said beside the payload.
        assert not accepts_only_finite(codec, good, wrong), f"{name}: {wrong} values"
    for cut in range(len(good)):
        assert not accepts_only_finite(codec, good[:cut], numel), f"{name}: cut at {cut}"
    assert not accepts_only_finite(codec, good + b"\0", numel), name
    assert not accepts_only_finite(codec, good * 2, numel), name
    for seed in range(150):
        rng = random.Random(seed)
        length = rng.choice([len(good), codec.payload_bytes(numel), rng.randint(0, 2 * len(good))])
        noise = rng.randbytes(length)
        if rng.random() < 0.3 and noise:
            noise = bytes([rng.randint(0, 1)]) + noise[1:]
        try:
            accepts_only_finite(codec, noise, numel)
            damaged = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randint(0, 255)
            accepts_only_finite(codec, bytes(damaged), numel)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {error!r}") from error


@pytest.mark.parametrize(("name", "block", "code_max"), [("int4:32", 32, 7), ("int8:128", 128, 127)])
def test_12_a_rounded_value_is_within_half_a_scale(name: str, block: int, code_max: int) -> None:
    """In numbers of its own, beside the bound that the codec states of itself."""
    values = torch.randn(64 * block, generator=torch.Generator().manual_seed(1)) * 1e-3
    codec = make_codec(name)
    payload = bytes(codec.encode(values))
    scales = torch.tensor(
        [struct.unpack("<f", b"\0\0" + payload[2 * at : 2 * at + 2])[0] for at in range(64)], dtype=torch.float64
    )
    peaks = values.view(64, block).abs().amax(dim=1).double()
    assert bool((scales * code_max >= peaks * (1 - 1e-7)).all()), "the largest value has no code"
    assert bool((scales * code_max <= peaks * (1 + 2**-7)).all()), "wider than bf16 asks for"
    off = (codec.decode(payload, values.numel()).double() - values.double()).abs().view(64, block)
    assert bool((off <= scales[:, None] / 2 * (1 + 1e-6)).all())
    assert float((off / scales[:, None]).max()) > 0.49


def test_12_a_power_of_two_is_within_a_third() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    codec = make_codec("e3m0:128")
    found = codec.decode(codec.encode(values.view(-1)), values.numel()).view(64, 128)
    tops = found.abs().amax(dim=1, keepdim=True)
    share, off = values.abs() / tops, (found - values).abs()
    is_large = share >= 0.75 / 64
    assert bool((off[is_large] <= values.abs()[is_large] / 3 * (1 + 1e-6)).all())
    assert bool((off <= tops / 128)[~is_large].all())
    assert 0 < int((~is_large).sum()) < is_large.numel() // 20
    assert float((off / values.abs())[is_large].max()) > 0.32


def test_a_digest_is_that_of_the_little_endian_bytes() -> None:
    values, raw = torch.tensor([1.0, -0.0, 2.0**-149]), struct.pack("<3f", 1.0, -0.0, 2.0**-149)
    assert digest(values) == digest_of(raw)
    assert digest(values, like="f" * 64) == hashlib.sha256(raw).hexdigest()
    assert digest(values) != digest(values.abs())


def test_what_is_decoded_may_be_written_to_without_a_change_of_the_payload() -> None:
    payload = bytes(8)
    values = make_codec("fp32").decode(payload, 2)
    values.fill_(1.0)
    assert payload == bytes(8)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]],
    ids=["2d", "double", "step"],
)
def test_what_is_no_fragment_is_our_own_mistake(values: torch.Tensor) -> None:
    for name in PLAIN:
        with pytest.raises(AssertionError, match="values"):
            make_codec(name).encode(values)
