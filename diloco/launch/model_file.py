"""A run whose model is any model (``model.kind=file``): its parameters' names, shapes and first values are a file's.

Sites bring the model itself, each in a loop of its own (``diloco.join``); the syncer needs no more than this.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diloco.launch.errors import ConfigError
from diloco.outer.fragments import gather, named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from diloco.launch.schema import RunConfig
    from diloco.outer.fragments import Layout

KINDS = ("transformer", "file")
WRITTEN_BY = "diloco.save_version0(model, FILE) makes one"


def is_meant(config: RunConfig) -> bool:
    """Whether the model is that of a file; ConfigError for a kind that there is none of."""
    if config.model.kind not in KINDS:
        raise ConfigError(f"model.kind is {config.model.kind!r}: one of {', '.join(KINDS)}")
    return config.model.kind == "file"


def shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The parameters in the file; its values are not read.  ConfigError where one is nothing that is trained."""
    with _opened(config) as file:
        found = {name: file.get_slice(name) for name in sorted(file.keys())}
        for name, part in found.items():
            if not part.get_dtype().startswith(("F", "BF")):
                raise ConfigError(
                    f"run.init_from is {config.run.init_from!r}: {name} is {part.get_dtype()}, and only parameters of "
                    f"floating point are exchanged; {WRITTEN_BY}"
                )
        return {name: tuple(part.get_shape()) for name, part in found.items()}


def fragments(config: RunConfig, layout: Layout) -> list[Tensor]:
    """The values of version 0, a fragment at a time."""
    with _opened(config) as file:
        return [
            gather(fragment, {piece.name: file.get_tensor(piece.name) for piece in fragment.pieces})
            for fragment in layout.fragments
        ]


@torch.no_grad()
def save_version0(model: nn.Module, path: str | Path) -> Path:
    """Write what ``model`` holds now to ``path``, a .safetensors file, as the first version of a run.

    ``model`` is any ``nn.Module``, plain, compiled or wrapped; its parameters are written in fp32 under the names that
    they have in the plain model, tied ones once, buffers not at all.  One machine does this once, whoever runs the
    syncer starts it from the file, and what the sites' own models held at first does not matter any more::

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
    """The full values of a parameter that ranks hold parts of, a collective; contiguous, with memory of its own."""
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
