"""A model's values from a file: for version 0, and to look at a version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError

from diloco.inner import checkpoint
from diloco.launch.errors import ConfigError
from diloco.outer.fragments import named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from diloco.inner.model import Transformer


@torch.no_grad()
def load_values(source: str, model: Transformer, others: Sequence[str] = ()) -> None:
    """Copy ``source`` into ``model``: a .safetensors file, a checkpoint, or a folder of checkpoints (the newest).

    ``others`` have the rest of the model, where several syncers have each written its part.
    """
    values: dict[str, Tensor] = {}
    for each in (source, *others):
        values |= _values_in(each)
    parameters = named_parameters_once(model)
    for name in sorted(parameters.keys() | values.keys()):
        here = tuple(parameters[name].shape) if name in parameters else "nothing"
        there = tuple(values[name].shape) if name in values else "nothing"
        if here != there:
            raise ConfigError(f"run.init_from is {source!r}: of another model, {name} is {here} here and {there} there")
        parameters[name].copy_(values[name])


def _values_in(source: str) -> Mapping[str, Tensor]:
    path, values = Path(source), {}
    try:
        if path.is_dir():
            found = checkpoint.load(path) if (path / "manifest.json").is_file() else checkpoint.latest(path)
            values = found.part("model") if found is not None else {}
        elif path.is_file():
            values = safetensors.torch.load_file(path)
    except (SafetensorError, checkpoint.CheckpointError, OSError) as error:
        raise ConfigError(f"run.init_from is {source!r}: it cannot be read: {error}") from error
    if not values:
        raise ConfigError(f"run.init_from is {source!r}: neither a .safetensors file nor a folder with a checkpoint")
    return values
