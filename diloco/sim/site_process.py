"""A learner as a process of the simulator: its machine, its training loop, its checkpoints and its network work.

The training loop does not depend on the network: each step follows the one before, and only ``Seal``, ``Adopt`` and
``Retake`` happen between two steps.  Encoding and the network run concurrently.

``Courier`` joins, reports, sends, fetches and leaves.  Every request has a timeout and is retried for ever with a
capped, jittered back-off; a late answer to an abandoned request is dropped.  After unanswered reports the courier drops
the connection and joins again.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from diloco.sim import world
from diloco.sim.outer_process import OuterProcess
from diloco.sim.site_state import KEPT, Checkpoint, SiteState
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.world import MILLISECOND_NS, Direction, Heap, Pulled, ask
from diloco.sync.admission import Verdict
from diloco.sync.effects import (
    Adopt,
    AnswerPush,
    AnswerUnits,
    AskToConfirm,
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
    FinalWanted,
    JoinAnswered,
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
from diloco.sync.journal import canonical
from diloco.sync.learner import LearnerSync
from diloco.sync.progress import ask_of, units_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from diloco.sim.outer_process import Machines, Seat
    from diloco.sim.site_state import Key, Side, Trouble
    from diloco.sim.world import Reply, Value

CALL_DEADLINE_NS = 1500 * MILLISECOND_NS
BACKOFF_FIRST_NS = 100 * MILLISECOND_NS
BACKOFF_MAX_NS = 1600 * MILLISECOND_NS
REPORTS_MISSED_MAX = 2
GOODBYES_MAX = 4
SETTLES_MAX = 16
EARLY_MAX = 64


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """An agreed connection to one life of the syncer."""

    outer: OuterProcess
    incarnation: int


class Courier:
    """The network work of one learner process."""

    def __init__(self, process: SiteProcess, seats: Sequence[Seat]) -> None:
        """``seats`` are the machines that may be the syncer."""
        self.process = process
        self.session: Session | None = None
        self._seats, self._at = seats, 0
        self.tasks: dict[Key, Session] = {}
        """The updates that are being sent."""
        self._early: list[tuple[OuterProcess, LearnerEvent | None]] = []
        """Events of a stream that arrived before the answer to its join; None: the stream broke."""
        self._missed = 0

    def _ask(
        self, outer: OuterProcess, request: Callable[[Reply], None], answered: Reply, transfer_ns: int = 0
    ) -> None:
        """As ``world.ask``: run ``request`` in ``outer``, over the site's link; a payload takes ``transfer_ns``."""
        deadline_ns = CALL_DEADLINE_NS + transfer_ns
        ask(self.process.link, self.process, lambda reply: outer.ask(lambda: request(reply)), answered, deadline_ns)

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Run ``action`` after a random delay of half to all of ``delay_ns``."""
        self.process.after(int(delay_ns * (0.5 + self.process.random.random() / 2)), action)

    def join(self, backoff_ns: int, ticket: int = 0) -> None:
        """Ask one machine after the other to accept this process; ``ticket`` comes from an ``AskToConfirm``."""
        process, seat = self.process, self._seats[self._at]

        def request(reply: Reply) -> None:
            outer = seat.process
            if isinstance(outer, StandbyProcess):
                outer.deliver(lambda: reply((outer, None)))  # A standby accepts no site.
            if not isinstance(outer, OuterProcess):
                return

            def tell(what: LearnerEvent | DropSite) -> None:
                process.link.send(
                    Direction.DOWN,
                    lambda: process.deliver(lambda: self._told(outer, what)),
                    lambda: process.deliver(lambda: self._told(outer, None)),
                )

            outer.ask(
                lambda: outer.join(process.site, process.name, ticket, tell, lambda answer: reply((outer, answer)))
            )

        def again() -> None:
            self._at = (self._at + 1) % len(self._seats)
            self.later(backoff_ns, lambda: self.join(min(2 * backoff_ns, BACKOFF_MAX_NS)))

        ask(process.link, process, request, partial(self._joined, again), CALL_DEADLINE_NS)

    def _joined(self, again: Callable[[], None], answer: object) -> None:
        outer, reply = answer if isinstance(answer, tuple) else (None, None)
        known = self.process.machine.state
        if isinstance(reply, AskToConfirm):
            self.join(BACKOFF_FIRST_NS, reply.ticket)
            return
        if isinstance(reply, Reason) and reply is not Reason.FULL:
            self.process.exit(f"join refused: {reply}")
            return
        if not isinstance(reply, JoinAnswered) or (reply.lineage, reply.epoch) < (known.lineage, known.epoch):
            again()  # The syncer is away, accepts no site, or is an old leader that another has replaced.
            return
        assert isinstance(outer, OuterProcess)
        self.session = Session(outer, reply.incarnation)
        self._missed = 0
        self.tasks.clear()
        session = self.session
        self.process.handle(reply)
        self._report(session)
        early, self._early = self._early, []
        for there, what in early:
            if there is outer and self.process.alive:
                self._told(outer, what)

    def break_off(self) -> None:
        """Drop the connection and join again; not after the site has left, which another join would undo."""
        if self.session is not None and not self.process.machine.state.left:
            self.session = None
            self.tasks.clear()
            self.later(BACKOFF_FIRST_NS, lambda: self.join(BACKOFF_FIRST_NS))

    def _told(self, outer: OuterProcess, what: LearnerEvent | DropSite | None) -> None:
        if isinstance(what, DropSite):
            self.process.exit(f"dropped: {what.reason.value}")
        elif self.session is None:
            if len(self._early) < EARLY_MAX:
                self._early.append((outer, what))
        elif self.session.outer is not outer:
            pass  # The stream of a dropped connection.
        elif what is None:
            self.break_off()
        else:
            self.process.handle(what)

    def _report(self, session: Session) -> None:
        """Send a heartbeat every ``report_ns``; ``REPORTS_MISSED_MAX`` unanswered in a row break the connection."""

        def answered(answer: object) -> None:
            self._missed = 0 if isinstance(answer, tuple) else self._missed + 1
            known, told = self._missed < REPORTS_MISSED_MAX, None
            if isinstance(answer, tuple):
                known, told = answer
            if isinstance(told, AnswerUnits) and told.reason is None and self.session is session:
                self.process.handle(UnitsTold(told.first, told.pieces))
            elif not known and self.session is session:
                self.break_off()

        if self.session is session and self.process.alive:
            outer, options = session.outer, self.process.plan.options
            ask = ask_of(options, self.process.machine.state) if options.unit_sequences else None
            site, incarnation = self.process.site, session.incarnation
            self._ask(outer, lambda reply: outer.report(site, incarnation, ask, reply), answered)
            self.process.after(self.process.plan.report_ns, lambda: self._report(session))

    def send(self, key: Key) -> None:
        """Send an update until there is a definite answer; after a new join the machine asks for it again."""
        if self.session is not None and key not in self.tasks:
            self.tasks[key] = self.session
            self._attempt(key, self.session, BACKOFF_FIRST_NS)

    def _attempt(self, key: Key, session: Session, backoff_ns: int) -> None:
        stored = self.process.disk.outbox.get(key)
        if self.tasks.get(key) is not session or stored is None:
            return
        update, value = replace(stored[0], incarnation=session.incarnation), stored[1]
        outer, transfer_ns = session.outer, self.process.plan.transfer_ns

        def answered(answer: object) -> None:
            assert isinstance(answer, AnswerPush | Verdict | None)
            wanted = self.tasks.get(key) is session
            if answer is None or (wanted and answer.outcome is Outcome.RETRY):
                self.later(backoff_ns, lambda: self._attempt(key, session, min(2 * backoff_ns, BACKOFF_MAX_NS)))
            elif wanted:
                del self.tasks[key]
                self.process.handle(PushAnswered(*key, answer.outcome, answer.reason, update.digest))
                if answer.fate is not None and self.process.alive:
                    self.process.handle(FateTold(answer.fate))

        self._ask(outer, lambda reply: outer.push(update, value, transfer_ns, reply), answered, transfer_ns)

    def fetch(self, effect: Fetch) -> None:
        """Pull a newer version once: its down-links since the newest version here, or the whole values."""
        process, index, session = self.process, effect.fragment, self.session
        lineage = process.machine.state.lineage

        def current() -> bool:
            """Return False once the machine has started over in a new lineage; it has then asked again."""
            return process.machine.state.lineage == lineage

        def answered(answer: object) -> None:
            if not isinstance(answer, Pulled) or not current():
                self.later(BACKOFF_FIRST_NS, lambda: process.handle(FetchFailed(index)) if current() else None)
                return
            value = world.ZERO if answer.whole else process.arrived.get(index, process.base[index])[1]
            value = world.plus(value, world.total(answer.parts))
            process.checkers.fetched(process, index, answer.version, value)
            process.arrived[index] = (answer.version, value)
            process.handle(VersionFetched(index, answer.version, answer.fates))

        if session is None:
            answered(None)
        else:
            outer, have = session.outer, effect.have_version
            self._ask(outer, lambda reply: outer.pull(process.site, index, have, reply), answered)

    def leave(self, tries: int) -> None:
        """Leave the syncer and exit; after ``tries`` failed attempts exit without leaving."""
        session, site = self.session, self.process.site

        def answered(answer: object) -> None:
            if answer is None:
                self.leave(tries - 1)
            else:
                self._settle(SETTLES_MAX if self.process.plan.final else 0)

        if tries == 0:
            self.process.exit("left without a word")
        elif session is None:
            self.later(BACKOFF_MAX_NS, lambda: self.leave(tries - 1))
        else:
            self._ask(session.outer, lambda reply: session.outer.leave(site, session.incarnation, reply), answered)

    def _settle(self, looks: int) -> None:
        """Exit when the site is settled, or after so many ``looks``."""
        if looks == 0 or self.process.machine.settled():
            self.process.exit("left")
        else:
            self.later(BACKOFF_MAX_NS, lambda: self._settle(looks - 1))


LOCK_STEP_WAIT_NS = 3000 * MILLISECOND_NS
"""A site in lock-step waits at most twice this for an answer, and then trains on."""


class SiteProcess(SiteState):
    """One life of a learner."""

    def __init__(self, site: str, name: str, side: Side, trouble: Trouble, syncers: Machines, trainer: Trainer) -> None:
        super().__init__(site, name, syncers.heap, side)
        self.checkers, self.trainer, self.trouble = syncers.checkers, trainer, trouble
        self.courier = Courier(self, syncers.seats)
        self._given_up: set[Key] = set()
        self._waits = 0
        self.passes = False
        """Whether the ranks have agreed to skip sealing and adopting after the step under way."""

    # --- the life of the process -------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume from the checkpoint or begin cold, and join."""
        kept = self.disk.checkpoint
        if kept is not None:
            digests = {key: update.digest for key, (update, _) in self.disk.outbox.items()}
            for name, value in kept.values.items():
                setattr(self, name, copy.copy(value))
            # The machine gets the checkpoint's step again below, so the odometer must not count it yet.
            before = self.disk.odometer - kept.step_tokens
            self.machine = LearnerSync.restore(self.plan.options, json.loads(kept.machine), digests, before)
            self.training = True
        listed = {
            (index, sent.sequence): sent
            for index, part in enumerate(self.machine.state.fragments)
            for sent in part.in_flight
        }
        # Drop what the machine counts as unsent again, and outbox bytes that it does not want.
        self.sent = {key: value for key, value in self.sent.items() if key in listed}
        for key in [key for key in self.disk.outbox if key not in listed or not listed[key].bytes_wanted]:
            del self.disk.outbox[key]
        self.checkers.process_started(self)
        self.handle(OverlapChosen(self.plan.overlap_steps))
        self.courier.join(BACKOFF_FIRST_NS)
        if kept is not None:
            self.handle(StepDone(self.step, kept.step_tokens, kept.step_ns, self.cursor))
            self.next_step()

    def kill(self) -> None:
        """End as by SIGKILL."""
        super().kill()
        self.trainer.look()

    def exit(self, why: str) -> None:
        """End the process, by itself, with the reason ``why``."""
        self.kill()
        self.trainer.exited(self, why)

    def ask_to_leave(self) -> None:
        """Handle the user's Ctrl-C."""
        self.deliver(lambda: self.handle(LeaveAsked()))

    def handle(self, event: LearnerEvent) -> None:
        """Give ``event`` to the machine and carry out its effects; between steps also give it a boundary at once."""
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
        """Begin or continue training where it is allowed."""
        if self.stopping and self.plan.final and not self.machine.state.final_wanted:
            self.handle(FinalWanted())
        elif not self.training and not self.stopping and self.machine.ready():
            self.training = True
            self.next_step()
        elif self.at_rest and not self.stopping and not self._must_wait():
            self.at_rest = False
            self.trainer.ready(self)

    def _must_wait(self) -> bool:
        """Return whether, in lock-step, an update is unanswered that the site has not stopped waiting for."""
        if not self.machine.must_wait():
            self._given_up = set()
            return False
        return not self._given_up or not self._given_up >= {*self.sent, *self.sealing}

    def _give_up_waiting(self, waits: int) -> None:
        if self.at_rest and not self.stopping and waits == self._waits:
            self._given_up = {*self.sent, *self.sealing, (-1, 0)}
            self._go_on()

    # --- training ----------------------------------------------------------------------------------------------

    def next_step(self) -> None:
        """Begin another step, unless the site is stopping or must wait."""
        if self.stopping or self._must_wait():
            self.at_rest = True
            self._waits += 1
            waits = self._waits
            self.courier.later(2 * LOCK_STEP_WAIT_NS, lambda: self._give_up_waiting(waits))
            self.handle(BoundaryReached())
            if self.alive:
                self._go_on()
        else:
            self.trainer.ready(self)

    def take_step(self, step_ns: int) -> None:
        """Handle the end of a step: progress, checkpoint and the machine's event."""
        random, tokens = self.random, self.plan.tokens
        self.step += 1
        unit = self.plan.options.unit_sequences
        if unit:
            found, repeats = units_from(self.machine.state, self.cursor // unit, 1)
            self.drawn[self.cursor] = (found[0][0], repeats)
        self.cursor += 1
        learned = [int(random.random() * 2000) - 900 for _ in self.theta]
        self.theta = [world.plus(theta, (gain, tokens, 0)) for theta, gain in zip(self.theta, learned, strict=True)]
        if self.trouble["poison"] and random.random() < self.trouble["poison"]:
            self.poisoned.add(int(random.random() * len(self.theta)))
        self.checkers.stepped(self, step_ns, learned)
        if self.step % self.plan.checkpoint_steps == 0:
            values = {name: copy.copy(getattr(self, name)) for name in KEPT}
            kept = Checkpoint(canonical(self.machine.snapshot()), values, tokens, step_ns)
            self.after(self.plan.checkpoint_ns, lambda: self._keep(kept))
        passes = self.passes
        self.at_rest = self.stopping and not passes  # An order to stop came during this step: it was the last.
        self.handle(StepDone(self.step, tokens, step_ns, self.cursor, passes=passes))
        if self.alive and passes:
            self.trainer.ready(self)
        elif self.alive:
            self.next_step()

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
                self.courier.tasks.pop((effect.fragment, effect.sequence), None)
            case Release():
                self.sent.pop((effect.fragment, effect.sequence), None)
                self.sealing.pop((effect.fragment, effect.sequence), None)
            case StartOver():
                self.arrived.pop(effect.fragment, None)
            case Fetch():
                self.courier.fetch(effect)
            case Adopt():
                self.adopt(effect)
            case Retake():
                self.retake(effect)
            case SkipData():
                self.cursor = max(self.cursor, effect.cursor)
            case StopTraining():
                self.stopping = True
                if effect.failed:
                    self.exit(effect.why)
                self.trainer.look()
            case Leave():
                self.courier.leave(GOODBYES_MAX)

    def _seal(self, seal: Seal) -> None:
        """Measure the pseudo-gradient now; encode it while training continues."""
        gradient = self.measured(seal)
        poisoned = seal.fragment in self.poisoned
        self.sealing[seal.fragment, seal.sequence] = gradient
        self.checkers.sealed(self, seal, gradient)
        self.after(self.plan.encode_ns, lambda: self._encoded(seal, gradient, poisoned=poisoned))

    def _encoded(self, seal: Seal, gradient: Value, *, poisoned: bool) -> None:
        key = (seal.fragment, seal.sequence)
        if poisoned:
            self.handle(SealFailed(*key))
            return
        decoded = world.quantised(gradient, self.plan.quantum)
        ruined = self.trouble["ruin"] > 0 and self.random.random() < self.trouble["ruin"]
        content = f"{self.name}:{self.step}:{decoded[0]}:{decoded[1]}:{ruined}"
        norm, cosine = 0.8 + 0.4 * self.random.random(), 0.4 + 0.2 * self.random.random()
        if self.trouble["outlier"] and self.random.random() < self.trouble["outlier"]:
            if self.random.random() < 0.5:
                norm *= 1e6
            else:
                cosine = -cosine
        update = world.update_arrived(seal, self.site, 0, content)  # The courier sets the incarnation of its session.
        self.disk.outbox[key] = (replace(update, finite=not ruined, norm=norm, cosine=cosine), decoded)
        self.rounded = world.minus(decoded, self.sealing.pop(key, world.ZERO))
        self.sent[key] = decoded
        self.checkers.encoded(self, seal.fragment, content, decoded)
        self.handle(Sealed(*key, content))


class Trainer:
    """The training loop of one life of a site, which steps all its ``parts``: one process for each syncer.

    The site has one step count and one data cursor: a step begins when no part is in the middle of one, and each part
    that still trains takes it at the same instant.
    """

    def __init__(
        self,
        heap: Heap,
        random: Random,
        stepped: Callable[[Sequence[SiteProcess]], None],
        exited: Callable[[SiteProcess, str], None],
    ) -> None:
        """``stepped`` gets the parts that have just made a step, ``exited`` a part that ended by itself, and why."""
        self._heap, self._random, self._stepped, self.exited = heap, random, stepped, exited
        self.parts: list[SiteProcess] = []
        self._waiting: list[SiteProcess] = []

    def ready(self, part: SiteProcess) -> None:
        """Register ``part`` as ready for the next step."""
        self._waiting.append(part)
        self.look()

    def look(self) -> None:
        """Begin the next step if every part that still trains is ready for it."""
        stopped = [part for part in self._waiting if part.alive and not self.goes_on(part)]
        self._waiting = [part for part in self._waiting if self.goes_on(part)]
        for part in stopped:
            part.deliver(part.next_step)
        if not self._waiting or not self.complete(self._waiting):
            return
        takers, self._waiting = self._waiting, []
        # A part whose syncer had finished has taken no step since: its counts are behind the others'.
        step, cursor = max(part.step for part in takers), max(part.cursor for part in takers)
        plan = takers[0].plan
        step_ns = int(plan.step_ns * (1 + plan.step_jitter * self._random.random()))
        for part in takers:
            part.step, part.cursor = step, cursor
            part.checkers.step_begun(part, step_ns)
            part.passes = part.plan.ranks and not part.machine.may_act()
        self._heap.after(step_ns, lambda: self._step(takers, step_ns))

    def goes_on(self, part: SiteProcess) -> bool:
        """Return whether ``part`` makes another step: one that ``passes`` makes one more before it stops."""
        return part.alive and (part.passes or not part.stopping)

    def complete(self, ready: Sequence[SiteProcess]) -> bool:
        """Return whether all training parts are ready; a part that cannot reach its syncer still counts."""
        return all(part in ready for part in self.parts if self.goes_on(part))

    def _step(self, takers: Sequence[SiteProcess], step_ns: int) -> None:
        for part in takers:
            part.deliver(lambda part=part: part.take_step(step_ns))  # type: ignore[misc]
        self._stepped(takers)
