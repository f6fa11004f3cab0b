"""A small text, its manifest and a small trainer, made once and read only; ranks, and damage."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from diloco.durable import Disk, Step
from diloco.inner import checkpoint
from diloco.inner.checkpoint import Checkpoint
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.trainer import ExtraState, Resumed, StepInfo, Trainer, Verdict
from tests.layouts import heard, ranks


def write_text(folder: Path, num_files: int = 12) -> Path:
    """Files of pseudo-words in ``folder``: learnable, distinct and the same everywhere."""
    draw = random.Random(5)
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


def tiny(dim: int = 16, tied: bool = False) -> Transformer:
    return Transformer(ModelOptions(vocab_size=40, layers=1, dim=dim, heads=2, context=8, tied=tied), 1)


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


class NoRoom(Disk):
    """A disk without room for files whose names end so."""

    end = ".safetensors"

    def make(self, path: Path, write: Any, step: Step) -> None:
        if path.name.endswith(self.end):
            raise OSError(28, "No space left on device")
        super().make(path, write, step)


def steps_of(
    made: Trainer,
    until_step: int,
    also: Callable[[StepInfo], object] = lambda info: None,
    extra_state: ExtraState = lambda: ({}, {}),
) -> list[StepInfo]:
    """What is told of each step until then; ``also`` is called after each."""
    found: list[StepInfo] = []

    def after_step(info: StepInfo) -> Verdict:
        found.append(info)
        also(info)
        return Verdict()

    made.run(until_step=until_step, after_step=after_step, extra_state=extra_state)
    return found


def held_back(patch: pytest.MonkeyPatch, name: str, error: Exception | None = None) -> threading.Event:
    """What lets a function of ``checkpoint`` begin, which then raises ``error`` if there is one."""
    gate, real = threading.Event(), getattr(checkpoint, name)

    def waits(*arguments: Any) -> Any:
        assert gate.wait(20)
        if error is not None:
            raise error
        return real(*arguments)

    patch.setattr(checkpoint, name, waits)
    return gate


def written(made: Trainer) -> None:
    """Wait until nothing is being written: its next step finds out how that has ended."""
    futures.wait([each.writer._written for each in made._savings if each.writer._written is not None], 60)


def resumed(made: Trainer, checkpoint: Checkpoint | None = None) -> Resumed:
    """What is restored of that checkpoint, or of its newest one; there is one."""
    found = made.resume(checkpoint)
    assert found is not None
    return found


def run_ranks(program: ModuleType, world: int, *told: Path) -> None:
    """Fork ranks that are ``program.main`` and wait until each is done."""
    with ranks(program.main, world, *told) as ends:
        for end in ends:
            while heard(end) != "done":
                pass
