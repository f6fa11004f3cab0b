from __future__ import annotations

import threading
from typing import Any

from diloco.learner.transfer import WAIT_S, Ahead
from diloco.wire.messages import PULL_WAIT_NS_MAX, PullAsk, Unreachable
from diloco.wire.pulling import PulledVersion, PullSink
from tests.syncer.building import eventually
from tests.wire.samples import PULL

ASK = PullAsk("run-1", "site-a", 3, 7)


class Syncer:
    """Answers a pull when it is told to."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = tuple(map(memoryview, parts))
        self.made = threading.Event()
        self.fails = False

    def pull(self, ask: PullAsk, sink: PullSink, patience: Any) -> PulledVersion:
        assert (ask, patience.seconds) == (ASK, WAIT_S)
        assert self.made.wait(20)
        if self.fails:
            raise Unreachable("gone")
        return PulledVersion(PULL, self.parts)


def ahead(syncer: Syncer) -> Ahead:
    return Ahead(syncer, ASK, PullSink())  # type: ignore[arg-type]


def test_it_waits_no_longer_than_a_syncer_lets_anybody_wait() -> None:
    assert WAIT_S * 1e9 <= PULL_WAIT_NS_MAX


def test_what_came_is_taken() -> None:
    syncer = Syncer(b"ab")
    waiting = ahead(syncer)
    assert not waiting.over
    syncer.made.set()
    taken = waiting.take()
    assert taken is not None
    assert bytes(taken.parts[0]) == b"ab"
    assert not waiting.over, "what it brought is still to be taken"


def test_nothing_newer_and_a_break_are_nothing() -> None:
    for fails in (False, True):
        syncer = Syncer()
        syncer.fails = fails
        waiting = ahead(syncer)
        syncer.made.set()
        eventually(lambda waiting=waiting: waiting.over, "it waits no more")
        assert waiting.take() is None
