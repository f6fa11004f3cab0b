from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import capture_state, first_nonfinite, gather_random, load_parameters, model_tensors, restore


def tiny(dim: int = 16, seed: int = 1, tied: bool = True) -> Transformer:
    return Transformer(ModelOptions(vocab_size=40, layers=1, dim=dim, heads=2, context=8, tied=tied), seed)


def test_tied_parameters_are_there_once_and_tables_are_not() -> None:
    model = tiny()
    named = model_tensors(model)
    assert "head.weight" not in named
    assert not any("sines" in name for name in named)
    assert sum(tensor.numel() for tensor in named.values()) == sum(each.numel() for each in model.parameters())
    assert named["embedding.weight"].data_ptr() == model.embedding.weight.data_ptr()


def test_the_first_value_that_is_not_finite_is_named() -> None:
    model = tiny()
    assert first_nonfinite(model) == ""
    with torch.no_grad():
        model.norm.weight[3] = torch.inf
    assert first_nonfinite(model) == "norm.weight"


def test_what_is_captured_is_restored_in_place_and_only_into_its_like(tmp_path: Path) -> None:
    group = SiteGroup(device="cpu")
    model = tiny()
    optimizers = build_optimizers(model, InnerOptions())
    torch.manual_seed(12)
    tensors, values = capture_state(model, optimizers)
    saved = checkpoint.save(tmp_path, "step-1", {**tensors, **gather_random(group)}, {"optimizer": values})
    wanted = torch.rand(3)

    found = checkpoint.load(saved)
    twin = tiny(seed=2)
    places = [parameter.data_ptr() for parameter in twin.parameters()]
    restore(found, twin, build_optimizers(twin, InnerOptions()), group, seed=0)
    assert [parameter.data_ptr() for parameter in twin.parameters()] == places
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(torch.rand(3), wanted)

    with pytest.raises(CheckpointError, match=r"another model: .* is \(.*\) here and \(.*\) there"):
        load_parameters(found, tiny(dim=32))
    with pytest.raises(CheckpointError, match=r"head\.weight is \(40, 16\) here and nothing there"):
        load_parameters(found, tiny(tied=False))
