"""Who is in the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync import members
from diloco.sync.events import Outcome, Reason
from diloco.sync.journal import replay
from diloco.sync.options import OuterOptions
from diloco.sync.plain import from_plain
from diloco.sync.syncer import OuterSync
from tests.sync.driving import of, only, running, through_json


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
    for number in range(members.REMEMBERED_TIMES):
        assert only(fx.AnswerJoin, syncer.join(f"pod-{number}")).reason is None
        syncer.handle(ev.SiteLeft(1, f"pod-{number}", 1))
    assert only(fx.AnswerJoin, syncer.join("another")).reason is Reason.FULL
    assert only(fx.AnswerJoin, syncer.join("pod-0", "again")).reason is None, "one that was there comes back"


def test_the_room_is_what_the_latest_start_says() -> None:
    syncer = running("a", sites_max=1)
    assert only(fx.AnswerJoin, syncer.join("b")).reason is Reason.FULL
    (note,) = syncer.restart(sites_max=3)
    assert note == fx.Note("settings_changed", "outer.sites_max is 3 and was 1")
    for name in "bc":
        assert only(fx.AnswerJoin, syncer.join(name)).reason is None
    assert only(fx.AnswerJoin, syncer.join("d")).reason is Reason.FULL
    assert syncer.restart(sites_max=3) == []


def test_less_room_than_there_are_sites_puts_none_out() -> None:
    syncer = running("a", "b", "c", sites_max=3)
    syncer.restart(sites_max=1)
    syncer.handle(ev.SiteSilent("b"))
    for name in "abc":
        assert only(fx.AnswerJoin, syncer.join(name, "again")).reason is None, "it is there"
    assert only(fx.AnswerPush, syncer.push("c", incarnation=2)).outcome is Outcome.ACCEPTED
    syncer.handle(ev.SiteLeft(1, "a", 2))
    for name in "ad":
        assert only(fx.AnswerJoin, syncer.join(name, "later")).reason is Reason.FULL, "two are there, and one may be"


def test_a_replay_has_the_room_of_then_whatever_the_options_say_now() -> None:
    syncer = running("a", sites_max=1)
    syncer.join("b")
    syncer.restart(sites_max=2)
    syncer.join("b")
    syncer.join("c")
    for sites_max in (1, 2, 9):
        machine = OuterSync(replace(syncer.options, sites_max=sites_max))
        assert len(list(replay(machine, syncer.records))) == len(syncer.records)
        assert machine.state == syncer.machine.state


def test_a_journal_and_a_snapshot_of_an_earlier_release_say_no_room_and_the_options_do() -> None:
    assert from_plain(ev.SyncerStarted, {"epoch": 2}) == ev.SyncerStarted(2)
    plain = through_json(running("a", sites_max=1).machine.snapshot())
    del plain["sites_max"]
    for sites_max, reason in ((1, Reason.FULL), (2, None)):
        machine = OuterSync.restore(OuterOptions(sites_max=sites_max), plain)
        assert machine.handle(ev.SyncerStarted(2), 0) == []
        assert only(fx.AnswerJoin, machine.handle(ev.JoinRequested(1, "b", "p"), 0)).reason is reason


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
