"""Codecs that cast each value by itself: fp32 (lossless) and bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import (
    CHUNK_VALUES,
    NonFiniteError,
    NonFinitePayload,
    bytes_tensor,
    check_length,
    check_values,
    tensor_bytes,
)
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from torch import Tensor

BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class Fp32Codec:
    """Layout: the values, fp32 little-endian."""

    name: str = "fp32"

    @property
    def lossless(self) -> bool:
        """True."""
        return True

    def encode(self, values: Tensor) -> bytes:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_values(values)
        if not is_finite(values):
            raise NonFiniteError("fp32 was to encode a NaN or an infinity")
        return tensor_bytes(values)

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_length(payload, self.payload_bytes(numel), self.name, numel)
        values = bytes_tensor(payload, torch.float32)
        if not is_finite(values):
            raise NonFinitePayload("fp32 payload holds a NaN or an infinity")
        return values

    def payload_bytes(self, numel: int) -> int:
        """Return 4 bytes a value."""
        return 4 * numel

    def payload_bytes_max(self, numel: int) -> int:
        """Return the same as :meth:`payload_bytes`."""
        return self.payload_bytes(numel)

    def error_bound(self, values: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(values)


@dataclass(frozen=True, slots=True)
class Bf16Codec:
    """Layout: the values, bfloat16 little-endian, rounded to nearest even.

    Values that would round to infinity (above 3.396e38) become the largest bf16 (3.390e38) of their sign.
    """

    name: str = "bf16"

    @property
    def lossless(self) -> bool:
        """False."""
        return False

    def encode(self, values: Tensor) -> bytes:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_values(values)
        codes = torch.empty(values.numel(), dtype=torch.bfloat16)
        for start in range(0, values.numel(), CHUNK_VALUES):
            chunk = values[start : start + CHUNK_VALUES]
            if not is_finite(chunk):
                raise NonFiniteError("bf16 was to encode a NaN or an infinity")
            codes[start : start + CHUNK_VALUES].copy_(chunk.clamp(-BF16_MAX, BF16_MAX))
        return tensor_bytes(codes.view(torch.int16))

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_length(payload, self.payload_bytes(numel), self.name, numel)
        values = bytes_tensor(payload, torch.bfloat16).to(torch.float32)
        if not is_finite(values):
            raise NonFinitePayload("bf16 payload holds a NaN or an infinity")
        return values

    def payload_bytes(self, numel: int) -> int:
        """Return 2 bytes a value."""
        return 2 * numel

    def payload_bytes_max(self, numel: int) -> int:
        """Return the same as :meth:`payload_bytes`."""
        return self.payload_bytes(numel)

    def error_bound(self, values: Tensor) -> Tensor:
        """Return ``max(2**-8 |x|, 2**-134)``: half a step of 8 significant bits, or of bf16's subnormals."""
        return values.abs().mul_(2.0**-8).clamp_(min=2.0**-134)
