"""Payloads that lie on the disk, read without ever being whole in memory.

Two ways.  ``read_part`` copies the bytes of some values out of a file that may still be growing.  ``Mapped`` shows a
file that is whole to a codec as if it were memory: the kernel brings the pages that are looked at, and ``let_go`` hands
them back, so that what is resident at any time is what was looked at since.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import payload_view

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.codec.contract import Codec


class CutShortError(OSError):
    """A file ends before the bytes that are known to be in it."""


def read_part(file: int, codec: Codec, numel: int, start: int, stop: int, begin: int = 0) -> memoryview:
    """The payload of the values from ``start`` to ``stop`` by themselves.

    ``file`` is open, and from ``begin`` on a payload of ``numel`` values lies in it, as far as it has come.
    """
    sections = codec.sections(numel, start, stop)
    room = payload_view(torch.empty(sum(length for _, length in sections), dtype=torch.uint8))
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
    """A file that is whole and not empty, as memory.  It is gone when nobody holds ``payload``, or a part of it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.payload = memoryview(self._map)

    def let_go(self) -> None:
        """Nothing of it need be resident; whoever looks again brings it back.  Any thread may say so at any time."""
        self._map.madvise(mmap.MADV_DONTNEED)
