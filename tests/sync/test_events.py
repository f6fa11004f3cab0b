"""Every event is frozen and survives a file."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events, members
from diloco.sync import events as ev
from diloco.sync.events import DISCARDING, Fate, LearnerEvent, Outcome, OuterEvent, Reason, SiteHeard, SiteSilent
from diloco.sync.journal import from_plain, records_in, to_plain
from diloco.sync.members import Leases, next_lineage, promoted_epoch
from diloco.sync.options import SECOND_NS, HealthOptions, OuterOptions
from diloco.sync.progress import SentState, ledger_of
from diloco.sync.state import Attendance, Phase
from diloco.sync.syncer import OuterSync, replay
from tests.sync.driving import MS, Syncer, check_attendance, notes, of, only, running, through_json
from tests.sync.driving_site import Site, known
from tests.sync.examples import example

KINDS = {**records_in(events, OuterEvent), **records_in(events, LearnerEvent)}.values()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_there_and_back(kind: type) -> None:
    value = example(kind)
    assert from_plain(kind, through_json(to_plain(value))) == value
    fields = dataclasses.fields(kind)
    if fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, fields[0].name, None)


def test_refusals_that_throw_progress_away_are_few() -> None:
    assert {str(reason) for reason in DISCARDING} == {
        "non_finite",
        "outlier",
        "evicted",
        "restored",
        "corrupt",
        "withdrawn",
        "implausible",
    }


def test_a_fate_is_merged_or_has_a_reason() -> None:
    assert Fate(0, 1, 2, 3, "d").merged
    assert not Fate(0, 1, 2, 3, "d", Reason.STALE).merged


# --- An update is here -----------------------------------------------------------------------------------------------


def test_silent_site_whose_update_arrives_is_back_with_a_note() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.handle(ev.SiteSilent("a"))
    effects = syncer.push("a")
    assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED
    assert notes(effects) == ["site_back"]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"finite": False}, Reason.NON_FINITE),
        ({"intact": False}, Reason.CORRUPT),
        ({"intact": False, "finite": False}, Reason.CORRUPT),
    ],
)
def test_invariant_15_what_is_not_finite_or_not_what_was_sent_changes_nothing(
    facts: dict[str, bool], reason: Reason
) -> None:
    syncer = running("a", "b", quorum=2)
    before = syncer.machine.snapshot()
    (answer,) = syncer.push("a", **facts)
    assert answer == fx.AnswerPush(1, Outcome.REFUSED, 0, reason)
    assert syncer.machine.snapshot() == before


def test_what_was_accepted_before_is_a_duplicate_whatever_came_this_time() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.push("a")
    (answer,) = syncer.push("a", intact=False)
    assert isinstance(answer, fx.AnswerPush)
    assert answer.outcome is Outcome.DUPLICATE


# --- Counting along --------------------------------------------------------------------------------------------------


def arrived_and_silent() -> Syncer:
    syncer = running("b", "a", quorum=2)
    syncer.push("a")
    syncer.handle(ev.SiteSilent("a"))
    return syncer


def test_sites_stand_in_site_order_and_an_update_outlives_its_sites_silence() -> None:
    attendance = arrived_and_silent().machine.attendance
    assert (attendance.live, attendance.arrived, attendance.undecided) == (["b"], [{"a"}], [{"a"}])


def test_a_restart_counts_anew() -> None:
    syncer = arrived_and_silent()
    syncer.restart()
    assert syncer.machine.attendance.arrived == [{"a"}]
    assert syncer.machine.attendance.missed == [False], "it was looked at by the event that began the process"


def test_an_update_that_is_held_is_counted_until_its_word_comes() -> None:
    syncer = Syncer(grace="fixed", grace_ns=0, quorum=2)
    syncer.handle(ev.SyncerStarted(2, HealthOptions(policy="hold", history=4, history_min=2)))
    for name in ("a", "b"):
        syncer.join(name)
    for sequence in (1, 2, 3):
        for name in ("a", "b"):
            syncer.push(name, sequence, base_version=sequence - 1, norm=1.0)
        syncer.done()
    syncer.push("a", 4, base_version=3, norm=1000.0)
    attendance = syncer.machine.attendance
    assert (attendance.holding, attendance.arrived, attendance.awaited(0)) == ([{"a"}], [set()], {"b"})
    syncer.handle(ev.UpdateAdmitted(1, "a", 0, 4))
    assert (attendance.holding, attendance.arrived, attendance.awaited(0)) == ([set()], [{"a"}], {"a", "b"})


@pytest.mark.parametrize("forgets", ["site_changed", "line_changed"])
def test_who_forgets_to_count_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attendance, forgets, lambda *_: None)
    with pytest.raises(AssertionError):
        check_attendance(arrived_and_silent().machine)


# --- Between two inner steps -----------------------------------------------------------------------------------------


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


# --- What is said of an update, and how much of it is believed -------------------------------------------------------

PERIOD_S = 10.0
USUAL = {"tokens": 1000, "steps": 10, "step_ns": 900 * MS, "norm": 1.0, "cosine": 0.5}


def seasoned(*sites: str, rounds: int = 6, tokens: int = 1000, **options: object) -> Syncer:
    """Sites that have all sent an update of ten steps in each period."""
    syncer = running(*sites, quorum=len(sites), **options)
    for version in range(rounds):
        for site in sites:
            syncer.push(
                site, version + 1, at_s=PERIOD_S * (version + 1), base_version=version, **{**USUAL, "tokens": tokens}
            )
        syncer.done()
    return syncer


def push(syncer: Syncer, site: str = "a", after_s: float = PERIOD_S, **claims: object) -> list[fx.OuterEffect]:
    line = syncer.machine.state.sites[site].lines[0]
    version = syncer.machine.state.fragments[0].version
    at_s = syncer.now_ns / SECOND_NS + after_s
    return syncer.push(site, line.watermark + 1, at_s=at_s, base_version=version, **{**USUAL, **claims})


@pytest.mark.parametrize("steps", [10**12, 2000, 300])
def test_steps_that_there_was_no_time_for_hide_no_norm(steps: int) -> None:
    """An update of more steps may be larger, but only of steps that can have been made."""
    answer = only(fx.AnswerPush, push(seasoned("a", "b"), steps=steps, tokens=100 * steps, norm=1e7))
    assert answer.outcome is Outcome.REFUSED
    assert answer.reason is (Reason.OUTLIER if steps == 300 else Reason.IMPLAUSIBLE)


def test_a_site_that_could_not_send_for_an_hour_sends_all_of_it() -> None:
    for away_s, syncer_is_away in ((3600.0, False), (3600.0, True)):
        syncer = seasoned("a", "b")
        if syncer_is_away:
            away_ns = round(away_s) * SECOND_NS
            syncer.handle(ev.SyncerStarted(syncer.machine.state.epoch + 1, None, away_ns))
        effects = push(syncer, after_s=PERIOD_S if syncer_is_away else away_s, steps=3600, tokens=360_000, norm=300.0)
        assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED
        assert not notes(effects)


@pytest.mark.parametrize("tokens", [2**40, 1000 * 17])
def test_no_update_has_more_tokens_than_its_steps_can_read(tokens: int) -> None:
    syncer = seasoned("a", "b", token_budget=2_000_000_000)
    effects = push(syncer, tokens=tokens)
    assert only(fx.AnswerPush, effects).reason is Reason.IMPLAUSIBLE
    assert notes(effects) == ["implausible_refused"]
    assert only(fx.Note, effects).why == (
        f"sequence 7: tokens is {tokens}, and 10 steps have at most 1600 each, 16 times its first 100"
    )
    assert syncer.machine.state.sites["a"].lines[0].updates_refused == {"implausible": 1}
    assert syncer.machine.progress_ppm() < 100
    assert only(fx.AnswerPush, push(syncer, tokens=1000 * 16, digest="another")).outcome is Outcome.ACCEPTED


def test_where_units_are_leased_a_step_may_have_read_what_counts_no_more() -> None:
    syncer = seasoned("a", "b", tokens=20_000, unit_sequences=1)
    assert only(fx.AnswerPush, push(syncer, tokens=20_000 * 60)).outcome is Outcome.ACCEPTED
    effects = push(syncer, tokens=20_000 * 65)
    assert only(fx.AnswerPush, effects).reason is Reason.IMPLAUSIBLE
    assert only(fx.Note, effects).why.endswith("10 steps have at most 128000 each, 64 times the 2000 of others")


def test_where_units_are_leased_little_that_others_have_read_bounds_nobody() -> None:
    syncer = seasoned("a", "b", unit_sequences=1)
    assert only(fx.AnswerPush, push(syncer, tokens=655_360)).outcome is Outcome.ACCEPTED
    assert only(fx.AnswerPush, push(syncer, tokens=655_361)).reason is Reason.IMPLAUSIBLE


def test_no_pair_raises_its_own_bound() -> None:
    syncer = seasoned("a", "b", "c", tokens=20_000, unit_sequences=1)
    assert only(fx.AnswerPush, push(syncer, "a", tokens=20_000 * 60)).outcome is Outcome.ACCEPTED
    assert only(fx.AnswerPush, push(syncer, "b", tokens=20_000 * 65)).reason is Reason.IMPLAUSIBLE


def test_a_memory_of_an_earlier_release_says_nothing_of_the_time_before_its_first_update() -> None:
    syncer = seasoned("a", "b")
    for site in syncer.machine.state.sites.values():  # As such a snapshot is read.
        site.lines[0].arrivals_ns = []
    assert only(fx.AnswerPush, push(syncer, after_s=3600.0)).outcome is Outcome.ACCEPTED
    late = push(syncer, after_s=0.0, steps=3600, tokens=360_000, norm=300.0)
    assert only(fx.AnswerPush, late).outcome is Outcome.ACCEPTED, "it had waited behind that one"


def test_few_steps_make_no_weight() -> None:
    """``tokens2_per_step`` counts tokens by their square and divides by the steps."""
    answer = only(fx.AnswerPush, push(seasoned("a", "b"), tokens=1000 * 10, steps=1))
    assert answer.reason is Reason.IMPLAUSIBLE


def test_a_newcomer_is_compared_with_the_others() -> None:
    for tokens, reason in ((2**40, Reason.IMPLAUSIBLE), (128_001 * 10, Reason.IMPLAUSIBLE), (128_000 * 10, None)):
        syncer = seasoned("a", "b", rounds=1, tokens=20_000)
        syncer.join("c")
        assert only(fx.AnswerPush, push(syncer, "c", tokens=tokens)).reason is reason
    syncer = seasoned("a", "b")
    syncer.join("c")
    assert only(fx.AnswerPush, push(syncer, "c", steps=10**5, tokens=10**7)).reason is Reason.IMPLAUSIBLE


def test_the_first_update_of_a_run_is_bounded_too() -> None:
    for claims in ({"tokens": 2**40}, {"steps": 10**12}):
        assert only(fx.AnswerPush, push(running("a"), after_s=1.0, **claims)).reason is Reason.IMPLAUSIBLE
    assert only(fx.AnswerPush, push(running("a"), tokens=10 * 2**26)).outcome is Outcome.ACCEPTED


def test_a_site_may_start_again_with_other_batches() -> None:
    syncer = seasoned("a", "b")
    syncer.join("a", process="another")
    for _ in range(2):
        effects = push(syncer, tokens=1000 * 16, incarnation=2)
        assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED


def test_a_site_that_claims_a_little_more_each_time_comes_no_further_than_a_few_times_the_others() -> None:
    syncer, steps = seasoned("a", "b", "c"), 10
    for _ in range(40):
        steps = min(2 * steps, 10**9)
        effects = push(syncer, after_s=0.1, steps=steps, tokens=100 * steps, norm=5.0 * steps / 10)
        if only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED:
            for site in "bc":
                push(syncer, site, after_s=0.0)
            syncer.done()
    vitals = syncer.machine.state.sites["a"].lines[0].vitals
    assert max(vital.steps for vital in vitals) <= 3 * 8 * 10 + 10
    assert max(vital.norm for vital in vitals) < 1000


def test_an_operator_can_believe_a_site() -> None:
    syncer = seasoned("a", "b")
    syncer.handle(ev.SyncerStarted(2, HealthOptions(policies={"a": "admit"})))
    effects = push(syncer, tokens=1000 * 17)
    assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED
    assert "outlier_admitted" in notes(effects)


@pytest.mark.parametrize(("step_ns", "told_ns"), [(1, 900 * MS // 8), (900 * MS, 900 * MS)])
def test_no_site_makes_the_others_periods_short(step_ns: int, told_ns: int) -> None:
    """With dynamic steps a period is as many steps as the fastest site makes in its own."""
    from diloco.sync.admission import fastest_step_ns

    syncer = seasoned("a", "b")
    for _ in range(30):
        push(syncer, step_ns=step_ns)
        push(syncer, "b", after_s=0.0)
        syncer.done()
    told = fastest_step_ns(syncer.machine.state, syncer.machine.attendance.live)
    assert told == pytest.approx(told_ns, rel=0.01)


# --- Who was heard when ----------------------------------------------------------------------------------------------


def test_a_lease_runs_out_once_and_is_renewed_by_a_word() -> None:
    leases = Leases(10)
    leases.watch("a", 0)
    leases.watch("b", 5)
    assert leases.next_deadline_ns() == 10
    assert leases.heard("a", 4) is None
    assert leases.expired(13) == []
    assert leases.next_deadline_ns() == 14
    assert leases.expired(14) == [SiteSilent("a")]
    assert leases.expired(14) == []
    assert leases.heard("a", 14) == SiteHeard("a")
    assert leases.expired(23) == [SiteSilent("b")]
    assert leases.next_deadline_ns() == 24


def test_sites_are_told_in_order() -> None:
    leases = Leases(10)
    for site in ("c", "a", "b"):
        leases.watch(site, 0)
    assert leases.expired(99) == [SiteSilent("a"), SiteSilent("b"), SiteSilent("c")]
    assert leases.next_deadline_ns() is None


def test_strangers_and_those_who_left_have_no_lease() -> None:
    leases = Leases(10)
    assert leases.heard("nobody", 0) is None
    leases.watch("a", 0)
    leases.forget("a")
    leases.forget("nobody")
    assert leases.expired(99) == []
    assert leases.heard("a", 5) is None


def test_after_a_restart_every_lease_is_full_and_the_silent_stay_silent() -> None:
    leases = Leases(10)
    leases.watch("a", 100)
    leases.watch("b", 100, silent=True)
    assert leases.expired(110) == [SiteSilent("a")]
    assert leases.heard("b", 111) == SiteHeard("b")
    leases.watch("b", 120)  # It joined again.
    assert leases.heard("b", 121) is None


def test_renewed_leases_all_begin_anew_in_full() -> None:
    leases = Leases(10)
    leases.watch("a", 0)
    leases.watch("b", 4)
    leases.renew(9)
    assert leases.expired(18) == []
    assert leases.next_deadline_ns() == 19
    assert [event.site for event in leases.expired(19)] == ["a", "b"]


# --- A run that was restored -----------------------------------------------------------------------------------------


def restored(syncer: Syncer, lineage: int = 2) -> list[fx.OuterEffect]:
    count = len(syncer.machine.state.fragments)
    return syncer.handle(ev.LineageBegan(lineage, tuple(f"r{index}" for index in range(count)), "a backup"))


def test_every_fragment_gets_its_next_version_and_nothing_that_was_under_way_is_merged() -> None:
    syncer = running("a", "b", quorum=2, num_fragments=2)
    syncer.push("a")
    syncer.push("b")  # Merging now.
    syncer.push("a", 2)
    effects = restored(syncer)
    assert of(fx.PublishVersion, effects) == [fx.PublishVersion(0, 1, "r0"), fx.PublishVersion(1, 1, "r1")]
    fates = {(tell.site, tell.fate.sequence): tell.fate.reason for tell in of(fx.TellFate, effects)}
    assert fates == {("a", 1): Reason.RESTORED, ("a", 2): Reason.RESTORED, ("b", 1): Reason.RESTORED}
    assert syncer.machine.state.sites["a"].lines[0].tokens_discarded == 200
    assert syncer.machine.state.lineage == 2
    assert not of(fx.StartOuterStep, syncer.restart()), "no step of the past is under way"


def test_nothing_of_a_site_enters_before_it_has_joined_again() -> None:
    syncer = running("a", quorum=2)
    syncer.push("a")
    restored(syncer)
    for sequence in (1, 2):  # What it had acknowledged may be another's number in the next past that is restored.
        answer = only(fx.AnswerPush, syncer.push("a", sequence, base_version=0))
        assert (answer.outcome, answer.reason) == (Outcome.REFUSED, Reason.NOT_JOINED)
    joined = only(fx.AnswerJoin, syncer.join("a", "p1"))
    assert (joined.incarnation, joined.reason) == (2, None), "its process is no older one"
    assert joined.standings[0].watermark == 1
    for sequence in (1, 2):  # Sent before the site has heard what its join was answered.
        late = only(fx.AnswerPush, syncer.push("a", sequence, base_version=0))
        assert (late.outcome, late.reason) == (Outcome.REFUSED, Reason.NOT_JOINED)
    assert only(fx.AnswerPush, syncer.push("a", 2, incarnation=2, base_version=1)).outcome is Outcome.ACCEPTED


def test_a_run_that_had_ended_goes_on() -> None:
    syncer = running("a")
    syncer.push("a", final=True)
    syncer.handle(ev.DrainRequested(1))
    syncer.done()
    assert syncer.machine.state.phase is Phase.ENDED
    assert "resumed" in notes(restored(syncer))
    assert (syncer.machine.state.phase, syncer.machine.state.ending) == (Phase.RUNNING, None)


def test_a_promoted_standby_is_newer_than_any_number_of_restarts_of_the_old_syncer() -> None:
    assert promoted_epoch(3, 1_795_000_000) == 1_795_000_000
    for clock_s in (1_795_000_000, 1_480_000_000, 0, -1):
        assert promoted_epoch(1_795_000_000, clock_s) > 1_795_000_000 + 1000, "by as much whatever a clock says"


def test_lineages_only_rise() -> None:
    syncer = running("a")
    restored(syncer, 3)
    with pytest.raises(AssertionError):
        restored(syncer, 3)


def test_what_the_restored_values_hold_of_a_site_is_what_counts_as_merged() -> None:
    syncer = running("a", "b", num_fragments=2)
    for site in "ab":
        syncer.push(site, tokens=70)
        syncer.done(0)
    lines = {name: site.lines[0] for name, site in syncer.machine.state.sites.items()}
    assert [lines[name].tokens_merged for name in "ab"] == [70, 70]
    syncer.handle(ev.LineageBegan(2, ("r0", "r1"), "without b", held=(("a", 0, 70, 1),)))
    assert [(lines[name].tokens_merged, lines[name].updates_merged) for name in "ab"] == [(70, 1), (0, 0)]
    assert syncer.machine.state.run_tokens() == 35
    joined = only(fx.AnswerJoin, syncer.join("b", "p1"))
    assert (joined.standings[0].tokens_merged, joined.standings[0].watermark) == (0, 1)


def test_a_new_lineage_is_above_all_that_is_known_and_above_all_that_began_earlier() -> None:
    assert next_lineage(1, 1_800_000_000) == 1_800_000_000
    first = next_lineage(1, 1_800_000_000)
    assert next_lineage(1, 1_800_000_777) > first, "restored once more by somebody who never heard of the first"
    assert next_lineage(first, 1_700_000_000) == first + 1, "with a clock that is behind"


# --- Who is in the run -----------------------------------------------------------------------------------------------


def test_room_for_sites_is_bounded() -> None:
    syncer = running("a", "b", sites_max=2)
    assert only(fx.AnswerJoin, syncer.join("c")).reason is Reason.FULL
    assert "c" not in syncer.machine.state.sites


@pytest.mark.parametrize("goes", ["leaves", "is evicted"])
def test_a_site_that_is_gone_leaves_its_place_and_is_remembered(goes: str) -> None:
    """Pods have a new name with each start; and one that comes back finds what it had sent."""
    syncer = running(sites_max=2)
    for number in range(14):
        name = f"pod-{number}"
        assert only(fx.AnswerJoin, syncer.join(name)).reason is None
        version = syncer.machine.state.fragments[0].version
        syncer.push(name, base_version=version)
        if goes == "leaves":
            syncer.handle(ev.SiteLeft(1, name, 1))
        else:
            syncer.handle(ev.SiteEvicted(1, name))
        assert len(only(fx.AnswerJoin, syncer.join("other")).standings) == 1
        full = only(fx.AnswerJoin, syncer.join("one too many")).reason
        assert full is Reason.FULL, "what it has sent is not decided: its place is still taken"
        syncer.done()
    if goes == "leaves":
        (standing,) = only(fx.AnswerJoin, syncer.join("pod-3", "again")).standings
        assert (standing.watermark, len(standing.fates)) == (1, 1)
        update = syncer.update("pod-3", 1, base_version=3, incarnation=2)
        assert only(fx.AnswerPush, syncer.handle(update)).outcome is Outcome.DUPLICATE


def test_how_many_are_remembered_is_bounded() -> None:
    syncer = running(sites_max=1)
    for number in range(members.REMEMBERED_TIMES):
        assert only(fx.AnswerJoin, syncer.join(f"pod-{number}")).reason is None
        syncer.handle(ev.SiteLeft(1, f"pod-{number}", 1))
    assert only(fx.AnswerJoin, syncer.join("another")).reason is Reason.FULL
    assert only(fx.AnswerJoin, syncer.join("pod-0", "again")).reason is None, "one that was there comes back"


def test_the_room_is_what_the_latest_start_says() -> None:
    syncer = running("a", sites_max=1)
    assert only(fx.AnswerJoin, syncer.join("b")).reason is Reason.FULL
    (note,) = syncer.restart(sites_max=3)
    assert note == fx.Note("settings_changed", "outer.sites_max is 3 and was 1")
    for name in "bc":
        assert only(fx.AnswerJoin, syncer.join(name)).reason is None
    assert only(fx.AnswerJoin, syncer.join("d")).reason is Reason.FULL
    assert syncer.restart(sites_max=3) == []


def test_less_room_than_there_are_sites_puts_none_out() -> None:
    syncer = running("a", "b", "c", sites_max=3)
    syncer.restart(sites_max=1)
    syncer.handle(ev.SiteSilent("b"))
    for name in "abc":
        assert only(fx.AnswerJoin, syncer.join(name, "again")).reason is None, "it is there"
    assert only(fx.AnswerPush, syncer.push("c", incarnation=2)).outcome is Outcome.ACCEPTED
    syncer.handle(ev.SiteLeft(1, "a", 2))
    for name in "ad":
        assert only(fx.AnswerJoin, syncer.join(name, "later")).reason is Reason.FULL, "two are there, and one may be"


def test_a_replay_has_the_room_of_then_whatever_the_options_say_now() -> None:
    syncer = running("a", sites_max=1)
    syncer.join("b")
    syncer.restart(sites_max=2)
    syncer.join("b")
    syncer.join("c")
    for sites_max in (1, 2, 9):
        machine = OuterSync(replace(syncer.options, sites_max=sites_max))
        assert len(list(replay(machine, syncer.records))) == len(syncer.records)
        assert machine.state == syncer.machine.state


def test_a_journal_and_a_snapshot_of_an_earlier_release_say_no_room_and_the_options_do() -> None:
    assert from_plain(ev.SyncerStarted, {"epoch": 2}) == ev.SyncerStarted(2)
    plain = through_json(running("a", sites_max=1).machine.snapshot())
    del plain["sites_max"]
    for sites_max, reason in ((1, Reason.FULL), (2, None)):
        machine = OuterSync.restore(OuterOptions(sites_max=sites_max), plain)
        assert machine.handle(ev.SyncerStarted(2), 0) == []
        assert only(fx.AnswerJoin, machine.handle(ev.JoinRequested(1, "b", "p"), 0)).reason is reason


def test_an_old_process_that_comes_back_late_does_not_fence_the_new_one() -> None:
    syncer = running("a")
    assert only(fx.DropSite, syncer.join("a", "p2")).incarnation == 1
    assert only(fx.AnswerJoin, syncer.join("a", "p1")).reason is Reason.SUPERSEDED
    assert only(fx.AnswerJoin, syncer.join("a", "p2")).incarnation == 2


def test_a_late_join_of_a_dead_process_changes_nothing() -> None:
    syncer = running()
    syncer.handle(ev.JoinRequested(1, "a", "living", 0))
    before = syncer.machine.snapshot()
    for ticket in (0, 1, 3):  # Its first join, or one with a ticket from before the living process was taken in.
        (asked,) = syncer.handle(ev.JoinRequested(2, "a", "dead", ticket))
        assert asked == fx.AskToConfirm(2, "a", 2)
        assert syncer.machine.snapshot() == before


def test_a_process_that_repeats_the_ticket_replaces_the_one_before_it_and_the_ticket_is_void() -> None:
    syncer = running()
    syncer.handle(ev.JoinRequested(1, "a", "p1", 0))
    effects = syncer.handle(ev.JoinRequested(1, "a", "p2", 2))
    assert only(fx.DropSite, effects).reason is Reason.SUPERSEDED
    assert only(fx.AnswerJoin, effects).incarnation == 2
    assert syncer.handle(ev.JoinRequested(1, "a", "p3", 2)) == [fx.AskToConfirm(1, "a", 3)]


def test_a_process_that_speaks_for_its_site_needs_no_ticket_to_join_again() -> None:
    syncer = running()
    for _ in range(2):
        assert only(fx.AnswerJoin, syncer.handle(ev.JoinRequested(1, "a", "p1", 0))).incarnation == 1


def test_an_eviction_refuses_what_waits_and_not_what_merges() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.push("a")
    syncer.push("b")
    syncer.push("b", 2)
    effects = syncer.handle(ev.SiteEvicted(1, "b"))
    assert [tell.fate.sequence for tell in of(fx.TellFate, effects)] == [2]
    assert only(fx.AnswerJoin, syncer.join("b")).reason is Reason.EVICTED


# --- An update's way at its site -------------------------------------------------------------------------------------


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
