"""The compiled kernels against their plain definitions: the same bits at every level that this processor has."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from diloco.codec import native
from diloco.codec.base import (
    BYTES_MIN,
    Add,
    Carry,
    DecodeError,
    NonFiniteError,
    PlainCodec,
    Towards,
    bytes_of,
    digest,
    hashing_kernels,
)
from diloco.codec.kernel_library import SUM_BLOCK
from diloco.codec.merging import Reading, Sums, sum_of_products, sum_plain
from diloco.codec.native import kernels, torch_fuses
from diloco.codec.registry import make_codec
from tests.codec.levels import NATIVE, running
from tests.codec.pseudo_gradients import trained
from tests.codec.test_contract import samples
from tests.codec.test_ranged import same

NAMES = ["fp32", "bf16", "int8", "int8:256", "int8:6", "int4", "int4:64", "int4:128", "int4:256", "int4:2", "int4:4094"]
NAMES += ["topk", "topk:256x8", "topk:4096x1024", "e3m0", "e3m0:8", "int2", "int2:24", "int2:4096", "sign", "sign:8"]
FED = ["bf16", "int8", "int4", "int4:256", "topk", "topk:256x64", "e3m0", "int2", "sign"]
pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels here: " + native.description())
every_level = pytest.mark.parametrize("level", NATIVE)


def codec_of(name: str) -> PlainCodec:
    codec = make_codec(name)
    assert isinstance(codec, PlainCodec)
    return codec


@functools.cache
def inputs() -> dict[str, tuple[torch.Tensor, ...]]:
    """Values alone, differences, and differences less what is in flight, of sizes that fill neither block nor tile."""
    found: dict[str, tuple[torch.Tensor, ...]] = {kind: (values,) for kind, values in samples(5).items()}
    for steps in (1, 30):
        found[f"trained {steps}"] = trained(steps, seed=3)
    before, after = trained(1, seed=3)
    before[1500] = 3e38
    found["trained, with a giant"] = (before, after)
    generator = torch.Generator().manual_seed(1)
    tiny = torch.exp2(torch.randint(-149, -100, (5000,), generator=generator).double())
    found["tiny"] = (torch.randn(5000, generator=generator) * tiny.float(),)
    for numel in (1, 33, 2047, 2048, 2049, 10_001):
        terms = [torch.randn(numel, generator=generator) for _ in range(4)]
        found[f"{numel}"] = (terms[0], terms[0] + terms[1] * 1e-3)
        found[f"{numel} in flight"] = tuple(terms)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_encoding_and_decoding(name: str) -> None:
    codec = codec_of(name)
    assert kernels(codec.granule) is not None
    for kind, terms in inputs().items():
        numel = terms[0].numel()
        plain, told = torch.full((codec.payload_bytes(numel),), 0xA5, dtype=torch.uint8), torch.empty(numel)
        codec.encode_plain(terms, None, plain, told, 0, numel)
        for level in NATIVE:
            found, said = torch.full_like(plain, 0xA5), torch.empty(numel)
            with running(level):
                codec.encode_into(terms, found, said)
                assert torch.equal(plain, found), (kind, level)
                assert same(told, said), (kind, level)
                codec.encode_into(terms, found)
                assert torch.equal(plain, found), (kind, level)
        held = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        for accumulate in (None, Add(), Towards(0.3)):
            expected = held.clone()
            codec.decode_plain(bytes_of(plain), numel, expected, 0, accumulate)
            for level in NATIVE:
                out = held.clone()
                with running(level):
                    codec.decode_into(bytes_of(plain), numel, out, accumulate=accumulate)
                assert same(out, expected), (kind, accumulate, level)


@every_level
@pytest.mark.parametrize(
    ("name", "largest"),
    [(name, 0.0) for name in FED]
    + [(name, 3e37 if name in ("e3m0", "int2", "sign") else 3e38) for name in FED],  # what is left adds up, to 3e38
)
def test_error_feedback(level: str, name: str, largest: float) -> None:
    """Also where codes have to be held in the midst of others."""
    codec = codec_of(name)
    base, local = trained(10, seed=4)
    base[3000] += largest
    numel = base.numel()
    plain, found = torch.zeros(numel), torch.zeros(numel)
    for _ in range(3):
        payloads = [torch.empty(codec.payload_bytes(numel), dtype=torch.uint8) for _ in range(2)]
        told, said = torch.empty(numel), torch.empty(numel)
        codec.encode_plain((base, local), Carry(plain, 0.95), payloads[0], told, 0, numel)
        with running(level):
            codec.encode_into((base, local), payloads[1], said, carry=Carry(found, 0.95))
        assert torch.equal(*payloads)
        assert same(told, said)
        assert same(plain, found)
    assert bool(plain.abs().max() > 0)


@every_level
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_refused(level: str, name: str) -> None:
    codec = codec_of(name)
    for numel, at in ((1, 0), (5000, 0), (5000, 2047), (5000, 4999)):
        for bad in (float("nan"), float("inf"), -float("inf")):
            values = torch.zeros(numel)
            values[at] = bad
            payload = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
            for terms in ((values,), (torch.zeros(numel), values)):
                with running(level), pytest.raises(NonFiniteError):
                    codec.encode_into(terms, payload)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_payloads_are_refused_as_the_definition_does(name: str) -> None:
    codec = codec_of(name)
    outcomes = set()
    for seed in range(60):
        rng = random.Random(seed)
        numel = rng.choice([1, 5, 33, 259, 2051])
        good = bytearray(codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(seed))))
        for _ in range(rng.randint(0, 2)):
            good[rng.randrange(len(good))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randint(0, 255)])
        expected, why = torch.empty(numel), ""
        try:
            codec.decode_plain(bytes(good), numel, expected, 0, None)
        except DecodeError as error:
            why = str(error)
        for level in NATIVE:
            where, out, found = f"seed {seed}, level {level}", torch.empty(numel), ""
            with running(level):
                try:
                    codec.decode_into(bytes(good), numel, out)
                except DecodeError as error:
                    found = str(error)
            outcomes.add(found)
            assert bool(found) == bool(why), f"{where}: {found!r}, {why!r}"
            if found:  # Of several faults either may be named.
                assert found.startswith(f"{codec.name} payload holds"), where
            else:
                assert same(out, expected), where
    assert "" in outcomes
    assert len(outcomes) > 1 or codec.granule > 2000


@every_level
@pytest.mark.parametrize("name", ["fp32", "int4", "int8:96", "topk", "int2"])
def test_sums(level: str, name: str) -> None:
    codec = codec_of(name)
    for numel in (1, 15, 17, 1023, 1025, 3 * SUM_BLOCK, 10_001):
        generator = torch.Generator().manual_seed(numel)
        values, against = (torch.randn(numel, generator=generator) for _ in range(2))
        payload = codec.encode(values)
        expected = codec.decode(payload, numel)
        pairs = [(expected, expected), (expected, against), (against, against)]
        with running(level):
            assert sum_of_products(values, against) == sum_plain(values, against)
            if 4 * numel < BYTES_MIN:
                continue
            assert hashing_kernels(4 * numel, "", codec.granule) is not None
            reading = Reading(codec, numel)
            found = reading.read(payload, numel, 0, numel, against)
            assert found == Sums(float(expected.abs().max()), *(sum_plain(*pair) for pair in pairs))
            assert reading.digest() == digest(expected)


def test_blocks_larger_than_a_tile_stay_on_torch() -> None:
    codec = codec_of("int4:65536")
    assert kernels(codec.granule) is None
    assert kernels(4096) is not None
    assert kernels(6, 4094) is None
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    assert codec.decode(codec.encode(values), 70_000).shape == values.shape


def test_the_kernels_round_as_torch_does() -> None:
    """Their additions with a factor are told how; both ways exist on machines that torch runs on."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(2**13), 2**13, (1001,), generator=generator) / 2**12 for _ in range(2))
    alpha = 1 + 2.0**-12  # so that the exact sum fits into fp64
    once, twice = (a.double() + b.double() * alpha).float(), a + b * alpha
    assert not torch.equal(once, twice)
    assert torch.equal(torch.add(a, b, alpha=alpha), once if torch_fuses() else twice)


def test_errors_reach_those_who_encode() -> None:
    with pytest.raises(NonFiniteError, match="int4 was to encode a NaN"):
        make_codec("int4").encode(torch.tensor([float("nan")]))
