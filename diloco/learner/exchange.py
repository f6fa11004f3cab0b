"""Carries out the effects of a site's state machine that concern tensors, and owns the background threads.

Encoding in place.  In lock-step the training thread waits for the syncer anyway, so an update is encoded from the
model's own memory, without a copy.  That memory must not change until the update is encoded, so the training thread
waits for that.

Exchange.  The tensors of the fragments that one rank owns.  At a boundary, in the training thread and with all ranks
of the site: measure, adopt, retake.  In background threads: encode, send, fetch.  When a background result changes the
tensors, the machine gets its event under the same lock.  ``Agent`` is the exchange of rank 0, which has the machine;
``Owner`` is that of any other rank, which talks to rank 0.

Owner.  A rank above 0 that owns fragments.  It holds their tensors, and the threads that encode, send and fetch; rank 0
holds the machine.  The machine's orders arrive over the channel and are executed one after the other: the training
thread, together with all ranks, executes those of a boundary, and later orders wait for it.  The owner reports its
background results over the channel, and changes its tensors only when rank 0 has confirmed that the machine has taken
the event.  So tensors and machine never disagree, just as if both were in one process.

Owners.  Rank 0's view of all owners: it sends the agent's orders for their fragments over the channels, and at a
boundary all ranks take part.  One thread for each owner reads what it sends.

Follower.  It takes part at each boundary, and does not talk to the syncer.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from diloco.codec.registry import LOSSLESS
from diloco.durable import PLAIN_DISK
from diloco.inner import GroupError
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo, Verdict
from diloco.learner.ranks import ADOPT, GO_ON, RETAKE, SEAL, STOP, WAIT, Orders, lend_a_hand
from diloco.learner.seal import Outbox, SealJob
from diloco.learner.tensors import AdoptOptions, Echo, SiteTensors, place_of
from diloco.learner.transfer import Participant
from diloco.sync.effects import Adopt, Fetch, Forget, Release, Retake, Seal, Send, StartOver
from diloco.sync.events import LearnerEvent, Sealed, VersionFetched
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import ABOVE_0, check_bounds
from diloco.sync.progress import LearnerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.holding import Holding
    from diloco.learner.ranks import Channel, Dealt, Words
    from diloco.learner.seal import Encoded
    from diloco.outer.fragments import Layout
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader, PushHeader


WITHOUT_LOSS = AdaptOptions(ways=(Way(LOSSLESS, 0),))


@dataclass(kw_only=True, slots=True)
class AgentOptions(AdoptOptions):
    """The options of a site's agent.  ``folder`` is the site's own; it holds the outbox and the odometer."""

    folder: str
    join_timeout_s: Annotated[float, ABOVE_0] = 60.0
    takeover: bool = False
    """Whether this process at once replaces a live process of its site that runs in another folder."""
    lock_step_timeout_s: Annotated[float, ABOVE_0] = 300.0
    """In lock-step: longest time without an answer of the syncer while this site waits for a version."""
    finish_timeout_s: Annotated[float, ABOVE_0] = 30.0
    """Longest wait at the end until all updates are accepted, and then again until their fates are known."""
    meter_every_s: Annotated[float, ABOVE_0] = 2.0
    adapt: AdaptOptions = WITHOUT_LOSS
    """Ways of sending to choose from by the measured link."""

    def __post_init__(self) -> None:
        check_bounds(self)


Change = Adopt | Retake | Seal
"""Effects that are carried out at a boundary."""
Beside = Fetch | Forget | Release | Send | StartOver
"""Effects that may be carried out at any time."""


class Exchange(Participant):
    """The exchange of one rank.  The subclasses ``Agent`` and ``Owner`` know where the machine is."""

    tensors: SiteTensors
    change: Callable[..., object]
    """Call a function and pass an event to the machine, atomically; see ``Agent.change``."""

    def __init__(
        self,
        options: AgentOptions,
        adopt: str,
        layout: Layout,
        holding: Holding,
        dealt: Dealt,
        orders: Orders,
        client: SyncClient,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        """``adopt`` is the rule of adopting; ``orders`` makes all ranks take part in changes of the model."""
        rank = holding.group.rank
        tensors = SiteTensors(layout, holding, adopt, options, place_of(holding.parts()), dealt.of(rank))
        outbox = Outbox(Path(options.folder) / "outbox", disk, settled=rank > 0)
        self.changed = threading.Condition(threading.RLock())
        """Held while the tensors, or the machine's state of them, change; never while waiting for others."""
        self._orders = orders
        self._unread: list[SealJob] = []  # Jobs that still read the model's own memory.
        super().__init__(client, options.adapt, outbox, tensors)

    def was_read(self, job: SealJob) -> None:
        """Note that ``job`` no longer reads the model's memory."""
        with self.changed:
            self._unread = [each for each in self._unread if each is not job]
            self.changed.notify_all()

    # --- at a boundary, in the training thread; the lock is held ------------------------------------------------------

    def at_boundary(self, effect: Change, codec: str = "", *, at_rest: bool = False) -> None:
        """Carry out an effect that reads or writes the model: adopt a version, retake one, or measure an update.

        A background thread encodes the update by ``codec``.  ``at_rest``: the model does not change meanwhile.
        """
        fragment, began_s = effect.fragment, time.perf_counter()
        match effect:
            case Adopt():
                with self._orders.all_do(ADOPT, fragment):
                    self.tensors.adopt(effect)
                facts: dict[str, object] = {"fragment": fragment, "version": effect.version}
                facts["seconds"] = round(time.perf_counter() - began_s, 6)
                self.emit("adopted", {**facts, "merged": list(effect.merged)})
            case Retake():
                with self._orders.all_do(RETAKE, fragment):
                    lost = self.tensors.retake(fragment, effect.version, effect.keep)
                self.emit("retaken", {"fragment": fragment, "version": effect.version, "why": effect.why, **lost})
            case Seal():
                with nullcontext() if self.tensors.is_here(fragment) else self._orders.all_do(SEAL, fragment):
                    inputs = self.tensors.measure(fragment, effect.in_flight, at_rest=at_rest)
                codec = LOSSLESS if fragment in self.tensors.layout.averaged else codec
                job = SealJob(effect, inputs, codec, time.perf_counter() - began_s)
                if inputs.in_place:
                    self._unread.append(job)
                self.sealer.queue.put(job)

    # --- at any time; the lock is held --------------------------------------------------------------------------------

    def order(self, effect: Beside) -> None:
        """Carry out an effect that does not touch the model."""
        match effect:
            case Send():
                self.sender.queue.put((effect.fragment, effect.sequence))
            case Forget():
                self.sealer.queue.put((effect.fragment, effect.sequence))
            case Release():
                self.tensors.release(effect.fragment, effect.sequence)
            case StartOver():
                self.tensors.latest[effect.fragment] = None  # It belongs to an abandoned lineage.
                self.emit("started_over", {"fragment": effect.fragment})
            case Fetch():
                self.fetcher.queue.put(effect.fragment)

    # --- background threads -------------------------------------------------------------------------------------------

    def keep_sealed(self, header: PushHeader, encoded: Encoded) -> None:
        """Store the values of a durable update and tell the machine, atomically."""
        key = header.fragment, header.sequence
        event = Sealed(*key, header.digest)
        self.change(partial(self.tensors.sealed, *key, encoded.sent, encoded.fed), event)

    def keep_fetched(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        """Store the values of a version fetched in ``lineage`` and tell the machine, atomically."""
        self.tensors.place.of(values)  # Copies to the model's device now, so that the adopt need not wait for it.
        keep = partial(self.tensors.arrived, event.fragment, event.version, values, told.digest, told.sites)
        self.change(keep, event, lineage, told)


ECHO_EVERY_S = 1.0


class Owner(Exchange):
    """The exchange of a rank above 0 that owns some fragments of one layout."""

    def __init__(
        self,
        options: AgentOptions,
        adopt: str,
        layout: Layout,
        holding: Holding,
        dealt: Dealt,
        client: SyncClient,
        restored: Mapping[str, Tensor] | None = None,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        """``restored`` are the tensors of a checkpoint, from any rank; rank 0 decides which of them are used."""
        self._channel, self._bound_s = dealt.channels[0], holding.group.timeout_s
        self._restored = restored or {}
        self._lost = ""
        self.known = LearnerState([])  # As last sent by rank 0.
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[queue.SimpleQueue[object], Callable[[], None] | None]] = {}
        self._due: queue.SimpleQueue[tuple[Change, str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._states: queue.SimpleQueue[dict[str, Tensor] | None] = queue.SimpleQueue()
        self.tell, self.emit = partial(self._post, "tell"), partial(self._post, "emit")
        self.rejoin, self.give_up = partial(self._post, "rejoin"), partial(self._post, "give_up")
        alone = Orders(SiteGroup(device="cpu"))  # Broadcasts nothing: only rank 0 orders all ranks to take part.
        super().__init__(options, adopt, layout, holding, dealt, alone, client, disk)
        self._channel.hear(self._hear, self._wake)
        self.begin_threads(self._echo)

    # --- the training thread ----------------------------------------------------------------------------------------

    def do(self) -> None:
        """Carry out the next boundary effect on a fragment of this rank.  For the training thread."""
        effect, codec = self._next(self._due)
        with self.changed:
            self.at_boundary(effect, codec)
        self._done.put(None)

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint tensors of this rank's fragments, consistent with the machine in that checkpoint."""
        found: dict[str, Tensor] = self._next(self._states)
        return found

    def close(self) -> None:
        """End the threads."""
        self._wake()
        self._done.put(None)  # The reading thread may wait for a boundary effect that ended in an error.
        self.end_threads()
        self._channel.close()

    def _next(self, what: queue.SimpleQueue[Any]) -> Any:
        try:
            found = what.get(timeout=self._bound_s)
        except queue.Empty:
            raise GroupError(
                f"rank 0 of this site announced an order and did not send it within {self._bound_s:g} s"
            ) from None
        if found is None:
            raise GroupError(f"the connection to rank 0 of this site is lost: {self._lost}")
        return found

    # --- the thread that hears rank 0 -------------------------------------------------------------------------------

    def _hear(self, words: Words) -> None:
        what, *rest = words
        match what:
            case "begin":
                versions, told, listed = rest
                with self.changed:
                    self.tensors.restore(self._restored, versions, told, listed)
                    self._restored = {}
                dropped = self.tensors.residuals.dropped
                if dropped:
                    self.emit("note", {"note": "residual_dropped", "why": "feedback was turned off since", **dropped})
            case "knows":
                (self.known.incarnation, self.known.epoch, self.known.lineage), taken_in = rest
                self.client.follow(taken_in)
            case "boundary":
                effect, codec = rest
                self._due.put((effect, codec))
                self._done.get()
            case "order":
                with self.changed:
                    self.order(rest[0])
            case "state":
                with self.changed:
                    self._states.put(self.tensors.tensors())
            case "answer":
                number, answer = rest
                asked = self._asked.get(number)
                if asked is not None:  # Otherwise this rank is ending: nothing reads its tensors any more.
                    answers, do = asked
                    if answer and do is not None:
                        with self.changed:
                            do()
                    answers.put(answer)
            case _:
                raise AssertionError(f"rank 0 says {what}")

    def _wake(self, lost: str = "") -> None:
        """End all waits; ``lost`` is why rank 0 is gone, if it is."""
        self._lost = lost or self._lost
        self.stopping.set()
        for waiting in (self._due, self._states):
            waiting.put(None)
        for answers, _ in list(self._asked.values()):
            answers.put(None)

    # --- what the background threads send ----------------------------------------------------------------------------

    def _post(self, what: str, *rest: object) -> None:
        self._channel.send(what, self.client.traffic, *rest)

    def _ask(self, what: str, *rest: object, do: Callable[[], None] | None = None) -> object:
        """Send a request to rank 0 and return its answer; None when rank 0 is gone.

        When rank 0 has agreed, the reading thread first calls ``do``, under ``changed``.
        """
        number, answers = next(self._numbers), queue.SimpleQueue[object]()
        self._asked[number] = answers, do
        try:
            self._post(what, number, *rest)
            return None if self.stopping.is_set() else answers.get()
        finally:
            del self._asked[number]

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """Ask rank 0 for the digest of an update that waits to be sent and answered; None when there is none."""
        found = self._ask("wanted", fragment, sequence)
        return None if found is None else str(found)

    def change(
        self, do: Callable[[], None], event: LearnerEvent, lineage: int = 0, told: PullHeader | None = None
    ) -> object:
        """Pass ``event`` to rank 0's machine; ``do`` is called once rank 0 has confirmed it."""
        return self._ask("change", event, lineage, told, do=do)

    def _echo(self) -> None:
        """Hash one base at a time, at intervals, for rank 0's heartbeat."""
        echo = Echo(self.tensors, self.changed)
        while not self.stopping.wait(ECHO_EVERY_S):
            found = echo.compute()
            if found is not None:
                self._post("echo", *found)


class Owners:
    """Rank 0's view of the owners above rank 0, for one agent.  Orders are sent under the agent's lock."""

    def __init__(self, dealt: Dealt, agent: Exchange, orders: Orders) -> None:
        self.owners, self._channels = dealt.owners, dealt.channels
        self._agent, self._tensors, self._client, self._orders = agent, agent.tensors, agent.client, orders
        self.lost = ""
        """Why a rank of the site is gone; empty while all are connected."""
        self.parting = False
        """Whether the site is ending: then a lost connection to a rank is not a failure."""
        # By fragment, the latest version that another rank has fetched.
        self._versions: list[int] = [-1] * len(dealt.owners)
        self._echoes: dict[int, tuple[int, int]] = {}
        self._bytes = dict.fromkeys(dealt.channels, (0, 0))
        self._known: object = None

    def begin(self, state: LearnerState) -> None:
        """Send the owners the machine's state of their fragments, and start to read what they send."""
        versions = [part.base_version for part in state.fragments]
        listed = {(index, sent.sequence) for index, part in enumerate(state.fragments) for sent in part.in_flight}
        self._versions = list(versions)
        for rank, channel in self._channels.items():
            channel.send("begin", versions, self._tensors.told_base, listed)
            channel.hear(partial(self._hear, rank), partial(self._gone, rank))

    def know(self, state: LearnerState) -> None:
        """Send the owners the run's incarnation, epoch and lineage if changed, before any order that may need them."""
        known = ((state.incarnation, state.epoch, state.lineage), self._client.taken_in)
        if known != self._known:
            self._known = known
            for channel in self._channels.values():
                channel.send("knows", *known)

    def at_boundary(self, effect: Change, codec: str = "", *, at_rest: bool = False) -> None:
        """Make the owner of a fragment run ``Exchange.at_boundary``, with all ranks taking part."""
        del at_rest  # The owner's model keeps changing.
        fragment, owner = effect.fragment, self.owners[effect.fragment]
        what = {Adopt: ADOPT, Retake: RETAKE, Seal: SEAL}[type(effect)]
        self._channels[owner].send("boundary", effect, codec)
        tensors = self._tensors
        with self._orders.all_do(what, fragment, owner):
            lend_a_hand(tensors.holding, tensors.layout, fragment, what, tensors.adopt_rule, owner)
        if not isinstance(effect, Seal):
            self._echoes.pop(fragment, None)  # It is of the base before, which may have had the same number.
            if effect.version == self._versions[fragment]:
                tensors.told_base[fragment] = tensors.told_latest[fragment]

    def order(self, effect: Beside) -> None:
        """Make the owner of a fragment carry out an effect that does not touch the model."""
        if isinstance(effect, StartOver):
            self._versions[effect.fragment] = -1
        self._channels[self.owners[effect.fragment]].send("order", effect)

    def capture(self) -> None:
        """Make each owner capture its part of a checkpoint, consistent with the machine's present state."""
        for channel in self._channels.values():
            channel.send("state")

    def digests(self, own: Sequence[int], state: LearnerState) -> tuple[int, ...]:
        """Return the base digests for a heartbeat; ``own`` are those of rank 0's fragments."""
        found = list(own)
        for fragment, (version, digest) in self._echoes.copy().items():  # Another thread may add one meanwhile.
            found[fragment] = digest if state.fragments[fragment].base_version == version else 0
        return tuple(found)

    def traffic(self) -> tuple[int, int]:
        """Return all ranks' bytes of Push messages, and of Pull messages."""
        ups, downs = zip(self._client.traffic, *self._bytes.values(), strict=True)
        return sum(ups), sum(downs)

    def close(self) -> None:
        """End the connections."""
        self.parting = True
        for channel in self._channels.values():
            channel.close()

    def _hear(self, rank: int, words: Words) -> None:
        what, self._bytes[rank], *rest = words
        channel = self._channels[rank]
        match what:
            case "change":
                number, event, lineage, told = rest
                if not self._agent.change(lambda: self._keep(channel, number, told), event, lineage, told):
                    channel.send("answer", number, False)
            case "wanted":
                number, fragment, sequence = rest
                channel.send("answer", number, self._agent.wanted(fragment, sequence))
            case "echo":
                fragment, version, digest = rest
                self._echoes[fragment] = (version, digest)
            case "tell" | "rejoin" | "give_up" | "emit":
                getattr(self._agent, what)(*rest)
            case _:
                raise AssertionError(f"rank {rank} says {what}")

    def _keep(self, channel: Channel, number: int, told: PullHeader | None) -> None:
        """Confirm a change to its owner before the machine's reaction to it is sent."""
        if told is not None and told.version >= self._versions[told.fragment]:
            self._versions[told.fragment] = told.version
            self._tensors.told_latest[told.fragment] = told.digest
        channel.send("answer", number, True)

    def _gone(self, rank: int, why: str) -> None:
        if not self.parting:
            with self._agent.changed:
                self.lost = f"rank {rank} of this site is gone: {why}"
                self._agent.changed.notify_all()


class Follower:
    """A rank above 0: at each boundary it takes part in what rank 0 does, for each of the site's agents."""

    def __init__(self, layouts: Sequence[Layout], holding: Holding, adopt: str, owned: Mapping[int, Owner]) -> None:
        """``layouts`` are those of rank 0's agents in order, ``adopt`` the rule by which they adopt.

        ``owned`` are this rank's owners, by the number of the agent; none for one whose fragments rank 0 owns alone.
        """
        self._layouts, self._holding, self._adopt, self._owned = layouts, holding, adopt, owned

    def after_step(self, info: StepInfo) -> Verdict:
        """Take part in this boundary."""
        return Verdict(not info.passes and self.follow(), "rank 0 stops")

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the checkpoint tensors of this rank's fragments; call it when rank 0's ``state`` is called."""
        parts = {at: owner.state() for at, owner in self._owned.items()}
        if len(self._layouts) == 1:
            return parts.get(0, {}), {}
        return {f"{at}.{name}": value for at, part in parts.items() for name, value in part.items()}, {}

    def finish(self) -> None:
        """Take part after the loop until rank 0 is done: it may need values held here to send the last updates."""
        while not self.follow():
            continue
        self.close()

    def close(self) -> None:
        """End the threads."""
        for owner in self._owned.values():
            owner.close()

    def follow(self) -> bool:
        """Take part in one boundary; return whether this rank is to stop.

        The first one is before the loop, when rank 0 adopts the first versions, or stops because it could not start.
        """
        group = self._holding.group
        while True:
            what, *which = group.broadcast_small([])
            if what in (GO_ON, STOP):
                return what == STOP
            if what == WAIT:
                continue
            part, fragment, owner = which
            if owner == group.rank:
                assert part in self._owned, f"rank 0 sent an order for agent {part}, of which this rank owns nothing"
                self._owned[part].do()
            else:
                lend_a_hand(self._holding, self._layouts[part], fragment, what, self._adopt, owner)
