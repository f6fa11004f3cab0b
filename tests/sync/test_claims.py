"""What is said of an update, and how much of it is believed."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome, Reason
from diloco.sync.options import SECOND_NS, HealthOptions
from tests.sync.driving import MS, Syncer, notes, only, running

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
