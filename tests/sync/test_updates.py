"""An update's way at its site: due, sealed, answered, merged, adopted; and where the site's tokens are meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Ending, Outcome, Reason
from diloco.sync.progress import (
    Ledger,
    SentState,
    combined,
    ledger_of,
    mean_ledger,
    site_ledger,
)
from tests.sync.driving import MS, notes, of, only
from tests.sync.driving_site import Site, known


def accepted(site: Site, effects: list[fx.LearnerEffect]) -> list[fx.Seal]:
    """The updates that are sealed in ``effects``, each sent and accepted at once."""
    seals = of(fx.Seal, effects)
    for seal in seals:
        site.handle(ev.Sealed(seal.fragment, seal.sequence, "u"))
        site.handle(ev.PushAnswered(seal.fragment, seal.sequence, Outcome.ACCEPTED, None))
    return seals


def told(site: Site, fastest_ms: int, fragment: int = 0) -> None:
    site.handle(ev.VersionPublished(1, fragment, 0, 0, 0, 1, fastest_ms * MS))


@pytest.mark.parametrize(
    ("options", "fastest_ms", "sealed"),
    [
        ({"inner_steps": 20}, 0, [[20]]),
        ({"inner_steps": 20}, 50, [[10, 20]]),
        ({"inner_steps": 8, "dynamic_rounding": "up"}, 35, [[3, 6, 9, 12, 15, 18]]),  # 2.8 of 8
        ({"inner_steps": 20, "num_fragments": 4}, 50, [[2, 12], [5, 15], [7, 17], [10, 20]]),
    ],
)
def test_19_dynamic_steps_follow_the_fastest_site(
    options: dict[str, Any], fastest_ms: int, sealed: list[list[int]]
) -> None:
    """A step takes the site 100 ms."""
    site = Site(dynamic_steps=True, updates_in_flight_max=100, **options)
    told(site, fastest_ms)
    found: list[list[int]] = [[] for _ in sealed]
    for _ in range(20):
        for seal in accepted(site, site.train()):
            found[seal.fragment].append(site.step)
    assert found == sealed


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_next_boundary_with_anything_to_do_is_known_beforehand(dynamic: bool) -> None:
    options = {"inner_steps": 20, "num_fragments": 3, "updates_in_flight_max": 100, "dynamic_steps": dynamic}
    single, several = Site(**options), Site(**options)
    for site in (single, several):
        told(site, 60)
        site.train()  # What a step takes is known from the first one on.
    acted: list[tuple[int, list[fx.Seal]]] = []
    found: list[tuple[int, list[fx.Seal]]] = []
    while single.step < 60:
        acts = single.machine.may_act()
        seals = accepted(single, single.train())
        assert acts == bool(seals)
        acted += [(single.step, seals)] * acts
    while (steps := several.machine.steps_to_act()) + several.step <= 60:
        several.step += steps
        step = ev.StepDone(several.step, 10 * steps, 100 * MS, several.step, steps=steps)
        if seals := accepted(several, several.handle(step)):
            found.append((several.step, seals))
    assert found == acted, "steps told as one leave what they leave one by one"


def test_what_comes_too_late_for_a_step_is_done_after_the_next_one() -> None:
    site = Site(inner_steps=2)
    assert not site.machine.may_act(), "nothing is due after the first step"
    site.handle(ev.VersionFetched(0, 1, ()))
    site.step += 1
    assert not of(fx.Adopt, site.handle(ev.StepDone(1, 10, 1, 1, passes=True))), "the ranks have agreed on it already"
    assert site.machine.may_act()
    done = site.train()
    assert (only(fx.Adopt, done).version, only(fx.Seal, done).steps) == (1, 2)
    site = Site(inner_steps=20, adopt="overwrite")
    site.send(1, steps=20)
    site.train(19)
    site.fate(1, version=1)
    site.handle(ev.VersionFetched(0, 1, ()))
    assert not of(fx.Seal, site.train()), "nothing is left of it"
    assert site.machine.steps_to_act() == 1
    assert of(fx.Seal, site.train())


# --- Overlap: a version waits for the steps that an exchange takes ---------------------------------------------------


def overlapping(steps: int = 4, **options: Any) -> Site:
    site = Site(inner_steps=15, **options)
    site.handle(ev.OverlapChosen(steps))
    return site


def merged(site: Site, sequence: int, version: int) -> None:
    """The version that contains the update is here."""
    site.handle(ev.VersionFetched(0, version, (ev.Fate(0, sequence, version, 150, f"u{sequence}"),)))


def test_a_version_is_adopted_when_it_is_here_and_the_steps_of_the_overlap_have_passed() -> None:
    site = overlapping()
    site.send(1)
    merged(site, 1, 1)
    assert not of(fx.Adopt, site.boundary() + site.train(2))
    site.handle(ev.VersionFetched(0, 2, ()))
    assert not site.machine.may_act()
    assert not of(fx.Adopt, site.train())
    assert site.machine.may_act()
    adopt = only(fx.Adopt, site.train())
    assert (adopt.version, adopt.merged) == (2, (1,)), "what comes meanwhile is adopted as one"
    site.send(2, steps=11)
    assert not of(fx.Adopt, site.train(6))
    merged(site, 2, 3)
    assert only(fx.Adopt, site.boundary()).version == 3
    site = overlapping(3, num_fragments=2)  # The one is due at 7, the other at 0, modulo 15.
    assert only(fx.Seal, site.train(7)).fragment == 0
    for index in (0, 1):
        site.handle(ev.VersionFetched(index, 1, ()))
    assert [effect.fragment for effect in of(fx.Adopt, site.boundary())] == [1], "each fragment waits by itself"
    assert not of(fx.Adopt, site.train(2))
    assert [effect.fragment for effect in of(fx.Adopt, site.train())] == [0]


def test_a_choice_of_overlap_counts_from_the_next_update_on_and_for_one_process() -> None:
    site = overlapping(0)
    site.send(1)
    site.handle(ev.OverlapChosen(6))
    merged(site, 1, 1)
    assert of(fx.Adopt, site.boundary()), "what was sealed before is exchanged as it was"
    site.send(2)
    site.handle(ev.OverlapChosen(0))
    merged(site, 2, 2)
    assert not of(fx.Adopt, site.train(5))
    assert of(fx.Adopt, site.train())
    site.handle(ev.OverlapChosen(6))
    site.restart(site.machine.snapshot())
    assert site.machine.state.overlap_steps == 0


@pytest.mark.parametrize("event", [ev.FinalAnnounced(Ending.FINISHED), ev.LeaveAsked(), None])
def test_nothing_is_held_back_from_a_site_that_stops_or_needs_it_at_once(event: ev.LearnerEvent | None) -> None:
    site = overlapping()
    site.send(1)
    if event is None:
        site.fate(1, 1, Reason.STALE)
        site.handle(ev.VersionFetched(0, 1, ()))
    else:
        merged(site, 1, 1)
        site.handle(event)
    assert site.machine.may_act()
    assert of(fx.Adopt, site.boundary())


def test_eager_says_what_is_in_the_values_and_what_the_version_lacks_and_gives_up_nothing() -> None:
    site = Site(adopt="eager", updates_in_flight_max=3)
    site.send(1)
    site.send(2)
    site.train(4)
    merged(site, 1, 1)
    adopt = only(fx.Adopt, site.boundary())
    assert (adopt.merged, adopt.fresh, adopt.under_way) == ((1,), (1, 2), (2,))
    ledger = ledger_of(site.machine.state, 0)
    assert (ledger.unsent, ledger.overwritten) == (40, 0)
    only(fx.Seal, site.train(11))
    merged(site, 2, 2)
    assert not of(fx.Adopt, site.boundary() + site.train()), "it is not known yet what its update decodes to"
    site.seal(3)
    adopt = only(fx.Adopt, site.boundary())
    assert (adopt.merged, adopt.fresh, adopt.under_way) == ((2,), (3,), (3,))


# --- Lock-step -------------------------------------------------------------------------------------------------------


def test_invariant_14_only_lock_step_is_asked_to_wait_for_its_version_and_for_the_end_after_the_last() -> None:
    for lock_step in (False, True):
        site = Site(lock_step=lock_step)
        site.send(1)
        assert site.machine.must_wait() == lock_step
        assert site.machine.may_act() == lock_step
        merged(site, 1, 1)
        site.boundary()
        assert not site.machine.must_wait()
        for progress_ppm in (999_999, 1_000_000):
            site.handle(ev.VersionPublished(1, 0, 1, 1000, progress_ppm))
            assert site.machine.must_wait() == (lock_step and progress_ppm == 1_000_000)


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
    assert only(fx.Adopt, site.fetched(1)).version == 1
    assert not site.machine.must_wait()


@pytest.mark.parametrize(("adopt", "num_fragments"), [("overwrite", 2), ("blend", 1)])
def test_lock_step_goes_on_with_a_version_that_was_made_while_it_was_away(adopt: str, num_fragments: int) -> None:
    """It stands still for that version, so nothing else would ever come due."""
    lock_step = {"lock_step": True, "adopt": adopt, "updates_in_flight_max": 1, "num_fragments": num_fragments}
    site = Site(inner_steps=50, **lock_step)
    site.train(20)
    site.restart(site.machine.snapshot(), {}, site.machine.state.tokens_processed)
    site.join(*(known(index, version=1) for index in range(num_fragments)), incarnation=2)
    for index in range(num_fragments):
        site.handle(ev.VersionFetched(index, 1, ()))
    assert site.machine.must_wait()
    assert len(of(fx.Adopt, site.boundary())) == num_fragments
    assert not site.machine.must_wait()


# --- Answers and fates -----------------------------------------------------------------------------------------------


def sent() -> Site:
    """A site that has sent an update, and hears nothing of it yet."""
    site = Site()
    site.train(15)
    site.seal(1)
    return site


def test_an_ack_of_a_replaced_syncer_and_an_answer_to_another_update_of_the_same_number_are_none() -> None:
    site = sent()
    assert not site.handle(ev.PushAnswered(0, 1, Outcome.REFUSED, Reason.FENCED, "of before the restore"))
    assert of(fx.Send, site.join(epoch=3)) == [fx.Send(0, 1)], "the new one does not have it"
    for epoch, known_to_be in ((2, SentState.SEALED), (0, SentState.ACCEPTED)):
        site.handle(ev.PushAnswered(0, 1, Outcome.ACCEPTED, None, "u1", epoch))
        assert site.machine.state.fragments[0].in_flight[0].state is known_to_be


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


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_kept_progress_that_an_adopt_threw_away_is_counted(adopt: str) -> None:
    site = Site(adopt=adopt)
    site.send(1)
    site.fetched(1)
    site.fate(1, 1, Reason.STALE)
    part = site.machine.state.fragments[0]
    assert (part.unsent_tokens, part.tokens_overwritten) == (0, 150), "the next update cannot hold this progress"


def test_base_that_the_syncer_does_not_have_is_named() -> None:
    stop = only(fx.StopTraining, sent().answer(1, Outcome.REFUSED, Reason.BAD_BASE))
    assert stop.failed
    assert "bad_base" in stop.why
    assert "another update" not in stop.why


@pytest.mark.parametrize(
    ("how", "reason", "taken_again"),
    [
        ("seal", Reason.NON_FINITE, [0, 1]),
        ("answer", Reason.NON_FINITE, [0, 1]),
        ("fate", Reason.NON_FINITE, [0, 1]),
        ("answer", Reason.OUTLIER, [0]),
    ],
)
def test_a_nan_costs_every_fragment_its_progress_and_an_outlier_its_own(
    how: str, reason: Reason, taken_again: list[int]
) -> None:
    site = Site(num_fragments=2, inner_steps=16)
    assert only(fx.Seal, site.train(8)).fragment == 0
    if how == "seal":
        site.handle(ev.SealFailed(0, 1))
    else:
        site.seal(1)
        if how == "answer":
            site.answer(1, Outcome.REFUSED, reason)
        else:
            site.fate(1, 0, reason, 80)
    assert [retake.fragment for retake in of(fx.Retake, site.boundary())] == taken_again
    ledger = ledger_of(site.machine.state, 1)
    assert (ledger.overwritten, ledger.unsent) == ((80, 0) if 1 in taken_again else (0, 80))


def test_a_restore_and_a_ruined_checkpoint_are_no_reason_to_stop_at_every_start() -> None:
    site = Site(discards_max=1)
    site.send(1)
    assert not of(fx.StopTraining, site.fate(1, 1, Reason.RESTORED))
    assert ledger_of(site.machine.state, 0).refused == 150
    site = Site(discards_max=2, updates_in_flight_max=2)
    site.train(15)
    site.handle(ev.SealFailed(0, 1))
    site.restart(site.machine.snapshot())
    site.join(incarnation=2)
    site.train(15)
    assert not of(fx.StopTraining, site.handle(ev.SealFailed(0, 1))), "what went wrong before the restart"
    assert of(fx.Retake, site.boundary())
    site = Site(discards_max=2, updates_in_flight_max=2)
    site.send(1)
    site.send(2)
    site.restart(site.machine.snapshot())
    fates = tuple(ev.Fate(0, sequence, 0, 150, f"u{sequence}", Reason.NON_FINITE) for sequence in (1, 2))
    effects = site.join(known(watermark=2, tokens_discarded=300, fates=fates), incarnation=2)
    assert not of(fx.StopTraining, effects), "updates that went wrong together are one mishap"
    assert of(fx.Retake, site.boundary())


def test_invariant_9_a_fate_told_many_times_counts_once() -> None:
    site = Site()
    site.send(1)
    assert not site.machine.settled()
    for _ in range(3):
        site.fate(1, 1)
        site.handle(ev.VersionFetched(0, 1, (ev.Fate(0, 1, 1, 150, "u1"),)))
        site.join(known(version=1, watermark=1, fates=(ev.Fate(0, 1, 1, 150, "u1"),)))
    part = site.machine.state.fragments[0]
    assert (part.tokens_merged, part.updates_merged) == (150, 1)
    assert site.machine.settled()


def test_fetch_that_brings_nothing_newer_is_not_repeated_at_once() -> None:
    site = Site()
    only(fx.Fetch, site.handle(ev.VersionPublished(1, 0, 9, 0, 0)))
    effects = site.handle(ev.VersionFetched(0, 0, ()))
    assert not of(fx.Fetch, effects), "what was published is not there: asking again at once would never end"
    only(fx.Fetch, site.handle(ev.VersionPublished(1, 0, 9, 0, 0)))


# --- The end ---------------------------------------------------------------------------------------------------------


def test_site_that_missed_the_end_asks_how_it_ended_and_one_that_missed_a_pause_goes_on() -> None:
    site = sent()
    effects = site.answer(1, Outcome.REFUSED, Reason.FINISHED)
    only(fx.Join, effects)
    assert not of(fx.Leave, effects), "the training would go on with nothing to stop it"
    effects = site.join(ending=Ending.DRAINED)
    assert only(fx.StopTraining, effects).ending is Ending.DRAINED
    assert not of(fx.StopTraining, site.handle(ev.FinalAnnounced(Ending.FINISHED))), "an end is told once"
    assert only(fx.Leave, site.boundary()).ending is Ending.DRAINED
    site = sent()
    site.answer(1, Outcome.REFUSED, Reason.FINISHED)
    assert not of(fx.StopTraining, site.join(epoch=2))
    assert only(fx.Seal, site.train()).sequence == 1


def test_an_update_that_comes_after_the_last_round_leaves_the_final_version_to_be_adopted() -> None:
    site = Site(inner_steps=15, adopt="overwrite")
    site.train(5)
    site.handle(ev.FinalAnnounced(Ending.DRAINED))
    assert of(fx.Seal, site.boundary())
    site.seal(1)
    site.answer(1, Outcome.REFUSED, Reason.FINISHED)
    assert only(fx.Adopt, site.fetched(3)).version == 3


@pytest.mark.parametrize("adopt", ["rebase", "overwrite", "blend", "eager"])
@pytest.mark.parametrize("wanted_first", [True, False])
def test_a_site_that_wants_the_final_version_ends_with_it_and_with_nothing_of_its_own(
    adopt: str, wanted_first: bool
) -> None:
    site, over = Site(adopt=adopt), ev.FinalAnnounced(Ending.FINISHED, (2,))
    site.send(1)
    site.train(3)
    site.handle(ev.FinalAnnounced(Ending.FINISHED))
    assert only(fx.Seal, site.boundary()).sequence == 2
    site.seal(2)
    site.fate(1, 1)
    for event in (ev.FinalWanted(), over) if wanted_first else (over, ev.FinalWanted()):
        assert not site.machine.is_final()
        effects = site.handle(event)
    assert only(fx.Fetch, effects).have_version == 0
    assert not of(fx.Retake, site.fetched(2)), "update 2 has no answer, and would remain in the values"
    assert not site.machine.settled()
    site.answer(2, Outcome.REFUSED, Reason.FINISHED)
    retake = only(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (2, ())
    assert site.machine.is_final()
    assert site.machine.settled()
    ledger = site_ledger(site.machine.state)
    assert (ledger.merged, ledger.overwritten, ledger.unsent, ledger.in_flight) == (150, 30, 0, 0)


def test_the_final_version_is_taken_once_and_another_lineage_has_another_one() -> None:
    site, over = Site(), ev.FinalAnnounced(Ending.FINISHED, (1,))
    site.handle(ev.FinalWanted())
    assert notes(site.handle(ev.FinalAnnounced(Ending.FINISHED, (1, 1)))) == ["final_ignored"], "of other fragments"
    site.handle(over)
    site.fetched(1)
    assert site.machine.is_final()
    assert not site.handle(over), "a new stream tells it again"
    assert site.machine.is_final()
    site.join(known(version=1), lineage=2, epoch=1)
    site.fetched(1)
    assert not site.machine.is_final()


def test_a_site_leaves_a_finished_run_before_the_final_version_is_here() -> None:
    site = sent()
    site.answer(1)
    site.fate(1, 1)
    site.train(3)
    site.handle(ev.FinalAnnounced(Ending.FINISHED, (2,)))
    site.handle(ev.FinalWanted())
    assert of(fx.Leave, site.boundary()), "what is unsent is merged no more, and the download may take long"
    assert not site.machine.settled()


@pytest.mark.parametrize("ending", list(Ending))
def test_only_of_a_finished_run_and_where_it_is_wanted_a_site_waits_for_the_final_version(ending: Ending) -> None:
    site = sent()
    site.answer(1)
    site.fate(1, 1)
    site.handle(ev.FinalAnnounced(ending))
    assert site.machine.settled(), "nothing was wanted"
    site.handle(ev.FinalWanted())
    assert site.machine.settled() == (ending is Ending.DRAINED), "a paused run has no final version"
    site.handle(ev.FinalAnnounced(ending, (1,)))
    assert bool(of(fx.Retake, site.fetched(1))) == site.machine.is_final() == (ending is Ending.FINISHED)
    site.restart(site.machine.snapshot())
    assert not site.machine.is_final(), "the run may have been extended since"


def test_in_lock_step_a_site_takes_the_last_version_of_a_run_that_ends_and_none_of_one_that_goes_on() -> None:
    site = Site(lock_step=True)
    site.handle(ev.LeaveAsked())
    site.boundary()
    site.handle(ev.VersionPublished(1, 0, 1, 0, 0))
    assert site.machine.settled()
    site.handle(ev.FinalAnnounced(Ending.DRAINED))
    assert not site.machine.settled()
    site.fetched(1)
    assert site.machine.settled()


# --- Where a site's tokens are ---------------------------------------------------------------------------------------


def test_invariant_10_the_sites_ledger_balances_in_whole_tokens() -> None:
    """What ``Site`` looks at after every event is a part's ledger; this is their mean."""
    for seed in range(300):
        draw = random.Random(seed)
        known = [[draw.randint(0, 99) for _ in range(5)] for _ in range(draw.randint(1, 7))]
        processed = max(map(sum, known))
        parts = [Ledger(processed, *part, lost=processed - sum(part)) for part in known]
        whole = mean_ledger(parts)
        assert whole.balanced(), f"seed {seed}: {whole}"
        for count, counts in zip(whole, zip(*parts, strict=True), strict=True):
            assert abs(count - sum(counts) / len(parts)) <= 1, f"seed {seed}: a part is off by more than its rounding"


def test_a_ledger_can_be_out_of_balance_and_what_an_ended_part_did_not_hear_of_is_unsent_in_the_whole() -> None:
    assert not Ledger(7, 1, 1, 1, 1, 1, 1).balanced()
    assert combined([Ledger(3, 3, 0, 0, 0, 0, 0), Ledger(3, 0, 0, 0, 3, 0, 0)]).balanced()
    assert combined([Ledger(6, 6, 0, 0, 0, 0, 0), Ledger(4, 4, 0, 0, 0, 0, 0)]) == Ledger(6, 5, 0, 0, 1, 0, 0)
    three = [Ledger(4, 1, 1, 0, 0, 0, 2), Ledger(4, 0, 0, 2, 0, 0, 2), Ledger(4, 0, 0, 0, 3, 0, 1)]
    assert combined(three) == Ledger(4, 0, 0, 1, 1, 0, 2), "the largest remainders are rounded up"
    two = [Ledger(1, 0, 1, 0, 0, 0, 0), Ledger(1, 0, 0, 0, 1, 0, 0)]
    assert combined(two) == Ledger(1, 0, 1, 0, 0, 0, 0), "of equal ones the first"


def test_updates_of_an_earlier_process_fill_the_window_too() -> None:
    site = Site(updates_in_flight_max=2)
    site.restart(site.machine.snapshot())
    site.join(known(watermark=2, undecided=((1, 150), (2, 150))), incarnation=2)
    only(fx.Retake, site.boundary())
    assert not of(fx.Seal, site.train(15)), "the syncer would answer retry until one of the two is decided"
    site.fate(1, 1)
    assert only(fx.Seal, site.train()).sequence == 3
