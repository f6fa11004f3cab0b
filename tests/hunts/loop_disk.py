"""A separate file system whose power can be cut: ext4 on a loop device, shut down without flushing its journal."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)."""
NO_LOG_FLUSH = 2
BOUND_S = 60.0


class NotPermittedError(OSError):
    """This machine does not permit it; the text says what is missing."""


class LoopDisk:
    """An ext4 file system, mounted at ``folder`` inside ``with``."""

    def __init__(self, place: Path, megabytes: int = 96) -> None:
        self.folder = place / "disk"
        self._image = place / "disk.img"
        self._is_mounted = False
        missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
        if missing or os.geteuid() != 0 or not Path("/dev/loop-control").exists():
            why = f"{', '.join(missing)} missing" if missing else "root and /dev/loop-control are needed"
            raise NotPermittedError(f"no loop file system here: {why}")
        self.folder.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-F", str(self._image))

    def __enter__(self) -> LoopDisk:
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._unmount()
        self._image.unlink()

    def cut(self) -> None:
        """Cut the power: from now on nothing reaches the disk, and every operation fails."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def back(self) -> None:
        """Restore the power; no process may have a file open.  The file system recovers from its own journal."""
        self._unmount()
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        self._is_mounted = True

    def _unmount(self) -> None:
        until = time.monotonic() + BOUND_S
        while self._is_mounted:
            try:
                _run("umount", str(self.folder))
                self._is_mounted = False
            except NotPermittedError:  # Busy for a moment: a killed process keeps its files open until it is gone.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    if ended.returncode != 0:
        raise NotPermittedError(f"{' '.join(command)}: {ended.stderr.strip()}")
