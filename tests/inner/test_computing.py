from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.inner.model import CompileError, ComputeOptions, ModelOptions, Transformer, prepare

OPTIONS = ModelOptions(vocab_size=257, layers=2, dim=32, heads=4, context=32)
TOKENS = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


class Watch(TorchDispatchMode):
    """What is made while it looks: the most values in one tensor, and how many products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return made


def trained(**options: Any) -> tuple[float, dict[str, torch.Tensor], Watch]:
    """Loss, gradients and what was seen of one step without its optimizer."""
    model = Transformer(OPTIONS, 3)
    prepare(model, ComputeOptions(**options), CPU)
    with Watch() as watch:
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(loss.detach()), {name: value for name, value in gradients.items() if value is not None}, watch


def assert_alike(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-7), name


def test_what_is_not_kept_is_computed_again_to_the_same_bits() -> None:
    loss, gradients, plain = trained()
    # Of a block's seven products the last is needed by nothing in its own backward pass.
    for kept, again in (("full", 2 * 6), ("selective", 0)):
        here, ours, watch = trained(activation_checkpoint=kept)
        assert here == loss
        assert all(torch.equal(ours[name], gradients[name]) for name in gradients)
        assert watch.products == plain.products + again


def test_less_is_kept_for_the_backward_pass() -> None:
    sizes = {}
    for kept in ("none", "selective", "full"):
        model = Transformer(OPTIONS, 3)
        prepare(model, ComputeOptions(activation_checkpoint=kept), CPU)
        saved: list[int] = []

        def note(tensor: torch.Tensor, into: list[int] = saved) -> torch.Tensor:
            into.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(TOKENS[:, :-1], TOKENS[:, 1:])
        sizes[kept] = sum(saved)
    # What selective keeps of a block it keeps by itself, where no hook sees it.
    assert sizes["full"] == sizes["selective"] < sizes["none"] / 2


@pytest.mark.parametrize("chunk", [1000, 48, 32])
def test_logits_in_chunks_give_the_same_loss_and_are_never_all_there(chunk: int) -> None:
    loss, gradients, plain = trained()
    assert plain.largest == 4 * 32 * 257
    here, ours, watch = trained(loss_chunk=chunk)
    assert here == pytest.approx(loss, rel=1e-6)
    assert_alike(ours, gradients)
    assert watch.largest == max(min(chunk, 4 * 32) * 257, 4 * 32 * OPTIONS.ffn_dim_used)


def test_without_targets_the_logits_are_whole_and_without_gradients_nothing_is_computed_again() -> None:
    model, plain = Transformer(OPTIONS, 3), Transformer(OPTIONS, 3)
    prepare(model, ComputeOptions(activation_checkpoint="full", loss_chunk=16), CPU)
    with torch.no_grad(), Watch() as watch:
        assert torch.equal(model(TOKENS[:, :-1]), plain(TOKENS[:, :-1]))
    assert watch.products == 2 * (2 * 7 + 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation_checkpoint": "some"}, "activation_checkpoint is 'some': one of none, full, selective"),
        ({"activation_checkpoint": "selective", "compile": True}, "activation_checkpoint is 'selective': full or none"),
        ({"loss_chunk": -1}, "loss_chunk is -1: 0"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ComputeOptions(**options)


def test_a_machine_that_cannot_compile_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(function: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*_: Any) -> None:
            raise RuntimeError("No working C++ compiler found\n  in /usr/bin")

        return fails

    monkeypatch.setattr("torch.compile", lacking)
    with pytest.raises(CompileError, match=r"does not work here on cpu: No working C\+\+ compiler found in /usr/bin"):
        prepare(Transformer(OPTIONS), ComputeOptions(compile=True), CPU)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", ["none", "full"])
def test_compiled_blocks_are_the_same_model(kept: str) -> None:
    loss, gradients, _ = trained()
    model = Transformer(OPTIONS, 3)
    prepare(model, ComputeOptions(compile=True, activation_checkpoint=kept), CPU)
    here = model(TOKENS[:, :-1], TOKENS[:, 1:])
    here.backward()
    assert float(here.detach()) == pytest.approx(loss, rel=1e-5)
    assert_alike({name: value.grad for name, value in model.named_parameters() if value.grad is not None}, gradients)
    assert model.state_dict().keys() == Transformer(OPTIONS, 3).state_dict().keys()
