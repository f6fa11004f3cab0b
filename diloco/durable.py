"""Files that a crash leaves either old or new, never half written.  Used by every floor that keeps something.

``Step`` names every durable step of a process and ``Disk`` does them all: each operation reaches its step once before
and once after.  The plain disk does nothing there.  Others that are handed down in its place find what is not durable
enough: one that ends the process (``KillingDisk``), and in the tests one that writes down what it was asked to do and
one that fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import sys
import threading
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import IO, BinaryIO


T = TypeVar("T")


class Step(StrEnum):
    """A durable step: what is kept, a dot, what is done to it.  Every one has a kill case in ``tests/hunts/crash.py``.

    ``ack``, ``fate``, ``merge`` and ``publish`` write nothing: they are what must not run ahead of the disk.
    """

    FILE = "file"
    """Any file that nothing acknowledged rests on: addresses, reports, configuration, an image for an operator."""

    # The syncer's data folder.
    CARD = "syncer.card"
    FOLDER = "syncer.folder"
    SPOOL_WRITE = "spool.write"
    SPOOL_SITE = "spool.site"
    SPOOL_SYNC = "spool.sync"
    SPOOL_RENAME = "spool.rename"
    SPOOL_FOLDER = "spool.folder"
    SPOOL_BACK = "spool.back"
    SPOOL_DROP = "spool.drop"
    SPOOL_DISCARD = "spool.discard"
    JOURNAL_BEGIN = "journal.begin"
    JOURNAL_WRITE = "journal.write"
    JOURNAL_SYNC = "journal.sync"
    JOURNAL_MARK = "journal.mark"
    JOURNAL_END = "journal.end"
    JOURNAL_CUT = "journal.cut"
    JOURNAL_PRUNE = "journal.prune"
    SNAPSHOT_BEGIN = "snapshot.begin"
    SNAPSHOT_FILE = "snapshot.file"
    SNAPSHOT_RENAME = "snapshot.rename"
    SNAPSHOT_FOLDER = "snapshot.folder"
    SNAPSHOT_PRUNE = "snapshot.prune"
    SNAPSHOT_ASIDE = "snapshot.aside"
    MERGE = "syncer.merge"
    ACK = "syncer.ack"
    FATE = "syncer.fate"
    PUBLISH = "syncer.publish"
    EXPORT = "syncer.export"
    LEASE_WRITE = "lease.write"
    LEASE_REMEMBER = "lease.remember"
    BACKUP_FILE = "backup.file"
    BACKUP_WHOLE = "backup.whole"
    BACKUP_DROP = "backup.drop"

    # A standby's data folder, beside those of a syncer.
    STANDBY_FILE = "standby.file"

    # What begins a lineage: ``diloco restore``, or a standby that an operator promotes though it may lack something.
    LINEAGE_FOLDER = "lineage.folder"
    LINEAGE_IMAGE = "lineage.image"
    LINEAGE_CARD = "lineage.card"
    LINEAGE_PRUNE = "lineage.prune"
    RESTORE_BEGIN = "restore.begin"
    RESTORE_FETCH = "restore.fetch"
    RESTORE_MOVE = "restore.move"
    RESTORE_END = "restore.end"

    # A site's folder.
    OUTBOX_FOLDER = "outbox.folder"
    OUTBOX_PUT = "outbox.put"
    OUTBOX_DROP = "outbox.drop"
    ODOMETER = "learner.odometer"
    CHECKPOINT_BEGIN = "checkpoint.begin"
    CHECKPOINT_FILE = "checkpoint.file"
    CHECKPOINT_RENAME = "checkpoint.rename"
    CHECKPOINT_FOLDER = "checkpoint.folder"
    CHECKPOINT_PRUNE = "checkpoint.prune"


WINDOWS = sys.platform == "win32"
LOCK = "lock"
"""The file in a folder by which a process holds it."""


class LockedError(OSError):
    """Another process holds the folder."""


class DiskFullError(OSError):
    """There was no room for a write; nothing of it is left, and it may be tried again."""


def is_full(error: OSError) -> bool:
    """Whether an operation failed for want of room, on the disk or in a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def when_there_is_room(
    write: Callable[[], T], stopping: threading.Event, again_s: float, say: Callable[[OSError | None], None]
) -> T | None:
    """What ``write`` gives once it finds room on the disk, tried every ``again_s`` seconds; None once ``stopping``.

    ``say`` hears once what it waits for, and None when there is room again.
    """
    waits = False
    while True:
        try:
            found = write()
        except OSError as error:
            if not is_full(error):
                raise
            if not waits:
                say(error)
            waits = True
            if stopping.wait(again_s):
                return None
            continue
        if waits:
            say(None)
        return found


class Disk:
    """Does every durable step of a process.  A failed sync is final: the caller must stop, never try again."""

    def reached(self, step: Step) -> None:
        """An operation of ``step`` is about to begin, or has just ended."""

    def open(self, path: Path, mode: str, step: Step, buffering: int = -1) -> BinaryIO:
        """Open ``path`` for writing; its name is durable after ``sync_folder`` only."""
        self.reached(step)
        file: BinaryIO = path.open(mode, buffering)  # type: ignore[assignment]
        self.reached(step)
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        """Write ``data``; durable after ``sync``."""
        self.reached(step)
        left = memoryview(data)
        while left:  # A file without a buffer takes what fits, and says so only at the next attempt.
            left = left[file.write(left) :]
        self.reached(step)

    def make(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        """Have ``write`` make the file ``path``; durable after ``sync_file``."""
        self.reached(step)
        write(path)
        self.reached(step)

    def cut(self, path: Path, size: int, step: Step) -> None:
        """Cut ``path`` off at ``size`` bytes."""
        self.reached(step)
        os.truncate(path, size)
        self.reached(step)

    def sync(self, file: BinaryIO, step: Step) -> None:
        """Make everything written to ``file`` durable."""
        self.reached(step)
        file.flush()
        os.fdatasync(file.fileno())
        self.reached(step)

    def sync_file(self, path: Path, step: Step) -> None:
        """Make the content of ``path`` durable."""
        self.reached(step)
        _sync(path, os.O_RDWR if WINDOWS else os.O_RDONLY)  # Windows flushes what is open for writing alone.
        self.reached(step)

    def sync_folder(self, folder: Path, step: Step) -> None:
        """Make the names inside ``folder`` durable: a created or renamed file is not, until its folder is."""
        self.reached(step)
        if not WINDOWS:  # It opens no folder; its file systems keep names by themselves.
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.reached(step)

    def make_folder(self, path: Path, step: Step) -> None:
        """Make the folder ``path`` and those above it, unless it is there."""
        self.reached(step)
        path.mkdir(parents=True, exist_ok=True)
        self.reached(step)

    def settle(self, folder: Path, step: Step) -> None:
        """Make ``folder``, durably: its name and those of all above it, which an earlier process may have just made."""
        self.make_folder(folder, step)
        for above in folder.absolute().parents:
            try:
                self.sync_folder(above, step)
            except PermissionError:
                return  # Another's, and older than anything that is ours in it.

    def rename(self, path: Path, target: Path, step: Step) -> None:
        """Rename ``path``, in place of ``target`` if that is a file that exists."""
        self.reached(step)
        path.replace(target)
        self.reached(step)

    def remove(self, path: Path, step: Step) -> None:
        """Remove a file, or a folder with everything in it; nothing happens where there is none."""
        self.reached(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        self.reached(step)

    def keep(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        """Replace ``path`` by what ``write`` makes: beside it, made durable, renamed, the name made durable."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.make(beside, write, step)
            self.sync_file(beside, step)
            self.rename(beside, path, step)
        except BaseException:
            beside.unlink(missing_ok=True)  # A full disk does not get fuller with every attempt.
            raise
        self.sync_folder(path.parent, step)

    def write_file(self, path: Path, data: bytes | memoryview, step: Step) -> None:
        """Replace ``path`` by ``data``, in the same way."""
        self.keep(path, lambda beside: beside.write_bytes(data), step)

    def write_parts(
        self, path: Path, parts: Iterable[bytes | memoryview], step: Step, over: Path | None = None
    ) -> None:
        """The same with ``parts``, one behind the other: a large file is never whole in memory.

        The file ``over``, which nobody needs, is written over where it is there: to ask the system for new room, and to
        hand the old back, takes longer than to write.
        """

        def write(beside: Path) -> None:
            if over is not None:
                with contextlib.suppress(FileNotFoundError):
                    over.replace(beside)
            _write_all(beside, parts)

        self.keep(path, write, step)


PLAIN_DISK = Disk()


class ReadingDisk(Disk):
    """Changes nothing: for whoever looks into a folder that may be another process's.

    What a reader would make or tidy up is left as it is; to write is a mistake in the program.
    """

    def make_folder(self, path: Path, step: Step) -> None:
        """Leave it to who writes there."""

    def remove(self, path: Path, step: Step) -> None:
        """Leave it where it is."""

    def cut(self, path: Path, size: int, step: Step) -> None:
        """Leave it as long as it is: its writer may be about to write the rest."""

    def sync_folder(self, folder: Path, step: Step) -> None:
        """Nothing was changed."""

    def reached(self, step: Step) -> None:
        """Every other operation writes."""
        raise AssertionError(f"{step.value} on a disk that is only read")


class KillingDisk(Disk):
    """Ends the process by SIGKILL when it reaches ``step`` for the ``passage``-th time.  For tests only.

    Every operation counts twice, before and after it: an odd passage is before, an even one after.
    """

    def __init__(self, step: Step, passage: int) -> None:
        self._step = step
        self._left = passage
        self._lock = threading.Lock()

    def reached(self, step: Step) -> None:
        """Count down, and kill at the end."""
        if step is not self._step:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def armed_disk(text: str) -> Disk:
    """The disk that ``text`` asks for: ``"journal.sync:7"`` kills at that passage, ``""`` is the plain one."""
    if not text:
        return PLAIN_DISK
    name, _, passage = text.partition(":")
    if name not in set(Step) or not passage.isascii() or not passage.isdigit() or int(passage) < 1:
        raise ValueError(f"{text!r} is no place to be killed at: a step and a passage, like journal.sync:7")
    return KillingDisk(Step(name), int(passage))


def write_file(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace a file that nothing acknowledged rests on, whole; never for an instant with more rights than ``mode``."""

    def write(beside: Path) -> None:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)

    PLAIN_DISK.keep(path, write, Step.FILE)


def _write_all(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            while left:  # A file without a buffer takes what fits, and one call takes no more than 2 GiB.
                left = left[file.write(left) :]
        file.truncate()


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path) -> None:
    """Make ``folder`` in a place where others make theirs (/dev/shm); PermissionError unless it is ours alone."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    told = folder.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.getuid() or stat.S_IMODE(told.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "not a folder that is this user's alone", str(folder))


def lock(file: IO[str] | int) -> None:
    """Lock ``file``, or the one of that descriptor, for this process until it closes the file or ends.

    ``BlockingIOError`` while another process has it.
    """
    import fcntl  # Here, because Windows lacks it and its users may import every module.

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; ``LockedError`` at once when another process has it.

    The lock is the kernel's and ends with the process, so that nothing is left behind by a crash.  What lies in the
    folder is its owner's alone (0700), also where it was not before.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    with (folder / LOCK).open("a+") as file:
        try:
            lock(file)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(f"{folder} is in use by process {holder}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
