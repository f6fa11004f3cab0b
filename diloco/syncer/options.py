"""What a syncer is told before it starts: the options of its process, and the run that all have agreed on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from diloco.codec.registry import make_codec
from diloco.outer.fragments import Layout
from diloco.outer.rule import OuterRule
from diloco.sync.agreement import Agreement
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.syncer.backups import BackupOptions
from diloco.syncer.replicator import ReplicationOptions
from diloco.wire.messages import PARTS_MAX

THREADS_MAX = 4
"""More of them wait for the memory rather than for each other."""


@dataclass(kw_only=True, slots=True)
class SyncerOptions:
    """The process around the machine.  ``folder`` is its own data folder."""

    folder: str
    up_codecs: list[str] = field(default_factory=lambda: ["fp32"])
    """Encodings that a site may push."""
    down_codec: str = "fp32"
    snapshot_every: int = 16
    """Outer steps (over all fragments) between two snapshots."""
    downlinks_kept: int = 32
    """Versions per fragment that a site may lag behind and still be sent differences."""
    heartbeat_s: float = 1.0
    linger_s: float = 10.0
    """After the last version: longest wait for the sites to have heard of it."""
    retain_steps: int = 256
    """Outer steps (over all fragments) of the past that can be replayed; 0: only what recovery needs is kept."""
    retain_mb: int = 8192
    """What the past may take beyond what recovery needs: old snapshots, journal, payloads.  The oldest goes first."""
    disk_reserve_mb: int = 64
    """Free space below which no update is taken in; 0: as long as the disk takes it."""
    threads: int = 0
    """That fold a round, each a range of the fragment at a time; 0: up to 4 of the cores that the process may use."""
    memory_check_s: float = 10.0
    """Between two looks at whether a fragment in memory is still what it was; 0: never."""
    replication: ReplicationOptions = field(default_factory=ReplicationOptions)
    backup: BackupOptions = field(default_factory=BackupOptions)

    def __post_init__(self) -> None:
        for name in [*self.up_codecs, self.down_codec]:
            make_codec(name)
        if self.snapshot_every < 1:
            raise ValueError(f"snapshot_every is {self.snapshot_every!r}: at least 1")
        if not 1 <= self.downlinks_kept <= PARTS_MAX:
            raise ValueError(f"downlinks_kept is {self.downlinks_kept!r}: 1 to {PARTS_MAX}")
        if self.heartbeat_s <= 0:
            raise ValueError(f"heartbeat_s is {self.heartbeat_s!r}: positive")
        for name in ("linger_s", "memory_check_s", "disk_reserve_mb", "retain_steps", "retain_mb", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: not negative")

    @property
    def threads_used(self) -> int:
        """``threads``, or what 0 means on this machine."""
        return self.threads or min(THREADS_MAX, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the run is, agreed by all: built once by the launcher."""

    agreement: Agreement
    layout: Layout
    shared_digest: str
    outer: OuterOptions
    rule: OuterRule
    health: HealthOptions = field(default_factory=HealthOptions)
    held: tuple[int, ...] = ()
    """Where the layout's fragments stand in the whole model, for those who are told how the run stands; empty: so."""
