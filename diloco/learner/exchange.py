"""Carries out what a site's machine orders of tensors, with the threads that make updates of them and move them.

Standstill.  Where the training thread waits for the syncer anyway, an update is made of the model's own memory, without
a copy.  That memory must not change until the update is encoded, so the thread that could change it stands still for
so long.

Exchange.  The tensors of the fragments that this rank owns.  At a boundary, in the training thread and with all ranks
of the site: measure, adopt, take anew.  Beside training: encode, send, fetch.  The machine is told of whatever was done
beside training at the instant at which the tensors change.

Exchanges.  All fragments of one agent, whichever rank owns them.  An order for a fragment of rank 0 is carried out
here; an order for another goes to its owner over the channel, and at a boundary all ranks take their part.  One thread
for each owner hears what it tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.learner.channel import ADOPT, RETAKE, SEAL, lend_a_hand
from diloco.learner.seal import SealedUpdate, Sealer, SealJob, encoders
from diloco.learner.transfer import Fetcher, Sender
from diloco.sync.effects import Adopt, Fetch, Forget, Release, Retake, Seal, Send, StartOver
from diloco.sync.events import LearnerEvent, Sealed, VersionFetched

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.learner.channel import Orders
    from diloco.learner.outbox import Outbox
    from diloco.learner.tensors import SiteTensors
    from diloco.learner.transfer import LinkUse
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader

    Emit = Callable[[str, dict[str, object]], None]
    from diloco.learner.channel import Channel, Dealt, Words
    from diloco.sync.progress import LearnerState


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


@dataclass(frozen=True, slots=True)
class Heard:
    """What is done with what the owners say."""

    change: Callable[[Callable[[], None], LearnerEvent, Source | None], bool]
    wanted: Callable[[int, int], str | None]
    tell: Callable[[LearnerEvent], None]
    rejoin: Callable[[str], None]
    give_up: Callable[[str], None]
    lost: Callable[[str], None]
    """A rank of the site is gone."""
    emit: Callable[[str, dict[str, object]], None]


class Exchanges:
    """Orders are given under the agent's lock."""

    def __init__(self, dealt: Dealt, exchange: Exchange, orders: Orders, client: SyncClient, heard: Heard) -> None:
        """``exchange`` is that of rank 0's own fragments."""
        self.owners, self._channels = dealt.owners, dealt.channels
        self._exchange, self._tensors = exchange, exchange.tensors
        self._orders, self._client, self._heard = orders, client, heard
        # The latest that was fetched, of what is owned elsewhere.
        self._versions: list[int] = [-1] * len(dealt.owners)
        self._echoes: dict[int, tuple[int, int]] = {}
        self._bytes = dict.fromkeys(dealt.channels, (0, 0))
        self._known: object = None
        self._parting = threading.Event()

    def begin(self, state: LearnerState) -> None:
        """Tell the owners what the machine knows of their fragments; hear them from now on."""
        versions = [part.base_version for part in state.fragments]
        listed = {(index, sent.sequence) for index, part in enumerate(state.fragments) for sent in part.in_flight}
        self._versions = list(versions)
        for rank, channel in self._channels.items():
            channel.send("begin", versions, self._tensors.told_base, listed)
            channel.hear(self._hearing(rank), self._losing(rank))

    def know(self, state: LearnerState) -> None:
        """What the machine knows of the run, before any order that may rest on it."""
        if not self._channels:
            return
        known = ((state.incarnation, state.epoch, state.lineage), self._client.taken_in)
        if known != self._known:
            self._known = known
            for channel in self._channels.values():
                channel.send("knows", *known)

    def adopt(self, effect: Adopt) -> None:
        """The model takes a version."""
        if self.owners[effect.fragment] == 0:
            self._exchange.adopt(effect)
        else:
            self._have_done(effect)

    def retake(self, effect: Retake) -> None:
        """The model takes a version, and what it has learned since is gone."""
        if self.owners[effect.fragment] == 0:
            self._exchange.retake(effect)
        else:
            self._have_done(effect)

    def seal(self, effect: Seal, codec: str, *, at_rest: bool) -> None:
        """Measure what an update is made of; the rest is done beside training.  No owner but rank 0 stands still."""
        if self.owners[effect.fragment] == 0:
            self._exchange.seal(effect, codec, at_rest=at_rest)
        else:
            self._have_done(effect, codec)

    def _have_done(self, effect: Adopt | Retake | Seal, codec: str = "") -> None:
        """The owner does it, and all ranks take their part."""
        fragment, owner = effect.fragment, self.owners[effect.fragment]
        what = {Adopt: ADOPT, Retake: RETAKE, Seal: SEAL}[type(effect)]
        self._channels[owner].send("boundary", effect, codec)
        with self._orders.all_do(what, fragment, owner):
            part = self._tensors.layout.fragments[fragment]
            lend_a_hand(self._tensors.holding, part, what, self._tensors.adopt_rule, owner)
        if isinstance(effect, Adopt) or (isinstance(effect, Retake) and effect.version == self._versions[fragment]):
            self._tensors.told_base[fragment] = self._tensors.told_latest[fragment]

    def order(self, effect: Beside) -> None:
        """What changes nothing in the model."""
        owner = self.owners[effect.fragment]
        if owner == 0:
            self._exchange.order(effect)
            return
        if isinstance(effect, StartOver):
            self._versions[effect.fragment] = -1
            self._echoes.pop(effect.fragment, None)
        self._channels[owner].send("order", effect)

    def capture(self) -> None:
        """Each owner's part of a checkpoint is as the machine knows it now."""
        for channel in self._channels.values():
            channel.send("state")

    def digests(self, own: tuple[int, ...], state: LearnerState) -> tuple[int, ...]:
        """What a heartbeat says of the bases, ``own`` being those that lie here."""
        found = list(own)
        for fragment, (version, digest) in self._echoes.items():
            found[fragment] = digest if state.fragments[fragment].base_version == version else 0
        return tuple(found)

    @property
    def bytes_up(self) -> int:
        """All ranks' bytes of Push messages."""
        return self._client.bytes_up + sum(up for up, _ in self._bytes.values())

    @property
    def bytes_down(self) -> int:
        """All ranks' bytes of Pull messages."""
        return self._client.bytes_down + sum(down for _, down in self._bytes.values())

    def part(self) -> None:
        """The site ends: that a rank goes is in order."""
        self._parting.set()

    def close(self) -> None:
        """End the connections."""
        self.part()
        for channel in self._channels.values():
            channel.close()

    def _hearing(self, rank: int) -> Callable[[Words], None]:
        channel = self._channels[rank]

        def hear(words: Words) -> None:
            what, self._bytes[rank], *rest = words
            match what:
                case "change":
                    number, event, source = rest
                    if not self._heard.change(lambda: self._keep(channel, number, event, source), event, source):
                        channel.send("changed", number, False)
                case "wanted":
                    number, fragment, sequence = rest
                    channel.send("answer", number, self._heard.wanted(fragment, sequence))
                case "echo":
                    fragment, version, digest = rest
                    self._echoes[fragment] = (version, digest)
                case "tell":
                    self._heard.tell(rest[0])
                case "rejoin":
                    self._heard.rejoin(rest[0])
                case "give_up":
                    self._heard.give_up(rest[0])
                case "emit":
                    self._heard.emit(*rest)
                case _:
                    raise AssertionError(f"rank {rank} says {what}")

        return hear

    def _keep(self, channel: Channel, number: int, event: LearnerEvent, source: Source | None) -> None:
        """The owner has its change before it hears of anything that the machine makes of it."""
        if isinstance(event, VersionFetched) and source is not None and event.version >= self._versions[event.fragment]:
            self._versions[event.fragment] = event.version
            self._tensors.told_latest[event.fragment] = source.digest
        channel.send("changed", number, True)

    def _losing(self, rank: int) -> Callable[[str], None]:
        def lost(why: str) -> None:
            if not self._parting.is_set():
                self._heard.lost(f"rank {rank} of this site is gone: {why}")

        return lost
