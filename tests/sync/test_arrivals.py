"""An update is here: who is back by it, and what is not looked at any more."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from tests.sync.driving import notes, only, running


def test_silent_site_whose_update_arrives_is_back_with_a_note() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.handle(ev.SiteSilent("a"))
    effects = syncer.push("a")
    assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED
    assert notes(effects) == ["site_back"]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"finite": False}, Reason.NON_FINITE),
        ({"intact": False}, Reason.CORRUPT),
        ({"intact": False, "finite": False}, Reason.CORRUPT),
    ],
)
def test_invariant_15_what_is_not_finite_or_not_what_was_sent_changes_nothing(
    facts: dict[str, bool], reason: Reason
) -> None:
    syncer = running("a", "b", quorum=2)
    before = syncer.machine.snapshot()
    (answer,) = syncer.push("a", **facts)
    assert answer == fx.AnswerPush(1, Outcome.REFUSED, 0, reason)
    assert syncer.machine.snapshot() == before


def test_what_was_accepted_before_is_a_duplicate_whatever_came_this_time() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.push("a")
    (answer,) = syncer.push("a", intact=False)
    assert isinstance(answer, fx.AnswerPush)
    assert answer.outcome is Outcome.DUPLICATE
