"""A chunk as a frame: 24 bytes, then the data itself, which a receiver reads where it lies.

Little-endian: a zero byte, the kind (1), two zero bytes, the CRC-32 of the sixteen bytes that follow, the offset in the
payload, the XXH3-64 of the data with the offset as its seed.  No protobuf message begins with a zero byte, because no
field has the number 0, so that frames and messages share a stream.

What protobuf would cost beside this: a second copy of every byte at each end, and a CRC-32 at a tenth of the speed.
The head has a checksum of its own because of what follows from it: data that were damaged are asked for again by their
place, and the place is known only where the head is good.
"""

from __future__ import annotations

import struct
import zlib

from xxhash import xxh3_64_intdigest

from diloco.wire.chunks import DamagedChunk
from diloco.wire.messages import CHUNK_BYTES_MAX, PAYLOAD_BYTES_MAX, Frame, MalformedMessage

_HEAD = struct.Struct("<BBHIQQ")
_PLACE = struct.Struct("<QQ")
_KIND = 1
_CHECKED_FROM = 8

FRAME_HEAD_BYTES = _HEAD.size


def is_frame(raw: bytes) -> bool:
    """Whether ``raw`` is meant as a frame, and not as a protobuf message."""
    return raw[:1] == b"\x00"


def pack_frame(offset: int, data: bytes | memoryview) -> bytes:
    """The frame of ``data``, which stands at ``offset``."""
    if not 1 <= len(data) <= CHUNK_BYTES_MAX:
        raise MalformedMessage(f"data is {len(data)} bytes long: 1 to {CHUNK_BYTES_MAX} wanted")
    checksum = xxh3_64_intdigest(data, offset)
    checked = zlib.crc32(_PLACE.pack(offset, checksum))
    return b"".join((_HEAD.pack(0, _KIND, 0, checked, offset, checksum), data))


def unpack_frame(raw: bytes) -> Frame:
    """What ``raw`` holds; its ``data`` are a view.

    ``MalformedMessage`` for what is no frame, ``DamagedChunk`` where the head itself is damaged.
    """
    data_bytes = len(raw) - FRAME_HEAD_BYTES
    if not 1 <= data_bytes <= CHUNK_BYTES_MAX:
        raise MalformedMessage(f"data is {data_bytes} bytes long: 1 to {CHUNK_BYTES_MAX} wanted")
    zero, kind, reserved, checked, offset, checksum = _HEAD.unpack_from(raw)
    if checked != zlib.crc32(memoryview(raw)[_CHECKED_FROM:FRAME_HEAD_BYTES]):
        raise DamagedChunk("the head of a frame was damaged on the way")
    if (zero, kind, reserved) != (0, _KIND, 0):
        raise MalformedMessage(f"kind is {kind}: a frame of kind {_KIND} wanted")
    if offset > PAYLOAD_BYTES_MAX:
        raise MalformedMessage(f"offset is {offset}: at most {PAYLOAD_BYTES_MAX} wanted")
    data = memoryview(raw)[FRAME_HEAD_BYTES:]
    return Frame(offset, data, intact=xxh3_64_intdigest(data, offset) == checksum)
