"""How far a site really got, readable after a kill -9.

Two integers in a memory-mapped file: writing them is a store to memory, which the training thread may do, and the
kernel keeps the page when the process dies.  A power cut may lose the last seconds; the ledger then counts fewer
lost tokens than there were, which is why a checkpoint and the syncer's figures take part as well.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK, Step

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.durable import Disk

FIELDS = struct.Struct("<QQ")


class Odometer:
    """Steps and tokens of a site over all its processes."""

    def __init__(self, path: Path, disk: Disk = PLAIN_DISK) -> None:
        self._disk = disk
        disk.make_folder(path.parent, Step.ODOMETER)
        if not path.exists() or path.stat().st_size != FIELDS.size:
            disk.make(path, lambda new: new.write_bytes(FIELDS.pack(0, 0)), Step.ODOMETER)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), FIELDS.size)

    def read(self) -> tuple[int, int]:
        """(step, tokens processed)."""
        step, tokens = FIELDS.unpack_from(self._map)
        return int(step), int(tokens)

    def write(self, step: int, tokens: int) -> None:
        """Note where the site is."""
        self._disk.reached(Step.ODOMETER)
        FIELDS.pack_into(self._map, 0, step, tokens)
        self._disk.reached(Step.ODOMETER)

    def close(self) -> None:
        """Let the file go."""
        self._map.close()
