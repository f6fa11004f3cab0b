"""A run that was restored: what was under way is refused, and everybody joins again."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from diloco.sync.members import next_lineage, promoted_epoch
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
    for sequence in (1, 2):  # Sent before the site has heard what its join was answered.
        late = only(fx.AnswerPush, syncer.push("a", sequence, base_version=0))
        assert (late.outcome, late.reason) == (Outcome.REFUSED, Reason.NOT_JOINED)
    assert only(fx.AnswerPush, syncer.push("a", 2, incarnation=2, base_version=1)).outcome is Outcome.ACCEPTED


def test_a_run_that_had_ended_goes_on() -> None:
    syncer = running("a")
    syncer.push("a", final=True)
    syncer.handle(ev.DrainRequested(1))
    syncer.done()
    assert syncer.machine.state.phase is Phase.ENDED
    assert "resumed" in notes(restored(syncer))
    assert (syncer.machine.state.phase, syncer.machine.state.ending) == (Phase.RUNNING, None)


def test_a_promoted_standby_is_newer_than_any_number_of_restarts_of_the_old_syncer() -> None:
    assert promoted_epoch(3, 1_795_000_000) == 1_795_000_000
    for clock_s in (1_795_000_000, 1_480_000_000, 0, -1):
        assert promoted_epoch(1_795_000_000, clock_s) > 1_795_000_000 + 1000, "by as much whatever a clock says"


def test_lineages_only_rise() -> None:
    syncer = running("a")
    restored(syncer, 3)
    with pytest.raises(AssertionError):
        restored(syncer, 3)


def test_what_the_restored_values_hold_of_a_site_is_what_counts_as_merged() -> None:
    syncer = running("a", "b", num_fragments=2)
    for site in "ab":
        syncer.push(site, tokens=70)
        syncer.done(0)
    lines = {name: site.lines[0] for name, site in syncer.machine.state.sites.items()}
    assert [lines[name].tokens_merged for name in "ab"] == [70, 70]
    syncer.handle(ev.LineageBegan(2, ("r0", "r1"), "without b", held=(("a", 0, 70, 1),)))
    assert [(lines[name].tokens_merged, lines[name].updates_merged) for name in "ab"] == [(70, 1), (0, 0)]
    assert syncer.machine.state.run_tokens() == 35
    joined = only(fx.AnswerJoin, syncer.join("b", "p1"))
    assert (joined.standings[0].tokens_merged, joined.standings[0].watermark) == (0, 1)


def test_a_new_lineage_is_above_all_that_is_known_and_above_all_that_began_earlier() -> None:
    assert next_lineage(1, 1_800_000_000) == 1_800_000_000
    first = next_lineage(1, 1_800_000_000)
    assert next_lineage(1, 1_800_000_777) > first, "restored once more by somebody who never heard of the first"
    assert next_lineage(first, 1_700_000_000) == first + 1, "with a clock that is behind"
