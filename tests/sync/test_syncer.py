"""The outer machine: membership, rounds, fates, the end, and what a restart finds."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.options import SECOND_NS, OuterOptions
from diloco.sync.state import Phase, Status
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, notes, of, only, through_json


def running(*sites: str, **options: object) -> Syncer:
    """A syncer with live sites; the grace is fixed and nothing unless said otherwise."""
    syncer = Syncer(**({"grace": "fixed", "grace_ns": 0} | options))
    for site in sites:
        syncer.join(site)
    return syncer


# --- rounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [ev.SiteSilent("b"), ev.SiteLeft(1, "b", 1), ev.SiteEvicted(1, "b")])
def test_round_opened_in_a_merge_shrinks_when_a_member_is_gone(gone: ev.OuterEvent) -> None:
    syncer = running("a", "b", "c", quorum="all", staleness_max=1)
    for version in range(2):
        for site in "abc":
            syncer.push(site, version + 1, base_version=version)
        if version == 0:
            syncer.done()
    syncer.push("b", 3, base_version=0)  # During the merge to version 2, in time for it, too late for the next one.
    syncer.push("c", 3, base_version=1)
    syncer.handle(gone)
    syncer.done()
    syncer.push("a", 3, base_version=2)
    state = syncer.machine.state
    assert state.fragments[0].merging_since_ns is not None, "the round waits for a site that is gone"
    assert state.sites["b"].status is not Status.LIVE


def test_shrinking_says_so_and_waits_below_quorum_min_in_words() -> None:
    syncer = running("a", "b", "c", quorum="all", quorum_min=2)
    syncer.push("a")
    assert notes(syncer.handle(ev.SiteSilent("b"))) == ["site_silent", "round_shrunk"]
    effects = syncer.handle(ev.SiteSilent("c"))
    assert notes(effects) == ["site_silent", "round_shrunk", "round_waits"]
    assert "quorum_min=2" in of(fx.Note, effects)[-1].why
    assert syncer.machine.next_deadline_ns() is None
    syncer.handle(ev.SiteHeard("c"))
    assert of(fx.StartOuterStep, syncer.push("c"))


def test_invariant_14_grace_runs_from_the_quorum_even_during_a_merge() -> None:
    syncer = running("a", "b", grace_ns=SECOND_NS)
    syncer.push("a", at_s=0)
    syncer.deadline(1)
    syncer.push("a", 2, at_s=2)  # The quorum of the next round is met now, while the merge is under way.
    syncer.done(at_s=2.5)
    assert syncer.machine.next_deadline_ns() == 3 * SECOND_NS
    assert of(fx.StartOuterStep, syncer.deadline())


def test_invariant_14_grace_that_ended_during_a_merge_is_not_begun_again() -> None:
    syncer = running("a", "b", grace_ns=SECOND_NS)
    syncer.push("a", at_s=0)
    syncer.deadline(1)
    syncer.push("a", 2, at_s=2)
    assert syncer.machine.next_deadline_ns() == 3 * SECOND_NS
    assert not syncer.deadline(3), "the merge of the round before is still under way"
    assert syncer.machine.next_deadline_ns() is None
    assert of(fx.StartOuterStep, syncer.done(at_s=9))


def test_silent_site_whose_update_arrives_is_back_with_a_note() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.handle(ev.SiteSilent("a"))
    effects = syncer.push("a")
    assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED
    assert notes(effects) == ["site_back"]


# --- the end ---------------------------------------------------------------------------------------------------


def test_last_round_waits_for_progress_that_was_refused_and_kept() -> None:
    syncer = running("a", staleness_max=0)
    syncer.push("a")
    syncer.push("a", 2, final=True)  # It waits for a merge after which it is stale: its progress comes again.
    syncer.handle(ev.DrainRequested(1))
    effects = syncer.done()
    assert of(fx.TellFate, effects)[-1].fate.reason is Reason.STALE
    assert not of(fx.MarkFinal, effects), "the run ended before the kept progress could be sent again"
    assert of(fx.StartOuterStep, syncer.push("a", 3, base_version=1, final=True))
    assert of(fx.MarkFinal, syncer.done())


def test_last_round_does_not_wait_for_a_site_that_may_send_nothing_more() -> None:
    syncer = running("a", quorum=2, updates_in_flight_max=2)
    syncer.push("a")
    syncer.push("a", 2)  # Its window is full: it cannot send its last update before these two have their fate.
    assert of(fx.StartOuterStep, syncer.handle(ev.DrainRequested(1)))
    assert not of(fx.MarkFinal, syncer.done())
    syncer.push("a", 3, base_version=1, final=True)
    assert of(fx.MarkFinal, syncer.done())


def test_last_round_takes_nothing_after_its_deadline() -> None:
    syncer = running("a", "b", num_fragments=2, final_wait_ns=SECOND_NS)
    syncer.push("a", fragment=0)
    syncer.handle(ev.DrainRequested(1))
    syncer.deadline()
    late = only(fx.AnswerPush, syncer.push("a", fragment=1))  # Else two fragments in turn could keep the run going.
    assert (late.outcome, late.reason) == (Outcome.REFUSED, Reason.FINISHED)
    assert of(fx.MarkFinal, syncer.done())


def test_restart_says_the_end_again() -> None:
    syncer = running("a", token_budget=100)
    syncer.push("a")
    assert of(fx.AnnounceFinal, syncer.done())
    assert only(fx.AnnounceFinal, syncer.restart()).ending is Ending.FINISHED
    marked = only(fx.MarkFinal, syncer.handle(ev.SiteLeft(1, "a", 1)))
    assert only(fx.MarkFinal, syncer.restart()) == marked, "a crash between the record and the mark would lose the mark"


def test_restart_with_a_smaller_staleness_bound_judges_again() -> None:
    syncer = running("a", "b", quorum=2, staleness_max=4)
    for version in range(2):
        syncer.push("a", version + 1, base_version=version)
        syncer.push("b", version + 1, base_version=version)
        syncer.done()
    syncer.push("a", 3, base_version=0)
    assert only(fx.TellFate, syncer.restart(staleness_max=1)).fate.reason is Reason.STALE
    assert through_json(syncer.machine.snapshot()) == syncer.machine.snapshot()
    assert syncer.machine.state.phase is Phase.RUNNING


# --- invariants ------------------------------------------------------------------------------------------------


def test_invariant_9_an_update_sent_many_times_is_merged_once() -> None:
    syncer = running("a", "b", quorum=2)
    for _ in range(3):
        syncer.push("a")
    step = only(fx.StartOuterStep, syncer.push("b"))
    assert [[update.sequence for update in part.updates] for part in step.contributions] == [[1], [1]]
    assert len(of(fx.TellFate, syncer.done())) == 2
    for _ in range(3):
        (answer,) = syncer.push("a")
        assert isinstance(answer, fx.AnswerPush)
        assert answer.fate is not None
        assert answer.fate.version == 1


def test_invariant_9_an_update_keeps_its_merge_through_a_restart_and_an_eviction() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.push("a")
    first = only(fx.StartOuterStep, syncer.push("b"))
    syncer.handle(ev.SiteEvicted(1, "b"))
    assert only(fx.StartOuterStep, syncer.restart()) == first
    assert [tell.fate.merged for tell in of(fx.TellFate, syncer.done())] == [True, True]


def test_invariant_10_weights_of_a_merge_sum_to_one() -> None:
    syncer = running(*"abcdefg", quorum=7)
    for number, site in enumerate("abcdefg", 1):
        effects = syncer.push(site, tokens=number**5, steps=number)
    assert abs(sum(part.weight for part in only(fx.StartOuterStep, effects).contributions) - 1) < 1e-12


def test_room_for_sites_is_bounded() -> None:
    syncer = running("a", "b", sites_max=2)
    assert only(fx.AnswerJoin, syncer.join("c")).reason is Reason.FULL
    assert "c" not in syncer.machine.state.sites


def test_progress_is_the_further_of_tokens_and_time() -> None:
    syncer = running("a", token_budget=1000, run_ns=100 * SECOND_NS)
    syncer.push("a", tokens=250, at_s=10)
    syncer.done()
    assert syncer.machine.progress_ppm() == 250_000
    syncer.handle(ev.SiteHeard("a"), 50)
    assert syncer.machine.progress_ppm() == 500_000


def test_a_snapshot_of_other_fragments_is_refused() -> None:
    with pytest.raises(AssertionError, match="other fragments"):
        OuterSync.restore(OuterOptions(num_fragments=2), running("a").machine.snapshot())
