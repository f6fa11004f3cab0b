"""The lossless stage behind any codec: zstd, with one byte in front that says whether it paid.

``+zstd`` compresses every payload, and sends what is shorter.  ``+auto`` asks a sample first: ``SAMPLE_PIECES`` pieces,
evenly spread over the payload, and where the stage takes less than ``SAVED_MIN`` of them away, the payload stays as it
is.  So it chooses for each fragment, anew with each update, by nothing but the bytes: a replay chooses the same, and a
fragment whose codes change over a run is treated as they are by then.  A payload no longer than the sample is tried.

``SAVED_MIN`` is a sixteenth, by ratio alone: at zstd's 1.3 GB/s and 1.9 GB/s back a link of 400 Mbit/s gains by that
as much time as the stage costs, a slower one more.  Of real pseudo-gradients the codes of int4 and e3m0 shrink by an
eighth, those of int8 and int2 by a twentieth, and those of topk not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import zstandard

from diloco.codec.base import Codec, DecodeError, bytes_tensor, payload_view, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from torch import Tensor

    from diloco.codec.base import Add, Carry, Towards

RAW, ZSTD = b"\x00", b"\x01"
LEVEL_MAX = 19  # the levels above need windows over WINDOW_BYTES_MAX
WINDOW_BYTES_MAX = 8 * 2**20
FEED_BYTES = 1024
"""Of a frame, unpacked at a time: four bytes of a hostile one become 128 KiB."""
WRITE_BYTES = 8192
UNPACK_BYTES_MAX = WINDOW_BYTES_MAX + FEED_BYTES // 4 * 128 * 2**10
"""Memory that it takes: the window, and what is unpacked at a time."""
SAMPLE_PIECES = 16
PIECE_BYTES = 8192
SAVED_MIN = 1 / 16


@dataclass(frozen=True, slots=True)
class EntropyCodec:
    """Layout: a flag byte, then the payload of ``inner`` as it is (0) or as one zstd frame that names its size (1).

    Never longer than the payload of ``inner`` plus the flag.
    """

    name: str
    inner: Codec
    level: int
    asks: bool = False
    """Whether a sample decides if it is worth while."""

    def __post_init__(self) -> None:
        if not 1 <= self.level <= LEVEL_MAX:
            raise ValueError(f"codec is {self.name!r}: its zstd level must be from 1 to {LEVEL_MAX}")

    @property
    def lossless(self) -> bool:
        """As the inner codec."""
        return self.inner.lossless

    @property
    def granule(self) -> int:
        """As the inner codec."""
        return self.inner.granule

    @property
    def layout(self) -> None:
        """A frame is opened first."""
        return None

    @property
    def plain(self) -> Codec:
        """The inner codec."""
        return self.inner

    def encode(self, values: Tensor) -> bytes:
        """See :class:`~diloco.codec.base.Codec`."""
        payload = torch.empty(self.payload_bytes_max(values.numel()), dtype=torch.uint8)
        return tensor_bytes(payload[: self.encode_into(values, payload)])

    def decode(self, payload: bytes | memoryview, numel: int) -> Tensor:
        """See :class:`~diloco.codec.base.Codec`; memory is bounded by ``payload_bytes(numel)``."""
        codec, raw = self.opened(payload, numel)
        return codec.decode(raw, numel)

    def encode_into(
        self,
        values: Tensor,
        payload: Tensor,
        decoded: Tensor | None = None,
        *,
        start: int = 0,
        numel: int | None = None,
    ) -> int:
        """See :class:`~diloco.codec.base.Codec`; whole tensors only."""
        assert numel in (None, values.numel()), f"{self.name} encodes whole tensors"
        return self._stage(payload, self.inner.encode_into(values, payload[1:], decoded))

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
        """See :class:`~diloco.codec.base.Codec`; whole tensors only."""
        assert numel in (None, base.numel()), f"{self.name} encodes whole tensors"
        length = self.inner.encode_difference(base, local, payload[1:], decoded, in_flight=in_flight, carry=carry)
        return self._stage(payload, length)

    def decode_into(
        self,
        payload: bytes | memoryview,
        numel: int,
        out: Tensor,
        start: int = 0,
        accumulate: Add | Towards | None = None,
    ) -> None:
        """See :class:`~diloco.codec.base.Codec`."""
        codec, raw = self.opened(payload, numel)
        codec.decode_into(raw, numel, out, start, accumulate)

    def sections(self, numel: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """As the inner codec."""
        return self.inner.sections(numel, start, stop)

    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[Codec, memoryview]:
        """See :class:`~diloco.codec.base.Codec`; memory is bounded by ``payload_bytes(numel)``."""
        view = memoryview(payload)
        flag, body = bytes(view[:1]), view[1:]
        if flag == RAW:
            return self.inner.opened(body, numel)
        if flag != ZSTD:
            raise DecodeError(f"{self.name} payload starts with {flag.hex() or 'nothing'}: must be 00 or 01")
        return self.inner.opened(self._decompress(body, self.inner.payload_bytes(numel)), numel)

    def unpacked(self, staged: BinaryIO, numel: int) -> Iterator[bytes]:
        """The inner payload of a frame that is read from ``staged``, the flag too, in pieces; refuses as ``opened``.

        ``UNPACK_BYTES_MAX`` bounds what that takes.
        """
        flag, expected, held = staged.read(1), self.inner.payload_bytes(numel), staged.read(FEED_BYTES)
        if flag != ZSTD:
            raise DecodeError(f"{self.name} payload starts with {flag.hex() or 'nothing'}: 01 is a frame")
        self._check_header(held, expected)
        unpacking = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompressobj(write_size=WRITE_BYTES)
        come = 0
        while held and come <= expected and not unpacking.eof:
            try:
                piece = unpacking.decompress(held)
            except zstandard.ZstdError as error:
                raise DecodeError(f"{self.name} frame is damaged: {error}") from None
            come += len(piece)
            yield piece
            held = staged.read(FEED_BYTES)
        if come != expected or not unpacking.eof or unpacking.unused_data or held:
            raise DecodeError(f"{self.name} frame is damaged: it ends with {come} of {expected} bytes, or not there")

    def closed(self, payload: Tensor) -> memoryview:
        """See :class:`~diloco.codec.base.Codec`."""
        frame = self._compress(payload)
        return memoryview(RAW + tensor_bytes(payload) if frame is None else ZSTD + frame)

    def payload_bytes(self, numel: int) -> int:
        """Return what the inner codec makes, without the flag."""
        return self.inner.payload_bytes(numel)

    def payload_bytes_max(self, numel: int) -> int:
        """Return the inner payload and the flag."""
        return self.inner.payload_bytes(numel) + 1

    def error_bound(self, values: Tensor) -> Tensor:
        """As the inner codec."""
        return self.inner.error_bound(values)

    def _stage(self, payload: Tensor, length: int) -> int:
        """Put the flag before the ``length`` bytes behind it, which become a frame where that is shorter."""
        frame = self._compress(payload[1 : 1 + length])
        payload[0] = (RAW if frame is None else ZSTD)[0]
        if frame is None:
            return 1 + length
        payload[1 : 1 + len(frame)] = bytes_tensor(frame, torch.uint8)
        return 1 + len(frame)

    def _compress(self, raw: Tensor) -> bytes | None:
        """One frame, or None where it would not be shorter, or not by enough."""
        compressor = zstandard.ZstdCompressor(level=self.level, write_content_size=True, write_checksum=False)
        if self.asks and raw.numel() > SAMPLE_PIECES * PIECE_BYTES:
            sample = _sample(raw)
            if len(compressor.compress(sample)) > (1 - SAVED_MIN) * len(sample):
                return None
        frame = compressor.compress(payload_view(raw))
        return frame if len(frame) < raw.numel() else None

    def _check_header(self, frame: bytes | memoryview, expected: int) -> None:
        try:
            header = zstandard.get_frame_parameters(frame)
        except zstandard.ZstdError as error:
            raise DecodeError(f"{self.name} payload is no zstd frame: {error}") from None
        if header.content_size != expected:
            raise DecodeError(f"{self.name} frame declares {header.content_size} bytes, must be {expected}")
        if header.window_size > WINDOW_BYTES_MAX:
            raise DecodeError(f"{self.name} frame asks for a window of {header.window_size} bytes")

    def _decompress(self, frame: memoryview, expected: int) -> bytes:
        # The library allocates what the header declares and heeds no other limit when it declares something, so the
        # header is judged first.
        self._check_header(frame, expected)
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
            return decompressor.decompress(frame, max_output_size=expected, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DecodeError(f"{self.name} frame is damaged: {error}") from None


def _sample(raw: Tensor) -> bytes:
    """Pieces from the first bytes to the last."""
    apart = (raw.numel() - PIECE_BYTES) / (SAMPLE_PIECES - 1)
    starts = [int(index * apart) for index in range(SAMPLE_PIECES)]
    return b"".join(tensor_bytes(raw[start : start + PIECE_BYTES]) for start in starts)


def stage_of(codec: Codec, payload: bytes | memoryview) -> str | None:
    """What became of a payload that ``codec`` made: "zstd" or "raw"; None where it has no such stage."""
    if not isinstance(codec, EntropyCodec):
        return None
    return "zstd" if bytes(memoryview(payload)[:1]) == ZSTD else "raw"
