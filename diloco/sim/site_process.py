"""What a site does on the network, beside its training: join, report, send, fetch, say goodbye.

Every request has a deadline and is asked again after a back-off, capped and jittered, for ever; the answer to a request
that was given up is thrown away.  When reports go unanswered the connection is given up and the site joins again.


A learner as a process of the simulator: its machine, its training loop, its checkpoints and its network work.

The training loop knows nothing of the network: a step follows the step before it, whatever anybody else does, and only
``Seal``, ``Adopt`` and ``Retake`` happen between two of them.  Encoding, sending, fetching and joining run beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.outer_process import OuterProcess
from diloco.sim.values import Value
from diloco.sim.world import MILLISECOND_NS, Direction, Feed, Heap, JoinReply, Process, Pulled, Push, PushReply
from diloco.sync.effects import (
    Adopt,
    AnswerUnits,
    DropSite,
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
    FateTold,
    FetchFailed,
    LearnerEvent,
    LeaveAsked,
    Outcome,
    OverlapChosen,
    PushAnswered,
    Reason,
    Sealed,
    SealFailed,
    StepDone,
    UnitsTold,
    VersionFetched,
)
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions
from diloco.sync.plain import canonical
from diloco.sync.site_units import UnitAsk, ask_of, units_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from diloco.sim.checkers import Checkers
    from diloco.sim.standby_process import StandbyProcess
    from diloco.sim.world import Link

CALL_DEADLINE_NS = 1500 * MILLISECOND_NS
BACKOFF_FIRST_NS = 100 * MILLISECOND_NS
BACKOFF_MAX_NS = 1600 * MILLISECOND_NS
REPORTS_MISSED_MAX = 2
GOODBYES_MAX = 4
EARLY_MAX = 64


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """An agreed connection to one life of the syncer."""

    outer: OuterProcess
    incarnation: int


@dataclass(slots=True)
class Call:
    """A request that waits for its answer, or for its deadline, whichever is first."""

    open: bool = True


class Courier:
    """The network work of one learner process."""

    def __init__(
        self, process: SiteProcess, syncers: Sequence[Callable[[], OuterProcess | StandbyProcess | None]]
    ) -> None:
        """``syncers``: whoever answers at each address that the site was given."""
        self.process = process
        self.session: Session | None = None
        self._syncers, self._at = syncers, 0
        self._tasks: dict[Key, Session] = {}
        self._early: list[tuple[OuterProcess | StandbyProcess, LearnerEvent | None]] = []
        """What a stream told before the answer to the join that opened it was here; None: it broke."""
        self._missed = 0

    def forget(self, key: Key) -> None:
        """Stop sending an update."""
        self._tasks.pop(key, None)

    def _ask(
        self,
        request: Callable[[Callable[[object], None]], None],
        answered: Callable[[object], None],
        missed: Callable[[], None],
        deadline_ns: int = CALL_DEADLINE_NS,
    ) -> None:
        """Have ``request`` done there; exactly one of ``answered`` and ``missed`` happens, unless this process dies."""
        call = Call()

        def settle(action: Callable[[], None]) -> None:
            if call.open:
                call.open = False
                action()

        def reply(answer: object) -> None:
            self.process.link.send(
                Direction.DOWN, lambda: self.process.deliver(lambda: settle(lambda: answered(answer)))
            )

        self.process.link.send(Direction.UP, lambda: request(reply))
        self.process.heap.after(deadline_ns, lambda: self.process.deliver(lambda: settle(missed)))

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do ``action`` after about ``delay_ns``: half of it to all of it."""
        jittered = int(delay_ns * (0.5 + self.process.random.random() / 2))
        self.process.heap.after(jittered, lambda: self.process.deliver(action))

    def join(self, backoff_ns: int, ticket: int = 0) -> None:
        """Ask one address after the other to take this process in, until one does; ``ticket`` is what the last gave."""

        process = self.process

        address = self._syncers[self._at]

        def request(reply: Callable[[object], None]) -> None:
            outer = address()
            if outer is None:
                return

            def feed(incarnation: int) -> Feed:
                return Feed(
                    incarnation,
                    process.link,
                    lambda what: process.deliver(lambda: self._told(outer, what)),
                    lambda: process.deliver(lambda: self._told(outer, None)),
                )

            outer.ask(
                lambda: outer.join(process.site, process.name, ticket, feed, lambda answer: reply((outer, answer)))
            )

        def again() -> None:
            self._at = (self._at + 1) % len(self._syncers)
            self.later(backoff_ns, lambda: self.join(min(2 * backoff_ns, BACKOFF_MAX_NS)))

        self._ask(request, lambda answer: self._joined(answer, again), again)

    def _joined(self, answer: object, again: Callable[[], None]) -> None:
        assert isinstance(answer, tuple)
        outer, reply = answer
        assert isinstance(reply, JoinReply)
        if reply.answered is None:
            if reply.ticket:
                self.join(BACKOFF_FIRST_NS, reply.ticket)
            elif reply.reason in (None, Reason.FULL):
                again()
            else:
                self.process.exit(f"join refused: {reply.reason}")
            return
        known = self.process.machine.state
        if (reply.answered.lineage, reply.answered.epoch) < (known.lineage, known.epoch):
            again()  # One that came back after another had taken its place.
            return
        assert isinstance(outer, OuterProcess)
        self.session = Session(outer, reply.answered.incarnation)
        self._missed = 0
        self._tasks.clear()
        session = self.session
        self.process.handle(reply.answered)
        self._report(session)
        early, self._early = self._early, []
        for there, what in early:
            if there is outer and self.process.alive:
                self._told(outer, what)

    def break_off(self) -> None:
        """Give the connection up and join again."""
        if self.session is not None:
            self.session = None
            self._tasks.clear()
            self.later(BACKOFF_FIRST_NS, lambda: self.join(BACKOFF_FIRST_NS))

    def _told(self, outer: OuterProcess | StandbyProcess, what: LearnerEvent | DropSite | None) -> None:
        if isinstance(what, DropSite):
            self.process.exit(f"dropped: {what.reason.value}")
        elif self.session is None:
            if len(self._early) < EARLY_MAX:
                self._early.append((outer, what))
        elif self.session.outer is not outer:
            pass  # The stream of a connection that was given up.
        elif what is None:
            self.break_off()
        else:
            self.process.handle(what)

    def _report(self, session: Session) -> None:
        """A sign of life every now and then; what is not answered twice means that the connection is broken."""

        def answered(answer: object) -> None:
            self._missed = 0
            assert isinstance(answer, tuple)
            known, told = answer
            if isinstance(told, AnswerUnits) and told.reason is None and self.session is session:
                self.process.handle(UnitsTold(told.first, told.pieces))
            elif not known and self.session is session:
                self.break_off()

        def missed() -> None:
            self._missed += 1
            if self._missed >= REPORTS_MISSED_MAX and self.session is session:
                self.break_off()

        if self.session is session and self.process.alive:
            outer, ask = session.outer, self.process.units_wanted()
            self._ask(
                lambda reply: outer.ask(lambda: outer.report(self.process.site, session.incarnation, ask, reply)),
                answered,
                missed,
            )
            self.process.heap.after(
                self.process.plan.report_ns, lambda: self.process.deliver(lambda: self._report(session))
            )

    def send(self, key: Key) -> None:
        """Send an update until there is a definite answer; after a break the machine asks for it again."""
        if self.session is not None and key not in self._tasks:
            self._tasks[key] = self.session
            self._attempt(key, self.session, BACKOFF_FIRST_NS)

    def _attempt(self, key: Key, session: Session, backoff_ns: int) -> None:
        stored = self.process.disk.outbox.get(key)
        if self._tasks.get(key) is not session or stored is None:
            return
        seal = stored.seal
        push = Push(
            self.process.site,
            session.incarnation,
            *key,
            seal.base_version,
            seal.tokens,
            seal.steps,
            seal.step_ns,
            seal.cursor,
            stored.digest,
            seal.final,
            stored.finite,
            stored.value,
            self.process.plan.transfer_ns,
            stored.norm,
            stored.cosine,
            seal.spans,
        )

        def again() -> None:
            self.later(backoff_ns, lambda: self._attempt(key, session, min(2 * backoff_ns, BACKOFF_MAX_NS)))

        self._ask(
            lambda reply: session.outer.ask(lambda: session.outer.push(push, reply)),
            lambda answer: self._pushed(key, session, stored.digest, answer, again),
            again,
            CALL_DEADLINE_NS + self.process.plan.transfer_ns,
        )

    def _pushed(self, key: Key, session: Session, digest: str, answer: object, again: Callable[[], None]) -> None:
        assert isinstance(answer, PushReply)
        if self._tasks.get(key) is not session:
            return
        if answer.outcome is Outcome.RETRY:
            again()
            return
        del self._tasks[key]
        self.process.handle(PushAnswered(*key, answer.outcome, answer.reason, digest))
        if answer.fate is not None and self.process.alive:
            self.process.handle(FateTold(answer.fate))

    def fetch(self, effect: Fetch) -> None:
        """Ask once for a newer version."""
        index, lineage = effect.fragment, self.process.machine.state.lineage

        def current() -> bool:
            """Otherwise the machine has started over and asked again."""
            return self.process.machine.state.lineage == lineage

        def failed() -> None:
            self.later(BACKOFF_FIRST_NS, lambda: self.process.handle(FetchFailed(index)) if current() else None)

        def answered(answer: object) -> None:
            if isinstance(answer, Pulled) and current():
                self._fetched(index, answer)
            else:
                failed()

        session = self.session
        if session is None:
            failed()
        else:
            outer = session.outer
            self._ask(
                lambda reply: outer.ask(lambda: outer.pull(self.process.site, index, effect.have_version, reply)),
                answered,
                failed,
            )

    def _fetched(self, index: int, pulled: Pulled) -> None:
        """Follow the down-links from what is here, or take the whole values."""
        if pulled.whole:
            value = pulled.parts[0]
        else:
            _, value = self.process.arrived.get(index, self.process.base[index])
            for link in pulled.parts:
                value = values.plus(value, link)
        self.process.checkers.fetched(self.process, index, pulled.version, value)
        self.process.arrived[index] = (pulled.version, value)
        self.process.handle(VersionFetched(index, pulled.version, pulled.fates))

    def leave(self, tries: int) -> None:
        """Say goodbye and end; without a word after as many ``tries``."""
        session = self.session
        if tries == 0:
            self.process.exit("left without a word")
            return
        if session is None:
            self.later(BACKOFF_MAX_NS, lambda: self.leave(tries - 1))
            return
        self._ask(
            lambda reply: session.outer.ask(lambda: session.outer.leave(self.process.site, session.incarnation, reply)),
            lambda _: self.process.exit("left"),
            lambda: self.leave(tries - 1),
        )


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
