"""A run that was restored: what was under way is refused, and everybody joins again."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from diloco.sync.state import Phase
from tests.sync.driving import Syncer, notes, of, only, running


def restored(syncer: Syncer, lineage: int = 2) -> list[fx.OuterEffect]:
    count = len(syncer.machine.state.fragments)
    return syncer.handle(ev.LineageBegan(lineage, tuple(f"r{index}" for index in range(count)), "a backup"))


def test_every_fragment_gets_its_next_version_and_nothing_that_was_under_way_is_merged() -> None:
    syncer = running("a", "b", quorum=2, num_fragments=2)
    syncer.push("a")
    syncer.push("b")  # Merging now.
    syncer.push("a", 2)
    effects = restored(syncer)
    assert of(fx.PublishVersion, effects) == [fx.PublishVersion(0, 1, "r0"), fx.PublishVersion(1, 1, "r1")]
    fates = {(tell.site, tell.fate.sequence): tell.fate.reason for tell in of(fx.TellFate, effects)}
    assert fates == {("a", 1): Reason.RESTORED, ("a", 2): Reason.RESTORED, ("b", 1): Reason.RESTORED}
    assert syncer.machine.state.sites["a"].lines[0].tokens_discarded == 200
    assert syncer.machine.state.lineage == 2
    assert not of(fx.StartOuterStep, syncer.restart()), "no step of the past is under way"


def test_nothing_of_a_site_enters_before_it_has_joined_again() -> None:
    syncer = running("a", quorum=2)
    syncer.push("a")
    restored(syncer)
    for sequence in (1, 2):  # What it had acknowledged may be another's number in the next past that is restored.
        answer = only(fx.AnswerPush, syncer.push("a", sequence, base_version=0))
        assert (answer.outcome, answer.reason) == (Outcome.REFUSED, Reason.NOT_JOINED)
    joined = only(fx.AnswerJoin, syncer.join("a", "p1"))
    assert (joined.incarnation, joined.reason) == (2, None), "its process is no older one"
    assert joined.standings[0].watermark == 1
    late = only(fx.AnswerPush, syncer.push("a", 2, base_version=0))
    assert late.reason is Reason.FENCED, "sent before the site had joined"
    assert only(fx.AnswerPush, syncer.push("a", 2, incarnation=2, base_version=1)).outcome is Outcome.ACCEPTED


def test_a_run_that_had_ended_goes_on() -> None:
    syncer = running("a")
    syncer.push("a", final=True)
    syncer.handle(ev.DrainRequested(1))
    syncer.done()
    assert syncer.machine.state.phase is Phase.ENDED
    assert "resumed" in notes(restored(syncer))
    assert (syncer.machine.state.phase, syncer.machine.state.ending) == (Phase.RUNNING, None)


def test_lineages_only_rise() -> None:
    syncer = running("a")
    restored(syncer, 3)
    with pytest.raises(AssertionError):
        restored(syncer, 3)
