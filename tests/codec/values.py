"""What the tests encode: random and adversarial values."""

from __future__ import annotations

import functools
import math

import torch

FP32_MAX = torch.finfo(torch.float32).max
NOT_FINITE = (math.nan, math.inf, -math.inf)


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
    }
