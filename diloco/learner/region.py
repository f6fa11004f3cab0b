"""A region's client of the syncer above it: a site without a training loop.

The region's syncer has the state machine and the values.  This module has the threads that encode, send, fetch, listen
and send heartbeats, the same as at any site.  What they receive goes to the machine as events, in order of arrival
(``Below``), and the machine's orders come back (``Above``); ``sync/region.py`` has both.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diloco.codec.base import bytes_of
from diloco.codec.registry import Coded, make_codec
from diloco.durable import PLAIN_DISK
from diloco.learner.seal import Outbox, SealJob
from diloco.learner.tensors import HOST, Place, SealInputs, Versions
from diloco.learner.transfer import LOOK_S, Listener, Participant, report_info, say_goodbye, with_room
from diloco.sync.effects import Fetch, Join, Leave, Release, Send, StartOver
from diloco.sync.events import (
    FateTold,
    JoinAnswered,
    PushAnswered,
    RegionEvent,
    Sealed,
    UpstreamFetched,
    UpstreamStarted,
    VersionPublished,
)
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import ABOVE_0, Bound, Count, check_bounds
from diloco.sync.progress import LearnerState
from diloco.sync.region import OUTBOX
from diloco.wire.messages import Refused, Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.trainer import Log
    from diloco.learner.seal import Encoded
    from diloco.outer.fragments import Layout
    from diloco.sync.effects import RegionEffect, Seal
    from diloco.sync.events import LearnerEvent, VersionFetched
    from diloco.sync.options import Agreement
    from diloco.sync.region import Below
    from diloco.sync.state import Part
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader, PushHeader

SHARE = Bound(lambda value: 0 < value <= 1, "above 0, to 1")


@dataclass(kw_only=True, slots=True)
class UpwardOptions:
    """``folder`` is the region's data folder, with its outbox; the other fields are those of ``UpstreamStarted``."""

    folder: str
    site: str
    updates: Count = 32
    alpha: Annotated[float, SHARE] = 0.25
    in_flight_max: Count = 2
    from_blend: bool = False
    up_codec: str = "fp32"
    finish_timeout_s: Annotated[float, ABOVE_0] = 20.0

    def __post_init__(self) -> None:
        make_codec(self.up_codec)
        check_bounds(self)


class Upward(Participant):
    """One region's client.  Use: ``begin``, ``start``, then ``seal`` and ``order`` as needed, ``finish``, ``close``."""

    def __init__(
        self,
        options: UpwardOptions,
        layout: Layout,
        agreement: Agreement,
        client: SyncClient,
        emit: Log,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        self._options, self._layout = options, layout
        self._below: Below
        self._say = emit
        self._leaving = threading.Event()
        self.known = LearnerState([])  # The upper syncer's lineage and epoch, and the region's incarnation there.
        outbox, versions = Outbox(Path(options.folder) / OUTBOX, disk), Versions(layout, Place(HOST))
        # By (fragment, sequence).  Each access is one operation of the dict, so threads need no lock.
        self._sent: dict[tuple[int, int], tuple[str, Coded]] = {}
        self._sending: set[tuple[int, int]] = set()
        super().__init__(client, AdaptOptions(ways=(Way(options.up_codec, 0),)), outbox, versions)
        self.listener = Listener(self, agreement)
        self.rejoin = self.listener.rejoin

    # --- what the region's syncer calls --------------------------------------------------------------------------

    def begin(self, below: Below, known: Sequence[Part]) -> UpstreamStarted:
        """Return the machine's first event; remove updates from the outbox that the machine does not list."""
        self._below = below
        # The machine would ignore a syncer older than these, so it must not be joined.
        self.known.lineage, self.known.epoch = max((each.learner.lineage, each.learner.epoch) for each in known)
        listed = {(index, sent.sequence): sent for index, each in enumerate(known) for sent in each.progress.in_flight}
        here = self.outbox.digests()
        kept = {key for key, sent in listed.items() if here.get(key) == sent.digest}
        self.outbox.clear(kept)
        for fragment, sequence in kept:
            header, payload = self.outbox.get(fragment, sequence)
            numel = self._layout.fragments[fragment].numel
            plain, raw = make_codec(header.encoding).opened(payload, numel)
            self._sent[fragment, sequence] = (header.digest, Coded(plain, raw, numel))
        outbox = tuple((*key, here[key]) for key in sorted(kept))
        options = self._options
        rules = (options.updates, options.alpha, options.in_flight_max)
        return UpstreamStarted(options.site, *rules, outbox, options.from_blend)

    def start(self) -> None:
        """Start the threads, which try to join without a limit; the syncer serves the region's own sites meanwhile."""
        self.begin_threads(self.listener.run, self._keep_in_touch)

    def seal(self, effect: Seal, reference: Tensor, values: Tensor) -> None:
        """Make an update of ``reference - values`` less the updates in flight."""
        since = [self._sent[effect.fragment, sequence][1] for sequence in effect.in_flight]
        inputs = SealInputs(reference, [values], since, in_place=True)  # These values no longer change.
        self.sealer.queue.put(SealJob(effect, inputs, self._options.up_codec))

    def order(self, effect: RegionEffect) -> None:
        """Carry out an order: send, fetch, release, start over, join again, or leave."""
        match effect:
            case Send():
                self._sending.add((effect.fragment, effect.sequence))
                self.sender.queue.put((effect.fragment, effect.sequence))
            case Release():
                self._sent.pop((effect.fragment, effect.sequence), None)
                self._sending.discard((effect.fragment, effect.sequence))
                self.sealer.queue.put((effect.fragment, effect.sequence))
            case Fetch():
                self.fetcher.queue.put(effect.fragment)
            case StartOver():
                self.tensors.latest[effect.fragment] = None
            case Join():
                self.rejoin(effect.why)
            case Leave():
                self._leaving.set()
            case _:
                raise AssertionError(effect)

    def finish(self) -> None:
        """Wait until the region has left, at most ``finish_timeout_s``."""
        if not self.left.wait(self._options.finish_timeout_s):
            why = f"the syncer above did not accept the last updates within {self._options.finish_timeout_s:g} s"
            self.emit("note", {"note": "not_finished", "why": why})

    def close(self) -> None:
        """End the threads."""
        self.stopping.set()
        self.listener.wake()
        self.end_threads()

    # --- what the threads call -----------------------------------------------------------------------------------

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """Return the digest of an update that waits to be sent and answered; None when there is no such update."""
        found = self._sent.get((fragment, sequence))
        return found[0] if found is not None and (fragment, sequence) in self._sending else None

    def tell(self, event: LearnerEvent) -> None:
        """Pass an event to the region's machine."""
        assert isinstance(event, RegionEvent), event
        if isinstance(event, PushAnswered):
            self._sending.discard((event.fragment, event.sequence))
        if isinstance(event, VersionPublished) and event.lineage in (0, self.known.lineage):
            self.known.epoch = max(self.known.epoch, event.epoch)
        known = self.known
        if isinstance(event, JoinAnswered) and (event.lineage, event.epoch) >= (known.lineage, known.epoch):
            known.lineage, known.epoch, known.incarnation = event.lineage, event.epoch, event.incarnation
        self._below.tell(event)

    def keep_sealed(self, header: PushHeader, encoded: Encoded) -> None:
        """Store an update that is durable, and tell the machine."""
        assert isinstance(encoded.sent, Coded), "it was encoded on the host, without feedback"
        self._sent[header.fragment, header.sequence] = (header.digest, encoded.sent)
        self.tell(Sealed(header.fragment, header.sequence, header.digest))

    def keep_fetched(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        """Make a fetched version durable, then tell the machine the fates that came with it, then the version."""
        keep = lambda: self._below.keep(event.fragment, bytes_of(values), told.digest)  # noqa: E731
        payload = with_room(self, "a version above", keep)
        if payload is None:
            return
        if lineage == self.known.lineage:
            self.tensors.latest[event.fragment] = (event.version, values)
        for fate in event.fates:
            # The machine knows the other fates, and each would add a record to its journal.
            if (event.fragment, fate.sequence) in self._sent:
                self._below.tell(FateTold(fate))
        self._below.tell(UpstreamFetched(event.fragment, event.version, payload, told.digest, lineage, told.epoch))

    def give_up(self, why: str) -> None:
        """Stop the region's syncer with the failure ``why``."""
        self._below.give_up(f"region {self.site_id} sends nothing more to the syncer above: {why}")

    def emit(self, what: str, facts: dict[str, object]) -> None:
        """Log an event as "upstream": under its own name it would look like an event of one of the region's sites."""
        self._say("upstream", {"event": what, "run": self.run_id, "site": self.site_id, **facts})

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def _keep_in_touch(self) -> None:
        next_report = time.monotonic()
        while not self.stopping.wait(LOOK_S):
            if self.left.is_set() or self.known.incarnation == 0:
                continue
            if self._leaving.is_set():
                if say_goodbye(self):
                    self.left.set()
                continue
            if time.monotonic() < next_report:
                continue
            next_report = time.monotonic() + self.listener.heartbeat_s
            standing = self._below.standing()
            if standing is None:
                continue
            info = report_info(self, standing, self.client.traffic)
            # When a heartbeat fails the Watch stream fails too, and the listener joins again when the syncer is back.
            with contextlib.suppress(Unreachable, Refused):
                reply = self.client.report(info)
                if not reply.known:
                    self.rejoin("the syncer does not know this process")
