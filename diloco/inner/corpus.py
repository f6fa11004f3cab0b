"""The documents of a corpus, each once and split by hash, and the token shards that they are written to.

Documents come from the Python standard library, a folder of text, or JSONL.  A document is known by the sha256 of its
bytes.  Its place (file, offset) is how it is read again, and is part of nothing that two machines compare.

Shards hold at most so many tokens each, and a note after each says how far the text is through.  So the process after
one that was killed begins with the document in which the last whole shard ended.  The note of a shard is written when
the shard is durable; a shard without a note, or a note without its shard, is written again.  Where the text comes as a
stream, a mark among the notes says where the stream stood when all before it had been written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

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


NOTES = "notes.jsonl"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Note:
    """``shard`` of ``split`` ends behind ``documents`` whole documents and ``within`` tokens of the next."""

    split: str
    documents: int
    within: int
    shard: Shard


class Notes:
    """What a folder says of shards that were written there before, of the same text."""

    def __init__(self, folder: Path, text: str, width: int, *, marked: bool = False) -> None:
        """``text`` is all that decides the tokens; notes of another are thrown away, with their shards.

        ``width`` is how many bytes a token has.  ``marked``: what is behind the last mark counts for nothing.
        """
        self._path, self._text, self._width = folder / NOTES, text, width
        self.mark: dict[str, Any] | None = None
        """The last one, of whoever wrote there before."""
        self._notes = self._read(folder, marked)
        kept = {NOTES, *(note.shard.file for note in self._notes)}
        for left in [path for path in folder.iterdir() if path.name not in kept]:
            left.unlink()
        self._path.write_bytes(b"")  # Anew, without a line that was being written.
        for told in ({"text": text}, *(asdict(note) for note in self._notes)):
            self._append(told)
        if self.mark is not None:
            self.put(self.mark)

    def _read(self, folder: Path, marked: bool) -> list[Note]:
        found: list[Note] = []
        whole = 0
        try:
            first, *lines = self._path.read_bytes().splitlines()
            told = json.loads(first)
            told.pop("crc32", None)
            if told != {"text": self._text}:
                return []
            for line in lines:
                told = json.loads(line)
                known = told.pop("crc32", None)  # An earlier release wrote none.
                if known not in (None, _crc32(told)):
                    break
                if "mark" in told:
                    self.mark, whole = told["mark"], len(found)
                    continue
                note = Note(**{**told, "shard": Shard(**told["shard"])})
                if (folder / note.shard.file).stat().st_size != self._width * note.shard.tokens:
                    break
                found.append(note)
        except (OSError, ValueError, TypeError, KeyError):
            pass  # The last line was being written; what is before it holds.
        return found[:whole] if marked else found

    def of(self, split: str) -> list[Note]:
        """Those of one split, in order."""
        return [note for note in self._notes if note.split == split]

    def add(self, note: Note) -> None:
        """``note.shard`` is durable."""
        self._append(asdict(note))

    def put(self, mark: dict[str, Any]) -> None:
        """All shards up to where ``mark`` says are durable."""
        self._append({"mark": mark})

    def _append(self, told: dict[str, object]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps({**told, "crc32": _crc32(told)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """All is written."""
        self._path.unlink()


def _crc32(told: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


class ShardWriter:
    """Appends the ids of documents to shards of at most ``shard_tokens`` each, hashing on the way."""

    def __init__(self, directory: Path, split: str, shard_tokens: int, dtype: np.dtype[Any], notes: Notes) -> None:
        self._directory, self._split, self._shard_tokens, self._notes = directory, split, shard_tokens, notes
        self.dtype = dtype
        before = notes.of(split)
        self._shards = [note.shard for note in before]
        self.documents = before[-1].documents if before else 0
        """Whole documents that are written; the next one to be handed in."""
        self._within = before[-1].within if before else 0
        self._pending: list[NDArray[Any]] = []
        self._held = 0

    @property
    def held(self) -> int:
        """Tokens that are in no shard yet."""
        return self._held

    def write(self, ids: NDArray[Any]) -> None:
        """Append the ``ids`` of the next document; a shard that is full goes to disk."""
        at, self._within = self._within, 0
        while self._held + len(ids) - at >= self._shard_tokens:
            room = self._shard_tokens - self._held
            self._pending.append(ids[at : at + room])
            at += room
            self._flush(at)
        self._pending.append(ids[at:])
        self._held += len(ids) - at
        self.documents += 1

    def close(self) -> list[Shard]:
        """Write what is left and return all shards."""
        if self._held:
            self._flush(0)
        return self._shards

    def _flush(self, within: int) -> None:
        values = np.concatenate(self._pending).astype(self.dtype)
        content = values.tobytes()
        name = f"{self._split}-{len(self._shards):05d}.bin"
        with (self._directory / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shard = Shard(name, len(values), hashlib.sha256(content).hexdigest())
        self._shards.append(shard)
        self._notes.add(Note(self._split, self.documents, within, shard))
        self._pending, self._held = [], 0
