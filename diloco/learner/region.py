"""A region's end towards the syncer above it: a site without a training loop.

The machine is the region's syncer's, and so are the values.  Here are the threads that encode, send, fetch, listen and
send heartbeats, which are those of any site.  What they hear goes to the machine as events, in the order in which it
came (``Below``), and what the machine orders comes back (``Above``); ``sync/region.py`` has both.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec.base import bytes_of
from diloco.codec.buffers import Buffers
from diloco.codec.registry import Coded, make_codec
from diloco.durable import PLAIN_DISK
from diloco.learner.outbox import Outbox
from diloco.learner.seal import Encoder, SealedUpdate, Sealer, SealJob, with_room
from diloco.learner.tensors import HOST, SPARE_MAX, Place, SealInputs
from diloco.learner.transfer import Fetcher, Joiner, LinkMeter, Listener, Sender
from diloco.sync.effects import Fetch, Join, Leave, Release, Send, StartOver
from diloco.sync.events import (
    FateTold,
    PushAnswered,
    RegionEvent,
    Sealed,
    UpstreamFetched,
    UpstreamStarted,
    VersionPublished,
)
from diloco.sync.progress import LearnerState, SentState
from diloco.sync.region import OUTBOX
from diloco.wire.messages import Refused, ReportInfo, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.outer.fragments import Layout
    from diloco.sync.agreement import Agreement
    from diloco.sync.effects import RegionEffect, Seal
    from diloco.sync.events import LearnerEvent, VersionFetched
    from diloco.sync.region import Below
    from diloco.sync.state import Part
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader

    Emit = Callable[[str, dict[str, object]], None]

TURN_S = 0.1


@dataclass(kw_only=True, slots=True)
class UpwardOptions:
    """``folder`` is that of the region's data, with its outbox; the other fields as ``UpstreamStarted`` has them."""

    folder: str
    site: str
    updates: int = 32
    alpha: float = 0.25
    in_flight_max: int = 2
    from_blend: bool = False
    up_codec: str = "fp32"
    finish_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        make_codec(self.up_codec)
        if self.updates < 1:
            raise ValueError(f"updates is {self.updates!r}: at least 1")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha!r}: above 0, to 1")
        if self.in_flight_max < 1:
            raise ValueError(f"in_flight_max is {self.in_flight_max!r}: at least 1")
        if not self.finish_timeout_s > 0:
            raise ValueError(f"finish_timeout_s is {self.finish_timeout_s!r}: positive")


class Versions:
    """The versions above that are here, as the fetcher needs them (``transfer.Versions``)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.buffers = Buffers(SPARE_MAX)
        self.latest: list[tuple[int, Tensor] | None] = [None for _ in layout.fragments]


class Upward:
    """One region's.  Use: ``begin``, ``start``, then ``seal`` and ``order`` as told, ``finish``, ``close``."""

    def __init__(
        self,
        options: UpwardOptions,
        layout: Layout,
        agreement: Agreement,
        client: SyncClient,
        emit: Emit,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        self.run_id, self.site_id = agreement.run_id, options.site
        self._options, self._layout, self._client = options, layout, client
        self._below: Below
        self._say = emit
        self._lock = threading.Lock()
        self.stopping, self._leaving, self._left = threading.Event(), threading.Event(), threading.Event()
        self._known = LearnerState([])  # What is known of the one above, and as what it knows the region.
        self._heartbeat_s = 1.0
        self._outbox = Outbox(Path(options.folder) / OUTBOX, disk)
        self._sent: dict[tuple[int, int], tuple[str, Coded]] = {}
        self._sending: set[tuple[int, int]] = set()
        self._versions, link = Versions(layout), LinkMeter(client)
        self._link = link
        self._encoder = Encoder(make_codec(options.up_codec), Place(HOST), self._versions.buffers)
        self._sealer = Sealer(self, [self._encoder], self._outbox)
        self._fetcher = Fetcher(self, client, link, self._versions)
        self._sender = Sender(self, client, link, self._outbox, self._fetcher.expect)
        self._joiner = Joiner(self, client, agreement, layout, self._encoder)
        self._listener = Listener(self, client)
        loops = (self._sealer.run, self._fetcher.run, self._sender.run, self._listener.run, self._keep_in_touch)
        self._threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]

    # --- as the region's syncer knows it -------------------------------------------------------------------------

    def begin(self, below: Below, known: Sequence[Part]) -> UpstreamStarted:
        """What the machine is told first; of the updates in the outbox those stay that it knows of."""
        self._below = below
        # A syncer of before that would be passed over by the machine: it must not be joined.
        self._known.lineage, self._known.epoch = max((each.learner.lineage, each.learner.epoch) for each in known)
        listed = {(index, sent.sequence): sent for index, each in enumerate(known) for sent in each.progress.in_flight}
        here = self._outbox.digests()
        told = {key: sent for key, sent in listed.items() if sent.state is not SentState.SEALING}
        kept = {key for key, sent in told.items() if here.get(key) == sent.digest}
        self._outbox.clear(kept)
        for fragment, sequence in kept:
            self._sent[fragment, sequence] = (here[fragment, sequence], self._decodable(fragment, sequence))
        outbox = tuple((*key, here[key]) for key in sorted(kept))
        options = self._options
        rules = (options.updates, options.alpha, options.in_flight_max)
        return UpstreamStarted(options.site, *rules, outbox, options.from_blend)

    def _decodable(self, fragment: int, sequence: int) -> Coded:
        """What an update in the outbox says."""
        header, payload = self._outbox.get(fragment, sequence, 0)
        numel = self._layout.fragments[fragment].numel
        return Coded(*make_codec(header.encoding).opened(payload, numel), numel)

    def start(self) -> None:
        """Join, and go on joining for as long as it takes: the region's own sites are served meanwhile."""
        for thread in self._threads:
            thread.start()

    def seal(self, effect: Seal, reference: Tensor, values: Tensor) -> None:
        """Make an update: ``reference - values``, less what was sent since that."""
        with self._lock:
            since = [self._sent[effect.fragment, sequence][1] for sequence in effect.in_flight]
        inputs = SealInputs(reference, [values], since, in_place=True)  # Nobody writes to them any more.
        self._sealer.queue.put(SealJob(effect, inputs, self._encoder.codec.name))

    def order(self, effect: RegionEffect) -> None:
        """Send, fetch, let go, join again, or say goodbye."""
        match effect:
            case Send():
                self._sending.add((effect.fragment, effect.sequence))
                self._sender.queue.put((effect.fragment, effect.sequence))
            case Release():
                with self._lock:
                    self._sent.pop((effect.fragment, effect.sequence), None)
                self._sending.discard((effect.fragment, effect.sequence))
                self._sealer.queue.put((effect.fragment, effect.sequence))
            case Fetch():
                self._fetcher.queue.put(effect.fragment)
            case StartOver():
                self._versions.latest[effect.fragment] = None
            case Join():
                self.rejoin(effect.why)
            case Leave():
                self._leaving.set()
            case _:
                raise AssertionError(effect)

    def finish(self) -> None:
        """Wait until goodbye is said, at most ``finish_timeout_s``."""
        if not self._left.wait(self._options.finish_timeout_s):
            why = f"the syncer above has not taken what was left in {self._options.finish_timeout_s:g} s"
            self.emit("note", {"note": "not_finished", "why": why})

    def close(self) -> None:
        """End the threads."""
        self.stopping.set()
        for orders in (self._sealer.queue, self._sender.queue, self._fetcher.queue):
            orders.put(None)
        self._listener.wake()
        self._client.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10.0)

    # --- what the threads ask and tell ---------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """See ``Participant``, here and in what follows."""
        return self._known.incarnation

    @property
    def epoch(self) -> int:
        """Of the latest syncer above."""
        return self._known.epoch

    @property
    def lineage(self) -> int:
        """Of the run above."""
        return self._known.lineage

    @property
    def left(self) -> bool:
        """Whether goodbye is said."""
        return self._left.is_set()

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """The digest of an update that waits to be sent and answered."""
        with self._lock:
            found = self._sent.get((fragment, sequence))
        return found[0] if found is not None and (fragment, sequence) in self._sending else None

    def tell(self, event: LearnerEvent) -> None:
        """Hand an event to the region's machine."""
        assert isinstance(event, RegionEvent), event
        if isinstance(event, PushAnswered):
            self._sending.discard((event.fragment, event.sequence))
        if isinstance(event, VersionPublished) and event.lineage in (0, self._known.lineage):
            self._known.epoch = max(self._known.epoch, event.epoch)
        self._below.tell(event)

    def keep_sealed(self, sealed: SealedUpdate) -> None:
        """An update is durable."""
        header = sealed.header
        assert isinstance(sealed.sent, Coded), "it was encoded on the host, without feedback"
        with self._lock:
            self._sent[header.fragment, header.sequence] = (header.digest, sealed.sent)
        self.tell(Sealed(header.fragment, header.sequence, header.digest))

    def keep_fetched(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        """A version is here: durable first, then the machine hears of it, and before it of the fates as of then."""
        keep = lambda: self._below.keep(event.fragment, bytes_of(values), told.digest)  # noqa: E731
        payload = with_room(self, "a version above", keep)
        if payload is None:
            return
        if lineage == self._known.lineage:
            self._versions.latest[event.fragment] = (event.version, values)
        with self._lock:  # Of the others the machine knows: each would be one more record in its journal.
            fates = [fate for fate in event.fates if (event.fragment, fate.sequence) in self._sent]
        for fate in fates:
            self._below.tell(FateTold(fate))
        self._below.tell(UpstreamFetched(event.fragment, event.version, payload, told.digest, lineage, told.epoch))

    def join(self) -> None:
        """One attempt; raises ``Unreachable`` or ``Refused``."""
        reply, answered = self._joiner.attempt()
        self._heartbeat_s = reply.settings.heartbeat_ns / 1e9
        known = self._known
        if (answered.lineage, answered.epoch) >= (known.lineage, known.epoch):
            known.lineage, known.epoch, known.incarnation = answered.lineage, answered.epoch, answered.incarnation
        self._below.tell(answered)

    def rejoin(self, why: str) -> None:
        """Join again, soon."""
        self.emit("note", {"note": "rejoin", "why": why})
        self._listener.wake()

    def give_up(self, why: str) -> None:
        """The region's syncer ends, in words."""
        self._below.give_up(f"the syncer above has no more of region {self.site_id}: {why}")

    def emit(self, what: str, facts: dict[str, object]) -> None:
        """All under one name: what these threads say of a site would be taken for one of the region's own."""
        self._say("upstream", {"event": what, **facts})

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            if not self.stopping.is_set():
                self._below.give_up(f"a thread that speaks to the syncer above failed: {error!r}")
                raise

    # --- keeping in touch ----------------------------------------------------------------------------------------

    def _keep_in_touch(self) -> None:
        next_report = time.monotonic()
        while not self.stopping.wait(TURN_S):
            if self._left.is_set() or self._known.incarnation == 0:
                continue
            if self._leaving.is_set():
                self._say_goodbye()
            elif time.monotonic() >= next_report:
                next_report = time.monotonic() + self._heartbeat_s
                self._report()

    def _say_goodbye(self) -> None:
        try:
            self._client.leave(self._known.incarnation)
        except Unreachable:
            return  # Asked again at the next turn.
        except Refused as error:
            self.emit("note", {"note": "leave_refused", "why": error.text})
        self._left.set()

    def _report(self) -> None:
        standing = self._below.standing()
        if standing is None:
            return
        ledger, versions = standing.ledger, standing.versions
        info = ReportInfo(
            run_id=self.run_id,
            site_id=self.site_id,
            incarnation=self._known.incarnation,
            step=standing.steps,
            tokens_processed=ledger.processed,
            tokens_unsent=ledger.unsent,
            tokens_in_flight=ledger.in_flight,
            tokens_overwritten=ledger.overwritten,
            tokens_lost=ledger.lost,
            loss=None,
            tokens_per_s=0.0,
            step_ns=standing.step_ns,
            train_ns=0,
            stall_ns=0,
            bytes_up=self._client.bytes_up,
            bytes_down=self._client.bytes_down,
            versions=versions if min(versions) >= 0 else (),
        )
        try:
            with self._link.control():
                reply = self._client.report(info)
        except (Unreachable, Refused):
            return  # The Watch stream notices as well, and joins again when the one above is back.
        if not reply.known:
            self.rejoin("the syncer does not know this process")
