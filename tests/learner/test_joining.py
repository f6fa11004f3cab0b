"""How a site joins."""

from __future__ import annotations

import threading
import time

import pytest

from diloco.learner.options import JoinFailed
from diloco.learner.transfer import Joiner
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.wire.messages import Refused, Status, Unreachable
from tests.syncer.building import LAYOUT, Events, agreement


def door(events: Events, stopping: threading.Event | None = None) -> Joiner:
    state = LearnerState([FragmentProgress()])
    client: object = None
    ends = stopping or threading.Event()
    return Joiner(client, agreement(), LAYOUT, "a", state, lambda _: None, str, events.emit, ends)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refused(Status.FAILED_PRECONDITION, "another layout", None), "mismatch"),
        (Refused(Status.PERMISSION_DENIED, "not you", None), "refused"),
        (Unreachable("nobody there"), "unreachable"),
    ],
)
def test_why_a_first_join_failed(error: Exception, kind: str) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(JoinFailed) as caught:
        door(Events()).first(time.monotonic(), fails)
    assert caught.value.kind == kind


def test_it_is_tried_until_somebody_answers() -> None:
    left = [3]

    def late() -> None:
        left[0] -= 1
        if left[0]:
            raise Unreachable("not yet", retry_after_s=0.01)

    door(Events()).first(time.monotonic() + 10.0, late)
    assert left == [0]


def test_who_is_stopping_is_not_at_the_door_any_more() -> None:
    """It once went on until join_timeout_s, without a pause between two attempts."""
    tries: list[float] = []
    stopping = threading.Event()

    def closed() -> None:
        tries.append(time.monotonic())
        stopping.set()
        raise Unreachable("the channel is closed")

    with pytest.raises(JoinFailed, match="stopping; last: the channel is closed"):
        door(Events(), stopping).first(time.monotonic() + 5.0, closed)
    assert len(tries) == 1
