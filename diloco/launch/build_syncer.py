"""The configuration turned into what a syncer, or its standby, is made of.  A site loads none of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch import build
from diloco.launch.adapting import up_codecs
from diloco.launch.build import agreement, health_options, held_of, outer_options, rule
from diloco.launch.config import earlier_digest, shared_digest
from diloco.launch.placing import backup_of
from diloco.launch.replicating import lease, replication_options
from diloco.launch.run_dir import RunDir
from diloco.launch.sections import section
from diloco.syncer.backups import BackupOptions
from diloco.syncer.options import RunPlan, SyncerOptions

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig
    from diloco.outer.fragments import Layout


def syncer_options(config: RunConfig, run_dir: RunDir) -> SyncerOptions:
    """The syncer's process."""
    syncer = config.cluster.syncer
    with section("cluster.syncer"):
        return SyncerOptions(
            folder=syncer.folder or str(run_dir.syncer),
            up_codecs=up_codecs(config),
            down_codec=config.codec.down,
            snapshot_every=syncer.snapshot_every,
            downlinks_kept=syncer.downlinks_kept,
            heartbeat_s=syncer.heartbeat_s,
            linger_s=syncer.linger_s,
            threads=syncer.threads,
            memory_check_s=syncer.memory_check_s,
            backup=BackupOptions(url=backup_of(config), every_s=syncer.backup_every_s, keep=syncer.backup_keep),
            replication=replication_options(config),
        )


def plan(config: RunConfig, layout: Layout) -> RunPlan:
    """The run as the syncer knows it."""
    return RunPlan(
        agreement=agreement(config, layout),
        layout=layout,
        shared_digest=shared_digest(config),
        outer=outer_options(config),
        health=health_options(config),
        rule=rule(config, layout),
        held=held_of(config),
        earlier_digest=earlier_digest(config),
    )


def check(config: RunConfig) -> None:
    """Build every set of options once, so that a value that cannot work is refused before anything starts."""
    build.check(config)
    syncer_options(config, RunDir(Path()))
    lease(config)
