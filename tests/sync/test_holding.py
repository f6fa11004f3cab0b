"""Outliers: refused, held, or only noted; and an operator's word on them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.data_units import SKIPPED, Columns
from diloco.sync.events import Outcome, Reason
from diloco.sync.fates import columns_of, known_already
from diloco.sync.options import SECOND_NS, HealthOptions, OuterOptions
from diloco.sync.rounds import OUTLIERS_REMEMBERED_MAX
from diloco.sync.state import Phase, Status
from diloco.sync.syncer import OuterSync, replay
from tests.sooner import sooner
from tests.sync.driving import Syncer, notes, of, only, running, through_json
from tests.sync.test_schedule import based
from tests.sync.two_levels import Level, Region

USUAL = {"norm": 1.0, "cosine": 0.5}
FAR = {"norm": 1e6, "cosine": 0.5}


def seasoned(*sites: str, policy: str = "hold", rounds: int = 4, **options: object) -> Syncer:
    """A syncer that has seen enough of every site to know what is usual; every version has everybody in it."""
    syncer = running(*sites, quorum=len(sites), **options)
    syncer.handle(ev.SyncerStarted(2, HealthOptions(policy=policy, hold_ns=60 * SECOND_NS)))
    for version in range(rounds):
        for site in sites:
            syncer.push(site, version + 1, base_version=version, **USUAL)
        syncer.done()
    return syncer


def admit(syncer: Syncer, site: str = "a", sequence: int = 5, fragment: int = 0) -> list[fx.OuterEffect]:
    return syncer.handle(ev.UpdateAdmitted(1, site, fragment, sequence))


def withdraw(syncer: Syncer, site: str = "a", sequence: int = 5, fragment: int = 0) -> list[fx.OuterEffect]:
    return syncer.handle(ev.UpdateWithdrawn(1, site, fragment, sequence))


def test_an_outlier_is_refused_in_words_and_counted() -> None:
    syncer = seasoned("a", "b", policy="refuse")
    before = len(syncer.machine.state.sites["a"].lines[0].vitals)
    effects = syncer.push("a", 5, base_version=4, **FAR)
    assert notes(effects) == ["outlier_refused"]
    answer = only(fx.AnswerPush, effects)
    assert (answer.outcome, answer.reason) == (Outcome.REFUSED, Reason.OUTLIER)
    line = syncer.machine.state.sites["a"].lines[0]
    assert (line.watermark, len(line.vitals), line.updates_refused) == (4, before, {"outlier": 1})
    usual = {**USUAL, "digest": "another one"}
    assert only(fx.AnswerPush, syncer.push("a", 5, base_version=4, **usual)).outcome is Outcome.ACCEPTED
    assert line.outliers == []


def test_an_update_that_was_refused_as_an_outlier_is_refused_again_whatever_is_usual_then() -> None:
    """Its site has thrown it away; and what a crash or a slow stream brings once more must not be merged."""
    syncer = seasoned("a", "b", policy="refuse")
    syncer.push("a", 5, base_version=4, **FAR)
    syncer.machine = OuterSync.restore(syncer.options, through_json(syncer.machine.snapshot()))
    syncer.handle(ev.SyncerStarted(3, HealthOptions(policy="admit")))
    digest = syncer.update("a", 5, base_version=4, **FAR).digest
    verdict = syncer.machine.admit("a", 1, 0, 5, 4, digest)
    assert (verdict.outcome, verdict.reason) == (Outcome.REFUSED, Reason.OUTLIER), "before a byte is read"
    before = syncer.machine.snapshot()
    effects = syncer.push("a", 5, base_version=4, **FAR)
    assert notes(effects) == ["outlier_again"]
    assert only(fx.AnswerPush, effects).reason is Reason.OUTLIER
    assert syncer.machine.snapshot() == before


def test_what_is_remembered_of_refused_outliers_is_bounded() -> None:
    syncer = seasoned("a", "b", policy="refuse")
    for number in range(OUTLIERS_REMEMBERED_MAX + 3):
        syncer.push("a", 5, base_version=4, **FAR, digest=f"d{number}")
    line = syncer.machine.state.sites["a"].lines[0]
    assert line.outliers == [f"d{number}" for number in range(3, OUTLIERS_REMEMBERED_MAX + 3)]


def test_an_outlier_that_is_admitted_is_noted() -> None:
    syncer = seasoned("a", "b", policy="admit")
    assert "outlier_admitted" in notes(syncer.push("a", 5, base_version=4, **FAR))
    assert of(fx.StartOuterStep, syncer.push("b", 5, base_version=4, **USUAL))


def test_a_policy_can_be_a_sites_own() -> None:
    syncer = seasoned("a", "b", policy="refuse")
    syncer.handle(ev.SyncerStarted(3, HealthOptions(policies={"a": "admit"})))
    assert only(fx.AnswerPush, syncer.push("a", 5, base_version=4, **FAR)).outcome is Outcome.ACCEPTED
    assert only(fx.AnswerPush, syncer.push("b", 5, base_version=4, **FAR)).reason is Reason.OUTLIER


def test_a_held_update_is_accepted_and_waits_and_nobody_waits_for_its_site() -> None:
    syncer = seasoned("a", "b", "c")
    effects = syncer.push("a", 5, base_version=4, **FAR)
    assert only(fx.AnswerPush, effects).outcome is Outcome.ACCEPTED
    assert notes(effects) == ["update_held"]
    assert syncer.machine.state.fragments[0].round is None
    syncer.handle(ev.SiteLeft(1, "c", 1))
    syncer.machine.options.quorum = 1
    step = only(fx.StartOuterStep, syncer.push("b", 5, base_version=4, **USUAL))
    assert [part.site for part in step.contributions] == ["b"], "it is complete without the site that is held"
    assert step.contributions[0].weight == 1.0


def test_a_round_of_all_shrinks_when_an_update_of_a_member_is_held() -> None:
    syncer = seasoned("a", "b")
    syncer.machine.options.quorum = "all"
    syncer.push("b", 5, base_version=4, **USUAL)
    effects = syncer.push("a", 5, base_version=4, **FAR)
    assert notes(effects) == ["update_held", "round_shrunk", "round_closed"]
    assert "held" in of(fx.Note, effects)[1].why


def test_an_operators_word_lets_it_in_once() -> None:
    syncer = seasoned("a")
    syncer.push("a", 5, base_version=4, **FAR)
    effects = admit(syncer)
    assert only(fx.AnswerDone, effects).reason is None
    step = only(fx.StartOuterStep, effects)
    assert [update.sequence for update in step.contributions[0].updates] == [5]
    assert admit(syncer) == [fx.AnswerDone(1)], "said twice"
    assert only(fx.AnswerDone, withdraw(syncer)).reason is Reason.CONFLICT, "too late: it is being merged"
    syncer.done()
    assert admit(syncer) == [fx.AnswerDone(1)]
    assert withdraw(syncer) == [fx.AnswerDone(1, Reason.CONFLICT)]


def test_an_operators_word_keeps_it_out() -> None:
    syncer = seasoned("a")
    syncer.push("a", 5, base_version=4, **FAR)
    effects = withdraw(syncer)
    assert only(fx.TellFate, effects).fate.reason is Reason.WITHDRAWN
    assert only(fx.AnswerDone, effects).reason is None
    assert withdraw(syncer) == [fx.AnswerDone(1)]
    assert admit(syncer) == [fx.AnswerDone(1, Reason.CONFLICT)]


@pytest.mark.parametrize(
    ("spoken_of", "reason"),
    [(("z", 5, 0), Reason.NOT_JOINED), (("a", 5, 7), Reason.BAD_BASE), (("a", 9, 0), Reason.GAP)],
)
def test_a_word_on_what_is_not_there_is_answered_with_what_is_wrong(
    spoken_of: tuple[str, int, int], reason: Reason
) -> None:
    syncer = seasoned("a")
    assert admit(syncer, *spoken_of) == withdraw(syncer, *spoken_of) == [fx.AnswerDone(1, reason)]


def test_what_comes_after_a_held_update_does_not_overtake_it() -> None:
    syncer = seasoned("a")
    syncer.push("a", 5, base_version=4, **FAR)
    assert not of(fx.StartOuterStep, syncer.push("a", 6, base_version=4, **USUAL))
    step = only(fx.StartOuterStep, withdraw(syncer))
    assert [update.sequence for update in step.contributions[0].updates] == [6]


def test_a_held_update_is_refused_when_nobody_decides() -> None:
    syncer = seasoned("a")
    syncer.push("a", 5, at_s=10, base_version=4, **FAR)
    assert syncer.machine.next_deadline_ns() == 70 * SECOND_NS
    assert only(fx.TellFate, syncer.deadline()).fate.reason is Reason.OUTLIER
    assert syncer.machine.next_deadline_ns() is None


def test_staleness_is_judged_while_an_update_is_held() -> None:
    syncer = seasoned("a", "b", staleness_max=1)
    syncer.machine.options.quorum = 1
    syncer.push("a", 5, base_version=4, **FAR)
    reasons = []
    for version in (4, 5):
        syncer.push("b", version + 1, base_version=version, **USUAL)
        reasons += [told.fate.reason for told in of(fx.TellFate, syncer.done()) if told.site == "a"]
    assert reasons == [Reason.STALE]


def test_the_last_round_gives_an_operator_as_long_as_it_waits_for_anybody() -> None:
    syncer = seasoned("a", final_wait_ns=20 * SECOND_NS)
    syncer.push("a", 5, at_s=1, base_version=4, final=True, **FAR)
    syncer.handle(ev.DrainRequested(1))
    assert syncer.machine.state.phase is Phase.ENDING
    effects = syncer.deadline(21)
    assert only(fx.TellFate, effects).fate.reason is Reason.OUTLIER
    assert of(fx.MarkFinal, effects)


def test_what_waited_behind_a_held_update_is_in_the_last_version() -> None:
    syncer = seasoned("a", final_wait_ns=20 * SECOND_NS)
    syncer.push("a", 5, at_s=1, base_version=4, **FAR)
    syncer.push("a", 6, base_version=4, final=True, **USUAL)
    syncer.handle(ev.DrainRequested(1))
    assert of(fx.StartOuterStep, syncer.deadline(21))
    assert of(fx.MarkFinal, syncer.done())


def test_a_held_update_of_an_evicted_site_is_refused_and_a_restart_holds_on() -> None:
    syncer = seasoned("a", "b")
    syncer.push("a", 5, base_version=4, **FAR)
    syncer.restart()
    assert through_json(syncer.machine.snapshot())["sites"]["a"]["lines"][0]["undecided"][0]["held"]["norm"] == 1e6
    effects = syncer.handle(ev.SiteEvicted(1, "a"))
    assert only(fx.TellFate, effects).fate.reason is Reason.EVICTED
    assert only(fx.AnswerDone, syncer.handle(ev.SiteReadmitted(1, "a"))).reason is None
    assert syncer.machine.state.sites["a"].status is Status.LEFT
    assert only(fx.AnswerJoin, syncer.join("a", "p2")).reason is None
    assert syncer.handle(ev.SiteReadmitted(1, "z")) == [fx.AnswerDone(1, Reason.NOT_JOINED)]


def test_what_is_usual_is_bounded_and_an_outlier_is_no_part_of_it() -> None:
    syncer = seasoned("a", policy="refuse", rounds=20)
    vitals = syncer.machine.state.sites["a"].lines[0].vitals
    assert len(vitals) == syncer.machine.state.health.history
    syncer.push("a", 21, base_version=20, **FAR)
    assert {vital.norm for vital in syncer.machine.state.sites["a"].lines[0].vitals} == {1.0}


def test_an_update_that_nobody_measured_is_not_judged() -> None:
    syncer = seasoned("a", policy="refuse")
    assert only(fx.AnswerPush, syncer.push("a", 5, base_version=4)).outcome is Outcome.ACCEPTED
    assert len(syncer.machine.state.sites["a"].lines[0].vitals) == 4


# --- Units of the data at the syncer ---------------------------------------------------------------------------------

UNIT = 10


def leasing(*sites: str, **options: Any) -> Syncer:
    return running(*sites, **{"unit_sequences": UNIT, "lease_ns": 30 * SECOND_NS, **options})


def ask(syncer: Syncer, site: str, upto: int, known: int = 0, **given: Any) -> tuple[tuple[int, int], ...]:
    """What ``site`` is told of its list."""
    fields = {"incarnation": 1, "begin": known, "floor": 0, "again": 0, **given}
    return only(fx.AnswerUnits, syncer.handle(ev.UnitsAsked(1, site, known=known, upto=upto, **fields))).pieces


def merge(syncer: Syncer, site: str, sequence: int, *spans: tuple[int, int], **given: Any) -> None:
    """An update that has consumed ``spans``, all alone in its round."""
    fragment = given.pop("fragment", 0)
    version = syncer.machine.state.fragments[fragment].version
    more = {"spans": spans, "cursor": spans[-1][1], "fragment": fragment, "base_version": version, **given}
    syncer.push(site, sequence, **more)
    if syncer.machine.state.fragments[fragment].merging_since_ns is None:
        syncer.deadline()
    syncer.done(fragment)


def counts(syncer: Syncer) -> Columns:
    found = columns_of(syncer.options, syncer.machine.state)
    assert found.balanced(), found
    return found


def test_units_are_leased_in_order_and_the_same_ask_gives_the_same_answer() -> None:
    syncer = leasing("a", "b")
    assert ask(syncer, "a", 4) == ((0, 4),)
    assert ask(syncer, "b", 2) == ((4, 2),)
    assert ask(syncer, "a", 4) == ((0, 4),)
    assert ask(syncer, "a", 6, known=4) == ((6, 2),)
    assert counts(syncer).leased == counts(syncer).in_hand == 8


def test_a_unit_counts_when_every_fragment_has_merged_all_of_it() -> None:
    syncer = leasing("a", num_fragments=2)
    ask(syncer, "a", 4)
    merge(syncer, "a", 1, (0, 25))
    assert counts(syncer).merged == 0
    merge(syncer, "a", 1, (0, 19), fragment=1)
    assert (counts(syncer).merged, counts(syncer).in_hand) == (1, 3)
    merge(syncer, "a", 2, (19, 25), fragment=1)
    assert counts(syncer).merged == 2


def test_what_a_site_that_leaves_has_not_begun_is_leased_again_and_what_it_has_begun_never() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 5)
    merge(syncer, "a", 1, (0, 15))
    effects = syncer.handle(ev.SiteLeft(1, "a", 1))
    assert "units_given_back" in notes(effects)
    assert (counts(syncer).merged, counts(syncer).partly, counts(syncer).given_back) == (1, 1, 3)
    assert ask(syncer, "b", 4) == ((2, 4),), "three of them, and then a fresh one"
    assert (counts(syncer).reissued, counts(syncer).partly, counts(syncer).in_hand) == (3, 1, 4)


def test_what_an_update_names_beyond_its_sites_list_counts_for_nothing_and_is_not_kept() -> None:
    syncer = leasing("a")
    ask(syncer, "a", 2)
    merge(syncer, "a", 1, (0, 10), (20, 30), (500, 510))
    units = syncer.machine.state.units
    assert units is not None
    assert units.holders["a"].merged == [[(0, 10)]], "no more was leased"
    ask(syncer, "a", 4, known=2)
    assert (counts(syncer).merged, counts(syncer).in_hand) == (1, 3)


def test_what_an_undecided_update_has_consumed_stays_in_hand_when_its_site_is_gone() -> None:
    syncer = leasing("a", "b", quorum=2)
    ask(syncer, "a", 3)
    syncer.push("a", 1, spans=((0, 20),), cursor=20)
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert (counts(syncer).in_hand, counts(syncer).given_back) == (2, 1)
    syncer.handle(ev.UpdateWithdrawn(1, "a", 0, 1))
    assert (counts(syncer).in_hand, counts(syncer).given_back) == (0, 3)


def test_a_silent_site_has_its_units_until_its_lease_runs_out() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    assert counts(syncer).in_hand == 3
    assert syncer.machine.next_deadline_ns() == 40 * SECOND_NS
    effects = syncer.deadline()
    assert only(fx.Note, effects).what == "units_given_back"
    assert counts(syncer).given_back == 3
    assert syncer.machine.next_deadline_ns() is None


def test_a_site_that_is_heard_in_time_keeps_its_units() -> None:
    syncer = leasing("a")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    syncer.handle(ev.SiteHeard("a"), at_s=20)
    assert syncer.machine.next_deadline_ns() is None
    assert counts(syncer).in_hand == 3


def test_a_site_that_asks_is_there() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteSilent("a"), at_s=10)
    syncer.deadline()
    asks = ev.UnitsAsked(1, "a", 1, begin=0, known=0, upto=3, floor=0, again=0)
    assert known_already(syncer.options, syncer.machine.state, asks) is None, "it has nothing of its list at the moment"
    assert ask(syncer, "a", 5) == ((0, 5),)
    assert (counts(syncer).in_hand, counts(syncer).given_back, counts(syncer).reissued) == (5, 0, 0)
    assert syncer.machine.state.sites["a"].status is Status.LIVE


def test_a_site_that_comes_back_has_what_is_free_and_what_another_has_counts_once() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 4)
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert ask(syncer, "b", 2) == ((0, 2),)
    syncer.join("a", "p2")
    assert (counts(syncer).in_hand, counts(syncer).given_back) == (4, 0)
    merge(syncer, "a", 1, (0, 30), incarnation=2)
    assert (counts(syncer).merged, counts(syncer).repeated) == (3, 0)
    merge(syncer, "b", 1, (0, 20))
    assert (counts(syncer).merged, counts(syncer).repeated) == (3, 2)


def test_what_a_site_has_given_up_is_leased_again_or_partly() -> None:
    syncer = leasing("a", "b", num_fragments=2)
    ask(syncer, "a", 6)
    merge(syncer, "a", 1, (0, 40))
    merge(syncer, "a", 1, (0, 10), (20, 40), fragment=1)  # What lies between was thrown away of this fragment.
    assert counts(syncer).merged == 3
    ask(syncer, "a", 6, known=6, floor=55)
    assert (counts(syncer).merged, counts(syncer).partly) == (3, 1)
    assert (counts(syncer).given_back, counts(syncer).in_hand) == (1, 1)
    assert ask(syncer, "b", 1) == ((4, 1),)


def test_a_floor_gives_up_nothing_that_an_accepted_update_has() -> None:
    syncer = leasing("a", "b", quorum=2)
    ask(syncer, "a", 4)
    syncer.push("a", 1, spans=((0, 15),), cursor=15)
    ask(syncer, "a", 4, known=4, floor=30)
    assert counts(syncer).in_hand == 4


def test_the_places_that_a_site_filled_by_itself_are_skipped() -> None:
    syncer = leasing("a")
    ask(syncer, "a", 2)
    assert ask(syncer, "a", 7, known=2, begin=5, again=3) == ((SKIPPED, 3), (2, 2))
    merge(syncer, "a", 1, (0, 20), (50, 70))
    assert (counts(syncer).merged, counts(syncer).repeated) == (4, 3)


def test_what_a_later_process_names_of_what_was_given_up_is_shown_as_repeated() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 3)
    ask(syncer, "a", 3, known=3, floor=20)
    assert ask(syncer, "b", 2) == ((0, 2),)
    merge(syncer, "b", 1, (0, 20))
    syncer.join("a", "p2")
    merge(syncer, "a", 1, (0, 20), incarnation=2)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 2)


def test_what_comes_late_in_its_last_fragment_alone_is_shown_as_repeated() -> None:
    syncer = leasing("a", "b", num_fragments=2)
    ask(syncer, "a", 3)
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert ask(syncer, "b", 2) == ((0, 2),)
    syncer.join("a", "p2")
    merge(syncer, "a", 1, (0, 20), incarnation=2)
    ask(syncer, "a", 3, known=3, floor=20, incarnation=2)
    for fragment in (0, 1):
        merge(syncer, "b", 1, (0, 20), fragment=fragment)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 0)
    syncer.join("a", "p3")
    merge(syncer, "a", 1, (0, 15), fragment=1, incarnation=3)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 1)
    merge(syncer, "a", 2, (15, 20), fragment=1, incarnation=3)
    assert (counts(syncer).merged, counts(syncer).repeated) == (2, 2)


def test_an_ask_of_who_does_not_speak_for_the_site_changes_nothing() -> None:
    syncer = leasing("a")
    before = syncer.machine.snapshot()
    for site, incarnation, reason in (("a", 2, Reason.FENCED), ("z", 1, Reason.NOT_JOINED)):
        event = ev.UnitsAsked(1, site, incarnation, 0, 0, 4, 0, 0)
        told = known_already(syncer.options, syncer.machine.state, event)
        assert told == fx.AnswerUnits(1, 0, (), reason)
        assert syncer.handle(event) == [told]
    assert syncer.machine.snapshot() == before


def test_an_ask_that_changes_nothing_is_answered_without_the_machine() -> None:
    syncer = leasing("a")
    event = ev.UnitsAsked(7, "a", 1, 0, 0, 4, 0, 0)
    assert known_already(syncer.options, syncer.machine.state, event) is None
    effects = syncer.handle(event)
    assert known_already(syncer.options, syncer.machine.state, event) == only(fx.AnswerUnits, effects)
    for more in ({"upto": 5}, {"begin": 6}, {"floor": 10}):
        fields = {"known": 4, "begin": 4, "upto": 4, "floor": 0, "again": 0, **more}
        changed = ev.UnitsAsked(7, "a", 1, **fields)
        assert known_already(syncer.options, syncer.machine.state, changed) is None, more


def test_all_sites_draw_from_the_text_of_the_first() -> None:
    syncer = leasing()
    join = ev.JoinRequested(1, "a", "p1", corpus="one")
    assert only(fx.AnswerJoin, syncer.handle(join)).reason is None
    other = syncer.handle(ev.JoinRequested(1, "b", "p1", corpus="two"))
    assert only(fx.AnswerJoin, other).reason is Reason.OTHER_DATA
    assert list(syncer.machine.state.sites) == ["a"]
    assert only(fx.AnswerJoin, syncer.handle(join)).reason is None


def test_a_restart_and_a_replay_give_the_same_leases() -> None:
    syncer = leasing("a", "b")
    ask(syncer, "a", 4)
    merge(syncer, "a", 1, (0, 25))
    syncer.handle(ev.SiteEvicted(1, "a"))
    ask(syncer, "b", 3)
    twin = OuterSync(syncer.options)
    for _ in replay(twin, syncer.records):
        pass
    assert twin.state == syncer.machine.state
    syncer.restart()
    assert syncer.machine.state.units == twin.state.units


def test_where_nothing_is_leased_nothing_is_remembered_of_units() -> None:
    syncer = running("a")
    merge(syncer, "a", 1, (0, 10))
    assert syncer.machine.state.units is None
    assert not of(fx.AnswerUnits, syncer.handle(ev.SiteLeft(1, "a", 1)))
    refused = only(fx.AnswerUnits, syncer.handle(ev.UnitsAsked(1, "a", 1, 0, 0, 4, 0, 0)))
    assert refused.reason is Reason.NOT_JOINED


# --- Two regions and the syncer above them, as dice have it ----------------------------------------------------------


@pytest.mark.parametrize("seed", sooner(range(12), *range(4)))
def test_at_any_instant_a_crash_costs_nothing_and_a_replay_decides_the_same(seed: int) -> None:
    """Sites push, levels step, processes of both die, a region is drained and goes on, words get lost and come twice,
    updates are refused.  What goes up says as much as its tokens do, all that was merged in a region is merged above or
    in its ledger, each of its updates was merged once, and a replay decides it all again."""
    dice = random.Random(seed)
    above, region = based(updates=dice.choice((1, 2, 3)))
    regions = {"region-a": region, "region-b": Region(above, "region-b", dice.choice((1, 2)))}
    regions["region-b"].handle(ev.JoinRequested(1, "s", "p"))
    regions["region-b"].join()
    sequences: Counter[str] = Counter()
    for _ in range(240):
        name = dice.choice(sorted(regions))
        _something_happens(dice, above, regions[name], name, sequences)
        regions[name].ledger()
    for each in regions.values():
        each.join()
    for _ in range(3):
        for each in regions.values():
            each.settle()
    for name, each in regions.items():
        merged = each.syncer.machine.state.sites["s"].lines[0].tokens_merged
        ledger, line = each.ledger(), above.syncer.machine.state.sites[name].lines[0]
        assert ledger["processed"] == merged
        assert ledger["lost"] == ledger["in_flight"] == 0
        assert ledger["merged"] == line.tokens_merged
        assert line.watermark == line.updates_merged, "each was merged once"
        assert len(each.spool) <= 2
        assert len(each.outbox) <= 2
        again = OuterSync(OuterOptions(**_options(each.syncer.options)))
        list(replay(again, each.syncer.records))
        assert again.snapshot() == each.syncer.machine.snapshot()


def _something_happens(dice: random.Random, above: Level, region: Region, name: str, sequences: Counter[str]) -> None:
    choices = [*["s"] * 4, "x", "hear", *["crash", "deaf", "crash above", "drain"] * (dice.random() < 0.1)]
    choices += ["below"] * (2 * bool(region.commands)) + ["above"] * bool(above.commands)
    choices += ["seal"] * bool(region.sealing) + ["do", "do", "do twice"] * bool(region.orders)
    choices += ["refuse"] * (bool(region.outbox) and dice.random() < 0.2)
    match dice.choice(choices):
        case "s" if not region.commands:
            sequences[name] += 1
            tokens, incarnation = dice.randrange(1, 50), region.syncer.machine.state.sites["s"].incarnation
            region.push("s", sequences[name], float(tokens), tokens=tokens, incarnation=incarnation)
        case "x" if not above.commands:
            sequences["x"] += 1
            above.push("x", sequences["x"], float(dice.randrange(-64, 64)))
        case "hear":
            region.hear()
        case "deaf":
            region.mail.clear()
        case "crash":
            region.restart()
        case "crash above":
            above.restart()
        case "below":
            region.step()
        case "above":
            above.step()
        case "seal":
            (seal, value) = region.sealing[0]
            assert value.item() == pytest.approx(seal.tokens), "something goes up twice, or never"
            region.seal()
        case "refuse":
            sequence = max(region.outbox)
            reason = dice.choice((ev.Reason.OVERLOAD, ev.Reason.OUTLIER))
            region.handle(ev.PushAnswered(0, sequence, ev.Outcome.REFUSED, reason, region.outbox[sequence][0]))
        case "drain":
            region.handle(ev.DrainRequested(1))
            region.handle(ev.SiteLeft(1, "s", region.syncer.machine.state.sites["s"].incarnation))
            while region.commands:
                region.step()
            if dice.random() < 0.5:
                region.settle()
            region.restart()
            region.handle(ev.JoinRequested(1, "s", f"process {region.syncer.machine.state.epoch}"))
        case "do":
            region.do()
        case "do twice":
            region.orders.append(region.orders[0])
            region.do()


def _options(options: OuterOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__slots__}
