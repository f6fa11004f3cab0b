"""What every codec promises, its two errors, and the digest by which two ends compare a tensor."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_VALUES = 256 * 1024
"""Values handled at a time (1 MiB of fp32), so that the passes over a chunk find it in the cache."""


class NonFiniteError(ValueError):
    """A NaN or an infinity was to be encoded; nothing was."""


class DecodeError(ValueError):
    """The payload is not one that ``encode`` makes."""


class NonFinitePayload(DecodeError):
    """The payload is well formed and holds a NaN or an infinity: its sender's values are at fault, not its bytes."""


class Codec(Protocol):
    """A fixed mapping between a flat fp32 CPU tensor and bytes, defined to the bit."""

    @property
    def name(self) -> str:
        """The name it was made from, e.g. ``int4:32+zstd1``."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(values))`` is ``values``, bit for bit."""
        ...

    def encode(self, values: Tensor) -> bytes:
        """Encode flat contiguous fp32 ``values``; ``NonFiniteError`` if any is NaN or infinite."""
        ...

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """Decode to a new fp32 tensor of shape (``numel``,), all finite; ``DecodeError`` on anything malformed.

        The casts (fp32, bf16) say ``NonFinitePayload`` for values that are not finite.
        """
        ...

    def payload_bytes(self, numel: int) -> int:
        """Length of the payload before the entropy stage, exactly."""
        ...

    def payload_bytes_max(self, numel: int) -> int:
        """Largest length ``encode`` returns: ``payload_bytes``, and one more where there is an entropy stage."""
        ...

    def error_bound(self, values: Tensor) -> Tensor:
        """Largest ``|decode(encode(values)) - values|``, elementwise, fp32 of the same shape."""
        ...


def check_values(values: Tensor) -> None:
    """Assert what the exchange level promises of a fragment: flat, contiguous, fp32, on the CPU."""
    assert sys.byteorder == "little", "the formats are little-endian, and values are read where they lie"
    assert values.dtype == torch.float32, f"values are {values.dtype}"
    assert values.dim() == 1, f"values have shape {tuple(values.shape)}"
    assert values.is_contiguous(), "values are not contiguous"
    assert values.device.type == "cpu", f"values are on {values.device}"


def tensor_bytes(values: Tensor) -> bytes:
    """Return the memory of a contiguous CPU tensor; its type must be one that numpy has."""
    return values.numpy().tobytes()


def bytes_tensor(payload: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``payload`` as a flat tensor of ``dtype``; the length must be a multiple of its size."""
    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def check_length(payload: bytes | memoryview, expected: int, name: str, numel: int) -> None:
    """Raise ``DecodeError`` unless ``payload`` has the ``expected`` length."""
    if len(payload) != expected:
        raise DecodeError(f"{name} payload has {len(payload)} bytes, {numel} values take {expected}")


def digest(values: Tensor) -> str:
    """Return the SHA-256 (hex) of the values' fp32 little-endian bytes."""
    check_values(values)
    return hashlib.sha256(values.numpy().data).hexdigest()
