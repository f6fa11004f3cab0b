"""How a site joins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from diloco.learner.transfer import Joiner, JoinFailed
from diloco.wire.messages import Refused, Status, Unreachable
from tests.learner.participant import Recorder
from tests.syncer.building import LAYOUT, agreement


def door(join: Callable[[Recorder], None]) -> Joiner:
    class Site(Recorder):
        def join(self) -> None:
            join(self)

    unused: Any = None
    return Joiner(Site(), unused, agreement(), LAYOUT, unused)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refused(Status.FAILED_PRECONDITION, "another layout", None), "mismatch"),
        (Refused(Status.PERMISSION_DENIED, "not you", None), "refused"),
        (Unreachable("nobody there"), "unreachable"),
    ],
)
def test_why_a_first_join_failed(error: Exception, kind: str) -> None:
    def fails(site: Recorder) -> None:
        raise error

    with pytest.raises(JoinFailed) as caught:
        door(fails).first(time.monotonic())
    assert caught.value.kind == kind


def test_it_is_tried_until_somebody_answers() -> None:
    left = [3]

    def late(site: Recorder) -> None:
        left[0] -= 1
        if left[0]:
            raise Unreachable("not yet", retry_after_s=0.01)

    door(late).first(time.monotonic() + 10.0)
    assert left == [0]


def test_who_is_stopping_is_not_at_the_door_any_more() -> None:
    """It once went on until join_timeout_s, without a pause between two attempts."""
    tries: list[float] = []

    def closed(site: Recorder) -> None:
        tries.append(time.monotonic())
        site.stopping.set()
        raise Unreachable("the channel is closed")

    with pytest.raises(JoinFailed, match="stopping; last: the channel is closed"):
        door(closed).first(time.monotonic() + 5.0)
    assert len(tries) == 1
