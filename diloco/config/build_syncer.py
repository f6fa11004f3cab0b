"""Build the options of a syncer or its standby from the configuration.  A site does not load this module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config import build
from diloco.config.build import agreement, health_options, held_of, outer_options, rule, up_codecs
from diloco.config.compose import is_name, shared_digest
from diloco.config.errors import A_NAME, ConfigError, options_of, require, section
from diloco.config.placing import backup_of, has_several, syncer_name
from diloco.config.run_dir import RunDir
from diloco.durable import PLAIN_DISK
from diloco.syncer.backups import BackupOptions, Vault
from diloco.syncer.lease import EtcdAccess, EtcdLease, FileLease
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.replicator import ReplicationOptions
from diloco.wire.channel import split_addresses

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig
    from diloco.durable import Disk
    from diloco.outer.fragments import Layout
    from diloco.syncer.lease import Lease


def syncer_options(config: RunConfig, run_dir: RunDir) -> SyncerOptions:
    """Return the options of the syncer's process."""
    syncer = config.cluster.syncer
    with section("cluster.syncer"):
        backup = BackupOptions(url=backup_of(config), every_s=syncer.backup_every_s, keep=syncer.backup_keep)
    return options_of(
        SyncerOptions,
        syncer,
        "cluster.syncer",
        folder=syncer.folder or str(run_dir.syncer),
        up_codecs=up_codecs(config),
        down_codec=config.codec.down,
        backup=backup,
        replication=replication_options(config),
    )


def plan(config: RunConfig, layout: Layout) -> RunPlan:
    """Return the run's definition, as the syncer needs it."""
    return RunPlan(
        agreement=agreement(config, layout),
        layout=layout,
        shared_digest=shared_digest(config),
        outer=outer_options(config),
        health=health_options(config),
        rule=rule(config, layout),
        held=held_of(config),
        earlier_digest=shared_digest(config, earlier=True),
    )


def check(config: RunConfig) -> None:
    """Build every set of options once, to raise ConfigError for a bad value before anything starts."""
    build.check(config)
    syncer_options(config, RunDir(Path()))
    lease(config)


def check_backup(config: RunConfig, run_dir: RunDir, data: Path) -> None:
    """Raise ConfigError where a run's backups would lie among its own files: what is pruned there would be the run."""
    url = backup_of(config)
    folder = Vault(url).folder(config.run.name or "") if url else None
    if folder is None:
        return
    place, root, data = folder.resolve(), run_dir.root.resolve(), data.resolve()
    holds = place == root or data.is_relative_to(place) or place.is_relative_to(data)
    wanted = f"another folder, since {folder} is among the files of the run itself"
    require(not holds, "cluster.syncer.backup", config.cluster.syncer.backup, wanted)


# --- replication and a standby ----------------------------------------------------------------------------------------


LEASES = ("none", "file", "etcd")
OF_ETCD = ("tls_ca", "tls_cert", "tls_key", "user", "password_file")
"""Optional settings of an etcd lease."""
TTL_S_MIN = 1.0
TTL_S_MAX = 3600.0
TIMEOUT_S_MIN = 0.5
ALIVE_S = 1.0
NOT_A_STANDBY = "syncer"
"""A standby may not have this name: the folder of that name in a run's folder is the first syncer's."""


def replication_options(config: RunConfig) -> ReplicationOptions:
    """Return the options that say what waits for a standby, and how long."""
    replication = config.cluster.replication
    timeout_s = replication.timeout_s
    require(timeout_s >= TIMEOUT_S_MIN, "cluster.replication.timeout_s", timeout_s, f"at least {TIMEOUT_S_MIN:g}")
    alive_s = min(ALIVE_S, timeout_s / 4)
    return options_of(ReplicationOptions, replication, "cluster.replication", alive_s=alive_s)


def lease(config: RunConfig, disk: Disk = PLAIN_DISK) -> Lease | None:
    """Return the lease that decides which syncer leads the run; None where an operator decides."""
    options = config.cluster.lease
    run_id = config.run.name or ""
    if has_several(config):  # Each syncer has its own lease.
        run_id += f".{syncer_name(config.cluster.syncer.index)}"
    require(options.kind in LEASES, "cluster.lease.kind", options.kind, f"one of {', '.join(LEASES)}")
    for name, kind in (("path", "file"), ("endpoints", "etcd"), *((each, "etcd") for each in OF_ETCD)):
        value = getattr(options, name)
        if value and options.kind != kind:
            raise ConfigError(f"cluster.lease.{name} is given, and is for kind={kind}")  # It may hold a password.
        if not value and options.kind == kind and name not in OF_ETCD:
            raise ConfigError(f"cluster.lease.{name} is {value!r}: kind={kind} needs it")
    if options.kind == "none":
        return None
    ttl_s = options.ttl_s
    require(TTL_S_MIN <= ttl_s <= TTL_S_MAX, "cluster.lease.ttl_s", ttl_s, f"{TTL_S_MIN:g} to {TTL_S_MAX:g}")
    if options.kind == "file":
        path = Path(options.path)
        if not path.is_absolute():
            raise ConfigError(f"cluster.lease.path is {options.path!r}: an absolute path, of the same file everywhere")
        return FileLease(path, run_id, ttl_s, disk)
    access = options_of(EtcdAccess, options, "cluster.lease")
    with section("cluster.lease"):
        return EtcdLease(options.endpoints, run_id, ttl_s, access)


def standby_primary(config: RunConfig) -> str:
    """Return the address of the syncer that a standby follows; ConfigError where it or the standby's name is bad."""
    standby = config.cluster.standby
    try:
        (primary,) = split_addresses(standby.primary)
    except ValueError:
        wanted = "host:port of the syncer that it follows"
        raise ConfigError(f"cluster.standby.primary is {standby.primary!r}: {wanted}") from None
    usable = is_name(standby.name) and standby.name != NOT_A_STANDBY
    require(usable, "cluster.standby.name", standby.name, f"{A_NAME}, and not {NOT_A_STANDBY!r}")
    return primary
