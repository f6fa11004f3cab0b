"""Codecs that cast each value by itself: fp32 (lossless) and bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import NonFiniteError, NonFinitePayload, bytes_tensor
from diloco.codec.ranged import RangedCodec
from diloco.codec.structures import Kind, Layout
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from torch import Tensor

BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class Fp32Codec(RangedCodec):
    """Layout: the values, fp32 little-endian."""

    name: str = "fp32"

    @property
    def granule(self) -> int:
        """Return 1."""
        return 1

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        return Layout(Kind.FP32, 1)

    @property
    def lossless(self) -> bool:
        """True."""
        return True

    def encode_chunk(self, chunk: Tensor, payload: Tensor, numel: int, start: int, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        if not is_finite(chunk):
            raise NonFiniteError("fp32 was to encode a NaN or an infinity")
        payload[4 * start : 4 * (start + chunk.numel())] = chunk.view(torch.uint8)
        if decoded is not None:
            decoded.copy_(chunk)

    def decode_chunk(self, payload: memoryview, numel: int, start: int, out: Tensor) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        out.copy_(bytes_tensor(payload[4 * start : 4 * (start + out.numel())], torch.float32))
        if not is_finite(out):
            raise NonFinitePayload("fp32 payload holds a NaN or an infinity")

    def payload_bytes(self, numel: int) -> int:
        """Return 4 bytes a value."""
        return 4 * numel

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the one place."""
        return ((4 * start, 4 * (stop - start)),)

    def error_bound(self, values: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(values)


@dataclass(frozen=True, slots=True)
class Bf16Codec(RangedCodec):
    """Layout: the values, bfloat16 little-endian, rounded to nearest even.

    Values that would round to infinity (above 3.396e38) become the largest bf16 (3.390e38) of their sign.
    """

    name: str = "bf16"

    @property
    def granule(self) -> int:
        """Return 1."""
        return 1

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        return Layout(Kind.BF16, 1)

    def encode_chunk(self, chunk: Tensor, payload: Tensor, numel: int, start: int, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        if not is_finite(chunk):
            raise NonFiniteError("bf16 was to encode a NaN or an infinity")
        codes = chunk.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
        payload[2 * start : 2 * (start + chunk.numel())] = codes.view(torch.uint8)
        if decoded is not None:
            decoded.copy_(codes)

    def decode_chunk(self, payload: memoryview, numel: int, start: int, out: Tensor) -> None:
        """See :class:`~diloco.codec.ranged.RangedCodec`."""
        out.copy_(bytes_tensor(payload[2 * start : 2 * (start + out.numel())], torch.bfloat16))
        if not is_finite(out):
            raise NonFinitePayload("bf16 payload holds a NaN or an infinity")

    def payload_bytes(self, numel: int) -> int:
        """Return 2 bytes a value."""
        return 2 * numel

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the one place."""
        return ((2 * start, 2 * (stop - start)),)

    def error_bound(self, values: Tensor) -> Tensor:
        """Return ``max(2**-8 |x|, 2**-134)``: half a step of 8 significant bits, or of bf16's subnormals."""
        return values.abs().mul_(2.0**-8).clamp_(min=2.0**-134)
