from __future__ import annotations

import contextlib
import threading

import pytest

from diloco.wire.door import Counters, Gate, OneAtATime, WaitingRoom
from diloco.wire.messages import Refusal, Status


def test_counters_count_from_many_threads() -> None:
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add("x", 2) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals() == {"x": 8000}


def test_a_gate_bounds_each_and_all_and_gives_room_back() -> None:
    gate = Gate("push", total_max=3, each_max=2, pushback_ms=70)
    with gate.enter("a"), gate.enter("a"):
        with pytest.raises(Refusal, match="of this caller") as caught, gate.enter("a"):
            pass
        assert (caught.value.status, caught.value.retry_ms) == (Status.RESOURCE_EXHAUSTED, 70)
        with gate.enter("b"), pytest.raises(Refusal, match="in all"), gate.enter("c"):
            pass
    with pytest.raises(KeyError), gate.enter("a"):
        raise KeyError
    for _ in range(5):
        with gate.enter("a"), gate.enter("b"), gate.enter("c"):
            pass


def test_a_later_stream_ends_the_one_before_it() -> None:
    one = OneAtATime("push", 50)
    ended = threading.Event()
    order: list[str] = []
    inside = threading.Event()

    def older() -> None:
        with one.enter(("a", 0, 1), 1, ended.set):
            inside.set()
            ended.wait(5)
            order.append("older ends")

    thread = threading.Thread(target=older)
    thread.start()
    assert inside.wait(5)
    with one.enter(("a", 0, 1), 2, lambda: None), one.enter(("a", 0, 2), 1, lambda: None):
        order.append("newer is in")
    thread.join(timeout=5)
    assert order == ["older ends", "newer is in"]


def test_an_older_incarnation_is_fenced() -> None:
    one = OneAtATime("push", 50)
    with (
        one.enter(("a",), 5, lambda: None),
        pytest.raises(Refusal, match="fenced") as caught,
        one.enter(("a",), 4, lambda: None),
    ):
        pass
    assert caught.value.status is Status.FAILED_PRECONDITION


def test_one_that_does_not_end_is_waited_for_with_a_bound() -> None:
    one = OneAtATime("push", 50)
    with one.enter(("a",), 1, lambda: None):
        with pytest.raises(Refusal, match="still being ended") as caught, one.enter(("a",), 1, lambda: None):
            pass
        assert caught.value.retry_ms == 50
    with one.enter(("a",), 1, lambda: None):
        pass


def test_a_full_waiting_room_sends_away_the_longest_of_who_has_most() -> None:
    room = WaitingRoom(3)
    gone: list[str] = []

    def enter(caller: str, name: str) -> None:
        waiting.enter_context(room.enter(caller, lambda: gone.append(name)))

    with contextlib.ExitStack() as waiting:
        enter("honest", "h1")
        enter("loud", "l1")
        enter("loud", "l2")
        assert gone == []
        enter("loud", "l3")
        assert gone == ["l1"]
        enter("other", "o1")
        assert gone == ["l1", "l2"]
        enter("late", "x1")
        assert gone == ["l1", "l2", "h1"], "of equals the one who came first"
    for turn in range(5):
        with room.enter("again", lambda: gone.append("never")), room.enter(f"{turn}", lambda: gone.append("never")):
            pass
    assert "never" not in gone
