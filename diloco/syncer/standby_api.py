"""What a standby answers before it is promoted: how it stands, and to everybody else that they must ask elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from diloco.syncer.agreeing import probed
from diloco.wire.messages import Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.syncer.standby import Standby
    from diloco.syncer.succession import Succession
    from diloco.wire.identity import Identity
    from diloco.wire.messages import JoinAsk, PullAsk, PushHeader, ReportInfo
    from diloco.wire.probing import ProbeAnswer, ProbeAsk


class StandbyApi:
    """Satisfies ``wire.service.SyncerApi``.  ``promoted`` is set when an operator wants the standby to take over."""

    def __init__(self, standby: Standby, primary: str, succession: Succession) -> None:
        self._standby = standby
        self._succession = succession
        self._primary = primary
        self.promoted = threading.Event()
        self.lossy = False
        self.complaints: Callable[[], list[str]] = list
        """Which files of identities cannot be used, as whoever serves this knows it."""

    def _elsewhere(self) -> NoReturn:
        raise Refusal(Status.UNAVAILABLE, f"this is the standby of {self._primary}: ask there")

    def join(self, request: JoinAsk, identity: Identity) -> NoReturn:
        """Not here."""
        del request, identity
        self._elsewhere()

    def open_push(self, header: PushHeader, identity: Identity) -> NoReturn:
        """Not here."""
        del header, identity
        self._elsewhere()

    def watch(self, site: str, incarnation: int, identity: Identity) -> NoReturn:
        """Not here."""
        del site, incarnation, identity
        self._elsewhere()

    def pull(self, ask: PullAsk, identity: Identity) -> NoReturn:
        """Not here: a version may be published there that has not come yet."""
        del ask, identity
        self._elsewhere()

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> NoReturn:
        """Not here."""
        del fragment, version, timeout_s
        self._elsewhere()

    def report(self, report: ReportInfo, identity: Identity) -> NoReturn:
        """Not here."""
        del report, identity
        self._elsewhere()

    def leave(self, site: str, incarnation: int, identity: Identity) -> NoReturn:
        """Not here."""
        del site, incarnation, identity
        self._elsewhere()

    def probe(self, ask: ProbeAsk, identity: Identity) -> ProbeAnswer:
        """A way that will count when this standby takes over."""
        del identity
        return replace(probed(self._standby.plan, ask), standby_of=self._primary)

    def status(self) -> dict[str, object]:
        """How the standby stands."""
        return {
            **self._standby.status(),
            "primary": self._primary,
            "lease": self._succession.status(),
            "identity_complaints": self.complaints(),
        }

    def drain(self) -> NoReturn:
        """Not here."""
        self._elsewhere()

    def evict(self, site: str) -> NoReturn:
        """Not here."""
        del site
        self._elsewhere()

    def readmit(self, site: str) -> NoReturn:
        """Not here."""
        del site
        self._elsewhere()

    def admit(self, site: str, fragment: int, sequence: int) -> NoReturn:
        """Not here."""
        del site, fragment, sequence
        self._elsewhere()

    def refuse(self, site: str, fragment: int, sequence: int) -> NoReturn:
        """Not here."""
        del site, fragment, sequence
        self._elsewhere()

    def snapshot(self) -> NoReturn:
        """It writes one where the syncer does."""
        self._elsewhere()

    def promote(self, *, lossy: bool) -> None:
        """Take over, as soon as what has come is carried out."""
        if not self._standby.ready:
            raise Refusal(Status.FAILED_PRECONDITION, "this standby has no state to go on from yet")
        if (why := self._succession.refusal(lossy=lossy)) is not None:
            raise Refusal(Status.FAILED_PRECONDITION, why)
        self.lossy = lossy
        self.promoted.set()

    def detach(self) -> NoReturn:
        """That is said to the syncer."""
        self._elsewhere()
