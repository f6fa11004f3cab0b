"""Which documents there are: the Python standard library, a folder of text, or JSONL; each once, split by hash.

A document is known by the sha256 of its bytes.  Its place (file, offset) is how it is read again and is part of
nothing that two machines compare.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KINDS = ("stdlib", "text", "jsonl", "tokens", "hf")
SPLITS = ("train", "validation")
FIELD = "text"
"""Which field of a line of JSON is the text, where nothing else is said."""
STDLIB_BYTES_MIN = 2_000_000
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
VALIDATION_FIRST_BYTE = 16
"""A document whose sha256 begins with a byte below this is validation: 1 in 16."""


class DataError(ValueError):
    """The text cannot be used as it is; the message says which and what to do."""


class Document(NamedTuple):
    """One distinct text and where it lies: ``length`` bytes from ``offset`` of ``path`` (for JSONL: its line)."""

    digest: bytes
    path: Path
    offset: int
    length: int
    text_bytes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """The distinct documents, sorted by digest."""

    documents: list[Document]
    num_duplicates: int
    num_not_text: int
    """Documents left out because they are not UTF-8 or empty."""
    digest: str
    """Sha256 hex of the documents' sorted sha256 digests: the identity of the text, whatever the machine."""

    @property
    def text_bytes(self) -> int:
        """Bytes of all distinct documents."""
        return sum(document.text_bytes for document in self.documents)

    def split(self, name: str) -> list[Document]:
        """Documents of ``train`` or ``validation``, sorted by digest.

        By the first byte of the digest, never by path order.  Of a few large documents at least the one with the
        smallest digest is validation, and at least the one with the largest is not.
        """
        low = sum(document.digest[0] < VALIDATION_FIRST_BYTE for document in self.documents)
        cut = min(max(low, 1), len(self.documents) - 1)
        return self.documents[:cut] if name == "validation" else self.documents[cut:]


def source_files(kind: str, path: str, pattern: str) -> list[Path]:
    """Files that a corpus of ``kind`` is read from, sorted; DataError when there are none."""
    if kind == "stdlib":
        found = []
        for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
            inner[:] = [name for name in inner if name not in STDLIB_LEFT_OUT]  # Packages are installed below it too.
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(file for file in found if file.is_file())
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"path is {path!r}: there is no such file or folder")
    files = sorted(file for file in root.glob(pattern) if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"path is {path!r}: no file in it matches pattern={pattern!r}")
    return files


def read_corpus(kind: str, files: Iterable[Path], field: str = FIELD) -> Corpus:
    """Read and hash every document once; DataError says what is wrong with the text.  ``field`` is that of JSONL.

    Memory holds a few hundred bytes a document, not the text.
    """
    kept: dict[bytes, Document] = {}
    duplicates = not_text = 0
    for document in _found(kind, files, field):
        if document is None:
            not_text += 1
        elif document.digest in kept:
            duplicates += 1
        else:
            kept[document.digest] = document
    documents = sorted(kept.values(), key=lambda document: document.digest)
    digest = hashlib.sha256(b"".join(document.digest for document in documents)).hexdigest()
    corpus = Corpus(documents, duplicates, not_text, digest)
    _check_enough(kind, corpus)
    return corpus


def _check_enough(kind: str, corpus: Corpus) -> None:
    if kind == "stdlib" and corpus.text_bytes < STDLIB_BYTES_MIN:
        root = sysconfig.get_paths()["stdlib"]
        raise DataError(
            f"this Python's standard library at {root} holds {corpus.text_bytes} bytes of source, and the built-in "
            f"corpus needs {STDLIB_BYTES_MIN}: use a Python with its .py files, or a folder of text of your own"
        )
    if len(corpus.documents) < len(SPLITS):
        raise DataError(
            f"the text holds {len(corpus.documents)} distinct document(s), and a split into training and validation by "
            "document needs 2 or more: cut it into several files, or give more"
        )


def _found(kind: str, files: Iterable[Path], field: str) -> Iterator[Document | None]:
    for file in files:
        if kind == "jsonl":
            yield from _found_in_jsonl(file, field)
        else:
            content = file.read_bytes()
            yield _as_document(content, file, 0, len(content))


def _found_in_jsonl(file: Path, field: str) -> Iterator[Document | None]:
    offset = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text = _text_of_line(line, f"{file}:{number}", field)
                yield _as_document(text.encode(errors="surrogatepass"), file, offset, len(line))
            offset += len(line)


def _text_of_line(line: bytes, where: str, field: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not a line of JSON: {error}") from error
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where} has no field "{field}" that is a string (data.field says which is the text)')
    return text


def _as_document(content: bytes, file: Path, offset: int, length: int) -> Document | None:
    """A document for ``content``, or None when it is empty or not UTF-8 (which the tokenizer could not give back)."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    if not content:
        return None
    return Document(hashlib.sha256(content).digest(), file, offset, length, len(content))


def read_text(kind: str, document: Document, field: str = FIELD) -> str:
    """The document's text again; DataError when the file has changed since it was hashed."""
    with document.path.open("rb") as file:
        file.seek(document.offset)
        content = file.read(document.length)
    jsonl = kind == "jsonl"
    text = _text_of_line(content, str(document.path), field) if jsonl else content.decode(errors="replace")
    if hashlib.sha256(text.encode(errors="surrogatepass")).digest() != document.digest:
        raise DataError(f"{document.path} changed while it was being prepared: start again when it is at rest")
    return text


def check_kind(kind: str, path: str) -> None:
    """ValueError unless ``kind`` is known and has a ``path`` where it needs one."""
    require(kind in KINDS, "kind", kind, f"one of {', '.join(KINDS)}")
    wanted = "a file or folder" + (", or a name on the hub" if kind == "hf" else "")
    require(kind == "stdlib" or bool(path), "path", path, f"{wanted}, for kind={kind}")
