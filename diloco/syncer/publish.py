"""What the syncer sends to its sites: Watch streams, versions, and answers in the form of an earlier protocol.

Earlier protocols. Protocol 2 knows digests as SHA-256 only. Two are compared: the site compares a Pull's digest with
that of the values it computed, and the syncer compares the digest in the site's heartbeat with the published one. The
syncer computes the SHA-256 for these, once for each version. The site only passes all other digests on, so it gets them
as padded text.

Feeds. Watch streams carry small events to the sites; each stream has a bound.

Holdings. The published fragments and the latest down-links, which the syncer holds in memory for all readers.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.codec.base import bytes_of, digits, is_sha256
from diloco.codec.base import digest as digest_of
from diloco.sync.events import Fate, FateTold, FragmentStanding
from diloco.sync.options import PROTOCOL
from diloco.syncer.outer_step import merged_into
from diloco.wire.handlers import PullSource
from diloco.wire.messages import (
    Dropped,
    Published,
    PullAsk,
    PullHeader,
    Refusal,
    Status,
    WatchEvent,
    short_digest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.events import Reason
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.outer_step import OuterResult
    from diloco.syncer.snapshots import FragmentValues


T = TypeVar("T")
DIGESTS_KEPT = 256
"""Versions of each fragment whose digest is remembered: for sites that report theirs, and for pulls of protocol 2."""


def published(machine: OuterSync, fragment: int, version: int, digest: str) -> Published:
    """Return the event that announces a version, with the run's present state."""
    return Published(**asdict(machine.announced(fragment, version)), digest=digest)


def as_known(told: T, protocol: int) -> T:
    """Return the message ``told`` with digests in the form that a site of ``protocol`` can read.

    A protocol-2 site knows the SHA-256 of its own updates, and that is kept as it is. A newer process of the same site
    may have sent an update under the same sequence number: any other digest, padded with zeros to 64 digits, equals
    none that a protocol-2 site has computed.
    """
    if protocol >= PROTOCOL:
        return told
    known: Any = told
    if isinstance(known, tuple):
        return tuple(as_known(each, protocol) for each in known)  # type: ignore[return-value]
    if isinstance(known, Fate | Published | FragmentStanding) and not is_sha256(known.digest):
        known = replace(known, digest=digits(known.digest).ljust(64, "0"))
    for name in ("fate", "fates", "standings"):  # The fields of all these messages that hold others.
        if hasattr(known, name):
            known = replace(known, **{name: as_known(getattr(known, name), protocol)})
    return known  # type: ignore[no-any-return]


class EarlierDigests:
    """The SHA-256 of published values, computed when a protocol-2 site first needs it. Any thread may call."""

    def __init__(self, num_fragments: int) -> None:
        self._known: list[deque[tuple[int, str]]] = [deque(maxlen=DIGESTS_KEPT) for _ in range(num_fragments)]
        self._locks = [threading.Lock() for _ in range(num_fragments)]

    def compute(self, fragment: int, held: FragmentValues) -> None:
        """Make the SHA-256 of ``held`` known; the first call for a version reads all its values."""
        with self._locks[fragment]:
            if self.known(fragment, held.version, held.digest) is None:
                self._known[fragment].append((held.version, digest_of(held.published, like="0" * 64)))

    def known(self, fragment: int, version: int, digest: str) -> str | None:
        """Return the SHA-256 of a version with this ``digest``; None if it has not been computed."""
        if is_sha256(digest):
            return digest
        return dict(tuple(self._known[fragment])).get(version)


EVENTS_MAX = 4096
"""Events queued for a slow stream, besides those it begins with; beyond that the stream is ended."""


class Feed:
    """One Watch stream; satisfies ``wire.handlers.WatchFeed``."""

    def __init__(self, feeds: Feeds, site: str, incarnation: int, protocol: int) -> None:
        self.site = site
        self.incarnation = incarnation
        self._protocol = protocol
        self._feeds = feeds
        self._events: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
        self._behind = False
        # Counts of fates: queued by the decision loop, taken and written by the stream's own thread.
        self.told = self._taken = self.written = 0

    def put(self, event: WatchEvent) -> None:
        """Queue ``event``, however many are queued already."""
        self.told += isinstance(event, FateTold)
        self._events.put(event)

    def offer(self, event: WatchEvent) -> None:
        """Queue ``event``, or end the stream if it is too far behind; its next ``get`` raises that."""
        self.put(event)  # Also where that ends the stream: a fate that it misses counts, and is not written.
        if self._events.qsize() > EVENTS_MAX:
            self._behind = True
            self.close()

    def get(self, timeout_s: float) -> WatchEvent | None:
        """Return the next event, or None after ``timeout_s``.

        A stream that missed an event raises ``Refusal`` (UNAVAILABLE): its site joins again, and gets the full state.
        """
        self.written = self._taken  # The caller has written all earlier events.
        if self._behind:
            raise Refusal(Status.UNAVAILABLE, f"this stream is {EVENTS_MAX} events behind: join again")
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._taken += isinstance(event, FateTold)
        return as_known(event, self._protocol)

    def close(self) -> None:
        """End the stream from either side: nothing more is queued for it."""
        self._feeds.forget(self)


class Feeds:
    """All Watch streams."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # An offer may end its stream, which is then forgotten.
        self._feeds: list[Feed] = []
        self._unheard: set[str] = set()
        self._content: set[str] = set()  # The sites that report that they lack no fates.

    def open(self, site: str, incarnation: int, protocol: int = PROTOCOL) -> Feed:
        """Open a stream for ``site``, in the form of its ``protocol``."""
        feed = Feed(self, site, incarnation, protocol)
        with self._lock:
            self._feeds.append(feed)
            self._unheard.discard(site)  # A stream begins with the latest fates.
        return feed

    def forget(self, feed: Feed) -> None:
        """Remove the closed ``feed``; its site may lack unwritten fates, unless it reports that it lacks none.

        A site that knows its fates from a version or a join may close a stream that still holds some of them.
        """
        with self._lock:
            if feed not in self._feeds:
                return
            self._feeds.remove(feed)
            owes = feed.told > feed.written
            if owes and feed.site not in self._content and all(other.site != feed.site for other in self._feeds):
                self._unheard.add(feed.site)

    def says(self, site: str, *, lacks: bool) -> None:
        """Note that ``site``, which has left, may still lack fates, or has got all that it will ever get."""
        with self._lock:
            (self._unheard.add if lacks else self._unheard.discard)(site)
            (self._content.discard if lacks else self._content.add)(site)

    def standing(self) -> tuple[int, frozenset[str]]:
        """Return, as of one instant, the number of open streams and the sites that may have missed a fate.

        They had no stream, or it ended before the fate was written, and none opened since; or they report a lack.
        """
        with self._lock:
            return len(self._feeds), frozenset(self._unheard)

    def tell(self, event: WatchEvent, site: str | None = None) -> None:
        """Send ``event`` to every stream, or to those of ``site``; end a stream that is too far behind."""
        with self._lock:
            chosen = [feed for feed in self._feeds if site is None or feed.site == site]
            if isinstance(event, FateTold) and site is not None:
                self._content.discard(site)
                if not chosen:
                    self._unheard.add(site)
            for feed in chosen:
                feed.offer(event)

    def drop(self, site: str, incarnation: int, reason: Reason) -> None:
        """End the streams of ``site`` up to one incarnation, with the reason."""
        with self._lock:
            chosen = [feed for feed in self._feeds if feed.site == site and feed.incarnation <= incarnation]
        for feed in chosen:
            feed.put(Dropped(reason))


@dataclass(frozen=True, slots=True)
class Downlink:
    """The encoded step from the version before to ``version``; ``digest`` is that of the values it leads to."""

    version: int
    digest: str
    payload: bytes | memoryview


class Holdings:
    """The published values by fragment. Only the decision loop's thread calls the methods, except ``has_newer``, so
    that a pull sees one instant."""

    def __init__(self, values: Sequence[FragmentValues], down_codec: str, downlinks_kept: int) -> None:
        self.values = list(values)
        self.down_codec = down_codec
        self._downlinks: list[deque[Downlink]] = [deque(maxlen=downlinks_kept) for _ in values]
        self._digests: list[deque[tuple[int, str]]] = [
            deque([(each.version, each.digest)], maxlen=DIGESTS_KEPT) for each in values
        ]
        self._sites: dict[int, tuple[int, int]] = {}
        self._newer = threading.Condition()

    def take(self, fragment: int, result: OuterResult) -> None:
        """Set the fragment's newest version, computed now or again by a replay: its bytes are the same.

        A chain is sent only if it is shorter than the whole fragment. Twice that length is kept, so that an interrupted
        pull of a chain can go on after newer versions have come.
        """
        assert result.values.version == self.values[fragment].version + 1, result.values.version
        self.values[fragment] = result.values
        self._digests[fragment].append((result.values.version, result.values.digest))
        whole_bytes = result.values.published.numel() * 4
        links = self._downlinks[fragment]
        links.append(Downlink(result.values.version, result.values.digest, result.downlink))
        if len(result.downlink) >= whole_bytes:
            links.clear()
        while sum(len(each.payload) for each in links) > 2 * whole_bytes:
            links.popleft()
        with self._newer:
            self._newer.notify_all()

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        """Return whether a version newer than ``version`` exists, or does within ``timeout_s``; any thread may call."""
        with self._newer:
            return self._newer.wait_for(lambda: self.values[fragment].version > version, timeout_s)

    def differing(
        self, versions: Sequence[int], echoed: Sequence[int], earlier: EarlierDigests | None
    ) -> tuple[int, ...]:
        """Return the fragments for which a site holds other values than were published.

        ``echoed`` are the short digests of its values for ``versions``. A digest that is 0, or of a version not
        remembered here, is skipped. A site of protocol 2 has computed the ``earlier`` digests.
        """
        found: list[int] = []
        for fragment, (version, short) in enumerate(zip(versions, echoed, strict=False)):
            if not short or fragment >= len(self.values):
                continue
            digest = dict(self._digests[fragment]).get(version)
            if digest is not None and earlier is not None:
                digest = earlier.known(fragment, version, digest)
            if digest is not None and short_digest(digest) != short:
                found.append(fragment)
        return tuple(found)

    def begin_again(self, values: Sequence[FragmentValues]) -> None:
        """Set a new lineage's first ``values``: no chain leads to them from what was published before."""
        assert [held.version + 1 for held in self.values] == [first.version for first in values], "a version is missing"
        self.values = list(values)
        for links in self._downlinks:
            links.clear()
        self._sites.clear()

    def choose(self, ask: PullAsk, fates: tuple[Fate, ...], state: OuterState) -> PullSource:
        """Choose a pull's answer: a chain of down-links if that is shorter, else the whole fragment in fp32.

        ``state`` gives the epoch, and how many sites have updates in the version and not in the one before, as far as
        the fates that it keeps show.
        """
        held, fragment = self.values[ask.fragment], ask.fragment
        numel, version = held.published.numel(), ask.want_version or held.version
        links = [link for link in self._downlinks[fragment] if ask.have_version < link.version <= version]
        is_chain = len(links) == version - ask.have_version > 0
        parts: list[bytes | memoryview]
        if ask.want_version == 0 and ask.have_version == held.version:
            parts, whole, digest = [], False, held.digest
        elif is_chain and sum(len(link.payload) for link in links) < numel * 4:
            parts, whole, digest = [link.payload for link in links], False, links[-1].digest
        elif version == held.version:
            parts, whole, digest = [bytes_of(held.published)], True, held.digest
        else:
            raise Refusal(Status.NOT_FOUND, f"version {version} of fragment {fragment} cannot be sent any more")
        if self._sites.get(fragment, (-1, 0))[0] != version:  # Counted once for each version: all sites ask.
            self._sites[fragment] = version, len(merged_into(state, fragment, version))
        header = PullHeader(
            fragment=fragment,
            from_version=version if whole else ask.have_version,
            version=version,
            whole=whole,
            encoding="fp32" if whole else self.down_codec,
            numel=numel,
            payload_bytes=sum(len(part) for part in parts),
            part_bytes=tuple(len(part) for part in parts),
            digest=digest,
            payload_crc32=0,
            fates=fates,
            epoch=state.epoch,
            sites=self._sites[fragment][1],
        )
        return PullSource(header, parts)
