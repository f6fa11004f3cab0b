"""A tokenizer from a ``tokenizer.json``, as models of the field come with one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VOCAB_SIZE_MAX = 1 << 24
FILE_BYTES_MAX = 256 << 20


def is_file(name: str) -> bool:
    """Whether ``name`` is that of a file, and not of a tokenizer that everybody has."""
    return name.endswith(".json")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What holds every id below ``vocab_size``, little endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


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
