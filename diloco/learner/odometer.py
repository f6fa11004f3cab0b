"""How far a site really got, readable after a kill -9.

A memory-mapped file: writing to it is a store to memory, which the training thread may do, and the kernel keeps the
page when the process dies.  A power cut may lose the last seconds; the ledger then counts fewer lost tokens than there
were, which is why a checkpoint and the syncer's figures take part as well.

It holds two readings, each with a checksum, written in turn: one that is damaged, or that a death cut short, is
noticed, and the other is the step before it.  An earlier release kept one reading, without a checksum.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK, Step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diloco.durable import Disk

FIELDS = struct.Struct("<QQ")
SLOT = struct.Struct("<QQI4x")
"""Step, tokens and the CRC-32 of both."""


class Odometer:
    """Steps and tokens of a site over all its processes.  ``note`` is told in words of a reading that is damaged."""

    def __init__(self, path: Path, disk: Disk = PLAIN_DISK, note: Callable[[str], None] = lambda why: None) -> None:
        self._disk, self._next = disk, 0
        disk.make_folder(path.parent, Step.ODOMETER)
        whole = path.exists()
        self._reading, damage = _read(path.read_bytes()) if whole else ((0, 0), "")
        if damage:
            note(f"{path} {damage}")
        if damage or not whole:
            disk.write_file(path, 2 * _slot(*self._reading), Step.ODOMETER)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * SLOT.size)

    def read(self) -> tuple[int, int]:
        """(step, tokens processed); noughts where nothing is known."""
        return self._reading

    def write(self, step: int, tokens: int) -> None:
        """Note where the site is."""
        self._disk.reached(Step.ODOMETER)
        begin = self._next * SLOT.size
        self._map[begin : begin + SLOT.size] = _slot(step, tokens)
        self._reading, self._next = (step, tokens), 1 - self._next
        self._disk.reached(Step.ODOMETER)

    def close(self) -> None:
        """Let the file go."""
        self._map.close()


def _slot(step: int, tokens: int) -> bytes:
    return SLOT.pack(step, tokens, zlib.crc32(FIELDS.pack(step, tokens)))


def _read(data: bytes) -> tuple[tuple[int, int], str]:
    """The reading in a file, and what is wrong with the file."""
    if len(data) == FIELDS.size:
        step, tokens = FIELDS.unpack(data)
        return (step, tokens), f"is of an earlier release, without a checksum: {tokens:,} tokens are taken from it"
    found = SLOT.iter_unpack(data) if len(data) == 2 * SLOT.size else iter(())
    good = [(step, tokens) for step, tokens, crc in found if crc == zlib.crc32(FIELDS.pack(step, tokens))]
    if not good:
        return (0, 0), "is damaged: how far the site got is taken from its checkpoint"
    step, tokens = max(good, key=lambda reading: reading[1])
    if len(good) == 1:
        return (step, tokens), f"is damaged in one of its two readings: the other one's {tokens:,} tokens are taken"
    return (step, tokens), ""
