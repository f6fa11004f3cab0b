"""Codecs by name, and the defaults' figures."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from diloco.codec.base import DecodeError, Hasher, hashing, kernels
from diloco.codec.blocks import Int8Codec
from diloco.codec.gpu import accelerated
from diloco.codec.kernel_library import Kind
from diloco.codec.registry import CODEC_NAMES, make_codec
from tests.codec.values import ALL, drawn, running, same


def test_the_name_is_kept_and_each_kernel_belongs_to_one_codec() -> None:
    stages = ["int4:32+zstd1", "fp32+zstd", "bf16+zstd19", "sign:256+zstd", "int4:32+auto", "topk+auto3"]
    for name in (*CODEC_NAMES, *stages, "int8:64", "e3m0:32", "topk:256x4", "topk:65536x16384+zstd3"):
        codec = make_codec(name)
        assert codec.name == name
        assert codec.lossless == name.startswith("fp32")
    kinds = [make_codec(name).plain.kind for name in CODEC_NAMES]
    assert sorted(kind for kind in kinds if kind is not None) == sorted(Kind)


@pytest.mark.parametrize(
    ("short", "name", "bits"),
    [
        ("int8", "int8:128", 8.125),
        ("int4", "int4:32", 4.5),
        ("e3m0", "e3m0:128", 4.0625),
        ("int2", "int2:256", 2.125),
        ("sign", "sign:128", 1.125),
        ("topk", "topk:4096x64", 928 / 4096),
        ("int4+zstd", "int4:32+zstd1", 4.5),
    ],
)
def test_defaults_and_their_bits_a_value(short: str, name: str, bits: float) -> None:
    values = drawn(65536, 1)
    assert make_codec(short).encode(values) == make_codec(name).encode(values)
    assert 8 * make_codec(short).payload_bytes(65536) / 65536 == bits
    assert make_codec(name) is make_codec(name), "it is not built again"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["", "int3", "int4:", "int4:-2", "int4+", "int4+zstd1.5", "int4+auto+zstd", "INT4", "int4 ", "int4\n"], None),
        (["fp32:32", "bf16:2", "zstd", "topk:4096", "topk:x64", "topk:4096x", "int4:32x4", "fp32:4x4", "sign:x"], None),
        (["topk:1000x64", "topk:4096x63", "topk:4096x0", "topk:4096x2048"], None),
        (["int4:0", "int4:1", "int4:3", "int8:65538"], "even number from 2 to 65536"),
        (["e3m0:0", "int2:4", "int2:12", "sign:4104", "sign:8192"], "multiple of 8 from 8 to 4096"),
        (["int4+zstd0", "int4+zstd20", "int4+auto20"], "zstd level must be from 1 to 19"),
    ],
)
def test_an_unknown_name_is_refused_with_the_name(names: list[str], words: str | None) -> None:
    for name in names:
        with pytest.raises(ValueError, match=words) as caught:
            make_codec(name)
        assert f"codec is {name!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["e3m0:8", "int2:8", "sign:8", "topk:256x4", "topk:256x64", "topk:4096x64"])
def test_no_two_payloads_mean_the_same(name: str) -> None:
    """Whatever is changed in a payload is refused or changes a value."""
    codec = make_codec(name)
    for seed in range(300):
        rng = random.Random(seed)
        numel = rng.choice([9, 300, 520])
        values = drawn(numel, seed)
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


class HalvingCodec(Int8Codec):
    """int8 that sends half of each value: a contributor's codec in plain torch, as CONTRIBUTING.md shows it."""

    __slots__ = ()

    def decode_rows(self, *codes: Tensor) -> Tensor:
        return Int8Codec.decode_rows(self, *codes) / 2


@pytest.mark.parametrize("level", ALL)
def test_a_codec_without_a_kernel_runs_in_plain_torch(level: str) -> None:
    """Whatever passes there are, ``kernels`` and ``hashing`` say who makes them."""
    codec, int8, numel = HalvingCodec("halving", 128), make_codec("int8"), 5000
    assert accelerated(codec) is None, "a device has no kernel for it either: the host encodes"
    values = drawn(numel, 1)
    with running(level):
        assert same(codec.decode(codec.encode(values), numel), int8.decode(int8.encode(values), numel) / 2)
        assert kernels(int8.plain, codec) is None
        assert isinstance(hashing(4 * numel, "", int8.plain, codec), Hasher)
