"""Where a site keeps checkpoints in its machines' memory (``inner.memory``), and that nothing is left there.

It is DIR/diloco-RUN-SITE-FOLDER-ID, where DIR is site.memory_folder.  FOLDER is a digest of the site's own folder, so
that runs of one name elsewhere are not meant.  ID lies with the checkpoints on the disk: who removes those, to begin
anew, does not go on from what was newer than them.  It is another one where no machine has the folder any more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.durable import private_folder, write_file
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.run_dir import run_dir_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.inner.parallel import SiteGroup
    from diloco.launch.schema import RunConfig

IN_MEMORY = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/self/mountinfo")
ID = ".memory"
REFUSED = (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.MISMATCH)
"""How a start ends that is somebody's to mend; from a site of several ranks a ConfigError comes as the first."""


def check_memory_folder(config: RunConfig, mounts: Path | None = None) -> None:
    """ConfigError where checkpoints in memory are asked for and ``site.memory_folder`` is no folder in memory."""
    if not config.inner.memory_checkpoint_every_steps:
        return
    folder = Path(config.site.memory_folder)
    if not folder.is_dir():
        raise ConfigError(f"site.memory_folder is {config.site.memory_folder!r}: no such folder")
    kind = _file_system(folder, mounts or MOUNTS)
    if kind not in IN_MEMORY:
        raise ConfigError(
            f"site.memory_folder is {config.site.memory_folder!r}, on {kind or 'a file system that nobody knows'}: a "
            "folder in memory (tmpfs), or inner.memory_checkpoint_every_steps=0"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"site.memory_folder is {config.site.memory_folder!r}: this user may make no folder in it")


def _file_system(folder: Path, mounts: Path) -> str:
    """The kind of file system that ``folder`` lies on; empty where the system does not tell."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    return next((words[words.index("-") + 1] for words in lines if words[2] == number), "")


def memory_folder(config: RunConfig, group: SiteGroup, start: int) -> Path | None:
    """This machine's, made and of this user alone; None where there are to be no checkpoints in memory.  A collective.

    What the same site has left in memory under another id is removed.  ``start`` is how often the ranks were started
    again.
    """
    if not config.inner.memory_checkpoint_every_steps:
        return None
    told = f"{_prefix(config)} {_id(config, start)}" if group.is_first else ""
    prefix, number = group.all_gather_bytes(told.encode())[0].decode().split(" ")
    folder, why = Path(config.site.memory_folder) / f"{prefix}{number}", ""
    if not any(group.all_gather_bytes(b"there" if folder.is_dir() else b"")):
        # The site goes on from its disk.  A machine that has more, of a life before that, may come back later.
        number = group.all_gather_bytes((_new_id(config) if group.is_first else "").encode())[0].decode()
        folder = folder.with_name(f"{prefix}{number}")
    try:
        check_memory_folder(config)
        if group.local_rank == 0:
            _remove(config, f"{prefix}*", but=folder)
        private_folder(folder)
    except (ConfigError, OSError) as error:
        why = str(error) if isinstance(error, ConfigError) else f"site.memory_folder: {error}"
    # One machine's fault is all ranks' end: the others would wait for its ranks.
    if whys := [each.decode() for each in group.all_gather_bytes(why.encode() or b" ") if each.strip()]:
        raise ConfigError(whys[0])
    return folder


@contextmanager
def memory_cleared(config: RunConfig) -> Iterator[None]:
    """Inside, the site's processes run; after that nothing of theirs is left in this machine's memory.

    But where a start was refused: it goes on from what a life before it has left, when its reason is mended.
    """
    refused = False
    try:
        yield
    except ConfigError:
        refused = True
        raise
    except VerbError as error:
        refused = error.code in REFUSED
        raise
    finally:
        if not refused:
            clear_memory(config)


def clear_memory(config: RunConfig) -> None:
    """Remove what a site that runs no more has left in this machine's memory."""
    if not config.inner.memory_checkpoint_every_steps:
        return
    _remove(config, f"{_prefix(config)}*")
    try:
        number = (run_dir_of(config).site(config.site.id).checkpoints / ID).read_text().strip()
    except OSError:
        return  # No rank has come so far that it made a folder in memory.
    # FOLDER is as the first machine sees it; another one may have it elsewhere.
    _remove(config, f"diloco-{config.run.name}-{config.site.id}-*-{number}")


def _remove(config: RunConfig, pattern: str, but: Path | None = None) -> None:
    for left in Path(config.site.memory_folder).glob(pattern):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def _prefix(config: RunConfig) -> str:
    site = run_dir_of(config).site(config.site.id).root.absolute()
    return f"diloco-{config.run.name}-{config.site.id}-{hashlib.sha256(str(site).encode()).hexdigest()[:8]}-"


def _id(config: RunConfig, start: int) -> str:
    """What the site's checkpoints on the disk are called; another name for a life that is to begin anew."""
    file = run_dir_of(config).site(config.site.id).checkpoints / ID
    if file.exists() and (start or config.run.resume != "never"):
        return file.read_text().strip()
    return _new_id(config)


def _new_id(config: RunConfig) -> str:
    file = run_dir_of(config).site(config.site.id).checkpoints / ID
    file.parent.mkdir(parents=True, exist_ok=True)
    number = secrets.token_hex(4)
    write_file(file, number.encode())
    return number
