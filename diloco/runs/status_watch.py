"""Polls a syncer's status, and sends it a request to drain, in a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from diloco.wire.client import AdminClient
from diloco.wire.messages import Refused, Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.wire.options import SecurityOptions

Status = dict[str, object]
EVERY_S = 1.0
EVERY_S_AT_THE_END = 0.15
CLOSE_WAIT_S = 15.0
MEANS = ("tokens_merged", "tokens_in_flight")


class StatusWatches:
    """A watch for each of several syncers; ``latest`` combines their answers into that of one syncer."""

    def __init__(self, watches: Sequence[StatusWatch]) -> None:
        self._watches = watches

    @property
    def latest(self) -> Status | None:
        """The combined status; None before the first answer."""
        return together([watch.latest for watch in self._watches if watch.latest is not None])

    @property
    def drain_accepted(self) -> bool:
        """Whether all syncers have accepted the request to drain."""
        return all(watch.drain_accepted for watch in self._watches)

    @property
    def drain_refused(self) -> str:
        """The text of the first refusal to drain; "" without one."""
        return next((watch.drain_refused for watch in self._watches if watch.drain_refused), "")

    @drain_refused.setter
    def drain_refused(self, text: str) -> None:
        for watch in self._watches:
            watch.drain_refused = text

    def hurry(self) -> None:
        """Poll more often: the end is near."""
        for watch in self._watches:
            watch.hurry()

    def drain(self) -> None:
        """Ask all syncers for the last round."""
        for watch in self._watches:
            watch.drain()

    def close(self) -> None:
        """End the threads."""
        for watch in self._watches:
            watch.close()


def together(told: Sequence[Status]) -> Status | None:
    """Return each site's counts as one syncer with all fragments has them: tokens are means over the fragments.

    Each syncer counts every token that its own fragments have, so that a sum over syncers would count it repeatedly.
    """
    if not told:
        return None
    counts = [len(_list(each, "fragments")) for each in told]
    sites: dict[str, dict[str, object]] = {}
    for name in sorted({name for each in told for name in _sites(each)}):
        known = [(count, _sites(each)[name]) for count, each in zip(counts, told, strict=True) if name in _sites(each)]
        refused: dict[str, int] = {}
        for _, site in known:
            for reason, number in site.get("updates_refused", {}).items():
                refused[reason] = refused.get(reason, 0) + number
        sites[name] = {
            **{field: sum(n * (s.get(field) or 0) for n, s in known) // sum(counts) for field in MEANS},
            "tokens_processed": max(site.get("tokens_processed") or 0 for _, site in known),
            "updates_merged": sum(site.get("updates_merged") or 0 for _, site in known),
            "undecided": sum(site.get("undecided") or 0 for _, site in known),
            "updates_refused": refused,
        }
    units = next((each["units"] for each in told if each.get("units")), None)  # One syncer leases them.
    return {"sites": sites, "units": units}


def _sites(status: Status) -> dict[str, Any]:
    sites = status.get("sites")
    return sites if isinstance(sites, dict) else {}


def _list(status: Status, name: str) -> list[object]:
    value = status.get(name)
    return value if isinstance(value, list) else []


class StatusWatch:
    """Polls one syncer; ``latest`` is the newest answer.

    The last answer before the syncer ends holds the final counts, so it is asked more often towards the end.
    """

    def __init__(self, address: str, security: SecurityOptions) -> None:
        self.latest: Status | None = None
        self.drain_accepted = False
        self.drain_refused = ""
        self._client = AdminClient(address, security)
        self._drain = False
        self._every_s = EVERY_S
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-watch", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Poll several times a second: the end is near."""
        self._every_s = EVERY_S_AT_THE_END
        self._wake.set()

    def drain(self) -> None:
        """Ask for the last round, again and again until the syncer has accepted it."""
        self._drain = True
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wake.set()
        self._client.close()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while not self._ended:
            self._wake.clear()
            try:
                if self._drain and not self.drain_accepted:
                    self._client.drain()
                    self.drain_accepted = True
                self.latest = self._client.status()
            except Unreachable:
                pass  # It is starting, was killed by the scenario, or has ended: the next turn asks again.
            except Refused as error:
                self.drain_refused = error.text
            self._wake.wait(self._every_s)
