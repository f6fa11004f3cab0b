"""The options of a syncer's process, the run's agreed plan, and the bound on a syncer's memory.

Memory. The bound comes on top of what the program itself takes at rest. With n values in all and m in the largest
fragment, T threads, M sites in a round, and fp32 everywhere:

    state        4 n (theta) + 4 n for each tensor that the outer optimizer keeps (``TENSORS_KEPT``) + 4 n (what is
                 published, unless that is theta itself)
    down-links   for each fragment its latest ones: ``downlinks_kept``, and no more than 8 bytes for each of its values;
                 none where a version is sent whole
    new versions ``VERSIONS_MAX`` times the state of the largest fragment and its down-link
    the fold     for each thread ``RANGES`` ranges of values, and for each update of the round ``PAGES_BYTES`` of its
                 payload, which is on the disk, and is unpacked there if there is space; each thread unpacks one
    the merge    where it is not the mean: the largest fragment once more, and for each thread a range of every site
    reception    ``ServerOptions.memory_bytes_max``
    a region     for every fragment its reference, the version above and its updates for the syncer above, as many as
                 may be in flight there and a last one; for the largest fragment ``TAKING`` times its values while a
                 version above is fetched, kept and taken

The bound excludes old versions that a reader still holds. A snapshot releases each fragment once it is written, so it
holds those that got a newer version since it began; a pull of a whole fragment holds that until it is over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.codec.entropy import UNPACK_BYTES_MAX
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import make_codec
from diloco.outer.fragments import Layout
from diloco.outer.optimizer import TENSORS_KEPT, OuterRule
from diloco.sync.options import Agreement, HealthOptions, OuterOptions
from diloco.syncer.backups import BackupOptions
from diloco.syncer.replaying import Rules
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.snapshots import Retention
from diloco.syncer.store import RunCard
from diloco.wire.messages import PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.wire.options import ServerOptions

THREADS_MAX = 4
"""More threads would only wait for the memory."""


@dataclass(kw_only=True, slots=True)
class SyncerOptions:
    """Options of a syncer's process. ``folder`` is its data folder."""

    folder: str
    up_codecs: list[str] = field(default_factory=lambda: ["fp32"])
    """Encodings that a site may push."""
    down_codec: str = "fp32"
    snapshot_every: int = 16
    """Outer steps (over all fragments) between two snapshots."""
    downlinks_kept: int = 32
    """Versions per fragment that a site may lag behind and still get differences."""
    heartbeat_s: float = 1.0
    linger_s: float = 10.0
    """Longest wait, after the last version, for the sites to get their fates and to leave."""
    retain_steps: int = 256
    """Outer steps (over all fragments) of the past that can be replayed; 0: only what recovery needs is kept."""
    retain_mb: int = 8192
    """Disk space for old snapshots, journal and payloads beyond what recovery needs; the oldest are deleted first."""
    disk_reserve_mb: int = 64
    """Free disk space below which the syncer accepts no update; 0: it accepts them until a write fails."""
    threads: int = 0
    """Threads that merge a round, each a range of the fragment at a time; 0: up to 4 of the process's cores."""
    memory_check_s: float = 10.0
    """Seconds between two checks of a fragment in memory against its digest; 0: no checks."""
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
    def retention(self) -> Retention:
        """How much of the past the folder keeps."""
        return Retention(self.retain_steps, self.retain_mb * 1_000_000)

    @property
    def threads_used(self) -> int:
        """``threads``, or the default for this machine if it is 0."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or min(THREADS_MAX, cores)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The run as all processes have agreed on it; the launcher builds it once."""

    agreement: Agreement
    layout: Layout
    shared_digest: str
    """Digest of the settings that may not change during the run; those that may change are not in it."""
    outer: OuterOptions
    rule: OuterRule
    health: HealthOptions = field(default_factory=HealthOptions)
    held: tuple[int, ...] = ()
    """The layout's fragments' indices in the whole model, for status; empty: the layout is the whole model."""
    earlier_digest: str = ""
    """``shared_digest`` as an earlier release computes it, which also includes the settings that may change."""

    def rules(self, options: SyncerOptions) -> Rules:
        """Return the settings by which outer steps are made and replayed."""
        return Rules(self.outer, self.rule, options.down_codec, options.downlinks_kept)

    @property
    def card(self) -> RunCard:
        """The run's identity as stored in its data folder."""
        agreement = self.agreement
        return RunCard(agreement.run_id, agreement.layout_fingerprint, self.shared_digest, self.earlier_digest)


VERSIONS_MAX = 2
"""New versions in work at once: one is made while the one before it is journalled."""
RANGES = 16
"""Ranges of values that a thread holds at once on torch; the native kernels' tiles need no more than one."""
TAKING = 8
PAGES_BYTES = 2 * (2 << 20)
"""The kernel also loads neighbouring pages, up to 2 MiB; a payload is read in two places."""


def state_bytes_max(numels: Sequence[int], outer_kind: str, down_codec: str, downlinks_kept: int) -> int:
    """Return the bytes that grow with the model: the state, its down-links, and the new versions."""
    down = make_codec(down_codec)
    copies = 1 + len(TENSORS_KEPT[outer_kind]) + (not down.lossless)
    largest = max(numels)
    sent = 0 if down.lossless else down.payload_bytes_max(largest)
    links = [min(downlinks_kept * down.payload_bytes_max(numel), 8 * numel) for numel in numels]
    state = 4 * copies * sum(numels) + (0 if down.lossless else sum(links))
    return state + VERSIONS_MAX * (4 * copies * largest + sent)


def memory_bytes_max(options: SyncerOptions, plan: RunPlan, network: ServerOptions, updates_above: int = 0) -> int:
    """Return the module's bound in bytes, for as many sites in a round as ``network`` admits, each with one update.
    ``updates_above`` of a region's updates may be in flight; 0 if the syncer is not a region."""
    numels = [fragment.numel for fragment in plan.layout.fragments]
    ups = [make_codec(name) for name in options.up_codecs]
    largest, sites = max(numels), network.sites_max
    state = state_bytes_max(numels, plan.rule.optimizer.kind, options.down_codec, options.downlinks_kept)
    unpacking = UNPACK_BYTES_MAX if any(codec.plain is not codec for codec in ups) else 0
    fold = options.threads_used * (RANGES * 4 * RANGE_VALUES + sites * PAGES_BYTES + unpacking)
    if plan.rule.segments:
        fold += 4 * largest + options.threads_used * sites * 4 * RANGE_VALUES
    apart = [4 * numels[index] for index in plan.layout.averaged]  # In fp32.
    payload = max([codec.payload_bytes_max(largest) for codec in ups] + apart)
    above = 4 * ((3 + updates_above) * sum(numels) + TAKING * largest) if updates_above else 0
    return state + above + fold + network.memory_bytes_max(payload, network.push_credits, unpacking)
