"""What the syncer's shell must offer so that ``server.serve`` can put it on the network.

Everything here is in plain dataclasses.  The methods are called from many threads at once, one per call of a client;
none may wait without a bound.  Each may raise ``Refusal``, which ends that call with the given status and text; any
other exception is logged with its traceback and answered INTERNAL, because it is our own defect.  Before a method is
called, the message was parsed and every bound checked, the caller's identity was established, and it was checked that
this identity may speak for the message's site and that the run is ours (but for Join, where the shell says in words
what differs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diloco.wire.messages import (
    JoinAsk,
    JoinReply,
    PullAsk,
    PullHeader,
    PushHeader,
    PushResult,
    ReportInfo,
    ReportReply,
    WatchEvent,
)

if TYPE_CHECKING:
    from diloco.wire.identity import Identity
    from diloco.wire.messages import ProbeAnswer, ProbeAsk


class PushSession(Protocol):
    """One admitted push.  Called by one thread at a time, in the order ``write`` ..., ``commit``, ``close``."""

    @property
    def offset(self) -> int:
        """Bytes that are held already, from an earlier push of the same id that broke off; 0 when none."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Keep ``data``, which stands at ``offset``: always the next byte.  Its checksum was checked."""
        ...

    def commit(self, digest: str) -> PushResult:
        """All bytes are there.  Check ``digest`` over all of them (Refusal DATA_LOSS), make it durable, answer."""
        ...

    def close(self) -> None:
        """Always called, once, last.  Without a ``commit`` before it the push was broken off and has not happened."""
        ...


class WatchFeed(Protocol):
    """The events for one site, taken by one thread."""

    def get(self, timeout_s: float) -> WatchEvent | None:
        """The next event, or None after ``timeout_s``.  After ``Dropped`` the stream ends.

        A newer Watch of the same site ends this one; raise ``Refusal`` to end it otherwise.
        """
        ...

    def close(self) -> None:
        """The watcher is gone.  Always called, once, last."""
        ...


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class PullSource:
    """A version ready to be sent: ``parts`` have the lengths ``header.part_bytes``; ``close`` gives them back.

    ``close`` is always called, once.
    """

    header: PullHeader
    parts: Sequence[bytes | memoryview]
    close: Callable[[], None] = _nothing


class SyncerApi(Protocol):
    """The syncer behind the network."""

    def join(self, request: JoinAsk, identity: Identity) -> JoinReply:
        """Take a learner process in.  Refuses with FAILED_PRECONDITION (the text names the field), PERMISSION_DENIED
        (evicted), ALREADY_EXISTS (superseded) or RESOURCE_EXHAUSTED (full); the last three with their reason."""
        ...

    def open_push(self, header: PushHeader, identity: Identity) -> PushSession | PushResult:
        """Admit an update before its first payload byte, answer at once (duplicate, refused), or refuse.

        An older push of the same (site, fragment, sequence) was ended before, and its session closed.
        """
        ...

    def watch(self, site: str, incarnation: int, identity: Identity) -> WatchFeed:
        """The events for ``site`` from now on."""
        ...

    def pull(self, ask: PullAsk, identity: Identity) -> PullSource:
        """The version asked for.  The header and parts are those of the whole payload, whatever part of it is asked
        for; ``payload_crc32`` need not be told to who speaks protocol 3.

        Refuses with NOT_FOUND for an unknown fragment, and when ``want_version`` cannot be had with the same bytes any
        more (the client then begins anew).
        """
        ...

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        """Whether ``pull`` has something newer than ``version``, or has it within ``timeout_s``.

        Refuses with NOT_FOUND for an unknown fragment."""
        ...

    def report(self, report: ReportInfo, identity: Identity) -> ReportReply:
        """A heartbeat."""
        ...

    def leave(self, site: str, incarnation: int, identity: Identity) -> None:
        """``site`` says goodbye."""
        ...

    def probe(self, ask: ProbeAsk, identity: Identity) -> ProbeAnswer:
        """What a join of somebody who asks so would be refused for, and who answers here; changes nothing.

        Whom the caller is taken for and the clock are filled in by who calls this.
        """
        ...

    def status(self) -> dict[str, object]:
        """How the run stands; made of what JSON can carry."""
        ...

    def drain(self) -> None:
        """Begin the last round."""
        ...

    def evict(self, site: str) -> None:
        """Put ``site`` out of the run.  NOT_FOUND when there is no such site."""
        ...

    def readmit(self, site: str) -> None:
        """Let a site that was put out join again.  NOT_FOUND when there is no such site."""
        ...

    def admit(self, site: str, fragment: int, sequence: int) -> None:
        """Let a held update be merged.  NOT_FOUND when there is none, FAILED_PRECONDITION when it is too late."""
        ...

    def refuse(self, site: str, fragment: int, sequence: int) -> None:
        """An accepted update is never merged.  Refused as ``admit`` is."""
        ...

    def snapshot(self) -> None:
        """Write a snapshot now; returns when it is durable."""
        ...

    def promote(self, *, lossy: bool) -> None:
        """A standby takes over; ``lossy``: also where it may lack something that was acknowledged."""
        ...

    def detach(self) -> None:
        """Go on without a standby until one has caught up."""
        ...
