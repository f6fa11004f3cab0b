"""A site's machine: what a restart, a restored run or a promoted standby leaves of what it has sent."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.progress import SentState, ledger_of
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
    retake = only(fx.Retake, site.fetched(4))
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


@pytest.mark.parametrize("behind", ["watermark", "version"])
def test_an_answer_to_a_join_that_goes_back_is_proof_that_the_syncer_forgot_only_when_said_twice(behind: str) -> None:
    site = Site()
    if behind == "watermark":
        site.send(1)
        late, present = known(watermark=0), known(watermark=1, undecided=((1, 150),))
    else:
        site.handle(ev.VersionPublished(1, 0, 3, 0, 0))
        site.fetched(3)
        late, present = known(version=2), known(version=3)
    for standing in (late, present, late):  # The syncer wrote it before update 1 was accepted.
        effects = site.join(standing)
        assert not of(fx.StopTraining, effects), "each doubt is a new one"
        assert bool(of(fx.Join, effects)) == (standing is late)
    assert only(fx.StopTraining, site.join(late)).failed


# --- Another process of the site, on a copy of its disk --------------------------------------------------------------


@pytest.mark.parametrize("decided", [True, False])
def test_a_number_that_a_twin_has_used_for_something_else_is_not_taken_for_ours(decided: bool) -> None:
    """Its outbox has an update 1, of which another process on a copy of its disk has made another one."""
    site = Site()
    site.train(15)
    site.seal(1)
    site.restart(site.machine.snapshot(), {(0, 1): "u1"})
    theirs = ev.Fate(0, 1, 1, 30, "x1", None)
    if not decided:
        effects = site.join(known(watermark=1, cursor=40, undecided=((1, 30),)), incarnation=2)
        assert only(fx.SkipData, effects).cursor == 40, "its batches are skipped before it is noticed"
        only(fx.Join, site.handle(ev.FateTold(theirs)))
    effects = site.join(known(version=1, watermark=1, cursor=40, tokens_merged=30, fates=(theirs,)), incarnation=2)
    assert of(fx.Release, effects) == [fx.Release(0, 1)]
    assert not site.machine.state.fragments[0].in_flight, "it would wait for the fate of its own update for ever"
    assert only(fx.Retake, site.fetched(1, theirs)).version == 1
    assert site.machine.state.fragments[0].tokens_merged == 30


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


def test_a_version_of_an_older_lineage_is_no_news_and_a_newer_lineage_is_asked_about() -> None:
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
    (retake,) = of(fx.Retake, site.fetched(2))
    assert (retake.version, retake.keep) == (2, ())
    assert "in this site's memory" in retake.why
    part = site.machine.state.fragments[0]
    assert (part.base_version, part.retaking, part.tokens_overwritten) == (2, None, 540)
    assert site.handle(ev.BaseDiffers(0, 0)) == [], "that base is gone"
    assert site.machine.state.fragments[0].base_version == 2


# --- A site joins a run that was restored while it was away, or while it trained -------------------------------------


def told(sequence: int, version: int, reason: Reason | None, digest: str = "") -> ev.Fate:
    return ev.Fate(0, sequence, version, 150, digest or f"u{sequence}", reason)


def test_what_was_in_flight_is_refused_and_nothing_of_before_the_restore_may_be_sent() -> None:
    site = Site(updates_in_flight_max=3)
    site.join(epoch=7)
    site.send(1)
    site.train(15)
    site.seal(2)
    effects = site.join(known(version=1), lineage=3)
    assert of(fx.Forget, effects) == [fx.Forget(0, 2)]
    assert not of(fx.Send, effects)
    site.restart(site.machine.snapshot())
    assert not of(fx.Seal, site.train(20)), "an update of what was before the restore"
    assert ledger_of(site.machine.state, 0).refused == 300
    assert site.machine.state.fragments[0].next_sequence == 1
    assert notes(site.join(epoch=9, lineage=2)) == ["join_ignored"]
    assert (site.machine.state.lineage, site.machine.state.epoch) == (3, 1), "a lineage counts more than an epoch"
    site = Site(cold=True)
    site.join(known(version=4, watermark=1, undecided=((1, 70),)), lineage=4)
    assert ledger_of(site.machine.state, 0).in_flight == 70, "an earlier process sent it in this lineage"
    site.handle(ev.FateTold(told(1, 5, None, "of another process")))
    assert ledger_of(site.machine.state, 0).merged == 70


def test_the_syncer_knows_best_what_is_merged_and_the_rest_is_lost() -> None:
    site = Site(updates_in_flight_max=3)
    for sequence in (1, 2, 3):
        site.send(sequence)
    site.fate(1, 1)
    fates = (told(1, 1, None), told(2, 2, None), told(3, 2, Reason.RESTORED))
    site.join(known(version=3, watermark=3, tokens_merged=300, tokens_discarded=150, fates=fates), lineage=2)
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.merged, ledger.refused, ledger.lost) == (300, 150, 0)
    assert site.machine.state.fragments[0].next_sequence == 4
    site.join(known(version=1), lineage=3)
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.merged, ledger.refused, ledger.lost) == (0, 150, 300), "an older backup has none of it"


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


@pytest.mark.parametrize(("case", "epoch"), [("not kept", 2), ("same epoch", 1), ("merged", 2), ("version", 2)])
def test_a_syncer_that_must_not_lack_it_is_refused_in_words(case: str, epoch: int) -> None:
    site = Site()
    site.join(keep=case != "not kept")
    site.send(1)
    if case == "merged":
        site.fate(1, 1)
    if case == "version":
        site.fetched(3)
    effects = promoted(site, known(watermark=0), epoch=epoch)
    assert not of(fx.Send, effects)
    why = only(fx.StopTraining, effects).why
    assert "has forgotten what it acknowledged of fragment 0, as if its data were an old copy; stop the syncer; " in why
    assert "diloco restore RUN_DIR --from-site SITE_DIR --above 1, or --from BACKUP" in why


def test_after_a_refusal_what_was_numbered_after_it_is_unsent_again_also_what_is_being_encoded() -> None:
    site = kept(updates_in_flight_max=4)
    for sequence in (1, 2, 3):
        site.send(sequence)
    site.train(15)  # Sealing number 4.
    promoted(site, known(watermark=0))
    effects = site.answer(1, Outcome.REFUSED, Reason.STALE)
    assert {effect.sequence for effect in of(fx.Forget, effects)} == {1, 2, 3}
    assert {effect.sequence for effect in of(fx.Release, effects)} == {1, 2, 3}
    assert sequences(site) == [(4, SentState.SEALING)]
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not of(fx.Seal, site.train(5)), "number 4 is not free yet"
    assert site.seal(4) == [fx.Forget(0, 4), fx.Release(0, 4)]
    assert ledger_of(site.machine.state, 0).unsent == 650
    seal = only(fx.Seal, site.boundary())
    assert (seal.sequence, seal.tokens, seal.steps) == (1, 650, 65)


@pytest.mark.parametrize("own", [False, True])
def test_what_went_with_an_earlier_process_is_lost_and_what_was_numbered_after_it_is_unsent_again(own: bool) -> None:
    site = Site(cold=True, updates_in_flight_max=3)
    undecided = ((1, 70),) if own else ((1, 70), (2, 80))
    site.join(known(watermark=len(undecided), undecided=undecided), keep=True)
    site.fetched(0)
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
