"""Text to token ids and back, without loss: ``bytes``, and ``bpe1024``, whose merges are shipped with the package.

``bpe1024`` is byte-level BPE (arXiv 1508.07909; the byte alphabet of GPT-2) with 256 bytes, 767 merges learned on the
training split of the Python standard library, and the end of a file as its last id.  The end of a file is not part of
the merges, so no text can spell it.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

TOKENIZERS = ("bytes", "bpe1024")
BPE_VOCAB_SIZE = 1024


class Tokenizer(Protocol):
    """What the data floor asks of a tokenizer."""

    name: str
    vocab_size: int
    end_of_file: int | None
    """Id put behind each document; None for none."""
    digest: str
    """Sha256 hex of all that decides how text becomes ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
        """Ids of each text, uint16 [tokens], without the end of the file."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; ends of files vanish, bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """One token a byte of UTF-8; the end of a file, if wanted, is id 256."""

    def __init__(self, end_of_file: bool) -> None:
        self.name = "bytes"
        self.end_of_file = 256 if end_of_file else None
        self.vocab_size = 257 if end_of_file else 256
        self.digest = hashlib.sha256(b"bytes").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
        """Ids of each text, uint16 [bytes of its UTF-8]."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class BpeTokenizer:
    """The shipped byte-level BPE.  ``vocab_size`` is 1024 with and without ends of files."""

    def __init__(self, end_of_file: bool) -> None:
        shipped = resources.files("diloco.inner").joinpath("bpe1024.json").read_bytes()
        self._bpe = tokenizers.Tokenizer.from_str(shipped.decode())
        self.name = "bpe1024"
        self.end_of_file = BPE_VOCAB_SIZE - 1 if end_of_file else None
        self.vocab_size = BPE_VOCAB_SIZE
        self.digest = hashlib.sha256(shipped).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
        """Ids of each text, uint16 [tokens]."""
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return str(self._bpe.decode(list(ids)))


def make_tokenizer(name: str, end_of_file: bool = True) -> Tokenizer:
    """The tokenizer called ``name``; ValueError names an unknown one."""
    require(name in TOKENIZERS, "tokenizer", name, f"one of {', '.join(TOKENIZERS)}")
    return ByteTokenizer(end_of_file) if name == "bytes" else BpeTokenizer(end_of_file)


def train_bpe1024(texts: Iterable[str]) -> str:
    """Learn the merges on ``texts`` and return the JSON to ship as ``bpe1024.json``; the same texts give the same JSON.

    The last of the 1024 ids is left free for the end of a file.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCAB_SIZE - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return str(bpe.to_str()) + "\n"
