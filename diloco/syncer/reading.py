"""Large files read once, into the memory that they stay in, and hashed on the way; several of them at a time.

A restart is as fast as this is: reading and SHA-256 each take about as long as the other, so that one piece is read
while the one before it is hashed, both without the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

    from torch import Tensor

PIECE_BYTES = 16 << 20
FILES_MAX = 4
"""Read at the same time, at most: more of them only take turns at the disk."""


class NotAsWritten(ValueError):
    """A file has another length or another digest than what was written."""


def read_verified(files: Sequence[tuple[Path, int, str]]) -> list[Tensor]:
    """The content of each (path, length, SHA-256), as bytes in a tensor of its own; ``NotAsWritten`` names the file."""
    with ThreadPoolExecutor(max_workers=min(FILES_MAX, os.cpu_count() or 1, len(files) or 1)) as pool:
        return list(pool.map(_read_one, files))


def _read_one(file: tuple[Path, int, str]) -> Tensor:
    path, size, wanted = file
    with path.open("rb", buffering=0) as source, ThreadPoolExecutor(max_workers=1) as reader:
        if os.fstat(source.fileno()).st_size != size:
            raise NotAsWritten(f"{path} is damaged: it is not what was written")
        data = torch.empty(size, dtype=torch.uint8)
        pieces = [
            data[start : start + PIECE_BYTES].numpy().data.cast("B") if size else memoryview(b"")
            for start in range(0, size, PIECE_BYTES)
        ]
        found = hashlib.sha256()
        read = [reader.submit(_fill, source, piece) for piece in pieces[:2]]
        for index, piece in enumerate(pieces):
            whole = read[index].result()
            if index + 2 < len(pieces):
                read.append(reader.submit(_fill, source, pieces[index + 2]))
            if not whole:
                break  # Cut short while it was read: the digest will say so.
            found.update(piece)
    if found.hexdigest() != wanted:
        raise NotAsWritten(f"{path} is damaged: it is not what was written")
    return data


def _fill(source: BinaryIO, piece: memoryview) -> bool:
    at = 0
    while at < len(piece):
        count = source.readinto(piece[at:])  # type: ignore[attr-defined]
        if not count:
            return False
        at += count
    return True
