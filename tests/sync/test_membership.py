"""Who is in the run."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync import membership
from diloco.sync.events import Outcome, Reason
from tests.sync.driving import of, only, running


def test_room_for_sites_is_bounded() -> None:
    syncer = running("a", "b", sites_max=2)
    assert only(fx.AnswerJoin, syncer.join("c")).reason is Reason.FULL
    assert "c" not in syncer.machine.state.sites


@pytest.mark.parametrize("goes", ["leaves", "is evicted"])
def test_a_site_that_is_gone_leaves_its_place_and_is_remembered(goes: str) -> None:
    """Pods have a new name with each start; and one that comes back finds what it had sent."""
    syncer = running(sites_max=2)
    for number in range(14):
        name = f"pod-{number}"
        assert only(fx.AnswerJoin, syncer.join(name)).reason is None
        version = syncer.machine.state.fragments[0].version
        syncer.push(name, base_version=version)
        if goes == "leaves":
            syncer.handle(ev.SiteLeft(1, name, 1))
        else:
            syncer.handle(ev.SiteEvicted(1, name))
        assert len(only(fx.AnswerJoin, syncer.join("other")).standings) == 1
        full = only(fx.AnswerJoin, syncer.join("one too many")).reason
        assert full is Reason.FULL, "what it has sent is not decided: its place is still taken"
        syncer.done()
    if goes == "leaves":
        (standing,) = only(fx.AnswerJoin, syncer.join("pod-3", "again")).standings
        assert (standing.watermark, len(standing.fates)) == (1, 1)
        update = syncer.update("pod-3", 1, base_version=3, incarnation=2)
        assert only(fx.AnswerPush, syncer.handle(update)).outcome is Outcome.DUPLICATE


def test_how_many_are_remembered_is_bounded() -> None:
    syncer = running(sites_max=1)
    for number in range(membership.REMEMBERED_TIMES):
        assert only(fx.AnswerJoin, syncer.join(f"pod-{number}")).reason is None
        syncer.handle(ev.SiteLeft(1, f"pod-{number}", 1))
    assert only(fx.AnswerJoin, syncer.join("another")).reason is Reason.FULL
    assert only(fx.AnswerJoin, syncer.join("pod-0", "again")).reason is None, "one that was there comes back"


def test_an_old_process_that_comes_back_late_does_not_fence_the_new_one() -> None:
    syncer = running("a")
    assert only(fx.DropSite, syncer.join("a", "p2")).incarnation == 1
    assert only(fx.AnswerJoin, syncer.join("a", "p1")).reason is Reason.SUPERSEDED
    assert only(fx.AnswerJoin, syncer.join("a", "p2")).incarnation == 2


def test_a_late_join_of_a_dead_process_changes_nothing() -> None:
    syncer = running()
    syncer.handle(ev.JoinRequested(1, "a", "living", 0))
    before = syncer.machine.snapshot()
    for ticket in (0, 1, 3):  # Its first join, or one with a ticket from before the living process was taken in.
        (asked,) = syncer.handle(ev.JoinRequested(2, "a", "dead", ticket))
        assert asked == fx.AskToConfirm(2, "a", 2)
        assert syncer.machine.snapshot() == before


def test_a_process_that_repeats_the_ticket_replaces_the_one_before_it_and_the_ticket_is_void() -> None:
    syncer = running()
    syncer.handle(ev.JoinRequested(1, "a", "p1", 0))
    effects = syncer.handle(ev.JoinRequested(1, "a", "p2", 2))
    assert only(fx.DropSite, effects).reason is Reason.SUPERSEDED
    assert only(fx.AnswerJoin, effects).incarnation == 2
    assert syncer.handle(ev.JoinRequested(1, "a", "p3", 2)) == [fx.AskToConfirm(1, "a", 3)]


def test_a_process_that_speaks_for_its_site_needs_no_ticket_to_join_again() -> None:
    syncer = running()
    for _ in range(2):
        assert only(fx.AnswerJoin, syncer.handle(ev.JoinRequested(1, "a", "p1", 0))).incarnation == 1


def test_an_eviction_refuses_what_waits_and_not_what_merges() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.push("a")
    syncer.push("b")
    syncer.push("b", 2)
    effects = syncer.handle(ev.SiteEvicted(1, "b"))
    assert [tell.fate.sequence for tell in of(fx.TellFate, effects)] == [2]
    assert only(fx.AnswerJoin, syncer.join("b")).reason is Reason.EVICTED
