"""A model's values from a file or a folder: for version 0, and to look at a version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from diloco.inner import checkpoint
from diloco.inner.parallel import put
from diloco.launch import field_folder
from diloco.launch.errors import ConfigError
from diloco.outer.fragments import named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from diloco.inner.model import Transformer


def load_values(source: str, model: Transformer, others: Sequence[str] = (), *, shapes_only: bool = False) -> None:
    """Copy ``source`` into ``model``: a .safetensors file, a checkpoint, a folder of checkpoints (the newest), or a
    folder of Hugging Face's form.

    ``others`` have the rest of the model, where several syncers have each written its part.  With ``shapes_only`` the
    model is on torch's meta device: whether ``source`` is its is found out, by headers, and no value is read.
    """
    values: dict[str, Tensor] = {}
    named, load = f"run.init_from is {source!r}", shapes_in if shapes_only else safetensors.torch.load_file
    for each in (source, *others):
        if field_folder.is_folder(each):
            values |= field_folder.read_values(each, model.options, load)
        else:
            values |= values_in(each, named, shapes_only=shapes_only)
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


def values_in(source: str, called: str, *, shapes_only: bool = False) -> Mapping[str, Tensor]:
    """The parameters in a .safetensors file, a checkpoint, or the newest of a folder of checkpoints.

    ConfigError begins with what that is ``called``.  With ``shapes_only`` they are tensors without values.
    """
    path = Path(source)
    values: Mapping[str, Tensor] = {}
    try:
        if path.is_dir():
            read = checkpoint.load if (path / "manifest.json").is_file() else checkpoint.latest
            if (found := read(path, verify=not shapes_only)) is not None:
                values = found.part("model")
                if shapes_only:
                    shapes = {name: found.entries[f"model/{name}"].shape for name in values}
                    values = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        elif path.is_file():
            values = shapes_in(path) if shapes_only else safetensors.torch.load_file(path)
    except (SafetensorError, checkpoint.CheckpointError, OSError) as error:
        raise ConfigError(f"{called}: it cannot be read: {error}") from error
    if not values:
        raise ConfigError(f"{called}: neither a .safetensors file nor a folder with a checkpoint or a config.json")
    return values


def shapes_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file by what its header says, without values."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}
