"""Codecs by name, and values that are stored as a codec's payload.

A name is a kind, then ``:<block>`` (``:<chunk>x<k>`` for topk), then ``+zstd<level>`` or ``+auto<level>``.

``int4`` alone is ``int4:32`` (4.5 bits a value).  int4 needs small blocks, because one large value coarsens its
whole block: from 32 to 256 values the relative L2 error rises from .097 to .127 on Gaussian data and from .145
to .278 on Student's t with 3 degrees of freedom.  ``int8`` alone is ``int8:128`` (8.125 bits): 256 would save 0.8 % of
the bytes and raise the same errors from .0065 to .0070 and from .0138 to .0174.  ``e3m0`` alone is ``e3m0:128`` (4.0625
bits), whose errors (.194 and .196) do not depend on the size of a block; ``int2`` alone is ``int2:256`` (2.125),
``sign`` alone ``sign:128`` (1.125), ``topk`` alone ``topk:4096x64`` (.227).  ``+zstd`` and ``+auto`` alone are level 1.

:class:`Coded` stores values as a payload, and decodes them on demand: with four bits each, they take an eighth of the
memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.codec.base import Codec, PlainCodec, bytes_of
from diloco.codec.blocks import Bf16Codec, BlockCodec, E3m0Codec, Fp32Codec, Int2Codec, Int4Codec, Int8Codec, SignCodec
from diloco.codec.entropy import EntropyCodec
from diloco.codec.topk import TopKCodec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LOSSLESS = "fp32"
CODEC_NAMES = (LOSSLESS, "bf16", "int8", "int4", "e3m0", "int2", "topk", "sign")
BLOCKS: Mapping[str, tuple[type[BlockCodec], int]] = MappingProxyType(
    {
        "int8": (Int8Codec, 128),
        "int4": (Int4Codec, 32),
        "e3m0": (E3m0Codec, 128),
        "int2": (Int2Codec, 256),
        "sign": (SignCodec, 128),
    }
)
"""The block codecs, each with its default block size."""
TOPK_CHUNK, TOPK_K = 4096, 64
ZSTD_LEVEL = 1
NAMES_KEPT = 64
"""Most codecs that ``make_codec`` keeps: a run names a few, again in every round."""
_NAME = re.compile(
    r"(?P<kind>[a-z0-9]+)(?::(?P<block>[0-9]{1,9})(?:x(?P<k>[0-9]{1,9}))?)?(?P<stage>\+(?P<how>zstd|auto)(?P<level>[0-9]{1,9})?)?",
    re.ASCII,
)
USUAL_FEEDBACK: Mapping[str, float] = MappingProxyType({"topk": 0.95, "int2": 1.0, "sign": 1.0})


def usual_feedback(name: str) -> float:
    """Return the default share of the rounding error of codec ``name`` that error feedback carries: SparseLoCo's .95
    for topk, 1 for int2 and sign, which do not learn without it; 0 for the others, which do."""
    return USUAL_FEEDBACK.get(name.partition("+")[0].partition(":")[0], 0.0)


@lru_cache(NAMES_KEPT)
def make_codec(name: str) -> Codec:
    """Return the codec ``name``, e.g. ``bf16``, ``int4:64``, ``topk:4096x64`` or ``int8+zstd3``; ``ValueError`` if
    there is none.  Equal names may return the same object: a codec never changes."""
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in CODEC_NAMES:
        raise ValueError(
            f"codec is {name!r}: one of {', '.join(CODEC_NAMES)}, then :<block>, then +zstd<level> or +auto<level>"
        )
    kind, block, k = match["kind"], match["block"], match["k"]
    plain = name.removesuffix(match["stage"] or "")
    codec: PlainCodec = Fp32Codec() if kind == "fp32" else Bf16Codec()
    if kind == "topk":
        if (block is None) != (k is None):
            raise ValueError(f"codec is {plain!r}: topk, or topk:<chunk>x<k>")
        codec = TopKCodec(plain, int(block or TOPK_CHUNK), int(k or TOPK_K))
    elif k is not None:
        raise ValueError(f"codec is {plain!r}: only topk takes <chunk>x<k>")
    elif kind in BLOCKS:
        make, usual = BLOCKS[kind]
        codec = make(plain, int(block or usual))
    elif block is not None:
        raise ValueError(f"codec is {plain!r}: {kind} has no blocks")
    if match["stage"] is None:
        return codec
    return EntropyCodec(name, codec, int(match["level"] or ZSTD_LEVEL), asks=match["how"] == "auto")


@dataclass(frozen=True, slots=True)
class Coded:
    """``numel`` values as the ``payload`` of ``codec``, which has no entropy stage; ``payload`` never changes."""

    codec: PlainCodec
    payload: bytes | memoryview
    numel: int


def values_of(held: Tensor | Coded) -> Tensor:
    """Return the values, decoded into new memory if they are ``Coded``."""
    return held.codec.decode(held.payload, held.numel) if isinstance(held, Coded) else held


def coded(held: Tensor | Coded) -> Coded:
    """Return ``held`` as ``Coded``; a tensor (flat fp32 on the CPU, finite) is its own fp32 payload."""
    return held if isinstance(held, Coded) else Coded(make_codec(LOSSLESS).plain, bytes_of(held), held.numel())
