"""Rounds: who is waited for, how long, and what a restart finds of one."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS
from diloco.sync.state import Status
from tests.sync.driving import notes, of, running


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
