"""Read a model's values from a file or a folder, for version 0 or to evaluate a version; write such folders.

In a run of any model (``model.kind=file``) the names, shapes and first values of the parameters come from a file.
Sites bring the model itself, each in its own training loop (``diloco.join``); the syncer needs only the file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diloco.codec.base import digest_of
from diloco.config.errors import ConfigError, refusing, require
from diloco.durable import PLAIN_DISK, Step
from diloco.inner import checkpoint
from diloco.inner.dcp import DCP, dcp_tensors, save_dcp
from diloco.inner.llama import HEAD, config_of, difference, from_llama, options_of, to_llama
from diloco.inner.parallel import put
from diloco.outer.fragments import BUFFERS, FROZEN, gather, named_parameters_once
from diloco.sync.journal import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from diloco.config.schema import RunConfig
    from diloco.inner.model import ModelOptions, Transformer
    from diloco.inner.tokenizer import Tokenizer
    from diloco.outer.fragments import Layout


def load_values(source: str, model: Transformer, others: Sequence[str] = (), *, shapes_only: bool = False) -> None:
    """Copy ``source`` into ``model``: a .safetensors file, a checkpoint, a folder of checkpoints (the newest), or a
    folder in Hugging Face's format or of torch's distributed checkpoint.

    ``others`` have the rest of the model, where several syncers have each written a part.  With ``shapes_only`` the
    model is on torch's meta device: only the headers of ``source`` are checked against it, and no value is read.
    """
    values: dict[str, Tensor] = {}
    named = f"run.init_from is {source!r}"
    for each in (source, *others):
        if any((Path(each) / name).is_file() for name in (CONFIG, DCP)):
            values |= read_values(each, model.options, named, shapes_only=shapes_only)
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
    with refusing(SafetensorError, checkpoint.CheckpointError, OSError, begin=f"{called}: it cannot be read: "):
        if path.is_dir():
            read = checkpoint.load if (path / "manifest.json").is_file() else checkpoint.latest
            if (found := read(path, verify=not shapes_only)) is not None:
                values = found.part("model")
                if shapes_only:
                    shapes = {name: found.entries[f"model/{name}"].shape for name in values}
                    values = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        elif path.is_file():
            values = shapes_in(path) if shapes_only else safetensors.torch.load_file(path)
    if not values:
        kinds = f"a .safetensors file nor a folder with a checkpoint, a {CONFIG} or a {DCP}"
        raise ConfigError(f"{called}: neither {kinds}")
    return values


def shapes_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file from its header, without values."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}


# --- a run whose model is any model (model.kind=file) ----------------------------------------------------------------

KINDS = ("transformer", "file")
WRITTEN_BY = "diloco.save_version0(model, FILE) makes one"
NOTHING_TO_TRAIN = "model has no parameters that are trained (requires_grad): there is nothing to exchange"


def is_of_file(config: RunConfig) -> bool:
    """Return whether the model comes from a file; ConfigError for an unknown kind."""
    require(config.model.kind in KINDS, "model.kind", config.model.kind, f"one of {', '.join(KINDS)}")
    return config.model.kind == "file"


def file_shapes(config: RunConfig) -> tuple[dict[str, tuple[int, ...]], str, list[str]]:
    """Return the shapes of the file's parameters, the digest of the model's frozen ones, which the file lacks, and the
    names of the buffers that are published, which are among the shapes.

    Values are not read.  ConfigError where a parameter is not floating point, or ``outer.publish`` names no buffer.
    """
    with _opened(config) as file:
        found = {name: file.get_slice(name) for name in sorted(file.keys())}
        for name, part in found.items():
            if not part.get_dtype().startswith(("F", "BF")):
                raise ConfigError(
                    f"run.init_from is {config.run.init_from!r}: {name} is {part.get_dtype()}, and only parameters of "
                    f"floating point are exchanged; {WRITTEN_BY}"
                )
        about = file.metadata() or {}
        buffers: list[str] = json.loads(about.get(BUFFERS, "[]"))
        for pattern in config.outer.publish:
            if not any(fnmatchcase(name, pattern) for name in buffers):
                there = f"these are there: {', '.join(buffers)}" if buffers else f"none is there; {WRITTEN_BY}"
                source = f"run.init_from={config.run.init_from}"
                raise ConfigError(f"outer.publish has {pattern!r}: no floating-point buffer of {source}; {there}")
        published = published_of(config, buffers)
        for name in set(buffers) - set(published):
            found.pop(name, None)
        return {name: tuple(part.get_shape()) for name, part in found.items()}, about.get(FROZEN, ""), published


def published_of(config: RunConfig, buffers: Iterable[str]) -> list[str]:
    """Return the names of those ``buffers`` that ``outer.publish`` names, in order."""
    return sorted(name for name in buffers if any(fnmatchcase(name, each) for each in config.outer.publish))


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

    ``model`` is any ``nn.Module``, plain, compiled or wrapped; the parameters that it trains (``requires_grad``) are
    written in fp32 under the names that they have in the plain model, tied ones once.  So are its buffers of floating
    point, of which a run exchanges those that ``outer.publish`` names.  One machine does this once, and the syncer
    starts from the file; the values that the sites' own models begin with do not matter then::

        diloco.save_version0(model, "v0.safetensors")

        diloco syncer run.name=mine run.tokens=2e9 model.kind=file run.init_from=v0.safetensors

    Of frozen parameters, such as the base model under LoRA, only a digest is written: a site with others is refused.

    All ranks that hold a sharded model call this; each writes the whole file, and the last one's stays.

    Returns the path.  ``ValueError`` for a model without trained parameters, or with one that is not of floating point.
    """
    on_host: dict[str, Tensor] = {}
    trained, digests = trained_and_frozen(model)
    if not trained:
        raise ValueError(NOTHING_TO_TRAIN)
    buffers = named_parameters_once(model, buffers=True)
    for name, each in trained.items():
        if not each.is_floating_point():
            raise ValueError(f"model has {name}, which is {each.dtype}: only floating point is trained")
        if not each.numel():
            raise ValueError(f"model has {name} of shape {tuple(each.shape)}: it has no values to exchange; freeze it")
    for name, each in (trained | buffers).items():
        gathered = each.full_tensor() if hasattr(each, "full_tensor") else each  # A collective where it is sharded.
        on_host[name] = gathered.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
    there = Path(path)
    there.parent.mkdir(parents=True, exist_ok=True)
    beside = there.with_name(f"{there.name}.{secrets.token_hex(4)}.new")
    about = {FROZEN: frozen_digest(digests)} if digests else {}
    about |= {BUFFERS: json.dumps(sorted(buffers))} if buffers else {}
    save_file(on_host, beside, about or None)
    beside.replace(there)
    return there


@torch.no_grad()
def trained_and_frozen(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parameters with ``requires_grad`` by canonical name, and a digest of each other one.

    The digest is of the whole parameter, in fp32 where it is floating point: it does not depend on which ranks hold the
    parts, nor on a type that keeps the checkpoint's values.  All ranks gather a sharded parameter, one at a time.
    """
    trained: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for name, each in named_parameters_once(model).items():
        if each.requires_grad:
            trained[name] = each
            continue
        whole = each.full_tensor() if hasattr(each, "full_tensor") else each
        host = whole.cpu()  # Before the cast to fp32, so that the accelerator needs no memory for that.
        host = host.float() if host.is_floating_point() else host
        digests[name] = f"{list(whole.shape)} {digest_of(host.contiguous().view(-1).numpy().data)}"
    return trained, digests


def frozen_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of all frozen parameters from those of each; empty where there are none."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest() if digests else ""


@contextmanager
def _opened(config: RunConfig) -> Iterator[Any]:
    source = config.run.init_from
    if source is None:
        raise ConfigError(f"run.init_from is null: model.kind=file is the model of a .safetensors file; {WRITTEN_BY}")
    if Path(source).is_dir():
        raise ConfigError(f"run.init_from is {source!r}: a folder, and model.kind=file takes a file; {WRITTEN_BY}")
    unreadable = f"run.init_from is {source!r}: it cannot be read: "
    with refusing(SafetensorError, OSError, begin=unreadable), safe_open(source, framework="pt") as file:
        yield file


# --- Write and read a model as a folder, its values in Hugging Face's files or in those of torch's DCP ---------------

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
    dcp: bool = False,
    shard_bytes: int,
) -> int:
    """Write the model atomically as ``folder``, which must not exist; return the bytes of its values.

    A safetensors file holds at most ``shard_bytes`` of values, or a single parameter that has more.  With ``dcp`` the
    values are a distributed checkpoint of torch instead, one file.
    """
    disk, step = PLAIN_DISK, Step.FILE
    beside = folder.with_name(f".{folder.name}.tmp")
    disk.remove(beside, step)
    disk.settle(beside, step)
    try:
        values = to_llama(parameters, options)
        if dcp and options.tied:
            values[HEAD[1]] = values["model.embed_tokens.weight"]  # A tied model's state dict has both names.
        if dcp:
            save_dcp({name: value.detach().to("cpu", dtype) for name, value in values.items()}, beside)
        else:
            _save_shards(values, beside, dtype, shard_bytes)
        called = str(dtype).removeprefix("torch.")
        _write_json(beside / CONFIG, config_of(options, dtype=called, end_of_file=tokenizer.end_of_file))
        _write_json(beside / "generation_config.json", {"eos_token_id": tokenizer.end_of_file})
        form = tokenizer.field_form()
        disk.write_file(beside / TOKENIZER, (form.to_str(pretty=True) + "\n").encode(), step)
        end = form.id_to_token(tokenizer.end_of_file) if tokenizer.end_of_file is not None else None
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": options.context,
            "clean_up_tokenization_spaces": False,
        }
        _write_json(beside / TOKENIZER_CONFIG, about | ({"eos_token": end} if end is not None else {}))
        disk.rename(beside, folder, step)
    except BaseException:
        disk.remove(beside, step)  # Retries must not fill the disk further.
        raise
    disk.sync_folder(folder.absolute().parent, step)
    return sum(value.numel() * dtype.itemsize for value in values.values())


def _save_shards(values: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    from diloco.syncer.snapshots import tensor_file  # A site only reads such folders, and need not import this.

    parts: list[list[str]] = [[]]
    sizes, held = {name: value.numel() * dtype.itemsize for name, value in sorted(values.items())}, 0
    for name, size in sizes.items():
        if parts[-1] and held + size > shard_bytes:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    files: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = WHOLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: values[name].detach().to("cpu", dtype).contiguous() for name in part}
        PLAIN_DISK.write_parts(folder / file, tensor_file(tensors, {"format": "pt"}), Step.FILE)
        files |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": dict(sorted(files.items()))})


def read_options(folder: str) -> ModelOptions:
    """Return the options of the model in ``folder``; ConfigError names an unsupported field of its ``config.json``."""
    path = Path(folder) / CONFIG
    with refusing(ValueError, begin=f"{path}: "):
        return options_of(_read_json(path))


def read_values(
    folder: str, options: ModelOptions, called: str = "", *, shapes_only: bool = False
) -> dict[str, Tensor]:
    """Return the parameters in ``folder`` by our names, in their dtype; ConfigError unless the model fits ``options``.

    ``called`` is how the error calls the folder.  With ``shapes_only`` the tensors have no values.
    """
    path = Path(folder)
    unreadable = f"{called or repr(folder)}: it cannot be read: "
    with refusing(SafetensorError, OSError, ValueError, begin=unreadable):
        other = difference(_read_json(path / CONFIG), options) if (path / CONFIG).is_file() else ""
    if other:
        raise ConfigError(f"{path / CONFIG}: {other}; model=imported takes all of it from there")
    read = dcp_tensors if (path / DCP).is_file() else _tensors
    with refusing(SafetensorError, OSError, ValueError, begin=unreadable):
        return from_llama(read(path, shapes_only=shapes_only), options)


def _tensors(folder: Path, *, shapes_only: bool) -> dict[str, Tensor]:
    load = shapes_in if shapes_only else safetensors.torch.load_file
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


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    PLAIN_DISK.write_file(path, (json.dumps(told, indent=2) + "\n").encode(), Step.FILE)


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > JSON_BYTES_MAX:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: at most {JSON_BYTES_MAX}")
    with refusing(ValueError, begin=f"{path} is no JSON: "):
        told = parse_json(path.read_bytes())
    if not isinstance(told, dict):
        raise ValueError(f"{path} is no JSON object")
    return told
