"""How a run stands, as what JSON can carry: the data of ``diloco status`` and of the live view.

``Tally`` holds the part that no journal holds: what this process has counted and heard of each site.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from diloco.sync.fates import columns_of
from diloco.sync.region import standing
from diloco.sync.state import Status
from diloco.wire.messages import ReportInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.sync.state import Site
    from diloco.sync.syncer import OuterSync


@dataclass(slots=True)
class SiteTally:
    """One site, since this process began.  ``heard_s`` is the monotonic instant of its last heartbeat."""

    payload_bytes_up: int = 0
    payload_bytes_down: int = 0
    updates_corrupt: int = 0
    """Updates that decoded to other values here than at the site."""
    bases_differed: int = 0
    """Bases that the site held other values for than were published."""
    report: ReportInfo | None = None
    heard_s: float = 0.0


class Tally:
    """Written by many threads.  The caller names only sites that are in the run, so that there are few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[str, SiteTally] = {}
        self._refusals: dict[str, int] = {}
        self._decoded = 0
        self._differing: dict[str, dict[int, int]] = {}
        self.began_s = time.monotonic()

    def received(self, site: str, count: int) -> None:
        """``count`` bytes of an update came from ``site``."""
        with self._lock:
            self._of(site).payload_bytes_up += count

    def sent(self, site: str, count: int) -> None:
        """``count`` bytes of a version go to ``site``."""
        with self._lock:
            self._of(site).payload_bytes_down += count

    def refused(self, why: str) -> None:
        """Something was refused before it could be accepted; ``why`` is a reason or the name of a field."""
        with self._lock:
            self._refusals[why] = self._refusals.get(why, 0) + 1

    def corrupt(self, site: str) -> None:
        """An update of ``site`` decoded to other values here than there."""
        with self._lock:
            self._of(site).updates_corrupt += 1

    def decoded(self) -> None:
        """A codec is about to read what a site sent: nobody else's bytes get so far."""
        with self._lock:
            self._decoded += 1

    def heard(self, report: ReportInfo) -> None:
        """A heartbeat of a site that is in the run."""
        with self._lock:
            known = self._of(report.site_id)
            known.report, known.heard_s = report, time.monotonic()

    def differing(self, site: str, bases: Mapping[int, int]) -> dict[int, int]:
        """``site`` holds other values than were published for ``bases`` (fragment to version); those not said before.

        A site says so in every heartbeat until it has put it right; it is counted once.
        """
        with self._lock:
            before = self._differing.get(site, {})
            new = {fragment: version for fragment, version in bases.items() if before.get(fragment) != version}
            if bases or before:
                self._differing[site] = dict(bases)
            if new:
                self._of(site).bases_differed += len(new)
            return new

    def sites(self) -> dict[str, SiteTally]:
        """A copy of everything by site."""
        with self._lock:
            return {name: replace(tally) for name, tally in self._sites.items()}

    def refusals(self) -> dict[str, int]:
        """Refusals at the door by reason."""
        with self._lock:
            return dict(self._refusals)

    def payloads_decoded(self) -> int:
        """How often a codec has read what a site sent."""
        with self._lock:
            return self._decoded

    def _of(self, site: str) -> SiteTally:
        return self._sites.setdefault(site, SiteTally())


FIGURES = (
    "heard_seconds_ago",
    "base_versions",
    "staleness",
    "stall_share",
    "step",
    "loss",
    "tokens_per_s",
    "tokens_processed",
    "tokens_in_flight",
    "tokens_unsent",
    "bytes_up",
    "bytes_down",
)
"""What a site's heartbeat gives; from ``step`` on under the name that it has there."""


NOTHING = SiteTally()


def describe(
    machine: OuterSync,
    tally: Mapping[str, SiteTally],
    now_s: float,
    costs: Callable[[int], Mapping[str, float] | None] = lambda fragment: None,
) -> dict[str, object]:
    """Versions, rounds and sites; ``now_s`` is of the clock that the tally uses, ``costs`` gives a round's stages."""
    state = machine.state
    versions = [fragment.version for fragment in state.fragments]
    return {
        "epoch": state.epoch,
        "phase": state.phase.value,
        "ending": state.ending.value if state.ending else None,
        "run_tokens": state.run_tokens(),
        "progress": machine.progress_ppm() / 1e6,
        "units": _units(machine),
        "upstream": _upstream(machine),
        "fragments": [
            {
                "version": fragment.version,
                "digest": fragment.digest,
                "arrived": state.arrived(index),
                "members": list(fragment.round.members) if fragment.round else [],
                "merging": fragment.merging_since_ns is not None,
                "costs": costs(index),
            }
            for index, fragment in enumerate(state.fragments)
        ],
        "sites": {
            name: {
                **_membership(site, state.now_ns),
                **_figures(versions, tally.get(name, NOTHING), now_s),
                **_counts(tally.get(name, NOTHING)),
                "link": _link(tally.get(name, NOTHING).report),
                **_left_behind(site),
            }
            for name, site in sorted(state.sites.items())
        },
    }


def _units(machine: OuterSync) -> dict[str, int] | None:
    """Where the units of the data are; None where none are leased.

    ``processed`` are those that accepted updates have gone through, each as often as a site did.
    """
    if machine.state.units is None:
        return None
    unit = machine.options.unit_sequences
    processed = sum(max(line.cursor for line in site.lines) // unit for site in machine.state.sites.values())
    return {"processed": processed, **asdict(columns_of(machine.options, machine.state)), "sequences": unit}


def _upstream(machine: OuterSync) -> dict[str, object] | None:
    """Of a region, how it stands towards the syncer above: the versions that it rests on, and where the tokens are that
    its sites have brought; None where there is none above."""
    upstream, found = machine.state.upstream, standing(machine.state)
    if upstream is None or found is None:
        return None
    tokens = {f"tokens_{name}": getattr(found.ledger, name) for name in found.ledger.__slots__}
    return {"site": upstream.site, "base_versions": list(found.versions), **tokens}


def _membership(site: Site, now_ns: int) -> dict[str, object]:
    count = len(site.lines)
    refused: dict[str, int] = {}
    for line in site.lines:
        for reason, number in line.updates_refused.items():
            refused[reason] = refused.get(reason, 0) + number
    return {
        "status": site.status.value,
        "incarnation": site.incarnation,
        "tokens_merged": sum(line.tokens_merged for line in site.lines) // count,
        "updates_merged": sum(line.updates_merged for line in site.lines),
        "updates_refused": refused,
        "undecided": sum(len(line.undecided) for line in site.lines),
        "held": [
            {
                "fragment": index,
                "sequence": pending.sequence,
                "seconds": round((now_ns - held.since_ns) / 1e9, 1),
                "norm": held.norm,
                "ratio": held.ratio,
                "cosine": held.cosine,
                "z": held.z,
                "why": held.why,
            }
            for index, line in enumerate(site.lines)
            for pending in line.undecided
            if (held := pending.held) is not None
        ],
    }


def _left_behind(site: Site) -> dict[str, object]:
    """What of a site that has left is in flight still: its last heartbeat is older than the fates that came since."""
    if site.status is not Status.LEFT:
        return {}
    tokens = sum(pending.tokens for line in site.lines for pending in line.undecided)
    return {"tokens_in_flight": tokens // len(site.lines)}


def _counts(known: SiteTally) -> dict[str, object]:
    return {
        "payload_bytes_up": known.payload_bytes_up,
        "payload_bytes_down": known.payload_bytes_down,
        "updates_corrupt": known.updates_corrupt,
        "bases_differed": known.bases_differed,
    }


def _link(report: ReportInfo | None) -> dict[str, object] | None:
    """What the site has measured of its link; None where it has not said, or is of a release that measures none."""
    return asdict(report.link) if report is not None and report.link is not None else None


def _figures(versions: Sequence[int], known: SiteTally, now_s: float) -> dict[str, object]:
    """What the site said last; every figure is None before it has said anything."""
    report = known.report
    if report is None:
        return dict.fromkeys(FIGURES)
    lags = [version - base for version, base in zip(versions, report.versions, strict=False)]
    share = report.stall_ns / report.train_ns if report.train_ns else 0.0
    said: list[object] = [round(now_s - known.heard_s, 1), list(report.versions), max(lags, default=0), share]
    return dict(zip(FIGURES, [*said, *(getattr(report, name) for name in FIGURES[len(said) :])], strict=True))
