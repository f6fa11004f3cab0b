"""The ranks of a site above 0: they follow rank 0, and own fragments where the fragments are dealt to the ranks.

Owner.  It holds the tensors of its fragments, and the threads that encode, send and fetch.  The machine is rank 0's.
The machine's orders come over the channel and are done in that order, one after the other: the training thread does
those that belong to a boundary, with all ranks, and later orders wait until that is done.  What the owner does beside
training it tells over the channel, and it changes its tensors when rank 0 has said that the machine knows of it.  So
tensors and machine never differ in what they know, as little as where both are in one process.

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
from diloco.learner.channel import Orders, take_part
from diloco.learner.exchange import Exchange, Machine, Source, Standstill
from diloco.learner.heartbeat import Echo
from diloco.learner.outbox import Outbox
from diloco.learner.tensors import SiteTensors
from diloco.learner.transfer import LinkUse
from diloco.sync.effects import Adopt, Retake, Seal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.holding import Holding
    from diloco.learner.channel import Dealt, Words
    from diloco.learner.options import AgentOptions
    from diloco.outer.fragments import Layout
    from diloco.sync.events import LearnerEvent
    from diloco.wire.client import SyncClient

ECHO_EVERY_S = 1.0


class Owner:
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
        self._channel, self._client, self._bound_s = dealt.channels[0], client, holding.group.timeout_s
        self._tensors = SiteTensors.of(options, adopt, layout, holding, dealt.of(holding.group.rank))
        self._restored = restored or {}
        self._lock = threading.Condition(threading.RLock())
        self._stopping = threading.Event()
        self._lost = ""
        self._knows = (0, 0, 0)  # Incarnation, epoch, lineage.
        self._numbers, self._answers = itertools.count(), dict[int, queue.SimpleQueue[object]]()
        self._changes: dict[int, Callable[[], None]] = {}
        self._due: queue.SimpleQueue[tuple[Adopt | Retake | Seal, str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._states: queue.SimpleQueue[dict[str, Tensor] | None] = queue.SimpleQueue()
        self._versions = [-1] * len(layout.fragments)
        machine = Machine(
            lambda: self._knows[0],
            lambda: self._knows[1],
            lambda: self._knows[2],
            self._wanted,
            self._change,
            lambda event: self._post("tell", event),
            lambda why: self._post("rejoin", why),
            lambda why: self._post("give_up", why),
        )
        use = LinkUse(client, options.choices(), self._emit, lambda event: None)
        outbox = Outbox(Path(options.folder) / "outbox", disk, settled=True)
        orders, standstill = Orders(SiteGroup(device="cpu")), Standstill(self._lock, lambda: bool(self._lost))
        ways = (outbox, orders, client, use, standstill, self._emit, self._stopping)
        self._exchange = Exchange(run_id, site_id, machine, self._tensors, *ways)
        loops = (*self._exchange.loops, self._echo)
        self._threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        self._channel.hear(self._hear, self._without_rank_0)
        for thread in self._threads:
            thread.start()

    # --- the training thread ----------------------------------------------------------------------------------------

    def do(self) -> None:
        """What this boundary brings to a fragment of this rank."""
        effect, codec = self._next(self._due)
        with self._lock:
            if isinstance(effect, Adopt):
                self._exchange.adopt(effect)
            elif isinstance(effect, Retake):
                self._exchange.retake(effect)
            else:
                self._exchange.seal(effect, codec, at_rest=False)
            if not isinstance(effect, Seal):
                self._versions[effect.fragment] = effect.version
        self._done.put(None)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of this rank's fragments, as the machine of the same checkpoint knows them."""
        found: dict[str, Tensor] = self._next(self._states)
        return found

    def close(self) -> None:
        """End the threads."""
        self._stopping.set()
        self._exchange.close()
        self._client.close()
        for answers in list(self._answers.values()):
            answers.put(None)
        self._done.put(None)  # What a boundary ordered may have ended in an error, and what hears rank 0 waits for it.
        for thread in self._threads:
            thread.join(10.0)
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
                with self._lock:
                    self._tensors.restore(self._restored, versions, told)
                    self._versions = list(versions)
                    for key in [key for key in self._tensors.sent if key not in listed]:
                        self._tensors.release(*key)
                    self._restored = {}
                dropped = self._tensors.residuals.dropped()
                if dropped:
                    self._emit("note", {"note": "residual_dropped", "why": "feedback was turned off since", **dropped})
            case "knows":
                self._knows, taken_in = rest
                self._client.follow(taken_in)
            case "boundary":
                effect, codec = rest
                self._due.put((effect, codec))
                self._done.get()
            case "order":
                with self._lock:
                    self._exchange.order(rest[0])
            case "state":
                with self._lock:
                    self._states.put(self._tensors.tensors())
            case "changed":
                number, keep = rest
                change = self._changes.pop(number)
                if keep:
                    with self._lock:
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
        self._stopping.set()
        for waiting in (self._due, self._states):
            waiting.put(None)
        for answers in list(self._answers.values()):
            answers.put(None)

    # --- what the threads beside training say -------------------------------------------------------------------------

    def _post(self, what: str, *rest: object) -> None:
        self._channel.send(what, (self._client.bytes_up, self._client.bytes_down), *rest)

    def _emit(self, what: str, fields: dict[str, object]) -> None:
        self._post("emit", what, fields)

    def _ask(self, what: str, *rest: object, change: Callable[[], None] | None = None) -> object:
        """Say something that rank 0 answers, and wait for it; None when there is no rank 0 any more."""
        number, answers = next(self._numbers), queue.SimpleQueue[object]()
        self._answers[number] = answers
        if change is not None:
            self._changes[number] = change
        try:
            self._post(what, number, *rest)
            return None if self._stopping.is_set() else answers.get()
        finally:
            del self._answers[number]

    def _change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> object:
        return self._ask("change", event, source, change=do)

    def _wanted(self, fragment: int, sequence: int) -> str | None:
        found = self._ask("wanted", fragment, sequence)
        return None if found is None else str(found)

    def _echo(self) -> None:
        """Hash a base now and then, for rank 0's heartbeat."""
        echo = Echo(len(self._tensors.base))
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = time.monotonic() + ECHO_EVERY_S
            fragment = echo.next_fragment()
            if fragment is None:
                continue
            with self._lock:
                base, told = self._tensors.base[fragment], self._tensors.told_base[fragment]
                version = self._versions[fragment]
            echo.compute(base, told)
            if base is not None:
                self._post("echo", fragment, version, echo.digests(self._tensors.base)[fragment])

    def _guarded(self, loop: Callable[[], None]) -> None:
        """A thread that dies stops the site in words instead of leaving it half alive."""
        try:
            self._tensors.place.begin_thread()
            loop()
        except Exception as error:
            if not self._stopping.is_set():
                self._emit("note", {"note": "thread_died", "why": repr(error)})
                self._post("give_up", f"a thread of a rank failed: {error!r}")
                raise


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
