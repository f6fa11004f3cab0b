"""The syncer's one decision loop: events in, journal, effects out.

A single thread owns the machine.  It takes what has arrived, lets the machine decide, writes the records in one frame,
makes it durable with one fsync, and only then carries out the effects: an ack, a fate or a version is never ahead of
the disk.  Where that takes long because something is wanting (room on the disk), the loop waits in ``settle``: it tells
nobody anything but how it stands, and goes on where it was when what was wanting is there.
Long work (outer steps, snapshots) runs in a second thread and comes back as an event or not at all.

A failure of either thread ends the process (``failed``): after a failed fsync nothing may be acknowledged any more, and
nothing is, because only this loop gives answers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from diloco.durable import DiskFullError, Step
from diloco.sync.effects import AnswerDone, AnswerJoin, AnswerPush, AnswerUnits, AskToConfirm, Note
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
from diloco.sync.members import Leases
from diloco.sync.state import Status
from diloco.sync.syncer import OuterSync
from diloco.syncer.readiness import Unready, Want
from diloco.wire.messages import Refusal
from diloco.wire.messages import Status as WireStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.effects import OuterEffect
    from diloco.syncer.journal_files import Turn
    from diloco.syncer.store import Store

Answer = AnswerJoin | AskToConfirm | AnswerPush | AnswerDone | AnswerUnits
T = TypeVar("T")
DISK_FULL, STANDBY_AWAY, LEASE_LOST = Unready.DISK_FULL, Unready.STANDBY_AWAY, Unready.LEASE_LOST
IDLE_S = 0.5
BATCH_MAX = 256
RETRY_S = 0.1
"""Between two attempts at what ``settle`` waits for."""
HELD_AFTER_S = 0.5
"""Of such a wait; from then on nobody waits with it."""


class CoreHeld(Refusal):
    """The decision loop waits for something that is wanting, in words; who asks may come back."""

    def __init__(self, want: Want) -> None:
        super().__init__(WireStatus.UNAVAILABLE, want.text)
        self.kind = want.kind


class NotHandedIn(CoreHeld):
    """The same, and of what was asked the loop will never hear."""


class CoreStopped(Refusal):
    """The decision loop gave no answer, or has ended; a site hears that it may come back."""

    def __init__(self) -> None:
        super().__init__(WireStatus.UNAVAILABLE, "the syncer stopped before it could answer")


@dataclass(slots=True)
class _Question:
    ask: Callable[[OuterSync], object]
    future: Future[object]
    is_work: bool = False

    def answer(self, machine: OuterSync) -> None:
        if not self.future.set_running_or_notify_cancel():
            return  # Nobody waits for it any more, and so nobody would own what it makes.
        try:
            self.future.set_result(self.ask(machine))
        except BaseException as error:  # The asker gets it, wherever it is waiting.
            self.future.set_exception(error)
            if self.is_work:
                raise


class Core:
    """The loop.  ``carry_out`` gets every effect that is not an answer, in order, in the loop's thread.

    ``on_held`` hears what the loop waits for, and None when it goes on; ``held`` says it in words.  ``replicated``
    is asked about each turn that is durable here, again and again until it answers None: what it says until then is why
    nothing may be told of that turn yet.  ``leads`` is asked in the same way right before anything is told, to who only
    reads as well; it may raise, which ends the loop.  All are called in the loop's thread.  With ``acks_first`` an
    update that was taken in is acknowledged before ``replicated``.
    """

    def __init__(
        self,
        machine: OuterSync,
        store: Store,
        carry_out: Callable[[OuterEffect], None],
        *,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        on_held: Callable[[Want | None], None] = lambda want: None,
        replicated: Callable[[Turn], str | None] = lambda turn: None,
        leads: Callable[[], str | None] = lambda: None,
        acks_first: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.machine = machine  # Only the loop's thread may touch it.
        self._store = store
        self._carry_out = carry_out
        self._on_failure = on_failure
        self._on_held = on_held
        self._replicated = replicated
        self._leads = leads
        self._acks_first = acks_first
        self._want: Want | None = None
        self._clock_ns = clock_ns
        self._origin_ns = machine.state.now_ns - clock_ns()
        self.leases = Leases(machine.options.site_timeout_ns)
        self._inbox: queue.SimpleQueue[OuterEvent | _Question | None] = queue.SimpleQueue()
        self._early: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._calls: dict[int, Future[Answer]] = {}
        self._calls_lock = threading.Lock()
        self._heard: set[str] = set()
        self._heard_lock = threading.Lock()
        self._turned_ns = machine.state.now_ns
        self._next_call = 1
        self._stopping = threading.Event()
        self.failed: BaseException | None = None
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outer-step")
        self._thread = threading.Thread(target=self._run, name="syncer-core", daemon=True)
        for name, site in machine.state.sites.items():
            if site.status in (Status.LIVE, Status.SILENT):
                self.leases.watch(name, machine.state.now_ns, silent=site.status is Status.SILENT)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the loop after its present turn, and the long work after what is under way."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)
        self.worker.shutdown(wait=True, cancel_futures=True)

    @property
    def alive(self) -> bool:
        """Whether the loop still decides."""
        return self._thread.is_alive()

    @property
    def held(self) -> str | None:
        """What the loop waits for, in words."""
        want = self._want
        return want.text if want is not None else None

    def now_ns(self) -> int:
        """The machine's time: it goes on from where the last process left it."""
        return self._origin_ns + self._clock_ns()

    def post(self, event: OuterEvent) -> None:
        """Hand in an event that nobody waits for."""
        self._inbox.put(event)

    def heard(self, site: str) -> None:
        """``site`` gave a sign of life.  However many it gives, it takes one place until the loop has looked."""
        with self._heard_lock:
            first = not self._heard
            self._heard.add(site)
        if first:
            self._inbox.put(None)

    def nudge(self) -> None:
        """What ``settle`` waits for may be there: look at once."""
        self._early.put(None)

    def call(
        self,
        make: Callable[[int], OuterEvent],
        timeout_s: float = 60.0,
        late: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Hand in the event that ``make`` gives for a call number, and wait for its answer.

        The event stays handed in when the wait ends without one: then ``late`` gets the answer, in the loop's thread.
        While the loop is held nothing is handed in (``NotHandedIn``): who asks again and again would fill the inbox.
        """
        self._hand_in()
        future: Future[Answer] = Future()
        with self._calls_lock:
            number = self._next_call
            self._next_call += 1
            self._calls[number] = future
        self._inbox.put(make(number))
        try:
            return self._wait(future, timeout_s)
        except Refusal:
            future.add_done_callback(lambda done: None if done.exception() else late(done.result()))
            raise

    def ask(self, question: Callable[[OuterSync], T], timeout_s: float = 30.0, *, early: bool = False) -> T:
        """Read the machine between two events; ``question`` must not change it.

        With ``early`` it is answered while the loop is held as well.  The machine is ahead of the disk then, so this is
        for what people look at, and for nothing that a site goes by.
        """
        asked = _Question(question, Future())
        if early:
            self._early.put(asked)
            if self.held is None:  # A loop that is held looks at the early ones by itself.
                self._inbox.put(None)
        else:
            self._hand_in()
            self._inbox.put(asked)
        try:
            return self._wait(asked.future, timeout_s, early)  # type: ignore[return-value]
        except (CoreStopped, CoreHeld):
            if asked.future.cancel():
                raise
            return asked.future.result(timeout_s)  # type: ignore[return-value]  # It is being answered at this moment.

    def do(self, work: Callable[[OuterSync], T], timeout_s: float = 30.0) -> T:
        """Have the loop do ``work`` between two turns, when every effect is carried out; its failure ends the loop."""
        self._hand_in()
        return self._wait(self.do_soon(work), timeout_s)  # type: ignore[return-value]

    def do_soon(self, work: Callable[[OuterSync], object]) -> Future[object]:
        """The same without waiting; may be called from the loop itself."""
        future: Future[object] = Future()
        self._inbox.put(_Question(work, future, is_work=True))
        return future

    def _hand_in(self) -> None:
        if (want := self._want) is not None:
            raise NotHandedIn(want)

    def _wait(self, future: Future[T], timeout_s: float, early: bool = False) -> T:
        until = time.monotonic() + timeout_s
        while True:
            alive = self.alive  # Asked before the wait: what a loop that has just ended answered is still there.
            want = None if early else self._want
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
        except BaseException as error:  # Whoever owns the loop is told, and raises it where somebody sees it.
            self.failed = error
            self._on_failure(error)
        finally:
            with self._calls_lock:
                waiting, self._calls = list(self._calls.values()), {}
            for future in waiting:
                future.set_exception(CoreStopped())

    def _turn(self) -> None:
        """Take what has arrived, decide, make durable, carry out."""
        decided: list[OuterEffect] = []
        records: list[Record] = []
        questions: list[_Question] = []
        patience_s = self._patience_s()
        for item in self._arrived(patience_s):
            if isinstance(item, _Question):
                questions.append(item)
                continue
            if item is not None:
                self._decide(item, decided, records)
        now_ns = self.now_ns()
        for site in self._take_heard():
            back = self.leases.heard(site, now_ns)
            if back is not None:
                self._decide(back, decided, records)
        if now_ns - self._turned_ns > patience_s * 1e9 + self.leases.timeout_ns / 2:
            self.leases.renew(now_ns)  # It was this process that was away; what was said meanwhile is yet to be read.
        self._turned_ns = now_ns
        for silent in self.leases.expired(now_ns):
            self._decide(silent, decided, records)
        deadline_ns = self.machine.next_deadline_ns()
        if deadline_ns is not None and now_ns >= deadline_ns:
            self._decide(DeadlinePassed(), decided, records)
        if (records and not self.settle(records, decided)) or not self._until(self._leads, LEASE_LOST):
            return
        for effect in decided:
            if isinstance(effect, Answer):
                self._answer(effect)
            else:
                self._carry_out(effect)
        for question in questions:
            question.answer(self.machine)
        self._answer_early()

    def settle(self, records: Sequence[Record], decided: Sequence[OuterEffect] = ()) -> bool:
        """Make a turn's records safe; none of its effects is carried out before this has returned True.

        Safe means: whole and durable in this syncer's journal, marked as such, and then wherever else ``replicated``
        says that it must be.  Each of these may have to wait, for as long as it takes: a full disk until there is room.
        Meanwhile the machine is ahead of everything that may be told, so that nothing else is decided and only early
        questions are answered; everybody else is refused with the words for what is wanting (``CoreHeld``).

        False when the process is to stop before that: the turn never happened, and what handed in its events will do so
        again.  A failed sync is no wait, it ends the loop.
        """
        turns: list[Turn] = []

        def write() -> str | None:
            turns.append(self._store.journal.append(records))
            return None

        def flush() -> str | None:
            self._store.journal.flush()
            return None

        if not (self._until(write, DISK_FULL) and self._until(flush, DISK_FULL)):
            return False
        if self._acks_first:
            if not self._until(self._leads, LEASE_LOST):
                return False
            for effect in decided:
                if isinstance(effect, AnswerPush) and effect.outcome is Outcome.ACCEPTED:
                    self._answer(effect)
        return self._until(lambda: self._replicated(turns[0]), STANDBY_AWAY)

    def _until(self, attempt: Callable[[], str | None], kind: Unready) -> bool:
        """Repeat ``attempt`` until it answers None instead of why it cannot be; False when the process is to stop.

        ``kind`` is of what it wants.
        """
        began = time.monotonic()
        while (why := _wanting(attempt)) is not None:
            if self._stopping.is_set():
                return False
            self._leads()  # Who leads no more need not wait: it raises.
            if time.monotonic() - began > HELD_AFTER_S:
                self._hold(Want(kind, why))
            self._answer_early(RETRY_S)
        self._hold(None)
        return True

    def _hold(self, want: Want | None) -> None:
        if want != self._want:
            self._want = want
            self._on_held(want)

    def _answer_early(self, wait_s: float = 0.0) -> None:
        """Answer the early questions, having waited at most ``wait_s`` for the first."""
        with contextlib.suppress(queue.Empty):
            question = self._early.get(timeout=wait_s) if wait_s else self._early.get_nowait()
            while True:
                if question is not None:
                    question.answer(self.machine)
                question = self._early.get_nowait()

    def _take_heard(self) -> list[str]:
        with self._heard_lock:
            heard, self._heard = sorted(self._heard), set()
        return heard

    def _arrived(self, patience_s: float) -> list[OuterEvent | _Question | None]:
        """Wait for something until the next deadline, then take all that is there, up to a bound."""
        items: list[OuterEvent | _Question | None] = []
        try:
            items.append(self._inbox.get(timeout=patience_s))
            while len(items) < BATCH_MAX:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return items

    def _patience_s(self) -> float:
        wanted = [at for at in (self.machine.next_deadline_ns(), self.leases.next_deadline_ns()) if at is not None]
        if not wanted:
            return IDLE_S
        return min(IDLE_S, max(0.0, (min(wanted) - self.now_ns()) / 1e9))

    def _decide(self, event: OuterEvent, decided: list[OuterEffect], records: list[Record]) -> None:
        """Let the machine decide; there is a record of it unless nothing changed.

        What is due is decided before it, by a record of its own.  So an update that is not taken in changes nothing,
        also where its push came late, and is not journalled: a record names only payloads that are kept.  A start comes
        before all: what it finds under way must not have been begun by this process.
        """
        now_ns = max(self.now_ns(), self.machine.state.now_ns)
        due_ns = self.machine.next_deadline_ns()
        if due_ns is not None and now_ns >= due_ns and not isinstance(event, SyncerStarted):
            self._decide_at(now_ns, DeadlinePassed(), decided, records)
        if not isinstance(event, DeadlinePassed):
            self._decide_at(now_ns, event, decided, records)

    def _decide_at(self, now_ns: int, event: OuterEvent, decided: list[OuterEffect], records: list[Record]) -> None:
        effects = self.machine.handle(event, now_ns)
        self._follow_leases(event, now_ns)
        decided += effects
        if not changes_nothing(event, effects):
            records.append(Record(now_ns, _as_kept(event, effects), digest_effects(effects)))

    def _follow_leases(self, event: OuterEvent, now_ns: int) -> None:
        name = getattr(event, "site", None)
        site = self.machine.state.sites.get(name) if name is not None else None
        if name is None or site is None:
            return
        if site.status in (Status.LEFT, Status.EVICTED):
            self.leases.forget(name)
        elif site.status is Status.LIVE and (
            isinstance(event, UpdateArrived) or (isinstance(event, JoinRequested) and event.process == site.process)
        ):
            self.leases.watch(name, now_ns)  # Either may have brought a silent site back: its lease runs again.

    def _answer(self, answer: Answer) -> None:
        """Answer a call, once."""
        with self._calls_lock:
            future = self._calls.pop(answer.call, None)
        if future is not None:
            self._store.disk.reached(Step.ACK)
            future.set_result(answer)
            self._store.disk.reached(Step.ACK)


def _wanting(attempt: Callable[[], str | None]) -> str | None:
    """What ``attempt`` says that it wants; a disk that is full is said in words."""
    try:
        return attempt()
    except DiskFullError as error:
        return f"disk full: {error.strerror}"


def _as_kept(event: OuterEvent, effects: list[OuterEffect]) -> OuterEvent:
    """The event as its record has it: the payload of an update that is not taken in is not kept, so it is not named.

    Nor may it be: the same one may be taken in later, and a name that is on record without being undecided is dropped.
    """
    if isinstance(event, UpdateArrived) and any(
        isinstance(effect, AnswerPush) and effect.outcome in (Outcome.REFUSED, Outcome.RETRY) for effect in effects
    ):
        return replace(event, payload="")
    return event


def changes_nothing(event: OuterEvent, effects: list[OuterEffect]) -> bool:
    """Whether the machine is as it was before ``event``: then it is not journalled (DESIGN section 4).

    That is so when all that came of it is an answer that says no, or the answer to a join that was known already.
    """
    if not effects:
        return isinstance(event, DeadlinePassed | SiteSilent | SiteHeard)
    if len(effects) == 2 and isinstance(event, UpdateArrived) and isinstance(effects[0], Note):
        if effects[0].what in ("outlier_refused", "implausible_refused"):
            return False  # It is remembered, so that it is refused again whatever is usual then.
        effects = effects[1:]
    if len(effects) > 1:
        return False
    (effect,) = effects
    if isinstance(effect, AnswerPush):
        return effect.outcome is not Outcome.ACCEPTED
    return isinstance(effect, AnswerJoin | AskToConfirm) or (
        isinstance(effect, AnswerDone | AnswerUnits) and effect.reason is not None
    )
