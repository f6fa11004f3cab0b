"""The mapping itself; whether ``transformers`` reads it is asked in tests/config/test_model_files_transformers.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diloco.inner.llama import config_of, difference, from_llama, names, options_of, to_llama
from diloco.inner.model import ModelOptions, Transformer

SMALL: dict[str, Any] = {"vocab_size": 40, "layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "context": 24}


def small(**other: Any) -> Transformer:
    model = Transformer(ModelOptions(**{**SMALL, **other}), seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return model


def written_out(values: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> Tensor:
    """A Llama by the field's names and fields, as its papers and configuration define it, nothing shared with ours."""
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    batch, length = tokens.shape
    frequency = 1.0 / config["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return values[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]))

    def turned(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
        return x * angles.cos() + half * angles.sin()

    x = values["model.embed_tokens.weight"][tokens]
    future = torch.full((length, length), -torch.inf).triu(1)
    for index in range(config["num_hidden_layers"]):
        own = f"model.layers.{index}."
        y = norm(x, f"{own}input_layernorm.weight")
        q, k, v = (
            (y @ values[f"{own}self_attn.{which}_proj.weight"].T).view(batch, length, -1, width).transpose(1, 2)
            for which in "qkv"
        )
        k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (turned(k), v))
        weights = torch.softmax(turned(q) @ k.transpose(-1, -2) / width**0.5 + future, dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + mixed @ values[f"{own}self_attn.o_proj.weight"].T
        y = norm(x, f"{own}post_attention_layernorm.weight")
        gate, up, down = (values[f"{own}mlp.{which}_proj.weight"] for which in ("gate", "up", "down"))
        x = x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ values[head].T


@pytest.mark.parametrize("other", [{}, {"tied": True, "kv_heads": 0}, {"rope_theta": 5e5, "norm_eps": 1e-4}])
def test_the_renamed_values_are_the_same_function(other: dict[str, Any]) -> None:
    model = small(**other)
    config = config_of(model.options, dtype="float32", end_of_file=39)
    values = to_llama(dict(model.named_parameters()), model.options)
    tokens = torch.randint(0, 40, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(written_out(values, config, tokens), model(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_values_come_back_under_their_names(tied: bool) -> None:
    model = small(tied=tied)
    ours = dict(model.named_parameters())
    theirs = to_llama(ours, model.options)
    assert len(set(theirs)) == len(ours) == len(names(model.options))
    assert ("lm_head.weight" in theirs) is not tied
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)  # Of early files; everybody computes it.
    if tied:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]  # Some write it out twice.
    back = from_llama(theirs, model.options)
    assert back.keys() == ours.keys()
    assert all(back[name] is ours[name] for name in ours)


def test_a_parameter_too_few_or_too_many_is_named() -> None:
    options = small().options
    theirs = dict.fromkeys(names(options).values(), 0)
    with pytest.raises(ValueError, match=r"parameter lm_head\.weight is missing"):
        from_llama({name: 0 for name in theirs if name != "lm_head.weight"}, options)
    bias = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(ValueError, match=rf"{bias} is not part of this model"):
        from_llama({**theirs, bias: 0}, options)


@pytest.mark.parametrize("other", [{}, {"tied": True, "kv_heads": 0, "ffn_dim": 48}, {"rope_theta": 5e5}])
def test_the_configuration_comes_back(other: dict[str, Any]) -> None:
    options = ModelOptions(**{**SMALL, **other})
    config = config_of(options, dtype="float32", end_of_file=None)
    assert options_of(config) == ModelOptions(
        **{**SMALL, **other, "kv_heads": options.kv_heads_used, "ffn_dim": options.ffn_dim_used}
    )
    assert difference(config, options) == ""


def test_newer_and_older_files_say_the_same_of_rotary_positions() -> None:
    config = config_of(ModelOptions(**SMALL), dtype="float32", end_of_file=None)
    del config["rope_theta"], config["rope_scaling"]
    assert options_of(config).rope_theta == 10_000.0
    newer = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000}}
    assert options_of(newer).rope_theta == 500_000.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral': 'llama'"),
        ({"attention_bias": True}, "attention_bias is True: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is .*llama3.*: null"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is .*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is .*yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"head_dim": 8}, "head_dim is 8: hidden_size/num_attention_heads=4"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_size": "16"}, "hidden_size is '16': a value of type int"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1: a value of type bool"),
        ({"num_attention_heads": 3}, "heads is 3"),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0: null or an object"),
        ({"rope_theta": 10**400}, "rope_theta is 'a number': at most"),
        ({"norm_eps": 1, "rms_norm_eps": float("nan")}, "rms_norm_eps is"),
    ],
)
def test_what_cannot_be_had_here_is_named(change: dict[str, Any], words: str) -> None:
    config = {**config_of(ModelOptions(**SMALL), dtype="float32", end_of_file=None), **change}
    with pytest.raises(ValueError, match=words):
        options_of(config)


def test_the_first_difference_is_named_though_the_shapes_are_equal() -> None:
    config = config_of(ModelOptions(**SMALL), dtype="float32", end_of_file=None)
    assert difference(config, ModelOptions(**{**SMALL, "rope_theta": 5e5})) == (
        "rope_theta is 10000.0 there and model.rope_theta is 500000.0 here"
    )
    assert "num_attention_heads is 4 there and model.heads is 2" in difference(
        config, ModelOptions(**{**SMALL, "heads": 2})
    )
    assert difference(config, ModelOptions(**{**SMALL, "context": 8})) == ""
