"""The syncer's decision loop: events in, journal, effects out.

A single thread owns the state machine. Each turn it takes the events that have arrived, lets the machine decide, writes
the records in one frame, makes the frame durable with one fsync, and only then carries out the effects. So an ack, a
fate or a version never leaves before its record is on disk. If a condition is missing (free disk space, say), the loop
waits in ``settle``. Meanwhile only status questions are answered, and it resumes where it stopped once the condition
holds. Long work (outer steps, snapshots) runs in a second thread and comes back as an event or not at all.

A failure of either thread ends the process (``on_failure``). After a failed fsync nothing may be acknowledged any
more, and nothing is, because only this loop answers calls.

Readiness says whether the syncer accepts updates at present, and if not, why. The health service reports it.

Readiness is not liveness. A syncer that drains or waits for disk space is healthy and must not be killed for it, so the
health service keeps answering SERVING for the server itself (the empty name), but not for the run and the service.

Room watches the disk space. A sender learns before its first byte that the disk is full, and every site learns when
there is space again. The disk counts as full when less than the reserve is free, or when the journal found no space.
The reserve is for what the syncer must still write when it accepts nothing new: the journal, its mark, a snapshot's
small files.

A data folder that was removed or replaced never recovers: this process still writes to files that it holds open, but
those writes are kept nowhere. So the process ends, and the run must be restored.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from diloco.durable import LOCK, DiskFullError, Step
from diloco.sync.effects import AnswerDone, AnswerJoin, AnswerPush, AnswerUnits, AskToConfirm, Note, OuterEffect
from diloco.sync.events import (
    DeadlinePassed,
    JoinRequested,
    Outcome,
    OuterEvent,
    SiteHeard,
    SiteSilent,
    SyncerStarted,
    UpdateArrived,
)
from diloco.sync.journal import Record, digest_effects
from diloco.sync.leadership import Place
from diloco.sync.members import Leases
from diloco.sync.state import Status
from diloco.sync.syncer import OuterSync
from diloco.syncer.store import Store
from diloco.wire.messages import Refusal
from diloco.wire.messages import Status as WireStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Unready(StrEnum):
    """Why the syncer accepts no updates."""

    STARTING = "starting"
    DRAINING = "draining"
    DISK_FULL = "disk_full"
    STANDBY_AWAY = "standby_away"
    LEASE_LOST = "lease_lost"


HELD = (Unready.DISK_FULL, Unready.STANDBY_AWAY, Unready.LEASE_LOST)
"""What the decision loop waits for, one at a time."""


@dataclass(frozen=True, slots=True)
class Want:
    """A condition that must hold before the syncer can go on: its kind, and its description for the user."""

    kind: Unready
    text: str


class Readiness:
    """The reasons why the syncer is not ready; any thread may change them. The first one is ``STARTING``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons = {Unready.STARTING}
        self.tell: Callable[[bool], None] = lambda ready: None
        """Called after every change with the present readiness."""

    def change(self, *, begins: Iterable[Unready] = (), ends: Iterable[Unready] = ()) -> None:
        """Remove the reasons in ``ends``, then add those in ``begins``."""
        with self._lock:
            self._reasons = self._reasons.difference(ends).union(begins)
            self.tell(not self._reasons)

    def reasons(self) -> list[str]:
        """Return the reasons in a fixed order; empty when the syncer accepts updates."""
        with self._lock:
            return [reason.value for reason in Unready if reason in self._reasons]


LOOK_EVERY_S = 1.0


class Room:
    """Watches the free space on the disk of ``folder``; any thread may call.

    ``on_change`` receives the missing condition, or None. The caller holds the folder's lock file, which identifies it.
    """

    def __init__(self, folder: Path, reserve_bytes: int, on_change: Callable[[Want | None], None]) -> None:
        self._folder = folder
        self._lock_file = os.stat(folder / LOCK)
        self._reserve_bytes = reserve_bytes
        self._on_change = on_change
        self._lock = threading.Lock()
        self._held: Want | None = None
        self._told: Unready | None = None

    def wanting(self, more_bytes: int = 0) -> str | None:
        """Return why the syncer cannot accept ``more_bytes`` now; None when it can."""
        held = self._held
        return self.lost() or (held.text if held is not None else self._low(more_bytes))

    def held(self, want: Want | None) -> None:
        """Note the condition that the decision loop waits for; None when it goes on."""
        self._held = want
        self.look()

    def look(self) -> None:
        """Report a change of the missing condition's kind to ``on_change``, once per change."""
        with self._lock:
            want, low = self._held, self._low(0)
            if want is None and low is not None:
                want = Want(Unready.DISK_FULL, low)
            kind = want.kind if want is not None else None
            if kind is not self._told:
                self._told = kind
                self._on_change(want)

    def run(self, stopping: threading.Event) -> None:
        """Run the watching thread: look until ``stopping``; raise ``OSError`` when the folder is lost."""
        while not stopping.wait(LOOK_EVERY_S):
            if (why := self.lost()) is not None:
                raise OSError(why)
            self.look()

    def lost(self) -> str | None:
        """Return why writes to the folder are lost; None while the folder is the one whose lock was taken.

        No other file can have the lock file's inode number while this process holds it open.
        """
        try:
            if os.path.samestat(os.stat(self._folder / LOCK), self._lock_file):
                return None
        except (FileNotFoundError, NotADirectoryError):
            return f"{self._folder} was removed or emptied while this process served from it"
        except OSError as error:
            return f"{self._folder} can no longer be looked at: {error.strerror}"
        return f"{self._folder} was replaced: it is not the folder that this process serves from"

    def free_bytes(self) -> int | None:
        """Return the free space on the folder's disk; None where it cannot be read."""
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self._folder).free
        return None

    def _low(self, more_bytes: int) -> str | None:
        free = self.free_bytes() if self._reserve_bytes else None
        if free is None or free - more_bytes >= self._reserve_bytes:
            return None
        needs = f"{more_bytes / 1e6:.4g} more and " if more_bytes else ""
        needs += f"{self._reserve_bytes / 1e6:.4g} MB in reserve"
        return f"disk full: {free / 1e6:.4g} MB are free, {needs} are wanted"


Answer = AnswerJoin | AskToConfirm | AnswerPush | AnswerDone | AnswerUnits
T = TypeVar("T")
IDLE_S = 0.5
BATCH_MAX = 256
CALL_S = 60.0
"""Seconds in which the loop must answer a call."""
TIMEOUT_S = 30.0
"""Seconds in which the loop must answer a question, and end when it is told to."""
RETRY_S = 0.1
"""Seconds between two attempts in ``settle``."""
HELD_AFTER_S = 0.5
"""After this many seconds of waiting in ``settle``, the loop is held: callers get ``CoreHeld`` instead of waiting."""


class CoreHeld(Refusal):
    """The decision loop waits for a missing condition, which the text names; the caller may retry."""

    def __init__(self, want: Want) -> None:
        super().__init__(WireStatus.UNAVAILABLE, want.text, retry_ms=round(1000 * HELD_AFTER_S))
        self.kind = want.kind


class NotHandedIn(CoreHeld):
    """Like ``CoreHeld``, but the request was not queued, so the loop will never see it."""


class CoreStopped(Refusal):
    """The decision loop gave no answer in time, or has ended; the error tells the site to retry."""

    def __init__(self) -> None:
        super().__init__(WireStatus.UNAVAILABLE, "the syncer stopped before it could answer")


@dataclass(slots=True)
class _Question:
    ask: Callable[[OuterSync], object]
    future: Future[object]
    is_work: bool = False

    def answer(self, machine: OuterSync) -> None:
        if not self.future.set_running_or_notify_cancel():
            return  # The caller has given up, so nothing would own the result.
        try:
            self.future.set_result(self.ask(machine))
        except BaseException as error:  # The caller's thread raises it.
            self.future.set_exception(error)
            if self.is_work:
                raise


@dataclass(eq=False, repr=False)
class Core:
    """The loop. It calls ``carry_out`` with every effect that is not an answer, in order.

    ``on_held`` receives each new value of ``held``. The loop calls ``replicated`` with the end of each locally durable
    turn, again and again until it returns None; until then it returns why no effect of that turn may be carried out
    yet. The loop calls ``leads`` in the same way right before it carries out effects, or answers questions that only
    read; ``leads`` may raise, which ends the loop. All callbacks run in the loop's thread. With ``acks_first`` the loop
    acknowledges an accepted update before ``replicated``.
    """

    machine: OuterSync
    """Only the loop's thread may touch it; any other one asks."""
    store: Store
    carry_out: Callable[[OuterEffect], None]
    _: KW_ONLY
    on_failure: Callable[[BaseException], None] = lambda error: None
    on_held: Callable[[Want | None], None] = lambda want: None
    replicated: Callable[[Place], str | None] = lambda end: None
    leads: Callable[[], str | None] = lambda: None
    acks_first: bool = False
    clock_ns: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        machine = self.machine
        self.held: Want | None = None
        """The condition that the loop waits for; None when it does not wait."""
        self._origin_ns = machine.state.now_ns - self.clock_ns()
        self.leases = Leases(machine.options.site_timeout_ns)
        self._inbox: queue.SimpleQueue[OuterEvent | _Question | None] = queue.SimpleQueue()
        self._deciding = threading.Lock()
        """Held while the machine changes."""
        self._nudged = threading.Event()
        self._lock = threading.Lock()
        """Guards ``_calls`` and ``leases``."""
        self._calls: dict[int, Future[Answer]] = {}
        self._turned_ns = machine.state.now_ns
        self._numbers = itertools.count(1)
        self._stopping = threading.Event()
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outer-step")
        self.thread = threading.Thread(target=self._run, name="syncer-core", daemon=True)
        for name, site in machine.state.sites.items():
            if site.status in (Status.LIVE, Status.SILENT):
                self.leases.watch(name, machine.state.now_ns, silent=site.status is Status.SILENT)

    def start(self) -> None:
        """Start the loop's thread."""
        self.thread.start()

    def stop(self) -> None:
        """End the loop after its present turn, and the worker after the task it is running."""
        self._stopping.set()
        self._inbox.put(None)
        self.thread.join(TIMEOUT_S)
        self.worker.shutdown(wait=True, cancel_futures=True)

    def now_ns(self) -> int:
        """Return the machine's time, which continues from where the last process left it."""
        return self._origin_ns + self.clock_ns()

    def post(self, event: OuterEvent) -> None:
        """Queue an event that needs no answer."""
        self._inbox.put(event)

    def heard(self, site: str) -> None:
        """Note a sign of life of ``site``, at once. It is an event only if the site was silent."""
        with self._lock:
            back = self.leases.heard(site, self.now_ns())
        if back is not None:
            self.post(back)

    def nudge(self) -> None:
        """Make ``settle`` check its condition at once, because it may hold now."""
        self._nudged.set()

    def call(self, make: Callable[[int], OuterEvent], late: Callable[[Answer], None] = lambda answer: None) -> Answer:
        """Queue the event that ``make`` returns for a call number, and wait for its answer.

        The event stays queued if the wait ends without an answer; then ``late`` gets the answer, in the loop's thread.
        While the loop is held, raises ``NotHandedIn`` and queues nothing: repeated calls would fill the inbox.
        """
        self._hand_in()
        future: Future[Answer] = Future()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = future
        self._inbox.put(make(number))
        try:
            return self._wait(future, CALL_S)
        except Refusal:
            future.add_done_callback(lambda done: None if done.exception() else late(done.result()))
            raise

    def ask(self, question: Callable[[OuterSync], T], *, early: bool = False) -> T:
        """Return ``question(machine)``, run between two events; ``question`` must not change the machine.

        With ``early`` it runs at once, in the caller's thread, and also while the loop is held. The machine may be
        ahead of the disk then, so use this only for status displays, never for an answer that a site acts on.
        """
        if early:
            if not self.thread.is_alive():
                raise CoreStopped
            with self._deciding:
                return question(self.machine)
        self._hand_in()
        asked = _Question(question, Future())
        self._inbox.put(asked)
        try:
            return self._wait(asked.future, TIMEOUT_S)  # type: ignore[return-value]
        except (CoreStopped, CoreHeld):
            if asked.future.cancel():
                raise
            return asked.future.result(TIMEOUT_S)  # type: ignore[return-value]  # The loop is answering it just now.

    def do(self, work: Callable[[OuterSync], T]) -> T:
        """Run ``work`` in the loop between two turns, when every effect is carried out; its failure ends the loop."""
        self._hand_in()
        return self._wait(self.do_soon(work), TIMEOUT_S)  # type: ignore[return-value]

    def do_soon(self, work: Callable[[OuterSync], object]) -> Future[object]:
        """Like ``do``, without waiting; the loop itself may call it."""
        future: Future[object] = Future()
        self._inbox.put(_Question(work, future, is_work=True))
        return future

    def _hand_in(self) -> None:
        if (want := self.held) is not None:
            raise NotHandedIn(want)

    def _wait(self, future: Future[T], timeout_s: float) -> T:
        until = time.monotonic() + timeout_s
        while True:
            alive = self.thread.is_alive()  # Read before the wait: a loop that ends meanwhile may still have answered.
            want = self.held
            left_s = max(0.0, until - time.monotonic())
            if wait([future], timeout=min(HELD_AFTER_S, left_s) if alive and want is None else 0.0).done:
                return future.result()
            if not alive or left_s == 0:
                raise CoreStopped
            if want is not None:
                raise CoreHeld(want)

    # --- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except BaseException as error:  # ``on_failure`` passes it to the loop's owner, which raises it elsewhere.
            self.on_failure(error)
        finally:
            with self._lock:
                waiting, self._calls = list(self._calls.values()), {}
            for future in waiting:
                future.set_exception(CoreStopped())

    def _turn(self) -> None:
        """Take what has arrived, decide, make durable, carry out."""
        decided: list[OuterEffect] = []
        records: list[Record] = []
        wanted = [at for at in (self.machine.next_deadline_ns(), self.leases.next_deadline_ns()) if at is not None]
        patience_s = min(IDLE_S, max(0.0, (min(wanted) - self.now_ns()) / 1e9)) if wanted else IDLE_S
        arrived: list[OuterEvent | _Question | None] = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._inbox.get(timeout=patience_s))
            while len(arrived) < BATCH_MAX:
                arrived.append(self._inbox.get_nowait())
        for item in arrived:
            if isinstance(item, OuterEvent):
                self._decide(item, decided, records)
        now_ns = self.now_ns()
        with self._lock:
            if now_ns - self._turned_ns > patience_s * 1e9 + self.leases.timeout_ns / 2:
                self.leases.renew(now_ns)  # This process was away, not the sites: their signs of life are still unread.
            expired = self.leases.expired(now_ns)
        self._turned_ns = now_ns
        for silent in expired:
            self._decide(silent, decided, records)
        deadline_ns = self.machine.next_deadline_ns()
        if deadline_ns is not None and now_ns >= deadline_ns:
            self._decide(DeadlinePassed(), decided, records)
        if (records and not self.settle(records, decided)) or not self._until(self.leads, Unready.LEASE_LOST):
            return
        for effect in decided:
            if isinstance(effect, Answer):
                self._answer(effect)
            else:
                self.carry_out(effect)
        for item in arrived:
            if isinstance(item, _Question):
                item.answer(self.machine)

    def settle(self, records: Sequence[Record], decided: Sequence[OuterEffect] = ()) -> bool:
        """Make a turn's records safe; the caller carries out its effects only after this has returned True.

        Safe means: complete, durable and marked in this syncer's journal, and then wherever else ``replicated``
        requires. Each step may have to wait without limit: on a full disk, until there is space. Meanwhile the machine
        is ahead of everything that may leave the process, so the loop decides nothing else, and only early questions
        are answered. Other callers get ``CoreHeld``, which names the missing condition.

        Returns False when the process is to stop before that. Then the turn never happened, and the senders of its
        events will send them again. A failed sync does not wait; it ends the loop.
        """
        ends: list[Place] = []

        def keep() -> None:
            if not ends:
                ends.append(self.store.journal.append(records))
            self.store.journal.flush()

        if not self._until(keep, Unready.DISK_FULL):
            return False
        if self.acks_first:
            if not self._until(self.leads, Unready.LEASE_LOST):
                return False
            for effect in decided:
                if isinstance(effect, AnswerPush) and effect.outcome is Outcome.ACCEPTED:
                    self._answer(effect)
        return self._until(lambda: self.replicated(ends[0]), Unready.STANDBY_AWAY)

    def _until(self, attempt: Callable[[], str | None], kind: Unready) -> bool:
        """Repeat ``attempt`` until it returns None instead of the reason why it cannot succeed.

        Returns False when the process is to stop. ``kind`` is the kind of the missing condition.
        """
        began = time.monotonic()
        while True:
            try:
                why = attempt()
            except DiskFullError as error:
                why = f"disk full: {error.strerror}"
            held = None
            if why is not None:
                if self._stopping.is_set():
                    return False
                self.leads()  # Raises once this process no longer leads: waiting is useless then.
                if time.monotonic() - began > HELD_AFTER_S:
                    held = Want(kind, why)
            if held != self.held:
                self.held = held
                self.on_held(held)
            if why is None:
                return True
            self._nudged.wait(RETRY_S)
            self._nudged.clear()

    def _decide(self, event: OuterEvent, decided: list[OuterEffect], records: list[Record]) -> None:
        """Let the machine decide ``event``, and record it unless nothing changed.

        A deadline that is due is decided first, in its own record. So an update that is not accepted changes
        nothing, even if its push came late, and is not journalled: a record names only payloads that are kept.
        ``SyncerStarted`` comes before any deadline: what it finds under way must not have been begun by this process.
        """
        now_ns = max(self.now_ns(), self.machine.state.now_ns)
        due_ns = self.machine.next_deadline_ns()
        events = [event]
        if due_ns is not None and now_ns >= due_ns and not isinstance(event, SyncerStarted | DeadlinePassed):
            events = [DeadlinePassed(), event]
        for each in events:
            with self._deciding:
                effects = self.machine.handle(each, now_ns)
            decided += effects
            name = getattr(each, "site", "")
            site = self.machine.state.sites.get(name)
            with self._lock:
                if site is not None and site.status in (Status.LEFT, Status.EVICTED):
                    self.leases.forget(name)
                elif (site is not None and site.status is Status.LIVE) and (
                    isinstance(each, UpdateArrived | SiteHeard)
                    or (isinstance(each, JoinRequested) and each.process == site.process)
                ):
                    self.leases.watch(name, now_ns)  # Each of these can bring a silent site back: restart its lease.
            if changes_nothing(each, effects):
                continue
            kept = each
            if isinstance(each, UpdateArrived) and any(
                isinstance(effect, AnswerPush) and effect.outcome in (Outcome.REFUSED, Outcome.RETRY)
                for effect in effects
            ):
                # The same payload may be accepted later, and a recorded name without an undecided update is dropped.
                kept = replace(each, payload="")
            records.append(Record(now_ns, kept, digest_effects(effects)))

    def _answer(self, answer: Answer) -> None:
        """Answer a call, at most once."""
        with self._lock:
            future = self._calls.pop(answer.call, None)
        if future is not None:
            with self.store.disk.passing(Step.ACK):
                future.set_result(answer)


def changes_nothing(event: OuterEvent, effects: list[OuterEffect]) -> bool:
    """Return whether ``event`` left the machine unchanged, so that it is not journalled (DESIGN section 4).

    That is so when the only effect is an answer that refuses, or the answer to a join that was known already.
    """
    if not effects:
        return isinstance(event, DeadlinePassed | SiteSilent | SiteHeard)
    if len(effects) == 2 and isinstance(event, UpdateArrived) and isinstance(effects[0], Note):
        if effects[0].what in ("outlier_refused", "implausible_refused"):
            return False  # The machine remembers it, and refuses it again even if the usual values change.
        effects = effects[1:]
    if len(effects) > 1:
        return False
    (effect,) = effects
    if isinstance(effect, AnswerPush):
        return effect.outcome is not Outcome.ACCEPTED
    return isinstance(effect, AnswerJoin | AskToConfirm) or (
        isinstance(effect, AnswerDone | AnswerUnits) and effect.reason is not None
    )
