"""What is written piece by piece is the file that the library would have written, and is no copy of the values."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load, save

from diloco.syncer import snapshots
from diloco.syncer.snapshots import Written, tensor_file

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5), "c": torch.tensor(2.5)}
FACTS = {"version": "7"}


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_it_is_what_the_library_writes(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", piece_bytes)
    data = b"".join(tensor_file(TENSORS, FACTS))
    assert data == save(TENSORS, metadata=FACTS)
    assert all(torch.equal(values, TENSORS[name]) for name, values in load(data).items())
    assert b"".join(tensor_file(TENSORS)) == save(TENSORS)


def test_bf16_is_written_too() -> None:
    tensors = {name: values.bfloat16() for name, values in TENSORS.items()}
    assert b"".join(tensor_file(tensors)) == save(tensors)
    with pytest.raises(AssertionError, match=r"w is torch\.int8"):
        list(tensor_file({"w": torch.ones(1, dtype=torch.int8)}))


def test_the_pieces_are_views() -> None:
    values = torch.zeros(4)
    _, piece = tensor_file({"w": values})
    values[0] = 1.0
    assert bytes(piece[:4]) == b"\0\0\x80?"


def test_what_shares_memory_is_in_the_file_twice() -> None:
    values = torch.arange(4.0)
    found = load(b"".join(tensor_file({"one": values, "two": values})))
    assert torch.equal(found["one"], found["two"])


def test_what_was_handed_on_is_counted_and_hashed() -> None:
    written = Written([b"abc", memoryview(b"de")])
    assert b"".join(written) == b"abcde"
    assert written.facts() == {"bytes": 5, "sha256": hashlib.sha256(b"abcde").hexdigest()}
