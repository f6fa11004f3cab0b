"""How the syncer tells its sites what happened: Watch streams, and answers that a site of an earlier protocol can read.

Earlier protocols.  Protocol 2 knows digests as SHA-256 only.  Such a site compares one with values that it has
computed, that of a Pull, and one with its own of the same values, in its heartbeat: the syncer computes those for it,
once for each version.  Such a site only passes the others on, and is told them as they can be written.

Feeds.  Watch streams carry small events to the sites, each stream with a bound.  ``Made`` wakes the pulls that wait for
a version.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.codec.base import digest as digest_of
from diloco.codec.base import digits, is_sha256
from diloco.sync.agreement import PROTOCOL
from diloco.sync.events import Fate, FateTold, FragmentStanding
from diloco.wire.messages import Dropped, JoinReply, Published, PushResult, Refusal, Status, WatchEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from diloco.sync.events import Reason
    from diloco.syncer.snapshots import FragmentValues

    pass

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


EVENTS_MAX = 4096
"""Events kept for a stream that is read too slowly, beside those it begins with; then it is ended."""


class Feed:
    """One stream; satisfies ``wire.service.WatchFeed``."""

    def __init__(self, feeds: Feeds, site: str, incarnation: int, protocol: int) -> None:
        self.site = site
        self.incarnation = incarnation
        self._protocol = protocol
        self._feeds = feeds
        self._events: queue.SimpleQueue[WatchEvent | None] = queue.SimpleQueue()
        self.closed = False
        self._behind = False
        # Fates: told by the decision loop, taken and written by the stream's own thread.
        self.told = self._taken = self._written = 0

    def put(self, event: WatchEvent) -> None:
        """Queue ``event``, whatever is queued already."""
        self.told += isinstance(event, FateTold)
        self._events.put(event)

    def offer(self, event: WatchEvent) -> None:
        """Queue ``event``; a stream that is too far behind is ended instead, and told so."""
        if self._events.qsize() < EVENTS_MAX:
            self._events.put(event)
        else:
            self._behind = True
            self.close()

    def get(self, timeout_s: float) -> WatchEvent | None:
        """The next event, or None after ``timeout_s`` or when closed.

        A stream that missed something ends with UNAVAILABLE: its site joins again, and hears how everything stands.
        """
        self._written = self._taken  # Who asks for the next one has written those before it.
        if self._behind:
            raise Refusal(Status.UNAVAILABLE, f"this stream is {EVENTS_MAX} events behind: join again")
        if self.closed and self._events.empty():
            return None
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._taken += isinstance(event, FateTold)
        return event and watch_event(event, self._protocol)

    @property
    def owes(self) -> bool:
        """Whether a fate was told to it that may have gone no further."""
        return self.told > self._written

    def close(self) -> None:
        """End the stream from either side."""
        self.closed = True
        self._feeds.forget(self)
        self._events.put(None)


class Made:
    """Wakes whoever waits for a version that is not made yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def tell(self) -> None:
        """A version was made."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, there: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``there`` says that it is, at most ``timeout_s``; what it says last."""
        with self._changed:
            return self._changed.wait_for(there, timeout_s)


class Feeds:
    """All streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: list[Feed] = []
        self._unheard: set[str] = set()
        self._content: set[str] = set()  # The sites that lack nothing, as they say themselves.

    def open(self, site: str, incarnation: int, protocol: int = PROTOCOL) -> Feed:
        """A new stream for ``site``, in words that its ``protocol`` knows."""
        feed = Feed(self, site, incarnation, protocol)
        with self._lock:
            self._feeds.append(feed)
            self._unheard.discard(site)  # A stream begins with the latest fates.
        return feed

    def forget(self, feed: Feed) -> None:
        """``feed`` is closed; what it had not written its site has not heard, unless it says that nothing is missing.

        A site that knows its fates by a version or by a join may close a stream that still has some of them.
        """
        with self._lock:
            if feed not in self._feeds:
                return
            self._feeds.remove(feed)
            if feed.owes and feed.site not in self._content and all(other.site != feed.site for other in self._feeds):
                self._unheard.add(feed.site)

    def says(self, site: str, *, lacks: bool) -> None:
        """``site``, which has said goodbye, still ``lacks`` fates, or has heard all that it will ever get."""
        with self._lock:
            (self._unheard.add if lacks else self._unheard.discard)(site)
            (self._content.discard if lacks else self._content.add)(site)

    def miss(self, sites: Iterable[str]) -> None:
        """``sites`` may lack fates that an earlier process decided: nobody knows what it has told them."""
        with self._lock:
            self._unheard.update(sites)

    def standing(self) -> tuple[int, frozenset[str]]:
        """Streams open now; and the sites that were told a fate which they may not have heard, as of the same instant.

        They had no stream, or theirs ended before it was written, and they have had none since; or they say so.
        """
        with self._lock:
            return len(self._feeds), frozenset(self._unheard)

    def tell(self, event: WatchEvent, site: str | None = None) -> None:
        """Send ``event`` to every stream, or to those of ``site``; one that is too far behind is ended."""
        with self._lock:
            chosen = [feed for feed in self._feeds if site is None or feed.site == site]
            if isinstance(event, FateTold) and site is not None:
                self._content.discard(site)
                if not chosen:
                    self._unheard.add(site)
                for feed in chosen:
                    feed.told += 1  # Here, so that one which ends before it is offered the fate has missed it.
        for feed in chosen:
            feed.offer(event)

    def drop(self, site: str, incarnation: int, reason: Reason) -> None:
        """End the streams of one incarnation, saying why."""
        with self._lock:
            chosen = [feed for feed in self._feeds if feed.site == site and feed.incarnation <= incarnation]
        for feed in chosen:
            feed.put(Dropped(reason))
