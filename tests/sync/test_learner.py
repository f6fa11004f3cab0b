"""A site's machine: what a restart, a restored run or a promoted standby leaves of what it has sent."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.progress import SentState, ledger_of, site_ledger
from tests.sync.driving import notes, of, only
from tests.sync.driving_site import Site, known

# --- A new process ---------------------------------------------------------------------------------------------------


def test_invariant_16_a_cold_site_seals_nothing_before_it_has_a_base_and_adds_nothing_to_what_it_takes() -> None:
    site = Site(cold=True, inner_steps=1)
    assert not site.machine.ready()
    effects = [
        *site.boundary(),
        *site.join(known(version=4)),
        *site.boundary(),
        *site.handle(ev.FinalAnnounced(Ending.DRAINED)),
    ]
    assert not of(fx.Seal, effects)
    assert not site.machine.ready()
    with pytest.raises(AssertionError, match="without a base"):
        site.handle(ev.StepDone(1, 10, 1, 1))
    site = Site(cold=True)
    site.join(known(version=4, watermark=7, cursor=99, tokens_merged=500))
    site.handle(ev.VersionFetched(0, 4, ()))
    retake = only(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (4, ())
    assert site.machine.state.cursor == 99
    assert only(fx.Seal, site.train(15)).sequence == 8


def test_restarted_site_leaves_only_after_the_syncer_has_answered() -> None:
    site = Site()
    site.restart(site.machine.snapshot())
    effects = site.handle(ev.LeaveAsked())
    assert not of(fx.Leave, effects)
    assert only(fx.StopTraining, effects).ending is None
    assert not of(fx.Leave, site.boundary())
    assert of(fx.Leave, [*site.join(incarnation=2), *site.boundary()])


def test_an_ending_is_remembered_until_the_syncer_says_how_it_stands_now() -> None:
    site = Site()
    site.handle(ev.FinalAnnounced(Ending.FINISHED))
    checkpoint = site.machine.snapshot()
    for standing in (None, Ending.DRAINED):
        site.restart(checkpoint)
        site.restart(site.machine.snapshot())
        assert site.machine.state.ending is Ending.FINISHED, "its syncer may be no more"
        site.join(incarnation=2, ending=standing)
        assert site.machine.state.ending is standing


@pytest.mark.parametrize("outrun", [False, True])
def test_a_new_process_that_trains_before_it_has_joined_loses_only_what_an_earlier_one_had_sent(outrun: bool) -> None:
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


@pytest.mark.parametrize("behind", ["watermark", "version"])
def test_an_answer_to_a_join_that_goes_back_is_proof_that_the_syncer_forgot_only_when_said_twice(behind: str) -> None:
    site = Site()
    if behind == "watermark":
        site.send(1)
        late, present = known(watermark=0), known(watermark=1, undecided=((1, 150),))
    else:
        site.handle(ev.VersionPublished(1, 0, 3, 0, 0))
        site.handle(ev.VersionFetched(0, 3, ()))
        site.boundary()
        late, present = known(version=2), known(version=3)
    for standing in (late, present, late):  # The syncer wrote it before update 1 was accepted.
        effects = site.join(standing)
        assert not of(fx.StopTraining, effects), "each doubt is a new one"
        assert bool(of(fx.Join, effects)) == (standing is late)
    assert only(fx.StopTraining, site.join(late)).failed


# --- Another process of the site, on a copy of its disk --------------------------------------------------------------


def twin() -> Site:
    """A process that begins with an update in its outbox, which a twin may have numbered otherwise."""
    site = Site()
    site.train(15)
    site.seal(1)
    site.restart(site.machine.snapshot(), {(0, 1): "u1"})
    return site


def test_number_that_a_twin_has_used_for_something_else_is_not_taken_for_ours() -> None:
    site = twin()
    theirs = ev.Fate(0, 1, 1, 30, "x1", None)
    effects = site.join(known(version=1, watermark=1, cursor=15, tokens_merged=30, fates=(theirs,)), incarnation=2)
    assert of(fx.Release, effects)
    assert not site.machine.state.fragments[0].in_flight, "it would wait for the fate of its own update for ever"
    site.handle(ev.VersionFetched(0, 1, (theirs,)))
    assert only(fx.Retake, site.boundary()).version == 1
    assert site.machine.state.fragments[0].tokens_merged == 30


def test_number_that_a_twin_has_used_is_noticed_when_its_fate_is_told_and_its_batches_are_skipped_before() -> None:
    site = twin()
    effects = site.join(known(watermark=1, cursor=40, undecided=((1, 150),)), incarnation=2)
    assert only(fx.SkipData, effects).cursor == 40
    theirs = ev.Fate(0, 1, 1, 150, "x1", None)
    only(fx.Join, site.handle(ev.FateTold(theirs)))
    site.join(known(version=1, watermark=1, cursor=40, tokens_merged=150, fates=(theirs,)), incarnation=2)
    assert not site.machine.state.fragments[0].in_flight


@pytest.mark.parametrize("ends", ["sealed", "failed", "restarted"])
def test_a_number_is_not_given_again_while_it_is_encoded_for_a_process_that_was_outrun(ends: str) -> None:
    """Another process of the site has used number 1, and number 2 is free: but its bytes are yet to come."""
    site = Site()
    site.send(1)
    site.train(15)  # Sealing number 2.
    theirs = told(1, 1, None, "of another process")
    effects = site.join(known(version=1, watermark=1, fates=(theirs,)))
    assert of(fx.Release, effects) == [fx.Release(0, 1)]
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not site.train(15), "neither a retake nor a seal before the bytes are gone"
    if ends == "sealed":
        assert site.seal(2) == [fx.Forget(0, 2), fx.Release(0, 2)]
    elif ends == "failed":
        assert site.handle(ev.SealFailed(0, 2)) == [fx.Release(0, 2)]
    else:
        site.restart(site.machine.snapshot())
        site.join(known(version=1, watermark=1, fates=(theirs,)))
        site.handle(ev.VersionFetched(0, 1, ()))
    part = site.machine.state.fragments[0]
    assert (part.in_flight, part.next_sequence, part.tokens_refused) == ([], 2, 0)
    assert only(fx.Retake, site.boundary()).keep == ()
    assert only(fx.Seal, site.train(15)).sequence == 2
    assert of(fx.Send, site.seal(2)) == [fx.Send(0, 2)]


# --- A site follows the versions that are published ------------------------------------------------------------------


def test_a_version_of_an_older_epoch_or_lineage_is_no_news_and_a_newer_lineage_is_asked_about() -> None:
    site = Site()
    site.handle(ev.VersionPublished(3, 0, 1, 0, 0))
    assert notes(site.handle(ev.VersionPublished(2, 0, 9, 0, 0))) == ["publish_ignored"]
    assert notes(site.join(epoch=2)) == ["join_ignored"]
    assert site.machine.state.fragments[0].published == 1
    site = Site()
    site.join(epoch=9, lineage=2)
    assert notes(site.handle(ev.VersionPublished(12, 0, 7, 0, 0, lineage=1))) == ["publish_ignored"]
    effects = site.handle(ev.VersionPublished(1, 0, 7, 0, 0, lineage=3))
    assert notes(effects) == ["publish_ignored"]
    assert of(fx.Join, effects)
    assert not of(fx.Fetch, effects)
    assert not of(fx.Join, site.handle(ev.VersionPublished(9, 0, 7, 0, 0, lineage=2)))
    assert site.machine.state.fragments[0].published == 7


def test_a_base_that_is_not_what_it_stands_for_is_taken_whole_and_what_was_measured_from_it_is_given_up() -> None:
    site = Site()
    site.train(3)
    effects = site.handle(ev.BaseDiffers(0, 0))
    assert notes(effects) == ["base_differs"]
    assert of(fx.StartOver, effects) == [fx.StartOver(0)]
    assert of(fx.Fetch, effects) == [fx.Fetch(0, -1)], "whole, and not what leads on from the damaged one"
    assert site.handle(ev.BaseDiffers(0, 0)) == [], "it is said until it is put right"
    assert not of(fx.Retake, site.train()), "it trains on meanwhile"
    assert not of(fx.Seal, site.train(50)), "and sends nothing"
    site.handle(ev.VersionFetched(0, 2, ()))
    (retake,) = of(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (2, ())
    assert "in this site's memory" in retake.why
    part = site.machine.state.fragments[0]
    assert (part.base_version, part.retaking, part.tokens_overwritten) == (2, None, 540)
    assert site.handle(ev.BaseDiffers(0, 0)) == [], "that base is gone"
    assert site.machine.state.fragments[0].base_version == 2


# --- A site joins a run that was restored while it was away, or while it trained -------------------------------------


def restored(site: Site, *standings: ev.FragmentStanding, lineage: int = 2) -> list[fx.LearnerEffect]:
    return site.join(*standings, lineage=lineage, epoch=1)


def told(sequence: int, version: int, reason: Reason | None, digest: str = "") -> ev.Fate:
    return ev.Fate(0, sequence, version, 150, digest or f"u{sequence}", reason)


def test_what_was_in_flight_is_refused_and_every_fragment_is_taken_whole() -> None:
    site = Site(updates_in_flight_max=3)
    site.join(epoch=7)
    site.send(1)
    site.train(15)
    site.seal(2)
    effects = restored(site, known(version=1), lineage=3)
    assert of(fx.StartOver, effects) == [fx.StartOver(0)]
    assert of(fx.Release, effects) == [fx.Release(0, 1), fx.Release(0, 2)]
    assert of(fx.Forget, effects) == [fx.Forget(0, 2)]
    assert of(fx.Fetch, effects) == [fx.Fetch(0, -1)]
    assert not of(fx.Send, effects)
    assert not of(fx.Seal, site.train(20)), "an update of what was before the restore"
    assert ledger_of(site.machine.state, 0).refused == 300
    assert site.machine.state.fragments[0].next_sequence == 1
    assert notes(site.join(epoch=9, lineage=2)) == ["join_ignored"]
    assert (site.machine.state.lineage, site.machine.state.epoch) == (3, 1), "a lineage counts more than an epoch"


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


# --- A standby has taken over that may lack what was acknowledged ----------------------------------------------------


def kept(**options: int) -> Site:
    """A site whose syncer acknowledges what its standby may lack."""
    site = Site(**options)
    site.join(keep=True)
    return site


def promoted(site: Site, *standings: ev.FragmentStanding, epoch: int = 2) -> list[fx.LearnerEffect]:
    """Joins the next syncer, and once more when it is asked to: one answer that knows less may be a late one."""
    effects = site.join(*standings, epoch=epoch, keep=True)
    return site.join(*standings, epoch=epoch, keep=True) if of(fx.Join, effects) else effects


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
    assert "has forgotten what it acknowledged of fragment 0, as if its data were an old copy; stop the syncer; " in why
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


@pytest.mark.parametrize("own", [False, True])
def test_what_went_with_an_earlier_process_is_lost_and_what_was_numbered_after_it_is_unsent_again(own: bool) -> None:
    site = Site(cold=True, updates_in_flight_max=3)
    undecided = ((1, 70),) if own else ((1, 70), (2, 80))
    site.join(known(watermark=len(undecided), undecided=undecided), keep=True)
    site.handle(ev.VersionFetched(0, 0, ()))
    site.boundary()
    if own:
        site.send(2)  # It could never be taken in after a lost one.
    effects = promoted(site, known(watermark=0) if own else known(watermark=1, undecided=((1, 70),)))
    assert notes(effects) == ["update_lost"]
    assert of(fx.Forget, effects) == ([fx.Forget(0, 2)] if own else [])
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.in_flight, ledger.lost, ledger.unsent) == ((0, 70, 150) if own else (70, 80, 0))
    assert only(fx.Seal, site.boundary() or site.train(15)).sequence == (1 if own else 2)


def test_a_new_process_sends_again_what_its_outbox_still_has() -> None:
    site = kept()
    site.send(1)
    plain = site.machine.snapshot()
    site.restart(plain, {(0, 1): "u1"})
    assert of(fx.Send, promoted(site, known(watermark=0))) == [fx.Send(0, 1)]
    site.restart(plain, {})
    assert of(fx.StopTraining, promoted(site, known(watermark=0))), "a checkpoint without its outbox"
