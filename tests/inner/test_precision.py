from __future__ import annotations

import pytest
import torch

from diloco.inner import precision
from diloco.inner.parallel import SiteGroup
from diloco.inner.precision import (
    autocast_dtype,
    deterministic,
    resolve_precision,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("speed", "wanted"), [(0.02, "fp32"), (1.0, "fp32"), (1.1, "fp32"), (1.9, "bf16")])
def test_auto_takes_bf16_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, speed: float, wanted: str) -> None:
    monkeypatch.setattr(precision, "bf16_speed", lambda device: speed)
    assert resolve_precision("auto", CPU) == wanted
    assert autocast_dtype("auto", CPU) == (torch.bfloat16 if wanted == "bf16" else None)
    assert autocast_dtype("bf16", CPU) == torch.bfloat16
    assert autocast_dtype("fp32", CPU) is None
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        autocast_dtype("fp8", CPU)


def test_the_ranks_of_a_site_agree_on_the_slowest_ones_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes Muon's step by itself, and all must make the same."""
    monkeypatch.setattr(precision, "bf16_speed", lambda device: 2.0)
    group = SiteGroup(device="cpu")
    assert resolve_precision("auto", CPU, group) == "bf16"
    monkeypatch.setattr(group, "all_reduce_sum", lambda values: [values[0] + 1.0])
    assert resolve_precision("auto", CPU, group) == "fp32"
    assert resolve_precision("bf16", CPU, group) == "bf16"


def test_determinism_holds_inside_and_is_put_back() -> None:
    for enabled in (True, False):
        with deterministic(enabled):
            assert torch.are_deterministic_algorithms_enabled() == enabled
        assert not torch.are_deterministic_algorithms_enabled()
