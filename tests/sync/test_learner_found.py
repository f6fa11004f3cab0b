"""Stories that the swarm simulator found broken, each as short as it could be made."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from tests.sync.driving import of, only
from tests.sync.driving_site import Site, known


def test_site_whose_last_update_came_too_late_still_hears_of_its_other_fragment() -> None:
    site = Site(num_fragments=2, inner_steps=2)
    site.train(1)
    site.handle(ev.Sealed(0, 1, "u1"))
    site.handle(ev.FinalAnnounced(Ending.FINISHED))
    assert [seal.fragment for seal in of(fx.Seal, site.train(1))] == [1]
    site.handle(ev.Sealed(1, 1, "v1"))
    effects = site.answer(1, Outcome.REFUSED, Reason.FINISHED)
    assert not of(fx.Leave, effects), "update 1 of fragment 1 is under way and may have been accepted"
    effects = site.handle(ev.PushAnswered(1, 1, Outcome.ACCEPTED, None))
    assert only(fx.Leave, effects).ending is Ending.FINISHED
    assert not of(fx.Seal, site.boundary()), "nothing is taken any more"


def test_what_is_kept_in_a_retake_is_known_before() -> None:
    site = Site()
    site.send(1)
    only(fx.Seal, site.train(15))
    site.fate(1, 0, Reason.NON_FINITE)
    assert not of(fx.Retake, site.train()), "update 2 is still being encoded: its rounded values are nowhere yet"
    site.seal(2)
    assert only(fx.Retake, site.boundary()).keep == (2,)


def test_updates_of_an_earlier_process_fill_the_window_too() -> None:
    site = Site(updates_in_flight_max=2)
    site.restart(site.machine.snapshot())
    site.join(known(watermark=2, undecided=((1, 150), (2, 150))), incarnation=2)
    only(fx.Retake, site.boundary())
    assert not of(fx.Seal, site.train(15)), "the syncer would answer retry until one of the two is decided"
    site.fate(1, 1)
    assert only(fx.Seal, site.train()).sequence == 3


def test_site_that_gave_up_may_try_again_from_a_ruined_checkpoint() -> None:
    site = Site(discards_max=2)
    site.train(15)
    site.handle(ev.SealFailed(0, 1))
    checkpoint = site.machine.snapshot()
    site.restart(checkpoint)
    site.join(incarnation=2)
    site.train(15)
    assert not of(fx.StopTraining, site.handle(ev.SealFailed(0, 1))), "it would end here at every start"
    assert of(fx.Retake, site.boundary())


def test_updates_that_went_wrong_together_are_one_mishap() -> None:
    site = Site(discards_max=2, updates_in_flight_max=2)
    site.send(1)
    site.send(2)
    checkpoint = site.machine.snapshot()
    site.restart(checkpoint)
    fates = tuple(ev.Fate(0, sequence, 0, 150, f"u{sequence}", Reason.NON_FINITE) for sequence in (1, 2))
    effects = site.join(known(watermark=2, tokens_discarded=300, fates=fates), incarnation=2)
    assert not of(fx.StopTraining, effects), "it would end here at every start from this checkpoint"
    assert of(fx.Retake, site.boundary())


def test_number_that_a_twin_has_used_for_something_else_is_not_taken_for_ours() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    site.restart(site.machine.snapshot(), {(0, 1): "u1"})  # On a copy of the disk; the first process goes on.
    theirs = ev.Fate(0, 1, 1, 30, "x1", None)
    effects = site.join(known(version=1, watermark=1, cursor=15, tokens_merged=30, fates=(theirs,)), incarnation=2)
    assert of(fx.Release, effects)
    assert not site.machine.state.fragments[0].in_flight, "it would wait for the fate of its own update for ever"
    site.handle(ev.VersionFetched(0, 1, (theirs,)))
    assert only(fx.Retake, site.boundary()).version == 1
    assert site.machine.state.fragments[0].tokens_merged == 30


def test_number_that_a_twin_has_used_is_noticed_when_its_fate_is_told() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    site.restart(site.machine.snapshot(), {(0, 1): "u1"})
    site.join(known(watermark=1, cursor=15, undecided=((1, 150),)), incarnation=2)
    theirs = ev.Fate(0, 1, 1, 150, "x1", None)
    only(fx.Join, site.handle(ev.FateTold(theirs)))
    site.join(known(version=1, watermark=1, cursor=15, tokens_merged=150, fates=(theirs,)), incarnation=2)
    assert not site.machine.state.fragments[0].in_flight


def test_batches_that_a_twin_has_read_are_skipped_even_before_it_is_known_as_one() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    site.restart(site.machine.snapshot(), {(0, 1): "u1"})
    effects = site.join(known(watermark=1, cursor=40, undecided=((1, 150),)), incarnation=2)
    assert only(fx.SkipData, effects).cursor == 40
