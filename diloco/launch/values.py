"""Read a model's values from a file or a folder: for version 0, and to look at a version.

In a run of any model (``model.kind=file``) the names, shapes and first values of the parameters come from a file.
Sites bring the model itself, each in its own training loop (``diloco.join``); the syncer needs only the file.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diloco.inner import checkpoint
from diloco.inner.parallel import put
from diloco.launch import field_folder
from diloco.launch.errors import ConfigError
from diloco.outer.fragments import gather, named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from diloco.inner.model import Transformer
    from diloco.launch.schema import RunConfig
    from diloco.outer.fragments import Layout


def load_values(source: str, model: Transformer, others: Sequence[str] = (), *, shapes_only: bool = False) -> None:
    """Copy ``source`` into ``model``: a .safetensors file, a checkpoint, a folder of checkpoints (the newest), or a
    folder in Hugging Face's format.

    ``others`` have the rest of the model, where several syncers have each written a part.  With ``shapes_only`` the
    model is on torch's meta device: only the headers of ``source`` are checked against it, and no value is read.
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
    """Copy ``values`` into ``model``; ConfigError, which begins with ``called``, where names or shapes differ."""
    parameters = named_parameters_once(model)
    for name in sorted(parameters.keys() | values.keys()):
        here = tuple(parameters[name].shape) if name in parameters else "nothing"
        there = tuple(values[name].shape) if name in values else "nothing"
        if here != there:
            raise ConfigError(f"{called}: of another model, {name} is {here} here and {there} there")
        put(parameters[name], values[name])


def values_in(source: str, called: str, *, shapes_only: bool = False) -> Mapping[str, Tensor]:
    """Return the parameters in a .safetensors file, a checkpoint, or the newest of a folder of checkpoints.

    ConfigError begins with ``called``.  With ``shapes_only`` the tensors have no values.
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
    """Return the tensors of a .safetensors file from its header, without values."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}


# --- a run whose model is any model (model.kind=file) ----------------------------------------------------------------

KINDS = ("transformer", "file")
WRITTEN_BY = "diloco.save_version0(model, FILE) makes one"


def is_of_file(config: RunConfig) -> bool:
    """Return whether the model is that of a file; ConfigError for an unknown kind."""
    if config.model.kind not in KINDS:
        raise ConfigError(f"model.kind is {config.model.kind!r}: one of {', '.join(KINDS)}")
    return config.model.kind == "file"


def file_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the file's parameters; values are not read.  ConfigError where one is not floating point."""
    with _opened(config) as file:
        found = {name: file.get_slice(name) for name in sorted(file.keys())}
        for name, part in found.items():
            if not part.get_dtype().startswith(("F", "BF")):
                raise ConfigError(
                    f"run.init_from is {config.run.init_from!r}: {name} is {part.get_dtype()}, and only parameters of "
                    f"floating point are exchanged; {WRITTEN_BY}"
                )
        return {name: tuple(part.get_shape()) for name, part in found.items()}


def file_fragments(config: RunConfig, layout: Layout) -> list[Tensor]:
    """Return the values of version 0, one tensor for each fragment."""
    with _opened(config) as file:
        return [
            gather(fragment, {piece.name: file.get_tensor(piece.name) for piece in fragment.pieces})
            for fragment in layout.fragments
        ]


@torch.no_grad()
def save_version0(model: nn.Module, path: str | Path) -> Path:
    """Write the current values of ``model`` to ``path``, a .safetensors file, as the first version of a run.

    ``model`` is any ``nn.Module``, plain, compiled or wrapped; its parameters are written in fp32 under the names that
    they have in the plain model, tied ones once, buffers not at all.  One machine does this once, and the syncer starts
    from the file; the values that the sites' own models begin with do not matter then::

        diloco.save_version0(model, "v0.safetensors")

        diloco syncer run.name=mine run.tokens=2e9 model.kind=file run.init_from=v0.safetensors

    Returns the path.  ``ValueError`` for a model without parameters, or with one that is not of floating point.
    """
    values = {name: _whole(each) for name, each in named_parameters_once(model).items()}
    if not values:
        raise ValueError("model has no parameters: there is nothing to train")
    for name, each in values.items():
        if not each.is_floating_point():
            raise ValueError(f"model has {name}, which is {each.dtype}: only floating point is trained")
    there = Path(path)
    there.parent.mkdir(parents=True, exist_ok=True)
    on_host = {name: each.to("cpu", torch.float32) for name, each in values.items()}
    beside = there.with_name(f"{there.name}.new")
    save_file(on_host, beside)
    beside.replace(there)
    return there


def _whole(value: Tensor) -> Tensor:
    """Return the full values of a parameter that may be sharded, a collective; contiguous, in memory of its own."""
    gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
    return torch.empty_like(gathered, memory_format=torch.contiguous_format).copy_(gathered)


@contextmanager
def _opened(config: RunConfig) -> Iterator[Any]:
    source = config.run.init_from
    if source is None:
        raise ConfigError(f"run.init_from is null: model.kind=file is the model of a .safetensors file; {WRITTEN_BY}")
    try:
        with safe_open(source, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"run.init_from is {source!r}: it cannot be read: {error}") from error
