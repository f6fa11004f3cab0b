"""The decision loop where something is wanting: it waits, says so, tells nothing, and goes on where it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diloco.sync.effects import AnswerJoin, AnswerPush
from diloco.sync.events import DrainRequested, Outcome
from diloco.sync.leadership import LeaseLostError, Place
from diloco.syncer import core
from diloco.syncer.core import CoreHeld, CoreStopped, Readiness, Unready, Want
from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.messages import Refusal
from diloco.wire.messages import Status as WireStatus
from tests.syncer.building import NO_WAIT, RUN, Events, eventually, join, new_syncer, serving
from tests.syncer.test_core import arrived, running


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


def test_a_full_disk_holds_everything_back_but_early_questions_and_heals() -> None:
    held: list[Want | None] = []
    with running(on_held=held.append) as desk:
        desk.join()
        desk.disk.log.clear()
        desk.disk.full = True
        pushing, pushed = background(desk.push)
        eventually(lambda: desk.core.held, "the loop says that it waits")
        assert desk.core.held == "disk full: No space left on device"
        pushing.join(10.0)
        (refusal,) = pushed
        assert isinstance(refusal, CoreHeld)
        assert (refusal.status, refusal.text) == (WireStatus.UNAVAILABLE, "disk full: No space left on device")
        with pytest.raises(CoreHeld, match="disk full"):
            desk.core.ask(lambda machine: machine.state.live())
        assert desk.core.ask(lambda machine: len(machine.state.sites), early=True) == 1
        assert desk.disk.log == [], "nothing is written, told or begun"
        desk.disk.full = False
        eventually(lambda: desk.core.held is None, "the loop goes on")
        again = desk.push()
        assert again.outcome is Outcome.DUPLICATE, "what was handed in before stays handed in"
        assert desk.disk.log[:2] == ["append", "flush"]
        assert desk.disk.log.count("StartOuterStep") == 1
    assert held == [Want(Unready.DISK_FULL, "disk full: No space left on device"), None]


def test_who_asks_again_and_again_while_it_is_held_fills_no_inbox() -> None:
    """A site that looks for another syncer asks this one, too, twice a second for as long as it is held."""
    with running() as desk:
        desk.join()
        desk.disk.full = True
        _, pushed = background(desk.push)
        eventually(lambda: desk.core.held and pushed, "the loop says that it waits")
        waiting = desk.core._inbox.qsize()
        for _ in range(20):
            with pytest.raises(CoreHeld, match="disk full"):
                desk.join("b")
            with pytest.raises(CoreHeld, match="disk full"):
                desk.core.ask(lambda machine: machine.state.live())
            with pytest.raises(CoreHeld, match="disk full"):
                desk.core.do(lambda machine: None)
            assert desk.core.ask(lambda machine: len(machine.state.sites), early=True) == 1
        assert desk.core._inbox.qsize() == waiting
        desk.disk.full = False
        eventually(lambda: desk.core.held is None, "the loop goes on")
        assert isinstance(desk.join("b"), AnswerJoin)


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


def test_a_process_that_is_stopped_while_it_waits_lets_the_turn_never_have_happened() -> None:
    with running() as desk:
        desk.join()
        effects = list(desk.effects)
        desk.disk.full = True
        pushing, pushed = background(lambda: desk.push(cursor=1))
        eventually(lambda: desk.core.held, "the loop says that it waits")
        desk.core.stop()
        assert not desk.core.alive
        pushing.join(10.0)
        assert isinstance(pushed[0], Refusal)
        assert desk.effects == effects
        assert desk.failures == []
        assert desk.core.failed is None


def test_an_answer_that_comes_too_late_is_given_to_who_was_named_for_it() -> None:
    late: list[object] = []
    with running() as desk:
        desk.join()
        desk.disk.gate.clear()
        with pytest.raises(CoreStopped):
            desk.core.call(lambda call: arrived(call), 0.05, late.append)
        assert late == []
        desk.disk.gate.set()
        eventually(lambda: late, "the answer comes after all")
        (answer,) = late
        assert isinstance(answer, AnswerPush)
        assert answer.outcome is Outcome.ACCEPTED


def test_a_question_that_nobody_waits_for_any_more_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with running() as desk:
        desk.core.ask(lambda machine: None)
        desk.disk.gate.clear()
        desk.core.post(DrainRequested(99))
        with monkeypatch.context() as patch:
            patch.setattr(core, "TIMEOUT_S", 0.05)
            with pytest.raises(CoreStopped):
                desk.core.ask(lambda machine: asked.append("late"))
        desk.disk.gate.set()
        desk.core.ask(lambda machine: asked.append("in time"))
    assert asked == ["in time"]


def test_who_may_not_lead_tells_nobody_anything_not_even_what_it_knew_before() -> None:
    why: list[str | None] = [None]
    with running(leads=lambda: why[0]) as desk:
        desk.join()
        desk.disk.log.clear()
        effects = list(desk.effects)
        why[0] = "the lease was not renewed in time"
        with pytest.raises(CoreHeld, match="not renewed"):
            desk.core.ask(lambda machine: machine.state.live())
        pushing, pushed = background(desk.push)
        pushing.join(10.0)
        assert isinstance(pushed[0], CoreHeld)
        assert pushed[0].kind is Unready.LEASE_LOST
        assert desk.effects == effects
        why[0] = None
        eventually(lambda: desk.core.held is None, "the loop goes on")
        assert desk.push().outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("acks_first", [False, True])
def test_a_lease_that_is_lost_while_a_turn_becomes_durable_ends_the_loop_before_it_is_told(acks_first: bool) -> None:
    lost = [False]

    def leads() -> str | None:
        if lost[0] and "flush" in desk.disk.log:
            raise LeaseLostError("another has taken it")
        return None

    with running(leads=leads, acks_first=acks_first) as desk:
        desk.join()
        desk.disk.log.clear()
        effects = list(desk.effects)
        lost[0] = True
        pushing, pushed = background(desk.push)
        pushing.join(10.0)
        assert isinstance(pushed[0], CoreStopped), "nobody was told that it is accepted"
        assert "flush" in desk.disk.log, "it was durable here"
        assert desk.effects == effects
        eventually(lambda: desk.failures, "whoever owns the loop is told")
        assert isinstance(desk.core.failed, LeaseLostError)


def test_a_lease_that_is_lost_ends_the_wait_for_whatever_is_wanting() -> None:
    lost, wanting = [False], [False]

    def leads() -> str | None:
        if lost[0]:
            raise LeaseLostError("another has taken it")
        return None

    with running(leads=leads, replicated=lambda turn: "the standby is away" if wanting[0] else None) as desk:
        desk.join()
        wanting[0] = True
        pushing, _ = background(desk.push)
        eventually(lambda: desk.core.held, "the loop says that it waits")
        lost[0] = True
        eventually(lambda: desk.failures, "the standby will never be back: it is the one that leads now")
        pushing.join(10.0)
        assert isinstance(desk.core.failed, LeaseLostError)


# --- What a probe is told --------------------------------------------------------------------------------------------

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_it_is_ready_only_when_no_reason_is_left() -> None:
    readiness, told = Readiness(), list[bool]()
    readiness.told_to(told.append)
    assert readiness.reasons() == ["starting"]
    readiness.begins(Unready.DISK_FULL)
    readiness.ends(Unready.STARTING)
    readiness.begins(Unready.DRAINING)
    assert readiness.reasons() == ["draining", "disk_full"]
    readiness.ends(Unready.DISK_FULL)
    readiness.ends(Unready.DISK_FULL)
    readiness.ends(Unready.DRAINING)
    assert readiness.reasons() == []
    assert told == [False, False, False, False, False, False, True]


def probe(address: str, name: str) -> int:
    with grpc.insecure_channel(address) as channel:
        status: int = (
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status
        )
        return status


def test_a_full_disk_and_a_drain_are_told_by_the_run_s_name_and_the_server_lives(tmp_path: Path) -> None:
    with serving(tmp_path, outer={**NO_WAIT, "quorum": 2, "quorum_min": 2}) as syncer:
        assert syncer._server is not None
        address = syncer._server.address
        assert [probe(address, name) for name in ("", SYNC_SERVICE, RUN)] == [SERVING] * 3
        syncer._room_changed(Want(Unready.DISK_FULL, "2 MB are left"))
        assert [probe(address, name) for name in ("", SYNC_SERVICE, RUN)] == [SERVING, NOT_SERVING, NOT_SERVING]
        assert syncer.api.status()["not_ready"] == ["disk_full"]
        syncer._room_changed(None)
        assert probe(address, RUN) == SERVING
        join(syncer)
        syncer.drain()
        eventually(lambda: probe(address, RUN) == NOT_SERVING, "a run that drains")
        assert probe(address, "") == SERVING
        assert syncer.api.status()["not_ready"] == ["draining"]


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


def test_a_run_that_drained_is_ready_when_it_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        syncer.drain()
        eventually(lambda: syncer.wait(0.1), "the end of this part")
    with serving(tmp_path) as syncer:
        assert syncer.api.status()["not_ready"] == []


def test_what_happens_before_it_serves_is_not_forgotten(tmp_path: Path) -> None:
    syncer = new_syncer(tmp_path, Events().emit)
    syncer.readiness.begins(Unready.DISK_FULL)
    address = syncer.start()
    try:
        assert probe(address, RUN) == NOT_SERVING
        assert syncer.readiness.reasons() == ["disk_full"]
    finally:
        syncer.stop(0.1)
