"""Whether an update may enter, judged by its header."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.sync import events as ev
from diloco.sync.admission import Verdict, admit
from diloco.sync.events import Fate, Outcome, Reason
from diloco.sync.journal import to_plain
from diloco.sync.options import OuterOptions
from diloco.sync.state import FragmentState, Line, OuterState, Pending, Phase, Site, Status
from tests.sync.driving import Syncer

REFUSED, RETRY, DUPLICATE = Outcome.REFUSED, Outcome.RETRY, Outcome.DUPLICATE


def a_state() -> OuterState:
    fate = Fate(0, 4, 9, 10, "four")
    line = Line(watermark=5, undecided=[Pending(5, 9, 10, 1, "five", "p", "fp32")], fates=[fate])
    return OuterState([FragmentState(version=10)], now_ns=100, sites={"a": Site(2, "p", Status.LIVE, [line])})


def judged(state: OuterState, **given: Any) -> Verdict:
    header = {"site": "a", "incarnation": 2, "fragment": 0, "sequence": 6, "base_version": 10, "digest": "six"}
    options = OuterOptions(staleness_max=3)
    return admit(state, options, **(header | given))


def test_the_next_update_of_the_present_process_may_enter() -> None:
    assert judged(a_state()) == Verdict(Outcome.ACCEPTED)
    assert judged(a_state(), base_version=7) == Verdict(Outcome.ACCEPTED)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"site": "b"}, Verdict(REFUSED, Reason.NOT_JOINED)),
        ({"fragment": 1}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({"fragment": -1}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({"incarnation": 1}, Verdict(REFUSED, Reason.FENCED)),
        ({"incarnation": 3}, Verdict(REFUSED, Reason.FENCED)),
        ({"sequence": 7}, Verdict(RETRY, Reason.GAP)),
        ({"sequence": 0}, Verdict(REFUSED, Reason.FORGOTTEN)),
        ({"sequence": -1}, Verdict(REFUSED, Reason.FORGOTTEN)),
        ({"sequence": 3}, Verdict(REFUSED, Reason.FORGOTTEN)),
        ({"sequence": 5, "digest": "five"}, Verdict(DUPLICATE)),
        ({"sequence": 5, "digest": "other"}, Verdict(REFUSED, Reason.CONFLICT)),
        ({"sequence": 4, "digest": "four"}, Verdict(DUPLICATE, fate=Fate(0, 4, 9, 10, "four"))),
        ({"sequence": 4, "digest": "other"}, Verdict(REFUSED, Reason.CONFLICT)),
        ({"sequence": 5, "digest": "five", "incarnation": 1}, Verdict(DUPLICATE)),
        ({"base_version": 11}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({"base_version": -1}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({"base_version": 6}, Verdict(REFUSED, Reason.STALE)),
    ],
)
def test_invariant_15_what_may_not_enter_is_answered_and_changes_nothing(
    given: dict[str, object], verdict: Verdict
) -> None:
    state = a_state()
    before = to_plain(state)
    assert judged(state, **given) == verdict
    assert to_plain(state) == before


@pytest.mark.parametrize(
    ("status", "reason"), [(Status.EVICTED, Reason.EVICTED), (Status.LEFT, Reason.FENCED), (Status.SILENT, None)]
)
def test_a_site_that_is_gone_sends_nothing_new(status: Status, reason: Reason | None) -> None:
    state = a_state()
    state.sites["a"].status = status
    assert judged(state).reason is reason
    assert judged(state, sequence=5, digest="five") == Verdict(DUPLICATE), "its own past may be asked for"


def test_the_window_bounds_what_is_undecided() -> None:
    state = a_state()
    state.sites["a"].lines[0].undecided.append(Pending(6, 9, 10, 1, "six", "p", "fp32"))
    state.sites["a"].lines[0].watermark = 6
    assert judged(state, sequence=7) == Verdict(RETRY, Reason.OVERLOAD)


def test_after_the_end_nothing_enters() -> None:
    state = a_state()
    state.phase = Phase.ENDED
    assert judged(state) == Verdict(REFUSED, Reason.FINISHED)
    state.phase, state.final_deadline_ns = Phase.ENDING, 101
    assert judged(state) == Verdict(Outcome.ACCEPTED)
    state.now_ns = 101
    assert judged(state) == Verdict(REFUSED, Reason.FINISHED)


@pytest.mark.parametrize(
    "given",
    [
        {"site": "nobody"},
        {"fragment": 7},
        {"incarnation": 9},
        {"sequence": 9},
        {"base_version": 5},
        {"finite": False},
        {"sequence": 1, "digest": "other"},
    ],
)
def test_invariant_15_a_refused_update_leaves_the_memory_as_it_was(given: dict[str, Any]) -> None:
    syncer = Syncer(quorum=2, staleness_max=0)
    syncer.join("a")
    syncer.join("b")
    syncer.push("a")
    before = syncer.machine.snapshot()
    fields = {"site": "a", "sequence": 2} | given
    (answer,) = syncer.push(**fields)
    assert answer.outcome is not Outcome.ACCEPTED
    assert answer.reason is not None
    assert syncer.machine.snapshot() == before


def test_invariant_9_the_answer_by_the_header_is_the_answer_to_the_whole() -> None:
    syncer = Syncer()
    syncer.join("a")
    update = syncer.update("a")
    header = (update.site, update.incarnation, update.fragment, update.sequence, update.base_version, update.digest)
    assert syncer.machine.admit(*header) == Verdict(Outcome.ACCEPTED)
    syncer.handle(update)
    assert syncer.machine.admit(*header) == Verdict(Outcome.DUPLICATE)
    syncer.done()
    assert syncer.machine.admit(*header) == Verdict(Outcome.DUPLICATE, fate=ev.Fate(0, 1, 1, 100, "a1"))
