"""The last round, and what a restart says of it."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.options import SECOND_NS
from tests.sync.driving import of, only, running


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
