"""What a site of an earlier protocol is told, so that it can read it.

Protocol 2 knows digests as SHA-256 only.  Such a site compares one with values that it has computed, that of a Pull,
and one with its own of the same values, in its heartbeat: those are computed for it here, once for each version.  The
others it only passes on, and is told them as they can be written.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.codec.contract import digest as digest_of
from diloco.codec.digests import digits, is_sha256
from diloco.sync.agreement import PROTOCOL
from diloco.sync.events import Fate, FateTold, FragmentStanding
from diloco.wire.messages import JoinReply, Published, PushResult, WatchEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from diloco.syncer.snapshots import FragmentValues

VERSIONS_KEPT = 256
"""Of each fragment, whose SHA-256 is remembered."""


def join_reply(reply: JoinReply, protocol: int) -> JoinReply:
    """The answer to a join."""
    if protocol >= PROTOCOL:
        return replace(reply, protocol=PROTOCOL)
    standings = tuple(_standing(standing, protocol) for standing in reply.standings)
    return replace(reply, standings=standings, protocol=protocol)


def push_result(result: PushResult, protocol: int) -> PushResult:
    """The answer to a push."""
    return replace(result, fate=_fate(result.fate, protocol)) if result.fate is not None else result


def watch_event(event: WatchEvent, protocol: int) -> WatchEvent:
    """An event of the Watch stream."""
    match event:
        case Published():
            return replace(event, digest=_digest(event.digest, protocol))
        case FateTold():
            return FateTold(_fate(event.fate, protocol))
        case _:
            return event


def fates(told: Iterable[Fate], protocol: int) -> tuple[Fate, ...]:
    """What became of updates."""
    return tuple(_fate(fate, protocol) for fate in told)


def _standing(standing: FragmentStanding, protocol: int) -> FragmentStanding:
    digest = _digest(standing.digest, protocol)
    return replace(standing, digest=digest, fates=fates(standing.fates, protocol))


def _fate(fate: Fate, protocol: int) -> Fate:
    """Of an update of its own the site knows the SHA-256, and is told that; another's process may have had the name."""
    return replace(fate, digest=_digest(fate.digest, protocol))


def _digest(digest: str, protocol: int) -> str:
    """With zeros behind it is 64 digits, and equal to none that a site of protocol 2 has computed."""
    return digest if protocol >= PROTOCOL or is_sha256(digest) else digits(digest).ljust(64, "0")


class EarlierDigests:
    """The SHA-256 of published values, computed when a site of protocol 2 first needs it; any thread may ask."""

    def __init__(self, num_fragments: int) -> None:
        self._known: list[deque[tuple[int, str]]] = [deque(maxlen=VERSIONS_KEPT) for _ in range(num_fragments)]
        self._locks = [threading.Lock() for _ in range(num_fragments)]

    def of(self, fragment: int, held: FragmentValues) -> str:
        """That of the values ``held``; a pass over all of them at the first time."""
        with self._locks[fragment]:
            found = self.known(fragment, held.version)
            if found is None:
                found = held.digest if is_sha256(held.digest) else digest_of(held.published, like="0" * 64)
                self._known[fragment].append((held.version, found))
            return found

    def known(self, fragment: int, version: int) -> str | None:
        """That of a version, where it has been computed."""
        return next((found for number, found in tuple(self._known[fragment]) if number == version), None)
