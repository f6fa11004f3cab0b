"""Codecs by name, and the defaults' figures."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from diloco.codec import registry
from diloco.codec.base import DecodeError
from diloco.codec.blocks import Int8Codec
from diloco.codec.gpu import accelerated
from diloco.codec.kernel_library import Kind
from diloco.codec.merging import Reading, State, outer_pass
from diloco.codec.registry import BLOCKS, CODEC_NAMES, Coded, make_codec, values_of
from diloco.codec.site_pass import Following, rebase_pieces, seal_pieces
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import rebase
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
def test_a_codec_without_a_kernel_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """A round trip, and a round: two sites seal, the syncer reads and steps, a site follows and adopts."""
    monkeypatch.setattr(registry, "BLOCKS", {**BLOCKS, "halving": (HalvingCodec, 128)})
    monkeypatch.setattr(registry, "CODEC_NAMES", (*CODEC_NAMES, "halving"))
    codec, int8, numel = make_codec("halving"), make_codec("int8"), 5000

    def halves(values: Tensor) -> Tensor:
        return int8.decode(int8.encode(values), numel) / 2

    assert accelerated(codec) is None, "a device has no kernel for it either: the host encodes"
    start, plain, optimizer = drawn(numel, 1), codec.plain, OuterOptimizerOptions()
    locals_ = [start - drawn(numel, 2 + site, 1e-3) for site in range(2)]
    sent = [halves(start - local) for local in locals_]
    theta, _ = outer_step(start, merge_mean([(1.0, [each]) for each in sent]), NOTHING, optimizer)
    version = halves(theta - start) + start
    with running(level):
        assert same(codec.decode(codec.encode(start), numel), halves(start))
        updates = []
        for local, values in zip(locals_, sent, strict=True):
            payload = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
            sealed, _ = seal_pieces([local], start, [], plain, payload)
            updates.append(Coded(plain, payload.numpy().tobytes(), numel))
            assert same(values_of(updates[-1]), values)
            reading = Reading(plain, numel)
            for first, last in reading.ranges():
                reading.read(updates[-1].payload, numel, first, last - first)
            assert reading.digest() == sealed
        round_ = [(1.0, [(plain, each.payload)]) for each in updates]
        stepped = outer_pass(round_, State(start, start, NOTHING), optimizer, codec)
        assert same(stepped.state.theta, theta)
        held, local = torch.empty(numel), locals_[0].clone()
        Following(start, [stepped.payload], codec, held).finish()
        assert same(held, version)
        assert same(stepped.state.published, version)
        rebase_pieces([local], start, held, updates[:1])
    assert same(local, rebase(locals_[0], start, version, sent[:1]))
