"""Payloads that lie on the disk, read without ever being whole in memory.

Two ways.  ``read_part`` copies the bytes of some values out of a file that may still be growing.  ``Mapped`` shows a
file that is whole to a codec as if it were memory: the kernel brings the pages that are looked at, and ``let_go`` hands
them back, so that what is resident at any time is what was looked at since.  A frame of the entropy stage cannot be
looked at by ranges: ``opened`` unpacks it on the disk first.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from diloco.codec.buffers import Buffers
from diloco.codec.contract import payload_view
from diloco.codec.entropy import RAW, EntropyCodec

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO

    from diloco.codec.contract import Codec


class CutShortError(OSError):
    """A file ends before the bytes that are known to be in it."""


def read_part(
    file: int, codec: Codec, numel: int, start: int, stop: int, begin: int = 0, buffers: Buffers | None = None
) -> memoryview:
    """The payload of the values from ``start`` to ``stop`` by themselves, in memory out of ``buffers``.

    ``file`` is open, and from ``begin`` on a payload of ``numel`` values lies in it, as far as it has come.
    """
    sections = codec.sections(numel, start, stop)
    size, rooms = sum(length for _, length in sections), buffers if buffers is not None else Buffers(0)
    room = payload_view(rooms.raw(size))
    at = 0
    for offset, length in sections:
        _fill(file, room[at : at + length], begin + offset)
        at += length
    return room


def _fill(file: int, room: memoryview, offset: int) -> None:
    at = 0
    while at < len(room):
        count = os.preadv(file, [room[at:]], offset + at)
        if not count:
            raise CutShortError(f"the file ends at byte {offset + at}")
        at += count


class Mapped:
    """A file that is whole and not empty, from ``begin`` on, as memory, also when the file is closed and has no name.

    It is gone when nobody holds ``payload``, or a part of it.
    """

    def __init__(self, file: IO[bytes], begin: int = 0) -> None:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.payload = memoryview(self._map)[begin:]

    def let_go(self) -> None:
        """Nothing of it need be resident; whoever looks again brings it back.  Any thread may say so at any time."""
        self._map.madvise(mmap.MADV_DONTNEED)


def opened(path: Path, codec: Codec, numel: int) -> tuple[Codec, Mapped]:
    """The payload of ``codec`` in ``path``, and the codec that reads it by ranges: that without the entropy stage.

    What a frame of that stage holds is unpacked, a piece at a time, into a file without a name beside ``path``, which
    is gone with the mapping.  ``DecodeError`` for what is no such frame, ``OSError`` where there is no room for it.
    """
    with path.open("rb") as file:
        if not isinstance(codec, EntropyCodec):
            return codec, Mapped(file)
        if file.read(len(RAW)) == RAW:
            return codec.plain, Mapped(file, len(RAW))
        file.seek(0)
        with tempfile.TemporaryFile(dir=path.parent) as unpacked:
            for piece in codec.unpacked(file, numel):
                unpacked.write(piece)
            unpacked.flush()
            return codec.plain, Mapped(unpacked)
