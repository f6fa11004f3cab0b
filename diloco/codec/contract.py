"""What every codec promises, its two errors, and the digest by which two ends compare a tensor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from diloco.codec.digests import digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.codec.structures import Layout

CHUNK_VALUES = 256 * 1024
"""Values handled at a time (1 MiB of fp32), so that the passes over a chunk find it in the cache."""


class NonFiniteError(ValueError):
    """A NaN or an infinity was to be encoded; nothing was."""


class DecodeError(ValueError):
    """The payload is not one that ``encode`` makes."""


class NonFinitePayload(DecodeError):
    """The payload is well formed and holds a NaN or an infinity: its sender's values are at fault, not its bytes."""


@dataclass(frozen=True, slots=True)
class Add:
    """``out <- out + x``: a further update of the same site, or a version for one who holds the one before."""


@dataclass(frozen=True, slots=True)
class Towards:
    """``out <- out - share (out - x)``, three roundings: a further site in the running mean of ``merge_mean``."""

    share: float


@dataclass(frozen=True, slots=True)
class Carry:
    """Error feedback: ``fp32(beta residual)`` is added to what is encoded, and ``residual`` becomes what got lost."""

    residual: Tensor
    beta: float


class Codec(Protocol):
    """A fixed mapping between a flat fp32 CPU tensor and bytes, defined to the bit.

    ``encode`` and ``decode`` make new memory.  The others work in the caller's, and on a part of a tensor at a time:
    before the entropy stage a payload has a fixed length, and each run of ``granule`` values has its own bytes in it.
    Ranges may therefore be given to several threads, and no bit depends on how they were cut.
    """

    @property
    def name(self) -> str:
        """The name it was made from, e.g. ``int4:32+zstd1``."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(values))`` is ``values``, bit for bit."""
        ...

    @property
    def granule(self) -> int:
        """How many values are coded together: a range starts at a multiple and ends at one, or with the tensor."""
        ...

    def encode(self, values: Tensor) -> bytes:
        """Encode flat contiguous fp32 ``values``; ``NonFiniteError`` if any is NaN or infinite."""
        ...

    def encode_into(
        self,
        values: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """Encode into ``payload``, flat uint8 with room for ``payload_bytes_max``, and return the payload's length.

        ``decoded`` receives what the payload says where it is given, and may be ``values``.  Where ``numel`` is given,
        ``values`` are those from ``start`` of a tensor of that size, and only their bytes are written; a codec with an
        entropy stage takes whole tensors only.  After a ``NonFiniteError`` both hold nothing of use.
        """
        ...

    def encode_difference(
        self,
        base: Tensor,
        local: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        in_flight: Sequence[Tensor] = (),
        carry: Carry | None = None,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """The same of ``base - local - in_flight[0] - ...``, of which no tensor is made; ``decoded`` may be ``local``.

        With ``carry`` its residual is part of it, and holds afterwards what was to be sent less what is.
        """
        ...

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """Decode to a new fp32 tensor of shape (``numel``,), all finite; ``DecodeError`` on anything malformed.

        The casts (fp32, bf16) say ``NonFinitePayload`` for values that are not finite.
        """
        ...

    def decode_into(
        self,
        payload: bytes | memoryview,
        numel: int,
        out: Tensor,
        start: int = 0,
        accumulate: Add | Towards | None = None,
    ) -> None:
        """Decode the values from ``start``, as many as ``out`` has, of a payload of ``numel`` into ``out``.

        With ``accumulate`` they are added to what ``out`` holds, or the mean in ``out`` moves towards them.  ``decode``
        says what is refused; of a range only its own bytes are looked at, and ``out`` holds nothing of use after it.
        With an entropy stage each call opens the payload anew: see :meth:`opened`.
        """
        ...

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Where the values from ``start`` to ``stop`` lie in a payload of ``numel``: (offset, length) of each piece.

        Joined, the pieces are a payload of these values by themselves: so one that lies on a disk is decoded by
        ranges, and one that is on its way as far as it has come.  Of the payload before the entropy stage.
        """
        ...

    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[Codec, memoryview]:
        """Take the entropy stage off: the codec inside and its payload, which is a view wherever it is stored raw."""
        ...

    @property
    def layout(self) -> Layout | None:
        """How the compiled kernels know the format; None where they do not."""
        ...

    @property
    def plain(self) -> Codec:
        """The codec without the entropy stage."""
        ...

    def closed(self, payload: Tensor) -> memoryview:
        """Put the entropy stage on a whole payload of :attr:`plain` (flat uint8): what ``encode`` would have made."""
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


def accumulate_into(out: Tensor, values: Tensor, accumulate: Add | Towards | None) -> None:
    """Write ``values`` to ``out``, or do with them what ``accumulate`` says."""
    if accumulate is None:
        out.copy_(values)
    elif isinstance(accumulate, Add):
        out.add_(values)
    else:
        # Subtracted rather than added, so that the sign of a zero is kept too: -0 - 0 is -0, but -0 + 0 is +0.
        out.sub_(torch.sub(out, values).mul_(accumulate.share))


def payload_view(payload: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor, which lives as long as the view does."""
    return payload.numpy().data


def tensor_bytes(values: Tensor) -> bytes:
    """Return the memory of a contiguous CPU tensor; its type must be one that numpy has."""
    return values.numpy().tobytes()


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor where they lie; the view keeps them."""
    return values.numpy().reshape(-1).data.cast("B") if values.numel() else memoryview(b"")


def bytes_tensor(payload: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``payload`` as a flat tensor of ``dtype``; the length must be a multiple of its size."""
    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def check_length(payload: bytes | memoryview, expected: int, name: str, numel: int) -> None:
    """Raise ``DecodeError`` unless ``payload`` has the ``expected`` length."""
    if len(payload) != expected:
        raise DecodeError(f"{name} payload has {len(payload)} bytes, {numel} values take {expected}")


def check_place(codec: Codec, count: int, start: int, numel: int) -> None:
    """Assert that ``count`` values from ``start`` of ``numel`` are a range of whole granules."""
    stop = start + count
    assert 0 <= start <= stop <= numel, f"values {start} to {stop} of {numel}"
    assert start % codec.granule == 0, f"a range of {codec.name} starts at {start}"
    assert stop % codec.granule == 0 or stop == numel, f"a range of {codec.name} ends at {stop} of {numel}"


def digest(values: Tensor, like: str = "") -> str:
    """Return the digest of the values' fp32 little-endian bytes, in the form of ``like``."""
    check_values(values)
    return digest_of(values.numpy().data, like)
