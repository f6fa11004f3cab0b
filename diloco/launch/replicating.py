"""The settings of replication and of a standby, turned into what the floors below take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.config import is_name
from diloco.launch.errors import ConfigError
from diloco.syncer.replicator import ReplicationOptions
from diloco.wire.lines import split_addresses

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig

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
