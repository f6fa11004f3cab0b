"""What a site must find again after a crash: its sealed updates on disk, and how far it really got.

Outbox.  A sealed update is durable before its first byte is sent, so that a new process can send the same bytes.  Each
update is one file, ``<fragment>-<sequence>.update``: a line, then the payload.  The line is the CRC-32 of the rest of
it, eight hexadecimal digits, and the header's fields as JSON; the header holds the digest of the payload.

A file that is needed no more is kept for a while, under a name that is no update's, and the next update is written over
it.  If a power cut brings its old name back, its content is damaged or of another name, and either counts as being
gone.  The last updates that were put here are in memory as well until they are asked for (``fresh``), so that the first
sending reads no file.

Odometer.  ``Odometer`` says how far the site got, readable after a kill -9.  It is a memory-mapped file: to write it is
a store to memory, which the training thread may do, and the kernel keeps the page when the process dies.  A power cut
may lose the last seconds.  The ledger then counts fewer lost tokens than there were, which is why a checkpoint and the
syncer's figures take part as well.  The file holds two readings, each with a checksum, written in turn: one that is
damaged, or that a death cut short, is noticed, and the other is the step before it.  An earlier release kept one
reading, without a checksum.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import zlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from diloco.codec.base import digest_of
from diloco.durable import PLAIN_DISK, Step
from diloco.sync.plain import parse_json
from diloco.wire.messages import PushHeader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diloco.durable import Disk

FRESH_MAX = 4
"""Updates that are in memory as well, at most."""
SPARE_MAX = 4
"""Files of updates that are needed no more, at most; the next ones are written over them."""


class OutboxError(ValueError):
    """A file of the outbox is damaged; the text names it."""


class Outbox:
    """The folder of sealed updates of one site.

    Several ranks of the site may have it open, each for its own fragments: a file is named by its fragment, so that a
    new process finds it whatever rank it was.
    """

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK, *, settled: bool = False) -> None:
        """``settled``: another rank has cleared what earlier processes left."""
        self.folder = folder
        self._disk = disk
        self._fresh: dict[tuple[int, int], tuple[PushHeader, memoryview]] = {}
        self._fresh_lock = threading.Lock()
        self._spare: list[Path] = []
        self._reading = threading.Lock()  # Held while a file is read by its name, and while it loses that.
        if settled:
            return
        disk.settle(folder, Step.OUTBOX_FOLDER)
        for leftover in folder.glob(".*.tmp"):
            disk.remove(leftover, Step.OUTBOX_DROP)

    def _path(self, fragment: int, sequence: int) -> Path:
        return self.folder / _name(fragment, sequence)

    def put(self, header: PushHeader, payload: bytes | memoryview) -> Path:
        """Make an update durable, in place of an earlier one of the same number, and say where it lies.

        ``payload`` must not change.
        """
        fields = json.dumps(asdict(header), sort_keys=True).encode()
        line = b"%08x %b\n" % (zlib.crc32(fields), fields)
        key, view = (header.fragment, header.sequence), memoryview(payload)
        self._forget(key)
        spare = self._spare.pop() if self._spare else None
        self._disk.write_parts(self._path(*key), (line, view), Step.OUTBOX_PUT, over=spare)
        with self._fresh_lock:
            self._fresh[key] = (header, view)
            while len(self._fresh) > FRESH_MAX:
                del self._fresh[next(iter(self._fresh))]
        return self._path(*key)

    def _forget(self, key: tuple[int, int]) -> tuple[PushHeader, memoryview] | None:
        with self._fresh_lock:
            return self._fresh.pop(key, None)

    def fresh(self, fragment: int, sequence: int, incarnation: int) -> tuple[PushHeader, memoryview] | None:
        """The same as ``get``, from memory, for the first who asks for what was just put here; else None."""
        found = self._forget((fragment, sequence))
        return found and (replace(found[0], incarnation=incarnation), found[1])

    def get(self, fragment: int, sequence: int, incarnation: int) -> tuple[PushHeader, memoryview]:
        """The update, its header stamped with the ``incarnation`` that sends it now.

        ``OutboxError`` if damaged, ``FileNotFoundError`` if it was dropped.
        """
        path = self._path(fragment, sequence)
        with self._reading:
            header, payload = _read(path)
        if digest_of(payload, header.digest) != header.digest:
            raise OutboxError(f"{path} is damaged: its digest is not the one it was sealed with")
        return replace(header, incarnation=incarnation), payload

    def drop(self, fragment: int, sequence: int) -> None:
        """The update is needed no more."""
        self._forget((fragment, sequence))
        path = self._path(fragment, sequence)
        if len(self._spare) >= SPARE_MAX or not path.exists():
            self._disk.remove(path, Step.OUTBOX_DROP)
            return
        spare = path.with_name(f".{path.name}.tmp")
        with self._reading:
            self._disk.rename(path, spare, Step.OUTBOX_DROP)
        self._spare.append(spare)

    def digests(self) -> dict[tuple[int, int], str]:
        """The digest of every whole update here, by (fragment, sequence); what is damaged is left out."""
        found: dict[tuple[int, int], str] = {}
        for path in sorted(self.folder.glob("*.update")):
            try:
                header, payload = _read(path)
            except OutboxError:
                continue  # A machine that wanted it takes the progress back as unsent; nothing is lost by that.
            if digest_of(payload, header.digest) == header.digest:
                found[header.fragment, header.sequence] = header.digest
        return found

    def clear(self, keep: set[tuple[int, int]]) -> None:
        """Drop everything that is not in ``keep``."""
        with self._fresh_lock:
            self._fresh.clear()
        for path in self.folder.glob("*.update"):
            fragment, _, sequence = path.stem.partition("-")
            if (int(fragment), int(sequence)) not in keep:
                self._disk.remove(path, Step.OUTBOX_DROP)


def _name(fragment: int, sequence: int) -> str:
    return f"{fragment}-{sequence}.update"


def _read(path: Path) -> tuple[PushHeader, memoryview]:
    data = path.read_bytes()
    line, newline, _ = data.partition(b"\n")
    try:
        if not newline or line[:9] != b"%08x " % zlib.crc32(line[9:]):
            raise ValueError("its header is not what was written")
        fields = parse_json(line[9:])
        fields["spans"] = tuple((start, stop) for start, stop in fields.get("spans", ()))
        header = PushHeader(**fields)
        if path.name != _name(header.fragment, header.sequence):
            raise ValueError("it was written under another name")
        return header, memoryview(data)[len(line) + 1 :]
    except (ValueError, TypeError, AttributeError) as error:
        raise OutboxError(f"{path} is damaged: {error}") from error


FIELDS = struct.Struct("<QQ")
SLOT = struct.Struct("<QQI4x")
"""Step, tokens and the CRC-32 of both."""


class Odometer:
    """Steps and tokens of a site over all its processes.  ``note`` is told in words of a reading that is damaged."""

    def __init__(self, path: Path, disk: Disk = PLAIN_DISK, note: Callable[[str], None] = lambda why: None) -> None:
        self._disk, self._next = disk, 0
        disk.make_folder(path.parent, Step.ODOMETER)
        whole = path.exists()
        self._reading, damage = _read_slots(path.read_bytes()) if whole else ((0, 0), "")
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


def _read_slots(data: bytes) -> tuple[tuple[int, int], str]:
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
