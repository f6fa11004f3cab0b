"""Conversion between our transformer and Hugging Face's Llama: names of parameters and fields of ``config.json``.

The architecture is the same (RMSNorm, rotary positions in halves, SwiGLU, shared key heads, no biases), so no value is
changed or moved; only the names differ.  Nothing here reads or writes a file.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.inner import require
from diloco.inner.model import ModelOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = TypeVar("Value")

WHOLE: Mapping[str, str] = MappingProxyType(
    {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
)
HEAD = ("head.weight", "lm_head.weight")
BLOCK: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    }
)
COMPUTED = ".rotary_emb.inv_freq"
"""Suffix of tensors in early Llama files that are no parameters: every reader computes them."""
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "layers": "num_hidden_layers",
        "dim": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_dim": "intermediate_size",
        "context": "max_position_embeddings",
        "tied": "tie_word_embeddings",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
    }
)
"""Our options and their names in ``config.json``."""
FIXED: Mapping[str, object] = MappingProxyType(
    {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }
)
"""Fields of ``config.json`` with the only values that this transformer supports; a missing field has this value."""
ROPE_TYPES = (None, "default")
NUMBER_MAX = 1 << 40
"""Largest number accepted in ``config.json``: more than any model has, and small enough for every type used here."""


def names(options: ModelOptions) -> dict[str, str]:
    """Return Hugging Face's name of every parameter by our name; a tied head is not a separate parameter."""
    found = dict(WHOLE)
    if not options.tied:
        found |= dict([HEAD])
    for index in range(options.layers):
        for ours, theirs in BLOCK.items():
            found[f"blocks.{index}.{ours}.weight"] = f"model.layers.{index}.{theirs}.weight"
    return found


def to_llama(values: Mapping[str, Value], options: ModelOptions) -> dict[str, Value]:
    """Rename ``values``, every parameter once, to Hugging Face's names; ValueError names one missing or unknown."""
    return _renamed(values, names(options))


def from_llama(values: Mapping[str, Value], options: ModelOptions) -> dict[str, Value]:
    """Rename ``values`` to our names; drops a separate copy of a tied head.  ValueError as in ``to_llama``."""
    back = {theirs: ours for ours, theirs in names(options).items()}
    spare = {HEAD[1]} if options.tied else set[str]()
    there = {name: value for name, value in values.items() if name not in spare and not name.endswith(COMPUTED)}
    return _renamed(there, back)


def config_of(options: ModelOptions, *, dtype: str, end_of_file: int | None) -> dict[str, Any]:
    """Return the model's ``config.json``; ``dtype`` is torch's name, ``end_of_file`` the id that ends a text."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: _told(options, ours) for ours, theirs in FIELDS.items()},
        "head_dim": options.head_dim,
        **{
            name: value for name, value in FIXED.items() if name not in ("partial_rotary_factor", "quantization_config")
        },
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": end_of_file,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def options_of(config: Mapping[str, Any]) -> ModelOptions:
    """Return the options of a ``config.json``; ValueError names a field with a value that is not supported here."""
    require(config.get("model_type") == "llama", "model_type", config.get("model_type"), "'llama'")
    for name, fixed in FIXED.items():
        found = config.get(name, fixed)
        require(found == fixed or (found is None and not fixed), name, found, f"{fixed!r}, the only supported value")
    rope = _rope(config)
    told = {**config, "rope_theta": rope}
    values: dict[str, Any] = {}
    for ours, theirs in FIELDS.items():
        default = getattr(ModelOptions(), ours)
        value: Any = told.get(theirs, default if ours in ("tied", "norm_eps", "kv_heads") else None)
        kind = type(default)
        good = isinstance(value, bool) if kind is bool else type(value) in (int, kind)
        require(good, theirs, value, f"a value of type {kind.__name__}")
        require(abs(value) <= NUMBER_MAX, theirs, "a number", f"at most {NUMBER_MAX}")
        values[ours] = kind(value)
    options = ModelOptions(**values)
    head_dim = config.get("head_dim") or options.head_dim
    require(head_dim == options.head_dim, "head_dim", head_dim, f"hidden_size/num_attention_heads={options.head_dim}")
    return options


def difference(config: Mapping[str, Any], options: ModelOptions) -> str:
    """Return a message on the first field in which ``config`` and ``options`` differ; empty if they agree.

    The context may differ: it is the length of the sequences, and no parameter depends on it.
    """
    there = options_of(config)
    for ours, theirs in FIELDS.items():
        if ours != "context" and _told(there, ours) != _told(options, ours):
            return f"{theirs} is {_told(there, ours)} there and model.{ours} is {_told(options, ours)} here"
    return ""


def _told(options: ModelOptions, ours: str) -> Any:
    """Return the value of an option, with a derived one (0) resolved."""
    return getattr(options, f"{ours}_used", getattr(options, ours))


def _rope(config: Mapping[str, Any]) -> Any:
    """Return the base of the rotary angles, from either form of ``config.json``; ValueError for scaled angles."""
    found = config.get("rope_theta", ModelOptions().rope_theta)
    for name in ("rope_scaling", "rope_parameters"):
        told = config.get(name) or {}
        require(isinstance(told, dict), name, told, "null or an object")
        kind = told.get("rope_type", told.get("type"))
        require(kind in ROPE_TYPES, name, told, "null, or rope_type 'default'")
        factor = told.get("partial_rotary_factor", 1.0)
        require(factor == 1.0, f"{name}.partial_rotary_factor", factor, "1.0, the only supported value")
        found = told.get("rope_theta", found)
    return found


def _renamed(values: Mapping[str, Value], wanted: Mapping[str, str]) -> dict[str, Value]:
    for name in sorted(values.keys() ^ wanted.keys()):
        here = "is missing" if name in wanted else "is not part of this model"
        raise ValueError(f"parameter {name} {here}")
    return {wanted[name]: values[name] for name in values}
