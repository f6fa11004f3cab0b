"""What a site has learned and not yet sent."""

from __future__ import annotations

import torch

from diloco.outer.pseudo_gradient import is_finite, pseudo_gradient


def test_with_nothing_in_flight_it_is_base_minus_local() -> None:
    base, local = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 2.5, 3.0])
    assert pseudo_gradient(base, local, []).tolist() == [0.5, -0.5, 0.0]
    assert base.tolist() == [1.0, 2.0, 3.0]


def test_what_is_in_flight_is_taken_off_in_sequence_order() -> None:
    base, local = torch.tensor([1.0]), torch.tensor([0.0])
    # 2**-24 is lost beside 1 and not beside what is left after the 1 has gone: the order can be seen in the bits.
    small, one = torch.tensor([-(2.0**-24)]), torch.tensor([1.0])
    assert pseudo_gradient(base, local, [one, small]).item() == 2.0**-24
    assert pseudo_gradient(base, local, [small, one]).item() == 0.0


def test_is_finite() -> None:
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.full((1000,), torch.finfo(torch.float32).max))  # whose sum is not finite
    for bad in (float("nan"), float("inf"), float("-inf")):
        for at in (0, 17, 999):
            values = torch.zeros(1000)
            values[at] = bad
            assert not is_finite(values), f"{bad} at {at}"
