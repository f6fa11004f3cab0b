"""Codecs that cast each value by itself: fp32 (lossless) and bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import NonFiniteError, NonFinitePayload, PlainCodec
from diloco.codec.kernel_library import Kind, Layout
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class Fp32Codec(PlainCodec):
    """fp32, lossless.  Layout: the values, fp32 little-endian."""

    name: str = "fp32"

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return Layout(Kind.FP32, 1)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of a value in a payload."""
        return torch.float32

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return the one piece."""
        size = self.stored.itemsize
        return ((size * start, size * (stop - start)),)

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows in the stored dtype."""
        if not is_finite(rows):
            raise NonFiniteError(f"{self.name} was to encode a NaN or an infinity")
        return (rows,)

    def decode_rows(self, *codes: Tensor) -> Tensor:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return codes[0].to(torch.float32)

    def pack(self, *codes: Tensor) -> Sequence[Tensor]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return (codes[0].view(-1).view(torch.uint8),)

    def unpack(self, pieces: Sequence[Tensor], rows: int, width: int) -> tuple[Tensor, ...]:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        values = pieces[0].view(self.stored).view(rows, width)
        if not is_finite(values):
            raise NonFinitePayload(f"{self.name} payload holds a NaN or an infinity")
        return (values,)


class Bf16Codec(Fp32Codec):
    """Layout: the values, bfloat16 little-endian, rounded to nearest even.

    Values that would round to infinity (above 3.396e38) become the largest bf16 (3.390e38) of their sign.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("bf16")

    @property
    def layout(self) -> Layout:
        """See :class:`~diloco.codec.base.PlainCodec`."""
        return Layout(Kind.BF16, 1)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of a value in a payload."""
        return torch.bfloat16

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows in the stored dtype."""
        (finite,) = super().encode_rows(rows)
        return (finite.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16),)
