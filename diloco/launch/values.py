"""A model's values from a file or a folder: for version 0, and to look at a version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError

from diloco.inner import checkpoint
from diloco.inner.pieces import put
from diloco.launch import field_folder
from diloco.launch.errors import ConfigError
from diloco.outer.fragments import named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from diloco.inner.model import Transformer


def load_values(source: str, model: Transformer, others: Sequence[str] = ()) -> None:
    """Copy ``source`` into ``model``: a .safetensors file, a checkpoint, a folder of checkpoints (the newest), or a
    folder of Hugging Face's form.

    ``others`` have the rest of the model, where several syncers have each written its part.
    """
    values: dict[str, Tensor] = {}
    named = f"run.init_from is {source!r}"
    for each in (source, *others):
        values |= (
            field_folder.read_values(each, model.options) if field_folder.is_folder(each) else values_in(each, named)
        )
    put_values(model, values, named)


@torch.no_grad()
def put_values(model: Transformer, values: Mapping[str, Tensor], called: str) -> None:
    """Copy ``values`` into ``model``; ConfigError, which begins with what they are ``called``, unless they are its."""
    parameters = named_parameters_once(model)
    for name in sorted(parameters.keys() | values.keys()):
        here = tuple(parameters[name].shape) if name in parameters else "nothing"
        there = tuple(values[name].shape) if name in values else "nothing"
        if here != there:
            raise ConfigError(f"{called}: of another model, {name} is {here} here and {there} there")
        put(parameters[name], values[name])


def values_in(source: str, called: str) -> Mapping[str, Tensor]:
    """The parameters in a .safetensors file, a checkpoint, or the newest of a folder of checkpoints.

    ConfigError begins with what that is ``called``.
    """
    path = Path(source)
    values: Mapping[str, Tensor] = {}
    try:
        if path.is_dir():
            found = checkpoint.load(path) if (path / "manifest.json").is_file() else checkpoint.latest(path)
            values = found.part("model") if found is not None else {}
        elif path.is_file():
            values = safetensors.torch.load_file(path)
    except (SafetensorError, checkpoint.CheckpointError, OSError) as error:
        raise ConfigError(f"{called}: it cannot be read: {error}") from error
    if not values:
        raise ConfigError(f"{called}: neither a .safetensors file nor a folder with a checkpoint or a config.json")
    return values
