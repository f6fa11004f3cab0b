"""How far a decoded value may be from what was encoded, as the codecs' modules say."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec.base import Codec, scale_values
from diloco.codec.blocks import IntCodec
from diloco.codec.kernel_library import Kind


def error_bound(codec: Codec, values: Tensor) -> Tensor:
    """Largest ``|decode(encode(values)) - values|``, elementwise, fp32 of the same shape."""
    layout, size = codec.plain.layout, values.abs()
    if layout.kind is Kind.FP32:
        return torch.zeros_like(values)
    if layout.kind is Kind.BF16:
        return (size * 2.0**-8).clamp(min=2.0**-134)  # half a step of 8 significant bits, or of bf16's subnormals
    if isinstance(codec.plain, IntCodec):
        scale = scale_values(codec.plain.encode_rows(rows_of(values, layout.block))[0])
        bound = scale * torch.where(torch.isinf(scale * codec.plain.code_max), 1.0, 0.5)
        return bound.repeat_interleave(layout.block)[: values.numel()]
    if layout.kind is Kind.E3M0:
        smallest = scale_of_e3m0(size, layout.block)
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
