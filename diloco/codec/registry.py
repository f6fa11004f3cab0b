"""Codecs by name, and values that are held as a codec's payload.

A name is a kind, then ``:<block>`` (``:<chunk>x<k>`` for topk), then ``+zstd<level>`` or ``+auto<level>``.

``int4`` alone is ``int4:32`` (4.5 bits a value).  int4 needs small blocks, because one large value takes the resolution
of its whole block: from 32 to 256 values the relative L2 error rises from .097 to .127 on Gaussian data and from .145
to .278 on Student's t with 3 degrees of freedom.  ``int8`` alone is ``int8:128`` (8.125 bits): 256 would save 0.8 % of
the bytes and raise the same errors from .0065 to .0070 and from .0138 to .0174.  ``e3m0`` alone is ``e3m0:128`` (4.0625
bits), whose errors (.194 and .196) do not depend on the size of a block; ``int2`` alone is ``int2:256`` (2.125),
``sign`` alone ``sign:128`` (1.125), ``topk`` alone ``topk:4096x64`` (.227).  ``+zstd`` and ``+auto`` alone are level 1.

:class:`Coded` holds values as a payload, and decodes them where they are needed: with four bits each, they take an
eighth of the memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.codec.base import Codec, DecodeError, NonFiniteError, bytes_of, digest
from diloco.codec.blocks import BlockCodec
from diloco.codec.casts import Bf16Codec, Fp32Codec
from diloco.codec.entropy import EntropyCodec
from diloco.codec.grids import GridCodec, Int2Grid, PowerGrid, SignGrid
from diloco.codec.topk import TopKCodec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from diloco.codec.grids import Grid

__all__ = ["CODEC_NAMES", "Codec", "DecodeError", "NonFiniteError", "digest", "make_codec", "usual_feedback"]

CODEC_NAMES = ("fp32", "bf16", "int8", "int4", "e3m0", "int2", "topk", "sign")
INT8_BLOCK = 128
INT4_BLOCK = 32
TOPK_CHUNK, TOPK_K = 4096, 64
ZSTD_LEVEL = 1
GRIDS: Mapping[str, tuple[Grid, int]] = MappingProxyType(
    {"e3m0": (PowerGrid(), 128), "int2": (Int2Grid(), 256), "sign": (SignGrid(), 128)}
)
_NAME = re.compile(
    r"(?P<kind>[a-z0-9]+)(?::(?P<block>[0-9]{1,9})(?:x(?P<k>[0-9]{1,9}))?)?(?P<stage>\+(?P<how>zstd|auto)(?P<level>[0-9]{1,9})?)?",
    re.ASCII,
)
USUAL_FEEDBACK: Mapping[str, float] = MappingProxyType({"topk": 0.95, "int2": 1.0, "sign": 1.0})


def usual_feedback(name: str) -> float:
    """The share of what the codec ``name`` rounds off that is usually fed back: SparseLoCo's .95 for topk, all for int2
    and sign, which do not learn without; 0 for the others, which do."""
    return USUAL_FEEDBACK.get(name.partition("+")[0].partition(":")[0], 0.0)


def make_codec(name: str) -> Codec:
    """Return the codec ``name``, e.g. ``bf16``, ``int4:64``, ``topk:4096x64`` or ``int8+zstd3``; ``ValueError`` if
    there is none."""
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in CODEC_NAMES:
        raise ValueError(
            f"codec is {name!r}: one of {', '.join(CODEC_NAMES)}, then :<block>, then +zstd<level> or +auto<level>"
        )
    plain = name.removesuffix(match["stage"] or "")
    codec = _plain_codec(plain, match["kind"], match["block"], match["k"])
    if match["stage"] is None:
        return codec
    return EntropyCodec(name, codec, int(match["level"] or ZSTD_LEVEL), asks=match["how"] == "auto")


def _plain_codec(name: str, kind: str, block: str | None, k: str | None) -> Codec:
    if kind == "topk":
        if (block is None) != (k is None):
            raise ValueError(f"codec is {name!r}: topk, or topk:<chunk>x<k>")
        return TopKCodec(name, int(block or TOPK_CHUNK), int(k or TOPK_K))
    if k is not None:
        raise ValueError(f"codec is {name!r}: only topk keeps so many of a chunk")
    if kind == "int8":
        return BlockCodec(name, bits=8, block=int(block or INT8_BLOCK))
    if kind == "int4":
        return BlockCodec(name, bits=4, block=int(block or INT4_BLOCK))
    if kind in GRIDS:
        grid, usual = GRIDS[kind]
        return GridCodec(name, int(block or usual), grid)
    if block is not None:
        raise ValueError(f"codec is {name!r}: {kind} has no blocks")
    return Fp32Codec() if kind == "fp32" else Bf16Codec()


@dataclass(frozen=True, slots=True)
class Coded:
    """``numel`` values, by what ``codec``, which has no entropy stage, made of them; ``payload`` never changes."""

    codec: Codec
    payload: bytes | memoryview
    numel: int

    def values(self) -> Tensor:
        """New memory with all of them."""
        return self.codec.decode(self.payload, self.numel)


def values_of(held: Tensor | Coded) -> Tensor:
    """The values, decoded where they are not there as they are."""
    return held.values() if isinstance(held, Coded) else held


def coded(held: Tensor | Coded) -> Coded:
    """The same the other way round; flat fp32 on the CPU, finite, is a payload by itself."""
    return held if isinstance(held, Coded) else Coded(make_codec("fp32"), bytes_of(held), held.numel())
