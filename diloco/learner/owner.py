"""The ranks of a site above 0: they follow rank 0, and own fragments where the fragments are dealt to the ranks.

Owner.  A rank above 0 that owns fragments.  It holds their tensors, and the threads that encode, send and fetch.  The
machine is rank 0's.  The machine's orders come over the channel and are done in that order, one after the other: the
training thread does those that belong to a boundary, with all ranks, and later orders wait until that is done.  What
the owner does beside training it tells over the channel, and it changes its tensors when rank 0 has said that the
machine knows of it.  So tensors and machine never differ in what they know, as little as where both are in one process.

Owners.  All of these, as rank 0 knows them: the agent's orders for their fragments go to them over the channel, and at
a boundary all ranks take their part.  One thread for each hears what it tells.

Follower.  It takes part at each boundary, and does not speak to the syncer.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.durable import PLAIN_DISK
from diloco.inner.parallel import GroupError, SiteGroup
from diloco.inner.trainer import StepInfo, Verdict
from diloco.learner.channel import ADOPT, RETAKE, SEAL, Orders, lend_a_hand, take_part
from diloco.learner.exchange import Exchange
from diloco.learner.heartbeat import Echo
from diloco.learner.outbox import Outbox
from diloco.learner.tensors import SiteTensors
from diloco.sync.effects import Adopt, Retake, Seal, StartOver
from diloco.sync.events import VersionFetched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.holding import Holding
    from diloco.learner.channel import Channel, Dealt, Words
    from diloco.learner.exchange import Beside, Change, Source
    from diloco.learner.options import AgentOptions
    from diloco.outer.fragments import Layout
    from diloco.sync.events import LearnerEvent
    from diloco.sync.progress import LearnerState
    from diloco.wire.client import SyncClient

ECHO_EVERY_S = 1.0


class Owner(Exchange):
    """Of some fragments of one layout, on a rank above 0."""

    def __init__(
        self,
        options: AgentOptions,
        adopt: str,
        layout: Layout,
        holding: Holding,
        dealt: Dealt,
        client: SyncClient,
        run_id: str,
        site_id: str,
        restored: Mapping[str, Tensor] | None = None,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        """``restored`` are the tensors of a checkpoint, whoever wrote them; what of them counts is rank 0's to say."""
        rank = holding.group.rank
        tensors = SiteTensors.of(options, adopt, layout, holding, dealt.of(rank))
        self._channel, self._bound_s = dealt.channels[0], holding.group.timeout_s
        self._restored = restored or {}
        self._lost = ""
        self._knows = (0, 0, 0)  # Incarnation, epoch, lineage.
        self._numbers, self._answers = itertools.count(), dict[int, queue.SimpleQueue[object]]()
        self._changes: dict[int, Callable[[], None]] = {}
        self._due: queue.SimpleQueue[tuple[Change, str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._states: queue.SimpleQueue[dict[str, Tensor] | None] = queue.SimpleQueue()
        self._versions = [-1] * len(layout.fragments)
        outbox = Outbox(Path(options.folder) / "outbox", disk, settled=True)
        alone = Orders(SiteGroup(device="cpu"))  # It is rank 0 that has all take their part.
        super().__init__(run_id, site_id, tensors, outbox, alone, client, options.choices())
        self._channel.hear(self._hear, self._without_rank_0)
        self.begin(self._echo)

    # --- the training thread ----------------------------------------------------------------------------------------

    def do(self) -> None:
        """What this boundary brings to a fragment of this rank."""
        effect, codec = self._next(self._due)
        with self.changed:
            self.at_boundary(effect, codec)
            if not isinstance(effect, Seal):
                self._versions[effect.fragment] = effect.version
        self._done.put(None)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of this rank's fragments, as the machine of the same checkpoint knows them."""
        found: dict[str, Tensor] = self._next(self._states)
        return found

    def close(self) -> None:
        """End the threads."""
        self.stopping.set()
        for answers in list(self._answers.values()):
            answers.put(None)
        self._done.put(None)  # What a boundary ordered may have ended in an error, and what hears rank 0 waits for it.
        self.end()
        self._channel.close()

    def _next(self, what: queue.SimpleQueue[Any]) -> Any:
        try:
            found = what.get(timeout=self._bound_s)
        except queue.Empty:
            raise GroupError(
                f"rank 0 of this site has ordered something and not said what ({self._bound_s:g} s)"
            ) from None
        if found is None:
            raise GroupError(f"rank 0 of this site is not heard any more: {self._lost}")
        return found

    # --- the thread that hears rank 0 -------------------------------------------------------------------------------

    def _hear(self, words: Words) -> None:
        what, *rest = words
        match what:
            case "begin":
                versions, told, listed = rest
                with self.changed:
                    self.tensors.restore(self._restored, versions, told)
                    self._versions = list(versions)
                    for key in [key for key in self.tensors.sent if key not in listed]:
                        self.tensors.release(*key)
                    self._restored = {}
                dropped = self.tensors.residuals.dropped()
                if dropped:
                    self.emit("note", {"note": "residual_dropped", "why": "feedback was turned off since", **dropped})
            case "knows":
                self._knows, taken_in = rest
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
            case "changed":
                number, keep = rest
                change = self._changes.pop(number)
                if keep:
                    with self.changed:
                        change()
                self._answer(number, keep)
            case "answer":
                self._answer(*rest)
            case _:
                raise AssertionError(f"rank 0 says {what}")

    def _answer(self, number: int, answer: object) -> None:
        asked = self._answers.get(number)
        if asked is not None:  # Else this rank is ending, and waits for nothing.
            asked.put(answer)

    def _without_rank_0(self, why: str) -> None:
        self._lost = why
        self.stopping.set()
        for waiting in (self._due, self._states):
            waiting.put(None)
        for answers in list(self._answers.values()):
            answers.put(None)

    # --- what the threads beside training say -------------------------------------------------------------------------

    def _post(self, what: str, *rest: object) -> None:
        self._channel.send(what, (self.client.bytes_up, self.client.bytes_down), *rest)

    def _ask(self, what: str, *rest: object, change: Callable[[], None] | None = None) -> object:
        """Say something that rank 0 answers, and wait for it; None when there is no rank 0 any more."""
        number, answers = next(self._numbers), queue.SimpleQueue[object]()
        self._answers[number] = answers
        if change is not None:
            self._changes[number] = change
        try:
            self._post(what, number, *rest)
            return None if self.stopping.is_set() else answers.get()
        finally:
            del self._answers[number]

    @property
    def incarnation(self) -> int:
        """As rank 0 has said, and what follows."""
        return self._knows[0]

    @property
    def epoch(self) -> int:
        """See ``Participant``, here and below."""
        return self._knows[1]

    @property
    def lineage(self) -> int:
        """That of the run."""
        return self._knows[2]

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """Rank 0 knows."""
        found = self._ask("wanted", fragment, sequence)
        return None if found is None else str(found)

    def change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> object:
        """``do`` is called when rank 0 has said that the machine takes the event."""
        return self._ask("change", event, source, change=do)

    def tell(self, event: LearnerEvent) -> None:
        """The machine is rank 0's."""
        self._post("tell", event)

    def emit(self, what: str, facts: dict[str, object]) -> None:
        """The log is rank 0's."""
        self._post("emit", what, facts)

    def rejoin(self, why: str) -> None:
        """Rank 0 joins."""
        self._post("rejoin", why)

    def give_up(self, why: str) -> None:
        """Rank 0 ends the site."""
        self._post("give_up", why)

    def has_failed(self) -> bool:
        """Whether rank 0 is gone."""
        return bool(self._lost)

    def _echo(self) -> None:
        """Hash a base now and then, for rank 0's heartbeat."""
        echo = Echo(len(self.tensors.base))
        next_s = time.monotonic()
        while not self.stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = time.monotonic() + ECHO_EVERY_S
            fragment = echo.next_fragment()
            if fragment is None:
                continue
            with self.changed:
                base, told = self.tensors.base[fragment], self.tensors.told_base[fragment]
                version = self._versions[fragment]
            echo.compute(base, told)
            if base is not None:
                self._post("echo", fragment, version, echo.digests(self.tensors.base)[fragment])


class Owners:
    """The ranks above 0 of one agent, as rank 0 knows them.  Orders are given under the agent's lock."""

    def __init__(self, dealt: Dealt, agent: Exchange, orders: Orders, lost: Callable[[str], None]) -> None:
        """``lost`` is told why, when a rank of the site is gone."""
        self.owners, self._channels = dealt.owners, dealt.channels
        self._agent, self._tensors, self._client, self._orders = agent, agent.tensors, agent.client, orders
        self._lost = lost
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

    def have(self, fragment: int) -> bool:
        """Whether a rank above 0 owns ``fragment``."""
        return self.owners[fragment] > 0

    def at_boundary(self, effect: Change, codec: str) -> None:
        """The owner of a fragment does what ``Exchange.at_boundary`` says, and all ranks take their part."""
        fragment, owner = effect.fragment, self.owners[effect.fragment]
        what = {Adopt: ADOPT, Retake: RETAKE, Seal: SEAL}[type(effect)]
        self._channels[owner].send("boundary", effect, codec)
        with self._orders.all_do(what, fragment, owner):
            part = self._tensors.layout.fragments[fragment]
            lend_a_hand(self._tensors.holding, part, what, self._tensors.adopt_rule, owner)
        if isinstance(effect, Adopt) or (isinstance(effect, Retake) and effect.version == self._versions[fragment]):
            self._tensors.told_base[fragment] = self._tensors.told_latest[fragment]

    def order(self, effect: Beside) -> None:
        """The owner of a fragment does what changes nothing in the model."""
        if isinstance(effect, StartOver):
            self._versions[effect.fragment] = -1
            self._echoes.pop(effect.fragment, None)
        self._channels[self.owners[effect.fragment]].send("order", effect)

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
                    if not self._agent.change(lambda: self._keep(channel, number, event, source), event, source):
                        channel.send("changed", number, False)
                case "wanted":
                    number, fragment, sequence = rest
                    channel.send("answer", number, self._agent.wanted(fragment, sequence))
                case "echo":
                    fragment, version, digest = rest
                    self._echoes[fragment] = (version, digest)
                case "tell":
                    self._agent.tell(rest[0])
                case "rejoin":
                    self._agent.rejoin(rest[0])
                case "give_up":
                    self._agent.give_up(rest[0])
                case "emit":
                    self._agent.emit(*rest)
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
                self._lost(f"rank {rank} of this site is gone: {why}")

        return lost


class Follower:
    """Ranks above 0 of a site: they take part at each boundary in what rank 0 does, for each of the site's agents."""

    def __init__(
        self, layouts: Sequence[Layout], holding: Holding, adopt: str, owned: Sequence[Owner | None] = ()
    ) -> None:
        """``layouts`` are those of rank 0's agents in their order, ``adopt`` the rule by which they adopt.

        ``owned`` is what this rank owns of the fragments of each agent, in the same order; None where ranks above 0 own
        none of an agent's, and empty where they own none at all.
        """
        self._layouts, self._holding, self._adopt, self._owned = layouts, holding, adopt, owned

    def start(self) -> bool:
        """Take the first versions; returns whether rank 0 stops instead, because it could not begin."""
        return self._follow()

    def after_step(self, info: StepInfo) -> Verdict:
        """Take part in what this boundary brings."""
        return Verdict(not info.passes and self._follow(), "rank 0 stops")

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """What a checkpoint must hold of this rank's fragments, when rank 0 is asked for its own part of it."""
        parts = [owner.state() if owner is not None else {} for owner in self._owned]
        if len(self._layouts) == 1:
            return {name: value for part in parts for name, value in part.items()}, {}
        return {f"{at}.{name}": value for at, part in enumerate(parts) for name, value in part.items()}, {}

    def finish(self) -> None:
        """After the loop: as long as rank 0 sends what is unsent, it may need what is held here."""
        while not self._follow():
            continue
        self.close()

    def close(self) -> None:
        """End the threads."""
        for owner in self._owned:
            if owner is not None:
                owner.close()

    def _follow(self) -> bool:
        return take_part(self._holding, self._layouts, self._adopt, self._owned)
