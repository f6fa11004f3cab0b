"""Updates on disk: one file each, durable before its ack, kept until a snapshot no longer needs it.

A push that breaks off leaves ``.partial/...``, from whose length it can be resumed.  A whole one is made durable and
renamed to ``<site>/<fragment>-<sequence>-<digest>.update``; that relative name is the *payload reference* of the
journal.  A power cut leaves a partial file, or a whole one; never a whole name with other content.

Reading.  Payloads on the disk are read without ever being whole in memory, in two ways.  ``read_part`` copies the bytes
of some values out of a file that may still be growing.  ``Mapped`` shows a file that is whole to a codec as if it were
memory: the kernel brings the pages that are looked at, and ``let_go`` hands them back, so that what is resident at any
time is what was looked at since.  A frame of the entropy stage cannot be looked at by ranges: ``opened`` unpacks it on
the disk first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING

from diloco.codec.base import digest_of, digits, hasher, payload_view
from diloco.codec.buffers import Buffers
from diloco.codec.entropy import RAW, EntropyCodec
from diloco.durable import PLAIN_DISK, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from io import RawIOBase
    from pathlib import Path
    from typing import IO

    from diloco.codec.base import Codec
    from diloco.durable import Disk
    from diloco.wire.messages import PushHeader


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


ABOVE = ".above"
"""The folder of what a region has of the syncer above it; no site's name begins with a dot."""
BLOCK_BYTES = 256 * 1024
"""Of what lies here, so much is in memory at once: little enough to stay in the cache until it is hashed."""


class SpoolError(ValueError):
    """A payload that the journal names is missing or not what it was."""


class Settled(Enum):
    """What became of a kept update: the journal names it, its bytes wait for another push, or nobody wants it."""

    KEPT = 1
    GIVEN_BACK = 2
    DROPPED = 3


class Spool:
    """The folder of updates."""

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._disk = disk
        self.partial = folder / ".partial"  # No site's name begins with a dot.
        disk.make_folder(self.partial, Step.FOLDER)
        self._sites: set[str] = set()
        self._claims: dict[str, list[Settled | None]] = {}  # One for each attempt that is not over.
        self._claims_lock = threading.Lock()

    def reference(self, header: PushHeader) -> str:
        """The name of the update's payload, the same for every attempt to send it."""
        return self.name(header.site_id, header.fragment, header.sequence, header.digest)

    def name(self, site: str, fragment: int, sequence: int, digest: str) -> str:
        """The same name, from what a fate knows."""
        return f"{site}/{fragment}-{sequence}-{digits(digest)[:16]}.update"

    def open_partial(self, header: PushHeader) -> PartialUpdate:
        """The place for the rest of an update; what other updates of this (site, fragment) left is dropped."""
        path = self.partial / self.reference(header).replace("/", "@")
        for other in self.partial.glob(f"{header.site_id}@{header.fragment}-*.update"):
            if other != path:
                self._disk.remove(other, Step.SPOOL_DISCARD)
        return PartialUpdate(path, header.payload_bytes, self._disk, header.digest)

    def keep(self, partial: PartialUpdate, header: PushHeader) -> str:
        """Make a whole update durable and give it its name; ``settle`` must follow.

        Two attempts at the same update may be here at once, when a push was given up by its site and sent again: the
        name is the same, and so is what is in it.  Where the name is there already an earlier attempt has kept it for
        good: a later one that is refused, as its process has been replaced meanwhile, takes nothing away.
        """
        reference = self.reference(header)
        with self._claims_lock:
            if reference not in self._claims:
                self._claims[reference] = [Settled.KEPT] if (self.folder / reference).exists() else []
            self._claims[reference].append(None)
        try:
            self._keep(reference, partial, header)
        except BaseException:
            self.settle(reference, Settled.KEPT)  # What has that name may be of an earlier attempt, long accepted.
            raise
        return reference

    def _keep(self, reference: str, partial: PartialUpdate, header: PushHeader) -> None:
        target = self.folder / reference
        # Another fragment may have made the folder a moment ago, not yet durably.
        if header.site_id not in self._sites:
            self._disk.make_folder(target.parent, Step.SPOOL_SITE)
            self._disk.sync_folder(self.folder, Step.SPOOL_SITE)
            self._sites.add(header.site_id)
        self._disk.sync_file(partial.path, Step.SPOOL_SYNC)
        self._disk.rename(partial.path, target, Step.SPOOL_RENAME)
        self._disk.sync_folder(target.parent, Step.SPOOL_FOLDER)

    def put_above(self, fragment: int, values: memoryview, digest: str) -> str:
        """Make the values of a version of the syncer above durable, under a name that no others ever have had."""
        reference = f"{ABOVE}/{fragment}-{time.time_ns()}-{digits(digest)[:16]}.update"
        target = self.folder / reference
        if ABOVE not in self._sites:
            self._disk.make_folder(target.parent, Step.SPOOL_SITE)
            self._disk.sync_folder(self.folder, Step.SPOOL_SITE)
            self._sites.add(ABOVE)
        self._disk.write_parts(target, (values,), Step.SPOOL_SYNC)
        return reference

    def settle(self, reference: str, settled: Settled, partial: PartialUpdate | None = None) -> None:
        """Say what became of a kept update.  Nothing is taken from another attempt that has kept the same name."""
        with self._claims_lock:
            claims = self._claims[reference]
            claims[claims.index(None)] = settled
            if None in claims:
                return
            del self._claims[reference]
            if Settled.KEPT in claims:
                return
            if settled is Settled.GIVEN_BACK and partial is not None:
                self._disk.rename(self.folder / reference, partial.path, Step.SPOOL_BACK)
            else:
                self.drop(reference)

    def drop(self, reference: str) -> None:
        """Nobody needs this payload any more."""
        assert reference.endswith(".update"), reference  # Anything else would be a folder of acknowledged updates.
        self._disk.remove(self.folder / reference, Step.SPOOL_DROP)

    def size(self, reference: str) -> int:
        """Bytes that the payload takes; 0 where there is none."""
        try:
            return (self.folder / reference).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, reference: str, digest: str) -> bytes:
        """The payload, verified; ``SpoolError`` names the file that is missing or damaged."""
        path = self.folder / reference
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise SpoolError(f"{path} is missing: the journal names it") from None
        if digest_of(payload, digest) != digest:
            raise SpoolError(f"{path} is damaged: its digest is not the one that was acknowledged")
        return payload

    def opened(self, reference: str, digest: str, codec: Codec, numel: int) -> tuple[Codec, Mapped]:
        """The payload, verified, as memory that is only resident where it is looked at, and the codec that reads it.

        Where there is no room on the disk to unpack it, or nobody may write there, it is left as it is: the codec that
        is returned then unpacks it in memory.
        """
        self.check(reference, digest)
        path = self.folder / reference
        try:
            return opened(path, codec, numel)
        except OSError:
            with path.open("rb") as file:
                return codec, Mapped(file)

    def check(self, reference: str, digest: str) -> None:
        """The same without keeping the payload: a block at a time is in memory."""
        path = self.folder / reference
        try:
            with path.open("rb", buffering=0) as file:
                found = hasher(digest)
                for block in _blocks(file):
                    found.update(block)
        except FileNotFoundError:
            raise SpoolError(f"{path} is missing: the journal names it") from None
        except OSError as error:
            raise SpoolError(f"{path} cannot be read: {error.strerror}") from error
        if found.text() != digest:
            raise SpoolError(f"{path} is damaged: its digest is not the one that was acknowledged")

    def sweep(self, needed: Collection[str]) -> int:
        """Drop every whole update that is not ``needed``, and copies that ended half way; returns how many went."""
        wanted = set(needed)
        gone = 0
        for leftover in self.folder.glob("*/.*.tmp"):
            self._disk.remove(leftover, Step.SPOOL_DROP)
        for path in sorted(self.folder.glob("*/*.update")):
            reference = path.relative_to(self.folder).as_posix()
            if path.parent != self.partial and reference not in wanted:
                self._disk.remove(path, Step.SPOOL_DROP)
                gone += 1
        return gone


class PartialUpdate:
    """An update on its way in.  ``offset`` bytes are here; ``write`` appends, ``digest`` is over all of them."""

    def __init__(self, path: Path, payload_bytes: int, disk: Disk, like: str = "") -> None:
        """``like`` is the digest that was declared, and in whose form it is computed."""
        self.path = path
        self._disk = disk
        self._hash = hasher(like)
        self.offset = 0
        if path.exists() and path.stat().st_size <= payload_bytes:
            with path.open("rb", buffering=0) as held:
                for block in _blocks(held):
                    self._hash.update(block)
                    self.offset += len(block)
        self._file = disk.open(path, "r+b" if self.offset else "wb", Step.SPOOL_WRITE, buffering=0)
        self._file.seek(self.offset)

    def write(self, data: memoryview) -> None:
        """Append ``data``."""
        self._disk.write(self._file, data, Step.SPOOL_WRITE)
        self._hash.update(data)
        self.offset += len(data)

    def digest(self) -> str:
        """Over everything written."""
        return self._hash.text()

    def close(self) -> None:
        """Leave the bytes, if any came, for a later attempt."""
        self._file.close()
        if self.offset == 0:
            self._disk.remove(self.path, Step.SPOOL_DISCARD)

    def discard(self) -> None:
        """Throw the bytes away: they are not what was declared, or the disk has refused some of them."""
        with contextlib.suppress(OSError):  # Closing writes what is still in memory, and nobody wants that any more.
            self._file.close()
        self._disk.remove(self.path, Step.SPOOL_DISCARD)


def _blocks(file: RawIOBase) -> Iterator[memoryview]:
    """What is in ``file``, a block after the other in the same memory: new memory costs more than the reading."""
    room = memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(room):
        yield room[:count]
