"""A site joins a run that was restored while it was away, or while it trained."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Reason
from diloco.sync.progress import ledger_of, site_ledger
from tests.sync.driving import notes, of, only
from tests.sync.driving_site import Site, known


def restored(site: Site, *standings: ev.FragmentStanding, lineage: int = 2) -> list[fx.LearnerEffect]:
    return site.join(*standings, lineage=lineage, epoch=1)


def told(sequence: int, version: int, reason: Reason | None, digest: str = "") -> ev.Fate:
    return ev.Fate(0, sequence, version, 150, digest or f"u{sequence}", reason)


def test_what_was_in_flight_is_refused_and_every_fragment_is_taken_whole() -> None:
    site = Site(updates_in_flight_max=3)
    site.join(epoch=7)
    site.send(1)
    site.send(2)
    site.train(15)
    site.seal(3)
    effects = restored(site, known(version=1))
    assert of(fx.StartOver, effects) == [fx.StartOver(0)]
    assert of(fx.Release, effects) == [fx.Release(0, 1), fx.Release(0, 2), fx.Release(0, 3)]
    assert of(fx.Forget, effects) == [fx.Forget(0, 3)]
    assert of(fx.Fetch, effects) == [fx.Fetch(0, -1)]
    assert not of(fx.Send, effects)
    assert ledger_of(site.machine.state, 0).refused == 450
    assert site.machine.state.fragments[0].next_sequence == 1
    assert (site.machine.state.lineage, site.machine.state.epoch) == (2, 1), "a lineage counts more than an epoch"


def test_the_syncer_knows_best_what_is_merged_and_the_rest_is_lost() -> None:
    site = Site(updates_in_flight_max=3)
    for sequence in (1, 2, 3):
        site.send(sequence)
    site.fate(1, 1)
    fates = (told(1, 1, None), told(2, 2, None), told(3, 2, Reason.RESTORED))
    restored(site, known(version=3, watermark=3, tokens_merged=300, tokens_discarded=150, fates=fates))
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.merged, ledger.refused, ledger.lost) == (300, 150, 0)
    assert site.machine.state.fragments[0].next_sequence == 4
    restored(site, known(version=1), lineage=3)
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.merged, ledger.refused, ledger.lost) == (0, 150, 300), "an older backup has none of it"


def test_the_number_of_an_update_that_is_being_encoded_is_not_given_again_before_its_bytes_are_gone() -> None:
    site = Site()
    site.train(15)  # Sealing number 1.
    effects = restored(site, known(version=1))
    assert not of(fx.Release, effects)
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not site.train(15), "the retake waits for it as well"
    assert site.seal(1) == [fx.Forget(0, 1), fx.Release(0, 1)]
    assert ledger_of(site.machine.state, 0).refused == 150
    assert only(fx.Retake, site.boundary()).keep == ()
    assert only(fx.Seal, site.train(15)).sequence == 1


def test_a_checkpoint_of_before_the_restore_holds_nothing_that_may_be_sent() -> None:
    site = Site()
    site.train(15)
    restored(site, known(version=1))
    site.restart(site.machine.snapshot())
    assert ledger_of(site.machine.state, 0).refused == 150
    assert not site.machine.state.fragments[0].in_flight


def test_what_an_earlier_process_sent_in_this_lineage_is_waited_for() -> None:
    site = Site(cold=True)
    site.join(known(version=4, watermark=1, undecided=((1, 70),)), lineage=4)
    assert ledger_of(site.machine.state, 0).in_flight == 70
    site.handle(ev.FateTold(told(1, 5, None, "of another process")))
    assert ledger_of(site.machine.state, 0).merged == 70


def test_an_answer_of_an_older_lineage_is_a_late_one() -> None:
    site = Site()
    restored(site, lineage=3)
    assert notes(site.join(epoch=9, lineage=2)) == ["join_ignored"]
    assert site.machine.state.lineage == 3


def test_a_number_is_not_given_again_while_it_is_encoded_for_a_process_that_was_outrun() -> None:
    """Another process of the site has used number 1, and number 2 is free: but its bytes are yet to come."""
    site = Site()
    site.send(1)
    site.train(15)  # Sealing number 2.
    effects = site.join(known(version=1, watermark=1, fates=(told(1, 1, None, "of another process"),)))
    assert of(fx.Release, effects) == [fx.Release(0, 1)]
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not site.train(15), "neither a retake nor a seal before the bytes are gone"
    assert site.seal(2) == [fx.Forget(0, 2), fx.Release(0, 2)]
    assert only(fx.Retake, site.boundary()).keep == ()
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.refused, ledger.in_flight, ledger.balanced()) == (0, 0, True)
    assert only(fx.Seal, site.train(15)).sequence == 2
    assert of(fx.Send, site.seal(2)) == [fx.Send(0, 2)]


def test_an_outrun_update_that_was_never_encoded_frees_its_number_as_well() -> None:
    for ends in (lambda site: site.handle(ev.SealFailed(0, 2)), lambda site: site.restart(site.machine.snapshot())):
        site = Site()
        site.send(1)
        site.train(15)
        site.join(known(version=1, watermark=1, fates=(told(1, 1, None, "of another process"),)))
        ends(site)
        part = site.machine.state.fragments[0]
        assert not part.in_flight
        assert (part.next_sequence, part.tokens_refused) == (2, 0)
        assert ledger_of(site.machine.state, 0).balanced()


def test_what_an_outrun_update_was_measured_from_is_let_go_of_when_its_seal_fails() -> None:
    site = Site()
    site.send(1)
    site.train(15)
    site.join(known(version=1, watermark=1, fates=(told(1, 1, None, "of another process"),)))
    assert site.handle(ev.SealFailed(0, 2)) == [fx.Release(0, 2)]


@pytest.mark.parametrize("outrun", [False, True])
def test_a_site_that_trains_on_before_its_new_process_has_joined_loses_only_what_an_earlier_one_had_sent(
    outrun: bool,
) -> None:
    site = Site(inner_steps=15)
    site.train(5)
    plain = site.machine.snapshot()
    processed = 50
    if outrun:
        site.send(1, steps=10)
        processed = 150
    site.restart(plain, processed=processed)
    assert site.machine.ready()
    assert site.train(30) == [], "nothing is decided before it is known what an earlier process has sent"
    if not outrun:
        site.join(incarnation=2)
        (seal,) = of(fx.Seal, site.boundary())
        assert (seal.sequence, seal.tokens) == (1, 350), "all of it goes out"
        return
    site.join(known(version=0, watermark=1, undecided=((1, 150),)), incarnation=2)
    assert not of(fx.Seal, site.boundary())
    ledger = site_ledger(site.machine.state)
    assert ledger.in_flight == 150, "the earlier process' update is still to be decided"
    assert ledger.unsent == 0
    assert ledger.lost == ledger.processed - 150
