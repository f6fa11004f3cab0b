"""An update's way at its site."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from diloco.sync.progress import SentState, ledger_of
from tests.sync.driving import of, only
from tests.sync.driving_site import Site


def test_an_ack_of_a_syncer_whose_place_another_has_taken_is_none() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    assert of(fx.Send, site.join(epoch=3)) == [fx.Send(0, 1)], "the new one does not have it"
    for epoch, known_to_be in ((2, SentState.SEALED), (0, SentState.ACCEPTED)):
        site.handle(ev.PushAnswered(0, 1, Outcome.ACCEPTED, None, "u1", epoch))
        assert site.machine.state.fragments[0].in_flight[0].state is known_to_be


def test_an_answer_to_another_update_of_the_same_number_is_not_for_this_one() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    fenced = ev.PushAnswered(0, 1, Outcome.REFUSED, Reason.FENCED, "of before the restore")
    assert not site.handle(fenced)
    assert of(fx.Forget, site.handle(ev.PushAnswered(0, 1, Outcome.ACCEPTED, None, "u1")))


@pytest.mark.parametrize("how", ["seal", "answer", "fate"])
def test_a_nan_throws_away_what_every_fragment_has_learned(how: str) -> None:
    site = Site(num_fragments=2, inner_steps=16)
    assert only(fx.Seal, site.train(8)).fragment == 0
    if how == "seal":
        site.handle(ev.SealFailed(0, 1))
    else:
        site.seal(1)
        if how == "answer":
            site.answer(1, Outcome.REFUSED, Reason.NON_FINITE)
        else:
            site.fate(1, 0, Reason.NON_FINITE, 80)
    assert [retake.fragment for retake in of(fx.Retake, site.boundary())] == [0, 1]
    assert ledger_of(site.machine.state, 1).overwritten == 80


def test_an_outlier_throws_away_what_its_own_fragment_has_learned() -> None:
    site = Site(num_fragments=2, inner_steps=16)
    site.train(8)
    site.seal(1)
    site.answer(1, Outcome.REFUSED, Reason.OUTLIER)
    assert only(fx.Retake, site.boundary()).fragment == 0
    assert ledger_of(site.machine.state, 1).unsent == 80


def test_restored_updates_are_no_reason_to_stop() -> None:
    site = Site(discards_max=1)
    site.send(1)
    effects = site.fate(1, 1, Reason.RESTORED)
    assert not of(fx.StopTraining, effects)
    assert ledger_of(site.machine.state, 0).refused == 150
