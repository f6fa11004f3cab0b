"""Watch streams: small events on their way to the sites, each stream with a bound."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from diloco.sync.agreement import PROTOCOL
from diloco.sync.events import FateTold
from diloco.syncer import protocols
from diloco.wire.messages import Dropped, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.events import Reason
    from diloco.wire.messages import WatchEvent

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

    def put(self, event: WatchEvent) -> None:
        """Queue ``event``, whatever is queued already."""
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
        if self._behind:
            raise Refusal(Status.UNAVAILABLE, f"this stream is {EVENTS_MAX} events behind: join again")
        if self.closed and self._events.empty():
            return None
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return event and protocols.watch_event(event, self._protocol)

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

    def open(self, site: str, incarnation: int, protocol: int = PROTOCOL) -> Feed:
        """A new stream for ``site``, in words that its ``protocol`` knows."""
        feed = Feed(self, site, incarnation, protocol)
        with self._lock:
            self._feeds.append(feed)
            self._unheard.discard(site)  # A stream begins with the latest fates.
        return feed

    def forget(self, feed: Feed) -> None:
        """``feed`` is closed."""
        with self._lock:
            if feed in self._feeds:
                self._feeds.remove(feed)

    def count(self) -> int:
        """Streams open now."""
        with self._lock:
            return len(self._feeds)

    def unheard(self) -> frozenset[str]:
        """The sites that had no stream when a fate was told, and have had none since."""
        with self._lock:
            return frozenset(self._unheard)

    def tell(self, event: WatchEvent, site: str | None = None) -> None:
        """Send ``event`` to every stream, or to those of ``site``; one that is too far behind is ended."""
        with self._lock:
            chosen = [feed for feed in self._feeds if site is None or feed.site == site]
            if isinstance(event, FateTold) and site is not None and not chosen:
                self._unheard.add(site)
        for feed in chosen:
            feed.offer(event)

    def drop(self, site: str, incarnation: int, reason: Reason) -> None:
        """End the streams of one incarnation, saying why."""
        with self._lock:
            chosen = [feed for feed in self._feeds if feed.site == site and feed.incarnation <= incarnation]
        for feed in chosen:
            feed.put(Dropped(reason))
