"""The lossless stage behind any codec: zstd, with a flag byte in front that tells whether the payload is compressed.

``+zstd`` compresses every payload, and sends the shorter form.  ``+auto`` first compresses a sample of
``SAMPLE_PIECES`` pieces, evenly spread over the payload; where that saves less than ``SAVED_MIN`` of the sample, the
payload stays raw.  So the choice is made for each fragment and each update, from the bytes alone: a replay chooses the
same, and the choice follows codes that change over a run.  A payload no longer than the sample is always tried.

``SAVED_MIN`` is a sixteenth, whatever the link: with zstd at 1.3 GB/s, and 1.9 GB/s for decompression, it saves a link
of 400 Mbit/s as much time as the stage costs, and a slower link more.  The codes of real pseudo-gradients shrink by an
eighth in int4 and e3m0, by a twentieth in int8 and int2, and not at all in topk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import zstandard

from diloco.codec.base import Codec, DecodeError, PlainCodec, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from torch import Tensor

RAW, ZSTD = b"\x00", b"\x01"
LEVEL_MAX = 19  # the levels above need windows over WINDOW_BYTES_MAX
WINDOW_BYTES_MAX = 8 * 2**20
FEED_BYTES = 1024
"""Bytes of a frame decompressed at a time: four bytes of a hostile frame can become 128 KiB."""
WRITE_BYTES = 8192
UNPACK_BYTES_MAX = WINDOW_BYTES_MAX + FEED_BYTES // 4 * 128 * 2**10
"""Memory for decompression: the window, and the output of one step."""
SAMPLE_PIECES = 16
PIECE_BYTES = 8192
SAVED_MIN = 1 / 16


@dataclass(frozen=True, slots=True)
class EntropyCodec(Codec):
    """Layout: a flag byte, then the payload of ``inner`` as it is (0) or as one zstd frame that names its size (1).

    Never longer than the payload of ``inner`` plus the flag.
    """

    name: str
    inner: PlainCodec
    level: int
    asks: bool = False
    """Whether a sample decides if compression pays (``+auto``)."""

    def __post_init__(self) -> None:
        if not 1 <= self.level <= LEVEL_MAX:
            raise ValueError(f"codec is {self.name!r}: its zstd level must be from 1 to {LEVEL_MAX}")

    @property
    def plain(self) -> PlainCodec:
        """The inner codec."""
        return self.inner

    def opened(self, payload: bytes | memoryview, numel: int) -> tuple[PlainCodec, memoryview]:
        """See :class:`~diloco.codec.base.Codec`; memory is bounded by ``payload_bytes(numel)``."""
        view = memoryview(payload)
        flag, body = bytes(view[:1]), view[1:]
        if flag == RAW:
            return self.inner.opened(body, numel)
        if flag != ZSTD:
            raise DecodeError(f"{self.name} payload starts with {flag.hex() or 'nothing'}: must be 00 or 01")
        expected = self.payload_bytes(numel)
        # Check the header first: the library allocates the size that it declares, and then ignores any other limit.
        self._check_header(body, expected)
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
            raw = decompressor.decompress(body, max_output_size=expected, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DecodeError(f"{self.name} frame is damaged: {error}") from None
        return self.inner.opened(raw, numel)

    def unpacked(self, staged: BinaryIO, numel: int) -> Iterator[bytes]:
        """Yield the inner payload, in pieces, of a flag and frame read from ``staged``; refuse as ``opened`` does.

        ``UNPACK_BYTES_MAX`` bounds the memory.
        """
        flag, expected, held = staged.read(1), self.payload_bytes(numel), staged.read(FEED_BYTES)
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
            raise DecodeError(f"{self.name} frame is damaged: {come} of {expected} bytes, or it does not end with them")

    def closed(self, payload: Tensor) -> memoryview:
        """See :class:`~diloco.codec.base.Codec`."""
        compressor = zstandard.ZstdCompressor(level=self.level, write_content_size=True, write_checksum=False)
        if self.asks and payload.numel() > SAMPLE_PIECES * PIECE_BYTES:
            apart = (payload.numel() - PIECE_BYTES) / (SAMPLE_PIECES - 1)
            starts = [int(index * apart) for index in range(SAMPLE_PIECES)]
            sample = b"".join(bytes_of(payload[start : start + PIECE_BYTES]) for start in starts)
            if len(compressor.compress(sample)) > (1 - SAVED_MIN) * len(sample):
                return memoryview(RAW + bytes_of(payload))
        frame = compressor.compress(bytes_of(payload))
        return memoryview(ZSTD + frame if len(frame) < payload.numel() else RAW + bytes_of(payload))

    def _check_header(self, frame: bytes | memoryview, expected: int) -> None:
        try:
            header = zstandard.get_frame_parameters(frame)
        except zstandard.ZstdError as error:
            raise DecodeError(f"{self.name} payload is not a zstd frame: {error}") from None
        if header.content_size != expected:
            raise DecodeError(f"{self.name} frame declares {header.content_size} bytes, must be {expected}")
        if header.window_size > WINDOW_BYTES_MAX:
            raise DecodeError(f"{self.name} frame asks for a window of {header.window_size} bytes")


def stage_of(codec: Codec, payload: bytes | memoryview) -> str | None:
    """Return the form of a payload that ``codec`` made, "zstd" or "raw"; None where the codec has no such stage."""
    if not isinstance(codec, EntropyCodec):
        return None
    return "zstd" if bytes(memoryview(payload)[:1]) == ZSTD else "raw"
