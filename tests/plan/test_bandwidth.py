"""The corners are what they must be; the published table is in test_studies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.plan.bandwidth import Exchange, Load, Model, Star, gbps_needed, star_utilisation, utilisation
from diloco.plan.studies import MODELS, SHARES, exchange_of


def test_a_blocking_exchange_of_all_at_once_costs_what_the_formula_says() -> None:
    """One layer: nothing of the exchange lies beside the backward pass, so x = H t / (H t + V / B)."""
    model, rule = Model(parameters=1e9, layers=1, step_s=1.0), Exchange(inner_steps=10)
    carry_s = 1e9 * 16 / (4 * 1e9)
    assert utilisation(model, rule, 4.0) == pytest.approx(10 / (10 + carry_s))
    assert gbps_needed(MODELS["100B"][0], Exchange(inner_steps=1, bits=1e6), 0.99) is None, "no link of the grid"


def test_every_counted_period_holds_its_wait() -> None:
    """The link starts behind the last layer's backward pass and is busy from then on; the first layer comes last, and
    the next forward pass waits for it."""
    model, rule = MODELS["10B"][0], exchange_of("diloco", 16)
    backward_s = 2 / 3 * model.step_s * (1 - 1 / model.layers)
    waits_s = model.parameters * 16 / 28.1e9 - backward_s
    found = utilisation(model, rule, 28.1)
    assert found == pytest.approx(100 * model.step_s / (100 * model.step_s + waits_s))
    assert found == pytest.approx(0.9393, abs=5e-5)


def test_a_link_that_falls_behind_for_many_periods_is_counted_by_what_it_carries() -> None:
    model = Model(parameters=1e9, layers=10, step_s=1.0)
    rule = Exchange(inner_steps=10, fragments=10, overlap_steps=9)
    assert utilisation(model, rule, 1.59) == pytest.approx(15.9 / 16)


def test_more_overlap_and_fewer_bits_never_need_a_faster_link() -> None:
    model, fragments = MODELS["10B"]
    for share in SHARES:
        needed = [
            gbps_needed(model, exchange_of(kind, fragments), share)
            for kind in ("streaming", "overlapped", "overlapped_4_bits")
        ]
        assert needed == sorted(needed, key=lambda gbps: -(gbps or 1e9))


def test_an_exchange_that_takes_no_longer_than_the_overlap_costs_nothing() -> None:
    load = Load(updates_up=4e9, versions_down=4e9)
    star = Star(inner_steps=10, step_s=1.0, fragments=2, overlap_steps=4, rtt_s=0.0)
    assert star_utilisation(star, load, 1.0, 1.0) == pytest.approx(1.0)
    late = star_utilisation(replace(star, overlap_steps=3), load, 1.0, 1.0)
    assert late == pytest.approx(10 / (10 + 2 * 1)), "each of two fragments comes a second late"


def test_a_link_that_carries_others_too_is_full_at_its_sum() -> None:
    """A site with a part of the syncer: 12 s of traffic each way in a round of 10 s, however much overlap there is."""
    star = Star(inner_steps=10, step_s=1.0, fragments=5, overlap_steps=9)
    load = Load(updates_up=6e9, updates_down=6e9, versions_up=6e9, versions_down=6e9)
    assert star_utilisation(star, load, 1.0, 1.0) == pytest.approx(10 / 12)
    assert star_utilisation(star, load, 1.3, 1.3) == pytest.approx(1.0, abs=1e-9)


def test_the_round_trip_of_one_fragment_does_not_keep_the_link_from_the_next() -> None:
    star = Star(inner_steps=10, step_s=1.0, fragments=10, overlap_steps=5, rtt_s=4.0)
    load = Load(updates_up=4e9, updates_down=4e9, versions_up=4e9, versions_down=4e9)
    assert star_utilisation(star, load, 1.0, 1.0) == pytest.approx(1.0)
