"""The compiled kernels against their plain definitions: the same bits at every level that this processor has."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch

from diloco.codec import kernel_library
from diloco.codec.base import (
    BYTES_MIN,
    Carry,
    Hasher,
    KernelDigest,
    bytes_of,
    digest_of,
    hashing,
    kernels,
)
from diloco.codec.kernel_library import SUM_BLOCK, Fold
from diloco.codec.merging import sum_of_products, sum_plain, torch_fuses
from diloco.codec.registry import make_codec
from tests.codec.values import NATIVE, drawn, running, same, samples

NAMES = ["fp32", "bf16", "int8", "int8:256", "int8:6", "int4", "int4:64", "int4:128", "int4:256", "int4:2", "int4:4094"]
NAMES += ["topk", "topk:256x8", "topk:4096x1024", "e3m0", "e3m0:8", "int2", "int2:24", "int2:4096", "sign", "sign:8"]
FED = ["bf16", "int8", "int4", "int4:256", "topk", "topk:256x64", "e3m0", "int2", "sign"]
pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels here: " + kernel_library.description())
every_level = pytest.mark.parametrize("level", NATIVE)
# A stripe of 16 values, a block of 256, a part of 2048: one more and one less, and a rest shorter than a stripe.
SIZES = [61, 64, 255, 256, 257, 271, 272, 273, 1024, 2047, 2048, 2049, 2063, 2064, 2065, 3 * 2048 + 256, 99_999]


def moved(seed: int, giant: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Before and after some steps; ``giant`` is added to a value before."""
    difference = samples(seed)["pseudo-gradient"]
    before = drawn(difference.numel(), seed, 0.1)
    after = before - difference
    before[3000] += giant
    return before, after


@functools.cache
def inputs() -> dict[str, tuple[torch.Tensor, ...]]:
    """Values alone, differences, and differences less what is in flight, of sizes that fill neither block nor tile."""
    found: dict[str, tuple[torch.Tensor, ...]] = {kind: (values,) for kind, values in samples(5).items()}
    found["with a giant"] = moved(3, 3e38)
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
    codec = make_codec(name).plain
    assert kernels(codec) is not None
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
        held = drawn(numel, numel)
        for fold in Fold:
            expected = held.clone()
            codec.decode_plain(bytes_of(plain), numel, expected, 0, fold, 0.3)
            for level in NATIVE:
                out = held.clone()
                with running(level):
                    codec.decode_into(bytes_of(plain), numel, out, fold=fold, share=0.3)
                assert same(out, expected), (kind, fold, level)


@every_level
@pytest.mark.parametrize(
    ("name", "largest"),
    [(name, 0.0) for name in FED]
    + [(name, 3e37 if name in ("e3m0", "int2", "sign") else 3e38) for name in FED],  # what is left adds up, to 3e38
)
def test_error_feedback(level: str, name: str, largest: float) -> None:
    """Also where codes have to be held in the midst of others."""
    codec = make_codec(name).plain
    base, local = moved(4, largest)
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
def test_sums_and_digests(level: str) -> None:
    """A digest is that of the library however the bytes come."""
    for numel in SIZES:
        values, against = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
        with running(level):
            assert sum_of_products(values, against) == sum_plain(values, against)
            for part in (SUM_BLOCK, 2048, 100 * SUM_BLOCK):
                made = hashing(4 * numel, "")
                assert isinstance(made, KernelDigest)
                fast = made.kernels
                for piece in values.split(part):
                    pointers = (ctypes.c_void_p(made.address), ctypes.c_void_p(piece.data_ptr()))
                    fast.library.diloco_digest(fast.level, *pointers, ctypes.c_int64(4 * piece.numel()))
                assert made.text() == digest_of(values.numpy().data), (numel, part)


def test_kernels_hash_only_where_the_kernels_have_its_form() -> None:
    assert isinstance(hashing(BYTES_MIN, ""), KernelDigest)
    assert isinstance(hashing(BYTES_MIN - 1, ""), Hasher)
    assert isinstance(hashing(BYTES_MIN, "xxh3:" + "0" * 32), KernelDigest)
    assert isinstance(hashing(BYTES_MIN, "0" * 64), Hasher), "SHA-256 is what is asked for"


def test_the_kernels_round_as_torch_does() -> None:
    """Their additions with a factor are told how; both ways exist on machines that torch runs on."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(2**13), 2**13, (1001,), generator=generator) / 2**12 for _ in range(2))
    alpha = 1 + 2.0**-12  # so that the exact sum fits into fp64
    once, twice = (a.double() + b.double() * alpha).float(), a + b * alpha
    assert not torch.equal(once, twice)
    assert torch.equal(torch.add(a, b, alpha=alpha), once if torch_fuses() else twice)
