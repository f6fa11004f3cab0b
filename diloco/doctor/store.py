"""`diloco doctor`'s checks of the folder in which a site or a syncer keeps its durable data.

The checks leave nothing behind.  Where the folder does not exist yet, they use its nearest existing ancestor, in which
it will be created.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from diloco.doctor.findings import Finding, fail, ok, warn

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig

MIB = 1 << 20
FREE_MIN_BYTES = 64 * MIB
"""With less free space than this, a run of any model fails."""
SYNCS = 9
RECORD_BYTES = 4096
BULK_BYTES = 16 * MIB
BULK_S = 5.0
SLOW_SYNC_S = 0.05
SNAPSHOTS = 3
"""Two kept snapshots, and the one being written."""


@dataclass(frozen=True, slots=True)
class Store:
    """A ``folder``, its owner, and about how many bytes a run writes into it."""

    owner: str
    folder: Path
    needed_bytes: int


def stores(config: RunConfig) -> list[Store]:
    """Return this machine's folders: the syncer's if it exists; the site's if it exists or the syncer's does not."""
    from diloco.config import build
    from diloco.config.placing import syncer_dir
    from diloco.config.run_dir import run_dir_of

    if config.run.name is None:
        return [Store("runs", Path(config.run.dir), 0)]
    run = run_dir_of(config)
    syncer = Path(config.cluster.syncer.folder or syncer_dir(config).syncer)
    found = []
    if syncer.is_dir():
        found.append(Store("syncer", syncer, _of_syncer(config, build.layout_of(config).numel)))
    site = run.site(config.site.id)
    if site.root.is_dir() or not found:
        found.append(Store(f"site {config.site.id}", site.root, _of_site(config, build.whole_layout(config).numel)))
    return found


def _of_site(config: RunConfig, numel: int) -> int:
    """Estimate the bytes: checkpoints (values, two moments, base and updates in flight) and the outbox (payloads
    without an answer yet)."""
    from diloco.codec.registry import make_codec

    in_flight = config.outer.updates_in_flight_max
    one = numel * (4 + 8 + 4 + 4 * in_flight)
    payloads = in_flight * make_codec(config.codec.up).payload_bytes_max(numel)
    return (config.inner.checkpoints_kept + 1) * one + payloads


def _of_syncer(config: RunConfig, numel: int) -> int:
    """Estimate the bytes: snapshots (values, momentum and published values), down-links, and arriving updates."""
    from diloco.codec.registry import make_codec

    up, down = (make_codec(name).payload_bytes_max(numel) for name in (config.codec.up, config.codec.down))
    syncer, sites = config.cluster.syncer, max(1, len(config.cluster.sites))
    updates = (syncer.snapshot_every + config.outer.updates_in_flight_max) * sites * up
    return SNAPSHOTS * 12 * numel + syncer.downlinks_kept * down + updates


def store(of: Store) -> list[Finding]:
    """Check that the folder is writable, its free space, and how long a durable write takes."""
    folder = of.folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    where = f"{of.owner}: {of.folder}"
    try:
        syncs_s, bulk = _written(folder)
    except OSError as error:
        return [fail("store", f"{where} cannot be written: {error.strerror or error}", _remedy(error, folder, of))]
    free = shutil.disk_usage(folder).free
    sync_s = median(syncs_s)
    told = f"{where} {_gb(free)} free, fsync {sync_s * 1e3:.3g} ms, writes {bulk / 1e6:,.0f} MB/s"
    figures = {"free_bytes": free, "fsync_s": sync_s, "write_bytes_per_s": bulk, "needed_bytes": of.needed_bytes}
    if free < FREE_MIN_BYTES:
        return [fail("store", told, _remedy(OSError(errno.ENOSPC, ""), folder, of), **figures)]
    if free < of.needed_bytes:
        wanted = f"a run of this configuration comes to about {_gb(of.needed_bytes)}"
        return [warn("store", f"{told}; {wanted}", _remedy(OSError(errno.ENOSPC, ""), folder, of), **figures)]
    if sync_s > SLOW_SYNC_S:
        remedy = "keep the folder on a local disk: every acknowledged update waits for one"
        return [warn("store", told, remedy, **figures)]
    return [ok("store", told, **figures)]


def _written(folder: Path) -> tuple[list[float], float]:
    """Return the seconds of each small durable write and the bytes/s of a large one, using a temporary file."""
    handle, name = tempfile.mkstemp(prefix=".diloco-doctor-", dir=folder)
    try:
        syncs_s = []
        for _ in range(SYNCS):
            began = time.perf_counter()
            _write(handle, bytes(RECORD_BYTES))
            os.fsync(handle)
            syncs_s.append(time.perf_counter() - began)
        began, block, written = time.perf_counter(), bytes(MIB), 0
        while written < BULK_BYTES and time.perf_counter() - began < BULK_S:
            _write(handle, block)
            written += len(block)
        os.fsync(handle)
        return syncs_s, written / (time.perf_counter() - began)
    finally:
        os.close(handle)
        with suppress(FileNotFoundError):
            os.unlink(name)


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _remedy(error: OSError, folder: Path, of: Store) -> str:
    setting = "cluster.syncer.folder" if of.owner == "syncer" else "run.dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"make room on the disk of {folder}, or set {setting} to another one"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"let user {os.geteuid()} write {folder}, or set {setting} to another folder"
    return f"set {setting} to a folder that can be written"


def _gb(count: int) -> str:
    return f"{count / 1e9:,.3g} GB"
