"""Rounds: who is waited for and how long, how much a site counts, and the values that a run arrives at."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS, OuterOptions
from diloco.sync.rounds import (
    Selection,
    grace_ns,
    of_its_age,
    parse_selection,
    raw_weight,
    share,
    standing,
    standstill,
)
from diloco.sync.state import Status
from tests.sync.driving import MS, Syncer, of, only, running


@pytest.mark.parametrize("gone", [ev.SiteSilent("b"), ev.SiteLeft(1, "b", 1), ev.SiteEvicted(1, "b")])
def test_round_opened_in_a_merge_shrinks_when_a_member_is_gone(gone: ev.OuterEvent) -> None:
    syncer = running("a", "b", "c", quorum="all", staleness_max=1)
    for version in range(2):
        for site in "abc":
            syncer.push(site, version + 1, base_version=version)
        if version == 0:
            syncer.done()
    syncer.push("b", 3, base_version=0)  # During the merge to version 2, in time for it, too late for the next one.
    syncer.push("c", 3, base_version=1)
    syncer.handle(gone)
    syncer.done()
    syncer.push("a", 3, base_version=2)
    state = syncer.machine.state
    assert state.fragments[0].merging_since_ns is not None, "the round waits for a site that is gone"
    assert state.sites["b"].status is not Status.LIVE


def test_a_process_with_a_smaller_staleness_bound_judges_again_but_for_a_merge_under_way() -> None:
    syncer = running("a", staleness_max=2)
    syncer.push("a")
    syncer.done()
    syncer.push("a", 2, base_version=0)
    syncer.push("a", 3, base_version=0)
    effects = syncer.restart(staleness_max=0)
    assert of(fx.StartOuterStep, effects)
    refused = only(fx.TellFate, effects).fate
    assert (refused.sequence, refused.reason) == (3, ev.Reason.STALE)
    assert only(fx.TellFate, syncer.done()).fate.merged


def test_invariant_14_grace_that_ended_during_a_merge_is_not_begun_again() -> None:
    syncer = running("a", "b", grace_ns=SECOND_NS)
    syncer.push("a", at_s=0)
    syncer.deadline(1)
    syncer.push("a", 2, at_s=2)
    assert syncer.machine.next_deadline_ns() == 3 * SECOND_NS
    assert not syncer.deadline(3), "the merge of the round before is still under way"
    assert syncer.machine.next_deadline_ns() is None
    assert of(fx.StartOuterStep, syncer.done(at_s=9))


@pytest.mark.parametrize(("step_s", "grace_s"), [(0.1, 0.9), (1000, 1.8)])
def test_the_first_round_waits_no_longer_than_since_its_site_joined(step_s: float, grace_s: float) -> None:
    syncer = running("a", "b", grace="adaptive", grace_ns=0, grace_period_percent=90)
    syncer.push("a", at_s=2, steps=10, step_ns=round(step_s * SECOND_NS))
    assert syncer.machine.next_deadline_ns() == round((2 + grace_s) * SECOND_NS)


def test_grace_is_not_made_longer_by_a_slow_site_that_has_left() -> None:
    syncer = running("a", "b", grace="adaptive", grace_ns=10 * SECOND_NS, overlap_steps=3, quorum=1)
    syncer.push("b", at_s=1, step_ns=5 * SECOND_NS)
    syncer.deadline()
    syncer.done()
    syncer.handle(ev.SiteLeft(2, "b", 1))
    syncer.join("c")
    syncer.push("a", base_version=1, at_s=20)
    assert syncer.machine.next_deadline_ns() == round(20.24 * SECOND_NS), "80 % of three steps of .1 s"


def stands(syncer: Syncer, at_s: float) -> dict[str, object] | None:
    return standstill(syncer.machine, round(at_s * SECOND_NS))


def test_a_round_that_waits_for_sites_for_several_periods_says_for_which() -> None:
    syncer = running("a", "b", "c", quorum="all", site_timeout_ns=15 * SECOND_NS)
    syncer.push("a", at_s=1)
    syncer.push("c", at_s=2)
    assert stands(syncer, 15.9) is None, "a site that is gone is waited for as long"
    found = {"fragment": 0, "seconds": 15.0, "waits_for": ["b"], "why": "waiting for b of all 3 members"}
    assert stands(syncer, 16) == found
    syncer.push("b", at_s=20)
    assert stands(syncer, 90) is None, "it is merged now"


def test_no_round_stands_still_for_a_slow_site_within_its_periods_which_it_cannot_make_long_by_its_word() -> None:
    syncer = running("a", "b", quorum="all")
    for site in "ab":
        syncer.push(site, steps=100, step_ns=SECOND_NS, at_s=100)
    syncer.done()
    syncer.push("a", 2, base_version=1, steps=10, step_ns=SECOND_NS, at_s=110)
    assert stands(syncer, 110 + 299) is None
    assert stands(syncer, 110 + 300) is not None
    syncer = running("a", "b", quorum="all", site_timeout_ns=15 * SECOND_NS)
    syncer.push("a", step_ns=10**6 * SECOND_NS, at_s=10)
    assert stands(syncer, 10 + 29) is None
    assert stands(syncer, 10 + 30) is not None, "three times the ten seconds that its first update took"


def test_a_quorum_that_is_not_there_is_said_and_the_last_round_is_none_that_waits() -> None:
    syncer = running("a", "b", quorum=3)
    syncer.push("a", at_s=0)
    found = stands(syncer, 60)
    assert found is not None
    assert (found["waits_for"], found["why"]) == (["b"], "1 of quorum=3 sites arrived; waiting for b")
    syncer.push("b", at_s=60)
    found = stands(syncer, 61)
    assert found is not None
    assert (found["waits_for"], found["why"]) == ([], "2 of quorum=3 sites arrived; no other site is live")
    syncer.handle(ev.DrainRequested(1), 62)
    assert stands(syncer, 63) is None


# --- Quorum and grace, as functions ----------------------------------------------------------------------------------


ALL, TWO, BUFFER = {"quorum": "all"}, {"quorum": "all", "quorum_min": 2}, {"round_updates": 3}


@pytest.mark.parametrize(
    ("options", "members", "live", "arrived", "waiting", "met", "complete", "why"),
    [
        ({}, "ab", "ab", "", 0, False, False, ""),
        ({}, "ab", "ab", "a", 1, True, False, ""),
        ({}, "ab", "ab", "ab", 2, True, True, ""),
        ({"quorum": 2}, "abc", "abc", "a", 1, False, False, "1 of quorum=2 sites arrived"),
        ({"quorum": 2}, "a", "a", "ab", 2, True, True, ""),  # b arrived and died: its update counts.
        (ALL, "ab", "ab", "a", 1, False, False, "b"),
        (ALL, "ab", "ab", "ab", 2, True, True, ""),
        (ALL, "ab", "abc", "ab", 2, True, False, ""),  # c joined since: it is no member, but grace waits for it.
        (ALL, "ab", "abc", "ac", 2, False, False, ""),
        (TWO, "a", "a", "a", 1, False, False, "quorum_min=2"),
        # A buffer counts updates and waits for no more than can come.
        (BUFFER, "abc", "abc", "ab", 2, False, False, ""),
        (BUFFER, "abc", "abc", "ab", 3, True, True, ""),
        (BUFFER, "abc", "a", "ab", 2, True, True, ""),
        (BUFFER, "abc", "", "ab", 2, True, True, ""),
    ],
)
def test_standing(
    options: dict[str, Any], members: str, live: str, arrived: str, waiting: int, met: bool, complete: bool, why: str
) -> None:
    found = standing(OuterOptions(**options), list(members), set(live), set(arrived), waiting)
    assert (found.met, found.complete) == (met, complete), found.why()
    assert why in found.why()


@pytest.mark.parametrize(
    ("options", "step_ms", "quorum_ms", "sync_ms", "period_ms", "grace"),
    [
        ({"grace": "fixed", "grace_ns": 7, "grace_period_percent": 90}, 10**6, 10**6, 10**6, 300, 7),
        # Decoupled DiLoCo (arXiv 2604.21428): slack = τ·ξ_step − (ξ_quorum + ξ_sync); here half of it, of three steps.
        ({}, 100, 40, 60, 0, 100 * MS),
        ({}, 100, 200, 100 - 3e-6, 0, 1),
        ({}, 100, 200, 100, 0, 0),
        ({}, 10**6, 0, 0, 0, 10 * SECOND_NS),  # Invariant 14: its bound.
        ({"grace_period_percent": 90}, 10, 40, 0, 300, 270 * MS),  # No slack, and a period of 300 ms.
        ({"grace_period_percent": 90}, 500, 0, 0, 300, 750 * MS),  # The slack lasts longer.
        ({"grace_period_percent": 90}, 10, 0, 0, 100_000, 90 * SECOND_NS),  # The bound of a period is the period.
    ],
)
def test_19_grace_is_a_share_of_the_slack_and_no_less_than_its_share_of_a_period(
    options: dict[str, object], step_ms: int, quorum_ms: int, sync_ms: float, period_ms: int, grace: int
) -> None:
    adaptive = {"grace": "adaptive", "grace_ns": 10 * SECOND_NS, "grace_share_percent": 50, "overlap_steps": 3}
    found = OuterOptions(**(adaptive | options))
    assert grace_ns(found, step_ms * MS, quorum_ms * MS, round(sync_ms * MS), period_ms * MS) == grace


# --- How much a site counts ------------------------------------------------------------------------------------------


RULES = pytest.mark.parametrize("rule", ["tokens2_per_step", "tokens", "uniform"])


@pytest.mark.parametrize(("rule", "weight"), [("tokens2_per_step", 2500.0), ("tokens", 500.0), ("uniform", 1.0)])
def test_a_weight_is_of_its_rule_and_less_for_what_is_old(rule: str, weight: float) -> None:
    assert raw_weight(rule, 500, 100) == weight
    assert [of_its_age(age, 0.0) for age in (0, 3)] == [1.0, 1.0]
    assert [of_its_age(age, 0.5) for age in (0, 3)] == [1.0, 0.5], "what is old counts less"


@RULES
def test_invariants_6_and_17_weights_are_of_the_sites_that_came_whatever_the_scale(rule: str) -> None:
    found = []
    for times in (1, 2, 3):
        syncer = running(*"abcd", weights=rule, quorum=3)
        syncer.push("a", tokens=100 * times, steps=10)
        syncer.push("b", tokens=700 * times, steps=30)
        step = only(fx.StartOuterStep, syncer.push("d", tokens=50 * times, steps=50))
        assert [part.site for part in step.contributions] == ["a", "b", "d"]
        found.append([part.weight for part in step.contributions])
    assert found[1] == found[0]
    assert found[2] == pytest.approx(found[0], rel=1e-12)
    assert (len(set(found[0])) == 1) == (rule == "uniform")


@RULES
def test_invariant_6_an_update_left_out_leaves_the_weights_of_a_round_in_which_it_never_came(rule: str) -> None:
    tokens = {"a": [100, 70], "b": [300], "c": [50]}

    def merge(gone: set[tuple[str, int]]) -> Syncer:
        syncer = running(*"abcd", weights=rule, grace_ns=10**9)
        for site, each in tokens.items():
            for sequence, count in enumerate(each, 1):
                if (site, sequence) not in gone:
                    syncer.push(site, tokens=count, steps=7, sequence=sequence)
        (step,) = of(fx.StartOuterStep, syncer.deadline())
        assert syncer.machine.under_way(0) == step
        return syncer

    whole = merge(set())
    for gone in ({("b", 1)}, {("a", 2)}, {("b", 1), ("c", 1)}):
        wanted = merge(gone).machine.under_way(0)
        assert whole.machine.under_way(0, gone) == wanted
        assert abs(sum(part.weight for part in wanted.contributions) - 1) < 1e-12
    everything = {(site, sequence) for site, each in tokens.items() for sequence in range(1, len(each) + 1)}
    assert whole.machine.under_way(0, everything).contributions == ()


def test_19_by_update_an_update_left_out_is_a_term_less() -> None:
    syncer = running("a", "b", round_updates=3, merge_by="update", weights="uniform")
    syncer.push("a")
    syncer.push("a", 2)
    syncer.push("b")
    found = syncer.machine.under_way(0, {("a", 1)}).contributions
    assert [(part.site, part.updates[0].sequence, part.weight) for part in found] == [("a", 2, 0.5), ("b", 1, 0.5)]


# --- The share of a full round that a step makes up ------------------------------------------------------------------


@RULES
@pytest.mark.parametrize("tokens", [50, 100, 300])
def test_19_an_update_counts_the_same_whoever_comes_with_it(rule: str, tokens: int) -> None:
    """Long, short or usual: by its share it moves the model as far alone as in a round of all."""
    found = []
    for groups in (("a", "b", "c"), ("ab", "c"), ("a", "bc"), ("abc",)):
        syncer = running("a", "b", "c", share_weighted=True, weights=rule, quorum=3)
        usual = {"a": 100, "b": 100, "c": 200}
        for site in "abc":
            syncer.push(site, tokens=usual[site])
        syncer.done()
        counts = {}
        for group in groups:
            version = syncer.machine.state.fragments[0].version
            syncer.restart(quorum=len(group))
            for site in group:
                sent = {"tokens": tokens, "steps": tokens // 10} if site == "a" else {"tokens": usual[site]}
                effects = syncer.push(site, 2, base_version=version, **sent)
            step = only(fx.StartOuterStep, effects)
            counts |= {part.site: step.share * part.weight for part in step.contributions}
            syncer.done()
        found.append(counts)
    assert [counts["a"] for counts in found] == pytest.approx([found[0]["a"]] * 4, rel=1e-12)
    if tokens == 100:
        assert all(counts == pytest.approx(found[-1], rel=1e-12) for counts in found), found


def test_19_a_newcomer_counts_no_more_than_the_largest_of_the_others() -> None:
    """Its first update is all that is known of it, and its own word."""
    syncer = running("a", "b", share_weighted=True, weights="tokens", quorum=2)
    for site in "ab":
        syncer.push(site, tokens=100)
    syncer.done()
    syncer.join("c")
    syncer.restart(quorum=3)
    for site in "ab":
        syncer.push(site, 2, base_version=1, tokens=100)
    step = only(fx.StartOuterStep, syncer.push("c", base_version=1, tokens=6400))
    assert [part.weight for part in step.contributions] == pytest.approx([1 / 3] * 3)


def test_19_a_share_is_one_without_the_setting_never_nothing_and_less_by_what_is_left_out() -> None:
    assert only(fx.StartOuterStep, running("a", "b", "c").push("a")).share == 1.0
    assert share(["a"], {"a": 1.0, "b": 1e30}) == 1e-6
    syncer = running("a", "b", "c", "d", share_weighted=True, round_updates=3, weights="uniform")
    syncer.push("a")
    syncer.push("a", 2)
    assert only(fx.StartOuterStep, syncer.push("b")).share == 0.5, "of a buffer it is that of its sites"
    left_out = [{("b", 1)}, {("a", 1)}, {("a", 1), ("a", 2), ("b", 1)}]
    found = [syncer.machine.under_way(0, gone).share for gone in left_out]
    assert found == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("claim", [300, 1600])
def test_19_no_update_says_what_it_counts_itself(claim: int) -> None:
    """A site that was cut off sends several periods at once, or claims so: two equal sites stay about equal."""
    syncer = running("a", "b", share_weighted=True, weights="tokens")
    found = []
    for turn, tokens in enumerate((100, 100, claim, 100, 100)):
        for site, count in (("a", tokens), ("b", 100)):
            step = only(fx.StartOuterStep, syncer.push(site, turn + 1, base_version=2 * turn, tokens=count))
            syncer.done()
            found.append(step.share)
    assert found[:5] == [0.5] * 5, "the long update counts as its site's usual one"
    assert all(0.39 < each < 0.61 for each in found), "and moves what is usual by half a sample"


# --- Selections ------------------------------------------------------------------------------------------------------


def test_a_selection_takes_versions_or_sequences_of_one_site_perhaps_of_one_fragment() -> None:
    found = parse_selection("site=b:versions=17..19")
    assert (found, str(found)) == (Selection("b", "versions", 17, 19), "site=b:versions=17..19")
    assert [version for version in range(15, 22) if found.takes("b", 3, 99, version)] == [17, 18, 19]
    assert not found.takes("a", 3, 99, 18)
    found = parse_selection("fragment=2:site=site-b:sequences=4")
    assert found == Selection("site-b", "sequences", 4, 4, 2)
    assert found.takes("site-b", 2, 4, 1000)
    assert not found.takes("site-b", 1, 4, 1000)
    assert not found.takes("site-b", 2, 5, 4), "a version is no sequence"
    assert parse_selection(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has ''"),
        ("site=b", "selects nothing"),
        ("versions=1..2", "selects nothing"),
        ("site=b:versions=1:sequences=2", "selects nothing"),
        ("site=b:site=c:versions=1", "says site twice"),
        ("site=b:version=1", "has 'version=1'"),
        ("site=b:versions=", "has 'versions='"),
        ("site=b:versions=3..1", "the first is not above the last"),
        ("site=b:versions=0", "from 1 on"),
        ("site=b:versions=x..y", "versions=x: a whole number"),
        ("site=b:versions=1:fragment=-1", "fragment=-1: a whole number"),
        ("site=b:versions=٣", "a whole number"),
    ],
)
def test_nonsense_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^'") as caught:
        parse_selection(text)
    assert said in str(caught.value), caught.value
