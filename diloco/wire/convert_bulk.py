"""The messages of Push and Pull, from dataclasses to bytes and back; ``convert`` has those of the control calls.

Frames.  A chunk may travel as a frame: 24 bytes, then the data itself, which a receiver reads where it lies.  The head
is little-endian: a zero byte, the kind (1), two zero bytes, the CRC-32 of the sixteen bytes that follow, the offset in
the payload, the XXH3-64 of the data with the offset as its seed.  No protobuf message begins with a zero byte, because
no field has the number 0, so frames and messages share a stream.

Protobuf would cost a second copy of every byte at each end, and a CRC-32 at a tenth of the speed.  The head has its own
checksum because the receiver asks for damaged data again by their place, and it knows the place only where the head is
good.

Repeats.  Sites pull a version at the same time, so the frames that were made for one site are those that the next one
wants.  To make a frame is to read its data, to hash them and to copy them into memory that the system has yet to give;
``Repeats`` keeps the latest frames and saves that work.
"""

from __future__ import annotations

import struct
import threading
import zlib
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from diloco.wire import messages as m
from diloco.wire.chunks import DamagedChunk
from diloco.wire.convert import OneOf, Whole, parse
from diloco.wire.messages import CHUNK_BYTES_MAX, Frame, MalformedMessage, check_chunk_data, check_chunk_offset
from diloco.wire.v1 import sync_pb2

if TYPE_CHECKING:
    from collections.abc import Hashable

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
    check_chunk_data("data", data)
    checksum = xxh3_64_intdigest(data, offset)
    checked = zlib.crc32(_PLACE.pack(offset, checksum))
    return b"".join((_HEAD.pack(0, _KIND, 0, checked, offset, checksum), data))


def unpack_frame(raw: bytes) -> Frame:
    """What ``raw`` holds; its ``data`` are a view.

    ``MalformedMessage`` for what is no frame, ``DamagedChunk`` where the head itself is damaged.
    """
    if not FRAME_HEAD_BYTES < len(raw) <= FRAME_HEAD_BYTES + CHUNK_BYTES_MAX:
        wanted = f"{FRAME_HEAD_BYTES} of its head and 1 to {CHUNK_BYTES_MAX} of data"
        raise MalformedMessage(f"frame is {len(raw)} bytes long: {wanted} wanted")
    zero, kind, reserved, checked, offset, checksum = _HEAD.unpack_from(raw)
    if checked != zlib.crc32(memoryview(raw)[_CHECKED_FROM:FRAME_HEAD_BYTES]):
        raise DamagedChunk("the head of a frame was damaged on the way")
    if (zero, kind, reserved) != (0, _KIND, 0):
        raise MalformedMessage(f"kind is {kind}: a frame of kind {_KIND} wanted")
    check_chunk_offset("offset", offset)
    data = memoryview(raw)[FRAME_HEAD_BYTES:]
    return Frame(offset, data, intact=xxh3_64_intdigest(data, offset) == checksum)


_PUSH = OneOf[m.PushPart](
    sync_pb2.PushRequest,
    "part is not set: a header, a chunk or a commit wanted",
    header=m.PushHeader,
    chunk=m.Chunk,
    commit=m.PushCommit,
)
_PULL_PART = OneOf[m.PullPart](
    sync_pb2.PullResponse,
    "part is not set: a header or a chunk wanted",
    m.MESSAGE_BYTES_MAX,
    header=m.PullHeader,
    chunk=m.Chunk,
)

_PUSH_REPLY = OneOf[m.PushReply](
    sync_pb2.PushResponse,
    "part is not set: an admission, bytes wanted again or a result wanted",
    admitted=m.PushAdmitted,
    again=m.PushAgain,
    result=m.PushResult,
)
pack_push_reply, unpack_push_reply = _PUSH_REPLY.pack, _PUSH_REPLY.unpack

_PULL = Whole(m.PullAsk, sync_pb2.PullRequest)
pack_pull, unpack_pull = _PULL.pack, _PULL.unpack


def pack_push(part: m.PushPart) -> bytes:
    """``PushRequest``, or a frame."""
    if isinstance(part, m.Frame):
        return pack_frame(part.offset, part.data)
    return _pack_chunk(part) if isinstance(part, m.Chunk) else _PUSH.pack(part)


def unpack_push(raw: bytes) -> m.PushPart:
    """``PushRequest``, or a frame."""
    if is_frame(raw):
        return unpack_frame(raw)
    proto = parse(sync_pb2.PushRequest, raw, m.MESSAGE_BYTES_MAX)
    if len(raw) > m.CONTROL_BYTES_MAX and proto.WhichOneof("part") == "header":
        raise m.MalformedMessage(f"header is {len(raw)} bytes long: at most {m.CONTROL_BYTES_MAX} wanted")
    return _PUSH.read(proto)


def pack_pull_part(part: m.PullPart) -> bytes:
    """``PullResponse``, or a frame."""
    if isinstance(part, m.Frame):
        return pack_frame(part.offset, part.data)
    return _pack_chunk(part) if isinstance(part, m.Chunk) else _PULL_PART.pack(part)


def unpack_pull_part(raw: bytes) -> m.PullPart:
    """``PullResponse``, or a frame."""
    return unpack_frame(raw) if is_frame(raw) else _PULL_PART.unpack(raw)


def _pack_chunk(chunk: m.Chunk) -> bytes:
    """A ``PushRequest`` or ``PullResponse`` that holds a chunk, which is field 2 in both.

    Written by hand because the generated code copies the data three times, at 1 MiB each time into fresh memory; this
    is one copy.  A test sees that protobuf reads it as its own.
    """
    check_chunk_data("data", chunk.data)
    checksum = b"\x15" + chunk.crc32.to_bytes(4, "little")
    if chunk.xxh3 is not None:
        checksum = b"\x21" + chunk.xxh3.to_bytes(8, "little")
    fields = b"\x08%b%b\x1a%b" % (_varint(chunk.offset), checksum, _varint(len(chunk.data)))
    return b"".join((b"\x12", _varint(len(fields) + len(chunk.data)), fields, chunk.data))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


ASKERS_KEPT = 256
"""Those of whom it is known that they began with a payload, each once for each payload; the last ones."""


class Repeats:
    """The frames that were made last, at most ``bytes_max`` of them in all; any thread may ask."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._kept: dict[tuple[Hashable, int, int], bytes] = {}
        self._bytes = 0
        self._asked: dict[tuple[Hashable, str], int] = {}

    def asked(self, payload: Hashable, asker: str, attempt: int) -> None:
        """``asker`` begins with ``payload``; streams that bring it together are one ``attempt``, and 0 is one alone.

        Who begins once more may have got other bytes than were described, though each frame was intact, and it may be
        here that they were damaged: the frames of this payload are forgotten, and made anew for whoever comes next.
        """
        with self._lock:
            before = self._asked.pop((payload, asker), None)
            self._asked[payload, asker] = attempt
            if len(self._asked) > ASKERS_KEPT:
                del self._asked[next(iter(self._asked))]
            if before is None or before == attempt != 0:
                return
            for key in [key for key in self._kept if key[0] == payload]:
                self._bytes -= len(self._kept.pop(key))

    def frame(self, payload: Hashable, offset: int, data: bytes | memoryview) -> bytes:
        """The frame of ``data``, which stand at ``offset`` of ``payload``: a name that is always of the same bytes."""
        key = (payload, offset, len(data))
        with self._lock:
            found = self._kept.get(key)
        return found if found is not None else self._keep(key, pack_frame(offset, data))

    def _keep(self, key: tuple[Hashable, int, int], frame: bytes) -> bytes:
        with self._lock:
            if key not in self._kept:  # Another thread may have made it at the same time.
                self._kept[key] = frame
                self._bytes += len(frame)
            while self._bytes > self._bytes_max:
                self._bytes -= len(self._kept.pop(next(iter(self._kept))))
        return frame
