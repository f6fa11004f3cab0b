"""What a site of an earlier protocol is told, so that it can read it.

A field that is new is left at its default, which does not travel.  A reason that is new is told as the known one that
makes the site do the same: throw the progress away, or send it again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.sync.agreement import PROTOCOL
from diloco.sync.events import DISCARDING, Fate, FateTold, FragmentStanding, Reason
from diloco.wire.messages import Dropped, JoinReply, Published, PushResult, ReportReply, WatchEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

REASONS_OF_1 = frozenset(
    {
        Reason.STALE,
        Reason.OVERLOAD,
        Reason.GAP,
        Reason.NON_FINITE,
        Reason.OUTLIER,
        Reason.FENCED,
        Reason.NOT_JOINED,
        Reason.EVICTED,
        Reason.BAD_BASE,
        Reason.CONFLICT,
        Reason.FORGOTTEN,
        Reason.FINISHED,
        Reason.SUPERSEDED,
        Reason.FULL,
    }
)


def join_reply(reply: JoinReply, protocol: int) -> JoinReply:
    """The answer to a join."""
    if protocol >= PROTOCOL:
        return replace(reply, protocol=PROTOCOL)
    standings = tuple(_standing(standing, protocol) for standing in reply.standings)
    return replace(reply, standings=standings, settings=replace(reply.settings, keep_until_decided=False), protocol=0)


def push_result(result: PushResult, protocol: int) -> PushResult:
    """The answer to a push."""
    if protocol >= PROTOCOL:
        return result
    fate = result.fate and _fate(result.fate, protocol)
    return replace(result, reason=result.reason and _reason(result.reason), fate=fate, epoch=0)


def report_reply(reply: ReportReply, protocol: int) -> ReportReply:
    """The answer to a heartbeat."""
    return reply if protocol >= PROTOCOL else replace(reply, retake=())


def watch_event(event: WatchEvent, protocol: int) -> WatchEvent:
    """An event of the Watch stream."""
    if protocol >= PROTOCOL:
        return event
    match event:
        case Published():
            return replace(event, lineage=0)
        case FateTold():
            return FateTold(_fate(event.fate, protocol))
        case Dropped():
            return Dropped(_reason(event.reason))
        case _:
            return event


def fates(told: Iterable[Fate], protocol: int) -> tuple[Fate, ...]:
    """What became of updates."""
    return tuple(_fate(fate, protocol) for fate in told)


def _standing(standing: FragmentStanding, protocol: int) -> FragmentStanding:
    return replace(standing, fates=fates(standing.fates, protocol))


def _fate(fate: Fate, protocol: int) -> Fate:
    if protocol >= PROTOCOL or fate.reason is None:
        return fate
    return replace(fate, reason=_reason(fate.reason))


def _reason(reason: Reason) -> Reason:
    if reason in REASONS_OF_1:
        return reason
    return Reason.OUTLIER if reason in DISCARDING else Reason.OVERLOAD
