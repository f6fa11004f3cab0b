"""The threads beside training: one sends, one fetches, one listens, one keeps in touch.

Each is a loop that takes work, makes one attempt at a time, waits with capped jittered back-off in between, and ends
when ``stopping`` is set.  None of them ever gives up on a syncer that is away (DESIGN section 5, "Waiting").
"""

from __future__ import annotations

import queue
import random
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import digest
from diloco.codec.feedback import follow
from diloco.codec.registry import make_codec
from diloco.sync.events import (
    FateTold,
    FinalAnnounced,
    Outcome,
    PushAnswered,
    Reason,
    VersionFetched,
    VersionPublished,
)
from diloco.wire.backoff import Backoff
from diloco.wire.messages import Dropped, Published, PullAsk, Refused, Unreachable
from diloco.wire.pulled import PullSink

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from torch import Tensor

    from diloco.learner.outbox import Outbox
    from diloco.learner.replica import Replica
    from diloco.sync.events import LearnerEvent
    from diloco.wire.client import SyncClient, WatchStream
    from diloco.wire.messages import PushResult, WatchEvent
    from diloco.wire.pulled import PulledVersion

IDLE_S = 0.5


class Pause:
    """Back-off that ends early when the agent stops."""

    def __init__(self, stopping: threading.Event, cap_s: float = 3.0) -> None:
        self._stopping = stopping
        self._backoff = Backoff(base_s=0.2, cap_s=cap_s)

    def wait(self, at_least_s: float | None = None) -> None:
        """Wait after one more failure."""
        self._stopping.wait(self._backoff.next_s(random.random(), at_least_s or 0.0))

    def reset(self) -> None:
        """Something worked."""
        self._backoff.reset()


class Sender:
    """Sends sealed updates, each until its definite answer."""

    def __init__(
        self,
        client: SyncClient,
        outbox: Outbox,
        incarnation: Callable[[], int],
        wanted: Callable[[int, int], bool],
        tell: Callable[[LearnerEvent], None],
        rejoin: Callable[[str], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        self._client = client
        self._outbox = outbox
        self._incarnation = incarnation
        self._wanted = wanted
        self._tell = tell
        self._rejoin = rejoin
        self._emit = emit
        self._stopping = stopping
        self.queue: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread."""
        while not self._stopping.is_set():
            try:
                fragment, sequence = self.queue.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            self._deliver(fragment, sequence)

    def _deliver(self, fragment: int, sequence: int) -> None:
        pause = Pause(self._stopping)
        while not self._stopping.is_set() and self._wanted(fragment, sequence):
            header, payload = self._outbox.get(fragment, sequence, self._incarnation())
            try:
                result = self._client.push(header, payload)
            except Unreachable as error:
                pause.wait(error.retry_after_s)
                continue
            except Refused as error:
                # Not an answer to this update but to this caller: what the syncer says at a join is clearer.
                self._rejoin(f"a push was refused: {error.text}")
                pause.wait()
                continue
            facts: dict[str, object] = {"fragment": fragment, "sequence": sequence, "outcome": result.outcome.value}
            reason = result.reason.value if result.reason else None
            self._emit("pushed", {**facts, "reason": reason, "bytes": len(payload)})
            if result.outcome is Outcome.RETRY:
                pause.wait()
                continue
            self._answered(fragment, sequence, result)
            return

    def _answered(self, fragment: int, sequence: int, result: PushResult) -> None:
        self._tell(PushAnswered(fragment, sequence, result.outcome, result.reason))
        if result.fate is not None:
            self._tell(FateTold(result.fate))


class Fetcher:
    """Fetches versions and brings them to what the site holds."""

    def __init__(
        self,
        client: SyncClient,
        run_id: str,
        site_id: str,
        replica: Replica,
        deliver: Callable[[Tensor, VersionFetched], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._site_id = site_id
        self._replica = replica
        self._deliver = deliver
        self._emit = emit
        self._stopping = stopping
        self._sinks: dict[int, PullSink] = {}
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread."""
        while not self._stopping.is_set():
            try:
                fragment = self.queue.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            self._fetch(fragment)

    def _fetch(self, fragment: int) -> None:
        pause = Pause(self._stopping)
        latest = self._replica.latest[fragment]
        have = latest[0] if latest is not None else -1
        sink = self._sinks.setdefault(fragment, PullSink())
        while not self._stopping.is_set():
            ask = PullAsk(self._run_id, self._site_id, fragment, have)
            try:
                pulled = self._client.pull(ask, sink)
            except (Unreachable, Refused) as error:
                pause.wait(getattr(error, "retry_after_s", None))
                continue
            values = self._values(fragment, pulled)
            if digest(values) != pulled.header.digest:
                # Whatever went wrong on the way here or there, the whole fragment puts it right, and it is said.
                why = f"fragment {fragment}: what differences gave is not version {pulled.header.version}"
                self._emit("note", {"note": "digest_differs", "why": f"{why}; fetching it whole"})
                have = -1
                continue
            facts: dict[str, object] = {"fragment": fragment, "version": pulled.header.version}
            self._emit("fetched", {**facts, "bytes": pulled.header.payload_bytes, "whole": pulled.header.whole})
            self._deliver(values, VersionFetched(fragment, pulled.header.version, pulled.header.fates))
            return

    def _values(self, fragment: int, pulled: PulledVersion) -> Tensor:
        if pulled.header.whole:
            return make_codec("fp32").decode(pulled.parts[0], pulled.header.numel)
        latest = self._replica.latest[fragment]
        if latest is None or latest[0] != pulled.header.from_version:
            return torch.empty(0)
        values = latest[1]
        codec = make_codec(pulled.header.encoding)
        for part in pulled.parts:
            values = follow(values, part, codec)
        return values


class Listener:
    """Follows the Watch stream; joins again whenever it breaks."""

    def __init__(
        self,
        client: SyncClient,
        incarnation: Callable[[], int],
        join: Callable[[], None],
        tell: Callable[[LearnerEvent], None],
        give_up: Callable[[str], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        self._client = client
        self._incarnation = incarnation
        self._join = join
        self._tell = tell
        self._give_up = give_up
        self._emit = emit
        self._stopping = stopping
        self._stream: WatchStream | None = None
        self.connected = False

    def run(self) -> None:
        """The thread.  The first join was made before it starts."""
        pause = Pause(self._stopping)
        joined = True
        while not self._stopping.is_set():
            try:
                if not joined:
                    self._join()
                    joined = True
                self._listen(pause)
                why = "the stream ended"
            except (Unreachable, Refused) as error:
                why = str(error)
            joined = False
            if self.connected:
                self.connected = False
                self._emit("disconnected", {"why": why})
            pause.wait()

    def _listen(self, pause: Pause) -> None:
        with self._client.watch(self._incarnation()) as stream:
            self._stream = stream
            for event in stream:
                if not self.connected:
                    self.connected = True
                    pause.reset()
                    self._emit("connected", {})
                self._take(event)
                if self._stopping.is_set():
                    return

    def _take(self, event: WatchEvent) -> None:
        if isinstance(event, Published):
            self._tell(
                VersionPublished(event.epoch, event.fragment, event.version, event.run_tokens, event.progress_ppm)
            )
        elif isinstance(event, FateTold | FinalAnnounced):
            self._tell(event)
        elif isinstance(event, Dropped):
            if event.reason is Reason.SUPERSEDED:
                self._give_up("another process now speaks for this site: is it started twice?")
            else:
                self._give_up(f"the syncer ended this site's part: {event.reason.value}")

    def wake(self) -> None:
        """End the present stream, so that the site joins again (or notices that it is stopping)."""
        if self._stream is not None:
            self._stream.cancel()
