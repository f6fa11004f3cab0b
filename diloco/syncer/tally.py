"""What this process has counted and heard of each site: the part of ``diloco status`` that no journal holds."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.wire.messages import ReportInfo

if TYPE_CHECKING:
    from collections.abc import Mapping


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
