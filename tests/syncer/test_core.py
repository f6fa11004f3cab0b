"""The decision loop: nothing leaves before it is durable, nobody waits for ever, nothing is swallowed.

Where something is wanting it waits, says so, tells nothing, and goes on where it was.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from diloco.durable import PLAIN_DISK, DiskFullError, locked
from diloco.sync.effects import AnswerJoin, AnswerPush, OuterEffect
from diloco.sync.events import (
    JoinRequested,
    Outcome,
    OuterEvent,
    Reason,
    SyncerStarted,
)
from diloco.sync.journal import Record
from diloco.sync.leadership import LeaseLostError, Place
from diloco.sync.options import OuterOptions
from diloco.sync.state import Status
from diloco.sync.syncer import OuterSync
from diloco.syncer import core as core_module
from diloco.syncer.core import (
    Core,
    CoreHeld,
    CoreStopped,
    Room,
    Unready,
    Want,
    changes_nothing,
)
from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.messages import Refusal
from diloco.wire.messages import Status as WireStatus
from tests.sync.test_syncer import play
from tests.syncer.building import QUIET, RUN, Events, eventually, files, join, new_syncer, no_room, serves, serving
from tests.syncer.desk import arrived

MS = 1_000_000


class Journal:
    """A disk that notes the order of things, and can be slow or broken."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[OuterEvent] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: OSError | None = None
        self.full = False
        self.journal = self
        self.disk = PLAIN_DISK

    def append(self, records: Sequence[Record]) -> Place:
        if self.full:
            raise DiskFullError(28, "No space left on device")
        self.log.append("append")
        self.events += [record.event for record in records]
        return 1, 0

    def flush(self) -> None:
        assert self.gate.wait(20.0)
        if self.broken is not None:
            raise self.broken
        self.log.append("flush")


class Desk:
    """A core over a machine of one fragment, with everything that it did in ``disk.log``."""

    def __init__(self, machine: OuterSync | None = None, **options: Any) -> None:
        """``options`` are the core's, and those of a new ``machine``."""
        self.disk = Journal()
        self.failures: list[BaseException] = []
        self.effects: list[OuterEffect] = []
        loop = {name: options.pop(name) for name in {*options} & {*Core.__init__.__kwdefaults__}}
        machine = machine or OuterSync(OuterOptions(**{"grace": "fixed", "grace_ns": 0, **options}))
        self.core = Core(machine, self.disk, self._carry_out, on_failure=self.failures.append, **loop)  # type: ignore[arg-type]
        self.core.post(SyncerStarted(machine.state.epoch + 1))

    def _carry_out(self, effect: OuterEffect) -> None:
        self.disk.log.append(type(effect).__name__)
        self.effects.append(effect)

    def join(self, site: str = "a", process: str = "0123abcd") -> AnswerJoin:
        answer = self.core.call(lambda call: JoinRequested(call, site, process))
        assert isinstance(answer, AnswerJoin)
        return answer

    def push(self, site: str = "a", sequence: int = 1, **changes: Any) -> AnswerPush:
        answer = self.core.call(lambda call: arrived(site, sequence, call=call, **changes))
        assert isinstance(answer, AnswerPush)
        return answer

    def status(self, site: str = "a") -> Status:
        return self.core.ask(lambda machine: machine.state.sites[site].status)

    def journalled(self) -> list[str]:
        return [type(event).__name__ for event in self.disk.events]


@contextmanager
def running(**options: Any) -> Iterator[Desk]:
    desk = Desk(**options)
    desk.core.start()
    try:
        yield desk
    finally:
        desk.disk.gate.set()
        desk.core.stop()
        assert not desk.core.thread.is_alive()


@pytest.fixture
def desk() -> Iterator[Desk]:
    """With a site that has joined."""
    with running() as desk:
        desk.join()
        yield desk


def background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """``work`` in a thread; what it gave, or the refusal that it met, is in the list afterwards."""
    got: list[object] = []

    def run() -> None:
        try:
            got.append(work())
        except Refusal as refusal:
            got.append(refusal)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, got


def test_nothing_is_answered_or_carried_out_before_it_is_durable() -> None:
    with running() as desk:
        desk.core.ask(lambda machine: None)
        desk.disk.log.clear()
        desk.disk.gate.clear()
        joining, joined = background(desk.join)
        eventually(lambda: "append" in desk.disk.log, "the join is written")
        asking, asked = background(lambda: desk.core.ask(lambda machine: sorted(machine.attendance.live)))
        time.sleep(0.1)
        assert (joined, asked, desk.effects) == ([], [], [])
        early = desk.core.ask(lambda machine: machine.attendance.live, early=True)
        assert len(early) == 1, "an early question waits for no disk"
        desk.disk.gate.set()
        joining.join(10.0)
        asking.join(10.0)
        assert len(joined) == len(asked) == 1
        desk.push()
        log = desk.disk.log
    durable = True
    for what in log:
        durable = {"append": False, "flush": True}.get(what, durable)
        assert durable or what == "append", f"{what} before its record is durable: {log}"


def test_a_failed_fsync_ends_the_loop_and_nobody_is_acknowledged(desk: Desk) -> None:
    desk.disk.broken = OSError(5, "Input/output error")
    effects = list(desk.effects)
    calls = [background(lambda number=number: desk.push(digest=f"d{number}")) for number in range(6)]
    for thread, got in calls:
        thread.join(10.0)
        (refusal,) = got
        assert isinstance(refusal, CoreStopped)
        assert refusal.status is WireStatus.UNAVAILABLE, "who is not answered may come back"
    assert desk.failures == [desk.disk.broken]
    assert desk.effects == effects
    with pytest.raises(CoreStopped, match="the syncer stopped before it could answer"):
        desk.join("b")
    with pytest.raises(CoreStopped):
        desk.core.ask(lambda machine: None, early=True)


def test_work_that_fails_ends_the_loop_and_is_told(desk: Desk) -> None:
    with pytest.raises(OSError, match="No space left"):
        desk.core.do(no_room)
    eventually(lambda: not desk.core.thread.is_alive(), "the loop ends")
    (failure,) = desk.failures
    assert isinstance(failure, OSError)


def test_a_question_that_raises_reaches_the_asker_and_nobody_else() -> None:
    with running() as desk:
        for error in (Refusal(WireStatus.NOT_FOUND, "no"), TimeoutError("mine"), KeyError("x"), SystemExit(3)):

            def question(machine: OuterSync, error: BaseException = error) -> None:
                raise error

            with pytest.raises(type(error)) as raised:
                desk.core.ask(question)
            assert raised.value is error
        assert desk.core.ask(lambda machine: 7) == 7


def test_a_call_that_is_given_up_is_decided_and_a_question_is_not(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that comes too late is given to who was named for it."""
    late, asked = list[object](), list[str]()
    desk.disk.gate.clear()
    with monkeypatch.context() as patch:
        patch.setattr(core_module, "CALL_S", 0.05)
        patch.setattr(core_module, "TIMEOUT_S", 0.05)
        with pytest.raises(CoreStopped):
            desk.core.call(lambda call: arrived(call=call), late.append)
        with pytest.raises(CoreStopped):
            desk.core.ask(lambda machine: asked.append("late"))
    assert late == []
    desk.disk.gate.set()
    eventually(lambda: late, "the answer comes after all")
    (answer,) = late
    assert answer.outcome is Outcome.ACCEPTED
    desk.core.ask(lambda machine: asked.append("in time"))
    assert asked == ["in time"]
    assert desk.push().outcome is Outcome.DUPLICATE


def test_a_deadline_is_met_without_any_traffic() -> None:
    with running(quorum=1, grace_ns=150 * MS, site_timeout_ns=60_000 * MS) as desk:
        desk.join("a")
        desk.join("b")  # It is waited for until the grace is over.
        desk.push("a")
        eventually(lambda: "StartOuterStep" in desk.disk.log, "the round closes")


def test_a_silent_site_is_declared_so_and_comes_back_when_heard() -> None:
    now_ns, live, silent = [0], Status.LIVE, Status.SILENT
    with running(clock_ns=lambda: now_ns[0], site_timeout_ns=1000 * MS) as desk:

        def after(steps: int, does: Callable[[], object] = lambda: None) -> list[Status]:
            found = []
            for _ in range(steps):
                does()
                desk.status()  # By then the loop has seen it.
                now_ns[0] += 400 * MS
                found.append(desk.status())
            return found

        desk.join()
        assert after(10, lambda: desk.core.heard("a")) == [live] * 10, "signs of life renew its lease"
        assert after(3) == [live, silent, silent], "its lease is over"
        for comes_back in (lambda: desk.core.heard("a"), desk.push):
            comes_back()
            assert after(4) == [live, live, silent, silent]
        assert desk.journalled().count("SiteSilent") == 3
        desk.join("a", "00000002")
        assert after(3, desk.join) == [live, live, silent], "an old process that asks in vain does not keep it alive"


def test_a_silent_site_whose_sign_of_life_is_decided_late_has_a_lease_from_then_on() -> None:
    now_ns, timeout_ns = [0], 1000 * MS
    with running(clock_ns=lambda: now_ns[0], site_timeout_ns=timeout_ns) as desk:
        desk.join()
    core = Desk(desk.core.machine, clock_ns=lambda: now_ns[0]).core
    core._inbox.get_nowait()  # The start.
    for _ in range(2):  # The second silence is found before the sign of life that ends the first one is decided.
        now_ns[0] += timeout_ns
        (silent,) = core.leases.expired(core.now_ns())
        core._decide(silent, [], [])
        assert core.leases.next_deadline_ns() is None
        core.heard("a")
    (back, _) = (core._inbox.get_nowait() for _ in range(2))
    core.leases.expired(core.now_ns() + timeout_ns)
    core._decide(back, [], [])
    assert core.machine.state.sites["a"].status is Status.LIVE
    assert core.leases.next_deadline_ns() == core.now_ns() + timeout_ns
    core.worker.shutdown()


def test_signs_of_life_take_no_place_however_many_they_are() -> None:
    with running(site_timeout_ns=60_000 * MS) as desk:
        desk.join("a")
        inside, gate = threading.Event(), threading.Event()
        blocked = desk.core.do_soon(lambda machine: inside.set() or gate.wait(10))
        assert inside.wait(10)
        for _ in range(10_000):
            desk.core.heard("a")
        waiting = desk.core._inbox.qsize()
        gate.set()
        assert waiting == 0
        blocked.result(10)


def test_a_syncer_that_was_away_itself_calls_nobody_silent() -> None:
    """The loop stands still for longer than a lease, as after SIGSTOP; the site had no chance to be heard."""
    with running(site_timeout_ns=400 * MS) as desk:
        desk.join("a")
        desk.core.do_soon(lambda machine: time.sleep(1.0)).result(10)
        assert desk.status() is Status.LIVE
        eventually(lambda: desk.status() is Status.SILENT, "a whole lease later nothing was heard")


def test_leases_begin_anew_with_a_new_process_and_time_goes_on() -> None:
    with running(site_timeout_ns=500 * MS) as desk:
        desk.join("a")
        plain = desk.core.ask(lambda machine: machine.snapshot())
    machine = OuterSync.restore(OuterOptions(site_timeout_ns=500 * MS), plain)
    then_ns = machine.state.now_ns
    core = Desk(machine, clock_ns=lambda: 5).core
    assert core.now_ns() == then_ns
    assert core.leases.next_deadline_ns() == then_ns + 500 * MS
    core.worker.shutdown()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_stop_ends_whoever_waits_and_what_it_waits_for_has_never_happened(desk: Desk, is_held: bool) -> None:
    effects = list(desk.effects)
    desk.disk.full = is_held
    desk.disk.gate.clear()
    calls = [background(desk.push) for _ in range(3)]
    eventually(lambda: desk.core.held if is_held else desk.disk.log[-1] == "append", "the loop is at the disk")
    stopping, _ = background(desk.core.stop)
    desk.disk.gate.set()
    for thread in (stopping, *(thread for thread, _ in calls)):
        thread.join(10.0)
    assert not desk.core.thread.is_alive()
    assert all(isinstance(got, Refusal if is_held else CoreStopped | AnswerPush) for _, (got,) in calls)
    assert not is_held or desk.effects == effects
    assert desk.failures == []


# --- What the loop journals, and what it need not --------------------------------------------------------------------


def test_what_is_not_journalled_has_changed_nothing_but_the_clock() -> None:
    """Against the machine itself, over random runs; otherwise a replay would lose what was decided."""
    skipped: set[str] = set()
    for seed in range(16):
        told = play(seed).syncer
        machine = OuterSync(told.options)
        for number, record in enumerate(told.records):
            before = machine.snapshot()
            effects = machine.handle(record.event, record.at_ns)
            if changes_nothing(record.event, effects):
                after = machine.snapshot()
                assert {**after, "now_ns": 0} == {**before, "now_ns": 0}, (seed, number, record.event, effects)  # type: ignore[dict-item]
                skipped.add(type(record.event).__name__)
    assert skipped >= {"DeadlinePassed", "UpdateArrived", "JoinRequested", "SiteSilent", "SiteHeard", "SiteLeft"}


def test_what_was_due_is_decided_by_a_record_of_its_own() -> None:
    """An update that is refused as a round's grace ends is not journalled: nobody keeps its payload."""
    clock_ns = [0]
    with running(clock_ns=lambda: clock_ns[0], grace_ns=1000, quorum=1, num_fragments=2) as desk:
        desk.join("a")
        desk.join("b")
        assert desk.push("a").outcome is Outcome.ACCEPTED
        clock_ns[0] = 5000
        assert desk.push("b", payload="", finite=False).reason is Reason.NON_FINITE
        assert desk.journalled().count("UpdateArrived") == 1
        assert "DeadlinePassed" in desk.journalled()


def test_a_start_is_decided_before_what_came_due_while_nobody_was_there() -> None:
    """Otherwise the round's outer step is begun by the deadline and once more by the start, and its end comes twice."""
    clock_ns = [0]
    with running(clock_ns=lambda: clock_ns[0], grace_ns=1000, quorum=1) as desk:
        desk.join("a")
        desk.join("b")
        assert desk.push("a", 1).outcome is Outcome.ACCEPTED
    anew = Desk(desk.core.machine, clock_ns=lambda: clock_ns[0])
    clock_ns[0] = 5000
    anew.core.start()
    try:
        eventually(lambda: "StartOuterStep" in anew.disk.log, "the round is closed")
    finally:
        anew.core.stop()
    assert anew.failures == []
    assert anew.journalled()[0] == "SyncerStarted"
    assert anew.disk.log.count("StartOuterStep") == 1


# --- Where something is wanting --------------------------------------------------------------------------------------


def test_a_full_disk_holds_everything_back_but_early_questions_fills_no_inbox_and_heals() -> None:
    """A site that looks for another syncer asks this one, too, twice a second for as long as it is held."""
    held: list[Want | None] = []
    with running(on_held=held.append) as desk:
        desk.join()
        desk.disk.log.clear()
        desk.disk.full = True
        with pytest.raises(CoreHeld, match="disk full: No space left on device") as raised:
            desk.push()
        assert raised.value.status is WireStatus.UNAVAILABLE
        assert desk.core.held.text == raised.value.text
        waiting = desk.core._inbox.qsize()
        for _ in range(20):
            for call in (
                lambda: desk.join("b"),
                lambda: desk.core.ask(lambda machine: sorted(machine.attendance.live)),
                lambda: desk.core.do(lambda machine: None),
            ):
                with pytest.raises(CoreHeld, match="disk full"):
                    call()
            assert desk.core.ask(lambda machine: len(machine.state.sites), early=True) == 1
        assert desk.core._inbox.qsize() == waiting
        assert desk.disk.log == [], "nothing is written, told or begun"
        desk.disk.full = False
        eventually(lambda: desk.core.held is None, "the loop goes on")
        assert desk.push().outcome is Outcome.DUPLICATE, "what was handed in before stays handed in"
        assert desk.disk.log[:2] == ["append", "flush"]
        assert desk.disk.log.count("StartOuterStep") == 1
        assert isinstance(desk.join("b"), AnswerJoin)
    assert held == [Want(Unready.DISK_FULL, "disk full: No space left on device"), None]


def test_what_is_durable_here_only_is_told_to_nobody() -> None:
    """The place of a standby: it is asked about each turn until it has it."""
    behind = [0]
    asked: list[object] = []

    def replicated(end: Place) -> str | None:
        asked.append(end)
        return "the standby is behind" if behind[0] else None

    with running(replicated=replicated) as desk:
        desk.join("a")
        turns = len(asked)
        behind[0] = 1
        joining, joined = background(lambda: desk.join("b"))
        eventually(lambda: "flush" in desk.disk.log[2:] and len(asked) > turns + 1, "it is asked again")
        assert not joined, "a short wait is everybody's"
        assert desk.disk.log.count("append") == desk.disk.log.count("flush"), "written once, however long it takes"
        behind[0] = 0
        desk.core.nudge()
        joining.join(10.0)
        assert isinstance(joined[0], AnswerJoin)


def test_who_may_not_lead_tells_nobody_anything_not_even_what_it_knew_before() -> None:
    why: list[str | None] = [None]
    with running(leads=lambda: why[0]) as desk:
        desk.join()
        effects = list(desk.effects)
        why[0] = "the lease was not renewed in time"
        with pytest.raises(CoreHeld, match="not renewed"):
            desk.core.ask(lambda machine: sorted(machine.attendance.live))
        with pytest.raises(CoreHeld) as raised:
            desk.push()
        assert raised.value.kind is Unready.LEASE_LOST
        assert desk.effects == effects
        why[0] = None
        eventually(lambda: desk.core.held is None, "the loop goes on")
        assert desk.push().outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(("is_away", "acks_first"), [(False, False), (False, True), (True, False)])
def test_a_lease_that_is_lost_ends_the_loop_before_a_turn_is_told(is_away: bool, acks_first: bool) -> None:
    """The standby that is waited for will never be back: it is the one that leads now."""
    lost, away = [False], [False]

    def leads() -> str | None:
        if lost[0] and "flush" in desk.disk.log:
            raise LeaseLostError("another has taken it")
        return None

    def replicated(end: Place) -> str | None:
        return "the standby is away" if away[0] else None

    with running(leads=leads, replicated=replicated, acks_first=acks_first) as desk:
        desk.join()
        desk.disk.log.clear()
        effects = list(desk.effects)
        away[0], lost[0] = is_away, not is_away
        pushing, pushed = background(desk.push)
        if is_away:
            eventually(lambda: desk.core.held, "the loop says that it waits")
            lost[0] = True
        eventually(lambda: desk.failures, "the loop's owner is told")
        pushing.join(10.0)
        assert isinstance(pushed[0], CoreHeld | CoreStopped), "it was never told to be accepted"
        assert "flush" in desk.disk.log, "it was durable here"
        assert desk.effects == effects
        assert isinstance(desk.failures[0], LeaseLostError)


# --- What a probe is told --------------------------------------------------------------------------------------------


def test_a_full_disk_and_a_drain_are_told_by_the_run_s_name_and_the_server_lives(tmp_path: Path) -> None:
    syncer = new_syncer(tmp_path, Events().emit, **QUIET)
    syncer.readiness.change(begins=[Unready.DISK_FULL])  # What happens before it serves is not forgotten.
    assert syncer.readiness.reasons() == ["starting", "disk_full"]
    address, full = syncer.start(), Want(Unready.DISK_FULL, "2 MB are left")
    try:
        for reasons in (["disk_full"], [], ["disk_full"], []):
            if syncer.readiness.reasons() != reasons:
                syncer._room_changed(full if reasons else None)
            assert [serves(address, name) for name in ("", SYNC_SERVICE, RUN)] == [True, not reasons, not reasons]
            assert syncer.api.status()["not_ready"] == reasons
        join(syncer)
        syncer.drain()
        eventually(lambda: not serves(address), "a run that drains")
        assert serves(address, "")
        for want, reasons in ((full, ["draining", "disk_full"]), (None, ["draining"])):
            syncer._room_changed(want)
            assert syncer.api.status()["not_ready"] == reasons
            assert not serves(address)
        syncer.api.leave("a", 1)
        eventually(lambda: syncer.wait(0.1), "the end of this part")
    finally:
        syncer.stop(0.1)
    with serving(tmp_path) as again:
        assert again.api.status()["not_ready"] == []


def test_the_past_goes_for_a_full_disk_alone_and_one_reason_takes_another_s_place(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        let_go = list[list[str]]()
        syncer.store.let_go_of_the_past = lambda: let_go.append(syncer.readiness.reasons())  # type: ignore[method-assign]
        for kind in (Unready.STANDBY_AWAY, Unready.LEASE_LOST, Unready.DISK_FULL, Unready.STANDBY_AWAY):
            syncer._room_changed(Want(kind, "words that nobody looks into"))
            assert syncer.readiness.reasons() == [kind.value]
        syncer._room_changed(None)
        assert syncer.readiness.reasons() == []
        assert let_go == [["disk_full"]]


# --- Room on the disk ------------------------------------------------------------------------------------------------

MB = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data folder that this process has taken."""
    with locked(tmp_path / "syncer"):
        yield tmp_path / "syncer"


def test_the_reserve_is_kept_free_and_each_change_of_what_is_wanting_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while a standby is away: nobody had heard of that when the standby was back."""
    disk, told = SimpleNamespace(free=100 * MB), list[Want | None]()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    room = Room(folder, 64 * MB, told.append)
    room.look()
    assert room.wanting(36 * MB) is None
    assert room.wanting(37 * MB) == "disk full: 100 MB are free, 37 more and 64 MB in reserve are wanted"
    assert told == [], "that one update is too large is nobody else's matter"
    full, away, lost = Unready.DISK_FULL, Unready.STANDBY_AWAY, Unready.LEASE_LOST
    for kind, text, free_mb, said in (
        (None, "disk full: 63 MB are free, 64 MB in reserve are wanted", 63, [full]),
        (None, None, 64, [None]),
        (full, "disk full: quota", 100, [full]),
        (None, "disk full: 0 MB are free, 64 MB in reserve are wanted", 0, []),
        (None, None, 100, [None]),
        (away, "the standby is away", 100, [away]),
        (away, "no standby has followed", 63, []),
        (None, "disk full: 63 MB are free, 64 MB in reserve are wanted", 63, [full]),
        (lost, "not renewed", 63, [lost]),
        (None, None, 100, [None]),
    ):
        disk.free = free_mb * MB
        for _ in range(3):
            room.held(Want(kind, str(text)) if kind else None)
        assert room.wanting() == text
        assert told == [each and Want(each, str(text)) for each in said]
        told.clear()
    disk.free = 0
    assert Room(folder, 0, told.append).wanting(1 << 40) is None, "without a reserve the disk is not asked"


def test_a_folder_that_cannot_be_looked_at_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(folder, 0, lambda want: None)
    with monkeypatch.context() as patch:
        patch.setattr("os.stat", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        why = room.lost()
    assert why == f"{folder} can no longer be looked at: Stale file handle"


@pytest.mark.parametrize("lose", ["removed", "emptied", "replaced"])
def test_a_syncer_that_lost_its_folder_takes_nothing_in_and_ends_in_words(
    tmp_path: Path, lose: str, events: Events
) -> None:
    """It had gone on for the rest of the run, and had answered every update with a defect."""
    folder, words = tmp_path / "syncer", "was removed or emptied while this process served from it"
    syncer = new_syncer(folder, events.emit)
    syncer.start()
    folder.rename(folder.with_name("away"))
    if lose != "removed":
        folder.mkdir()
    if lose == "replaced":
        (folder / "lock").touch()
        words = "was replaced: it is not the folder that this process serves from"
    assert syncer.room.wanting() == f"{folder} {words}"
    with pytest.raises(OSError, match=f"syncer {words}"):
        eventually(lambda: syncer.wait(0.1), "an end")
    syncer.stop(0.1)
    assert events.of("note") == [], "it is not full: nothing may be let go of in there"
    assert files(folder).keys() <= {"lock"}, "nothing was written there afterwards"
    with serving(folder) as anew:
        assert anew.core.ask(lambda machine: machine.state.epoch) == 1
