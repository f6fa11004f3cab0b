"""Safetensors files written from where the values lie: no copy of them is made, whatever their size.

The library's own writer joins all tensors to one string first, which at a billion parameters is as much memory as the
model takes.  The format is its own, and every reader of safetensors reads what is written here.
"""

from __future__ import annotations

import hashlib
import json
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

PIECE_BYTES = 16 << 20
"""Written, and hashed, at a time."""
ALIGNMENT = 8
"""Of the first value in the file."""
DTYPES = MappingProxyType({torch.float32: "F32", torch.bfloat16: "BF16"})
"""What is written, as the format calls it."""


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The file of ``tensors`` (fp32 or bf16, contiguous), in order of their names, in pieces: views of them."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype in DTYPES, f"{name} is {tensor.dtype}"
        size = tensor.element_size() * tensor.numel()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in sorted(tensors.items()):
        values = bytes_of(tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor)
        for start in range(0, len(values), PIECE_BYTES):
            yield values[start : start + PIECE_BYTES]


class Written:
    """Hands pieces on, and says at the end how many bytes they had and their SHA-256."""

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self._parts = parts
        self._hash = hashlib.sha256()
        self.size = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for part in self._parts:
            self._hash.update(part)
            self.size += len(part)
            yield part

    def facts(self) -> dict[str, object]:
        """As a manifest has them."""
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}
