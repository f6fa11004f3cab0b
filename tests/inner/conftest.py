"""A small text, its manifest and a small trainer, made once and read only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest


def write_text(folder: Path, num_files: int = 12, seed: int = 5) -> Path:
    """Files of pseudo-words in ``folder``: learnable, distinct and the same everywhere."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(30)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(40))
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> CorpusManifest:
    root = tmp_path_factory.mktemp("corpus")
    options = DataOptions(kind="text", path=str(write_text(root / "text")), tokenizer="bytes")
    return prepare_corpus(options, root / "cache")
