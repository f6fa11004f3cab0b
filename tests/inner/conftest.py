"""A small text, its manifest and a small trainer, made once and read only; ranks, and damage."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest
from tests.forked import forkserver
from tests.layouts import free_port


def write_text(folder: Path, num_files: int = 12, seed: int = 5) -> Path:
    """Files of pseudo-words in ``folder``: learnable, distinct and the same everywhere."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(30)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(40))
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def options(path: Path | str, kind: str = "text", **changes: Any) -> DataOptions:
    """What is at ``path``, by its bytes."""
    return DataOptions(**{"kind": kind, "path": str(path), "tokenizer": "bytes", **changes})


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> CorpusManifest:
    root = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(options(write_text(root / "text")), root / "cache")


def tokens_of(manifest: CorpusManifest, split: str) -> list[int]:
    """All tokens of the shards of ``split``."""
    parts = [np.fromfile(manifest.folder / shard.file, dtype="<u2") for shard in manifest.split(split).shards]
    return [int(token) for token in np.concatenate(parts)]


def damage(file: Path, harm: str = "flip") -> None:
    """Flip one bit of what lies there (a second time makes it whole), cut it in half, or remove it."""
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(content if harm == "flip" else content[: len(content) // 2])


def run_ranks(program: str, world: int, *told: str) -> None:
    """Fork the ranks of ``tests.inner.PROGRAM`` and wait for them."""
    context, port, said = forkserver(), str(free_port()), Path(tempfile.mkdtemp())
    ranks = [
        context.Process(target=run_rank, args=(program, [str(rank), str(world), port, *told], said / str(rank)))
        for rank in range(world)
    ]
    until = time.monotonic() + 240
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(until - time.monotonic())
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * world, "\n".join(each.read_text() for each in said.iterdir())


def run_rank(program: str, arguments: list[str], said: Path) -> None:
    """One rank, whose words go to a file."""
    with said.open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    torch.set_num_threads(1)
    sys.argv[1:] = arguments
    import_module(f"tests.inner.{program}").main()
