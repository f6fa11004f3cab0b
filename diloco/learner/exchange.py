"""What a site's machine orders of tensors: they lie here, with the threads that make updates of them and move them.

At a boundary, in the training thread and with all ranks of the site: measure, adopt, take anew.  Beside training:
encode, send, fetch.  Whatever was done beside training is told to the machine at the instant at which the tensors
change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.learner.couriers import Fetcher, Sender
from diloco.learner.encoding import encoders
from diloco.learner.orders import ADOPT, RETAKE, SEAL
from diloco.learner.sealing import SealedUpdate, Sealer, SealJob
from diloco.sync.effects import Adopt, Fetch, Forget, Release, Retake, Seal, Send, StartOver
from diloco.sync.events import LearnerEvent, Sealed

if TYPE_CHECKING:
    import threading

    from torch import Tensor

    from diloco.learner.link_use import LinkUse
    from diloco.learner.orders import Orders
    from diloco.learner.outbox import Outbox
    from diloco.learner.site_tensors import SiteTensors
    from diloco.learner.standstill import Standstill
    from diloco.sync.events import VersionFetched
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader

    Emit = Callable[[str, dict[str, object]], None]

Beside = Fetch | Forget | Release | Send | StartOver
"""What may be ordered at any time."""


@dataclass(frozen=True, slots=True)
class Source:
    """Of a version: the run's ``lineage`` when it was asked for, who gave it by ``epoch``, and the ``digest`` told."""

    lineage: int
    epoch: int
    digest: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The site's machine, as those know it who do what it orders."""

    incarnation: Callable[[], int]
    epoch: Callable[[], int]
    lineage: Callable[[], int]
    wanted: Callable[[int, int], str | None]
    """The digest of an update that waits to be sent and answered; None when there is none by that number."""
    change: Callable[[Callable[[], None], LearnerEvent, Source | None], object]
    """Have something done and the event of it told at one instant, unless it comes of another run or syncer."""
    tell: Callable[[LearnerEvent], None]
    rejoin: Callable[[str], None]
    give_up: Callable[[str], None]


class Exchange:
    """The tensors, and the threads beside training."""

    def __init__(
        self,
        run_id: str,
        site_id: str,
        machine: Machine,
        site_tensors: SiteTensors,
        outbox: Outbox,
        orders: Orders,
        client: SyncClient,
        use: LinkUse,
        standstill: Standstill,
        emit: Emit,
        stopping: threading.Event,
    ) -> None:
        self.tensors, self._orders = site_tensors, orders
        self._machine, self._emit, self._use, self._standstill = machine, emit, use, standstill
        coders = encoders(use.codecs, site_tensors)
        tells = (self._keep_sealed, machine.tell, emit, stopping, standstill.ends)
        self.sealer = Sealer(run_id, site_id, coders, outbox, machine.incarnation, *tells)
        self.fetcher = Fetcher(
            client,
            use.link,
            run_id,
            site_id,
            site_tensors,
            machine.lineage,
            machine.epoch,
            self._deliver,
            emit,
            stopping,
        )
        self.sender = Sender(
            client,
            use.link,
            outbox,
            machine.incarnation,
            machine.epoch,
            machine.lineage,
            machine.wanted,
            self.fetcher.expect,
            machine.tell,
            machine.rejoin,
            machine.give_up,
            emit,
            stopping,
        )
        self.loops = (self.sender.run, self.fetcher.run, self.sealer.run)

    def close(self) -> None:
        """End the loops, once each is through with what it does."""
        for orders in (self.sealer.queue, self.sender.queue, self.fetcher.queue):
            orders.put(None)

    # --- at a boundary, in the training thread; the lock is held ------------------------------------------------------

    def adopt(self, effect: Adopt) -> None:
        """The model takes a version."""
        with self._orders.all_do(ADOPT, effect.fragment):
            self.tensors.adopt(effect.fragment, effect.version, effect.merged, effect.fresh, effect.under_way)
        facts: dict[str, object] = {"fragment": effect.fragment, "version": effect.version}
        self._emit("adopted", {**facts, "merged": list(effect.merged)})

    def retake(self, effect: Retake) -> None:
        """The model takes a version, and what it has learned since is gone."""
        lost = self.tensors.residuals.to_drop(effect.fragment)
        with self._orders.all_do(RETAKE, effect.fragment):
            self.tensors.retake(effect.fragment, effect.version, effect.keep)
        facts: dict[str, object] = {"fragment": effect.fragment, "version": effect.version, "why": effect.why}
        self._emit("retaken", {**facts, **lost})

    def seal(self, effect: Seal, codec: str, *, at_rest: bool) -> None:
        """Measure what an update is made of; the rest is done beside training."""
        alone = self.tensors.is_here(effect.fragment)
        with nullcontext() if alone else self._orders.all_do(SEAL, effect.fragment):
            inputs = self.tensors.measure(effect.fragment, effect.in_flight, at_rest=at_rest)
        job = SealJob(effect, inputs, codec)
        self._standstill.begins(job)
        self.sealer.queue.put(job)

    # --- at any time; the lock is held --------------------------------------------------------------------------------

    def order(self, effect: Beside) -> None:
        """What changes nothing in the model."""
        match effect:
            case Send():
                self.sender.queue.put((effect.fragment, effect.sequence))
            case Forget():
                self.sealer.queue.put((effect.fragment, effect.sequence))
            case Release():
                self.tensors.release(effect.fragment, effect.sequence)
            case StartOver():
                self.tensors.forget_latest(effect.fragment)
                self._emit("started_over", {"fragment": effect.fragment})
            case Fetch():
                self.fetcher.queue.put(effect.fragment)

    # --- beside training ----------------------------------------------------------------------------------------------

    def _keep_sealed(self, sealed: SealedUpdate) -> None:
        """An update is durable: its values and the machine's knowledge of it come at one instant."""
        header = sealed.header

        def keep() -> None:
            self.tensors.sealed(header.fragment, header.sequence, sealed.sent, sealed.fed)

        self._machine.change(keep, Sealed(header.fragment, header.sequence, header.digest), None)

    def _deliver(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        """A version is here, fetched in ``lineage``: its values and the machine's knowledge change at one instant."""
        self.tensors.place.of(values)  # On its way to the model already, while nobody waits.

        def keep() -> None:
            self.tensors.arrived(event.fragment, event.version, values, told.digest, told.sites)

        self._machine.change(keep, event, Source(lineage, told.epoch, told.digest))
