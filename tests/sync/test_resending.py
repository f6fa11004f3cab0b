"""A standby has taken over that may lack what was acknowledged: the site still has it, or stops in words."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from diloco.sync.progress import SentState, ledger_of
from tests.sync.driving import notes, of, only
from tests.sync.driving_site import Site, known


def kept(*, epoch: int = 1, **options: object) -> Site:
    """A site whose syncer acknowledges what its standby may lack."""
    site = Site(**options)  # type: ignore[arg-type]
    site.join(epoch=epoch, keep=True)
    return site


def promoted(site: Site, *standings: ev.FragmentStanding, epoch: int = 2, **given: object) -> list[fx.LearnerEffect]:
    """Joins the next syncer, and once more when it is asked to: one answer that knows less may be a late one."""
    effects = site.join(*standings, epoch=epoch, **{"keep": True, **given})
    if of(fx.Join, effects):
        effects = site.join(*standings, epoch=epoch, **{"keep": True, **given})
    return effects


def sequences(site: Site) -> list[tuple[int, SentState]]:
    return [(sent.sequence, sent.state) for sent in site.machine.state.fragments[0].in_flight]


def test_the_bytes_of_an_accepted_update_are_kept_until_its_fate_is_known() -> None:
    site = kept()
    assert not site.train(14)
    site.train(1)
    site.seal(1)
    assert not of(fx.Forget, site.answer(1))
    assert of(fx.Forget, site.fate(1, 1)) == [fx.Forget(0, 1)]
    assert not of(fx.Forget, site.fate(1, 1)), "once"
    site.send(2)
    effects = site.fate(2, 0, Reason.STALE)
    assert of(fx.Forget, effects) == [fx.Forget(0, 2)]
    assert of(fx.Release, effects) == [fx.Release(0, 2)]


def test_what_a_promoted_standby_lacks_is_sent_again_in_order() -> None:
    site = kept(updates_in_flight_max=3)
    for sequence in (1, 2, 3):
        site.send(sequence)
    first = site.join(known(watermark=1), epoch=2, keep=True)
    assert of(fx.Join, first), "it may be a late answer"
    assert not of(fx.Send, first)
    effects = site.join(known(watermark=1), epoch=2, keep=True)
    assert of(fx.Send, effects) == [fx.Send(0, 2), fx.Send(0, 3)]
    assert notes(effects) == ["sent_again", "sent_again"]
    assert not of(fx.StopTraining, effects)
    site.answer(2)
    site.answer(3, Outcome.DUPLICATE)
    assert sequences(site) == [(n, SentState.ACCEPTED) for n in (1, 2, 3)]
    assert promoted(site, known(watermark=3), epoch=3) == []
    site.fate(1, 1)
    site.fate(2, 1)
    site.fate(3, 1)
    assert ledger_of(site.machine.state, 0).merged == 450


def test_a_late_answer_that_knows_less_brings_nothing_back() -> None:
    site = kept()
    site.send(1)
    assert of(fx.Join, site.join(known(watermark=0), epoch=2, keep=True))
    assert not of(fx.Send, site.join(known(watermark=1), epoch=2, keep=True))
    assert sequences(site) == [(1, SentState.ACCEPTED)]


@pytest.mark.parametrize("case", ["not kept", "same epoch", "merged", "version"])
def test_a_syncer_that_must_not_lack_it_is_refused_in_words(case: str) -> None:
    site = Site()
    site.join(keep=case != "not kept")
    site.send(1)
    if case == "merged":
        site.fate(1, 1)
    if case == "version":
        site.handle(ev.VersionFetched(0, 3, ()))
        site.boundary()
    effects = promoted(site, known(watermark=0), epoch=1 if case == "same epoch" else 2)
    why = only(fx.StopTraining, effects).why
    assert "has forgotten what it acknowledged of fragment 0, as if its data were an old copy; stop the syncer, " in why
    assert "diloco restore RUN_DIR --from-site SITE_DIR --above 1, or --from BACKUP" in why
    assert not of(fx.Send, effects)


def test_after_a_refusal_what_was_numbered_after_it_is_unsent_again() -> None:
    site = kept(updates_in_flight_max=3)
    for sequence in (1, 2, 3):
        site.send(sequence)
    site.train(5)
    promoted(site, known(watermark=0))
    effects = site.answer(1, Outcome.REFUSED, Reason.STALE)
    assert {effect.sequence for effect in of(fx.Forget, effects)} == {1, 2, 3}
    assert {effect.sequence for effect in of(fx.Release, effects)} == {1, 2, 3}
    assert not site.machine.state.fragments[0].in_flight
    assert site.machine.state.fragments[0].next_sequence == 1
    assert ledger_of(site.machine.state, 0).unsent == 500
    site.handle(ev.VersionFetched(0, 1, ()))
    seal = only(fx.Seal, site.boundary())
    assert (seal.sequence, seal.tokens, seal.steps) == (1, 500, 50)


def test_one_that_is_being_encoded_is_unsent_again_when_its_bytes_are_there() -> None:
    site = kept(updates_in_flight_max=3)
    site.send(1)
    site.train(15)  # Sealing number 2.
    promoted(site, known(watermark=0))
    site.answer(1, Outcome.REFUSED, Reason.OVERLOAD)
    assert sequences(site) == [(2, SentState.SEALING)]
    assert not of(fx.Seal, site.train(30)), "number 2 is not free yet"
    assert site.seal(2) == [fx.Forget(0, 2), fx.Release(0, 2)]
    assert ledger_of(site.machine.state, 0).unsent == 600
    assert only(fx.Seal, site.boundary()).sequence == 1


def test_what_went_with_an_earlier_process_is_lost_and_its_number_free_again() -> None:
    site = Site(cold=True)
    site.join(known(watermark=2, undecided=((1, 70), (2, 80))), keep=True)
    site.handle(ev.VersionFetched(0, 0, ()))
    site.boundary()
    assert ledger_of(site.machine.state, 0).in_flight == 150
    effects = promoted(site, known(watermark=1, undecided=((1, 70),)))
    assert notes(effects) == ["update_lost"]
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.in_flight, ledger.lost) == (70, 80)
    assert site.machine.state.fragments[0].next_sequence == 2


def test_what_was_numbered_after_a_lost_one_could_never_be_taken_in() -> None:
    site = Site(cold=True, updates_in_flight_max=3)
    site.join(known(watermark=1, undecided=((1, 70),)), keep=True)
    site.handle(ev.VersionFetched(0, 0, ()))
    site.boundary()
    site.send(2)
    effects = promoted(site, known(watermark=0))
    assert notes(effects) == ["update_lost"]
    assert of(fx.Forget, effects) == [fx.Forget(0, 2)]
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.in_flight, ledger.lost, ledger.unsent) == (0, 70, 150)
    assert only(fx.Seal, site.boundary()).sequence == 1


def test_a_new_process_sends_again_what_its_outbox_still_has() -> None:
    site = kept()
    site.send(1)
    plain = site.machine.snapshot()
    site.restart(plain, {(0, 1): "u1"})
    assert of(fx.Send, promoted(site, known(watermark=0))) == [fx.Send(0, 1)]
    site.restart(plain, {})
    assert of(fx.StopTraining, promoted(site, known(watermark=0))), "a checkpoint without its outbox"
