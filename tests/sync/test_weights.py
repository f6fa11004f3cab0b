"""How much a site counts."""

from __future__ import annotations

import random

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import OuterOptions
from diloco.sync.rounds import normalised, of_its_age, outer_step, raw_weight, share
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, of, only, running


@pytest.mark.parametrize(("rule", "weight"), [("tokens2_per_step", 2500.0), ("tokens", 500.0), ("uniform", 1.0)])
def test_rules(rule: str, weight: float) -> None:
    assert raw_weight(rule, 500, 100) == weight


@pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (-1, 1), (1, 0)])
def test_invariant_6_a_site_without_weight_never_reaches_a_merge(tokens: int, steps: int) -> None:
    with pytest.raises(AssertionError):
        raw_weight("tokens", tokens, steps)


@pytest.mark.parametrize("rule", ["tokens2_per_step", "tokens", "uniform"])
def test_invariant_6_absent_sites_are_no_part_of_the_merge(rule: str) -> None:
    syncer = Syncer(weights=rule, grace="fixed", grace_ns=0, quorum=2)
    for site in "abc":
        syncer.join(site)
    syncer.push("a", tokens=1, steps=10**3)
    (step,) = of(fx.StartOuterStep, syncer.push("c", tokens=640))
    assert [part.site for part in step.contributions] == ["a", "c"]
    assert all(part.weight > 0 for part in step.contributions)


def test_invariant_10_weights_sum_to_one() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        weights = [draw.uniform(1e-9, 1e9) for _ in range(draw.randint(1, 64))]
        shares = normalised(weights)
        assert abs(sum(shares) - 1) < 1e-12, f"seed {seed}"
        assert all(share > 0 for share in shares), f"seed {seed}"


@pytest.mark.parametrize("rule", ["tokens2_per_step", "tokens", "uniform"])
def test_invariant_17_twice_the_tokens_everywhere_are_the_same_weights(rule: str) -> None:
    found = []
    for times in (1, 2, 3):
        syncer = Syncer(weights=rule, quorum=3)
        for site in "abc":
            syncer.join(site)
        syncer.push("a", tokens=100 * times, steps=10)
        syncer.push("b", tokens=700 * times, steps=30)
        (step,) = of(fx.StartOuterStep, syncer.push("c", tokens=50 * times, steps=50))
        found.append([part.weight for part in step.contributions])
    assert found[1] == found[0]
    assert found[2] == pytest.approx(found[0], rel=1e-12)
    assert (len(set(found[0])) == 1) == (rule == "uniform")


def test_what_is_old_counts_less_beside_what_is_new_and_as_much_alone() -> None:
    assert [of_its_age(age, 0.0) for age in (0, 3)] == [1.0, 1.0]
    assert [of_its_age(age, 0.5) for age in (0, 3)] == [1.0, 0.5]
    syncer = Syncer(weights="uniform", grace="fixed", grace_ns=0, quorum=2, staleness_power=0.5, staleness_max=8)
    for site in "abc":
        syncer.join(site)
    for version in range(3):
        syncer.push("a", sequence=version + 1, base_version=version)
        syncer.push("c", sequence=version + 1, base_version=version)
        syncer.done()
    syncer.push("a", sequence=4, base_version=3)
    (step,) = of(fx.StartOuterStep, syncer.push("b", base_version=0))
    assert [(part.site, part.weight) for part in step.contributions] == [("a", 1 / 1.5), ("b", 0.5 / 1.5)]


def test_two_updates_of_one_site_weigh_as_one() -> None:
    """Tokens and steps are added before they are weighed."""
    assert raw_weight("tokens2_per_step", 100 + 300, 10 + 10) == 8000.0


@pytest.mark.parametrize("rule", ["tokens2_per_step", "tokens", "uniform"])
def test_invariant_6_an_update_left_out_leaves_the_weights_of_a_round_in_which_it_never_came(rule: str) -> None:
    tokens = {"a": [100, 70], "b": [300], "c": [50]}

    def merge(gone: set[tuple[str, int]]) -> Syncer:
        syncer = Syncer(weights=rule, grace="fixed", grace_ns=10**9, quorum=1, updates_in_flight_max=2)
        for site in "abcd":
            syncer.join(site)
        for site, each in tokens.items():
            for sequence, count in enumerate(each, 1):
                if (site, sequence) not in gone:
                    syncer.push(site, tokens=count, steps=7, sequence=sequence)
        (step,) = of(fx.StartOuterStep, syncer.deadline())
        assert outer_step(syncer.options, syncer.machine.state, 0) == step
        return syncer

    whole = merge(set())
    for gone in ({("b", 1)}, {("a", 2)}, {("b", 1), ("c", 1)}):
        wanted = outer_step(whole.options, merge(gone).machine.state, 0)
        assert outer_step(whole.options, whole.machine.state, 0, gone) == wanted
        assert abs(sum(part.weight for part in wanted.contributions) - 1) < 1e-12
    everything = {(site, sequence) for site, each in tokens.items() for sequence in range(1, len(each) + 1)}
    assert outer_step(whole.options, whole.machine.state, 0, everything).contributions == ()


@pytest.mark.parametrize("senders", ["abc", "aab", "aaa"])
def test_19_by_update_whoever_sent_them_each_is_a_term_with_its_own_weight_and_base(senders: str) -> None:
    options = {"merge_by": "update", "updates_in_flight_max": 3, "weights": "tokens", "staleness_power": 1.0}
    syncer = running("a", "b", "c", round_updates=3, **options)
    for sequence in (1, 2, 3):
        syncer.push("c", sequence)
    syncer.done()
    sent = dict.fromkeys("abc", 0) | {"c": 3}
    for (place, site), base, tokens in zip(enumerate(senders), (1, 0, 1), (100, 400, 100), strict=True):
        sent[site] += 1
        effects = syncer.push(site, sent[site], base_version=base, tokens=tokens)
        assert bool(of(fx.StartOuterStep, effects)) == (place == 2)
    step = only(fx.StartOuterStep, effects)
    assert [part.site for part in step.contributions] == list(senders)
    assert [part.base_version for part in step.contributions] == [1, 0, 1]
    assert [part.weight for part in step.contributions] == [0.25, 0.5, 0.25]  # 400 tokens at age 1 are 200
    assert [len(part.updates) for part in step.contributions] == [1, 1, 1]


def test_19_by_update_an_update_left_out_is_a_term_less() -> None:
    syncer = running("a", "b", round_updates=3, merge_by="update", weights="uniform")
    syncer.push("a")
    syncer.push("a", 2)
    syncer.push("b")
    found = outer_step(syncer.options, syncer.machine.state, 0, {("a", 1)}).contributions
    assert [(part.site, part.updates[0].sequence, part.weight) for part in found] == [("a", 2, 0.5), ("b", 1, 0.5)]


def test_19_updates_are_no_share_of_sites() -> None:
    with pytest.raises(ValueError, match="share_weighted is True: a share is one of sites, and with merge_by=update"):
        OuterOptions(share_weighted=True, merge_by="update")


def shares(*rounds: str, **options: object) -> list[float]:
    """Of steps of the sites named by letters, out of a, b, c and d, each with an update of the usual 100 tokens."""
    syncer = running("a", "b", "c", "d", share_weighted=True, **options)
    sent = dict.fromkeys("abcd", 0)
    found = []
    for version, sites in enumerate(rounds):
        syncer.options.quorum = len(sites)
        for site in sites:
            sent[site] += 1
            effects = syncer.push(site, sent[site], base_version=version)
        found.append(only(fx.StartOuterStep, effects).share)
        syncer.done()
    return found


@pytest.mark.parametrize("rule", ["tokens2_per_step", "tokens", "uniform"])
def test_19_a_step_is_taken_by_the_share_of_the_sites_in_it(rule: str) -> None:
    assert shares("a", "b", "cd", "abcd", "abc", weights=rule) == [0.25, 0.25, 0.5, 1.0, 0.75]


def test_19_whatever_the_pattern_each_site_moves_the_model_as_far() -> None:
    """What the pseudo-gradient of a site counts, summed over a period, is what it counts in one full round."""
    tokens = {"a": 100, "b": 300, "c": 50}

    def counts(pattern: str) -> dict[str, float]:
        syncer = running("a", "b", "c", share_weighted=True)
        total = dict.fromkeys(tokens, 0.0)
        version = 0
        for turn in range(3):
            for sites in ["abc"] if turn < 2 else pattern.split():  # First all have been seen.
                syncer.options.quorum = len(sites)
                for site in sites:
                    effects = syncer.push(site, turn + 1, base_version=version, tokens=tokens[site], steps=10)
                step = only(fx.StartOuterStep, effects)
                for part in step.contributions if turn == 2 else ():
                    total[part.site] += step.share * part.weight
                version += 1
                syncer.done()
        return total

    together = counts("abc")
    assert together == pytest.approx({"a": 1e4 / 10.25e4, "b": 9e4 / 10.25e4, "c": 0.25e4 / 10.25e4})
    for pattern in ("a b c", "ab c", "b ac"):
        assert counts(pattern) == pytest.approx(together)


def test_19_who_is_away_or_held_has_no_part_in_a_full_round() -> None:
    syncer = running("a", "b", "c", share_weighted=True)
    assert only(fx.StartOuterStep, syncer.push("a")).share == pytest.approx(1 / 3)
    syncer.done()
    syncer.handle(ev.SiteSilent("c"))
    assert only(fx.StartOuterStep, syncer.push("b")).share == 0.5
    syncer.done()
    syncer.handle(ev.SiteLeft(1, "a", 1))
    assert only(fx.StartOuterStep, syncer.push("b", 2, base_version=2)).share == 1.0


def test_19_an_update_of_two_periods_is_longer_and_counts_as_one() -> None:
    syncer = running("a", "b", share_weighted=True, weights="tokens")
    for version, tokens in enumerate((100, 100, 200)):
        step = only(fx.StartOuterStep, syncer.push("a", version + 1, base_version=version, tokens=tokens))
        syncer.done()
        assert step.share == 0.5


@pytest.mark.parametrize("rule", ["tokens2_per_step", "tokens", "uniform"])
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


def test_19_a_restart_takes_the_same_share_whatever_came_meanwhile() -> None:
    syncer = running("a", "b", "c", share_weighted=True)
    first = only(fx.StartOuterStep, syncer.push("a"))
    syncer.push("b", tokens=7000)
    syncer.handle(ev.SiteSilent("c"))
    assert only(fx.StartOuterStep, syncer.restart()) == first
    again = OuterSync.restore(syncer.options, syncer.machine.snapshot())
    assert again.under_way(0) == first


def test_19_without_the_setting_each_step_is_a_whole_one() -> None:
    assert only(fx.StartOuterStep, running("a", "b", "c").push("a")).share == 1.0
    assert share(["a"], {}) == 1.0


def test_19_what_is_left_out_takes_its_share_along() -> None:
    syncer = running("a", "b", "c", "d", share_weighted=True, quorum=2, weights="uniform")
    syncer.push("a")
    assert only(fx.StartOuterStep, syncer.push("b")).share == 0.5
    assert outer_step(syncer.options, syncer.machine.state, 0, {("b", 1)}).share == 0.25
    assert outer_step(syncer.options, syncer.machine.state, 0, {("a", 1), ("b", 1)}).share == 1.0


def test_19_of_a_buffer_the_share_is_that_of_its_sites() -> None:
    syncer = running("a", "b", "c", "d", share_weighted=True, round_updates=3)
    syncer.push("a")
    syncer.push("a", 2)
    assert only(fx.StartOuterStep, syncer.push("b")).share == 0.5


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


def test_19_a_step_that_failed_leaves_what_is_usual() -> None:
    syncer = running("a", "b", share_weighted=True, weights="tokens")
    syncer.push("a", tokens=100)
    syncer.done()
    syncer.push("b", tokens=6400, base_version=1)
    syncer.handle(ev.OuterStepFailed(0, 2))
    assert only(fx.StartOuterStep, syncer.push("b", 2, tokens=100, base_version=1)).share == 0.5


def test_19_a_share_is_never_nothing() -> None:
    assert share(["a"], {"a": 1.0, "b": 1e30}) == 1e-6
