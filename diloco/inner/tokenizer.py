"""Text to token ids and back, without loss: ``bytes``, ``bpe1024``, whose merges are shipped, or a ``tokenizer.json``.

``bpe1024`` is byte-level BPE (arXiv 1508.07909; the byte alphabet of GPT-2) with 256 bytes, 767 merges that
``BpeTrainer`` of the library ``tokenizers`` learned on the training split of the Python standard library (its
byte-level alphabet, 1,023 entries, no special tokens), and the end of a file as its last id.  The end of a file is not
part of the merges, so no text can spell it.

A ``tokenizer.json`` is a file of the library ``tokenizers``, as published with models on the hub.

``field_form`` returns a tokenizer of that library with the same ids, to be shipped with an exported model.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from diloco.inner import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

TOKENIZERS = ("bytes", "bpe1024")
BPE_VOCAB_SIZE = 1024
END = "<|end_of_file|>"
"""Text of the end-of-file token in ``field_form``, where each id needs a text."""
VOCAB_SIZE_MAX = 1 << 24
FILE_BYTES_MAX = 256 << 20
PIECE_CHARACTERS = 1_000_000
"""Characters encoded at once, where a longer text can be cut; the library needs about 140 times their size."""
CUT = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= \S)")
CUTS_MAX = 20
WINDOW_CHARACTERS = 1000


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the little-endian dtype that holds every id below ``vocab_size``: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokenizer:
    """Text to ids and back, by a tokenizer of the library ``tokenizers``."""

    def __init__(
        self, name: str, own: tokenizers.Tokenizer, vocab_size: int, end_of_file: int | None, digest: str
    ) -> None:
        self.name, self.vocab_size = name, vocab_size
        self.end_of_file = end_of_file
        """Id appended to each document; None for none."""
        self.digest = digest
        """Sha256 hex of all that decides how text becomes ids."""
        self._own = own

    def encode_batch(self, texts: Sequence[str]) -> Sequence[NDArray[np.unsignedinteger[Any]]]:
        """Return the ids of each text, uint16 or uint32 [tokens] (``token_dtype``), without the end of the file."""
        long = [len(text) > PIECE_CHARACTERS for text in texts]
        short = iter(self._encode([text for text, is_long in zip(texts, long, strict=True) if not is_long]))
        return [self._by_pieces(text) if is_long else next(short) for text, is_long in zip(texts, long, strict=True)]

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        encodings = self._own.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=token_dtype(self.vocab_size)) for encoding in encodings]

    def _by_pieces(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        return np.concatenate([self._encode([piece])[0] for piece in self._pieces(text)])

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield ``text`` in pieces whose ids are those of the whole; the rest at once where no cut is found."""
        at = 0
        while len(text) - at > PIECE_CHARACTERS:
            cuts = (found.start() for found in CUT.finditer(text, at + PIECE_CHARACTERS))
            cut = next((each for each in islice(cuts, CUTS_MAX) if self._may_cut(text, each)), len(text))
            yield text[at:cut]
            at = cut
        yield text[at:]

    def _may_cut(self, text: str, cut: int) -> bool:
        """Return whether the text around ``cut`` has the same ids as its two parts together."""
        before, after = text[max(cut - WINDOW_CHARACTERS, 0) : cut], text[cut : cut + WINDOW_CHARACTERS]
        together, *parts = self._encode([before + after, before, after])
        return bool(np.array_equal(together, np.concatenate(parts)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; ends of files are dropped, bytes that are not UTF-8 become U+FFFD."""
        return str(self._own.decode(list(ids)))

    def field_form(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer as an object of ``tokenizers``, where the end of a file is a token with a text."""
        made = tokenizers.Tokenizer.from_str(self._own.to_str())
        if self.end_of_file is not None and made.id_to_token(self.end_of_file) is None:
            made.add_special_tokens([END])
            assert made.token_to_id(END) == self.end_of_file, "the end of a file is the last id"
        return made


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8; the end of a file, if wanted, is id 256.

    A byte-level BPE without merges, which ``field_form`` returns, gives the same ids more slowly.
    """

    def __init__(self, end_of_file: bool) -> None:
        # GPT-2's letter for a byte: the byte's own character if it is printable, else one from U+0100 on.
        prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
        above = iter(range(256, 512))
        vocab = {chr(byte if byte in prints else next(above)): byte for byte in range(256)}
        own = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        own.decoder = decoders.ByteLevel()
        end = 256 if end_of_file else None
        super().__init__("bytes", own, 257 if end_of_file else 256, end, hashlib.sha256(b"bytes").hexdigest())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
        """Return the ids of each text, uint16 [bytes of its UTF-8]."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; ends of files are dropped."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@cache
def _shipped() -> tuple[tokenizers.Tokenizer, str]:
    """Return the shipped tokenizer, shared by all users, who must not change it, and its digest."""
    shipped = resources.files("diloco.inner").joinpath("bpe1024.json").read_bytes()
    return tokenizers.Tokenizer.from_str(shipped.decode()), hashlib.sha256(shipped).hexdigest()


def _of_file(path: str, end_of_file: bool) -> Tokenizer:
    """Return the tokenizer of the file ``path``; the files beside it define which token ends a text.

    Its name is derived from the content, so that it is the same wherever the file is.  ValueError names a file that is
    no tokenizer, or without a token that ends a text if ``end_of_file``.
    """
    text = _read(Path(path))
    try:
        own = tokenizers.Tokenizer.from_str(text.decode())
    except Exception as error:  # The library has no error class of its own.
        raise ValueError(f"tokenizer is {path!r}: not a tokenizer.json: {str(error)[:200]}") from error
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True  # A special token spelled in a text stays text, so no document ends another.
    vocab_size = max(own.get_vocab(with_added_tokens=True).values(), default=0) + 1
    require(vocab_size <= VOCAB_SIZE_MAX, "tokenizer", path, f"{vocab_size} ids, at most {VOCAB_SIZE_MAX}")
    end = _end_of(Path(path), own) if end_of_file else None
    digest = hashlib.sha256(text + f"\0{end}".encode()).hexdigest()
    return Tokenizer(f"file-{digest[:16]}", own, vocab_size, end, digest)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        require(size <= FILE_BYTES_MAX, "tokenizer", str(path), f"{size} bytes, at most {FILE_BYTES_MAX}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"tokenizer is {str(path)!r}: {error.strerror}") from error


def _end_of(path: Path, own: tokenizers.Tokenizer) -> int:
    """Return the id of the token that ends a text, according to the files beside ``path``."""
    told = _json_beside(path, "tokenizer_config.json").get("eos_token")
    text = told.get("content") if isinstance(told, dict) else told
    found: Any = own.token_to_id(text) if isinstance(text, str) else None
    for name in ("config.json", "generation_config.json"):
        if found is None:
            ids = _json_beside(path, name).get("eos_token_id")
            found = ids[0] if isinstance(ids, list) and ids else ids
    if type(found) is not int or found < 0 or own.id_to_token(found) is None:
        raise ValueError(
            f"end_of_file is True: no file beside {path} names the token that ends a text (eos_token in "
            "tokenizer_config.json, or eos_token_id in config.json)"
        )
    return found


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    """Return the object in the file ``name`` beside ``path``, empty if there is none; ValueError if it is not JSON."""
    file = path.with_name(name)
    if not file.is_file():
        return {}
    try:
        told = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer is {str(path)!r}: {file} beside it is not JSON: {error}") from error
    return told if isinstance(told, dict) else {}


def make_tokenizer(name: str, end_of_file: bool = True) -> Tokenizer:
    """Return the tokenizer called ``name``, or that of the file ``name``; ValueError names an unknown one."""
    check_name(name)
    if name not in TOKENIZERS:
        return _of_file(name, end_of_file)
    if name == "bytes":
        return ByteTokenizer(end_of_file)
    own, digest = _shipped()
    return Tokenizer(name, own, BPE_VOCAB_SIZE, BPE_VOCAB_SIZE - 1 if end_of_file else None, digest)


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is the name of a tokenizer or the path of a file that may be one."""
    wanted = f"one of {', '.join(TOKENIZERS)}, or the path of a tokenizer.json"
    require(name in TOKENIZERS or name.endswith(".json"), "tokenizer", name, wanted)
