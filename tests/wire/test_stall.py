from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from diloco.wire.channel import Guard, StallWatch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stalls() -> Iterator[StallWatch]:
    watch = StallWatch("test")
    yield watch
    watch.close()


def test_a_stream_that_does_not_move_is_cancelled_once(stalls: StallWatch) -> None:
    cancelled: list[float] = []
    done = threading.Event()

    def cancel() -> None:
        cancelled.append(time.monotonic())
        done.set()

    begun_s = time.monotonic()
    with Guard(stalls, 0.3, cancel) as guard:
        assert done.wait(5)
        time.sleep(0.6)
        assert guard.stalled
    assert len(cancelled) == 1
    assert cancelled[0] - begun_s >= 0.3


def test_one_that_moves_is_left_alone(stalls: StallWatch) -> None:
    cancelled = threading.Event()
    with Guard(stalls, 1.0, cancelled.set) as guard:
        for _ in range(15):
            time.sleep(0.1)
            guard.touch()
    assert not cancelled.is_set()
    assert not guard.stalled


def test_no_limit_while_this_end_works_itself(stalls: StallWatch) -> None:
    cancelled = threading.Event()
    with Guard(stalls, 0.1) as guard:
        guard.limit(None)
        guard.cancel = cancelled.set
        assert not cancelled.wait(0.8)
        guard.limit(0.1)
        assert cancelled.wait(5)


def test_nothing_is_cancelled_after_the_guard_was_left(stalls: StallWatch) -> None:
    cancelled = threading.Event()
    with Guard(stalls, 0.2, cancelled.set):
        pass
    assert not cancelled.wait(0.8)


def test_close_ends_the_thread_and_needs_none() -> None:
    StallWatch("unused").close()
    watch = StallWatch("used")
    with Guard(watch, 9.0):
        pass
    watch.close()
    assert "used" not in {thread.name for thread in threading.enumerate()}
