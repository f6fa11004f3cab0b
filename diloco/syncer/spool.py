"""Updates on disk: one file each, durable before its ack, kept until no snapshot needs it any more.

An interrupted push leaves ``.partial/...``, from whose length it can be resumed. A complete one is made durable and
renamed to ``<site>/<fragment>-<sequence>-<digest>.update``; that relative name is the *payload reference* of the
journal. A power cut leaves a partial file or a complete one, never a final name with other content.

Reading. Payloads are read without ever being whole in memory, in two ways. ``read_part`` copies the bytes of some
values out of a file that may still be growing. ``Mapped`` maps a complete file into memory for a codec: the kernel
loads the pages that are read, and ``let_go`` releases them, so that only recently read pages are resident. A frame of
the entropy stage cannot be read by ranges: ``opened`` unpacks it on the disk first.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
import threading
import time
from typing import IO, TYPE_CHECKING

from diloco.codec.base import Buffers, Codec, Hasher, PlainCodec, bytes_of, digits
from diloco.codec.entropy import RAW, EntropyCodec
from diloco.durable import PLAIN_DISK, Disk, Step

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from diloco.wire.messages import PushHeader


def read_part(
    file: int, codec: PlainCodec, numel: int, start: int, stop: int, begin: int, buffers: Buffers
) -> memoryview:
    """Return the payload of the values from ``start`` to ``stop`` alone, in memory from ``buffers``.

    ``file`` is open; from byte ``begin`` on it holds a payload of ``numel`` values, which may be incomplete.
    Raises ``OSError`` when the file ends before bytes that it must contain.
    """
    sections = codec.sections(numel, start, stop)
    room = bytes_of(buffers.raw(sum(length for _, length in sections)))
    at = 0
    for offset, length in sections:
        place, end = begin + offset, at + length
        while at < end:
            count = os.preadv(file, [room[at:end]], place)
            if not count:
                raise OSError(f"the file ends at byte {place}")
            place += count
            at += count
    return room


class Mapped:
    """A memory map of a complete, non-empty file, from ``begin`` on; it outlives the file's handle and name.

    The map is closed when ``payload`` and all parts of it are released.
    """

    def __init__(self, file: IO[bytes], begin: int = 0) -> None:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.payload = memoryview(self._map)[begin:]

    def let_go(self) -> None:
        """Let the kernel drop the pages; the next read loads them again. Any thread may call this at any time."""
        self._map.madvise(mmap.MADV_DONTNEED)


def opened(path: Path, codec: Codec, numel: int) -> tuple[PlainCodec, Mapped]:
    """Return the payload in ``path`` and the codec that reads it by ranges: ``codec`` without the entropy stage.

    A frame of that stage is unpacked, a piece at a time, into an unnamed file beside ``path``, which goes with the
    mapping. Raises ``DecodeError`` for a malformed frame, ``OSError`` when there is no disk space for it.
    """
    with path.open("rb") as file:
        if not isinstance(codec, EntropyCodec):
            return codec.plain, Mapped(file)
        if file.read(len(RAW)) == RAW:
            return codec.plain, Mapped(file, len(RAW))
        file.seek(0)
        with tempfile.TemporaryFile(dir=path.parent) as unpacked:
            for piece in codec.unpacked(file, numel):
                unpacked.write(piece)
            unpacked.flush()
            return codec.plain, Mapped(unpacked)


ABOVE = ".above"
"""The folder of a region's versions from the syncer above; no site's name begins with a dot."""


class SpoolError(ValueError):
    """A payload that the journal names is missing or damaged."""


class Spool:
    """The folder of updates."""

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._disk = disk
        self.partial = folder / ".partial"  # No site's name begins with a dot.
        disk.make_folder(self.partial, Step.FOLDER)
        self._sites: set[str] = set()
        self._claims: dict[str, list[bool | None]] = {}  # By payload, which attempts keep it; None: not settled.
        self._claims_lock = threading.Lock()

    def reference(self, site: str, fragment: int, sequence: int, digest: str) -> str:
        """Return the payload's reference, which is the same for every attempt to send the update."""
        return f"{site}/{fragment}-{sequence}-{digits(digest)[:16]}.update"

    def open_partial(self, header: PushHeader) -> PartialUpdate:
        """Open the file for the rest of an update; delete partial files of other updates of this (site, fragment)."""
        reference = self.reference(header.site_id, header.fragment, header.sequence, header.digest)
        path = self.partial / reference.replace("/", "@")
        for other in self.partial.glob(f"{header.site_id}@{header.fragment}-*.update"):
            if other != path:
                self._disk.remove(other, Step.SPOOL_DISCARD)
        return PartialUpdate(path, reference, header.payload_bytes, self._disk, header.digest)

    def keep(self, partial: PartialUpdate) -> str:
        """Make a complete update durable under its final name; ``settle`` must follow.

        Two attempts at the same update may overlap, when a site gave up a push and sent it again: name and content are
        the same. If the name exists already, an earlier attempt has kept it for good: a later attempt that is refused,
        because its process has been replaced meanwhile, must not remove it.
        """
        reference = partial.reference
        with self._claims_lock:
            if reference not in self._claims:
                self._claims[reference] = [True] if (self.folder / reference).exists() else []
            self._claims[reference].append(None)
        try:
            target = self._place(reference)
            self._disk.sync_file(partial.path, Step.SPOOL_SYNC)
            self._disk.rename(partial.path, target, Step.SPOOL_RENAME)
            self._disk.sync_folder(target.parent, Step.SPOOL_FOLDER)
        except BaseException:
            self.settle(reference, keep=True)  # The file may be of an earlier, accepted attempt.
            raise
        return reference

    def put_above(self, fragment: int, values: memoryview, digest: str) -> str:
        """Store the values of a version of the syncer above durably, under a name that was never used before."""
        reference = f"{ABOVE}/{fragment}-{time.time_ns()}-{digits(digest)[:16]}.update"
        self._disk.write_parts(self._place(reference), (values,), Step.SPOOL_SYNC)
        return reference

    def _place(self, reference: str) -> Path:
        """Return a payload's path; its folder is made durable first, as another call may have just created it."""
        target = self.folder / reference
        if target.parent.name not in self._sites:
            self._disk.make_folder(target.parent, Step.SPOOL_SITE)
            self._disk.sync_folder(self.folder, Step.SPOOL_SITE)
            self._sites.add(target.parent.name)
        return target

    def settle(self, reference: str, *, keep: bool, back: PartialUpdate | None = None) -> None:
        """Settle a kept update: ``keep`` it, as the journal names it, or give its bytes ``back`` for another push, or
        delete it. A file that another attempt has kept under the same name stays."""
        with self._claims_lock:
            claims = self._claims[reference]
            claims[claims.index(None)] = keep
            if None in claims:
                return
            del self._claims[reference]
            if True in claims:
                return
            if back is not None:
                self._disk.rename(self.folder / reference, back.path, Step.SPOOL_BACK)
            else:
                self.drop(reference)

    def drop(self, reference: str) -> None:
        """Delete a payload that is no longer needed."""
        assert reference.endswith(".update"), reference  # Anything else would be a folder of acknowledged updates.
        self._disk.remove(self.folder / reference, Step.SPOOL_DROP)

    def opened(self, reference: str, digest: str, codec: Codec, numel: int) -> tuple[Codec, Mapped]:
        """Verify the payload; return the codec that reads it, and the payload as mapped memory.

        If it cannot be unpacked on the disk (no space, or no permission to write), it stays packed: the returned codec
        then unpacks it in memory.
        """
        self.check(reference, digest)
        path = self.folder / reference
        try:
            return opened(path, codec, numel)
        except OSError:
            with path.open("rb") as file:
                return codec, Mapped(file)

    def check(self, reference: str, digest: str) -> None:
        """Raise ``SpoolError``, naming the file, if it is missing or damaged; reads a block at a time."""
        path = self.folder / reference
        try:
            found = _hashed(path, digest)
        except FileNotFoundError:
            raise SpoolError(f"{path} is missing: the journal names it") from None
        except OSError as error:
            raise SpoolError(f"{path} cannot be read: {error.strerror}") from error
        if found.text() != digest:
            raise SpoolError(f"{path} is damaged: its digest is not the one that was acknowledged")

    def sweep(self, needed: Container[str]) -> None:
        """Delete every complete update that is not ``needed``, and unfinished copies."""
        for leftover in self.folder.glob("*/.*.tmp"):
            self._disk.remove(leftover, Step.SPOOL_DROP)
        for path in sorted(self.folder.glob("*/*.update")):
            reference = path.relative_to(self.folder).as_posix()
            if path.parent != self.partial and reference not in needed:
                self._disk.remove(path, Step.SPOOL_DROP)


class PartialUpdate:
    """An incoming update. ``offset`` bytes have arrived; ``write`` appends, ``hash`` is over all of them."""

    def __init__(self, path: Path, reference: str, payload_bytes: int, disk: Disk, like: str) -> None:
        """``reference`` is its final name; ``like`` is the declared digest, which sets the digest's form."""
        self.path, self.reference = path, reference
        self._disk = disk
        self.hash, self.offset = Hasher(like), 0
        if path.exists() and path.stat().st_size <= payload_bytes:
            self.hash, self.offset = _hashed(path, like), path.stat().st_size
        self._file = disk.open(path, "r+b" if self.offset else "wb", Step.SPOOL_WRITE, buffering=0)
        self._file.seek(self.offset)

    def write(self, data: memoryview) -> None:
        """Append ``data``."""
        self._disk.write(self._file, data, Step.SPOOL_WRITE)
        self.hash.update(data)
        self.offset += len(data)

    def close(self) -> None:
        """Close the file; its bytes, if any, stay for a later attempt."""
        self._file.close()
        if self.offset == 0:
            self._disk.remove(self.path, Step.SPOOL_DISCARD)

    def discard(self) -> None:
        """Delete the bytes: they are not what was declared, or the disk has refused some of them."""
        with contextlib.suppress(OSError):  # Closing may write what is still in memory; that is not needed.
            self._file.close()
        self._disk.remove(self.path, Step.SPOOL_DISCARD)


def _hashed(path: Path, like: str) -> Hasher:
    """Return the digest of a file in the form of ``like``; read a block at a time."""
    found = Hasher(like)
    with path.open("rb", buffering=0) as file:
        hashlib.file_digest(file, lambda: found)  # type: ignore[arg-type, return-value]
    return found
