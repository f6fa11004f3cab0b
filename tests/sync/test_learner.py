"""A site's machine: what it sends and adopts, where its tokens are, and what a restart may claim."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.progress import Ledger, site_ledger
from tests.sync.driving import notes, of, only
from tests.sync.driving_site import Site, known

# --- restart ---------------------------------------------------------------------------------------------------


def test_restarted_site_seals_nothing_before_the_syncer_has_answered() -> None:
    site = Site()
    checkpoint = site.machine.snapshot()
    site.send(1)  # An earlier process sends update 1 after the checkpoint; this one must not make another update 1.
    site.restart(checkpoint, processed=150)
    assert site.machine.state.incarnation == 0
    assert not of(fx.Seal, site.train(15)), "two processes made an update of one number"
    site.join(known(watermark=1, cursor=15, undecided=((1, 150),)), incarnation=2)
    assert site.machine.state.fragments[0].next_sequence == 2
    only(fx.Retake, site.boundary())
    assert only(fx.Seal, site.train(15)).sequence == 2


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


def test_late_answer_to_a_join_is_no_proof_that_the_syncer_forgot() -> None:
    site = Site()
    site.send(1)
    effects = site.join(known(watermark=0))  # The syncer wrote it before update 1 was accepted.
    assert not of(fx.StopTraining, effects)
    only(fx.Join, effects)
    assert not of(fx.StopTraining, site.join(known(watermark=1, undecided=((1, 150),))))
    assert not of(fx.StopTraining, site.join(known(watermark=0))), "each doubt is a new one"


def test_second_answer_that_is_behind_is_proof_that_the_syncer_forgot() -> None:
    site = Site()
    site.send(1)
    site.join(known(watermark=0))
    assert only(fx.StopTraining, site.join(known(watermark=0))).failed


def test_version_that_goes_back_is_proof_only_when_said_twice() -> None:
    site = Site()
    site.handle(ev.VersionPublished(1, 0, 3, 0, 0))
    site.handle(ev.VersionFetched(0, 3, ()))
    site.boundary()
    only(fx.Join, site.join(known(version=2)))
    assert only(fx.StopTraining, site.join(known(version=2))).failed


# --- lock-step -------------------------------------------------------------------------------------------------


def test_lock_step_waits_for_the_update_of_an_earlier_process_too() -> None:
    site = Site(lock_step=True)
    checkpoint = site.machine.snapshot()
    site.restart(checkpoint)
    site.join(known(watermark=1, undecided=((1, 150),)), incarnation=2)
    only(fx.Retake, site.boundary())
    assert site.machine.must_wait(), "it would train from a version that lacks its own last round"
    site.handle(ev.VersionPublished(1, 0, 1, 0, 0))
    site.fate(1, 1)
    assert site.machine.must_wait(), "the version with its last round is not adopted yet"
    site.handle(ev.VersionFetched(0, 1, ()))
    assert only(fx.Adopt, site.boundary()).version == 1
    assert not site.machine.must_wait()


# --- answers ---------------------------------------------------------------------------------------------------


def test_site_that_missed_the_end_asks_how_it_ended() -> None:
    site = Site()
    only(fx.Seal, site.train(15))
    site.seal(1)
    effects = site.answer(1, Outcome.REFUSED, Reason.FINISHED)
    only(fx.Join, effects)
    assert not of(fx.Leave, effects), "the training would go on with nobody to stop it"
    effects = site.join(ending=Ending.DRAINED)
    assert only(fx.StopTraining, effects).ending is Ending.DRAINED
    assert only(fx.Leave, site.boundary()).ending is Ending.DRAINED


def test_site_that_missed_a_pause_goes_on() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    site.answer(1, Outcome.REFUSED, Reason.FINISHED)
    assert not of(fx.StopTraining, site.join(epoch=2))
    assert only(fx.Seal, site.train()).sequence == 1


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.OVERLOAD])
def test_refused_and_kept_progress_goes_out_with_the_next_update(reason: Reason) -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    effects = site.answer(1, Outcome.REFUSED, reason)
    assert [type(effect) for effect in effects][:2] == [fx.Forget, fx.Release]
    assert not of(fx.StopTraining, effects)
    site.handle(ev.VersionFetched(0, 9, ()))
    again = only(fx.Seal, site.train())
    assert (again.sequence, again.tokens, again.steps) == (1, 160, 16)


def test_stale_update_is_not_made_again_before_a_newer_base() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    effects = site.answer(1, Outcome.REFUSED, Reason.STALE)
    assert only(fx.Fetch, effects).have_version == 0, "stale says that there is a newer version"
    assert not of(fx.Seal, site.train(30)), "the same base can only be refused again"
    site.handle(ev.VersionFetched(0, 9, ()))
    assert only(fx.Seal, site.boundary()).base_version == 9


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_kept_progress_that_an_adopt_threw_away_is_counted(adopt: str) -> None:
    site = Site(adopt=adopt)
    site.send(1)
    site.handle(ev.VersionFetched(0, 1, ()))
    site.boundary()
    site.fate(1, 1, Reason.STALE)
    part = site.machine.state.fragments[0]
    assert (part.unsent_tokens, part.tokens_overwritten) == (0, 150), "the next update cannot hold this progress"


def test_answer_to_an_update_that_is_not_sent_changes_nothing() -> None:
    site = Site()
    site.train(15)  # Update 1 is being sealed: an answer can only be a late one to an earlier update 1.
    before = site.machine.snapshot()
    assert not site.answer(1, Outcome.REFUSED, Reason.STALE)
    assert site.machine.snapshot() == before
    site.seal(1)
    site.answer(1)
    before = site.machine.snapshot()
    assert not site.seal(1)
    assert not site.handle(ev.SealFailed(0, 1))
    assert site.machine.snapshot() == before, "what was accepted stays accepted"


def test_base_that_the_syncer_does_not_have_is_named() -> None:
    site = Site()
    site.train(15)
    site.seal(1)
    stop = only(fx.StopTraining, site.answer(1, Outcome.REFUSED, Reason.BAD_BASE))
    assert stop.failed
    assert "bad_base" in stop.why
    assert "another update" not in stop.why


def test_epoch_rises_with_a_published_version() -> None:
    site = Site()
    site.handle(ev.VersionPublished(3, 0, 1, 0, 0))
    assert notes(site.handle(ev.VersionPublished(2, 0, 9, 0, 0))) == ["publish_ignored"]
    assert notes(site.join(epoch=2)) == ["join_ignored"]
    assert site.machine.state.fragments[0].published == 1


def test_fetch_that_brings_nothing_newer_is_not_repeated_at_once() -> None:
    site = Site()
    only(fx.Fetch, site.handle(ev.VersionPublished(1, 0, 9, 0, 0)))
    effects = site.handle(ev.VersionFetched(0, 0, ()))
    assert not of(fx.Fetch, effects), "what was published is not there: asking again at once would never end"
    only(fx.Fetch, site.handle(ev.VersionPublished(1, 0, 9, 0, 0)))


# --- invariants ------------------------------------------------------------------------------------------------


def test_invariant_16_a_cold_site_seals_nothing_before_it_has_a_base() -> None:
    site = Site(cold=True, inner_steps=1)
    assert not site.machine.ready()
    for effects in (
        site.boundary(),
        site.join(known(version=4)),
        site.boundary(),
        site.handle(ev.FinalAnnounced(Ending.DRAINED)),
    ):
        assert not of(fx.Seal, effects)
    with pytest.raises(AssertionError, match="without a base"):
        site.handle(ev.StepDone(1, 10, 1, 1))


def test_invariant_16_a_site_that_lost_its_memory_adds_nothing_to_what_it_takes() -> None:
    site = Site(cold=True)
    site.join(known(version=4, watermark=7, cursor=99, tokens_merged=500))
    assert not site.machine.ready()
    site.handle(ev.VersionFetched(0, 4, ()))
    retake = only(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (4, ())
    assert site.machine.state.cursor == 99
    assert only(fx.Seal, site.train(15)).sequence == 8


def test_lock_step_trains_no_step_between_the_last_version_and_the_word_that_ends_the_run() -> None:
    site = Site(lock_step=True)
    site.handle(ev.VersionPublished(1, 0, 0, 1000, 999_999))
    assert not site.machine.must_wait()
    site.handle(ev.VersionPublished(1, 0, 0, 1000, 1_000_000))
    assert site.machine.must_wait()


def test_invariant_14_only_lock_step_is_asked_to_wait() -> None:
    for lock_step in (False, True):
        site = Site(lock_step=lock_step)
        site.send(1)
        assert site.machine.must_wait() == lock_step
        site.handle(ev.VersionFetched(0, 1, (ev.Fate(0, 1, 1, 150, "u1"),)))
        site.boundary()
        assert not site.machine.must_wait()


def test_invariant_9_a_fate_told_many_times_counts_once() -> None:
    site = Site()
    site.send(1)
    for _ in range(3):
        site.fate(1, 1)
        site.handle(ev.VersionFetched(0, 1, (ev.Fate(0, 1, 1, 150, "u1"),)))
        site.join(known(version=1, watermark=1, fates=(ev.Fate(0, 1, 1, 150, "u1"),)))
    part = site.machine.state.fragments[0]
    assert (part.tokens_merged, part.updates_merged) == (150, 1)


def test_invariant_10_tokens_of_every_fragment_balance_through_a_seal_in_each() -> None:
    site = Site(num_fragments=3, inner_steps=7)
    for _ in range(40):  # The ledger is checked after every event.
        for seal in of(fx.Seal, site.train(1, tokens=11)):
            site.handle(ev.Sealed(seal.fragment, seal.sequence, f"{seal.fragment}.{seal.sequence}"))
            site.handle(ev.PushAnswered(seal.fragment, seal.sequence, Outcome.ACCEPTED, None))
    # Due at 2, 4 and 7 of every 7 steps, two updates each until the windows are full: 9, 11 and 14 steps are in flight.
    assert site_ledger(site.machine.state) == Ledger(
        440, merged=0, refused=0, in_flight=125, unsent=315, overwritten=0, lost=0
    )
