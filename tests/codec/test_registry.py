"""Codecs by name, and the defaults' figures."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.blocks import E3m0Codec, Int2Codec, Int4Codec, Int8Codec, SignCodec
from diloco.codec.entropy import EntropyCodec
from diloco.codec.registry import CODEC_NAMES, make_codec
from diloco.codec.topk import TopKCodec

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
