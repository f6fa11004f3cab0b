"""The threads beside training: one sends, one fetches, one listens, one keeps in touch.

Each is a loop that takes work, makes one attempt at a time, waits with capped jittered back-off in between, and ends
when ``stopping`` is set.  None of them ever gives up on a syncer that is away (DESIGN section 5, "Waiting").
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.learner.ahead import Ahead
from diloco.learner.incoming import Incoming
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
from diloco.wire.messages import Dropped, Published, PullAsk, Refused, Status, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.learner.incoming import Versions
    from diloco.learner.link_meter import LinkMeter
    from diloco.learner.outbox import Outbox
    from diloco.sync.events import LearnerEvent
    from diloco.wire.client import SyncClient, WatchStream
    from diloco.wire.messages import PullHeader, PushHeader, PushResult, WatchEvent
    from diloco.wire.pulled import PulledVersion, PullSink

LOOK_S = 0.1
MALFORMED_MAX = 3
"""Times that the syncer may find one update unreadable (bytes may change on the way) before the site stops in words."""


CAP_S = 3.0
CHOICE_CAP_S = 0.5
"""Where a standby may take over at any moment, all addresses are asked so often: it is what a failover costs a site."""


class Pause:
    """Back-off that ends early when the agent stops, and when another syncer than before has taken the site in."""

    def __init__(self, stopping: threading.Event, cap_s: float = CAP_S, epoch: Callable[[], int] = lambda: 0) -> None:
        self._stopping = stopping
        self._backoff = Backoff(base_s=0.2, cap_s=cap_s)
        self._epoch = epoch

    def wait(self, at_least_s: float | None = None) -> None:
        """Wait after one more failure."""
        epoch, left_s = self._epoch(), self._backoff.next_s(random.random(), at_least_s or 0.0)
        until = time.monotonic() + left_s
        while left_s > 0 and self._epoch() == epoch and not self._stopping.wait(min(left_s, LOOK_S)):
            left_s = until - time.monotonic()

    def reset(self) -> None:
        """Something worked."""
        self._backoff.reset()


@dataclass(slots=True)
class Later:
    """An update that the syncer did not want yet: sent again at ``until``, or when ``epoch`` is over."""

    backoff: Backoff
    until: float = 0.0
    epoch: int = 0


class Sender:
    """Sends sealed updates, each until its definite answer."""

    def __init__(
        self,
        client: SyncClient,
        link: LinkMeter,
        outbox: Outbox,
        incarnation: Callable[[], int],
        epoch: Callable[[], int],
        lineage: Callable[[], int],
        wanted: Callable[[int, int], str | None],
        expect: Callable[[int], None],
        tell: Callable[[LearnerEvent], None],
        rejoin: Callable[[str], None],
        give_up: Callable[[str], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        """``expect`` is told of a fragment whose update is about to be sent: a version of it is next."""
        self._client = client
        self._link = link
        self._outbox = outbox
        self._incarnation = incarnation
        self._epoch = epoch
        self._lineage = lineage
        self._wanted = wanted
        self._expect = expect
        self._tell = tell
        self._rejoin = rejoin
        self._give_up = give_up
        self._emit = emit
        self._stopping = stopping
        self.queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._later: dict[tuple[int, int], Later] = {}

    def run(self) -> None:
        """The thread; None in the queue ends it.  What the syncer wants later waits aside and holds back nothing."""
        while (order := self._next()) is not None:
            if self._deliver(*order):
                self._later.pop(order, None)
            else:
                later = self._later.setdefault(order, Later(Backoff(base_s=0.2, cap_s=CAP_S)))
                later.until = time.monotonic() + later.backoff.next_s(random.random())
                later.epoch = self._epoch()

    def _next(self) -> tuple[int, int] | None:
        while True:
            now, epoch = time.monotonic(), self._epoch()
            for order, later in self._later.items():
                if now >= later.until or later.epoch != epoch:
                    return order
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=LOOK_S if self._later else None)

    def _deliver(self, fragment: int, sequence: int) -> bool:
        """Send one update until its answer; False when the syncer wants it later."""
        pause = Pause(self._stopping, epoch=self._epoch)
        malformed = 0
        while not self._stopping.is_set():
            found = self._found(fragment, sequence)
            if found is None:
                return True
            header, payload = found
            self._expect(fragment)
            try:
                with self._link.up():
                    result = self._client.push(header, payload)
            except Unreachable as error:
                pause.wait(error.retry_after_s)
                continue
            except Refused as error:
                # Not an answer to this update but to this caller: what the syncer says at a join is clearer.
                malformed = malformed + 1 if error.status is Status.INVALID_ARGUMENT else 0
                if malformed >= MALFORMED_MAX:
                    self._give_up(f"the syncer cannot read update {sequence} of fragment {fragment}: {error.text}")
                    return True
                self._rejoin(f"a push was refused: {error.text}")
                pause.wait()
                continue
            facts: dict[str, object] = {"fragment": fragment, "sequence": sequence, "outcome": result.outcome.value}
            reason = result.reason.value if result.reason else None
            self._emit("pushed", {**facts, "reason": reason, "bytes": len(payload)})
            if result.outcome is Outcome.RETRY:
                return False  # What it waits for may stand behind it here.
            self._answered(header, result)
            return True
        return True

    def _found(self, fragment: int, sequence: int) -> tuple[PushHeader, memoryview] | None:
        """The update as it is in the outbox, if it is still the one that waits for an answer.

        A number that was refused is given again, and an order to send can outlive what it was given for.  So can all of
        it, where the run was restored: the lineage that it is sent in was asked for first.
        """
        lineage, wanted = self._lineage(), self._wanted(fragment, sequence)
        if wanted is None:
            return None
        try:
            mine = (fragment, sequence, self._incarnation())
            header, payload = self._outbox.fresh(*mine) or self._outbox.get(*mine)
        except FileNotFoundError:
            if self._wanted(fragment, sequence) == wanted:
                raise
            return None  # A join or a fate has answered it at this very moment.
        return (replace(header, lineage=lineage), payload) if header.digest == wanted else None

    def _answered(self, header: PushHeader, result: PushResult) -> None:
        answer = (result.outcome, result.reason, header.digest, result.epoch)
        self._tell(PushAnswered(header.fragment, header.sequence, *answer))
        if result.fate is not None and not 0 < result.epoch < self._epoch():
            self._tell(FateTold(result.fate))


class Fetcher:
    """Fetches versions and brings them to what the site holds."""

    def __init__(
        self,
        client: SyncClient,
        link: LinkMeter,
        run_id: str,
        site_id: str,
        site_tensors: Versions,
        lineage: Callable[[], int],
        epoch: Callable[[], int],
        deliver: Callable[[Tensor, VersionFetched, int, PullHeader], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        """``deliver`` gets a version, the lineage that it was asked for in, and what was told with it."""
        self._lineage = lineage
        self._epoch = epoch
        self._client = client
        self._link = link
        self._run_id = run_id
        self._site_id = site_id
        self._tensors = site_tensors
        self._deliver = deliver
        self._emit = emit
        self._stopping = stopping
        self._incoming: dict[int, tuple[int, Incoming]] = {}
        self._lock = threading.Lock()
        self._ahead: tuple[int, Ahead] | None = None  # With its lineage.
        self._at: int | None = None
        self.queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread; None in the queue ends it."""
        while (fragment := self.queue.get()) is not None:
            with self._lock:
                self._at = fragment
            self._fetch(fragment)
            self._at = None

    def expect(self, fragment: int) -> None:
        """There will soon be a version of ``fragment``: from now on one waits for it at the syncer.

        For one fragment at a time, and any thread; it never fails, and nothing hangs on it.
        """
        with self._lock:
            lineage, latest = self._lineage(), self._tensors.latest[fragment]
            waits = self._ahead is not None and not self._ahead[1].over
            if waits or latest is None or self._at == fragment or not self._client.has_patience:
                return
            ask = PullAsk(self._run_id, self._site_id, fragment, latest[0])
            self._ahead = (lineage, Ahead(self._client, ask, self._of(fragment, lineage).sink))

    def _expected(self, fragment: int, lineage: int, have: int) -> PulledVersion | None:
        """What was asked for ahead, if it is this."""
        with self._lock:
            if self._ahead is None or self._ahead[1].ask.fragment != fragment:
                return None
            (of, ahead), self._ahead = self._ahead, None
            if of != lineage or ahead.ask.have_version != have:
                self._incoming.pop(fragment, None)  # It writes to it.
                return None
        if (pulled := ahead.take()) is not None:
            self._link.came(pulled.header.payload_bytes, ahead.carried_s)
        return pulled

    def _fetch(self, fragment: int) -> None:
        pause = Pause(self._stopping, epoch=self._epoch)
        lineage = self._lineage()  # Asked first: what is read after it may be of a later one, never of an earlier.
        latest = self._tensors.latest[fragment]
        have = latest[0] if latest is not None else -1
        here = self._expected(fragment, lineage, have)
        incoming = self._of(fragment, lineage)
        # Once the run was restored another order is in the queue, and this one leads nowhere.
        while not self._stopping.is_set() and self._lineage() == lineage:
            ask = PullAsk(self._run_id, self._site_id, fragment, have)
            try:
                pulled, here = here or self._pull(ask, incoming.sink), None
            except (Unreachable, Refused) as error:
                pause.wait(getattr(error, "retry_after_s", None))
                continue
            values = incoming.values(pulled)
            incoming.sink.give_back(pulled)
            if values is None:
                # Whatever went wrong on the way here or there, the whole fragment puts it right, and it is said.
                why = f"fragment {fragment}: what came is not version {pulled.header.version}"
                self._emit("note", {"note": "digest_differs", "why": f"{why}; fetching it whole"})
                if pulled.header.whole:
                    pause.wait()
                have = -1
                continue
            if pulled.header.version <= have:
                pause.wait()  # We were told of a newer one that the syncer does not have: do not ask without end.
            facts: dict[str, object] = {"fragment": fragment, "version": pulled.header.version, "had": have}
            self._emit("fetched", {**facts, "bytes": pulled.header.payload_bytes, "whole": pulled.header.whole})
            event = VersionFetched(fragment, pulled.header.version, pulled.header.fates)
            self._deliver(values, event, lineage, pulled.header)
            return

    def _pull(self, ask: PullAsk, sink: PullSink) -> PulledVersion:
        with self._link.down():
            return self._client.pull(ask, sink)

    def _of(self, fragment: int, lineage: int) -> Incoming:
        """What has arrived of a pull that broke off, if it is of this lineage."""
        known = self._incoming.get(fragment)
        if known is None or known[0] != lineage:
            known = self._incoming[fragment] = (lineage, Incoming(fragment, self._tensors))
        return known[1]


class Listener:
    """Follows the Watch stream; joins again whenever it breaks, and when it is asked to."""

    def __init__(
        self,
        client: SyncClient,
        incarnation: Callable[[], int],
        join: Callable[[], None],
        left: Callable[[], bool],
        tell: Callable[[LearnerEvent], None],
        give_up: Callable[[str], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
    ) -> None:
        """``left``: goodbye is said, and another join would take it back."""
        self._client = client
        self._incarnation = incarnation
        self._join = join
        self._left = left
        self._tell = tell
        self._give_up = give_up
        self._emit = emit
        self._stopping = stopping
        self._stream: WatchStream | None = None
        self._join_wanted = threading.Event()
        self._refused = ""
        self.connected = False

    def run(self) -> None:
        """The thread.  The first join was made before it starts, unless the site trains on without."""
        pause = Pause(self._stopping, CHOICE_CAP_S if self._client.has_choice else CAP_S)
        joined = self._incarnation() > 0
        while not self._stopping.is_set():
            try:
                if self._join_wanted.is_set() or not joined:
                    self._join_wanted.clear()
                    if not self._left():
                        self._join()
                joined = True
                self._listen(pause)
                why = "the stream ended"
            except Unreachable as error:
                why = error.why
                self._say_once(error.refused)
            except Refused as error:
                why = error.text
                self._say_once(why)
                if error.final and not self._left():
                    self._give_up(why)
                    return
            joined = False
            if self.connected:
                self.connected = False
                self._emit("disconnected", {"why": why})
            pause.wait()

    def _say_once(self, refused: str) -> None:
        """Say what the site is refused for, until it is connected again or refused for something else."""
        if refused and refused != self._refused:
            self._refused = refused
            self._emit("note", {"note": "join_refused", "why": refused})

    def _listen(self, pause: Pause) -> None:
        with self._client.watch(self._incarnation()) as stream:
            self._stream = stream
            # Asked after the stream is known to ``wake``, so that a word from before it is not lost.
            if self._join_wanted.is_set() or self._stopping.is_set():
                return
            for event in stream:
                if not self.connected:
                    self.connected = True
                    self._refused = ""
                    pause.reset()
                    self._emit("connected", {})
                self._take(event)
                if self._stopping.is_set():
                    return

    def _take(self, event: WatchEvent) -> None:
        if isinstance(event, Published):
            run = (event.run_tokens, event.progress_ppm, event.lineage, event.fastest_step_ns)
            self._tell(VersionPublished(event.epoch, event.fragment, event.version, *run))
        elif isinstance(event, FateTold | FinalAnnounced):
            self._tell(event)
        elif isinstance(event, Dropped):
            if event.reason is Reason.SUPERSEDED:
                self._give_up("another process now speaks for this site: is it started twice?")
            else:
                self._give_up(f"the syncer ended this site's part: {event.reason.value}")

    def wake(self) -> None:
        """End the present stream, so that the site joins again (or notices that it is stopping)."""
        self._join_wanted.set()
        if self._stream is not None:
            self._stream.cancel()
