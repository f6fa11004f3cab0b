"""How fast a site's link is, measured by what the site does over it anyway."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from diloco.sync.links import LinkEstimator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.sync.links import LinkEstimate
    from diloco.wire.client import SyncClient


class LinkMeter:
    """Stands beside a client and takes the time of its calls.  Any thread may ask; each direction has one thread.

    A call that raises measures nothing: it says how long one waited, and not how fast the link is.
    """

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._estimator = LinkEstimator()

    def read(self) -> LinkEstimate:
        """What is known of the link by now."""
        with self._lock:
            return self._estimator.estimate()

    @contextmanager
    def control(self) -> Iterator[None]:
        """Around a small call."""
        began_ns = time.monotonic_ns()
        yield
        with self._lock:
            self._estimator.answered(time.monotonic_ns() - began_ns)

    @contextmanager
    def up(self) -> Iterator[None]:
        """Around one attempt to push."""
        began_ns, before = time.monotonic_ns(), self._client.bytes_up
        yield
        with self._lock:
            self._estimator.carried_up(self._client.bytes_up - before, time.monotonic_ns() - began_ns)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Around one attempt to pull."""
        began_ns, before = time.monotonic_ns(), self._client.bytes_down
        yield
        with self._lock:
            self._estimator.carried_down(self._client.bytes_down - before, time.monotonic_ns() - began_ns)

    def came(self, count: int, seconds: float) -> None:
        """So many bytes were waited for at the syncer, and came in ``seconds`` once they were there."""
        with self._lock:
            self._estimator.carried_down(count, int(seconds * 1e9), round_trips=0)
