"""Write and read a model as a folder in Hugging Face's format: parameters, ``config.json`` and a tokenizer.

    FOLDER/  config.json  generation_config.json  tokenizer.json  tokenizer_config.json
             model.safetensors, or model-00001-of-00003.safetensors ... and model.safetensors.index.json

``transformers`` loads the folder and gives the same logits as our model; writing and reading do not need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from diloco.durable import PLAIN_DISK, Step
from diloco.inner.llama import config_of, difference, from_llama, options_of, to_llama
from diloco.launch.errors import ConfigError
from diloco.sync.plain import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diloco.inner.model import ModelOptions
    from diloco.inner.tokenizer import Tokenizer

    Load = Callable[[Path], dict[str, Tensor]]

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})
JSON_BYTES_MAX = 64 << 20
"""Maximum size of a ``config.json`` or of an index, which names each parameter once."""


def write_folder(
    folder: Path,
    parameters: Mapping[str, Tensor],
    options: ModelOptions,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int,
) -> int:
    """Write the model atomically as ``folder``, which must not exist; return the bytes of its values.

    A file holds at most ``shard_bytes`` of values, or a single parameter that has more.
    """
    from diloco.syncer.snapshots import tensor_file  # A site only reads such folders, and need not import this.

    disk, step = PLAIN_DISK, Step.FILE
    beside = folder.with_name(f".{folder.name}.tmp")
    disk.remove(beside, step)
    disk.settle(beside, step)
    try:
        values = to_llama(parameters, options)
        parts = _shards({name: value.numel() * dtype.itemsize for name, value in values.items()}, shard_bytes)
        files: dict[str, str] = {}
        for number, part in enumerate(parts, start=1):
            file = WHOLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            tensors = {name: values[name].detach().to("cpu", dtype).contiguous() for name in part}
            disk.write_parts(beside / file, tensor_file(tensors, {"format": "pt"}), step)
            files |= dict.fromkeys(part, file)
        size = sum(value.numel() * dtype.itemsize for value in values.values())
        if len(parts) > 1:
            _write_json(beside / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))})
        called = str(dtype).removeprefix("torch.")
        _write_json(beside / CONFIG, config_of(options, dtype=called, end_of_file=tokenizer.end_of_file))
        _write_json(beside / "generation_config.json", {"eos_token_id": tokenizer.end_of_file})
        form = tokenizer.field_form()
        disk.write_file(beside / TOKENIZER, (form.to_str(pretty=True) + "\n").encode(), step)
        end = form.id_to_token(tokenizer.end_of_file) if tokenizer.end_of_file is not None else None
        _write_json(beside / TOKENIZER_CONFIG, _tokenizer_config(options, end))
        disk.rename(beside, folder, step)
    except BaseException:
        disk.remove(beside, step)  # Retries must not fill the disk further.
        raise
    disk.sync_folder(folder.absolute().parent, step)
    return size


def is_folder(source: str | None) -> bool:
    """Return whether ``source`` is a folder with a ``config.json``, like a Hugging Face model."""
    return source is not None and (Path(source) / CONFIG).is_file()


def read_options(folder: str) -> ModelOptions:
    """Return the options of the model in ``folder``; ConfigError names an unsupported field of its ``config.json``."""
    try:
        return options_of(_read_json(Path(folder) / CONFIG))
    except ValueError as error:
        raise ConfigError(f"{Path(folder) / CONFIG}: {error}") from error


def read_values(folder: str, options: ModelOptions, load: Load = safetensors.torch.load_file) -> dict[str, Tensor]:
    """Return the parameters in ``folder`` by our names, in their dtype; ConfigError unless the model fits ``options``.

    ``load`` reads the tensors of one file.
    """
    try:
        other = difference(_read_json(Path(folder) / CONFIG), options)
        if other:
            raise ConfigError(f"{Path(folder) / CONFIG}: {other}; model=imported takes all of it from there")
        return from_llama(_tensors(Path(folder), load), options)
    except ConfigError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{folder!r} cannot be taken in: {error}") from error


def _tensors(folder: Path, load: Load) -> dict[str, Tensor]:
    if not (folder / INDEX).is_file():
        return load(folder / WHOLE)
    told = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(told, dict) or not told:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    found: dict[str, Tensor] = {}
    for file in sorted(set(map(str, told.values()))):
        if Path(file).name != file:
            raise ValueError(f"{folder / INDEX} names {file!r}: outside of the folder")
        held = load(folder / file)
        for name in (name for name, where in told.items() if where == file):
            if name not in held:
                raise ValueError(f"{folder / file} has no {name}, which {INDEX} says it has")
            found[name] = held[name]
    return found


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Return the names in each file, in order; each file is filled up to ``shard_bytes``."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, size in sorted(sizes.items()):
        if parts[-1] and held + size > shard_bytes:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts


def _tokenizer_config(options: ModelOptions, end: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": options.context,
        "clean_up_tokenization_spaces": False,
        **({"eos_token": end} if end is not None else {}),
    }


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    PLAIN_DISK.write_file(path, (json.dumps(told, indent=2) + "\n").encode(), Step.FILE)


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > JSON_BYTES_MAX:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: at most {JSON_BYTES_MAX}")
    try:
        told = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path} is no JSON object")
    return told
