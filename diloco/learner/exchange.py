"""Carries out what a site's machine orders of tensors, with the threads that make updates of them and move them.

Standstill.  Where the training thread waits for the syncer anyway, an update is made of the model's own memory, without
a copy.  That memory must not change until the update is encoded, so the thread that could change it stands still for
so long.

Exchange.  The tensors of the fragments that one rank owns.  At a boundary, in the training thread and with all ranks
of the site: measure, adopt, take anew.  Beside training: encode, send, fetch.  The machine is told of whatever was done
beside training at the instant at which the tensors change.  ``Agent`` is the exchange of rank 0, which has the machine;
``Owner`` is that of any other rank, which speaks to rank 0.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.learner.channel import ADOPT, RETAKE, SEAL
from diloco.learner.seal import Participant, SealedUpdate, Sealer, SealJob, encoders
from diloco.learner.transfer import Fetcher, LinkUse, Sender
from diloco.sync.effects import Adopt, Fetch, Forget, Release, Retake, Seal, Send, StartOver
from diloco.sync.events import LearnerEvent, Sealed, VersionFetched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.learner.channel import Orders
    from diloco.learner.outbox import Outbox
    from diloco.learner.tensors import SiteTensors
    from diloco.sync.link import AdaptOptions
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader


class Standstill:
    """Counts what was sealed out of the model's own memory at a boundary and is not read yet."""

    def __init__(self, changed: threading.Condition, failed: Callable[[], bool]) -> None:
        """``changed`` is the agent's; once it has ``failed`` nobody changes the model, and nothing is waited for."""
        self._changed = changed
        self._failed = failed
        self._unread: list[SealJob] = []

    def begins(self, job: SealJob) -> None:
        """The lock is held."""
        if job.inputs.in_place:
            self._unread.append(job)

    def ends(self, job: SealJob) -> None:
        """The model's memory is read, or never will be.  From the sealer's thread."""
        with self._changed:
            self._unread = [each for each in self._unread if each is not job]
            self._changed.notify_all()

    def wait(self, until: float) -> None:
        """Stand still.  The lock is held, and given up meanwhile; ``TimeoutError`` when it takes too long."""
        read = lambda: not self._unread or self._failed()  # noqa: E731
        if not self._changed.wait_for(read, max(0.0, until - time.monotonic())):
            raise TimeoutError("this site waited in vain for its update to be encoded (lock_step)")


Change = Adopt | Retake | Seal
"""What is done at a boundary."""
Beside = Fetch | Forget | Release | Send | StartOver
"""What may be ordered at any time."""


@dataclass(frozen=True, slots=True)
class Source:
    """Of a version: the run's ``lineage`` when it was asked for, who gave it by ``epoch``, and the ``digest`` told."""

    lineage: int
    epoch: int
    digest: str


class Exchange(Participant):
    """One rank's.  ``Agent`` and ``Owner`` say where the machine is."""

    def __init__(
        self,
        run_id: str,
        site_id: str,
        site_tensors: SiteTensors,
        outbox: Outbox,
        orders: Orders,
        client: SyncClient,
        options: AdaptOptions,
    ) -> None:
        """``outbox`` is this rank's; ``orders`` has all ranks take their part in what is done with the model."""
        self.run_id, self.site_id, self.client = run_id, site_id, client
        self.tensors, self.outbox = site_tensors, outbox
        self.changed = threading.Condition(threading.RLock())
        """Held whenever the tensors, or what the machine knows of them, change; never while waiting for others."""
        self.stopping = threading.Event()
        self._orders = orders
        self.use = LinkUse(client, options, self.emit, self.tell)
        self._standstill = Standstill(self.changed, self.has_failed)
        coders = encoders(self.use.codecs, site_tensors)
        self.sealer = Sealer(self, coders, outbox, self._standstill.ends)
        self.fetcher = Fetcher(self, client, self.use.link, site_tensors)
        self.sender = Sender(self, client, self.use.link, outbox, self.fetcher.expect)
        self.threads: list[threading.Thread] = []

    def change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> object:
        """Have something done and the event of it told at one instant, unless it comes of another run or syncer."""
        raise NotImplementedError

    def has_failed(self) -> bool:
        """Whether the model is not changed any more, so that nothing is to be waited for."""
        raise NotImplementedError

    # --- threads ------------------------------------------------------------------------------------------------------

    def begin(self, *loops: Callable[[], None]) -> None:
        """Start the threads that encode, send and fetch, and one for each of ``loops``."""
        for loop in (self.sender.run, self.fetcher.run, self.sealer.run, *loops):
            thread = threading.Thread(target=self._guarded, args=(loop,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def end(self) -> None:
        """End them, once each is through with what it does; nothing is sent or fetched any more."""
        self.stopping.set()
        for orders in (self.sealer.queue, self.sender.queue, self.fetcher.queue):
            orders.put(None)
        self.client.close()
        for thread in self.threads:
            thread.join(10.0)

    def _guarded(self, loop: Callable[[], None]) -> None:
        """A thread that dies stops the site in words instead of leaving it half alive."""
        try:
            self.tensors.place.begin_thread()
            loop()
        except Exception as error:
            if not self.stopping.is_set():
                self.emit("note", {"note": "thread_died", "why": repr(error)})
                self.give_up(f"a thread of the agent failed: {error!r}")
                raise

    # --- at a boundary, in the training thread; the lock is held ------------------------------------------------------

    def at_boundary(self, effect: Change, codec: str = "", *, at_rest: bool = False) -> None:
        """Do what reads or writes the model: adopt a version, take one anew, or measure what an update is made of.

        An update is encoded by ``codec``, and beside training.  ``at_rest``: the model does not change meanwhile.
        """
        fragment = effect.fragment
        match effect:
            case Adopt():
                with self._orders.all_do(ADOPT, fragment):
                    self.tensors.adopt(fragment, effect.version, effect.merged, effect.fresh, effect.under_way)
                facts: dict[str, object] = {"fragment": fragment, "version": effect.version}
                self.emit("adopted", {**facts, "merged": list(effect.merged)})
            case Retake():
                lost = self.tensors.residuals.to_drop(fragment)
                with self._orders.all_do(RETAKE, fragment):
                    self.tensors.retake(fragment, effect.version, effect.keep)
                self.emit("retaken", {"fragment": fragment, "version": effect.version, "why": effect.why, **lost})
            case Seal():
                with nullcontext() if self.tensors.is_here(fragment) else self._orders.all_do(SEAL, fragment):
                    inputs = self.tensors.measure(fragment, effect.in_flight, at_rest=at_rest)
                job = SealJob(effect, inputs, codec)
                self._standstill.begins(job)
                self.sealer.queue.put(job)

    # --- at any time; the lock is held --------------------------------------------------------------------------------

    def order(self, effect: Beside) -> None:
        """Do what changes nothing in the model."""
        match effect:
            case Send():
                self.sender.queue.put((effect.fragment, effect.sequence))
            case Forget():
                self.sealer.queue.put((effect.fragment, effect.sequence))
            case Release():
                self.tensors.release(effect.fragment, effect.sequence)
            case StartOver():
                self.tensors.forget_latest(effect.fragment)
                self.emit("started_over", {"fragment": effect.fragment})
            case Fetch():
                self.fetcher.queue.put(effect.fragment)

    # --- beside training ----------------------------------------------------------------------------------------------

    def keep_sealed(self, sealed: SealedUpdate) -> None:
        """An update is durable: its values and the machine's knowledge of it come at one instant."""
        header = sealed.header

        def keep() -> None:
            self.tensors.sealed(header.fragment, header.sequence, sealed.sent, sealed.fed)

        self.change(keep, Sealed(header.fragment, header.sequence, header.digest), None)

    def keep_fetched(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        """A version is here, fetched in ``lineage``: its values and the machine's knowledge change at one instant."""
        self.tensors.place.of(values)  # On its way to the model already, while nobody waits.

        def keep() -> None:
            self.tensors.arrived(event.fragment, event.version, values, told.digest, told.sites)

        self.change(keep, event, Source(lineage, told.epoch, told.digest))
