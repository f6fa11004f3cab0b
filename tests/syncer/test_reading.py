"""Files come as they were written, or are named; whatever their length against the pieces that they are read in."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch

from diloco.syncer import snapshots
from diloco.syncer.snapshots import NotAsWritten, read_verified

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", PIECE)


def told(path: Path, content: bytes) -> tuple[Path, int, str]:
    path.write_bytes(content)
    return path, len(content), hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE, 10 * PIECE + 5])
def test_what_is_read_is_what_was_written(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (found,) = read_verified([told(tmp_path / "a", content)])
    assert found.numpy().tobytes() == content


def test_many_come_in_their_order(tmp_path: Path) -> None:
    contents = [random.Random(number).randbytes(50 * number) for number in range(20)]
    files = [told(tmp_path / str(number), content) for number, content in enumerate(contents)]
    assert [found.numpy().tobytes() for found in read_verified(files)] == contents
    assert read_verified([]) == []


@pytest.mark.parametrize("at", [0, PIECE, 5 * PIECE + 3])
def test_a_flipped_bit_a_cut_and_a_longer_file_are_named(tmp_path: Path, at: int) -> None:
    content = random.Random(at).randbytes(5 * PIECE + 4)
    wanted = [told(tmp_path / "whole", content), told(tmp_path / "harmed", content)]
    flipped = bytearray(content)
    flipped[at] ^= 4
    for harmed in (bytes(flipped), content[:at], content + b"!"):
        (tmp_path / "harmed").write_bytes(harmed)
        with pytest.raises(NotAsWritten, match="harmed is damaged"):
            read_verified(wanted)
    (tmp_path / "harmed").unlink()
    with pytest.raises(FileNotFoundError):
        read_verified(wanted)


def test_a_file_that_is_cut_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(1).randbytes(6 * PIECE)
    wanted = told(tmp_path / "a", content)
    empty = torch.empty

    def cut(size: int, dtype: torch.dtype) -> torch.Tensor:
        with (tmp_path / "a").open("r+b") as file:
            file.truncate(2 * PIECE + 5)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", cut)
    with pytest.raises(NotAsWritten, match="a is damaged"):
        read_verified([wanted])
