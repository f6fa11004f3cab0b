"""A site's machine: what it sends and adopts, where its tokens are, and what a restart may claim."""

from __future__ import annotations

import functools
import json
import random

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.options import SECOND_NS, LearnerOptions
from diloco.sync.progress import Ledger, ledger_of, site_ledger
from tests.sooner import sooner
from tests.sync.another_process import told_in_another_process
from tests.sync.driving import notes, of, only
from tests.sync.driving_site import Site, known
from tests.sync.world import World

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


# --- Stories that the swarm simulator found broken, each as short as it could be made --------------------------------


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


# --- A site's machine with the real syncer's, under losses, delays, restarts and refusals, from seeds ----------------

TURNS = 250


def a_world(draw: random.Random) -> World:
    fragments = draw.randint(1, 2)
    window, staleness = draw.randint(1, 3), draw.choice([0, 1, 8])
    options = LearnerOptions(
        num_fragments=fragments,
        inner_steps=draw.randint(fragments, 5),
        adopt=draw.choice(["rebase", "rebase", "overwrite"]),
        updates_in_flight_max=window,
        discards_max=1000,
        lock_step=draw.random() < 0.2,
    )
    return World(
        draw,
        options,
        grace="fixed",
        grace_ns=draw.choice([0, SECOND_NS]),
        staleness_max=staleness,
        updates_in_flight_max=window,
        fates_kept_max=window * (staleness + 2) + 3,
    )


def turn(world: World) -> None:
    kind = world.draw.choices(
        ["train", "deliver", "pass_time", "save", "restart", "restart_syncer", "join", "strange"],
        [40, 60, 8, 3, 1, 1, 1, 3],
    )[0]
    if kind == "strange":
        strange(world)
    else:
        getattr(world, kind)()


def strange(world: World) -> None:
    """Late, repeated and meaningless words, of the kind that a network gives."""
    draw = world.draw
    index = draw.randrange(world.options.num_fragments)
    part = world.machine.state.fragments[index]
    number = draw.choice([0, part.next_sequence - 1, part.next_sequence, part.next_sequence + 5])
    sealed = [sent.sequence for sent in part.in_flight if sent.state == "sealed"]
    told = world.syncer.machine.state.sites["a"].lines[index].fates
    events: list[ev.LearnerEvent] = [
        ev.FateTold(ev.Fate(index, number, 1, 10, "another")),
        ev.VersionPublished(0, index, 999, 0, 0),
        ev.BoundaryReached(),
        ev.BaseDiffers(index, draw.choice([part.base_version, 999])),
        *[ev.FateTold(fate) for fate in told],
    ]
    if number not in sealed:
        events.append(ev.PushAnswered(index, number, ev.Outcome.REFUSED, draw.choice(list(Reason))))
    if all(sent.state != "sealing" for sent in part.in_flight):
        events += [ev.Sealed(index, number, "late"), ev.SealFailed(index, number)]
    if not world.options.lock_step:
        events.append(ev.OverlapChosen(draw.randrange(world.options.inner_steps)))
    if part.fetching or part.base_version >= 0:
        events.append(ev.FetchFailed(index))
    world.tell(draw.choice(events))


def deliver_all(world: World) -> None:
    for _ in range(1000):
        if not world.mail:
            return
        world.deliver()
    raise AssertionError("messages without end")


def come_to_rest(world: World) -> None:
    """No more faults; the site leaves after sending what it has, then everything is decided."""
    world.calm = True
    world.join()  # Whatever Watch has lost, its next stream begins with a join.
    world.tell(ev.LeaveAsked())
    for _ in range(60):
        deliver_all(world)
        world.tell(ev.BoundaryReached())
        world.pass_time()
        if world.machine.state.left and not world.mail:
            break
    state = world.machine.state
    assert state.left, "the site cannot leave"
    world.join()
    deliver_all(world)
    assert world.machine.settled(), "an update has no fate at the end"


@functools.cache
def play(seed: int) -> World:
    """The same one for all tests, which only read it."""
    world = a_world(random.Random(seed))
    for _ in range(TURNS):
        turn(world)
        assert not world.failed, "the site gave up"
    come_to_rest(world)
    assert not world.failed, "the site gave up"
    for index, line in enumerate(world.syncer.machine.state.sites["a"].lines):
        ledger = ledger_of(world.machine.state, index)
        assert ledger.merged == line.tokens_merged == -world.published[index][-1], "merged tokens and progress differ"
        assert ledger.in_flight == 0
        assert ledger.unsent == 0, "the last update was not sent"
    return world


@pytest.mark.parametrize("seed", sooner(range(25), *range(10)))
def test_any_order_of_events(seed: int) -> None:
    try:
        play(seed)
    except Exception as error:
        again = f"pytest 'tests/sync/test_learner.py::test_any_order_of_events[{seed}]'"
        error.add_note(f"seed {seed}; again with: {again}")
        raise


def test_the_draws_reach_what_they_should() -> None:
    seen = set().union(*(play(seed).seen for seed in range(25)))
    wanted = {"Seal", "Send", "Forget", "Release", "Fetch", "Adopt", "Retake", "SkipData", "StopTraining", "Leave"}
    wanted |= {"passed"}
    assert seen >= wanted | {"Note:update_kept", "Note:update_discarded", "Note:outrun", "Note:publish_ignored", "Join"}


def told() -> str:
    """What a few sites know at the end."""
    return json.dumps([play(seed).machine.snapshot() for seed in range(8)])


@pytest.mark.slow
def test_effects_do_not_depend_on_the_hash_seed() -> None:
    assert told_in_another_process("tests.sync.test_learner") == told()
