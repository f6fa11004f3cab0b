from __future__ import annotations

import pytest
import torch

from diloco.inner.precision import autocast_dtype, deterministic, has_fast_bf16, random_state, set_random_state

CPU = torch.device("cpu")


def test_auto_takes_bf16_where_it_is_fast() -> None:
    assert autocast_dtype("bf16", CPU) == torch.bfloat16
    assert autocast_dtype("fp32", CPU) is None
    assert autocast_dtype("auto", CPU) == (torch.bfloat16 if has_fast_bf16(CPU) else None)
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        autocast_dtype("fp8", CPU)


@pytest.mark.parametrize("enabled", [True, False])
def test_determinism_holds_inside_and_is_put_back(enabled: bool) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(enabled):
        assert torch.are_deterministic_algorithms_enabled() == enabled
    assert not torch.are_deterministic_algorithms_enabled()


def test_random_state_comes_back() -> None:
    before = random_state(CPU)
    first = torch.rand(5)
    set_random_state(before, CPU)
    assert torch.equal(torch.rand(5), first)
