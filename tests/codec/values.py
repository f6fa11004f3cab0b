"""What the tests encode: random and adversarial values."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from diloco.codec import kernel_library
from diloco.codec.base import Codec
from diloco.codec.blocks import IntCodec, scale_values
from diloco.codec.kernel_library import PLAIN, Kind, choice, force

FP32_MAX = torch.finfo(torch.float32).max
NOT_FINITE = (math.nan, math.inf, -math.inf)
DOWN = (
    "fp32",
    "fp32+zstd1",
    "bf16",
    "int8",
    "int4",
    "int4:32+zstd1",
    "int8:6",
    "e3m0",
    "int2+auto",
    "topk",
    "topk:65536x1024",
)
"""Codecs of a down-link; the last has no kernel."""


def drawn(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def any_bits(numel: int, generator: torch.Generator, instead: float = 1.0) -> torch.Tensor:
    """Every exponent beside every other; ``instead`` of what is not finite."""
    found = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.where(found.isfinite(), found, instead)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of a zero too."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


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
    signs = torch.where(gauss > 0, 1.0, -1.0)
    return {
        "gauss": gauss,
        "pseudo-gradient": gauss * torch.exp(torch.randn(numel, generator=generator)) * 1e-4,
        "wide": wide,
        "any bits": any_bits(numel, generator),
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
        "tiny": gauss * torch.exp2(torch.randint(-149, -100, (numel,), generator=generator).double()).float(),
    }


# --- How far a decoded value may be from what was encoded, as the codecs' modules say --------------------------------


def error_bound(codec: Codec, values: Tensor) -> Tensor:
    """Largest ``|decode(encode(values)) - values|``, elementwise, fp32 of the same shape."""
    plain, size = codec.plain, values.abs()
    if plain.kind is Kind.FP32:
        return torch.zeros_like(values)
    if plain.kind is Kind.BF16:
        return (size * 2.0**-8).clamp(min=2.0**-134)  # half a step of 8 significant bits, or of bf16's subnormals
    if isinstance(codec.plain, IntCodec):
        scale = scale_values(plain.encode_rows(rows_of(values, plain.block))[0])
        bound = scale * torch.where(torch.isinf(scale * codec.plain.code_max), 1.0, 0.5)
        return bound.repeat_interleave(plain.block)[: values.numel()]
    if plain.kind is Kind.E3M0:
        smallest = scale_of_e3m0(size, plain.block)
        share = torch.where(size >= 1.5 * 2.0**127, size / 2, size / 3)
        return torch.maximum(share, smallest)
    return torch.maximum(size, codec.decode(codec.encode(values), values.numel()).abs())


def rows_of(values: Tensor, block: int) -> Tensor:
    """As blocks, the last filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)


def scale_of_e3m0(size: Tensor, block: int) -> Tensor:
    """Half of the smallest power of each value's block."""
    levels = ((rows_of(size, block).view(torch.int32) + (1 << 22)) >> 23).clamp(max=254)
    top = levels.amax(dim=1)
    smallest = torch.ldexp(torch.ones(len(top)), (top - 7).clamp(min=0) - 127)
    return smallest.repeat_interleave(block)[: size.numel()]


@contextlib.contextmanager
def bf16_by_default() -> Iterator[None]:
    """As in a training loop that makes its model under ``torch.set_default_dtype`` and leaves it so."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# --- The kernels' levels of this machine, and plain torch, to run one after the other --------------------------------

BEST = choice().kernels
NATIVE = [] if BEST is None else list(kernel_library.LEVELS[: BEST.level + 1])
ALL = [PLAIN, *NATIVE]


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """Run the level ``name``, or plain torch, and then what ran before."""
    chosen = choice()
    before = chosen.kernels, chosen.why
    assert force(name) == ""
    try:
        yield
    finally:
        chosen.kernels, chosen.why = before
