"""The compiled kernels against their plain definitions: the same bits at every level that this processor has."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from diloco.codec import kernel_library, native
from diloco.codec.base import Add, Carry, DecodeError, NonFiniteError, Towards, digest, payload_view
from diloco.codec.merging import sum_plain
from diloco.codec.native import Kernels, at_level, kernel_digest, kernels, refuse
from diloco.codec.ranged import RangedCodec
from diloco.codec.registry import make_codec
from diloco.codec.structures import SUM_BLOCK, MeasureJob, Status
from tests.codec.pseudo_gradients import trained
from tests.codec.test_contract import samples
from tests.codec.test_ranged import same

BEST = kernels()
LEVELS = [at_level(level) for level in range(BEST.level + 1)] if BEST is not None else []
NAMES = ["fp32", "bf16", "int8", "int8:256", "int8:6", "int4", "int4:64", "int4:128", "int4:256", "int4:2", "int4:4094"]
NAMES += ["topk", "topk:256x8", "topk:4096x1024", "e3m0", "e3m0:8", "int2", "int2:24", "int2:4096", "sign", "sign:8"]
FED = ["bf16", "int8", "int4", "int4:256", "topk", "topk:256x64", "e3m0", "int2", "sign"]
pytestmark = pytest.mark.skipif(BEST is None, reason="no compiled kernels here: " + native.description())
every_level = pytest.mark.parametrize("fast", LEVELS, ids=[kernel_library.LEVELS[fast.level] for fast in LEVELS])


def codec_of(name: str) -> RangedCodec:
    codec = make_codec(name)
    assert isinstance(codec, RangedCodec)
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
    layout = codec.layout
    assert layout is not None
    for kind, terms in inputs().items():
        numel = terms[0].numel()
        plain, told = torch.full((codec.payload_bytes(numel),), 0xA5, dtype=torch.uint8), torch.empty(numel)
        codec.encode_plain(terms, None, plain, told, 0, numel)
        for fast in LEVELS:
            found, said = torch.full_like(plain, 0xA5), torch.empty(numel)
            assert fast.encode(layout, numel, 0, terms, None, found, said) is Status.DONE, (kind, fast.level)
            assert torch.equal(plain, found), (kind, fast.level)
            assert same(told, said), (kind, fast.level)
            assert fast.encode(layout, numel, 0, terms, None, found, None) is Status.DONE, (kind, fast.level)
            assert torch.equal(plain, found), (kind, fast.level)
        held = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        for accumulate in (None, Add(), Towards(0.3)):
            expected = held.clone()
            codec.decode_plain(payload_view(plain), numel, expected, 0, accumulate)
            for fast in LEVELS:
                out, where = held.clone(), (kind, accumulate, fast.level)
                assert fast.decode(layout, numel, 0, payload_view(plain), out, accumulate) is Status.DONE, where
                assert same(out, expected), where


@every_level
@pytest.mark.parametrize(
    ("name", "largest"),
    [(name, 0.0) for name in FED]
    + [(name, 3e37 if name in ("e3m0", "int2", "sign") else 3e38) for name in FED],  # what is left adds up, to 3e38
)
def test_error_feedback(fast: Kernels, name: str, largest: float) -> None:
    """Also where codes have to be held in the midst of others."""
    codec = codec_of(name)
    layout = codec.layout
    assert layout is not None
    base, local = trained(10, seed=4)
    base[3000] += largest
    numel = base.numel()
    plain, found = torch.zeros(numel), torch.zeros(numel)
    for _ in range(3):
        payloads = [torch.empty(codec.payload_bytes(numel), dtype=torch.uint8) for _ in range(2)]
        told, said = torch.empty(numel), torch.empty(numel)
        codec.encode_plain((base, local), Carry(plain, 0.95), payloads[0], told, 0, numel)
        assert fast.encode(layout, numel, 0, (base, local), Carry(found, 0.95), payloads[1], said) is Status.DONE
        assert torch.equal(*payloads)
        assert same(told, said)
        assert same(plain, found)
    assert bool(plain.abs().max() > 0)


@every_level
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_refused(fast: Kernels, name: str) -> None:
    layout = codec_of(name).layout
    assert layout is not None
    for numel, at in ((1, 0), (5000, 0), (5000, 2047), (5000, 4999)):
        for bad in (float("nan"), float("inf"), -float("inf")):
            values = torch.zeros(numel)
            values[at] = bad
            payload = torch.empty(codec_of(name).payload_bytes(numel), dtype=torch.uint8)
            assert fast.encode(layout, numel, 0, (values,), None, payload, None) is Status.NOT_FINITE
            assert fast.encode(layout, numel, 0, (torch.zeros(numel), values), None, payload, None) is Status.NOT_FINITE


@pytest.mark.parametrize("name", NAMES)
def test_hostile_payloads_are_refused_as_the_definition_does(name: str) -> None:
    codec = codec_of(name)
    layout = codec.layout
    assert layout is not None
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
        for fast in LEVELS:
            where, out = f"seed {seed}, level {fast.level}", torch.empty(numel)
            status = fast.decode(layout, numel, 0, bytes(good), out, None)
            outcomes.add(status)
            assert (status is Status.DONE) == (not why), f"{where}: {status!r}, {why}"
            if why:
                with pytest.raises(DecodeError) as caught:
                    refuse(status, codec.name, layout)
                # Of several faults either may be named.
                assert str(caught.value).startswith(f"{codec.name} payload holds"), where
            else:
                assert same(out, expected), where
    assert Status.DONE in outcomes
    assert len(outcomes) > 1 or layout.block > 2000


@every_level
@pytest.mark.parametrize("name", ["fp32", "int4", "int8:96", "topk", "int2"])
def test_sums(fast: Kernels, name: str) -> None:
    codec = codec_of(name)
    layout = codec.layout
    assert layout is not None
    for numel in (1, 15, 17, 1023, 1025, 3 * SUM_BLOCK, 10_001):
        generator = torch.Generator().manual_seed(numel)
        values, against = (torch.randn(numel, generator=generator) for _ in range(2))
        payload = codec.encode(values)
        expected, out = codec.decode(payload, numel), torch.empty(numel)
        assert fast.sum_of_products(values, against).hex() == sum_plain(values, against).hex()
        made = kernel_digest(4 * numel)
        job = MeasureJob(out=out.data_ptr(), digest=None if made is None else made.address)
        assert fast.measure(layout, numel, 0, payload, numel, against, job) is Status.DONE
        assert same(out, expected)
        assert made is None or made.text() == digest(expected)
        assert job.largest == float(expected.abs().max())
        assert float(job.squares).hex() == sum_plain(expected, expected).hex()
        assert float(job.products).hex() == sum_plain(expected, against).hex()
        assert float(job.against_squares).hex() == sum_plain(against, against).hex()


def test_blocks_larger_than_a_tile_stay_on_torch() -> None:
    assert BEST is not None
    codec = codec_of("int4:65536")
    assert not BEST.fits(codec.layout)
    assert BEST.fits(codec_of("int4:4096").layout)
    assert not BEST.fits(codec_of("int4:6").layout, codec_of("int4:4094").layout)
    assert not BEST.fits(codec_of("int4").layout, None)
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    assert codec.decode(codec.encode(values), 70_000).shape == values.shape


def test_the_kernels_round_as_torch_does() -> None:
    """Their additions with a factor are told how; both ways exist on machines that torch runs on."""
    assert BEST is not None
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(2**13), 2**13, (1001,), generator=generator) / 2**12 for _ in range(2))
    alpha = 1 + 2.0**-12  # so that the exact sum fits into fp64
    once, twice = (a.double() + b.double() * alpha).float(), a + b * alpha
    assert not torch.equal(once, twice)
    assert torch.equal(torch.add(a, b, alpha=alpha), once if BEST.fused else twice)


def test_errors_reach_those_who_encode() -> None:
    with pytest.raises(NonFiniteError, match="int4 was to encode a NaN"):
        make_codec("int4").encode(torch.tensor([float("nan")]))
