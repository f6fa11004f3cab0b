from __future__ import annotations

import math

import pytest
import torch

from diloco.inner.model import (
    ModelOptions,
    Transformer,
    causal_attention,
    flops_per_token,
    next_token_loss,
    plain_attention,
    rotary_tables,
    rotate,
)


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
