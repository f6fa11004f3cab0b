"""One payload on its way out over several streams: each chunk is dealt to whichever stream can take it next.

Parts of equal length would end when the slowest connection has brought its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.wire.chunks import tail_chunk
from diloco.wire.pacing import Pacer

if TYPE_CHECKING:
    from diloco.wire.chunks import Span
    from diloco.wire.messages import PullAsk, PullHeader

DEALS_KEPT = 16
"""Of each asker: a stream that comes when the others are through finds that nothing is left for it."""


class Deal:
    """A payload of ``payload_bytes`` for any number of streams, each in a thread of its own."""

    def __init__(self, payload_bytes: int, bytes_per_s: int) -> None:
        self._payload_bytes = payload_bytes
        self.pacer = Pacer(bytes_per_s)
        """Of all its streams together, so that what one does not take is another's."""
        self._lock = threading.Lock()
        self._at = 0
        self._streams = 0

    def join(self) -> None:
        """One stream more."""
        with self._lock:
            self._streams += 1

    def next(self, chunk_bytes: int) -> Span | None:
        """What a stream sends next, at most ``chunk_bytes`` of it; None when everything is dealt."""
        with self._lock:
            left = self._payload_bytes - self._at
            if not left:
                return None
            begin = self._at
            self._at += min(left, tail_chunk(chunk_bytes, left, self._streams))
            return begin, self._at


class Deals:
    """Those of all askers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, dict[tuple[int, ...], Deal]] = {}

    def join(self, asker: str, ask: PullAsk, header: PullHeader) -> Deal:
        """The one that ``asker`` calls ``ask.deal``; of another version than that of another stream it is another."""
        key = (ask.deal, header.fragment, header.from_version, header.version, header.whole, header.payload_bytes)
        with self._lock:
            mine = self._of.setdefault(asker, {})
            deal = mine.get(key)
            if deal is None:
                while len(mine) >= DEALS_KEPT:
                    del mine[next(iter(mine))]
                deal = mine[key] = Deal(header.payload_bytes, ask.bytes_per_s)
        deal.join()
        return deal
