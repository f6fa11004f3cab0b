"""The mapping itself; tests/config/test_model_files_transformers.py compares what `transformers` computes."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.inner.llama import config_of, difference, from_llama, names, options_of, to_llama
from diloco.inner.model import ModelOptions, Transformer

SMALL: dict[str, Any] = {"vocab_size": 40, "layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "context": 24}


@pytest.mark.parametrize("tied", [False, True])
def test_values_come_back_under_their_names_and_one_too_few_or_too_many_is_named(tied: bool) -> None:
    options = ModelOptions(**SMALL, tied=tied)
    ours = dict(Transformer(options).named_parameters())
    theirs = to_llama(ours, options)
    assert len(set(theirs)) == len(ours) == len(names(options))
    assert ("lm_head.weight" in theirs) is not tied
    first = theirs["model.embed_tokens.weight"]
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": first}  # Of early files; everybody computes it.
    if tied:
        more["lm_head.weight"] = first  # Some write it out twice.
    back = from_llama({**theirs, **more}, options)
    assert back.keys() == ours.keys()
    assert all(back[name] is ours[name] for name in ours)
    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(ValueError, match=f"parameter {norm} is missing"):
        from_llama({name: value for name, value in theirs.items() if name != norm}, options)
    with pytest.raises(ValueError, match=f"{bias} is not part of this model"):
        from_llama({**theirs, bias: first}, options)


@pytest.mark.parametrize(
    "other", [{}, {"tied": True, "kv_heads": 0, "ffn_dim": 48}, {"rope_theta": 5e5, "norm_eps": 1e-4}]
)
def test_the_configuration_comes_back_and_newer_and_older_files_say_the_same(other: dict[str, Any]) -> None:
    options = ModelOptions(**{**SMALL, **other})
    config = config_of(options, dtype="float32", end_of_file=None)
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (options.norm_eps, options.tied)
    whole = ModelOptions(**{**SMALL, **other, "kv_heads": options.kv_heads_used, "ffn_dim": options.ffn_dim_used})
    assert options_of(config) == whole
    assert difference(config, options) == ""
    del config["rope_scaling"]
    theta = config.pop("rope_theta")
    assert options_of(config).rope_theta == 10_000.0
    newer = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    assert options_of(newer) == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral': 'llama'"),
        ({"attention_bias": True}, "attention_bias is True: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': 'silu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is .*llama3.*: null"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is .*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is .*yarn"),
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
