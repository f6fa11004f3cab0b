"""A disk that does with writes what disks do: what was not synced may be lost, torn or reordered, and bits rot.

A process that is killed loses nothing of what it wrote.  A power cut leaves of each write that no sync has covered all,
a part or nothing, whatever became of the writes around it; and of each name that no sync of the folder has covered the
old file or the new one.  That is more than a journalling file system does to its users and no more than it may do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

SEAL_BYTES = 16


class Damaged(Exception):
    """What is on the disk is not what was written; the text names the file."""


@dataclass(slots=True)
class File:
    """``data`` as a process reads it; ``pending`` are the pieces of it (offset, length) that no sync has covered."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int]] = field(default_factory=list)

    def lose(self, random: Random) -> None:
        """Keep of each pending piece all, the beginning or nothing; what then is a hole reads as zeros."""
        if not self.pending:
            return
        kept = bytearray(self.data[: self.pending[0][0]])
        for offset, length in self.pending:
            share = random.choice((0.0, random.random(), 1.0))
            piece = self.data[offset : offset + int(length * share)]
            if piece:
                kept.extend(bytes(max(0, offset - len(kept))))
                kept[offset:] = piece
        self.data, self.pending = kept, []


class Storage:
    """One folder of one machine."""

    def __init__(self) -> None:
        self._names: dict[str, File] = {}
        self._synced: dict[str, File] = {}
        self._rotten: list[tuple[File, int, int]] = []

    def names(self, prefix: str) -> list[str]:
        """The files whose names begin so, in order."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        """What is in a file; ``Damaged`` when there is none."""
        if name not in self._names:
            raise Damaged(f"{name} is missing")
        return bytes(self._names[name].data)

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file, safe after ``sync``; one that was not there begins, safe after ``sync_names``."""
        file = self._names.setdefault(name, File())
        file.pending.append((len(file.data), len(data)))
        file.data += data

    def cut(self, name: str, size: int) -> None:
        """Cut a file off, and sync it; what had rotted behind the cut is gone with it."""
        file = self._names[name]
        self._rotten = [rot for rot in self._rotten if rot[0] is not file or rot[1] < size]
        del file.data[size:]
        self.sync(name)

    def sync(self, name: str) -> None:
        """What was written to the file is safe."""
        self._names[name].pending.clear()

    def rename(self, name: str, to: str) -> None:
        """Give a file another name; safe after ``sync_names``."""
        self._names[to] = self._names.pop(name)

    def remove(self, name: str) -> None:
        """Remove a file; it may be back after a power cut unless ``sync_names`` came before."""
        self._names.pop(name, None)

    def sync_names(self) -> None:
        """The names as they are now are safe."""
        self._synced = dict(self._names)

    def is_safe(self, name: str, data: bytes) -> bool:
        """Whether ``data`` is in a file, and no power cut would take it from there."""
        file = self._synced.get(name)
        at = -1 if file is None or self._names.get(name) is not file else file.data.find(data)
        return file is not None and at >= 0 and not any(offset < at + len(data) for offset, _ in file.pending)

    def power_cut(self, random: Random) -> None:
        """Everything that is not safe meets its fate."""
        found: dict[str, File] = {}
        for name in sorted(self._names.keys() | self._synced.keys()):
            old, new = self._synced.get(name), self._names.get(name)
            file = new if old is new or random.random() < 0.5 else old
            if file is not None:
                found[name] = file
        lost: list[File] = []
        for file in found.values():
            if not any(file is each for each in lost):
                file.lose(random)
                lost.append(file)
        self._names, self._synced = found, dict(found)

    def rot(self, random: Random) -> bool:
        """Flip one bit of one file, without a word; False when there is nothing to rot."""
        names = [name for name in self.names("") if self._names[name].data]
        if not names:
            return False
        file = self._names[random.choice(names)]
        place, bit = random.randrange(len(file.data)), 1 << random.randrange(8)
        file.data[place] ^= bit
        self._rotten.append((file, place, bit))
        return True

    def is_rotten(self) -> bool:
        """Whether some bit has rotted since the last ``mend``."""
        return bool(self._rotten)

    def mend(self) -> None:
        """An operator brings back every file as it was, from a copy that did not rot."""
        for file, place, bit in self._rotten:
            if place < len(file.data):
                file.data[place] ^= bit
        self._rotten = []


def sealed(data: bytes) -> bytes:
    """``data`` behind its digest."""
    return hashlib.sha256(data).digest()[:SEAL_BYTES] + data


def unsealed(name: str, data: bytes) -> bytes:
    """What ``sealed`` was given; ``Damaged`` names the file when it is another."""
    if hashlib.sha256(data[SEAL_BYTES:]).digest()[:SEAL_BYTES] != data[:SEAL_BYTES]:
        raise Damaged(f"{name} is damaged")
    return data[SEAL_BYTES:]
