"""Between a training loop and the syncer: the one object that a site's loop talks to.

``restored_machine`` makes the machine of a new process from a checkpoint, an outbox and an odometer.

The training thread calls ``after_step`` between two inner steps.  It lets the machine decide, copies tensors, and
returns; it waits for no socket and no file.  The threads in ``exchange`` and ``transfer`` encode, write and send.  The
lock is held for decisions and copies only, never while waiting.

With several ranks, rank 0 has the ``Agent`` and the others a ``Follower``.  Rank 0 tells them what it does at a
boundary, over the site's own process group, so that all ranks change at the same inner step (``channel.Orders``).  All
ranks know before a step ends whether anything may be done after it (``may_act``): where not, no rank is told or asked.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.parallel import GroupError
from diloco.inner.trainer import StepInfo, Verdict
from diloco.learner.channel import all_mine
from diloco.learner.exchange import Exchange
from diloco.learner.heartbeat import Touch
from diloco.learner.meter import Meter
from diloco.learner.options import Finished, JoinFailed
from diloco.learner.outbox import Odometer, Outbox
from diloco.learner.owner import Owners
from diloco.learner.tensors import SiteTensors
from diloco.learner.transfer import Joiner, Listener
from diloco.sync.effects import (
    Adopt,
    Fetch,
    Forget,
    Join,
    LearnerEffect,
    Leave,
    Note,
    Release,
    Retake,
    Seal,
    Send,
    SkipData,
    StartOver,
    StopTraining,
)
from diloco.sync.events import BoundaryReached, FetchFailed, LeaveAsked, StepDone, TurnElsewhere, VersionFetched
from diloco.sync.learner import LearnerSync
from diloco.sync.plain import PlainError
from diloco.sync.progress import SentState, ledger_of, site_ledger
from diloco.sync.site_units import units_from
from diloco.wire.messages import Refused, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.holding import Holding
    from diloco.learner.channel import Dealt, Orders
    from diloco.learner.exchange import Source
    from diloco.learner.options import AgentOptions
    from diloco.outer.fragments import Layout
    from diloco.sync.agreement import Agreement
    from diloco.sync.events import Ending, LearnerEvent
    from diloco.sync.options import LearnerOptions
    from diloco.sync.progress import Ledger
    from diloco.wire.client import SyncClient


def restored_machine(
    options: LearnerOptions,
    restored: tuple[Mapping[str, Tensor], Mapping[str, object]] | None,
    redo: StepInfo | None,
    outbox: Outbox,
    odometer: Odometer,
    site_tensors: SiteTensors,
) -> LearnerSync:
    """The machine, and the tensors that it lists in ``site_tensors``; the outbox keeps what it lists and nothing else.

    ``redo`` is the step that the checkpoint holds and that its machine had not heard of.  It is told before the first
    join: if the syncer has later work, what this step learned is thrown away with the rest and counts as lost.
    """
    odometer_step, tokens = odometer.read()
    if restored is None:
        outbox.clear(set())
        machine = LearnerSync(options)
        machine.state.tokens_processed = tokens
        return machine
    tensors, meta = restored
    if redo is not None and odometer_step >= redo.step:
        tokens -= redo.tokens  # It is counted when the machine hears of it.
    machine = _restored(options, meta, outbox, tokens)
    site_tensors.restore(tensors, [part.base_version for part in machine.state.fragments], _told(meta))
    listed = {(index, sent.sequence) for index, part in enumerate(machine.state.fragments) for sent in part.in_flight}
    for fragment, sequence in [key for key in site_tensors.sent if key not in listed]:
        site_tensors.release(fragment, sequence)
    # A process that died between an ack and the removal has left bytes that nobody asks for again.
    parts = enumerate(machine.state.fragments)
    outbox.clear({(index, sent.sequence) for index, part in parts for sent in part.in_flight if sent.bytes_wanted})
    if redo is not None:
        step = StepDone(redo.step, redo.tokens, redo.step_ns, redo.cursor, redo.sequences)
        effects = machine.handle(step, time.monotonic_ns())
        assert not effects, "before it has joined, a machine decides nothing"
    return machine


def _told(meta: Mapping[str, object]) -> list[str] | None:
    """The digests that were told with the bases; None in a checkpoint of an earlier version, which does not say."""
    published = meta.get("published")
    return [str(each) for each in published["digests"]] if isinstance(published, dict) else None


def _restored(options: LearnerOptions, meta: Mapping[str, object], outbox: Outbox, tokens: int) -> LearnerSync:
    """The machine that ``meta`` holds; CheckpointError in words when it is of another run or another version."""
    plain = meta.get("machine")
    parts = plain.get("fragments") if isinstance(plain, dict) else None
    if not isinstance(parts, list):
        raise CheckpointError("the checkpoint is not one of a site: it says nothing about what was sent")
    if len(parts) != options.num_fragments:
        raise CheckpointError(
            f"num_fragments is {options.num_fragments}, and the checkpoint has {len(parts)} fragments"
        )
    try:
        return LearnerSync.restore(options, plain, outbox.digests(), tokens)
    except PlainError as error:
        raise CheckpointError(f"the checkpoint is of another version: {error}") from error


__all__ = ["Agent", "Finished", "JoinFailed"]


class Agent(Exchange):
    """Rank 0 of a site."""

    def __init__(
        self,
        options: AgentOptions,
        learner: LearnerOptions,
        layout: Layout,
        holding: Holding,
        agreement: Agreement,
        client: SyncClient,
        site_id: str,
        emit: Callable[[str, dict[str, object]], None],
        orders: Orders,
        restored: tuple[Mapping[str, Tensor], Mapping[str, object]] | None = None,
        redo: StepInfo | None = None,
        disk: Disk = PLAIN_DISK,
        dealt: Dealt | None = None,
    ) -> None:
        """``holding`` is the model, written in place; ``restored`` is what ``state`` gave a checkpoint.

        ``redo`` is the step of that checkpoint, if the loop will call ``after_step`` for it once more.  ``dealt`` says
        which rank owns which fragment; rank 0 owns all by default.
        """
        dealt = dealt or all_mine(layout)
        self._options, self._learner, self._agreement = options, learner, agreement
        self._say, self._redo = emit, redo
        outbox = Outbox(Path(options.folder) / "outbox", disk)
        self._odometer = Odometer(
            Path(options.folder) / "odometer", disk, lambda why: emit("note", {"note": "odometer", "why": why})
        )
        tensors = SiteTensors.of(options, learner.adopt, layout, holding, dealt.of(0))
        super().__init__(agreement.run_id, site_id, tensors, outbox, orders, client, options.choices())
        self.meter = Meter()
        self.machine = restored_machine(learner, restored, redo, outbox, self._odometer, tensors)
        self._stop: StopTraining | None = None
        self._has_ended = self._draws_again = False
        self._rank_lost = ""
        self._rejoining = ""  # Why, as it was said; until it has joined.
        self._joiner = Joiner(self, client, agreement, layout, self.sealer.encoder)
        self._listener = Listener(self, client)
        self._touch = Touch(self, options.meter_every_s)
        self.owners = Owners(dealt, self, orders, self._lose)
        self.owners.begin(self.machine.state)
        self.use.begin()

    # --- what the training loop calls --------------------------------------------------------------------------

    def start(self, away_s: float | None = None) -> int:
        """Join, and bring every fragment here; returns the data cursor (sequences drawn) to go on from.

        Waits at most ``join_timeout_s`` for a syncer; ``JoinFailed`` says why it did not work, and the agent is closed.
        With ``away_s``, a site that goes on from a checkpoint waits so long and then trains on without: it joins when
        the syncer is back, as it would have after losing it, and ``has_joined`` tells.
        """
        try:
            return self._start(time.monotonic(), away_s)
        except BaseException:
            self.close()
            raise

    def _start(self, now: float, away_s: float | None) -> int:
        before, until = self.machine.state.tokens_processed, now + self._options.join_timeout_s
        may_go_on = away_s is not None and self.machine.ready() and not self._learner.lock_step
        try:
            self._joiner.first(now + (away_s or 0.0) if may_go_on else until)
        except JoinFailed as error:
            if not may_go_on or error.kind != "unreachable" or self.stopping.is_set():
                raise
            self.emit("note", {"note": "trains_on_without", "why": error.text})
        self.begin(self._listener.run, self._touch.run)
        # A run that is in its last round takes a newcomer in as well: it needs a base for the step it ends with.
        done = lambda: self.machine.ready() or self.has_failed()  # noqa: E731
        try:
            self._until(done, until, "the first versions")
        except TimeoutError as error:
            raise JoinFailed("unreachable", str(error)) from error
        if self.has_failed():
            assert self._stop is not None
            raise JoinFailed("refused", self._stop.why)
        self._orders.go_on()
        with self.changed:
            ledger = site_ledger(self.machine.state)
            if before:
                facts = {"step": self.machine.state.step, "tokens_lost": ledger.lost}
                self.emit("resumed", {**facts, **self.tensors.residuals.dropped()})
            return self.machine.state.cursor

    def has_failed(self) -> bool:
        """Whether the site's part ends because something failed: nobody changes the model any more."""
        return self._stop is not None and self._stop.failed

    @property
    def has_joined(self) -> bool:
        """Whether this process has ever been taken in."""
        return self.machine.state.incarnation > 0

    @property
    def stop(self) -> StopTraining | None:
        """Why this site's part is to end, once that is known."""
        return self._stop

    @property
    def ending(self) -> Ending | None:
        """How the run ended, as the syncer told."""
        return self.machine.state.ending

    def after_step(self, info: StepInfo) -> Verdict:
        """The line in the training loop: account for the step, seal and adopt what is due, say whether to go on.

        ``GroupError`` when a rank of the site that owns fragments is gone.
        """
        began_ns = time.perf_counter_ns()
        with self.changed:
            # The step of a checkpoint was told to the machine before it joined; and where the loop goes on although
            # this part of the run has ended, its steps are nothing to a machine that sends nothing any more.
            told = self._has_ended or (self._redo is not None and info.step == self._redo.step)
            step = StepDone(info.step, info.tokens, info.step_ns, info.cursor, info.sequences, info.passes)
            effects = self.machine.handle(BoundaryReached() if told else step, time.monotonic_ns())
            self._odometer.write(info.step, self.machine.state.tokens_processed)
            until = time.monotonic() + self._options.lock_step_timeout_s
            adopted = self._carry_out(effects, until)
            waiting = not info.passes and (self.machine.must_wait() or bool(self._rank_lost))
        adopt_ns = time.perf_counter_ns() - began_ns if adopted else 0
        if waiting:
            done = lambda: not self.machine.must_wait() or self._stop is not None  # noqa: E731
            adopted |= self._until(done, until, "the version of its own update (lock_step)")
        stop = self._stop if not info.passes else None
        if not info.passes:
            self._orders.go_on(stop=stop is not None)
        if not told:
            self.meter.step(info.step_ns, info.tokens, info.loss)
        self.meter.stalled(time.perf_counter_ns() - began_ns, adopt_ns)
        self._has_ended = stop is not None
        return Verdict(stop is not None, stop.why if stop else "")

    def may_act(self) -> bool:
        """Whether ``after_step`` may have something to do with the other ranks after the step that is about to end.

        Where it may not, the site trains on although it was asked to stop meanwhile: until the next step's end.
        """
        with self.changed:
            return self._stop is not None or bool(self._rank_lost) or self.machine.may_act()

    def next_turn(self) -> tuple[int, int] | None:
        """In lock-step, which exchange comes next, in the order of the whole model; None once this part has ended."""
        with self.changed:
            return self.machine.next_turn() if self._stop is None else None

    def turn_elsewhere(self, turn: tuple[int, int] | None) -> None:
        """Hear which exchange comes next among those with the other syncers."""
        self.tell(TurnElsewhere(turn))

    def progress(self) -> float:
        """The run's progress from 0 to 1, as last told."""
        return self.machine.state.progress_ppm / 1e6

    def units(self, place: int, count: int) -> list[tuple[int, int]]:
        """The units that the site draws at ``place`` of its list and on, as ``inner.data`` asks for them."""
        with self.changed:
            found, again = units_from(self.machine.state, place, count)
        if again and not self._draws_again:
            why = "no unit of the data is left, and no syncer has leased more: its own are drawn over again"
            self.emit("note", {"note": "units_again", "why": why})
        self._draws_again = again
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """What a checkpoint must hold so that a new process goes on from here; and what it holds of the run's versions,
        so that a run can be restored from it."""
        with self.changed:
            published = {
                "site": self.site_id,
                "run_id": self._agreement.run_id,
                "layout_fingerprint": self._agreement.layout_fingerprint,
                "digests": list(self.tensors.told_base),
            }
            self.owners.capture()
            return self.tensors.tensors(), {"machine": self.machine.snapshot(), "published": published}

    def ledgers(self) -> list[Ledger]:
        """Where the tokens are, fragment by fragment."""
        with self.changed:
            state = self.machine.state
            return [ledger_of(state, index) for index in range(len(state.fragments))]

    def leave(self) -> None:
        """This site's part ends at the next boundary, unless it ends already.  For the training thread."""
        if self._stop is None:
            self.tell(LeaveAsked())

    def leave_soon(self) -> None:
        """The user asked this site to stop.  May be called from a signal handler."""
        self._touch.leave_asked = True

    def finish(self) -> Finished:
        """After the loop: send what is unsent, say goodbye, hear the last fates; bounded.  Ends all threads.

        The other ranks of the site are in their own ``finish`` meanwhile.
        """
        self.meter.end()
        self.leave()
        if not self.has_failed():
            bound, failed = self._options.finish_timeout_s, self.has_failed
            with contextlib.suppress(TimeoutError):  # What is still unsent or undecided then is said in the ledger.
                self._until(lambda: self._touch.left or failed(), time.monotonic() + bound, "its last updates")
                self._until(lambda: self._touch.over or failed(), time.monotonic() + bound, "its last fates")
        self.owners.part()
        self._orders.go_on(stop=True)
        stop = self._stop
        assert stop is not None
        self._touch.emit_meter()
        ending = self.machine.state.ending
        name = "failed" if stop.failed else ending.value if ending is not None else "left"
        with self.changed:
            ledger = site_ledger(self.machine.state)
        assert ledger.balanced(), ledger
        found = {field: getattr(ledger, field) for field in ledger.__slots__}
        self.emit(
            "site_done", {"ledger": {f"tokens_{field}": value for field, value in found.items()}, "reason": stop.why}
        )
        self.close()
        return Finished(name, stop.why, found)

    def withdraw(self) -> None:
        """Say goodbye where the site does not begin, so that no round waits for it; one attempt."""
        if not self.has_joined or self.stopping.is_set():
            return
        with self.changed:
            self._touch.left = True  # The listener joins no more.
        with contextlib.suppress(Unreachable, Refused):
            self.client.leave(self.incarnation)

    def close(self) -> None:
        """End the threads."""
        self.stopping.set()
        self.owners.close()
        self._listener.wake()
        self.end()

    # --- boundaries, in the training thread --------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], until: float, what: str) -> set[int]:
        """Stand at a boundary and carry out what comes until ``done``; the fragments that were adopted meanwhile."""
        adopted: set[int] = set()
        with self.changed:
            while True:
                adopted |= self._carry_out(self.machine.handle(BoundaryReached(), time.monotonic_ns()), until)
                if self._rank_lost:
                    raise GroupError(self._rank_lost)
                if done():
                    return adopted
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"site {self.site_id} waited in vain for {what}")
                self.changed.wait(min(left_s, 0.5))

    # --- effects; the lock is held -----------------------------------------------------------------------------

    def _carry_out(self, effects: list[LearnerEffect], until: float = 0.0) -> set[int]:
        """Carry out effects in order; returns the fragments whose values have changed.

        The training thread says ``until`` when it may stand still: in lock-step it does so while what it seals is read.
        """
        adopted, at_rest = set[int](), until > 0 and self._learner.lock_step
        self.owners.know(self.machine.state)
        for effect in effects:
            match effect:
                case Adopt() | Retake() | Seal():
                    codec = self.use.codec(self.machine.state.step_ns) if isinstance(effect, Seal) else ""
                    if self.owners.have(effect.fragment):
                        self.owners.at_boundary(effect, codec)
                    else:
                        self.at_boundary(effect, codec, at_rest=at_rest)
                    if not isinstance(effect, Seal):
                        adopted.add(effect.fragment)
                case Send() | Forget() | Release() | StartOver() | Fetch():
                    if self.owners.have(effect.fragment):
                        self.owners.order(effect)
                    else:
                        self.order(effect)
                case Join():
                    self.rejoin(effect.why)
                case Leave():
                    self._touch.leaving = True
                case StopTraining():
                    self._stop_for(effect)
                case Note():
                    self.emit("note", {"note": effect.what, "why": effect.why, "fragment": effect.fragment})
                case SkipData():
                    pass  # ``start`` returns the machine's cursor.
        self.changed.notify_all()
        if at_rest:
            self._standstill.wait(until)
        return adopted

    # --- beside training ---------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """See ``Participant``, here and in what follows."""
        return self.machine.state.incarnation

    @property
    def epoch(self) -> int:
        """Of the latest syncer."""
        return self.machine.state.epoch

    @property
    def lineage(self) -> int:
        """Of the run."""
        return self.machine.state.lineage

    @property
    def left(self) -> bool:
        """Whether goodbye is said."""
        return self._touch.left

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """The digest of an update that waits to be sent and answered; None when there is none by that number."""
        with self.changed:
            in_flight = self.machine.state.fragments[fragment].in_flight
            found = [s.digest for s in in_flight if s.sequence == sequence and s.state is SentState.SEALED]
            return found[0] if found else None

    def tell(self, event: LearnerEvent) -> None:
        """Hand an event to the machine from a thread beside training."""
        with self.changed:
            self.use.heard(event)
            adopted = self._carry_out(self.machine.handle(event, time.monotonic_ns()))
            assert not adopted, "values may change at a boundary only"

    def change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> bool:
        """Have something done and tell it to the machine, at one instant; False: it is of another run or syncer."""
        with self.changed:
            state = self.machine.state
            if source is not None and source.lineage != state.lineage:
                return False  # Of a run that is no more; the new lineage's fetch is in the queue.
            if source is not None and 0 < source.epoch < state.epoch:  # Another syncer took the site in a moment ago.
                assert isinstance(event, VersionFetched)
                self.tell(FetchFailed(event.fragment))
                return False
            do()
            self.tell(event)
            return True

    def emit(self, what: str, facts: dict[str, object]) -> None:
        """Write an event into the site's log."""
        self._say(what, facts)

    def join(self) -> None:
        """One attempt to join (again); raises ``Unreachable`` or ``Refused``."""
        reply, answered = self._joiner.attempt()
        self._rejoining = ""
        self._touch.heartbeat_s = reply.settings.heartbeat_ns / 1e9
        self.tell(answered)

    def rejoin(self, why: str) -> None:
        """Join again, soon, and say why once."""
        if why != self._rejoining:
            self._rejoining = why
            self.emit("note", {"note": "rejoin", "why": why})
        self._listener.wake()

    def give_up(self, why: str) -> None:
        """The site's part fails."""
        with self.changed:
            self._stop_for(StopTraining(None, why, failed=True))
            self.changed.notify_all()

    def _lose(self, why: str) -> None:
        with self.changed:
            self._rank_lost = why
            self.changed.notify_all()

    def _stop_for(self, stop: StopTraining) -> None:
        """The first reason to stop is the one that counts, but a failure is never hidden behind a good one."""
        if self._stop is None or (stop.failed and not self._stop.failed):
            self._stop = stop
