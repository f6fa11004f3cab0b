"""Rounds: who is waited for, how long, and what a restart finds of one."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS
from diloco.sync.rounds import Standstill, standstill
from diloco.sync.state import Status
from tests.sync.driving import Syncer, notes, of, running


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


def test_the_first_round_too_waits_for_a_share_of_a_period() -> None:
    syncer = running("a", "b", grace="adaptive", grace_ns=0, grace_period_percent=90)
    syncer.push("a", at_s=2, steps=10, step_ns=SECOND_NS // 10)
    assert syncer.machine.next_deadline_ns() == round(2.9 * SECOND_NS)
    assert of(fx.StartOuterStep, syncer.push("b", at_s=2.8, steps=10, step_ns=SECOND_NS // 10))


def test_a_first_update_makes_a_grace_no_longer_than_the_time_since_its_site_joined() -> None:
    syncer = running("a", "b", grace="adaptive", grace_ns=0, grace_period_percent=90)
    syncer.push("a", at_s=2, steps=10, step_ns=1000 * SECOND_NS)
    assert syncer.machine.next_deadline_ns() == round(3.8 * SECOND_NS)


def stands(syncer: Syncer, at_s: float) -> Standstill | None:
    return standstill(syncer.options, syncer.machine.state, round(at_s * SECOND_NS))


def test_a_round_that_waits_for_sites_for_several_periods_says_for_which() -> None:
    syncer = running("a", "b", "c", quorum="all", site_timeout_ns=15 * SECOND_NS)
    syncer.push("a", at_s=1)
    syncer.push("c", at_s=2)
    assert stands(syncer, 15.9) is None, "a site that is gone is waited for as long"
    found = Standstill(0, SECOND_NS, ("b",), "waiting for b of all 3 members")
    assert stands(syncer, 16) == found
    syncer.push("b", at_s=20)
    assert stands(syncer, 90) is None, "it is merged now"


def test_no_round_stands_still_for_a_slow_site_within_its_periods() -> None:
    syncer = running("a", "b", quorum="all")
    for site in "ab":
        syncer.push(site, steps=100, step_ns=SECOND_NS, at_s=100)
    syncer.done()
    syncer.push("a", 2, base_version=1, steps=10, step_ns=SECOND_NS, at_s=110)
    assert stands(syncer, 110 + 299) is None
    assert stands(syncer, 110 + 300) is not None


def test_no_site_hides_by_what_it_says_of_its_steps_that_a_round_stands_still() -> None:
    syncer = running("a", "b", quorum="all", site_timeout_ns=15 * SECOND_NS)
    syncer.push("a", step_ns=10**6 * SECOND_NS, at_s=10)
    assert stands(syncer, 10 + 29) is None
    assert stands(syncer, 10 + 30) is not None, "three times the ten seconds that its first update took"


def test_a_quorum_that_is_not_there_is_said_and_the_last_round_is_none_that_waits() -> None:
    syncer = running("a", "b", quorum=3)
    syncer.push("a", at_s=0)
    found = stands(syncer, 60)
    assert found is not None
    assert (found.waits_for, found.why) == (("b",), "1 of quorum=3 sites arrived; waiting for b")
    syncer.push("b", at_s=60)
    found = stands(syncer, 61)
    assert found is not None
    assert (found.waits_for, found.why) == ((), "2 of quorum=3 sites arrived; no other site is live")
    syncer.handle(ev.DrainRequested(1), 62)
    assert stands(syncer, 63) is None
