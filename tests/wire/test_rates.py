from __future__ import annotations

import math

import pytest

from diloco.wire.channel import Rates


def test_a_full_bucket_passes_a_burst_and_then_its_rate() -> None:
    rates = Rates(burst_s=2.0)
    assert [rates.take("a", 1.0, 5.0, 100.0) for _ in range(10)] == [0.0] * 10
    wait_s = rates.take("a", 1.0, 5.0, 100.0)
    assert wait_s == pytest.approx(0.2, abs=0.01)
    passed = sum(rates.take("a", 1.0, 5.0, 100.0 + tick / 100) == 0.0 for tick in range(1, 1001))
    assert 49 <= passed <= 51, "ten seconds at five a second"


def test_what_is_larger_than_the_bucket_passes_and_its_debt_is_paid_off_first() -> None:
    rates = Rates(burst_s=1.0)
    assert rates.take("a", 1000.0, 10.0, 0.0) == 0.0
    assert rates.take("a", 1.0, 10.0, 0.0) == pytest.approx(99.1, abs=0.01)
    assert rates.take("a", 1.0, 10.0, 99.0) > 0
    assert rates.take("a", 1.0, 10.0, 99.2) == 0.0


def test_asking_costs_nothing_and_a_charge_is_always_taken() -> None:
    rates = Rates(burst_s=1.0)
    assert [rates.take("a", 0.0, 10.0, 0.0) for _ in range(5)] == [0.0] * 5
    for _ in range(3):
        rates.take("a", 10.0, 10.0, 0.0, math.inf)
    assert rates.take("a", 0.0, 10.0, 0.0) == pytest.approx(2.0, abs=0.01)
    assert rates.take("b", 0.0, 10.0, 0.0) == 0.0


def test_a_rate_below_one_passes_one_and_no_second_counts_twice() -> None:
    rates = Rates(burst_s=1.0)
    assert rates.take("a", 2.0, 0.1, 50.0) == 0.0
    assert rates.take("a", 1.0, 0.1, 40.0) == pytest.approx(20.0, abs=0.1)
    assert rates.take("a", 1.0, 0.1, 69.9) > 0
    assert rates.take("a", 1.0, 0.1, 70.1) == 0.0


def test_callers_are_remembered_up_to_a_bound() -> None:
    rates = Rates(burst_s=1.0, callers_max=3)
    for number in range(100):
        rates.take(f"caller {number}", 100.0, 1.0, 0.0)
    assert rates.take("caller 99", 1.0, 1.0, 0.0) > 0
    assert rates.take("caller 0", 1.0, 1.0, 0.0) == 0.0
    assert len(rates._buckets) == 3


def test_what_is_reserved_comes_due_one_after_the_other_up_to_a_bound() -> None:
    rates = Rates(burst_s=1.0)
    waits = [rates.take("a", 1.0, 2.0, 7.0, 1.0) for _ in range(6)]
    assert waits[:4] == [0.0, 0.0, pytest.approx(0.5), pytest.approx(1.0)]
    assert waits[4:] == [pytest.approx(1.5)] * 2
    assert rates.take("a", 1.0, 2.0, 7.5, 1.0) == pytest.approx(1.0), "what was not taken is not owed"
