"""A learner as a process of the simulator: its machine, its training loop, its checkpoints and its network work.

The training loop knows nothing of the network: a step follows the step before it, whatever anybody else does, and only
``Seal``, ``Adopt`` and ``Retake`` happen between two of them.  Encoding, sending, fetching and joining run beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.courier import BACKOFF_FIRST_NS, GOODBYES_MAX, Courier
from diloco.sim.network import MILLISECOND_NS, Heap
from diloco.sim.process import Process
from diloco.sim.values import Value
from diloco.sync.effects import (
    Adopt,
    Fetch,
    Forget,
    Join,
    LearnerEffect,
    Leave,
    Release,
    Retake,
    Seal,
    Send,
    SkipData,
    StartOver,
    StopTraining,
)
from diloco.sync.events import (
    BoundaryReached,
    LearnerEvent,
    LeaveAsked,
    OverlapChosen,
    Sealed,
    SealFailed,
    StepDone,
)
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions
from diloco.sync.plain import canonical
from diloco.sync.site_units import UnitAsk, ask_of, units_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from diloco.sim.checking import Checkers
    from diloco.sim.network import Link
    from diloco.sim.outer_process import OuterProcess
    from diloco.sim.standby_process import StandbyProcess

LOCK_STEP_WAIT_NS = 3000 * MILLISECOND_NS
"""A site in lock-step waits no longer than twice this for an answer, and then trains on."""

Key = tuple[int, int]
Drawn = tuple[int, bool]
"""The unit that a sequence was of, and whether it was drawn over again because there was no other."""


@dataclass(frozen=True, slots=True)
class SitePlan:
    """How one site works: its speed, its batches, its habits, and what goes wrong in it."""

    options: LearnerOptions
    step_ns: int
    step_jitter: float
    tokens: int
    transfer_ns: int
    encode_ns: int
    quantum: int
    alpha_tenths: int
    checkpoint_steps: int
    checkpoint_ns: int
    report_ns: int
    overlap_steps: int = 0
    ranks: bool = False
    """Whether it has several: those say before a step ends whether anything is done with values after it."""


@dataclass(slots=True)
class Trouble:
    """Shares of steps that ruin the values, of updates that arrive ruined, and of updates like no other; all of it
    ends with the safety phase."""

    poisoned: float = 0.0
    ruined: float = 0.0
    outlying: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """An update in the outbox: what was promised about it, and what it says."""

    seal: Seal
    digest: str
    value: Value
    finite: bool
    norm: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a site's process needs to go on: taken after an optimizer step and before the machine hears of it."""

    machine: bytes
    theta: tuple[Value, ...]
    base: tuple[tuple[int, Value], ...]
    adopted: tuple[Value, ...]
    sent: dict[Key, Value]
    poisoned: frozenset[int]
    step: int
    step_tokens: int
    step_ns: int
    cursor: int
    drawn: dict[int, Drawn]


@dataclass(slots=True)
class SiteDisk:
    """What of a site outlives its process."""

    checkpoint: Checkpoint | None = None
    outbox: dict[Key, Stored] = field(default_factory=dict)
    odometer: int = 0

    def copy(self) -> SiteDisk:
        """The disk of a twin."""
        return SiteDisk(self.checkpoint, dict(self.outbox), self.odometer)


class SiteProcess(Process):
    """One life of a learner."""

    def __init__(
        self,
        site: str,
        name: str,
        heap: Heap,
        link: Link,
        disk: SiteDisk,
        plan: SitePlan,
        trouble: Trouble,
        random: Random,
        checkers: Checkers,
        syncers: Sequence[Callable[[], OuterProcess | StandbyProcess | None]],
        on_exit: Callable[[SiteProcess, str], None],
    ) -> None:
        super().__init__(lambda: None)
        self.site, self.name, self.heap, self.link, self.disk = site, name, heap, link, disk
        self.plan, self.trouble, self.checkers = plan, trouble, checkers
        self.random, self._on_exit = random, on_exit
        self.courier = Courier(self, syncers)
        parts = range(plan.options.num_fragments)
        self.machine = LearnerSync(plan.options)
        self.theta: list[Value] = [values.COLD for _ in parts]
        self.base: list[tuple[int, Value]] = [(-1, values.COLD) for _ in parts]
        self.adopted: list[Value] = [values.COLD for _ in parts]
        """The values right after the latest adopt: where overwrite and blend measure from."""
        self.sent: dict[Key, Value] = {}
        """The decoded pseudo-gradients of the in-flight list."""
        self.sealing: dict[Key, Value] = {}
        self.arrived: dict[int, tuple[int, Value]] = {}
        self.poisoned: set[int] = set()
        self.step = self.cursor = 0
        self.drawn: dict[int, Drawn] = {}
        """What each sequence was, where units are leased."""
        self.training = self.stopping = self.at_rest = False
        self.twin = False
        """Whether another process of this site was started while this one still runs."""
        self.rounded: Value = values.ZERO
        """What the codec took from the update that was sealed last."""
        self._given_up: set[Key] = set()
        self._waits = 0
        self._passes = False
        """Whether its ranks have agreed that nothing is done with values after the step under way."""

    # --- the life of the process -------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on from the checkpoint, or begin cold; either way, join."""
        self.deliver(self._start)

    def _start(self) -> None:
        kept = self.disk.checkpoint
        if kept is not None:
            digests = {key: stored.digest for key, stored in self.disk.outbox.items()}
            self._load(kept)
            # The checkpoint's step is handed to the machine again, so the odometer must not count it beforehand.
            before = self.disk.odometer - kept.step_tokens
            self.machine = LearnerSync.restore(self.plan.options, json.loads(kept.machine), digests, before)
            self.training = True
        self._tidy()
        self.checkers.process_started(self)
        self.handle(OverlapChosen(self.plan.overlap_steps))
        self.courier.join(BACKOFF_FIRST_NS)
        if kept is not None:
            self.handle(StepDone(kept.step, kept.step_tokens, kept.step_ns, self.cursor))
            self._next_step()

    def _load(self, kept: Checkpoint) -> None:
        self.theta, self.base, self.adopted = list(kept.theta), list(kept.base), list(kept.adopted)
        self.sent, self.poisoned = dict(kept.sent), set(kept.poisoned)
        self.step, self.cursor, self.drawn = kept.step, kept.cursor, dict(kept.drawn)

    def _tidy(self) -> None:
        """Drop what the machine did not take over: updates that it counts as unsent again, and bytes of later ones."""
        listed = {
            (index, sent.sequence): sent
            for index, part in enumerate(self.machine.state.fragments)
            for sent in part.in_flight
        }
        self.sent = {key: value for key, value in self.sent.items() if key in listed}
        for key in [key for key in self.disk.outbox if key not in listed or not listed[key].bytes_wanted]:
            del self.disk.outbox[key]

    def exit(self, why: str) -> None:
        """End by the process's own will."""
        self.kill()
        self._on_exit(self, why)

    def ask_to_leave(self) -> None:
        """The user's Ctrl-C."""
        self.deliver(lambda: self.handle(LeaveAsked()))

    def handle(self, event: LearnerEvent) -> None:
        """Give ``event`` to the machine and carry out what it says; at rest, it also gets a boundary at once."""
        effects = self.machine.handle(event, self.heap.now_ns)
        self.disk.odometer = self.machine.state.tokens_processed
        self.checkers.learner(self, event, effects)
        for effect in effects:
            self._carry_out(effect)
            if not self.alive:
                return
        self.checkers.carried_out(self, event)
        resting = not self.training or self.at_rest
        if resting and not isinstance(event, BoundaryReached):
            self.handle(BoundaryReached())
            if self.alive:
                self._go_on()

    def _go_on(self) -> None:
        """Begin or continue training where nothing forbids it."""
        if not self.training and not self.stopping and self.machine.ready():
            self.training = True
            self._next_step()
        elif self.at_rest and not self.stopping and not self._must_wait():
            self.at_rest = False
            self._begin_step()

    def _must_wait(self) -> bool:
        """Lock-step: whether an update is unanswered that the site has not given up waiting for."""
        if not self.machine.must_wait():
            self._given_up = set()
            return False
        return not self._given_up or not self._given_up >= {*self.sent, *self.sealing}

    def _give_up_waiting(self, waits: int) -> None:
        if self.at_rest and not self.stopping and waits == self._waits:
            self._given_up = {*self.sent, *self.sealing, (-1, 0)}
            self._go_on()

    # --- training ----------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        if self.stopping or self._must_wait():
            self.at_rest = True
            self._waits += 1
            waits = self._waits
            self.courier.later(2 * LOCK_STEP_WAIT_NS, lambda: self._give_up_waiting(waits))
            self.handle(BoundaryReached())
            if self.alive:
                self._go_on()
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        step_ns = int(self.plan.step_ns * (1 + self.plan.step_jitter * self.random.random()))
        self.checkers.step_begun(self, step_ns)
        self._passes = self.plan.ranks and not self.machine.may_act()
        self.heap.after(step_ns, lambda: self.deliver(lambda: self._step(step_ns)))

    def _step(self, step_ns: int) -> None:
        random, tokens = self.random, self.plan.tokens
        self.step += 1
        self._draw()
        self.cursor += 1
        learned = [int(random.random() * 2000) - 900 for _ in self.theta]
        self.theta = [values.plus(theta, (gain, tokens, 0)) for theta, gain in zip(self.theta, learned, strict=True)]
        if self.trouble.poisoned and random.random() < self.trouble.poisoned:
            self.poisoned.add(int(random.random() * len(self.theta)))
        self.checkers.stepped(self, step_ns, learned)
        if self.step % self.plan.checkpoint_steps == 0:
            self._checkpoint(step_ns)
        passes = self._passes
        self.at_rest = self.stopping and not passes  # Told to stop during this step: it was the last.
        self.handle(StepDone(self.step, tokens, step_ns, self.cursor, passes=passes))
        if self.alive and passes:
            self._begin_step()
        elif self.alive:
            self._next_step()

    def _draw(self) -> None:
        unit = self.plan.options.unit_sequences
        if unit:
            found, repeats = units_from(self.machine.state, self.cursor // unit, 1)
            self.drawn[self.cursor] = (found[0][0], repeats)

    def units_wanted(self) -> UnitAsk | None:
        """What is asked for with a report."""
        return ask_of(self.plan.options, self.machine.state) if self.plan.options.unit_sequences else None

    def _checkpoint(self, step_ns: int) -> None:
        kept = Checkpoint(
            canonical(self.machine.snapshot()),
            tuple(self.theta),
            tuple(self.base),
            tuple(self.adopted),
            dict(self.sent),
            frozenset(self.poisoned),
            self.step,
            self.plan.tokens,
            step_ns,
            self.cursor,
            dict(self.drawn),
        )
        self.heap.after(self.plan.checkpoint_ns, lambda: self.deliver(lambda: self._keep(kept)))

    def _keep(self, kept: Checkpoint) -> None:
        self.disk.checkpoint = kept

    # --- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: LearnerEffect) -> None:
        match effect:
            case Join():
                self.courier.break_off()
            case Seal():
                self._seal(effect)
            case Send():
                self.courier.send((effect.fragment, effect.sequence))
            case Forget():
                self.disk.outbox.pop((effect.fragment, effect.sequence), None)
                self.courier.forget((effect.fragment, effect.sequence))
            case Release():
                self.sent.pop((effect.fragment, effect.sequence), None)
                self.sealing.pop((effect.fragment, effect.sequence), None)
            case StartOver():
                self.arrived.pop(effect.fragment, None)
            case Fetch():
                self.courier.fetch(effect)
            case Adopt():
                self._adopt(effect)
            case Retake():
                self._retake(effect)
            case SkipData():
                self.cursor = max(self.cursor, effect.cursor)
            case StopTraining():
                self.stopping = True
                if effect.failed:
                    self.exit(effect.why)
            case Leave():
                self.courier.leave(GOODBYES_MAX)

    def _seal(self, seal: Seal) -> None:
        """Copy what is to be sent now; encode it beside training."""
        measured = self.adopted[seal.fragment] if self.plan.options.adopt != "rebase" else self.base[seal.fragment][1]
        gradient = values.minus(measured, self.theta[seal.fragment])
        for sequence in seal.in_flight:
            gradient = values.minus(gradient, self.sent[seal.fragment, sequence])
        poisoned = seal.fragment in self.poisoned
        self.sealing[seal.fragment, seal.sequence] = gradient
        self.checkers.sealed(self, seal, gradient)
        self.heap.after(
            self.plan.encode_ns, lambda: self.deliver(lambda: self._encoded(seal, gradient, poisoned=poisoned))
        )

    def _encoded(self, seal: Seal, gradient: Value, *, poisoned: bool) -> None:
        key = (seal.fragment, seal.sequence)
        if poisoned:
            self.handle(SealFailed(*key))
            return
        decoded = values.quantised(gradient, self.plan.quantum)
        ruined = self.trouble.ruined > 0 and self.random.random() < self.trouble.ruined
        content = f"{self.name}:{self.step}:{decoded[0]}:{decoded[1]}:{ruined}"
        self.disk.outbox[key] = Stored(seal, content, decoded, not ruined, *self._vitals())
        self.rounded = values.minus(decoded, self.sealing.pop(key, values.ZERO))
        self.sent[key] = decoded
        self.checkers.encoded(self, seal.fragment, content, decoded)
        self.handle(Sealed(*key, content))

    def _vitals(self) -> tuple[float, float]:
        """Norm and cosine of an update: as usual, or far too large, or the wrong way round."""
        norm, cosine = 0.8 + 0.4 * self.random.random(), 0.4 + 0.2 * self.random.random()
        if self.trouble.outlying and self.random.random() < self.trouble.outlying:
            return (1e6 * norm, cosine) if self.random.random() < 0.5 else (norm, -cosine)
        return norm, cosine

    def _adopt(self, effect: Adopt) -> None:
        index = effect.fragment
        version, new = self.arrived.pop(index)
        assert version == effect.version, (version, effect)
        _, old = self.base[index]
        if self.plan.options.adopt == "rebase":
            rest = values.minus(self.theta[index], old)
            for sequence in effect.merged:
                rest = values.plus(rest, self.sent[index, sequence])
            self.theta[index] = values.plus(new, rest)
        elif self.plan.options.adopt == "overwrite":
            self.theta[index] = new
        elif self.plan.options.adopt == "blend":
            self.theta[index] = values.blended(self.theta[index], new, self.plan.alpha_tenths)
        self.base[index], reference = (version, new), self.theta[index]
        if self.plan.options.adopt == "eager":
            unsent, reference = values.minus(self.adopted[index], self.theta[index]), new
            for sequence in effect.fresh:
                unsent = values.minus(unsent, self.sent[index, sequence])
            for sequence in effect.under_way:
                ahead = values.minus(reference, self.sent[index, sequence])
                reference = values.blended(ahead, reference, self.plan.alpha_tenths)
            self.theta[index] = values.minus(reference, unsent)
        self.adopted[index] = reference
        for sequence in effect.merged:
            del self.sent[index, sequence]

    def _retake(self, effect: Retake) -> None:
        index = effect.fragment
        if index in self.arrived and self.arrived[index][0] >= effect.version:
            self.base[index] = self.arrived.pop(index)
        version, new = self.base[index]
        assert version == effect.version, (version, effect)
        self.theta[index] = new
        for sequence in effect.keep:
            self.theta[index] = values.minus(self.theta[index], self.sent[index, sequence])
        for key in [key for key in self.sent if key[0] == index and key[1] not in effect.keep]:
            del self.sent[key]
        self.adopted[index] = self.theta[index]
        self.poisoned.discard(index)
