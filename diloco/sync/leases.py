"""Who was heard when.

Leases stand outside the outer machine because hearing a live site changes nothing that must be remembered: only the
passage from live to silent and back is an event of the machine, and only that is journalled.  After a restart every
lease begins anew in full.
"""

from __future__ import annotations

from diloco.sync.events import SiteHeard, SiteSilent


class Leases:
    """The lease of every site that is in the run; ``timeout_ns`` without a word makes a site silent."""

    def __init__(self, timeout_ns: int) -> None:
        self.timeout_ns = timeout_ns
        self._heard_ns: dict[str, int] = {}
        self._silent: set[str] = set()

    def watch(self, site: str, now_ns: int, *, silent: bool = False) -> None:
        """Begin a full lease for ``site``, which is known to be ``silent`` or not."""
        self._heard_ns[site] = now_ns
        if silent:
            self._silent.add(site)
        else:
            self._silent.discard(site)

    def renew(self, now_ns: int) -> None:
        """Begin every running lease anew: whoever keeps them was itself away, and nobody could be heard."""
        for site in self._heard_ns:
            self._heard_ns[site] = max(self._heard_ns[site], now_ns)

    def forget(self, site: str) -> None:
        """``site`` left: no lease runs for it any more."""
        self._heard_ns.pop(site, None)
        self._silent.discard(site)

    def heard(self, site: str, now_ns: int) -> SiteHeard | None:
        """Renew the lease of ``site``; an event if it had been silent, None if unknown or nothing changed."""
        if site not in self._heard_ns:
            return None
        self._heard_ns[site] = now_ns
        if site in self._silent:
            self._silent.discard(site)
            return SiteHeard(site)
        return None

    def expired(self, now_ns: int) -> list[SiteSilent]:
        """The sites whose lease has run out at ``now_ns``, each told once, in site order."""
        gone = [
            site
            for site in sorted(self._heard_ns)
            if site not in self._silent and now_ns >= self._heard_ns[site] + self.timeout_ns
        ]
        self._silent.update(gone)
        return [SiteSilent(site) for site in gone]

    def next_deadline_ns(self) -> int | None:
        """The instant at which the next lease runs out."""
        running = [heard for site, heard in self._heard_ns.items() if site not in self._silent]
        return min(running) + self.timeout_ns if running else None
