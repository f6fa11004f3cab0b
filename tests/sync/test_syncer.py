"""The outer machine as a whole: invariants over its life, progress, and what a snapshot must be."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS, OuterOptions
from diloco.sync.syncer import OuterSync
from tests.sync.driving import of, only, running


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
