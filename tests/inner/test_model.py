from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diloco.inner.model import (
    ComputeOptions,
    Kernels,
    KernelsError,
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
    rotate,
)
from tests.sooner import sooner


def small(**changes: object) -> ModelOptions:
    sizes: dict[str, object] = {"vocab_size": 50, "layers": 2, "dim": 16, "heads": 4, "context": 12}
    return ModelOptions(**{**sizes, **changes})  # type: ignore[arg-type]


def num_parameters(model: Transformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_demo_model_has_the_size_that_is_told() -> None:
    model = Transformer(ModelOptions())
    assert num_parameters(model) == 1_066_112
    assert flops_per_token(ModelOptions()) == 6 * (1_066_112 - 1024 * 128 - 9 * 128) + 12 * 4 * 128 * 128


def test_tied_and_grouped_models_have_fewer_parameters_and_still_run() -> None:
    plain = Transformer(small())
    tied = Transformer(small(tied=True))
    grouped = Transformer(small(kv_heads=2))
    assert num_parameters(plain) - num_parameters(tied) == 50 * 16
    assert num_parameters(plain) - num_parameters(grouped) == 2 * 2 * 16 * 8
    assert tied.head.weight is tied.embedding.weight
    for model in (plain, tied, grouped):
        assert model(torch.zeros(3, 12, dtype=torch.int64)).shape == (3, 12, 50)


def test_a_seed_gives_the_same_values_and_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = Transformer(small(), 3), Transformer(small(), 3), Transformer(small(), 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_that_of_guessing(tied: bool) -> None:
    tokens = torch.randint(0, 1024, (8, 64), generator=torch.Generator().manual_seed(1))
    model = Transformer(ModelOptions(tied=tied))
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(1024), abs=0.1)


def test_no_position_sees_a_later_token() -> None:
    model = Transformer(small(kv_heads=2), 1)
    tokens = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 50
    seen, unseen = model(tokens), model(changed)
    assert torch.equal(seen[0, :7], unseen[0, :7])
    assert not torch.allclose(seen[0, 7:], unseen[0, 7:])


def test_rotary_angles_are_rounded_as_the_fields_are() -> None:
    """By the operations of transformers' own: fp32 frequencies, times fp32 positions."""
    options = small(context=4096)
    frequency = 1.0 / (options.rope_theta ** (torch.arange(0, options.head_dim, 2).float() / options.head_dim))
    angles = (frequency[:, None] @ torch.arange(4096).float()[None, :]).T
    cosines, sines = rotary_tables(options)
    assert torch.equal(cosines, angles.cos())
    assert torch.equal(sines, angles.sin())


def test_rotary_products_depend_on_the_distance_only() -> None:
    cosines, sines = rotary_tables(small())
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 1, 1, 4, generator=generator).expand(1, 1, 12, 4) for _ in range(2))
    products = (rotate(query, cosines, sines) @ rotate(key, cosines, sines).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 5):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(products[5, 0], products[1, 0])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_written_out_attention_is_the_fused_one(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(2, 4, 9, 8, generator=generator)
    key, value = (torch.randn(2, kv_heads, 9, 8, generator=generator) for _ in range(2))
    assert torch.allclose(plain_attention(query, key, value), causal_attention(query, key, value), atol=1e-5)
    half = causal_attention(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), plain_attention(query, key, value), atol=0.05)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 1),
        ("layers", 0),
        ("dim", 0),
        ("heads", 3),
        ("heads", 16),
        ("kv_heads", 3),
        ("ffn_dim", -1),
        ("context", 0),
        ("rope_theta", 0.5),
        ("norm_eps", 0.0),
    ],
)
def test_a_wrong_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value!r}"):
        small(**{field: value})


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence length is 13"):
        Transformer(small())(torch.zeros(1, 13, dtype=torch.int64))


# --- The fused kernels against torch's own operations ----------------------------------------------------------------

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
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


def trained(kernels: Kernels, options: ModelOptions, keeps: str = "none") -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    model = Transformer(options, 3).to(DEVICE)
    prepare(model, ComputeOptions(activation_checkpoint=keeps), DEVICE)
    model.compute_by(kernels)
    tokens = torch.randint(0, options.vocab_size, (2, 5), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


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
    wanted, slopes = trained(Kernels(), options)
    loss, found = trained(liger if part == "all" else only(part, liger), options)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert found.keys() == slopes.keys()
    for name in slopes:
        assert float(slopes[name].abs().max()) > 1e-4, "nothing to compare"
        apart = float((found[name] - slopes[name]).abs().max() / slopes[name].abs().max())
        assert apart <= rounding(options), name


@pytest.mark.slow
def test_what_is_computed_again_is_the_same(liger: LigerKernels) -> None:
    """Queries and keys are turned where they lie: made again they must not have been turned before."""
    wanted, slopes = trained(liger, PLAIN)
    loss, found = trained(liger, PLAIN, "full")
    assert loss == wanted
    assert all(torch.equal(found[name], slopes[name]) for name in slopes)


def test_without_targets_and_without_gradients(liger: LigerKernels) -> None:
    plain, model = (Transformer(PLAIN, 3).to(DEVICE) for _ in range(2))
    model.compute_by(liger)
    tokens = torch.arange(8, device=DEVICE).view(2, 4)
    with torch.no_grad():
        assert torch.allclose(model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
        assert float(model(tokens, tokens)) == pytest.approx(float(plain(tokens, tokens)), rel=1e-6)


def test_on_a_cpu_they_are_refused_and_the_plain_ones_are_not() -> None:
    with pytest.raises(KernelsError, match="its kernels are for accelerators, and this is a CPU: torch"):
        prepare(Transformer(PLAIN), ComputeOptions(kernels="liger"), CPU)
    assert type(kernels_of("torch", CPU)) is Kernels


def test_where_the_library_is_not_there_it_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(KernelsError, match=r"liger-kernel is not there \(.+\): pip install 'diloco\[fused\]'"):
        kernels_of("liger", torch.device("cuda", 0))


def test_nothing_of_it_is_imported_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    prepare(Transformer(PLAIN), ComputeOptions(), CPU)  # Whatever were asked of the one there would fail.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "triton"}, "^kernels is 'triton': one of torch, liger"),
        ({"activation_checkpoint": "selective"}, "^kernels is 'liger': torch with activation_checkpoint=selective"),
        ({"compile": True}, "^kernels is 'liger': torch with compile=true"),
        ({"loss_chunk": 8}, "^kernels is 'liger': torch with loss_chunk"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ComputeOptions(**{"kernels": "liger", **options})
