"""The corners are what they must be; the published table is in test_studies."""

from __future__ import annotations

import pytest

from diloco.sim.bandwidth import Exchange, Model, gbps_needed, utilisation
from diloco.sim.studies import MODELS, SHARES, exchange_of


def test_a_link_that_carries_everything_at_once_never_holds_up_training() -> None:
    model = MODELS["1B"][0]
    assert utilisation(model, Exchange(inner_steps=1), 1e9) == pytest.approx(1.0, abs=1e-6)


def test_a_blocking_exchange_of_all_at_once_costs_what_the_formula_says() -> None:
    """One layer: nothing of the exchange lies beside the backward pass, so x = H t / (H t + V / B)."""
    model, rule = Model(parameters=1e9, layers=1, step_s=1.0), Exchange(inner_steps=10)
    carry_s = 1e9 * 16 / (4 * 1e9)
    # The last exchange is waited for by nobody: 2 of 3 periods hold one up.
    assert utilisation(model, rule, 4.0) == pytest.approx(30 / (30 + 2 * carry_s))


def test_more_overlap_and_fewer_bits_never_need_a_faster_link() -> None:
    model, fragments = MODELS["10B"]
    for share in SHARES:
        needed = [
            gbps_needed(model, exchange_of(kind, fragments), share)
            for kind in ("streaming", "overlapped", "overlapped_4_bits")
        ]
        assert needed == sorted(needed, key=lambda gbps: -(gbps or 1e9))


def test_none_where_no_link_of_the_grid_is_enough() -> None:
    assert gbps_needed(MODELS["100B"][0], Exchange(inner_steps=1, bits=1e6), 0.99) is None
