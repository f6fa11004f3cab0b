"""The published bandwidths are found again, and the corners are what they must be."""

from __future__ import annotations

from math import log

import pytest

from diloco.sim.bandwidth import GRID_GBPS, Exchange, Model, gbps_needed, utilisation

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
MODELS = {
    "1B": (Model(parameters=1e9, layers=24, step_s=0.1), 8),
    "10B": (Model(parameters=10e9, layers=48, step_s=0.8), 16),
    "100B": (Model(parameters=100e9, layers=108, step_s=4.9), 36),
}
PUBLISHED = {
    # Table 1 of arXiv 2501.18512: Gbit/s for 50, 80, 90, 95 and 99 % of the time spent training.
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16, 28.1),
    ("1B", "overlapped"): (1.4, 4.3, 6.2, 9.1, 11),
    ("1B", "four bits"): (0.4, 0.9, 1.7, 2, 3),
    ("10B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "four bits"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3, 11, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11, 19.3),
    ("100B", "overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "four bits"): (0.5, 0.9, 1.1, 1.1, 1.4),
}


def exchange(kind: str, fragments: int) -> Exchange:
    return {
        "data parallel": Exchange(inner_steps=1),
        "diloco": Exchange(inner_steps=100),
        "streaming": Exchange(inner_steps=100, fragments=fragments),
        "overlapped": Exchange(inner_steps=100, fragments=fragments, overlap_steps=1),
        "four bits": Exchange(inner_steps=100, fragments=fragments, overlap_steps=1, bits=4),
    }[kind]


def place(gbps: float) -> int:
    return min(range(len(GRID_GBPS)), key=lambda index: abs(log(GRID_GBPS[index] / gbps)))


@pytest.mark.parametrize(("name", "kind"), PUBLISHED, ids=" ".join)
def test_the_published_bandwidths_within_two_steps_of_the_grid(name: str, kind: str) -> None:
    model, fragments = MODELS[name]
    for share, published in zip(SHARES, PUBLISHED[name, kind], strict=True):
        found = gbps_needed(model, exchange(kind, fragments), share)
        assert found is not None
        assert abs(place(found) - place(published)) <= 2, (share, found, published)


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
            gbps_needed(model, exchange(kind, fragments), share) for kind in ("streaming", "overlapped", "four bits")
        ]
        assert needed == sorted(needed, key=lambda gbps: -(gbps or 1e9))


def test_none_where_no_link_of_the_grid_is_enough() -> None:
    assert gbps_needed(MODELS["100B"][0], Exchange(inner_steps=1, bits=1e6), 0.99) is None
