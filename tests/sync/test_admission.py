"""Whether an update may enter: by its header, by what it claims, by what is usual, or by an operator's word."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.admission import Verdict, admit, fastest_step_ns, judge
from diloco.sync.events import Fate, Outcome, Reason
from diloco.sync.journal import to_plain
from diloco.sync.options import SECOND_NS, HealthOptions, OuterOptions
from diloco.sync.rounds import OUTLIERS_REMEMBERED_MAX
from diloco.sync.state import FragmentState, Line, OuterState, Pending, Phase, Site, Status, Vital
from diloco.sync.syncer import OuterSync
from tests.sync.driving import MS, Syncer, notes, of, only, running, through_json

REFUSED, RETRY, DUPLICATE = Outcome.REFUSED, Outcome.RETRY, Outcome.DUPLICATE
ACCEPTED = Verdict(Outcome.ACCEPTED)


def a_state(
    status: Status = Status.LIVE, phase: Phase = Phase.RUNNING, final_ns: int | None = None, *, full: bool = False
) -> OuterState:
    line = Line(5, undecided=[Pending(5, 9, 10, 1, "five", "p", "fp32")], fates=[Fate(0, 4, 9, 10, "four")])
    if full:
        line.undecided.insert(0, Pending(4, 9, 10, 1, "four", "p", "fp32"))
    sites = {"a": Site(2, "p", status, [line])}
    return OuterState([FragmentState(version=10)], now_ns=100, sites=sites, phase=phase, final_deadline_ns=final_ns)


@pytest.mark.parametrize(
    ("state", "given", "verdict"),
    [
        ({}, {}, ACCEPTED),
        ({}, {"base_version": 7}, ACCEPTED),
        ({}, {"site": "b"}, Verdict(REFUSED, Reason.NOT_JOINED)),
        ({}, {"fragment": 1}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({}, {"fragment": -1}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({}, {"incarnation": 1}, Verdict(REFUSED, Reason.FENCED)),
        ({}, {"incarnation": 3}, Verdict(REFUSED, Reason.FENCED)),
        ({}, {"sequence": 7}, Verdict(RETRY, Reason.GAP)),
        ({}, {"sequence": 3}, Verdict(REFUSED, Reason.FORGOTTEN)),
        ({}, {"sequence": 5, "digest": "five"}, Verdict(DUPLICATE)),
        ({}, {"sequence": 5, "digest": "other"}, Verdict(REFUSED, Reason.CONFLICT)),
        ({}, {"sequence": 4, "digest": "four"}, Verdict(DUPLICATE, fate=Fate(0, 4, 9, 10, "four"))),
        ({}, {"sequence": 4, "digest": "other"}, Verdict(REFUSED, Reason.CONFLICT)),
        ({}, {"sequence": 5, "digest": "five", "incarnation": 1}, Verdict(DUPLICATE)),
        ({}, {"base_version": 11}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({}, {"base_version": -1}, Verdict(REFUSED, Reason.BAD_BASE)),
        ({}, {"base_version": 6}, Verdict(REFUSED, Reason.STALE)),
        ({"status": Status.EVICTED}, {}, Verdict(REFUSED, Reason.EVICTED)),
        ({"status": Status.EVICTED}, {"sequence": 5, "digest": "five"}, Verdict(DUPLICATE)),
        ({"status": Status.LEFT}, {}, Verdict(REFUSED, Reason.FENCED)),
        ({"status": Status.SILENT}, {}, ACCEPTED),
        ({"full": True}, {}, Verdict(RETRY, Reason.OVERLOAD)),
        ({"phase": Phase.ENDED}, {}, Verdict(REFUSED, Reason.FINISHED)),
        ({"phase": Phase.ENDING, "final_ns": 101}, {}, ACCEPTED),
        ({"phase": Phase.ENDING, "final_ns": 100}, {}, Verdict(REFUSED, Reason.FINISHED)),
    ],
)
def test_invariant_15_an_update_is_judged_by_its_header_which_changes_nothing(
    state: dict[str, Any], given: dict[str, object], verdict: Verdict
) -> None:
    known = a_state(**state)
    before = to_plain(known)
    header = {"site": "a", "incarnation": 2, "fragment": 0, "sequence": 6, "base_version": 10, "digest": "six"}
    machine = OuterSync(OuterOptions(staleness_max=3), known)
    assert admit(machine, **(header | given)) == verdict  # type: ignore[arg-type]
    assert to_plain(known) == before


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"finite": False}, Reason.NON_FINITE),
        ({"intact": False}, Reason.CORRUPT),
        ({"intact": False, "finite": False}, Reason.CORRUPT),
    ],
)
def test_invariant_15_what_is_not_finite_or_not_intact_changes_nothing(facts: dict[str, bool], reason: Reason) -> None:
    syncer = running("a", "b", quorum=2)
    before = syncer.machine.snapshot()
    assert syncer.push("a", **facts) == [fx.AnswerPush(1, REFUSED, 0, reason)]
    assert syncer.machine.snapshot() == before
    syncer.push("a")
    assert only(fx.AnswerPush, syncer.push("a", **facts)).outcome is DUPLICATE, "whatever came this time"


# --- What is said of an update, and how much of it is believed -------------------------------------------------------

PERIOD_S = 10.0
USUAL = {"tokens": 1000, "steps": 10, "step_ns": 900 * MS, "norm": 1.0, "cosine": 0.5}
FAR = {"norm": 1e6}


def seasoned(*sites: str, rounds: int = 6, tokens: int = 1000, policy: str | None = None, **options: object) -> Syncer:
    """Sites that have all sent an update of ten steps in each period."""
    syncer = running(*sites, quorum=len(sites), **options)
    if policy is not None:
        syncer.handle(ev.SyncerStarted(2, HealthOptions(policy=policy, hold_ns=60 * SECOND_NS)))
    for version in range(rounds):
        for site in sites:
            claims = {**USUAL, "tokens": tokens, "base_version": version}
            syncer.push(site, version + 1, at_s=PERIOD_S * (version + 1), **claims)
        syncer.done()
    return syncer


def push(syncer: Syncer, site: str = "a", after_s: float = PERIOD_S, **claims: object) -> list[fx.OuterEffect]:
    """The site's next update, from the present version, with what is usual unless it ``claims`` something else."""
    line = syncer.machine.state.sites[site].lines[0]
    version = syncer.machine.state.fragments[0].version
    at_s = syncer.now_ns / SECOND_NS + after_s
    return syncer.push(site, line.watermark + 1, at_s=at_s, **{"base_version": version, **USUAL, **claims})


def refusal(effects: list[fx.OuterEffect]) -> Reason | None:
    """Why the update was refused; None where it was accepted."""
    answer = only(fx.AnswerPush, effects)
    assert (answer.outcome is Outcome.ACCEPTED) == (answer.reason is None)
    return answer.reason


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        # An update of more steps may be larger, but only of steps that can have been made.
        ({"steps": 10**12, "tokens": 10**14, "norm": 1e7}, Reason.IMPLAUSIBLE),
        ({"steps": 2000, "tokens": 200_000, "norm": 1e7}, Reason.IMPLAUSIBLE),
        ({"steps": 300, "tokens": 30_000, "norm": 1e7}, Reason.OUTLIER),
        # ``tokens2_per_step`` counts tokens by their square and divides by the steps.
        ({"steps": 1, "tokens": 10_000}, Reason.IMPLAUSIBLE),
        ({"tokens": 2**40}, Reason.IMPLAUSIBLE),
        ({"after_s": 3600.0, "steps": 3600, "tokens": 360_000, "norm": 300.0}, None),  # It could not send for an hour.
    ],
)
def test_no_more_is_believed_than_there_was_time_for(claims: dict[str, Any], reason: Reason | None) -> None:
    assert refusal(push(seasoned("a", "b"), **claims)) is reason


def test_time_without_a_syncer_is_time_to_train_and_an_earlier_release_kept_none() -> None:
    hour = {"steps": 3600, "tokens": 360_000, "norm": 300.0}
    syncer = seasoned("a", "b")
    syncer.handle(ev.SyncerStarted(syncer.machine.state.epoch + 1, None, 3600 * SECOND_NS))
    assert refusal(push(syncer, **hour)) is None
    syncer = seasoned("a", "b")
    for site in syncer.machine.state.sites.values():  # As such a snapshot is read.
        site.lines[0].arrivals_ns = []
    assert refusal(push(syncer, after_s=3600.0)) is None
    assert refusal(push(syncer, after_s=0.0, **hour)) is None, "it had waited behind that one"


def test_no_update_has_more_tokens_than_its_steps_can_read() -> None:
    syncer = seasoned("a", "b", token_budget=2_000_000_000)
    effects = push(syncer, tokens=17_000)
    assert refusal(effects) is Reason.IMPLAUSIBLE
    (note,) = of(fx.Note, effects)
    assert note.what == "implausible_refused"
    assert note.why == "sequence 7: tokens is 17000, and 10 steps have at most 1600 each, 16 times its first 100"
    assert syncer.machine.state.sites["a"].lines[0].updates_refused == {"implausible": 1}
    assert syncer.machine.progress_ppm() < 100
    assert refusal(push(syncer, tokens=16_000, digest="another")) is None
    syncer.join("a", process="another")
    assert refusal(push(syncer, tokens=16_000, incarnation=2)) is None, "a site may start again with other batches"
    syncer.handle(ev.SyncerStarted(2, HealthOptions(policies={"b": "admit"})))
    effects = push(syncer, "b", tokens=17_000)
    assert refusal(effects) is None, "an operator can believe a site"
    assert "outlier_admitted" in notes(effects)


@pytest.mark.parametrize(
    ("sites", "tokens", "sent", "words"),
    [
        # Where units are leased a step may have read what counts no more.
        ("ab", 20_000, [("a", 20_000 * 60), ("a", 20_000 * 65)], "at most 128000 each, 64 times the 2000 of"),
        ("ab", 1000, [("a", 655_360), ("a", 655_361)], "as at any site that others say little of"),
        ("abc", 20_000, [("a", 20_000 * 60), ("b", 20_000 * 65)], "64 times the 2000 of others"),
    ],
    ids=["by the others", "little that others have read bounds no site", "no pair raises its own bound"],
)
def test_leased_units_bound_a_site_by_the_others(
    sites: str, tokens: int, sent: list[tuple[str, int]], words: str
) -> None:
    syncer = seasoned(*sites, tokens=tokens, unit_sequences=1)
    (first, fits), (second, too_many) = sent
    assert refusal(push(syncer, first, tokens=fits)) is None
    effects = push(syncer, second, tokens=too_many)
    assert refusal(effects) is Reason.IMPLAUSIBLE
    assert words in only(fx.Note, effects).why


def test_a_newcomer_is_compared_with_the_others_and_the_first_of_a_run_with_what_is_possible() -> None:
    for tokens, reason in ((2**40, Reason.IMPLAUSIBLE), (128_001 * 10, Reason.IMPLAUSIBLE), (128_000 * 10, None)):
        syncer = seasoned("a", "b", rounds=1, tokens=20_000)
        syncer.join("c")
        assert refusal(push(syncer, "c", tokens=tokens)) is reason
    syncer = seasoned("a", "b")
    syncer.join("c")
    assert refusal(push(syncer, "c", steps=10**5, tokens=10**7)) is Reason.IMPLAUSIBLE
    for claims in ({"tokens": 2**40}, {"steps": 10**12}):
        assert refusal(push(running("a"), after_s=1.0, **claims)) is Reason.IMPLAUSIBLE
    assert refusal(push(running("a"), tokens=10 * 2**26)) is None


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


@pytest.mark.parametrize(("step_ns", "told_ns"), [(1, 900 * MS // 8), (900 * MS, 900 * MS)])
def test_no_site_makes_the_others_periods_short(step_ns: int, told_ns: int) -> None:
    """With dynamic steps a period is as many steps as the fastest site makes in its own."""
    syncer = seasoned("a", "b")
    for _ in range(30):
        push(syncer, step_ns=step_ns)
        push(syncer, "b", after_s=0.0)
        syncer.done()
    told = fastest_step_ns(syncer.machine.state)
    assert told == pytest.approx(told_ns, rel=0.01)


def test_the_fastest_site_is_one_that_is_live() -> None:
    syncer = running("a", "b", quorum=2)
    syncer.push("a", step_ns=400 * MS)
    syncer.push("b", step_ns=500 * MS)
    assert fastest_step_ns(syncer.machine.state) == 400 * MS
    syncer.handle(ev.SiteSilent("a"))
    assert fastest_step_ns(syncer.machine.state) == 500 * MS


# --- What looks like no other update, and what only looks unusual ----------------------------------------------------


def window(norm: float = 1.0, cosine: float | None = 0.5, count: int = 16) -> list[Vital]:
    """Updates of ten steps that are alike, but for a tenth."""
    cosines = [None if cosine is None else cosine + 0.1 * (index % 3 - 1) for index in range(count)]
    return [Vital(10, norm * (1 + 0.1 * (index % 3)), each) for index, each in enumerate(cosines)]


SHORT = window(count=HealthOptions().history_min - 1)
POISONED = [*window(count=7), Vital(10, 1e6, -1.0)]


@pytest.mark.parametrize(
    ("norm", "steps", "cosine", "own", "others", "flagged"),
    [
        (9.0, 10, None, window(), window(), False),
        (20.0, 10, None, window(), window(), True),
        (1e-9, 10, None, window(), window(), False),  # A small update does no harm.
        (20.0, 100, None, window(), window(), False),  # Ten times the steps may go ten times as far,
        (200.0, 100, None, window(), window(), True),  # and no further;
        (20.0, 1, None, window(), window(), True),  # fewer steps are no reason to expect less, or a last short
        (9.0, 1, None, window(), window(), False),  # update would be one.
        (100.0, 10, 0.5, window(norm=100.0), window(), False),  # It is usual for the site,
        (100.0, 10, 0.5, window(), window(norm=100.0), False),  # or for the others;
        (100.0, 10, 0.5, [], window(), True),  # a new site is held against the others,
        (100.0, 10, 0.5, window(), [], True),  # a lone site against itself.
        (1.0, 10, 0.1, window(), window(), False),
        (1.0, 10, -0.05, window(), window(), True),  # A direction is wrong when it is unusual and backwards.
        (1.0, 10, -0.2, window(cosine=0.0), window(cosine=0.0), False),
        (1e20, 10, -1.0, SHORT, SHORT, False),  # There is no history yet.
        (1.0, 10, -1.0, window(cosine=None), window(), False),
        (1.0, 10, -1.0, window(count=HealthOptions().history - 1), window(), False),
        (1e6, 10, None, POISONED, POISONED, True),  # One bad update moves what is usual but little.
    ],
)
def test_an_update_is_held_against_what_is_usual_for_its_site_and_for_the_others(
    norm: float, steps: int, cosine: float | None, own: list[Vital], others: list[Vital], flagged: bool
) -> None:
    found = judge(HealthOptions(), Vital(steps, norm, cosine), own, others)
    assert bool(found.why) == flagged, found


# --- Outliers: refused, held, or only noted; and an operator's word on them ------------------------------------------


def decide(syncer: Syncer, kind: type, site: str = "a", sequence: int = 7, fragment: int = 0) -> list[fx.OuterEffect]:
    return syncer.handle(kind(1, site, fragment, sequence))


ADMIT, WITHDRAW = ev.UpdateAdmitted, ev.UpdateWithdrawn


def test_an_outlier_is_refused_in_words_and_counted_and_is_refused_again_whatever_is_usual_then() -> None:
    """Its site has thrown it away; and what a crash or a slow stream brings once more must not be merged."""
    syncer = seasoned("a", "b", policy="refuse")
    effects = push(syncer, **FAR)
    assert (notes(effects), refusal(effects)) == (["outlier_refused"], Reason.OUTLIER)
    line = syncer.machine.state.sites["a"].lines[0]
    assert (line.watermark, line.updates_refused) == (6, {"outlier": 1})
    assert {vital.norm for vital in line.vitals} == {1.0}, "it is no part of what is usual"
    syncer.machine = OuterSync.restore(syncer.options, through_json(syncer.machine.snapshot()))
    syncer.handle(ev.SyncerStarted(3, HealthOptions(policy="admit")))
    header = ("a", 1, 0, 7, 6, syncer.update("a", 7).digest)
    verdict = admit(syncer.machine, *header)
    assert (verdict.outcome, verdict.reason) == (REFUSED, Reason.OUTLIER), "before a byte is read"
    before = syncer.machine.snapshot()
    effects = push(syncer, after_s=0, **FAR)
    assert (notes(effects), refusal(effects)) == (["outlier_again"], Reason.OUTLIER)
    assert syncer.machine.snapshot() == before
    assert refusal(push(syncer, digest="another one")) is None
    assert syncer.machine.state.sites["a"].lines[0].outliers == []


def test_what_is_remembered_of_updates_is_bounded() -> None:
    syncer = seasoned("a", "b", policy="refuse", rounds=20)
    for number in range(OUTLIERS_REMEMBERED_MAX + 3):
        push(syncer, **FAR, digest=f"d{number}")
    line = syncer.machine.state.sites["a"].lines[0]
    assert line.outliers == [f"d{number}" for number in range(3, OUTLIERS_REMEMBERED_MAX + 3)]
    assert len(line.vitals) == syncer.machine.state.health.history
    assert refusal(push(syncer, norm=0.0, cosine=-1.0)) is None, "what was not measured is not judged"


def test_a_policy_can_be_a_sites_own_and_an_outlier_that_is_admitted_is_noted() -> None:
    syncer = seasoned("a", "b", policy="refuse")
    syncer.handle(ev.SyncerStarted(3, HealthOptions(policies={"a": "admit"})))
    effects = push(syncer, **FAR)
    assert (refusal(effects), "outlier_admitted" in notes(effects)) == (None, True)
    assert refusal(push(syncer, "b", **FAR)) is Reason.OUTLIER


def test_a_held_update_is_accepted_and_no_round_waits_for_its_site() -> None:
    syncer = seasoned("a", "b", "c", policy="hold")
    effects = push(syncer, **FAR)
    assert (refusal(effects), notes(effects)) == (None, ["update_held"])
    assert syncer.machine.state.fragments[0].round is None
    assert {vital.norm for vital in syncer.machine.state.sites["a"].lines[0].vitals} == {1.0}, "it is not usual yet"
    syncer.handle(ev.SiteLeft(1, "c", 1))
    syncer.machine.options.quorum = 1
    step = only(fx.StartOuterStep, push(syncer, "b"))
    assert [(part.site, part.weight) for part in step.contributions] == [("b", 1.0)], "complete without the site"
    syncer = seasoned("a", "b", policy="hold")
    syncer.machine.options.quorum = "all"
    push(syncer, "b")
    effects = push(syncer, **FAR)
    assert notes(effects) == ["update_held", "round_shrunk", "round_closed"]
    assert "held" in of(fx.Note, effects)[1].why
    syncer = seasoned("a", "b", policy="hold")
    syncer.machine.options.quorum = "all"
    push(syncer, **FAR)
    assert of(fx.StartOuterStep, push(syncer, "b")), "a round opens without the site"


def test_an_operators_word_lets_a_held_update_in_once() -> None:
    syncer = seasoned("a", policy="hold")
    push(syncer, **FAR)
    effects = decide(syncer, ADMIT)
    assert only(fx.AnswerDone, effects).reason is None
    step = only(fx.StartOuterStep, effects)
    assert [update.sequence for update in step.contributions[0].updates] == [7]
    assert decide(syncer, ADMIT) == [fx.AnswerDone(1)], "said twice"
    assert decide(syncer, WITHDRAW) == [fx.AnswerDone(1, Reason.CONFLICT)], "too late: it is being merged"
    syncer.done()
    assert decide(syncer, ADMIT) == [fx.AnswerDone(1)]
    assert decide(syncer, WITHDRAW) == [fx.AnswerDone(1, Reason.CONFLICT)]


def test_an_operators_word_keeps_a_held_update_out_and_what_came_after_it_does_not_overtake_it() -> None:
    syncer = seasoned("a", policy="hold")
    push(syncer, **FAR)
    assert not of(fx.StartOuterStep, push(syncer))
    effects = decide(syncer, WITHDRAW)
    assert only(fx.TellFate, effects).fate.reason is Reason.WITHDRAWN
    assert only(fx.AnswerDone, effects).reason is None
    assert [update.sequence for update in only(fx.StartOuterStep, effects).contributions[0].updates] == [8]
    assert decide(syncer, WITHDRAW) == [fx.AnswerDone(1)]
    assert decide(syncer, ADMIT) == [fx.AnswerDone(1, Reason.CONFLICT)]
    for spoken_of, reason in ((("z", 5, 0), Reason.NOT_JOINED), (("a", 5, 7), Reason.BAD_BASE), (("a", 9), Reason.GAP)):
        assert decide(syncer, ADMIT, *spoken_of) == decide(syncer, WITHDRAW, *spoken_of) == [fx.AnswerDone(1, reason)]


def test_a_held_update_is_refused_when_no_operator_decides_and_when_it_is_stale() -> None:
    syncer = seasoned("a", policy="hold")
    push(syncer, **FAR)
    assert syncer.machine.next_deadline_ns() == syncer.now_ns + 60 * SECOND_NS
    assert only(fx.TellFate, syncer.deadline()).fate.reason is Reason.OUTLIER
    assert syncer.machine.next_deadline_ns() is None
    syncer = seasoned("a", "b", staleness_max=1, policy="hold")
    syncer.machine.options.quorum = 1
    push(syncer, **FAR)
    reasons = []
    for _ in range(2):
        push(syncer, "b")
        reasons += [told.fate.reason for told in of(fx.TellFate, syncer.done()) if told.site == "a"]
    assert reasons == [Reason.STALE]


@pytest.mark.parametrize("behind", [False, True])
def test_the_last_round_gives_an_operator_as_long_as_it_waits_for_sites(behind: bool) -> None:
    syncer = seasoned("a", final_wait_ns=20 * SECOND_NS, policy="hold")
    push(syncer, final=not behind, **FAR)
    if behind:  # What waited behind a held update is in the last version.
        push(syncer, after_s=0, final=True)
    syncer.handle(ev.DrainRequested(1))
    assert syncer.machine.state.phase is Phase.ENDING
    effects = syncer.deadline(syncer.now_ns / SECOND_NS + 20)
    assert only(fx.TellFate, effects).fate.reason is Reason.OUTLIER
    assert bool(of(fx.StartOuterStep, effects)) == behind
    assert of(fx.MarkFinal, syncer.done() if behind else effects)


def test_a_held_update_of_an_evicted_site_is_refused_and_a_restart_holds_on() -> None:
    syncer = seasoned("a", "b", policy="hold")
    push(syncer, **FAR)
    syncer.restart()
    assert through_json(syncer.machine.snapshot())["sites"]["a"]["lines"][0]["undecided"][0]["held"]["norm"] == 1e6
    effects = syncer.handle(ev.SiteEvicted(1, "a"))
    assert only(fx.TellFate, effects).fate.reason is Reason.EVICTED
    effects = syncer.handle(ev.SiteReadmitted(1, "a"))
    assert only(fx.AnswerDone, effects).reason is None
    assert only(fx.Note, effects).what == "site_readmitted"
    assert syncer.machine.state.sites["a"].status is Status.LEFT
    assert only(fx.AnswerJoin, syncer.join("a", "p2")).reason is None
    assert syncer.handle(ev.SiteReadmitted(1, "z")) == [fx.AnswerDone(1, Reason.NOT_JOINED)]
