"""Text to token ids and back, without loss: ``bytes``, ``bpe1024``, whose merges are shipped, or a ``tokenizer.json``.

``bpe1024`` is byte-level BPE (arXiv 1508.07909; the byte alphabet of GPT-2) with 256 bytes, 767 merges learned on the
training split of the Python standard library, and the end of a file as its last id.  The end of a file is not part of
the merges, so no text can spell it.

A ``tokenizer.json`` is read as models of the field come with one.

The same ids come out of what ``field_form`` gives, which is what an exported model takes along.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

TOKENIZERS = ("bytes", "bpe1024")
BPE_VOCAB_SIZE = 1024
END = "<|end_of_file|>"
"""What the end of a file is called in the field's form, where each id has a text."""
VOCAB_SIZE_MAX = 1 << 24
FILE_BYTES_MAX = 256 << 20


def is_file(name: str) -> bool:
    """Whether ``name`` is that of a file, and not of a tokenizer that everybody has."""
    return name.endswith(".json")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What holds every id below ``vocab_size``, little endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


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


class FileTokenizer:
    """What ``path`` says.  The end of a file is what the files beside it call the end of a text.

    ``name`` is made of the content, so that it is the same wherever the file lies.
    """

    def __init__(self, path: str, end_of_file: bool) -> None:
        """ValueError names a file that is none, or that says nothing about ends when they are wanted."""
        text = _read(Path(path))
        self._own = _parsed(path, text)
        self.vocab_size = max(self._own.get_vocab(with_added_tokens=True).values(), default=0) + 1
        require(
            self.vocab_size <= VOCAB_SIZE_MAX, "tokenizer", path, f"{self.vocab_size} ids, at most {VOCAB_SIZE_MAX}"
        )
        self.end_of_file = _end_of(Path(path), self._own) if end_of_file else None
        self.digest = hashlib.sha256(text + f"\0{self.end_of_file}".encode()).hexdigest()
        self.name = f"file-{self.digest[:16]}"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Ids of each text, of ``token_dtype`` [tokens]."""
        encodings = self._own.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=token_dtype(self.vocab_size)) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return str(self._own.decode(list(ids)))

    def field_form(self) -> tokenizers.Tokenizer:
        """What was read."""
        return tokenizers.Tokenizer.from_str(self._own.to_str())


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        require(size <= FILE_BYTES_MAX, "tokenizer", str(path), f"{size} bytes, at most {FILE_BYTES_MAX}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"tokenizer is {str(path)!r}: {error.strerror}") from error


def _parsed(path: str, text: bytes) -> tokenizers.Tokenizer:
    try:
        found = tokenizers.Tokenizer.from_str(text.decode())
    except Exception as error:  # The library raises no kind of its own.
        raise ValueError(f"tokenizer is {path!r}: no tokenizer.json: {str(error)[:200]}") from error
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True  # What the text itself spells is text: no document can end another.
    return found


def _end_of(path: Path, own: tokenizers.Tokenizer) -> int:
    """The id that the files beside ``path`` say ends a text."""
    told = _json_beside(path, "tokenizer_config.json").get("eos_token")
    text = told.get("content") if isinstance(told, dict) else told
    found: Any = own.token_to_id(text) if isinstance(text, str) else None
    for name in ("config.json", "generation_config.json"):
        if found is None:
            ids = _json_beside(path, name).get("eos_token_id")
            found = ids[0] if isinstance(ids, list) and ids else ids
    if type(found) is not int or own.id_to_token(found) is None:
        raise ValueError(
            f"end_of_file is True: nothing beside {path} says which token ends a text (eos_token in "
            "tokenizer_config.json, or eos_token_id in config.json)"
        )
    return found


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    """The object in the file ``name`` beside ``path``, empty where there is none; ValueError where it is no JSON."""
    file = path.with_name(name)
    if not file.is_file():
        return {}
    try:
        told = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer is {str(path)!r}: {file} beside it is no JSON: {error}") from error
    return told if isinstance(told, dict) else {}


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
