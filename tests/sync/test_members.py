"""Who is in the run: leases, places and processes of a site, and a run that was restored."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync import members
from diloco.sync.events import Outcome, Reason, SiteHeard, SiteSilent
from diloco.sync.journal import from_plain
from diloco.sync.members import Leases, next_lineage, promoted_epoch
from diloco.sync.options import OuterOptions
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, notes, only, running, through_json


def test_a_lease_runs_out_once_in_site_order_and_is_renewed_by_a_word() -> None:
    leases = Leases(10)
    for site, at in (("c", 0), ("a", 0), ("b", 5), ("gone", 0)):
        leases.watch(site, at)
    leases.forget("gone")
    leases.forget("stranger")
    assert leases.heard("gone", 1) is leases.heard("stranger", 1) is None
    assert leases.next_deadline_ns() == 10
    assert leases.heard("a", 4) is None
    assert leases.expired(13) == [SiteSilent("c")]
    assert leases.next_deadline_ns() == 14
    assert leases.expired(15) == [SiteSilent("a"), SiteSilent("b")]
    assert leases.expired(15) == []
    assert leases.next_deadline_ns() is None
    assert leases.heard("a", 15) == SiteHeard("a")
    assert leases.expired(99) == [SiteSilent("a")]


def test_after_a_restart_every_lease_is_full_and_the_silent_stay_silent() -> None:
    leases = Leases(10)
    leases.watch("a", 100)
    leases.watch("b", 100, silent=True)
    leases.watch("c", 104)
    leases.renew(109)
    assert leases.next_deadline_ns() == 119
    assert leases.expired(118) == []
    assert leases.expired(119) == [SiteSilent("a"), SiteSilent("c")]
    assert leases.heard("b", 120) == SiteHeard("b")
    leases.watch("a", 120)  # It joined again.
    assert leases.heard("a", 121) is None


# --- A run that was restored -----------------------------------------------------------------------------------------


def restored(syncer: Syncer, lineage: int = 2) -> list[fx.OuterEffect]:
    count = len(syncer.machine.state.fragments)
    return syncer.handle(ev.LineageBegan(lineage, tuple(f"r{index}" for index in range(count)), "a backup"))


def test_a_run_that_had_ended_goes_on() -> None:
    syncer = running("a")
    syncer.push("a", final=True)
    syncer.handle(ev.DrainRequested(1))
    syncer.done()
    assert syncer.machine.state.phase is Phase.ENDED
    assert "resumed" in notes(restored(syncer))
    assert (syncer.machine.state.phase, syncer.machine.state.ending) == (Phase.RUNNING, None)


def test_what_the_restored_values_hold_of_a_site_is_what_counts_as_merged() -> None:
    syncer = running("a", "b", num_fragments=2)
    for site in "ab":
        syncer.push(site, tokens=70)
        syncer.done(0)
    lines = {name: site.lines[0] for name, site in syncer.machine.state.sites.items()}
    assert [lines[name].tokens_merged for name in "ab"] == [70, 70]
    syncer.push("a", 2, base_version=2, tokens=30)
    syncer.handle(ev.LineageBegan(2, ("r0", "r1"), "without b", held=(("a", 0, 70, 1),)))
    assert [lines[name].tokens_discarded for name in "ab"] == [30, 0]
    assert [(lines[name].tokens_merged, lines[name].updates_merged) for name in "ab"] == [(70, 1), (0, 0)]
    assert syncer.machine.state.run_tokens() == 35
    joined = only(fx.AnswerJoin, syncer.join("b", "p1"))
    assert (joined.standings[0].tokens_merged, joined.standings[0].watermark) == (0, 1)


def test_lineages_and_epochs_only_rise_above_all_that_is_known_and_that_began_earlier() -> None:
    assert promoted_epoch(3, 1_795_000_000) == 1_795_000_000
    for clock_s in (1_795_000_000, 1_480_000_000, 0, -1):
        assert promoted_epoch(1_795_000_000, clock_s) > 1_795_000_000 + 1000, "by as much whatever a clock says"
    assert next_lineage(1, 1_800_000_000) == 1_800_000_000
    assert next_lineage(1, 1_800_000_777) > 1_800_000_000, "restored once more without knowing of the first"
    assert next_lineage(1_800_000_000, 1_700_000_000) == 1_800_000_001, "with a clock that is behind"
    syncer = running("a")
    restored(syncer, 3)
    with pytest.raises(AssertionError):
        restored(syncer, 3)


# --- Places ----------------------------------------------------------------------------------------------------------


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


def test_the_room_is_what_the_latest_start_says_and_less_than_there_are_sites_puts_none_out() -> None:
    syncer = running("a", sites_max=1)
    assert only(fx.AnswerJoin, syncer.join("b")).reason is Reason.FULL
    (note,) = syncer.restart(sites_max=3)
    assert note == fx.Note("settings_changed", "outer.sites_max is 3 and was 1")
    for name in "bc":
        assert only(fx.AnswerJoin, syncer.join(name)).reason is None
    assert only(fx.AnswerJoin, syncer.join("d")).reason is Reason.FULL
    assert syncer.restart(sites_max=3) == []
    syncer.restart(sites_max=1)
    syncer.handle(ev.SiteSilent("b"))
    for name in "abc":
        assert only(fx.AnswerJoin, syncer.join(name, "again")).reason is None, "it is there"
    assert only(fx.AnswerPush, syncer.push("c", incarnation=2)).outcome is Outcome.ACCEPTED
    syncer.handle(ev.SiteLeft(1, "a", 2))
    for name in "ad":
        assert only(fx.AnswerJoin, syncer.join(name, "later")).reason is Reason.FULL, "two are there, and one may be"


def test_a_journal_and_a_snapshot_of_an_earlier_release_say_no_room_and_the_options_do() -> None:
    assert from_plain(ev.SyncerStarted, {"epoch": 2}) == ev.SyncerStarted(2)
    plain = through_json(running("a", sites_max=1).machine.snapshot())
    del plain["sites_max"]
    for sites_max, reason in ((1, Reason.FULL), (2, None)):
        machine = OuterSync.restore(OuterOptions(sites_max=sites_max), plain)
        assert machine.handle(ev.SyncerStarted(2), 0) == []
        assert only(fx.AnswerJoin, machine.handle(ev.JoinRequested(1, "b", "p"), 0)).reason is reason


# --- Processes of a site ---------------------------------------------------------------------------------------------


def test_a_process_needs_a_ticket_to_replace_the_one_before_it_and_a_late_join_of_a_dead_one_changes_nothing() -> None:
    syncer = running()
    for _ in range(2):  # A process that speaks for its site needs none to join again.
        assert only(fx.AnswerJoin, syncer.handle(ev.JoinRequested(1, "a", "living", 0))).incarnation == 1
    before = syncer.machine.snapshot()
    for ticket in (0, 1, 3):  # Its first join, or one with a ticket from before the living process was taken in.
        assert syncer.handle(ev.JoinRequested(2, "a", "dead", ticket)) == [fx.AskToConfirm(2, "a", 2)]
        assert syncer.machine.snapshot() == before
    effects = syncer.handle(ev.JoinRequested(1, "a", "p2", 2))
    assert only(fx.DropSite, effects).reason is Reason.SUPERSEDED
    assert only(fx.AnswerJoin, effects).incarnation == 2
    assert syncer.handle(ev.JoinRequested(1, "a", "p3", 2)) == [fx.AskToConfirm(1, "a", 3)], "the ticket is void"
