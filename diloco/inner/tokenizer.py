"""Text to token ids and back, without loss: ``bytes``, ``bpe1024``, whose merges are shipped, or a ``tokenizer.json``.

``bpe1024`` is byte-level BPE (arXiv 1508.07909; the byte alphabet of GPT-2) with 256 bytes, 767 merges learned on the
training split of the Python standard library, and the end of a file as its last id.  The end of a file is not part of
the merges, so no text can spell it.

The same ids come out of what ``field_form`` gives, which is what an exported model takes along.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from diloco.inner.checks import require
from diloco.inner.tokenizer_file import FileTokenizer, is_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

TOKENIZERS = ("bytes", "bpe1024")
BPE_VOCAB_SIZE = 1024
END = "<|end_of_file|>"
"""What the end of a file is called in the field's form, where each id has a text."""


class Tokenizer(Protocol):
    """What the data floor asks of a tokenizer."""

    name: str
    vocab_size: int
    end_of_file: int | None
    """Id put behind each document; None for none."""
    digest: str
    """Sha256 hex of all that decides how text becomes ids."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[NDArray[np.unsignedinteger[Any]]]:
        """Ids of each text, uint16 or uint32 [tokens] (``token_dtype``), without the end of the file."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; ends of files vanish, bytes that are not UTF-8 become U+FFFD."""

    def field_form(self) -> tokenizers.Tokenizer:
        """The same as a tokenizer of the field's own kind, in which the end of a file is a special token."""


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

    def field_form(self) -> tokenizers.Tokenizer:
        """A byte-level BPE without merges, whose ids are the bytes."""
        vocab = {letter: byte for byte, letter in enumerate(byte_letters())}
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        return _with_end(made, self.end_of_file)


class BpeTokenizer:
    """The shipped byte-level BPE.  ``vocab_size`` is 1024 with and without ends of files."""

    def __init__(self, end_of_file: bool) -> None:
        self._bpe, self.digest = _shipped()
        self.name = "bpe1024"
        self.end_of_file = BPE_VOCAB_SIZE - 1 if end_of_file else None
        self.vocab_size = BPE_VOCAB_SIZE

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
        """Ids of each text, uint16 [tokens]."""
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return str(self._bpe.decode(list(ids)))

    def field_form(self) -> tokenizers.Tokenizer:
        """The shipped one."""
        return _with_end(tokenizers.Tokenizer.from_str(self._bpe.to_str()), self.end_of_file)


@cache
def _shipped() -> tuple[tokenizers.Tokenizer, str]:
    """What is read once for all that use it, none of whom changes it, and its digest."""
    shipped = resources.files("diloco.inner").joinpath("bpe1024.json").read_bytes()
    return tokenizers.Tokenizer.from_str(shipped.decode()), hashlib.sha256(shipped).hexdigest()


def make_tokenizer(name: str, end_of_file: bool = True) -> Tokenizer:
    """The tokenizer called ``name``, or of the file ``name``; ValueError names an unknown one."""
    check_name(name)
    if is_file(name):
        return FileTokenizer(name, end_of_file)
    return ByteTokenizer(end_of_file) if name == "bytes" else BpeTokenizer(end_of_file)


def check_name(name: str) -> None:
    """ValueError unless ``name`` is that of a tokenizer, or of a file that may be one."""
    wanted = f"one of {', '.join(TOKENIZERS)}, or the path of a tokenizer.json"
    require(name in TOKENIZERS or is_file(name), "tokenizer", name, wanted)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in the field's byte-level form: its own where it prints, else one above."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    above = iter(range(256, 512))
    return [chr(byte if byte in prints else next(above)) for byte in range(256)]


def _with_end(made: tokenizers.Tokenizer, end_of_file: int | None) -> tokenizers.Tokenizer:
    if end_of_file is not None:
        made.add_special_tokens([END])
        assert made.token_to_id(END) == end_of_file, "the end of a file is the id behind all others"
    return made


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
