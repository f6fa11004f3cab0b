from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.inner.model import (
    ComputeOptions,
    Kernels,
    LigerKernels,
    ModelOptions,
    Transformer,
    causal_attention,
    flops_per_token,
    kernels_of,
    next_token_loss,
    plain_attention,
    prepare,
    rotary_tables,
)
from tests.sooner import sooner

OPTIONS = ModelOptions(vocab_size=257, layers=2, dim=32, heads=4, context=32)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SEQUENCES = 2


def small(**changes: Any) -> ModelOptions:
    return ModelOptions(**{"vocab_size": 50, "layers": 2, "dim": 16, "heads": 4, "context": 12, **changes})


def drawn(options: ModelOptions) -> torch.Tensor:
    """Sequences as long as the context, and one token more."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, options.vocab_size, (SEQUENCES, options.context + 1), generator=generator)


def trained(
    options: ModelOptions = OPTIONS,
    kernels: Kernels | None = None,
    watch: TorchDispatchMode | None = None,
    **compute: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step without its optimizer."""
    model = Transformer(options, 3).to(DEVICE)
    prepare(model, ComputeOptions(**compute), DEVICE)
    if kernels is not None:
        model.kernels = kernels
    tokens = drawn(options).to(DEVICE)
    with watch or contextlib.nullcontext():
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    assert model.state_dict().keys() == Transformer(options, 3).state_dict().keys()
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_alike(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-7), name


def test_the_demo_model_has_the_size_that_is_told() -> None:
    assert sum(parameter.numel() for parameter in Transformer(ModelOptions()).parameters()) == 1_066_112
    assert flops_per_token(ModelOptions()) == 6 * (1_066_112 - 1024 * 128 - 9 * 128) + 12 * 4 * 128 * 128


def test_a_seed_gives_the_same_values_and_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = Transformer(small(), 3), Transformer(small(), 3), Transformer(small(), 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_the_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(0, 1024, (8, 64), generator=torch.Generator().manual_seed(1))
    for tied in (False, True):
        model = Transformer(ModelOptions(tied=tied))
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        assert loss.item() == pytest.approx(math.log(1024), abs=0.1)
    with pytest.raises(ValueError, match="sequence length is 13"):
        Transformer(small())(torch.zeros(1, 13, dtype=torch.int64))


def test_rotary_angles_are_rounded_as_the_fields_are() -> None:
    """By the operations of transformers' own: fp32 frequencies, times fp32 positions."""
    options = small(heads=1, context=4096)
    frequency = 1.0 / (options.rope_theta ** (torch.arange(0, options.head_dim, 2).float() / options.head_dim))
    angles = (frequency[:, None] @ torch.arange(4096).float()[None, :]).T
    cosines, sines = rotary_tables(options)
    assert torch.equal(cosines, angles.cos())
    assert torch.equal(sines, angles.sin())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_written_out_attention_is_the_fused_one(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(3, 4, 9, 8, generator=generator)
    key, value = (torch.randn(3, kv_heads, 9, 8, generator=generator) for _ in range(2))
    assert torch.allclose(plain_attention(query, key, value), causal_attention(query, key, value), atol=1e-5)
    half = causal_attention(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), plain_attention(query, key, value), atol=0.05)


# --- How it is computed -----------------------------------------------------------------------------------------------


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


def test_what_is_not_kept_is_computed_again_to_the_same_bits() -> None:
    plain = Watch()
    loss, gradients = trained(watch=plain)
    # Of a block's seven products the last is needed by nothing in its own backward pass.
    for kept, again in (("full", 2 * 6), ("selective", 0)):
        watch = Watch()
        here, ours = trained(watch=watch, activation_checkpoint=kept)
        assert here == loss
        assert all(torch.equal(ours[name], gradients[name]) for name in gradients)
        assert watch.products == plain.products + again


def test_less_is_kept_for_the_backward_pass() -> None:
    sizes, tokens = {}, drawn(OPTIONS)
    for kept in ("none", "selective", "full"):
        model = Transformer(OPTIONS, 3)
        prepare(model, ComputeOptions(activation_checkpoint=kept), CPU)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each, to=saved: to.append(each) or each, lambda each: each
        ):
            model(tokens[:, :-1], tokens[:, 1:])
        sizes[kept] = sum(each.numel() for each in saved)
    # What selective keeps of a block it keeps by itself, where no hook sees it.
    assert sizes["full"] == sizes["selective"] < sizes["none"] / 2


@pytest.mark.parametrize("chunk", [1000, 48, 32])
def test_logits_in_chunks_give_the_same_loss_and_are_never_all_there(chunk: int) -> None:
    plain, watch = Watch(), Watch()
    loss, gradients = trained(watch=plain)
    assert plain.largest == SEQUENCES * 32 * 257
    here, ours = trained(watch=watch, loss_chunk=chunk)
    assert here == pytest.approx(loss, rel=1e-6)
    assert_alike(ours, gradients)
    assert watch.largest == max(min(chunk, SEQUENCES * 32) * 257, SEQUENCES * 32 * OPTIONS.ffn_dim_used)


def test_without_targets_the_logits_are_whole_and_without_gradients_nothing_is_computed_again() -> None:
    model, plain, tokens = Transformer(OPTIONS, 3), Transformer(OPTIONS, 3), drawn(OPTIONS)[:, 1:]
    prepare(model, ComputeOptions(activation_checkpoint="full", loss_chunk=16), CPU)
    with torch.no_grad(), Watch() as watch:
        assert torch.equal(model(tokens), plain(tokens))
    assert watch.products == 2 * (2 * 7 + 1)


def test_a_machine_that_cannot_compile_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(function: Callable[..., Any]) -> None:
        raise RuntimeError("No working C++ compiler found\n  in /usr/bin")

    monkeypatch.setattr("torch.compile", lacking)
    words = r"^compile is true: torch\.compile does not work here on cpu: No working C\+\+ compiler found in /usr/bin"
    with pytest.raises(ValueError, match=words):
        prepare(Transformer(OPTIONS), ComputeOptions(compile=True), CPU)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", ["none", "full"])
def test_compiled_blocks_are_the_same_model(kept: str) -> None:
    loss, gradients = trained()
    here, ours = trained(compile=True, activation_checkpoint=kept)
    assert here == pytest.approx(loss, rel=1e-5)
    assert_alike(ours, gradients)


# --- The fused kernels against torch's own operations -----------------------------------------------------------------


PLAIN = ModelOptions(vocab_size=97, layers=2, dim=24, heads=4, kv_heads=2, context=4)
TIED = ModelOptions(vocab_size=61, layers=1, dim=32, heads=2, context=4, tied=True)
PARTS = ("normalised", "rotated", "gated", "fused_loss")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> LigerKernels:
    """Theirs; where Triton interprets them, with two things that its interpreter does not do as its compiler."""
    if DEVICE.type == "cpu":
        import triton.language as tl
        from liger_kernel.ops import rms_norm
        from triton.runtime import interpreter

        convert: Any = interpreter._implicit_cvt

        def as_compiled(told: object) -> object:
            """A kernel gets numbers in fp32, and has a method of theirs called; the interpreter gives it Python's."""
            if not isinstance(told, float):
                return convert(told)
            return tl.tensor(interpreter.TensorHandle(np.array([told], dtype=np.float32), tl.float32), tl.float32)

        monkeypatch.setattr(interpreter, "_implicit_cvt", as_compiled)
        # One of an accelerator's own library, which the interpreter has not.
        monkeypatch.setattr(rms_norm, "rsqrt", lambda value: tl.math.rsqrt(value))
    return LigerKernels()


def only(part: str, liger: LigerKernels) -> Kernels:
    mixed = Kernels()
    setattr(mixed, part, getattr(liger, part))
    return mixed


def rounding(options: ModelOptions) -> float:
    """Bound how far apart a gradient is when fp32 sums it in another order, as a share of its largest value.

    A gradient ends a chain of sums, each of at most n terms (the vocabulary, the widest layer): nine of them in a block
    (two norms, projections, scores, softmax, mixing, output, gate and up, down), each of which the backward pass makes
    twice more, and those of embedding, norm, head and loss.  A rounding is at most u = 2^-24 of what was summed so far,
    and of either sign, so that a chain's errors add up as sqrt(chain * n) * u.  Both results have them: sqrt(2) more;
    and of some thousand values the worst lies within five of these.  Not relative to each value: in a norm's gradient
    terms of the same size cancel.
    """
    chain = 27 * options.layers + 6
    terms = max(options.vocab_size, options.ffn_dim_used, options.dim)
    return 5 * math.sqrt(2 * chain * terms) * 2.0**-24


@pytest.mark.parametrize("options", [PLAIN, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("part", sooner([*PARTS, "all"], "all"))
def test_values_and_gradients_are_torchs(liger: LigerKernels, part: str, options: ModelOptions) -> None:
    wanted, slopes = trained(options)
    loss, found = trained(options, liger if part == "all" else only(part, liger))
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert found.keys() == slopes.keys()
    for name in slopes:
        assert float(slopes[name].abs().max()) > 1e-4, "nothing to compare"
        apart = float((found[name] - slopes[name]).abs().max() / slopes[name].abs().max())
        assert apart <= rounding(options), name


@pytest.mark.slow
def test_what_is_computed_again_is_the_same(liger: LigerKernels) -> None:
    """Queries and keys are turned where they lie: made again they must not have been turned before."""
    wanted, slopes = trained(PLAIN, liger)
    loss, found = trained(PLAIN, liger, activation_checkpoint="full")
    assert loss == wanted
    assert all(torch.equal(found[name], slopes[name]) for name in slopes)


def test_without_targets_and_without_gradients(liger: LigerKernels) -> None:
    plain, model = (Transformer(PLAIN, 3).to(DEVICE) for _ in range(2))
    model.kernels = liger
    tokens = torch.arange(8, device=DEVICE).view(2, 4)
    with torch.no_grad():
        assert torch.allclose(model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
        assert float(model(tokens, tokens)) == pytest.approx(float(plain(tokens, tokens)), rel=1e-6)


def test_a_model_is_computed_by_the_kernels_that_were_asked_for(
    liger: LigerKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.inner.model.kernels_of", lambda kind, device: {"liger": liger}[kind])
    model = Transformer(PLAIN)
    prepare(model, ComputeOptions(kernels="liger"), DEVICE)
    assert model.kernels is liger


def test_it_is_refused_on_a_cpu_and_where_it_is_not_there_and_not_imported_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"^kernels is 'liger': its kernels are for accelerators, and this is a CPU: "):
        prepare(Transformer(PLAIN), ComputeOptions(kernels="liger"), CPU)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    words = r"^kernels is 'liger': liger-kernel is not installed \(.+\): pip install 'diloco\[fused\]'"
    with pytest.raises(ValueError, match=words):
        kernels_of("liger", torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    prepare(Transformer(PLAIN), ComputeOptions(), CPU)  # Whatever were asked of the one there would fail.
    assert type(kernels_of("torch", CPU)) is Kernels
