"""How much a site counts."""

from __future__ import annotations

import random

import pytest

from diloco.sync import effects as fx
from diloco.sync.rounds import outer_step
from diloco.sync.weights import normalised, of_its_age, raw_weight
from tests.sync.driving import Syncer, of


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
    syncer.push("a", tokens=1, steps=10**6)
    (step,) = of(fx.StartOuterStep, syncer.push("c", tokens=10**12))
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
