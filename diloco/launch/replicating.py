"""The settings of replication and of a standby, turned into what the floors below take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK
from diloco.launch.config import is_name
from diloco.launch.errors import ConfigError
from diloco.launch.placing import has_several, syncer_name
from diloco.syncer.lease_etcd import EtcdAccess, EtcdLease
from diloco.syncer.lease_file import FileLease
from diloco.syncer.replicator import ReplicationOptions
from diloco.wire.channel import split_addresses

if TYPE_CHECKING:
    from diloco.durable import Disk
    from diloco.launch.schema import RunConfig
    from diloco.syncer.lease import Lease

LEASES = ("none", "file", "etcd")
OF_ETCD = ("tls_ca", "tls_cert", "tls_key", "user", "password_file")
"""That it may have beside its endpoints."""
TTL_S_MIN = 1.0
TTL_S_MAX = 3600.0
TIMEOUT_S_MIN = 0.5
ALIVE_S = 1.0
NOT_A_STANDBY = "syncer"
"""The folder of that name in a run's is the first syncer's."""


def replication_options(config: RunConfig) -> ReplicationOptions:
    """What waits for a standby."""
    replication = config.cluster.replication
    if not replication.timeout_s >= TIMEOUT_S_MIN:
        timeout_s = replication.timeout_s
        raise ConfigError(f"cluster.replication.timeout_s is {timeout_s!r}: at least {TIMEOUT_S_MIN:g}")
    alive_s = min(ALIVE_S, replication.timeout_s / 4)
    try:
        return ReplicationOptions(mode=replication.mode, timeout_s=replication.timeout_s, alive_s=alive_s)
    except ValueError as error:
        raise ConfigError(f"cluster.replication.{error}") from error


def lease(config: RunConfig, disk: Disk = PLAIN_DISK) -> Lease | None:
    """What says who leads the run; None: an operator does."""
    section = config.cluster.lease
    run_id = config.run.name or ""
    if has_several(config):  # Each syncer is led on its own.
        run_id += f".{syncer_name(config.cluster.syncer.index)}"
    if section.kind not in LEASES:
        raise ConfigError(f"cluster.lease.kind is {section.kind!r}: one of {', '.join(LEASES)}")
    for name, kind in (("path", "file"), ("endpoints", "etcd"), *((each, "etcd") for each in OF_ETCD)):
        value = getattr(section, name)
        if value and section.kind != kind:
            raise ConfigError(f"cluster.lease.{name} is given, and is for kind={kind}")  # It may hold a password.
        if not value and section.kind == kind and name not in OF_ETCD:
            raise ConfigError(f"cluster.lease.{name} is {value!r}: kind={kind} needs it")
    if section.kind == "none":
        return None
    if not TTL_S_MIN <= section.ttl_s <= TTL_S_MAX:
        raise ConfigError(f"cluster.lease.ttl_s is {section.ttl_s!r}: {TTL_S_MIN:g} to {TTL_S_MAX:g}")
    if section.kind == "file":
        path = Path(section.path)
        if not path.is_absolute():
            raise ConfigError(f"cluster.lease.path is {section.path!r}: an absolute path, of the same file everywhere")
        return FileLease(path, run_id, section.ttl_s, disk)
    access = EtcdAccess(section.tls_ca, section.tls_cert, section.tls_key, section.user, section.password_file)
    try:
        return EtcdLease(section.endpoints, run_id, section.ttl_s, access)
    except ValueError as error:
        raise ConfigError(f"cluster.lease.{error}") from error


def standby_primary(config: RunConfig) -> str:
    """Whom a standby follows; ConfigError where that, or the standby's name, cannot be."""
    standby = config.cluster.standby
    try:
        (primary,) = split_addresses(standby.primary)
    except ValueError:
        wanted = "host:port of the syncer that it follows"
        raise ConfigError(f"cluster.standby.primary is {standby.primary!r}: {wanted}") from None
    if not is_name(standby.name) or standby.name == NOT_A_STANDBY:
        wanted = f"letters, digits, '.', '_' and '-', at most 64, and not {NOT_A_STANDBY!r}"
        raise ConfigError(f"cluster.standby.name is {standby.name!r}: {wanted}")
    return primary
