"""Between two inner steps."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.progress import ledger_of
from tests.sync.driving import MS, of, only
from tests.sync.driving_site import Site, known


def test_invariant_16_a_site_that_waits_for_a_restored_version_may_train_and_a_cold_one_may_not() -> None:
    site = Site()
    site.join(lineage=2)
    site.train()
    cold = Site(cold=True)
    cold.join()
    with pytest.raises(AssertionError, match="without a base"):
        cold.train()


def test_what_was_trained_before_a_restored_version_came_is_overwritten() -> None:
    site = Site(inner_steps=15)
    site.train(3)
    site.join(known(version=5), lineage=2)
    assert not of(fx.Seal, site.train(20)), "an update of what was before the restore"
    site.handle(ev.VersionFetched(0, 5, ()))
    retake = only(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (5, ())
    assert ledger_of(site.machine.state, 0).overwritten == 230
    assert only(fx.Seal, site.train(15)).base_version == 5


def overlapping(steps: int = 4, **options: Any) -> Site:
    site = Site(inner_steps=15, **options)
    site.handle(ev.OverlapChosen(steps))
    return site


def merged(site: Site, sequence: int, version: int) -> None:
    """The version that contains the update is here."""
    site.handle(ev.VersionFetched(0, version, (ev.Fate(0, sequence, version, 150, f"u{sequence}"),)))


def test_a_version_is_adopted_when_the_steps_of_the_overlap_have_passed() -> None:
    site = overlapping()
    site.send(1)
    merged(site, 1, 1)
    assert not of(fx.Adopt, site.boundary() + site.train(3))
    assert only(fx.Adopt, site.train()).merged == (1,)


def test_versions_that_come_meanwhile_are_adopted_as_one() -> None:
    site = overlapping()
    site.send(1)
    merged(site, 1, 1)
    site.train(2)
    site.handle(ev.VersionFetched(0, 2, ()))
    assert not of(fx.Adopt, site.train())
    assert only(fx.Adopt, site.train(9)).version == 2


def test_a_version_that_comes_later_is_adopted_when_it_is_here() -> None:
    site = overlapping()
    site.send(1)
    assert not of(fx.Adopt, site.train(6))
    merged(site, 1, 1)
    assert only(fx.Adopt, site.boundary()).version == 1


def test_a_choice_counts_from_the_next_update_on() -> None:
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


def test_each_fragment_waits_for_its_own_steps() -> None:
    site = overlapping(3, num_fragments=2)  # The one is due at 7, the other at 0, modulo 15.
    assert only(fx.Seal, site.train(7)).fragment == 0
    for index in (0, 1):
        site.handle(ev.VersionFetched(index, 1, ()))
    assert [effect.fragment for effect in of(fx.Adopt, site.boundary())] == [1]
    assert not of(fx.Adopt, site.train(2))
    assert [effect.fragment for effect in of(fx.Adopt, site.train())] == [0]


@pytest.mark.parametrize("event", [ev.FinalAnnounced(ev.Ending.FINISHED), ev.LeaveAsked()])
def test_who_stops_holds_nothing_back(event: ev.LearnerEvent) -> None:
    site = overlapping()
    site.send(1)
    merged(site, 1, 1)
    site.handle(event)
    assert of(fx.Adopt, site.boundary())


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_lock_step_goes_on_with_the_version_that_was_made_while_the_site_was_away(
    adopt: str, num_fragments: int
) -> None:
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


def test_an_update_that_comes_after_the_last_round_leaves_the_final_version_to_be_adopted() -> None:
    site = Site(inner_steps=15, adopt="overwrite")
    site.train(5)
    site.handle(ev.FinalAnnounced(ev.Ending.DRAINED))
    assert of(fx.Seal, site.boundary())
    site.seal(1)
    site.answer(1, ev.Outcome.REFUSED, ev.Reason.FINISHED)
    site.handle(ev.VersionFetched(0, 3, ()))
    assert only(fx.Adopt, site.boundary()).version == 3


def test_a_version_that_the_next_update_needs_is_adopted_at_once() -> None:
    site = overlapping()
    site.send(1)
    site.fate(1, 1, ev.Reason.STALE)
    site.handle(ev.VersionFetched(0, 1, ()))
    assert of(fx.Adopt, site.boundary())


def test_a_new_process_begins_without_an_overlap() -> None:
    site = overlapping()
    site.restart(site.machine.snapshot())
    assert site.machine.state.overlap_steps == 0


def test_lock_step_knows_no_overlap() -> None:
    site = Site(inner_steps=15, lock_step=True)
    site.handle(ev.OverlapChosen(0))
    with pytest.raises(AssertionError, match="lock-step"):
        site.handle(ev.OverlapChosen(1))
    with pytest.raises(AssertionError):
        Site(inner_steps=15).handle(ev.OverlapChosen(15))


def test_what_comes_after_the_ranks_have_agreed_is_done_after_the_next_step() -> None:
    site = Site(inner_steps=2)
    assert not site.machine.may_act(), "nothing is due after the first step"
    site.handle(ev.VersionFetched(0, 1, ()))
    site.step += 1
    assert not of(fx.Adopt, site.handle(ev.StepDone(1, 10, 1, 1, passes=True)))
    assert site.machine.may_act()
    done = site.train()
    assert (only(fx.Adopt, done).version, only(fx.Seal, done).steps) == (1, 2)


def test_a_step_after_which_an_update_is_due_is_known_before() -> None:
    site = Site(inner_steps=3)
    found = []
    for _ in range(6):
        found.append(site.machine.may_act())
        found.append(bool(of(fx.Seal, site.train())))
    assert found == [False, False] * 2 + [True, True] + [False, False] * 3, "the first one is still unanswered"


def test_a_site_that_stops_or_waits_in_lock_step_may_act_after_any_step() -> None:
    assert Site(lock_step=True).machine.may_act()
    site = Site()
    site.handle(ev.LeaveAsked())
    assert site.machine.may_act()


def test_no_version_that_is_held_back_is_acted_on() -> None:
    site = overlapping(4)
    site.send(1)
    site.handle(ev.VersionFetched(0, 1, ()))
    acts = []
    for _ in range(5):
        acts.append(site.machine.may_act())
        acts.append(bool(of(fx.Adopt, site.train())))
    assert acts == [False, False] * 3 + [True, True] + [False, False]


def eager(**options: Any) -> Site:
    return Site(inner_steps=15, adopt="eager", **options)


def test_eager_says_what_is_in_the_values_and_what_the_version_lacks_and_gives_up_nothing() -> None:
    site = eager(updates_in_flight_max=3)
    site.send(1)
    site.send(2)
    site.train(4)
    merged(site, 1, 1)
    adopt = only(fx.Adopt, site.boundary())
    assert (adopt.merged, adopt.fresh, adopt.under_way) == ((1,), (1, 2), (2,))
    assert ledger_of(site.machine.state, 0).unsent == 40
    assert ledger_of(site.machine.state, 0).overwritten == 0
    site.send(3, steps=11)
    merged(site, 2, 2)
    adopt = only(fx.Adopt, site.boundary())
    assert (adopt.merged, adopt.fresh, adopt.under_way) == ((2,), (3,), (3,))


def test_eager_waits_with_an_adopt_until_it_knows_what_its_update_decodes_to() -> None:
    site = eager()
    site.send(1)
    assert only(fx.Seal, site.train(15)).in_flight == (1,)
    merged(site, 1, 1)
    assert not of(fx.Adopt, site.boundary() + site.train())
    site.seal(2)
    assert only(fx.Adopt, site.boundary()).under_way == (2,)


def test_steps_told_as_one_leave_what_they_leave_one_by_one() -> None:
    single, several = Site(inner_steps=15, num_fragments=2), Site(inner_steps=15, num_fragments=2)
    seals = single.train(7)
    assert several.handle(ev.StepDone(7, 70, 100 * MS, 7, steps=7)) == seals
    assert of(fx.Seal, seals)
    assert single.machine.snapshot() == several.machine.snapshot()
