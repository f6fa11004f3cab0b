"""The folder of a site's checkpoints in its machines' memory (``inner.memory``), and its removal.

It is DIR/diloco-RUN-SITE-FOLDER-ID, where DIR is site.memory_folder.  FOLDER is a digest of the site's own folder, to
tell apart runs of the same name in other folders.  ID is stored with the checkpoints on disk: a user who deletes those
to start over does not resume from newer ones in memory.  A new ID is made once no machine has the folder any more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config.errors import ConfigError, ExitCode, VerbError, require
from diloco.config.run_dir import run_dir_of
from diloco.durable import private_folder, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.config.schema import RunConfig
    from diloco.inner.parallel import SiteGroup

IN_MEMORY = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/self/mountinfo")
ID = ".memory"
REFUSED = (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.MISMATCH)
"""Exit codes of a start that the user must fix; from a site of several ranks a ConfigError arrives as the first."""


def check_memory_folder(config: RunConfig) -> None:
    """Raise ConfigError where memory checkpoints are on and ``site.memory_folder`` is no writable folder in memory."""
    if not config.inner.memory_checkpoint_every_steps:
        return
    folder = Path(config.site.memory_folder)
    setting = ("site.memory_folder", config.site.memory_folder)
    require(folder.is_dir(), *setting, "no such folder")
    device, kind = folder.stat().st_dev, ""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        lines = [line.split() for line in MOUNTS.read_text().splitlines()]
        kind = next((words[words.index("-") + 1] for words in lines if words[2] == number), "")
    if kind not in IN_MEMORY:
        raise ConfigError(
            f"site.memory_folder is {config.site.memory_folder!r}, on {kind or 'an unknown file system'}: a "
            "folder in memory (tmpfs), or inner.memory_checkpoint_every_steps=0"
        )
    require(os.access(folder, os.W_OK | os.X_OK), *setting, "this user cannot create folders in it")


def memory_folder(config: RunConfig, group: SiteGroup, start: int) -> Path | None:
    """Create this machine's folder, private to this user; None where memory checkpoints are off.  A collective.

    Folders that the same site left in memory under another id are removed.  ``start`` is the number of restarts of the
    ranks.
    """
    if not config.inner.memory_checkpoint_every_steps:
        return None
    known = start > 0 or config.run.resume != "never"
    told = f"{_prefix(config)} {_id(config, known=known)}" if group.is_first else ""
    prefix, number = group.all_gather_bytes(told.encode())[0].decode().split(" ")
    folder, why = Path(config.site.memory_folder) / f"{prefix}{number}", ""
    if not any(group.all_gather_bytes(b"there" if folder.is_dir() else b"")):
        # The site resumes from its disk.  A machine with newer checkpoints of an earlier process may return later.
        number = group.all_gather_bytes((_id(config, known=False) if group.is_first else "").encode())[0].decode()
        folder = folder.with_name(f"{prefix}{number}")
    try:
        check_memory_folder(config)
        if group.local_rank == 0:
            _remove(config, f"{prefix}*", but=folder)
        private_folder(folder)
    except (ConfigError, OSError) as error:
        why = str(error) if isinstance(error, ConfigError) else f"site.memory_folder: {error}"
    # An error on one machine ends all ranks: otherwise the others would wait for its ranks.
    if whys := [each.decode() for each in group.all_gather_bytes(why.encode() or b" ") if each.strip()]:
        raise ConfigError(whys[0])
    return folder


@contextmanager
def memory_cleared(config: RunConfig) -> Iterator[None]:
    """Remove this machine's memory checkpoints of the site at the end of the context, in which its processes run.

    A refused start keeps them: once its cause is fixed, the site resumes from the files of its earlier process.
    """
    refused = False
    try:
        yield
    except (VerbError, ConfigError) as error:
        refused = error.code in REFUSED
        raise
    finally:
        if not refused:
            clear_memory(config)


def clear_memory(config: RunConfig) -> None:
    """Remove the memory checkpoints that a stopped site has left on this machine."""
    if not config.inner.memory_checkpoint_every_steps:
        return
    _remove(config, f"{_prefix(config)}*")
    try:
        number = (run_dir_of(config).site(config.site.id).checkpoints / ID).read_text().strip()
    except OSError:
        return  # No rank got far enough to create a folder in memory.
    # FOLDER is made from the path on the first machine; the path may differ on this one.
    _remove(config, f"diloco-{config.run.name}-{config.site.id}-*-{number}")


def _remove(config: RunConfig, pattern: str, but: Path | None = None) -> None:
    for left in Path(config.site.memory_folder).glob(pattern):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def _prefix(config: RunConfig) -> str:
    site = run_dir_of(config).site(config.site.id).root.absolute()
    return f"diloco-{config.run.name}-{config.site.id}-{hashlib.sha256(str(site).encode()).hexdigest()[:8]}-"


def _id(config: RunConfig, *, known: bool) -> str:
    """Return the ID stored with the site's checkpoints on disk; a new ID, stored there, if none is or not ``known``."""
    file = run_dir_of(config).site(config.site.id).checkpoints / ID
    if known and file.exists():
        return file.read_text().strip()
    file.parent.mkdir(parents=True, exist_ok=True)
    number = secrets.token_hex(4)
    write_file(file, number.encode())
    return number
