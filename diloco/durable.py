"""Write files atomically: a crash leaves the old file or the new one, never a partial one.

``Step`` names every durable step of a process, and ``Disk`` carries them all out.  Each operation calls ``reached``
once before its step and once after it.  The plain disk does nothing there.  Other disks passed in its place find
missing fsyncs: ``KillingDisk`` kills the process, and the tests have one that records the operations and one that
fails them.
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
    """A durable step, named OBJECT.OPERATION.  Every one has a kill case in ``tests/hunts/crash.py``.

    ``ack``, ``fate``, ``merge`` and ``publish`` write nothing: they must not happen before the writes they rest on.
    """

    FILE = "file"
    """Any file that no acknowledgement depends on: addresses, reports, configuration, an image for an operator."""

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

    # A standby's data folder, in addition to the steps of a syncer.
    STANDBY_FILE = "standby.file"

    # The start of a lineage: ``diloco restore``, or an operator promotes a standby that may lack acknowledged data.
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
"""The lock file: a process that locks it holds the folder."""


class LockedError(OSError):
    """Another process holds the folder."""


class DiskFullError(OSError):
    """The disk had no room for a write; no part of the write is left, and the caller may retry it."""


def is_full(error: OSError) -> bool:
    """Return whether an operation failed because the disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def full_in_words() -> Iterator[None]:
    """Turn an OSError for a full disk or quota into ``DiskFullError``.

    Wrap a sync only where the caller discards everything written when the sync fails: a failed sync cannot be retried.
    Never wrap the code that discards: when that fails, the state of the disk is unknown.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFullError(error.errno, error.strerror) from error


def when_there_is_room(
    write: Callable[[], T], stopping: threading.Event, again_s: float, say: Callable[[OSError | None], None]
) -> T | None:
    """Retry ``write`` every ``again_s`` seconds while the disk is full and return its result; None once ``stopping``.

    Calls ``say`` once with the error when the wait begins, and with None when there is room again.
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
    """Carries out every durable step of a process.  A failed sync is final: the caller must stop, never retry."""

    def reached(self, step: Step) -> None:
        """An operation of ``step`` is about to begin, or has just ended."""

    @contextlib.contextmanager
    def passing(self, step: Step) -> Iterator[None]:
        """Call ``reached`` before an operation of ``step``, and after it unless it fails."""
        self.reached(step)
        yield
        self.reached(step)

    def open(self, path: Path, mode: str, step: Step, buffering: int = -1) -> BinaryIO:
        """Open ``path`` for writing; its name is durable after ``sync_folder`` only."""
        with self.passing(step):
            return path.open(mode, buffering)  # type: ignore[return-value]

    def write(self, file: BinaryIO, data: bytes | memoryview, step: Step) -> None:
        """Write ``data``; durable after ``sync``."""
        with self.passing(step):
            _write(file, data)

    def make(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        """Call ``write`` to create the file ``path``; durable after ``sync_file``."""
        with self.passing(step):
            write(path)

    def cut(self, path: Path, size: int, step: Step) -> None:
        """Truncate ``path`` to ``size`` bytes."""
        with self.passing(step):
            os.truncate(path, size)

    def sync(self, file: BinaryIO, step: Step) -> None:
        """Make everything written to ``file`` durable."""
        with self.passing(step):
            file.flush()
            os.fdatasync(file.fileno())

    def sync_file(self, path: Path, step: Step) -> None:
        """Make the content of ``path`` durable."""
        with self.passing(step):
            _sync(path, os.O_RDWR if WINDOWS else os.O_RDONLY)  # Windows flushes only files open for writing.

    def sync_folder(self, folder: Path, step: Step) -> None:
        """Make the names inside ``folder`` durable: a new or renamed file is durable only once its folder is synced."""
        with self.passing(step):
            if not WINDOWS:  # Windows cannot open a folder; its file systems keep names durable by themselves.
                _sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def make_folder(self, path: Path, step: Step) -> None:
        """Create the folder ``path`` and its parents where they are missing."""
        with self.passing(step):
            path.mkdir(parents=True, exist_ok=True)

    def settle(self, folder: Path, step: Step) -> None:
        """Create ``folder`` durably: sync its name and all its parents; a dead process may have just made them."""
        self.make_folder(folder, step)
        for above in folder.absolute().parents:
            try:
                self.sync_folder(above, step)
            except PermissionError:
                return  # Another user's folder: it existed before this process made anything in it.

    def rename(self, path: Path, target: Path, step: Step) -> None:
        """Rename ``path`` to ``target``, replacing the file there."""
        with self.passing(step):
            path.replace(target)

    def remove(self, path: Path, step: Step) -> None:
        """Remove a file, or a folder with everything in it; do nothing where there is none."""
        with self.passing(step):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def sweep(self, folder: Path, step: Step) -> None:
        """Remove the partial files that a dead process left in ``folder``, which this process holds now."""
        for leftover in folder.glob(".*.tmp"):
            self.remove(leftover, step)

    def keep(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        """Replace ``path`` atomically: ``write`` a temporary file beside it, sync that, rename it, sync the folder."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.make(beside, write, step)
            self.sync_file(beside, step)
            self.rename(beside, path, step)
        except BaseException:
            beside.unlink(missing_ok=True)  # So that retries on a full disk do not fill it further.
            raise
        self.sync_folder(path.parent, step)

    def write_file(self, path: Path, data: bytes | memoryview, step: Step) -> None:
        """Replace ``path`` by ``data``, as ``keep`` does."""
        self.keep(path, lambda beside: beside.write_bytes(data), step)

    def write_parts(
        self, path: Path, parts: Iterable[bytes | memoryview], step: Step, over: Path | None = None
    ) -> None:
        """Replace ``path`` by ``parts``, one after the other, so that a large file is never whole in memory.

        Overwrites the unneeded file ``over`` where it exists: allocating new blocks and freeing the old ones takes
        longer than the write.
        """

        def write(beside: Path) -> None:
            if over is not None:
                with contextlib.suppress(FileNotFoundError):
                    over.replace(beside)
            with beside.open("r+b" if beside.exists() else "wb", buffering=0) as file:
                for part in parts:
                    _write(file, part)
                file.truncate()

        self.keep(path, write, step)


PLAIN_DISK = Disk()


class ReadingDisk(Disk):
    """Changes nothing: for a reader of a folder that another process may hold.

    Creating a folder does nothing; all else is an error in the program.
    """

    def make_folder(self, path: Path, step: Step) -> None:
        """Do nothing: the writer creates it."""

    def reached(self, step: Step) -> None:
        """Raise AssertionError: every operation that gets here writes."""
        raise AssertionError(f"{step.value} on a disk that is only read")


class KillingDisk(Disk):
    """Kills the process with SIGKILL when it reaches ``step`` for the ``passage``-th time.  For tests only.

    Every operation counts twice: an odd passage is before it, an even one after it.
    """

    def __init__(self, step: Step, passage: int) -> None:
        self._step = step
        self._left = passage
        self._lock = threading.Lock()

    def reached(self, step: Step) -> None:
        """Count down, and kill the process at zero."""
        if step is not self._step:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def write_file(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace a file that no acknowledgement depends on, atomically and never with more permissions than ``mode``."""

    def write(beside: Path) -> None:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)

    PLAIN_DISK.keep(path, write, Step.FILE)


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:  # An unbuffered file writes only what fits, at most 2 GiB, and raises the error at the next call.
        left = left[file.write(left) :]


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path) -> None:
    """Create ``folder`` in a shared place (/dev/shm); PermissionError unless only this user can access it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    told = folder.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.getuid() or stat.S_IMODE(told.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "not a folder that is this user's alone", str(folder))


def lock(file: IO[str] | int) -> None:
    """Lock ``file``, an open file or a descriptor, for this process until it closes the file or ends.

    Raises ``BlockingIOError`` while another process holds the lock.
    """
    import fcntl  # Imported here because Windows lacks it, and every module must import there.

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; raise ``LockedError`` at once when another process holds it.

    The kernel drops the lock when the process ends, so that a crash leaves no stale lock.  The folder's mode becomes
    0700, also where it was wider before.
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
