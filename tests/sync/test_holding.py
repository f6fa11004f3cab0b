"""Outliers: refused, held, or only noted; and an operator's word on them."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from diloco.sync.options import SECOND_NS, HealthOptions
from diloco.sync.rounds import OUTLIERS_REMEMBERED_MAX
from diloco.sync.state import Phase, Status
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, notes, of, only, running, through_json

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
