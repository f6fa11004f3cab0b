"""Whether all ranks of a site, wherever they run, see one folder: what one of them writes there the others read."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from typing import TYPE_CHECKING

from diloco.durable import write_file
from diloco.launch.errors import ConfigError

if TYPE_CHECKING:
    from diloco.inner.parallel import SiteGroup
    from diloco.launch.run_dir import SiteDir
    from diloco.launch.schema import RunConfig

SEEN_S = 30.0
"""How long a shared folder may take to show what another machine has written."""


def check_one_folder(config: RunConfig, folder: SiteDir, group: SiteGroup, within_s: float = SEEN_S) -> None:
    """ConfigError, on all ranks alike, names one that does not see in the site's folder what rank 0 writes there.

    Each rank keeps its part of a checkpoint there, and its outbox, and after a restart reads what others have kept.
    """
    if group.world == 1:
        return
    token = secrets.randbits(62)
    path = folder.root / f".seen-{token:x}"
    if group.is_first:
        write_file(path, b"")
    (told,) = group.broadcast_small([token])
    path, until = folder.root / f".seen-{told:x}", time.monotonic() + within_s
    while not (seen := path.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    blind = group.all_gather_bytes(b"" if seen else f"rank {group.rank}, on {socket.gethostname()},".encode())
    if group.is_first:
        with contextlib.suppress(OSError):
            path.unlink()
    if any(blind):
        who = next(each for each in blind if each).decode()
        raise ConfigError(
            f"run.dir is {config.run.dir!r}: {who} does not see there what rank 0 writes; the machines of a "
            "site share one folder"
        )
