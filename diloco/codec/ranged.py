"""What all codecs without an entropy stage share: whole tensors, parts, differences, out of one chunk's arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import (
    CHUNK_VALUES,
    Add,
    Towards,
    accumulate_into,
    check_length,
    check_values,
    payload_view,
    tensor_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from diloco.codec.contract import Codec


class RangedCodec(ABC):
    """A codec whose payload has a fixed length and a fixed place for each run of ``granule`` values.

    A subclass says how one chunk is encoded and decoded; a chunk starts at a multiple of ``granule`` and has
    ``CHUNK_VALUES`` values or the granule's, so that every temporary stays in the cache.  Everything else, see
    :class:`~diloco.codec.contract.Codec`, follows from that.
    """

    __slots__ = ()
    name: str

    @property
    @abstractmethod
    def granule(self) -> int:
        """Values that are coded together."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Length of the payload."""

    @abstractmethod
    def error_bound(self, values: Tensor) -> Tensor:
        """Largest error, elementwise."""

    @abstractmethod
    def encode_chunk(self, chunk: Tensor, payload: Tensor, numel: int, start: int, decoded: Tensor | None) -> None:
        """Write the bytes of ``chunk``, the values from ``start`` of ``numel``, and what they say to ``decoded``."""

    @abstractmethod
    def decode_chunk(self, payload: memoryview, numel: int, start: int, out: Tensor) -> None:
        """Write the values from ``start`` to ``out``, all finite, or refuse them."""

    @abstractmethod
    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Where some of the values lie."""

    @property
    def lossless(self) -> bool:
        """False, but for fp32."""
        return False

    @property
    def plain(self) -> Codec:
        """The codec itself."""
        return self

    def payload_bytes_max(self, numel: int) -> int:
        """Return the same as :meth:`payload_bytes`."""
        return self.payload_bytes(numel)

    def encode(self, values: Tensor) -> bytes:
        """See :class:`~diloco.codec.contract.Codec`."""
        payload = torch.empty(self.payload_bytes(values.numel()), dtype=torch.uint8)
        self.encode_into(values, payload)
        return tensor_bytes(payload)

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """See :class:`~diloco.codec.contract.Codec`."""
        values = torch.empty(numel, dtype=torch.float32)
        self.decode_into(payload, numel, values)
        return values

    def encode_into(
        self,
        values: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_values(values)
        whole = values.numel() if numel is None else numel
        length = self._check_range(values, payload, decoded, start, whole)
        for first, last in self.chunks(values.numel()):
            told = None if decoded is None else decoded[first:last]
            self.encode_chunk(values[first:last], payload[:length], whole, start + first, told)
        return length

    def encode_difference(
        self,
        base: Tensor,
        local: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_values(base)
        check_values(local)
        assert base.shape == local.shape, (base.shape, local.shape)
        whole = base.numel() if numel is None else numel
        length = self._check_range(base, payload, decoded, start, whole)
        for first, last in self.chunks(base.numel()):
            told = None if decoded is None else decoded[first:last]
            chunk = torch.sub(base[first:last], local[first:last])
            self.encode_chunk(chunk, payload[:length], whole, start + first, told)
        return length

    def decode_into(
        self,
        payload: bytes | memoryview,
        numel: int,
        out: Tensor,
        start: int = 0,
        accumulate: Add | Towards | None = None,
    ) -> None:
        """See :class:`~diloco.codec.contract.Codec`."""
        check_length(payload, self.payload_bytes(numel), self.name, numel)
        check_values(out)
        self._check_place(out.numel(), start, numel)
        view = memoryview(payload)
        for first, last in self.chunks(out.numel()):
            if accumulate is None:
                self.decode_chunk(view, numel, start + first, out[first:last])
            else:
                values = torch.empty(last - first, dtype=torch.float32)
                self.decode_chunk(view, numel, start + first, values)
                accumulate_into(out[first:last], values, accumulate)

    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[Codec, memoryview]:
        """Return the codec itself and the payload, whose length is right."""
        check_length(payload, self.payload_bytes(numel), self.name, numel)
        return self, memoryview(payload)

    def closed(self, payload: Tensor) -> memoryview:
        """Return the payload as it is."""
        return payload_view(payload)

    def chunks(self, numel: int) -> Iterator[tuple[int, int]]:
        """Cut ``numel`` values at multiples of the granule."""
        step = max(1, CHUNK_VALUES // self.granule) * self.granule
        return ((start, min(start + step, numel)) for start in range(0, numel, step))

    def _check_range(self, values: Tensor, payload: Tensor, decoded: Tensor | None, start: int, numel: int) -> int:
        """Assert that the caller's memory fits, and return the payload's length."""
        self._check_place(values.numel(), start, numel)
        length = self.payload_bytes(numel)
        assert payload.dtype == torch.uint8, f"payload is {payload.dtype}"
        assert payload.dim() == 1, f"payload has shape {tuple(payload.shape)}"
        assert payload.numel() >= length, f"payload has room for {payload.numel()} bytes, {length} are needed"
        if decoded is not None:
            check_values(decoded)
            assert decoded.numel() == values.numel(), (decoded.numel(), values.numel())
        return length

    def _check_place(self, count: int, start: int, numel: int) -> None:
        stop = start + count
        assert 0 <= start <= stop <= numel, f"values {start} to {stop} of {numel}"
        assert start % self.granule == 0, f"a range of {self.name} starts at {start}"
        assert stop % self.granule == 0 or stop == numel, f"a range of {self.name} ends at {stop} of {numel}"
