"""What all codecs without an entropy stage share: whole tensors, parts, differences, out of one chunk's arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from diloco.codec.base import (
    CHUNK_VALUES,
    Add,
    Carry,
    NonFiniteError,
    Towards,
    accumulate_into,
    check_length,
    check_place,
    check_values,
    payload_view,
    tensor_bytes,
)
from diloco.codec.native import kernels, refuse
from diloco.codec.structures import Layout, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from diloco.codec.base import Codec


class RangedCodec(ABC):
    """A codec whose payload has a fixed length and a fixed place for each run of ``granule`` values.

    A subclass says how one chunk is encoded and decoded; a chunk starts at a multiple of ``granule`` and has
    ``CHUNK_VALUES`` values or the granule's, so that every temporary stays in the cache.  Everything else, see
    :class:`~diloco.codec.base.Codec`, follows from that.
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
    def layout(self) -> Layout | None:
        """How the compiled kernels know the format; None where they do not."""
        return None

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
        """See :class:`~diloco.codec.base.Codec`."""
        payload = torch.empty(self.payload_bytes(values.numel()), dtype=torch.uint8)
        self.encode_into(values, payload)
        return tensor_bytes(payload)

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """See :class:`~diloco.codec.base.Codec`."""
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
        """See :class:`~diloco.codec.base.Codec`."""
        return self._encode((values,), None, payload, decoded, start, numel)

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
        """See :class:`~diloco.codec.base.Codec`."""
        return self._encode((base, local, *in_flight), carry, payload, decoded, start, numel)

    def decode_into(
        self,
        payload: bytes | memoryview,
        numel: int,
        out: Tensor,
        start: int = 0,
        accumulate: Add | Towards | None = None,
    ) -> None:
        """See :class:`~diloco.codec.base.Codec`."""
        check_length(payload, self.payload_bytes(numel), self.name, numel)
        check_values(out)
        check_place(self, out.numel(), start, numel)
        fast, layout = kernels(), self.layout
        if fast is None or layout is None or not fast.fits(layout):
            self.decode_plain(payload, numel, out, start, accumulate)
        elif out.numel():
            refuse(fast.decode(layout, numel, start, payload, out, accumulate), self.name, layout)

    def decode_plain(
        self, payload: bytes | memoryview, numel: int, out: Tensor, start: int, accumulate: Add | Towards | None
    ) -> None:
        """What :meth:`decode_into` computes, on torch: its definition."""
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

    def encode_plain(
        self,
        terms: Sequence[Tensor],
        carry: Carry | None,
        payload: Tensor,
        decoded: Tensor | None,
        start: int,
        numel: int,
    ) -> None:
        """Encode the first of ``terms`` less the others, on torch: the definition."""
        for first, last in self.chunks(terms[0].numel()):
            chunk = terms[0][first:last]
            for index, term in enumerate(terms[1:]):
                chunk = torch.sub(chunk, term[first:last], out=chunk if index else None)
            told = None if decoded is None else decoded[first:last]
            if carry is None:
                self.encode_chunk(chunk, payload, numel, start + first, told)
                continue
            residual = carry.residual[first:last]
            chunk = torch.add(chunk, residual * carry.beta)
            said = torch.empty_like(chunk)
            self.encode_chunk(chunk, payload, numel, start + first, said)
            torch.sub(chunk, said, out=residual)
            if told is not None:
                told.copy_(said)

    def _encode(
        self,
        terms: Sequence[Tensor],
        carry: Carry | None,
        payload: Tensor,
        decoded: Tensor | None,
        start: int,
        numel: int | None,
    ) -> int:
        """Check the caller's memory, encode, and return the payload's length."""
        values = terms[0]
        whole = values.numel() if numel is None else numel
        check_place(self, values.numel(), start, whole)
        for each in (*terms, *([] if decoded is None else [decoded]), *([] if carry is None else [carry.residual])):
            check_values(each)
            assert each.shape == values.shape, (each.shape, values.shape)
        length = self.payload_bytes(whole)
        assert payload.dtype == torch.uint8, f"payload is {payload.dtype}"
        assert payload.is_contiguous(), "payload is not contiguous"
        assert payload.dim() == 1, f"payload has shape {tuple(payload.shape)}"
        assert payload.numel() >= length, f"payload has room for {payload.numel()} bytes, {length} are needed"
        fast, layout = kernels(), self.layout
        if fast is None or layout is None or not fast.fits(layout):
            self.encode_plain(terms, carry, payload[:length], decoded, start, whole)
        elif values.numel():
            status = fast.encode(layout, whole, start, terms, carry, payload, decoded)
            if status is not Status.DONE:
                raise NonFiniteError(f"{self.name} was to encode a NaN or an infinity")
        return length
