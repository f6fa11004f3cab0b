"""The options of a syncer's process, the run that all have agreed on, and the memory that a syncer takes at most.

Memory.  The bound is beside what the program itself takes at rest.  With n values in all and m in the largest fragment,
T threads, M sites in a round, and fp32 everywhere:

    state        4 n (theta) + 4 n for each tensor that the outer optimizer keeps (``TENSORS_KEPT``) + 4 n (what is
                 published, unless that is theta itself)
    down-links   for each fragment its latest ones: ``downlinks_kept``, and no more than 8 bytes for each of its values;
                 none where a version is sent whole
    new versions ``VERSIONS_MAX`` times the state of the largest fragment and its down-link
    the fold     for each thread ``RANGES`` ranges of values, and for each update of the round ``PAGES`` of its payload,
                 which lies on the disk, and where there is room for that is unpacked there; each thread unpacks one
    the merge    where it is not the mean: the largest fragment once more, and for each thread a range of every site
    reception    ``ServerOptions.memory_bytes_max``
    a region     of every fragment what it measures from, the version above and the updates that go up, as many as may
                 be in flight there and a last one, and of the largest fragment ``TAKING`` times its values while a
                 version above is fetched, kept and taken

The bound leaves out versions that are kept because a reader still has them.  A snapshot lets go of each fragment as it
is written, so that is what got a newer version since it began; a pull of a whole fragment keeps that until it is over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.codec.entropy import UNPACK_BYTES_MAX
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import make_codec
from diloco.outer.fragments import Layout
from diloco.outer.optimizer import TENSORS_KEPT
from diloco.outer.rule import OuterRule
from diloco.sync.agreement import Agreement
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.syncer.backups import BackupOptions
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.store import RunCard
from diloco.wire.messages import PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.wire.options import ServerOptions

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
    """Of all that may not change while the run goes on; what settings that may change are, it does not say."""
    outer: OuterOptions
    rule: OuterRule
    health: HealthOptions = field(default_factory=HealthOptions)
    held: tuple[int, ...] = ()
    """Where the layout's fragments stand in the whole model, for those who are told how the run stands; empty: so."""
    earlier_digest: str = ""
    """``shared_digest`` of an earlier release, which has the settings that may change in it too."""

    @property
    def card(self) -> RunCard:
        """What a data folder of the run says that it is for."""
        agreement = self.agreement
        return RunCard(agreement.run_id, agreement.layout_fingerprint, self.shared_digest, self.earlier_digest)


VERSIONS_MAX = 2
"""New ones under way at once: one is made while the one before it is written down."""
RANGES = 16
"""Of values, that a thread has at once where it computes on torch; of the kernels' tiles there is no more than one."""
TAKING = 8
PAGES_BYTES = 2 * (2 << 20)
"""The kernel brings the neighbours of what is looked at along, up to 2 MiB; a payload is looked at in two places."""


def spare_max(plan: RunPlan) -> int:
    """Pieces of memory that may lie idle between two versions (``codec.buffers``): the tensors and the down-link of
    one, which was replaced.  The next takes them, so that they are among those of the new versions."""
    return 3 + len(TENSORS_KEPT[plan.rule.optimizer.kind])


def state_bytes_max(numels: Sequence[int], outer_kind: str, down_codec: str, downlinks_kept: int) -> int:
    """What grows with the model: the state, its down-links, and the new versions."""
    down = make_codec(down_codec)
    copies = 1 + len(TENSORS_KEPT[outer_kind]) + (not down.lossless)
    largest = max(numels)
    sent = 0 if down.lossless else down.payload_bytes_max(largest)
    links = [min(downlinks_kept * down.payload_bytes_max(numel), 8 * numel) for numel in numels]
    state = 4 * copies * sum(numels) + (0 if down.lossless else sum(links))
    return state + VERSIONS_MAX * (4 * copies * largest + sent)


def memory_bytes_max(options: SyncerOptions, plan: RunPlan, network: ServerOptions, updates_above: int = 0) -> int:
    """The sum of all that, with as many sites in a round as ``network`` has room for, each with one update;
    ``updates_above`` may be in flight of a region, 0 where it is none."""
    numels = [fragment.numel for fragment in plan.layout.fragments]
    ups = [make_codec(name) for name in options.up_codecs]
    largest, sites = max(numels), network.sites_max
    state = state_bytes_max(numels, plan.rule.optimizer.kind, options.down_codec, options.downlinks_kept)
    unpacking = UNPACK_BYTES_MAX if any(codec.plain is not codec for codec in ups) else 0
    fold = options.threads_used * (RANGES * 4 * RANGE_VALUES + sites * PAGES_BYTES + unpacking)
    if plan.rule.segments:
        fold += 4 * largest + options.threads_used * sites * 4 * RANGE_VALUES
    payload = max(codec.payload_bytes_max(largest) for codec in ups)
    above = 4 * ((3 + updates_above) * sum(numels) + TAKING * largest) if updates_above else 0
    return state + above + fold + network.memory_bytes_max(payload, network.push_credits, unpacking)
