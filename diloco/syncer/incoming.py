"""What a syncer sends its standby, on its way in: a file beside its place, or a unit of the journal in memory."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

from diloco.durable import DiskFullError, Step, is_full
from diloco.wire.chunks import Assembler, ChunkError
from diloco.wire.messages import Unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from diloco.durable import Disk
    from diloco.syncer.store import Store
    from diloco.wire.messages import Chunk
    from diloco.wire.replication import Item


class Incoming:
    """One item.  ``DiskFullError`` when a file finds no room: ``discard`` it, it will be sent again."""

    def __init__(self, store: Store, item: Item, disk: Disk) -> None:
        self.item = item
        self._disk = disk
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        if item.name:
            kind, folder, name = item.name.split("/")
            rooms = {"spool": store.spool.folder, "lineages": store.lineages.folder}
            above = rooms.get(kind, store.snapshots.folder)
            target = above / (f".incoming-{folder}" if kind == "snapshots" else folder)
            self._path = target / name
            with _full_in_words():
                disk.make_folder(target, Step.STANDBY_FILE)
                disk.sync_folder(above.parent, Step.STANDBY_FILE)  # The first lineage makes the folder of them.
                self._file = disk.open(self._beside(self._path), "wb", Step.STANDBY_FILE, buffering=0)
        self._assembler = Assembler(item.item_bytes, self._write)

    def _beside(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.tmp")

    def _write(self, offset: int, data: memoryview) -> None:
        del offset
        self._hash.update(data)
        if self._file is None:
            self._held += data
            return
        with _full_in_words():
            self._disk.write(self._file, data, Step.STANDBY_FILE)

    def accept(self, chunk: Chunk) -> None:
        """Take one chunk."""
        try:
            self._assembler.accept(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3)
        except ChunkError as error:
            raise Unreachable(f"Follow: {error}") from error

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return self._assembler.offset == self.item.item_bytes

    def finish(self) -> bytes:
        """Check the whole; a file is durable under its name when this returns, a unit is returned."""
        if self._hash.hexdigest() != self.item.digest:
            raise Unreachable(f"Follow: {self.item.name or 'a unit'} is not what was declared")
        if self._file is None or self._path is None:
            return bytes(self._held)
        self._disk.sync(self._file, Step.STANDBY_FILE)
        self._file.close()
        with _full_in_words():
            self._disk.rename(self._beside(self._path), self._path, Step.STANDBY_FILE)
        self._disk.sync_folder(self._path.parent, Step.STANDBY_FILE)
        self._disk.sync_folder(self._path.parent.parent, Step.STANDBY_FILE)
        return b""

    def discard(self) -> None:
        """The rest will not come: nothing of it is left."""
        if self._file is not None and self._path is not None:
            self._file.close()
            self._disk.remove(self._beside(self._path), Step.STANDBY_FILE)


@contextlib.contextmanager
def _full_in_words() -> Iterator[None]:
    """A failed sync is not among these: it is final, whatever it failed for."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFullError(error.errno, error.strerror) from error
