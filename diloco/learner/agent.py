"""The agent of a site: the one object that its training loop calls, and that talks to the syncer.

``restored_machine`` restores the state machine of a new process from a checkpoint, an outbox and an odometer.

The training thread calls ``after_step`` between two inner steps (a boundary).  It runs the state machine, copies
tensors, and returns without waiting for a socket or a file, except in lock-step.  The threads in ``exchange`` and
``transfer`` encode, write and send.  The lock is held for decisions and copies only, never while waiting.

With several ranks, rank 0 has the ``Agent`` and the others a ``Follower``.  Rank 0 broadcasts what it does at a
boundary over the site's own process group, so that all ranks change at the same inner step (``ranks.Orders``).  Before
a step ends, all ranks know whether rank 0 may act after it (``may_act``); if not, rank 0 broadcasts nothing.

``Touch`` sends heartbeats, the meter's events and the final Leave, in one background thread.  ``Meter`` measures how
the training loop spends its time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK
from diloco.inner import GroupError
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.trainer import Resumed, StepInfo, Verdict
from diloco.learner.exchange import Beside, Change, Exchange, Owners
from diloco.learner.ranks import all_mine
from diloco.learner.seal import Odometer, Outbox
from diloco.learner.tensors import Echo, SiteTensors
from diloco.learner.transfer import LOOK_S, JoinFailed, Listener, report_info, say_goodbye
from diloco.sync.effects import Join, LearnerEffect, Leave, Note, Seal, SkipData, StopTraining
from diloco.sync.events import (
    BaseDiffers,
    BoundaryReached,
    Ending,
    FetchFailed,
    FinalWanted,
    LeaveAsked,
    OverlapChosen,
    StepDone,
)
from diloco.sync.journal import PlainError
from diloco.sync.learner import LearnerSync
from diloco.sync.progress import SentState, ask_of, ledger_of, site_ledger, standing_of, units_from, wants_soon
from diloco.wire.messages import Refused, ReportInfo, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.inner.holding import Holding
    from diloco.inner.trainer import Log
    from diloco.learner.exchange import AgentOptions
    from diloco.learner.ranks import Dealt, Orders
    from diloco.outer.fragments import Layout
    from diloco.sync.events import LearnerEvent
    from diloco.sync.options import Agreement, LearnerOptions
    from diloco.sync.progress import Ledger
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader


@dataclass(frozen=True, slots=True)
class Finished:
    """How the site's part ended: ``finished``, ``drained``, ``left`` or ``failed``, and its token ledger.

    ``final``: the model holds the final version of a finished run.
    """

    ending: str
    why: str
    ledger: dict[str, int]
    final: bool = False


def site_done(emit: Log, ending: str, why: str, ledger: Ledger, *, final: bool) -> Finished:
    """Log the end of the site's part with its ledger, which must balance, and return it."""
    assert ledger.balanced(), ledger
    found = ledger._asdict()
    emit("site_done", {"ledger": {f"tokens_{field}": value for field, value in found.items()}, "reason": why})
    return Finished(ending, why, found, final)


SAMPLES_MAX = 8192


@dataclass(slots=True)
class Reading:
    """Totals since this process began to train; times in seconds, ``stall_s`` is all the time inside ``after_step``."""

    inner_steps: int = 0
    tokens: int = 0
    train_s: float = 0.0
    stall_s: float = 0.0
    adopt_s: float = 0.0
    after_step_s_max: float = 0.0
    step_s_p50: float = 0.0
    step_s_p95: float = 0.0
    step_s_max: float = 0.0
    loss: float | None = None
    tokens_per_s: float = 0.0


class Meter:
    """Measures the time of the training loop; written by the training thread, read by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_ns: int | None = None
        self._ended_ns: int | None = None
        self._samples_ns: list[int] = []
        self._stride = 1
        self._stall_ns = self._adopt_ns = 0
        self._totals = Reading()  # Times, percentiles and speed stay 0 here: they are computed when it is read.

    def step(self, step_ns: int, tokens: int, loss: float) -> None:
        """Record one inner step."""
        with self._lock:
            totals = self._totals
            if self._began_ns is None:
                self._began_ns = time.perf_counter_ns() - step_ns
            if totals.inner_steps % self._stride == 0:
                self._samples_ns.append(step_ns)
                if len(self._samples_ns) == SAMPLES_MAX:
                    # Keep every second sample and halve the sampling rate, so that a long run is sampled evenly.
                    self._samples_ns = self._samples_ns[::2]
                    self._stride *= 2
            totals.inner_steps += 1
            totals.step_s_max = max(totals.step_s_max, step_ns / 1e9)
            totals.tokens += tokens
            totals.loss = loss if totals.loss is None or totals.loss != totals.loss else 0.9 * totals.loss + 0.1 * loss

    def stalled(self, stall_ns: int, adopt_ns: int) -> None:
        """Record that ``after_step`` took ``stall_ns``, of which ``adopt_ns`` was spent on copying values."""
        with self._lock:
            self._stall_ns += stall_ns
            self._adopt_ns += adopt_ns
            self._totals.after_step_s_max = max(self._totals.after_step_s_max, stall_ns / 1e9)

    def end(self) -> None:
        """Stop the clock: the training loop is over."""
        with self._lock:
            self._ended_ns = self._ended_ns or time.perf_counter_ns()

    def read(self) -> Reading:
        """Return the totals now; percentiles are over fewer than ``SAMPLES_MAX`` steps, sampled evenly from all."""
        with self._lock:
            samples_ns = list(self._samples_ns)
            until_ns = self._ended_ns or time.perf_counter_ns()
            reading = replace(self._totals, stall_s=self._stall_ns / 1e9, adopt_s=self._adopt_ns / 1e9)
            if self._began_ns is not None and until_ns > self._began_ns:
                reading.train_s = (until_ns - self._began_ns) / 1e9
                reading.tokens_per_s = reading.tokens / reading.train_s
        if samples_ns:
            samples_ns.sort()  # Outside the lock, which the training thread also takes.
            reading.step_s_p50 = samples_ns[int(0.5 * len(samples_ns))] / 1e9
            reading.step_s_p95 = samples_ns[int(0.95 * len(samples_ns))] / 1e9
        return reading


WAITING_S = 10.0
"""Seconds of waiting after which rank 0 tells the user, who hears of it again after twice as long, and again; it tells
the other ranks as often."""
UNHEARD_MAX = 3
"""Consecutive unanswered heartbeats after which a site with several addresses joins again, perhaps elsewhere."""


class Progress:
    """Of a whole model that is fetched from now on: the bytes that are here, and when the last ones came."""

    def __init__(self, owners: Owners, layout: Layout) -> None:
        self._owners, self._whole = owners, 4 * sum(fragment.numel for fragment in layout.fragments)
        self._before, self._bytes, self._at = owners.traffic()[1], 0, 0.0

    def __str__(self) -> str:
        return f"{self._bytes / 1e6:,.1f} of at most {self._whole / 1e6:,.1f} MB are here"

    def heard_at(self) -> float:
        """Return the monotonic time of the last bytes.  More than twice the whole are no progress: they are damaged."""
        if self._bytes < (down := self._owners.traffic()[1] - self._before) <= 2 * self._whole:
            self._bytes, self._at = down, time.monotonic()
        return self._at


class Touch:
    """The heartbeat thread of an agent, and the flags by which the agent controls it."""

    def __init__(self, site: Agent, meter_every_s: float) -> None:
        self._site, self._meter_every_s = site, meter_every_s
        self._echo = Echo(site.tensors, site.changed)
        self._unheard = 0
        self.heard_at = 0.0
        """The monotonic time of the last answered heartbeat."""
        self._in_vain = False  # Whether the last heartbeat brought no new data units.
        self.leave_asked = False  # A signal handler sets it, so a plain store.
        self.leaving = False
        self.over = False  # The site has left, knows every fate, and has reported that to the syncer.

    def run(self) -> None:
        """Run the thread."""
        site = self._site
        next_meter = next_report = time.monotonic()
        while not site.stopping.wait(LOOK_S):
            now = time.monotonic()
            if self.leave_asked:
                self.leave_asked = False
                site.tell(LeaveAsked())
            if self.leaving and not site.left.is_set():
                self._report()
                if say_goodbye(site):
                    with site.changed:
                        site.left.set()
                        site.changed.notify_all()
                    next_report = now
            if now >= next_meter:
                next_meter = now + self._meter_every_s
                self.emit_meter()
            has_settled = site.left.is_set() and not self.over and site.machine.settled()
            if not (now >= next_report or has_settled or self._wants_units()):
                continue
            next_report = now + site.listener.heartbeat_s
            if not site.left.is_set():
                self._echo.compute()
                self._report()
                continue
            # Report also after Leave: a syncer that is shutting down waits until nothing is in flight.
            settled = site.machine.settled()
            with contextlib.suppress(Unreachable, Refused):
                site.client.report(self._info())
            with site.changed:
                self.over = settled
                site.changed.notify_all()

    def _wants_units(self) -> bool:
        """Return whether to send the next heartbeat early, because few data units are left and the syncer answers."""
        machine = self._site.machine
        if not machine.options.unit_sequences or self._unheard or self._in_vain or self._site.left.is_set():
            return False
        with self._site.changed:
            return wants_soon(machine.options, machine.state)

    def _info(self) -> ReportInfo:
        """Return a heartbeat, without versions and digests until the site has a first version of every fragment."""
        site, reading = self._site, self._site.meter.read()
        with site.changed:
            options, state = site.machine.options, site.machine.state
            standing = standing_of([state])
            is_based = min(standing.versions) >= 0
            return report_info(
                site,
                standing,
                site.owners.traffic(),
                loss=reading.loss,
                tokens_per_s=reading.tokens_per_s,
                train_ns=int(reading.train_s * 1e9),
                stall_ns=int(reading.stall_s * 1e9),
                digests=site.owners.digests(self._echo.digests(), state) if is_based else (),
                link=site.link.info(state.step_ns),
                units=ask_of(options, state) if options.unit_sequences and not site.left.is_set() else None,
            )

    def _report(self) -> None:
        site = self._site
        if site.left.is_set() or site.machine.state.incarnation == 0:
            return
        info = self._info()
        try:
            reply = site.client.report(info)
        except (Unreachable, Refused) as error:
            if getattr(error, "retry_after_s", None) is not None:
                self.heard_at = time.monotonic()  # It answers, but is held: by a full disk, say.
            # The Watch stream fails too, and the listener joins again when the syncer is back.  But a syncer that waits
            # for its standby keeps that stream alive, even after the standby has replaced it.
            self._unheard += 1
            if self._unheard == UNHEARD_MAX and site.client.has_choice:
                site.rejoin("the syncer does not answer heartbeats")
            return
        self._unheard, self.heard_at = 0, time.monotonic()
        before = site.machine.state.units.end
        if reply.units is not None:
            site.tell(reply.units)
        self._in_vain = site.machine.state.units.end <= before
        if not reply.known:
            site.rejoin("the syncer does not know this process")
        for fragment in reply.retake:
            if fragment < len(info.versions) and info.digests[fragment]:
                site.tell(BaseDiffers(fragment, info.versions[fragment]))

    def emit_meter(self) -> None:
        """Emit the totals of this process and the site's state as an event."""
        site, reading = self._site, asdict(self._site.meter.read())
        with site.changed:
            parts, link = site.machine.state.fragments, asdict(site.link.info(site.machine.state.step_ns))
            places = {
                "incarnation": site.known.incarnation,
                "in_flight": sum([len(part.undecided()) for part in parts]),
                "staleness": max([part.published - part.base_version for part in parts]),
                **dict(zip(("bytes_up", "bytes_down"), site.owners.traffic(), strict=True)),
            }
        site.emit("meter", {**reading, **places, **{f"link_{name}": value for name, value in link.items()}})


def restored_machine(
    options: LearnerOptions,
    resumed: Resumed | None,
    outbox: Outbox,
    odometer: Odometer,
    site_tensors: SiteTensors,
    here: Mapping[str, str],
) -> LearnerSync:
    """Restore the state machine; load the tensors it lists into ``site_tensors``, and drop other updates in the outbox.

    ``CheckpointError`` when the checkpoint is of another version, or of another site, run or model than ``here``.

    ``resumed.redo`` is the step that the checkpoint includes but its machine has not counted.  The machine gets it
    before the first join: if the syncer has later work, the step's progress is discarded with the rest and counts as
    lost.
    """
    odometer_step, tokens = odometer.reading
    if resumed is None:
        outbox.clear(set())
        machine = LearnerSync(options)
        machine.state.tokens_processed = tokens
        return machine
    redo, meta = resumed.redo, resumed.meta
    if redo is not None and odometer_step >= redo.step:
        tokens -= redo.tokens  # The machine counts them again with ``StepDone``.
    plain = meta.get("machine")
    parts = plain.get("fragments") if isinstance(plain, dict) else None
    if not isinstance(parts, list):
        raise CheckpointError("the checkpoint is not one of a site: it has no list of fragments")
    if len(parts) != options.num_fragments:
        raise CheckpointError(
            f"num_fragments is {options.num_fragments}, and the checkpoint has {len(parts)} fragments"
        )
    try:
        machine = LearnerSync.restore(options, plain, outbox.digests(), tokens)
    except PlainError as error:
        raise CheckpointError(f"the checkpoint is of another version: {error}") from error
    published, told = meta.get("published"), None  # Not in a checkpoint of an earlier version.
    if isinstance(published, dict):
        for name, ours in here.items():
            if (theirs := published.get(name, ours)) != ours:
                raise CheckpointError(f"its {name} is {theirs!r}, and here it is {ours!r}: begin without it")
        told = [str(each) for each in published["digests"]]
    fragments = machine.state.fragments
    listed = {(at, sent.sequence): sent.bytes_wanted for at, part in enumerate(fragments) for sent in part.in_flight}
    site_tensors.restore(resumed.tensors, [part.base_version for part in fragments], told, listed)
    # A process that died between an ack and the removal left bytes that are not needed any more.
    outbox.clear({key for key, bytes_wanted in listed.items() if bytes_wanted})
    if redo is not None:
        step = StepDone(redo.step, redo.tokens, redo.step_ns, redo.cursor, redo.sequences)
        effects = machine.handle(step, time.monotonic_ns())
        assert not effects, "a machine that has not joined returns no effects"
    return machine


class Agent(Exchange):
    """Rank 0 of a site: runs its state machine and talks to the syncer."""

    def __init__(
        self,
        options: AgentOptions,
        learner: LearnerOptions,
        layout: Layout,
        holding: Holding,
        agreement: Agreement,
        client: SyncClient,
        emit: Log,
        orders: Orders,
        resumed: Resumed | None = None,
        disk: Disk = PLAIN_DISK,
        dealt: Dealt | None = None,
    ) -> None:
        """``holding`` is the model, written in place; ``resumed`` has what ``state`` returned for a checkpoint.

        ``dealt`` maps fragments to the ranks that own them; by default rank 0 owns all.
        """
        dealt = dealt or all_mine(layout)
        self._options, self._agreement = options, agreement
        self.emit, self._redo = emit, resumed.redo if resumed is not None else None
        path = Path(options.folder) / "odometer"
        self._odometer = Odometer(path, disk)
        if self._odometer.damage:
            emit("note", {"note": "odometer", "why": f"{path} {self._odometer.damage}"})
        super().__init__(options, learner.adopt, layout, holding, dealt, orders, client, disk)
        self.meter = Meter()
        self._here = {
            "site": self.site_id,
            "run_id": agreement.run_id,
            "layout_fingerprint": agreement.layout_fingerprint,
        }
        self.machine = restored_machine(learner, resumed, self.outbox, self._odometer, self.tensors, self._here)
        self.known = self.machine.state
        self.stop: StopTraining | None = None
        """Why this site's part ends; None while it does not."""
        self._has_ended = self._draws_again = False
        self.listener = Listener(self, agreement, None if options.takeover else Path(options.folder))
        self.rejoin = self.listener.rejoin
        self._touch = Touch(self, options.meter_every_s)
        self.owners = Owners(dealt, self, orders)
        self.owners.begin(self.machine.state)
        self.tell(OverlapChosen(self.link.adapter.choice.overlap_steps))

    # --- what the training loop calls --------------------------------------------------------------------------

    def start(self, away_s: float | None = None) -> int:
        """Join and fetch every fragment; return the data cursor (sequences drawn) to resume from.

        Waits at most ``join_timeout_s`` for a syncer, and as long for the next bytes of the first versions; then closes
        the agent and raises ``JoinFailed``.  With ``away_s`` a site that resumes from a checkpoint waits that many
        seconds and then trains without a syncer: it joins when the syncer is back, as after a lost connection, and
        ``has_joined`` becomes true.
        """
        now, before = time.monotonic(), self.machine.state.tokens_processed
        until = now + self._options.join_timeout_s
        may_go_on = away_s is not None and self.machine.ready() and not self.machine.options.lock_step
        try:
            try:
                self.listener.first(now + (away_s or 0.0) if may_go_on else until)
            except JoinFailed as error:
                if not may_go_on or error.kind != "unreachable" or self.stopping.is_set():
                    raise
                self.emit("note", {"note": "trains_on_without", "why": error.text})
            self.begin_threads(self.listener.run, self._touch.run)
            fetch = Progress(self.owners, self.tensors.layout)
            try:
                # A run in its last round admits a new site too, and the site needs a base for its last step.
                ready = lambda: self.machine.ready() or self.has_failed()  # noqa: E731
                bound_s = self._options.join_timeout_s
                self._until(ready, bound_s, "the first versions", fetch.heard_at, fetch.__str__)
            except TimeoutError as error:
                raise JoinFailed("unreachable", str(error)) from error
            if self.stop is not None and self.stop.failed:
                raise JoinFailed("refused", self.stop.why)
            self._orders.go_on()
        except BaseException:
            self.close()
            raise
        with self.changed:
            if before:
                facts = {"step": self.machine.state.step, "tokens_lost": site_ledger(self.machine.state).lost}
                self.emit("resumed", {**facts, **self.tensors.residuals.dropped})
            return self.machine.state.cursor

    def has_failed(self) -> bool:
        """Return whether the site's part ends by a failure, after which the model no longer changes."""
        return self.stop is not None and self.stop.failed

    @property
    def has_joined(self) -> bool:
        """Whether this process has ever joined."""
        return self.machine.state.incarnation > 0

    def is_redone(self, info: StepInfo) -> bool:
        """Return whether ``info`` is the step of the checkpoint (``redo``), which an earlier process has made."""
        return self._redo is not None and info.step == self._redo.step

    def after_step(self, info: StepInfo) -> Verdict:
        """Account for an inner step, seal and adopt what is due, and return whether to stop.  Called once per step.

        In lock-step it waits for the version of the site's update as long as the syncer answers: other sites may be
        slower, or away.  ``TimeoutError`` after ``lock_step_timeout_s`` without an answer; ``GroupError`` when a rank
        that owns fragments is gone.
        """
        began_ns = time.perf_counter_ns()
        with self.changed:
            # The machine has already counted the step of a checkpoint (``redo``).  It ignores steps after this part of
            # the run has ended, because it sends nothing more.
            told = self._has_ended or self.is_redone(info)
            step = StepDone(info.step, info.tokens, info.step_ns, info.cursor, info.sequences, info.passes)
            effects = self.machine.handle(BoundaryReached() if told else step, time.monotonic_ns())
            self._odometer.write(info.step, self.machine.state.tokens_processed)
            until = time.monotonic() + self._options.lock_step_timeout_s
            adopted = self._carry_out(effects, until)
            waiting = not info.passes and (self.machine.must_wait() or bool(self.owners.lost))
        adopt_ns = time.perf_counter_ns() - began_ns if adopted else 0
        if waiting:
            self._until(
                lambda: not self.machine.must_wait() or self.stop is not None,
                self._options.lock_step_timeout_s,
                "the version of its own update (lock_step)",
                lambda: self._touch.heard_at,
                lambda: f"the round may wait for other sites (diloco status {self.client.address})",
            )
        stop = self.stop if not info.passes else None
        if not info.passes:
            self._orders.go_on(stop=stop is not None)
        if not told:
            self.meter.step(info.step_ns, info.tokens, info.loss)
        self.meter.stalled(time.perf_counter_ns() - began_ns, adopt_ns)
        self._has_ended = stop is not None
        return Verdict(stop is not None, stop.why if stop else "")

    def may_act(self) -> bool:
        """Return whether ``after_step`` may need the other ranks after the step that is about to end.

        If not, a request to stop that arrives meanwhile takes effect only at the end of the next step.
        """
        with self.changed:
            return self.stop is not None or bool(self.owners.lost) or self.machine.may_act()

    def next_turn(self) -> tuple[int, int] | None:
        """Return, in lock-step, the next exchange in the order of the whole model; None once this part has ended."""
        with self.changed:
            return self.machine.next_turn() if self.stop is None else None

    def progress(self) -> float:
        """Return the run's progress from 0 to 1, as last reported by the syncer."""
        return self.machine.state.progress_ppm / 1e6

    def units(self, place: int, count: int) -> list[tuple[int, int]]:
        """Return up to ``count`` of the site's data units, from index ``place`` of its list on, for ``inner.data``."""
        with self.changed:
            found, again = units_from(self.machine.state, place, count)
        if again and not self._draws_again:
            why = "no unit of the data is left, and no syncer has leased more: the site draws its own units again"
            self.emit("note", {"note": "units_again", "why": why})
        self._draws_again = again
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the tensors and metadata of a checkpoint from which a new process can resume.  The metadata identifies
        the published versions in it, so that a run can be restored from the checkpoint."""
        with self.changed:
            published = {**self._here, "digests": list(self.tensors.told_base)}
            self.owners.capture()
            return self.tensors.tensors(), {"machine": self.machine.snapshot(), "published": published}

    def ledgers(self) -> list[Ledger]:
        """Return the token ledger of each fragment."""
        with self.changed:
            state = self.machine.state
            return [ledger_of(state, index) for index in range(len(state.fragments))]

    def leave(self) -> None:
        """End this site's part at the next boundary, unless it is ending already.  For the training thread."""
        if self.stop is None:
            self.tell(LeaveAsked())

    def leave_soon(self) -> None:
        """Ask the site to stop, at the user's request.  May be called from a signal handler."""
        self._touch.leave_asked = True

    def finish(self, *, final: bool = False) -> Finished:
        """After the loop, send what is unsent, leave, and await the last fates.  Ends all threads.

        Each of the two waits lasts at most ``finish_timeout_s``.  The other ranks are in their ``finish`` meanwhile.
        With ``final``, and if the run is finished, the model is then set to the run's final version: the second wait
        begins anew as long as bytes of it come.
        """
        self.meter.end()
        self.leave()
        if final:
            self.tell(FinalWanted())
        bound, failed = self._options.finish_timeout_s, self.has_failed
        if not failed():
            with contextlib.suppress(TimeoutError):  # The ledger reports what is still unsent or undecided then.
                self._until(lambda: self.left.is_set() or failed(), bound, "its last updates")
                fetch = Progress(self.owners, self.tensors.layout)
                final_at = lambda: fetch.heard_at() if self.machine.state.ending is Ending.FINISHED else 0.0  # noqa: E731
                done = lambda: self._touch.over or failed()  # noqa: E731
                told = (final_at, fetch.__str__) if final else ()
                self._until(done, bound, "its last fates and the final version", *told)
        self.owners.parting = True
        self._orders.go_on(stop=True)
        stop = self.stop
        assert stop is not None
        self._touch.emit_meter()
        ending = self.machine.state.ending
        name = "failed" if stop.failed else ending.value if ending is not None else "left"
        with self.changed:
            ledger = site_ledger(self.machine.state)
        if final and name == Ending.FINISHED.value and not self.machine.is_final():
            why = f"it did not come within finish_timeout_s={bound:g}"
            self.emit("note", {"note": "final_missed", "why": f"this site ends without the final version: {why}"})
        finished = site_done(self.emit, name, stop.why, ledger, final=self.machine.is_final())
        self.close()
        return finished

    def withdraw(self) -> None:
        """Make one attempt to leave if the site does not start to train, so that no round waits for it."""
        if not self.has_joined or self.stopping.is_set():
            return
        with self.changed:
            self.left.set()  # The listener does not join again.
        with contextlib.suppress(Unreachable, Refused):
            self.client.leave(self.known.incarnation)

    def close(self) -> None:
        """End the threads."""
        self.stopping.set()
        self.owners.close()
        self.listener.wake()
        self.end_threads()

    # --- boundaries, in the training thread --------------------------------------------------------------------

    def _until(
        self,
        done: Callable[[], bool],
        bound_s: float,
        what: str,
        heard_at: Callable[[], float] = lambda: 0.0,
        why: Callable[[], str] | None = None,
    ) -> None:
        """Wait at a boundary, carrying out effects, until ``done``.

        ``TimeoutError`` after ``bound_s``, counted anew from the latest ``heard_at()``; ``GroupError`` when a rank is
        lost.  With ``why`` a long wait is told to the user, and to the other ranks, which would end otherwise.
        """
        began = told_at = time.monotonic()
        say_s = WAITING_S
        with self.changed:
            while True:
                until = max(began, heard_at()) + bound_s
                self._carry_out(self.machine.handle(BoundaryReached(), time.monotonic_ns()), until)
                if self.owners.lost:
                    raise GroupError(self.owners.lost)
                if done():
                    return
                now = time.monotonic()
                if now >= until:
                    raise TimeoutError(f"site {self.site_id} timed out waiting for {what}")
                if why is not None and now >= told_at + WAITING_S:
                    told_at = now
                    self._orders.wait()
                    if now >= began + say_s:
                        say_s = 2 * (now - began)
                        late = f"{what} did not come in {now - began:.0f} s"
                        self.emit("note", {"note": "waits", "why": f"{late}: {why()}"})
                self.changed.wait(min(until - now, 0.5))

    # --- effects; the lock is held -----------------------------------------------------------------------------

    def _carry_out(self, effects: list[LearnerEffect], until: float = 0.0) -> bool:
        """Carry out effects in order; return whether values have changed.

        The training thread passes ``until``, its deadline: in lock-step it waits while the sealed values are read.
        """
        adopted, at_rest = False, until > 0 and self.machine.options.lock_step
        self.owners.know(self.machine.state)
        for effect in effects:
            match effect:
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
                case _ if isinstance(effect, Change | Beside):
                    owner = self.owners if self.owners.owners[effect.fragment] else self
                    if isinstance(effect, Beside):
                        owner.order(effect)
                    elif isinstance(effect, Seal):
                        codec = self.link.codec(self.machine.state.step_ns)
                        owner.at_boundary(effect, codec, at_rest=at_rest)
                    else:
                        owner.at_boundary(effect)
                        adopted = True
        self.changed.notify_all()
        if at_rest:
            self.stand_still(until)
        return adopted

    def stand_still(self, until: float) -> None:
        """Wait until no job reads the model's memory, or until ``until`` (``TimeoutError``).

        The lock is released during the wait.
        """
        if not self.changed.wait_for(lambda: not self._unread or self.has_failed(), max(0.0, until - time.monotonic())):
            raise TimeoutError("this site timed out waiting for its update to be encoded (lock_step)")

    # --- background threads ------------------------------------------------------------------------------------

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """Return the digest of an update that waits to be sent and answered; None when there is no such update."""
        with self.changed:
            in_flight = self.machine.state.fragments[fragment].in_flight
            found = [s.digest for s in in_flight if s.sequence == sequence and s.state is SentState.SEALED]
            return found[0] if found else None

    def tell(self, event: LearnerEvent) -> None:
        """Pass an event to the machine from a background thread."""
        with self.changed:
            self.link.rounds.heard(event, time.monotonic_ns())
            adopted = self._carry_out(self.machine.handle(event, time.monotonic_ns()))
            assert not adopted, "values may change at a boundary only"

    def change(
        self, do: Callable[[], None], event: LearnerEvent, lineage: int = 0, told: PullHeader | None = None
    ) -> bool:
        """Call ``do`` and pass ``event`` to the machine, atomically; return False if it is from another run or syncer.

        For a fetched version, ``lineage`` is the one in which it was requested, and ``told`` its header.
        """
        with self.changed:
            state = self.machine.state
            if told is not None and lineage != state.lineage:
                return False  # From an abandoned lineage; the new lineage's fetch is in the queue.
            if told is not None and 0 < told.epoch < state.epoch:  # The site has just joined another syncer.
                self.tell(FetchFailed(told.fragment))
                return False
            do()
            self.tell(event)
            return True

    def give_up(self, why: str) -> None:
        """Stop the site with a failure."""
        with self.changed:
            self._stop_for(StopTraining(None, why, failed=True))
            self.changed.notify_all()

    def _stop_for(self, stop: StopTraining) -> None:
        """Set the reason to stop; the first one counts, but a failure replaces one that is not a failure."""
        if self.stop is None or (stop.failed and not self.stop.failed):
            self.stop = stop
