"""The decision loop: nothing leaves before it is durable, nobody waits for ever, nothing is swallowed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.durable import PLAIN_DISK, DiskFullError, locked
from diloco.sync.effects import AnswerJoin, AnswerPush, OuterEffect, PublishVersion
from diloco.sync.events import (
    JoinRequested,
    Outcome,
    OuterEvent,
    OuterStepDone,
    Reason,
    SyncerStarted,
    UpdateArrived,
)
from diloco.sync.journal import Record
from diloco.sync.leadership import Place
from diloco.sync.options import OuterOptions
from diloco.sync.state import Status
from diloco.sync.syncer import OuterSync
from diloco.syncer import core as room_module
from diloco.syncer.core import Core, CoreStopped, FolderLostError, Room, Unready, Want
from diloco.wire.messages import Refusal
from diloco.wire.messages import Status as WireStatus
from tests.syncer.building import Events, eventually, new_syncer, serving

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


class Hand:
    """A clock that a test sets."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Desk:
    """A core over a machine of one fragment, with everything that it did in ``disk.log``."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_held: Callable[[Want | None], None] = lambda want: None,
        replicated: Callable[[Place], str | None] = lambda end: None,
        leads: Callable[[], str | None] = lambda: None,
        acks_first: bool = False,
        **options: Any,
    ) -> None:
        self.disk = Journal()
        self.failures: list[BaseException] = []
        self.effects: list[OuterEffect] = []
        machine = OuterSync(OuterOptions(**{"grace": "fixed", "grace_ns": 0, **options}))
        self.core = Core(
            machine,
            self.disk,  # type: ignore[arg-type]
            self._carry_out,
            on_failure=self.failures.append,
            on_held=on_held,
            replicated=replicated,
            leads=leads,
            acks_first=acks_first,
            clock_ns=clock_ns,
        )
        self.core.post(SyncerStarted(1))

    def _carry_out(self, effect: OuterEffect) -> None:
        self.disk.log.append(type(effect).__name__)
        self.effects.append(effect)

    def join(self, site: str = "a", process: str = "0123abcd") -> AnswerJoin:
        answer = self.core.call(lambda call: JoinRequested(call, site, process), 10.0)
        assert isinstance(answer, AnswerJoin)
        return answer

    def push(self, site: str = "a", sequence: int = 1, **changes: Any) -> AnswerPush:
        answer = self.core.call(lambda call: arrived(call, site, sequence, **changes), 10.0)
        assert isinstance(answer, AnswerPush)
        return answer

    def status(self, site: str = "a") -> Status:
        return self.core.ask(lambda machine: machine.state.sites[site].status)


def arrived(call: int, site: str = "a", sequence: int = 1, **changes: Any) -> UpdateArrived:
    fields: dict[str, Any] = {
        "incarnation": 1,
        "fragment": 0,
        "base_version": 0,
        "tokens": 100,
        "steps": 10,
        "step_ns": MS,
        "cursor": 10,
        "digest": f"{site}{sequence}",
        "payload": f"{site}/{sequence}",
        "encoding": "fp32",
        "finite": True,
        "final": False,
    }
    return UpdateArrived(call=call, site=site, sequence=sequence, **(fields | changes))


@contextmanager
def running(**options: Any) -> Iterator[Desk]:
    desk = Desk(**options)
    desk.core.start()
    try:
        yield desk
    finally:
        desk.disk.gate.set()
        desk.core.stop()
        assert not desk.core.alive


def test_nothing_is_answered_or_carried_out_before_it_is_durable() -> None:
    with running() as desk:
        desk.core.ask(lambda machine: None)
        desk.disk.log.clear()
        desk.disk.gate.clear()
        answers: list[object] = []
        calls = [
            threading.Thread(target=lambda: answers.append(desk.join())),
            threading.Thread(target=lambda: answers.append(desk.core.ask(lambda machine: machine.state.live()))),
        ]
        calls[0].start()
        eventually(lambda: "append" in desk.disk.log, "the join is written")
        calls[1].start()
        time.sleep(0.1)
        assert answers == []
        assert desk.effects == []
        desk.disk.gate.set()
        for call in calls:
            call.join(10.0)
        assert len(answers) == 2
        desk.push()
        log = desk.disk.log
    durable = True
    for what in log:
        durable = {"append": False, "flush": True}.get(what, durable)
        assert durable or what == "append", f"{what} before its record is durable: {log}"


def test_a_failed_fsync_ends_the_loop_and_nobody_is_acknowledged() -> None:
    with running() as desk:
        desk.join("a")
        desk.disk.broken = OSError(5, "Input/output error")
        errors: list[BaseException] = []

        def call(number: int) -> None:
            try:
                desk.push("a", 1, digest=f"d{number}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert time.monotonic() - began < 5
        assert [type(error) for error in errors] == [CoreStopped] * 6
        assert desk.core.failed is desk.disk.broken
        assert desk.failures == [desk.disk.broken]
        assert not any(isinstance(effect, PublishVersion) for effect in desk.effects)
        began = time.monotonic()
        with pytest.raises(CoreStopped, match="the syncer stopped before it could answer"):
            desk.core.ask(lambda machine: None)
        with pytest.raises(CoreStopped):
            desk.join("b")
        assert time.monotonic() - began < 10, "who asks a loop that has ended hears so at once"


def test_who_is_not_answered_may_come_back() -> None:
    """The network's answer is UNAVAILABLE: no defect of the message, and none that is logged as ours."""
    assert isinstance(CoreStopped(), Refusal)
    assert CoreStopped().status is WireStatus.UNAVAILABLE


def test_an_event_that_cannot_be_ends_the_loop_and_is_told() -> None:
    with running() as desk:
        desk.core.post(OuterStepDone(0, 1, "x", "y"))  # No step is under way.
        eventually(lambda: not desk.core.alive, "the loop ends")
        assert isinstance(desk.core.failed, AssertionError)
        assert desk.failures == [desk.core.failed]
        with pytest.raises(CoreStopped):
            desk.join()


def test_concurrent_calls_get_their_own_answers() -> None:
    with running(sites_max=64) as desk:
        found: dict[str, AnswerJoin] = {}

        def call(site: str) -> None:
            found[site] = desk.join(site)

        names = [f"s{number}" for number in range(40)]
        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert {name: answer.site for name, answer in found.items()} == {name: name for name in names}
        assert desk.disk.log.count("flush") <= desk.disk.log.count("append"), "one fsync for a turn"


def test_a_question_that_raises_reaches_the_asker_and_nobody_else() -> None:
    with running() as desk:
        for error in (Refusal(WireStatus.NOT_FOUND, "no"), TimeoutError("mine"), KeyError("x"), SystemExit(3)):

            def question(machine: OuterSync, error: BaseException = error) -> None:
                raise error

            began = time.monotonic()
            with pytest.raises(type(error)) as raised:
                desk.core.ask(question)
            assert raised.value is error
            assert time.monotonic() - began < 2
        assert desk.core.ask(lambda machine: 7) == 7


def test_work_that_fails_reaches_the_asker_and_ends_the_loop() -> None:
    with running() as desk:

        def work(machine: OuterSync) -> None:
            raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space left"):
            desk.core.do(work)
        eventually(lambda: not desk.core.alive, "the loop ends")
        assert isinstance(desk.core.failed, OSError)


def test_work_is_done_when_every_effect_of_the_turn_is_carried_out() -> None:
    with running() as desk:
        desk.core.ask(lambda machine: None)
        desk.disk.gate.clear()
        desk.core.post(JoinRequested(999, "a", "0123abcd"))
        eventually(lambda: desk.disk.log[-1] == "append", "the loop is at the disk")
        for number in range(3):
            desk.core.post(JoinRequested(1000 + number, f"s{number}", "0123abcd"))
        seen: list[int] = []
        done = desk.core.do_soon(lambda machine: seen.append(len(desk.effects) - len(machine.state.sites)))
        desk.disk.gate.set()
        done.result(10.0)
        assert seen == [0], "each join's note was carried out before the work saw the machine"


def test_a_call_that_takes_too_long_is_given_up_and_may_still_be_decided() -> None:
    with running() as desk:
        desk.join()
        desk.disk.gate.clear()
        with pytest.raises(CoreStopped):
            desk.core.call(lambda call: arrived(call), timeout_s=0.2)
        desk.disk.gate.set()
        assert desk.push().outcome is Outcome.DUPLICATE


def test_a_deadline_is_met_without_any_traffic() -> None:
    with running(quorum=1, grace_ns=150 * MS, site_timeout_ns=60_000 * MS) as desk:
        desk.join("a")
        desk.join("b")  # It is waited for until the grace is over.
        began = time.monotonic()
        desk.push("a")
        eventually(lambda: "StartOuterStep" in desk.disk.log, "the round closes")
        assert 0.14 <= time.monotonic() - began < 5


def test_a_silent_site_is_declared_so_and_comes_back_when_heard() -> None:
    hand = Hand()
    with running(clock_ns=hand, site_timeout_ns=1000 * MS) as desk:
        desk.join("a")

        def after(steps: int, *, heard: bool) -> list[Status]:
            found = []
            for _ in range(steps):
                if heard:  # Signs of life renew the lease.
                    desk.core.heard("a")
                    assert desk.status() is Status.LIVE
                hand.now_ns += 400 * MS
                found.append(desk.status())
            return found

        assert after(10, heard=True) == [Status.LIVE] * 10
        assert after(3, heard=False) == [Status.LIVE, Status.SILENT, Status.SILENT], "its lease is over"
        desk.core.heard("a")
        assert desk.status() is Status.LIVE
        assert after(3, heard=False) == [Status.LIVE, Status.LIVE, Status.SILENT], "its lease is over again"
        assert [type(event).__name__ for event in desk.disk.events].count("SiteSilent") == 2
        desk.core.heard("stranger")
        assert desk.core.ask(lambda machine: sorted(machine.state.sites)) == ["a"]


def test_signs_of_life_take_one_place_however_many_they_are() -> None:
    with running(site_timeout_ns=60_000 * MS) as desk:
        desk.join("a")
        inside, gate = threading.Event(), threading.Event()
        blocked = desk.core.do_soon(lambda machine: inside.set() or gate.wait(10))
        assert inside.wait(10)
        for _ in range(10_000):
            desk.core.heard("a")
        waiting = desk.core._inbox.qsize()
        gate.set()
        assert waiting == 1
        blocked.result(10)


def test_a_syncer_that_was_away_itself_calls_nobody_silent() -> None:
    """The loop stands still for longer than a lease, as after SIGSTOP; the site had no chance to be heard."""
    with running(site_timeout_ns=400 * MS) as desk:
        desk.join("a")
        desk.core.do_soon(lambda machine: time.sleep(1.0)).result(10)
        assert desk.status() is Status.LIVE
        assert "SiteSilent" not in [type(event).__name__ for event in desk.disk.events]
        eventually(lambda: desk.status() is Status.SILENT, "a whole lease later nothing was heard")


def test_a_site_that_an_update_brings_back_can_become_silent_again() -> None:
    with running(site_timeout_ns=200 * MS) as desk:
        desk.join("a")
        eventually(lambda: desk.status() is Status.SILENT, "its lease is over")
        assert desk.push().outcome is Outcome.ACCEPTED
        assert desk.status() is Status.LIVE
        eventually(lambda: desk.status() is Status.SILENT, "nothing was heard since the update")


def test_an_old_process_that_asks_in_vain_does_not_keep_a_site_alive() -> None:
    with running(site_timeout_ns=300 * MS) as desk:
        desk.join("a", "00000001")
        desk.join("a", "00000002")
        until = time.monotonic() + 10
        while desk.status() is Status.LIVE:
            assert time.monotonic() < until, "the newer process says nothing, and the site still counts as live"
            assert desk.join("a", "00000001").reason is Reason.SUPERSEDED
            time.sleep(0.02)


def test_leases_begin_anew_with_a_new_process_and_time_goes_on() -> None:
    with running(site_timeout_ns=500 * MS) as desk:
        desk.join("a")
        plain = desk.core.ask(lambda machine: machine.snapshot())
    machine = OuterSync.restore(OuterOptions(site_timeout_ns=500 * MS), plain)
    then_ns = machine.state.now_ns
    core = Core(machine, Journal(), lambda effect: None, clock_ns=lambda: 5)  # type: ignore[arg-type]
    assert core.now_ns() == then_ns
    assert core.leases.next_deadline_ns() == then_ns + 500 * MS
    core.worker.shutdown()


def test_a_stop_ends_whoever_waits() -> None:
    desk = Desk()
    desk.core.start()
    desk.join()
    desk.disk.gate.clear()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            desk.push()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: desk.disk.log[-1] == "append", "the loop is at the disk")
    stopper = threading.Thread(target=desk.core.stop)
    stopper.start()
    desk.disk.gate.set()
    for thread in [*threads, stopper]:
        thread.join(10.0)
        assert not thread.is_alive()
    assert all(isinstance(error, CoreStopped) for error in errors)


# --- what is journalled ------------------------------------------------------------------------------------------


# --- Room on the disk ------------------------------------------------------------------------------------------------

MB = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data folder that this process has taken."""
    with locked(tmp_path / "syncer"):
        yield tmp_path / "syncer"


def with_free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    free = {"bytes": 100 * MB}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free["bytes"] // 1000, f_frsize=1000))
    return free


def test_the_reserve_is_kept_free_and_an_edge_is_told_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[Want | None]()
    room = Room(folder, 64 * MB, told.append)
    room.look()
    assert (room.wanting(), told) == (None, [])
    assert room.wanting(36 * MB) is None
    assert room.wanting(37 * MB) == "disk full: 100 MB are free, 37 more and 64 MB in reserve are wanted"
    assert told == [], "that one update is too large is nobody else's matter"
    free["bytes"] = 63 * MB
    for _ in range(3):
        room.look()
    assert told == [Want(Unready.DISK_FULL, "disk full: 63 MB are free, 64 MB in reserve are wanted")]
    assert room.wanting() == told[0].text
    free["bytes"] = 64 * MB
    for _ in range(3):
        room.look()
    assert told[1:] == [None]


def test_what_the_loop_waits_for_counts_whatever_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[Want | None]()
    room = Room(folder, 64 * MB, told.append)
    quota = Want(Unready.DISK_FULL, "disk full: quota")
    room.held(quota)
    assert (room.wanting(), told) == ("disk full: quota", [quota])
    free["bytes"] = 0
    room.held(None)
    assert told == [quota], "still full, for another reason"
    free["bytes"] = 100 * MB
    room.look()
    assert told == [quota, None]


def test_that_something_else_is_wanting_now_is_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while a standby is away: nobody had heard of that when the standby was back."""
    free, told = with_free(monkeypatch), list[Want | None]()
    room = Room(folder, 64 * MB, told.append)
    room.held(Want(Unready.STANDBY_AWAY, "the standby is away"))
    free["bytes"] = 63 * MB
    room.held(Want(Unready.STANDBY_AWAY, "no standby has followed"))
    room.held(None)
    room.held(Want(Unready.LEASE_LOST, "not renewed"))
    free["bytes"] = 100 * MB
    room.held(None)
    kinds = [want.kind if want is not None else None for want in told]
    assert kinds == [Unready.STANDBY_AWAY, Unready.DISK_FULL, Unready.LEASE_LOST, None]


def test_a_thread_that_cannot_look_any_more_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had ended without a word, and a full disk was never seen again."""
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    with_free(monkeypatch)["bytes"] = 0

    def broken(want: Want | None) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        Room(folder, 64 * MB, broken).run(threading.Event())


def test_without_a_reserve_the_disk_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch)["bytes"] = 0
    assert Room(folder, 0, lambda why: None).wanting(1 << 40) is None


def test_the_thread_sees_it_heal_when_nobody_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, told = with_free(monkeypatch), list[Want | None]()
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    room, stopping = Room(folder, 64 * MB, told.append), threading.Event()
    thread = threading.Thread(target=room.run, args=(stopping,))
    thread.start()
    free["bytes"] = 0
    eventually(lambda: len(told) == 1, "it is seen to be full")
    free["bytes"] = 100 * MB
    eventually(lambda: len(told) == 2, "it is seen to have room")
    stopping.set()
    thread.join(10.0)
    assert not thread.is_alive()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    (folder / "lock").touch()


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (shutil.rmtree, "is gone, or was emptied, under this process"),
        (empty, "is gone, or was emptied, under this process"),
        (replace, "is another folder now than the one that this process serves from"),
    ],
)
def test_a_folder_that_is_lost_is_told_of_and_takes_nothing_in(
    lose: Callable[[Path], None], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "LOOK_EVERY_S", 0.01)
    changes = list[Want | None]()
    room = Room(folder, 64 * MB, changes.append)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(room.run, threading.Event())
        assert room.wanting() is None
        lose(folder)
        assert str(looking.exception(10.0)) == f"{folder} {words}"
    assert room.wanting() == f"{folder} {words}"
    assert changes == [], "it is not full: nothing may be let go of in there"


def test_a_syncer_that_lost_its_folder_ends_in_words(tmp_path: Path) -> None:
    """It had gone on for the rest of the run, and had answered every update with a defect."""
    folder = tmp_path / "syncer"
    syncer = new_syncer(folder, Events().emit)
    syncer.start()
    shutil.rmtree(folder)
    with pytest.raises(FolderLostError, match="syncer is gone, or was emptied, under this process"):
        eventually(lambda: syncer.wait(0.1), "an end")
    syncer.stop(0.1)
    assert not folder.exists(), "nothing was written there afterwards"
    with serving(folder) as anew:
        assert anew.core.ask(lambda machine: machine.state.epoch) == 1
