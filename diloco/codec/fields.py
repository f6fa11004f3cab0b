"""Fields of 1, 2 or 4 bits, several to a byte, the earlier in the lower bits; what fills up the last byte is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import DecodeError

if TYPE_CHECKING:
    from torch import Tensor


def packed_bytes(numel: int, bits: int) -> int:
    """Return the length of ``numel`` fields."""
    return (numel * bits + 7) // 8


def pack(fields: Tensor, bits: int) -> Tensor:
    """Return the bytes of flat uint8 ``fields``, each below ``2**bits``."""
    per_byte = 8 // bits
    missing = -fields.numel() % per_byte
    if missing:
        fields = torch.nn.functional.pad(fields, (0, missing))
    lanes = fields.view(-1, per_byte)
    packed = lanes[:, 0].clone()
    for place in range(1, per_byte):
        packed |= lanes[:, place] << (bits * place)
    return packed


def unpack(packed: Tensor, numel: int, bits: int, name: str) -> Tensor:
    """Return the ``numel`` fields of ``packed``; ``DecodeError`` where what fills up the last byte is not 0."""
    per_byte = 8 // bits
    lanes = torch.empty(packed.numel(), per_byte, dtype=torch.uint8)
    for place in range(per_byte):
        lanes[:, place] = (packed >> (bits * place)) & (2**bits - 1)
    fields = lanes.view(-1)
    if bool(fields[numel:].any()):
        raise DecodeError(f"{name} payload holds something behind its last value")
    return fields[:numel]
