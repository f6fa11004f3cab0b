"""The status of a run as JSON values: the data of ``diloco status`` and of the live view.

``Tally`` holds the part that is not in the journal: this process's counts and heartbeats of each site, and the seconds
of each stage of the latest round of every fragment. ``receive_s`` is this process's working time on the round's updates
as they arrived: writing, decoding, measuring, the fsync; not the network's time. ``read_s``, ``fused_s`` and
``digest_s`` are those of ``OuterResult``. ``publish_s`` is the time after that until sites are told: the journal, its
fsync, a standby.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.sync.fates import columns_of
from diloco.sync.region import standing
from diloco.sync.state import Status
from diloco.wire.messages import ReportInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.effects import StartOuterStep, TakeVersion
    from diloco.sync.state import Round, Site
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.outer_step import OuterResult


@dataclass(slots=True)
class SiteTally:
    """Counts of one site since this process began, and its last heartbeat, at the monotonic instant ``heard_s``."""

    counts: Counter[str] = field(default_factory=Counter)
    """``COUNTS``, and ``payloads_decoded``: updates that were admitted, for a codec to read."""
    differing: dict[int, int] = field(default_factory=dict)
    """Those of its last heartbeat, fragment to version."""
    report: ReportInfo | None = None
    heard_s: float = 0.0
    recorded_s: float = -math.inf
    """The monotonic instant of the last heartbeat that is in the event log."""


RECORD_EVERY_S = 5.0
"""Seconds between two heartbeats of a site in the event log: enough for a chart, and few beside the rounds."""
UPDATES_MAX = 4096
"""Updates whose receive time is kept until they are merged; the oldest are dropped first."""


class Tally:
    """Counts and costs, written by many threads. Callers pass only sites that are in the run, to bound the memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: defaultdict[str, SiteTally] = defaultdict(SiteTally)
        self._refusals: Counter[str] = Counter()
        self.began_s = time.monotonic()
        self._received: dict[str, tuple[float, float, float]] = {}
        """By payload: the working time, the instant (Unix time) at which it was durable, and the time until then."""
        self._costs: dict[int, dict[str, float]] = {}
        self._made_s: dict[int, float] = {}

    def count(self, site: str, **more: int) -> None:
        """Add ``more`` to the counts of ``site``."""
        with self._lock:
            self._sites[site].counts.update(more)

    def refused(self, why: str) -> None:
        """Count a refusal before acceptance; ``why`` is a reason or the name of a field."""
        with self._lock:
            self._refusals[why] += 1

    def heard(self, report: ReportInfo) -> bool:
        """Store a heartbeat of a site that is in the run; return whether it is time to record one."""
        with self._lock:
            known = self._sites[report.site_id]
            known.report, known.heard_s = report, time.monotonic()
            due = known.heard_s - known.recorded_s >= RECORD_EVERY_S
            known.recorded_s = known.heard_s if due else known.recorded_s
            return due

    def last_words(self, site: str) -> ReportInfo | None:
        """Return the last heartbeat of ``site`` if it is not recorded yet; it counts as recorded then."""
        with self._lock:
            known = self._sites.get(site)
            if known is None or known.recorded_s >= known.heard_s:
                return None
            known.recorded_s = known.heard_s
            return known.report

    def differing(self, site: str, bases: dict[int, int]) -> dict[int, int]:
        """Note the ``bases`` (fragment to version) that ``site`` holds other values for; return those not noted before.

        A site reports one in every heartbeat until it has corrected it; it is counted once.
        """
        with self._lock:
            known = self._sites[site]
            new = {fragment: version for fragment, version in bases.items() if known.differing.get(fragment) != version}
            known.differing = bases
            known.counts["bases_differed"] += len(new)
            return new

    def sites(self) -> dict[str, SiteTally]:
        """Return a copy of the counts by site."""
        with self._lock:
            return {name: replace(tally, counts=tally.counts.copy()) for name, tally in self._sites.items()}

    def refusals(self) -> dict[str, int]:
        """Return the refusals before acceptance, by reason."""
        with self._lock:
            return dict(self._refusals)

    def received(self, reference: str, busy_s: float, whole_s: float) -> None:
        """Add the working time for the update with this payload, now durable, of the time since its push began."""
        with self._lock:
            before_s, *_ = self._received.pop(reference, (0.0,))
            self._received[reference] = (before_s + busy_s, time.time(), whole_s)
            while len(self._received) > UPDATES_MAX:
                del self._received[next(iter(self._received))]

    def stepped(self, command: StartOuterStep | TakeVersion, result: OuterResult) -> dict[str, object]:
        """Record a new version; return its stages so far, and which updates this process ``received`` for it, when."""
        received, receive_s = list[tuple[str, int, float, float]](), 0.0
        with self._lock:
            for part in command.contributions:
                for update in part.updates:
                    if (found := self._received.pop(update.payload, None)) is not None:
                        receive_s += found[0]
                        received.append((part.site, update.sequence, round(found[1], 6), round(found[2], 6)))
            stages = {"read_s": result.read_s, "fused_s": result.fused_s, "digest_s": result.digest_s}
            costs = {"receive_s": receive_s, **stages}
            self._costs[command.fragment] = {name: round(seconds, 6) for name, seconds in costs.items()}
            self._made_s[command.fragment] = time.monotonic()
            return {**self._costs[command.fragment], "received": received}

    def published(self, fragment: int) -> dict[str, float]:
        """Record that the latest version was published; return this stage."""
        with self._lock:
            stage = {"publish_s": round(time.monotonic() - self._made_s[fragment], 6)}
            # A new one, because ``costs`` has given the other away.
            self._costs[fragment] = {**self._costs[fragment], **stage}
            return stage

    def costs(self, fragment: int) -> dict[str, float] | None:
        """Return all stages of the latest round; None before the first of this process."""
        with self._lock:
            return self._costs.get(fragment)


COUNTS = ("payload_bytes_up", "payload_bytes_down", "updates_corrupt", "bases_differed")
"""The counts of a site in its status. Corrupt updates decoded to other values here than at the site; for the bases that
differed the site held other values than were published."""
FIGURES = (
    "step",
    "loss",
    "tokens_per_s",
    "tokens_processed",
    "tokens_in_flight",
    "tokens_unsent",
    "bytes_up",
    "bytes_down",
)
"""The fields of a site's heartbeat in its status and in its event, under the same names."""
BY_HEARTBEAT = ("heard_seconds_ago", "base_versions", "staleness", "stall_share", *FIGURES)
HELD = ("norm", "ratio", "cosine", "z", "why")
"""The fields in status of an update that waits for an operator's decision."""


def recorded(report: ReportInfo) -> dict[str, object]:
    """Return a heartbeat as an event, for the history of a run whose sites keep their own events elsewhere."""
    return {
        "site": report.site_id,
        **{name: getattr(report, name) for name in ("incarnation", *FIGURES, "tokens_overwritten", "tokens_lost")},
        "step_s": round(report.step_ns / 1e9, 6),
        "train_s": round(report.train_ns / 1e9, 3),
        "stall_s": round(report.stall_ns / 1e9, 6),
        "versions": list(report.versions),
    }


def resident_bytes() -> int | None:
    """Return the memory that this process has in use; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def describe(machine: OuterSync, tally: Tally, now_ns: int) -> dict[str, object]:
    """Return the status of versions, rounds and sites.

    A fragment's ``open_seconds`` is the age of its open round, and ``grace_seconds_left`` the rest of its grace; None
    before the first update of the round, and before its quorum.
    ``units``: where the data units are; None if none are leased. ``processed`` are those that accepted updates have
    covered, each counted once per site. ``upstream``: the versions above that a region is based on, and where its
    sites' tokens are; None if there is no syncer above.
    """
    state, here = machine.state, machine.attendance
    known, now_s = tally.sites(), time.monotonic()
    versions = [fragment.version for fragment in state.fragments]
    units = upstream = None
    if state.units is not None:
        unit = machine.options.unit_sequences
        processed = sum(max(line.cursor for line in site.lines) // unit for site in state.sites.values())
        units = {"processed": processed, **asdict(columns_of(machine)), "sequences": unit}
    if state.upstream is not None and (above := standing(state)) is not None:
        tokens = {f"tokens_{name}": value for name, value in above.ledger._asdict().items()}
        upstream = {"site": state.upstream.site, "base_versions": list(above.versions), **tokens}
    return {
        "lineage": state.lineage,
        "epoch": state.epoch,
        "phase": state.phase.value,
        "ending": state.ending.value if state.ending else None,
        "run_tokens": state.run_tokens(),
        "progress": machine.progress_ppm() / 1e6,
        "units": units,
        "upstream": upstream,
        "fragments": [
            {
                "version": fragment.version,
                "digest": fragment.digest,
                "arrived": sorted(here.arrived[index]),
                "awaited": sorted(here.awaited(index) - here.arrived[index]),
                "members": list(fragment.round.members) if fragment.round else [],
                **_times(fragment.round, now_ns),
                "merging": fragment.merging_since_ns is not None,
                "costs": tally.costs(index),
            }
            for index, fragment in enumerate(state.fragments)
        ],
        "sites": {
            name: _site(site, known.get(name) or SiteTally(), versions, state.now_ns, now_s)
            for name, site in sorted(state.sites.items())
        },
    }


def _times(opened: Round | None, now_ns: int) -> dict[str, float | None]:
    ends_ns = opened.deadline_ns if opened is not None else None
    return {
        "open_seconds": None if opened is None else round(max(0, now_ns - opened.opened_ns) / 1e9, 1),
        "grace_seconds_left": None if ends_ns is None else round(max(0, ends_ns - now_ns) / 1e9, 1),
    }


def _site(site: Site, known: SiteTally, versions: Sequence[int], now_ns: int, now_s: float) -> dict[str, object]:
    """Return a site's state in the run, its counts, and its last heartbeat: None before the first."""
    report, lines = known.report, site.lines
    waiting = [(index, pending) for index, line in enumerate(lines) for pending in line.undecided]
    refused: Counter[str] = Counter()
    for line in lines:
        refused.update(line.updates_refused)
    found: dict[str, object] = {
        "status": site.status.value,
        "incarnation": site.incarnation,
        "tokens_merged": sum(line.tokens_merged for line in lines) // len(lines),
        "updates_merged": sum(line.updates_merged for line in lines),
        "updates_refused": dict(refused),
        "undecided": len(waiting),
        "held": [
            {
                "fragment": index,
                "sequence": pending.sequence,
                "seconds": round((now_ns - held.since_ns) / 1e9, 1),
                **{name: getattr(held, name) for name in HELD},
            }
            for index, pending in waiting
            if (held := pending.held) is not None
        ],
        **{name: known.counts[name] for name in COUNTS},
        **dict.fromkeys(BY_HEARTBEAT),
        "link": asdict(report.link) if report is not None and report.link is not None else None,
    }
    if report is not None:
        found |= {name: getattr(report, name) for name in FIGURES}
        lags = [version - base for version, base in zip(versions, report.versions, strict=False)]
        found["heard_seconds_ago"] = round(now_s - known.heard_s, 1)
        found["base_versions"] = list(report.versions)
        found["staleness"] = max(lags, default=0)
        found["stall_share"] = report.stall_ns / report.train_ns if report.train_ns else 0.0
    if site.status is Status.LEFT:  # Its last heartbeat is older than later fates.
        found["tokens_in_flight"] = sum(pending.tokens for _, pending in waiting) // len(lines)
    return found
