"""Folders of ``torch.distributed.checkpoint`` (DCP): a Llama's parameters by Hugging Face's names, in and out.

Reading bounds what it trusts.  A DCP folder's metadata is a pickle, and torch's own reader runs what it names.  The one
here admits only the classes with which DCP describes tensors, and checks what they say against the files.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from dataclasses import is_dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diloco.inner.llama import HEAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor


DCP = ".metadata"
"""The file that makes a folder a distributed checkpoint of torch: a pickle of where each part of each tensor is."""
DCP_CLASSES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "torch": ("Size",),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
    }
)
"""What that pickle may name; anything else could run code."""
DCP_BYTES_MAX = 1 << 30
"""Maximum size of that pickle: some 100 bytes for each part of each tensor, an optimizer's included."""


def save_dcp(values: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``values`` by this process alone, whether or not ``torch.distributed`` is initialised."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save(dict(values), checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:  # It is no Exception, and has what happened, such as a full disk, inside.
            cause: BaseException | None = error.failures[0][0]
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error.failures[0][0] from error


class _DCPMetadata(pickle._Unpickler):
    """Reads a DCP folder's metadata; refuses every class and function that is not part of it, so that no code runs.

    It changes only what it makes: a pickle may also set attributes of a class, and so change the whole process.
    It is Python's own unpickler, not the one in C, which takes the memory that a few damaged bytes ask for.
    """

    def load_build(self) -> None:
        """Set the fields of the object below the state on the stack."""
        if isinstance(made := vars(self)["stack"][-2], type) or not is_dataclass(made):
            raise pickle.UnpicklingError(f"it changes {made!r}, which is no part of DCP's metadata")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[Any] = MappingProxyType({**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pathlib":  # Of the folder that it was written to.
            return PurePosixPath
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in DCP_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's metadata and is not run")
        return super().find_class(module, name)


def dcp_tensors(folder: Path, *, shapes_only: bool) -> dict[str, Tensor]:
    """Return the tensors of a DCP folder that have Hugging Face's names; ValueError where parts are missing or damaged.

    The names may be below ``model.``, as those of ``{"model": model.state_dict()}`` are; an optimizer's state is left.
    """
    doing = DCP
    try:
        if (size := (folder / DCP).stat().st_size) > DCP_BYTES_MAX:
            raise ValueError(f"it has {size} bytes: at most {DCP_BYTES_MAX}")
        with (folder / DCP).open("rb") as file:
            told = _DCPMetadata(file).load()
        tensors = {name: each for name, each in told.state_dict_metadata.items() if hasattr(each, "chunks")}
        below = "model." if any(name.startswith("model.model.") for name in tensors) else ""
        wanted = [name for name in sorted(tensors) if name.startswith((f"{below}model.", f"{below}{HEAD[1]}"))]
        if not wanted:
            other = next(iter(sorted(tensors)), "no tensor")
            raise ValueError(f"no parameter has Hugging Face's name, such as model.norm.weight; it has {other}")
        places = {(index.fqn, index.offset): place for index, place in told.storage_data.items()}
        found: dict[str, Tensor] = {}
        room = sum(file.stat().st_size for file in folder.iterdir())
        for name in wanted:
            doing = f"parameter {name}"
            each = tensors[name]
            parts: list[tuple[Any, Any]] = [(chunk, places.get((name, chunk.offsets))) for chunk in each.chunks]
            _check_parts(folder, each, parts)
            room -= sum(place.length for _, place in parts)
            if room < 0:
                raise ValueError("parts of several parameters have the same place in a file")
            seen = torch.zeros(() if shapes_only else each.size, dtype=torch.bool)
            whole = torch.zeros(each.size, dtype=each.properties.dtype, device="meta" if shapes_only else "cpu")
            for chunk, place in () if shapes_only else parts:
                with (folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    raw = io.BytesIO(file.read(place.length))
                try:
                    part = torch.load(raw, map_location="cpu", weights_only=True)
                except pickle.UnpicklingError as error:  # Torch's words say how to run what is there.
                    raise ValueError(f"{place.relative_path} is damaged, or has more than a tensor") from error
                spot = tuple(slice(a, a + size) for a, size in zip(chunk.offsets, chunk.sizes, strict=True))
                if (part.shape, part.dtype) != (whole[spot].shape, whole.dtype):
                    told = f"{tuple(part.shape)} of {part.dtype}"
                    raise ValueError(
                        f"{place.relative_path} has {told} in place of {tuple(chunk.sizes)} of {whole.dtype}"
                    )
                if seen[spot].any():
                    raise ValueError(f"two parts have the values at {tuple(chunk.offsets)}")
                whole[spot], seen[spot] = part, True
            found[name.removeprefix(below)] = whole
    except Exception as error:  # A damaged pickle raises anything.
        raise ValueError(f"{doing}: {str(error) or type(error).__name__}") from error
    return found


def _check_parts(folder: Path, tensor: Any, parts: Sequence[tuple[Any, Any]]) -> None:
    """Raise ValueError unless ``parts`` are all of ``tensor`` and their files are long enough, before it takes memory.

    A part is what DCP's metadata say of it: its place in the tensor, and its place in a file.
    """
    if not tensor.properties.dtype.is_floating_point:
        raise ValueError(f"it is of {tensor.properties.dtype}: no floating-point numbers")
    held, all_of_it = sum(math.prod(chunk.sizes) for chunk, _ in parts), math.prod(tensor.size)
    if held != all_of_it:
        raise ValueError(f"it has {held} of {all_of_it} values")
    for chunk, place in parts:
        bounds = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        if any(not 0 <= start <= start + size <= whole for start, size, whole in bounds):
            raise ValueError(f"a part at {tuple(chunk.offsets)} of {tuple(chunk.sizes)} lies outside of it")
        if place is None:
            raise ValueError(f"no file has its part at {tuple(chunk.offsets)}")
        path, last = folder / place.relative_path, place.offset + place.length
        if path.name != place.relative_path:
            raise ValueError(f"{place.relative_path!r} is outside of the folder")
        if place.transform_descriptors:
            raise ValueError(f"{path.name} is compressed ({place.transform_descriptors}): write it without extensions")
        if path.stat().st_size < last or place.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
            raise ValueError(f"{path.name} is cut short: {path.stat().st_size} bytes, and it needs {last}")
