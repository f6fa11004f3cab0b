"""A corpus: text, or existing token ids, as memory-mapped token shards with a manifest.

``prepare_corpus`` makes a corpus of any kind, once: ``<cache>/<key>/{manifest.json, train-00000.bin,
validation-00000.bin, ...}``.  A shard is little-endian uint16 (uint32 if the tokenizer has too many ids for uint16).

Documents of the Python standard library, a folder of text, or JSONL are deduplicated, split by hash, and ordered by
their sha256.  The sha256 of its bytes identifies a document.  Its place (file, offset) only serves to read it again;
two machines never compare places.

Their shards hold at most ``shard_tokens`` tokens.  After each shard a note records how much of the text is done, so
that a process after one that was killed resumes with the document in which the last complete shard ended.  The note is
written once the shard is durable.  A shard without a note, or a note without its shard, is written again.

A data set of Hugging Face's is read once as a stream and stored as token shards.  The tokens are kept and the text is
not: units of text are addressed by number, and a stream has no random access.  Documents stay in the order of the
stream.  Their digests, or the data set's own splits, decide which are validation, so the same data set with the same
settings gives the same tokens to every reader.  Once there are enough tokens for a shard, everything buffered is
written, and a mark among the notes records the position of the stream; after a crash the next process resumes there.
Duplicate documents are not removed, because finding them would need the whole data set.  The library ``datasets`` is an
optional dependency, imported only when a stream is read.

Token ids (``tokens``) are existing little-endian files, used where they are.  They are read once, to compute digests
and to check that the tokenizer has every id; then they are memory-mapped like other shards.  A file whose name begins
with "val" is validation, every other one training.  A folder with a corpus of another cache is used unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diloco.durable import PLAIN_DISK, Step, lock, write_file
from diloco.inner import require
from diloco.inner.data import (
    FORMAT,
    SPLITS,
    CorpusManifest,
    DataError,
    Shard,
    SplitManifest,
    load_manifest,
)
from diloco.inner.tokenizer import Tokenizer, check_name, make_tokenizer, token_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

KINDS = ("stdlib", "text", "jsonl", "tokens", "hf")
FIELD = "text"
"""Default name of the JSON field that holds the text."""
STDLIB_BYTES_MIN = 2_000_000
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
VALIDATION_FIRST_BYTE = 16
"""A document whose sha256 begins with a byte below this is validation: 1 in 16."""


class Document(NamedTuple):
    """One distinct text and its place: ``length`` bytes from ``offset`` of ``path`` (for JSONL: its line)."""

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
    """Sha256 hex of the documents' sorted sha256 digests: the identity of the text, equal on every machine."""

    @property
    def text_bytes(self) -> int:
        """Bytes of all distinct documents."""
        return sum(document.text_bytes for document in self.documents)

    def split(self, name: str) -> list[Document]:
        """Return the documents of ``train`` or ``validation``, sorted by digest.

        The first byte of the digest decides, never the path order.  However few documents there are, the one with the
        smallest digest is validation, and the one with the largest is training.
        """
        low = sum(document.digest[0] < VALIDATION_FIRST_BYTE for document in self.documents)
        cut = min(max(low, 1), len(self.documents) - 1)
        return self.documents[:cut] if name == "validation" else self.documents[cut:]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def source_files(kind: str, path: str, pattern: str, runs: Path | None = None) -> list[Path]:
    """Return the files that a corpus of ``kind`` is read from, sorted; DataError if there are none.

    Files in ``runs``, a folder below ``path``, are no text: logs there grow while the corpus is made.
    """
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
    try:
        found = [file for file in root.glob(pattern) if file.is_file() and not _is_hidden(file.relative_to(root))]
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"pattern is {pattern!r}: {error}") from error
    if runs is not None and root.resolve() in (runs := runs.resolve()).parents:
        found = [file for file in found if runs not in file.resolve().parents]
    files = sorted(found)
    if not files:
        raise DataError(f"path is {path!r}: no file in it matches pattern={pattern!r}")
    return files


def read_corpus(kind: str, files: Iterable[Path], field: str = FIELD) -> Corpus:
    """Read and hash every document once; DataError says what is wrong with the text.  ``field`` is for JSONL.

    Memory holds a few hundred bytes per document, not the text.
    """
    kept: dict[bytes, Document] = {}
    duplicates = not_text = 0
    for document in _found(kind, files, field):
        if not document.text_bytes:
            not_text += 1
        elif document.digest in kept:
            duplicates += 1
        else:
            kept[document.digest] = document
    documents = sorted(kept.values(), key=lambda document: document.digest)
    digest = hashlib.sha256(b"".join(document.digest for document in documents)).hexdigest()
    corpus = Corpus(documents, duplicates, not_text, digest)
    if kind == "stdlib" and corpus.text_bytes < STDLIB_BYTES_MIN:
        root = sysconfig.get_paths()["stdlib"]
        raise DataError(
            f"this Python's standard library at {root} holds {corpus.text_bytes} bytes of source, and the built-in "
            f"corpus needs {STDLIB_BYTES_MIN}: use a Python with its .py files, or a folder of text of your own"
        )
    if len(documents) < len(SPLITS):
        raise DataError(
            f"the text holds {len(documents)} distinct document(s), and a split into training and validation by "
            "document needs 2 or more: cut it into several files, or give more"
        )
    return corpus


def _found(kind: str, files: Iterable[Path], field: str) -> Iterator[Document]:
    """Yield the documents of ``files``; one that is not text has no ``text_bytes``."""
    for file in files:
        offset = 0
        with file.open("rb") as opened:
            for number, content in enumerate(opened if kind == "jsonl" else [opened.read()], start=1):
                if kind != "jsonl" or content.strip():
                    text = _text_of(kind, content, f"{file}:{number}", field)
                    yield Document(hashlib.sha256(text).digest(), file, offset, len(content), len(text))
                offset += len(content)


def _text_of(kind: str, content: bytes, where: str, field: str) -> bytes:
    """Return the UTF-8 of the text in a file's or a JSON line's ``content``, as ``_utf8`` does."""
    if kind != "jsonl":
        return _utf8(content.decode(errors="surrogateescape"))
    try:
        row = json.loads(content)
    except ValueError as error:
        raise DataError(f"{where} is not a line of JSON: {error}") from error
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where} has no field "{field}" that is a string (data.field names the field with the text)')
    return _utf8(text)


def _utf8(text: str) -> bytes:
    """Return ``text`` in UTF-8; empty if UTF-8 has no code for a part of it, which the tokenizer could not restore."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return b""


def read_text(kind: str, document: Document, field: str = FIELD) -> str:
    """Read the document's text again; DataError if the file has changed since it was hashed."""
    with document.path.open("rb") as file:
        file.seek(document.offset)
        content = file.read(document.length)
    text = _text_of(kind, content, str(document.path), field)
    if hashlib.sha256(text).digest() != document.digest:
        raise DataError(f"{document.path} changed while it was being prepared: start again once it is final")
    return text.decode()


NOTES = "notes.jsonl"


@dataclass(frozen=True, slots=True)
class Note:
    """``shard`` of ``split`` ends after ``documents`` whole documents and ``within`` tokens of the next one."""

    split: str
    documents: int
    within: int
    shard: Shard


class Notes:
    """The file of notes on the shards that earlier processes have written to a folder, for the same text."""

    def __init__(self, folder: Path, text: str, width: int, *, marked: bool = False) -> None:
        """``text`` describes all that decides the tokens; notes with another one are deleted, with their shards.

        ``width`` is the number of bytes of a token.  With ``marked``, notes after the last mark are dropped.
        """
        self.folder, self._path = folder, folder / NOTES
        begin = {"text": text}
        told = self._read(width)
        told = told if told[:1] == [begin] else [begin]
        while marked and len(told) > 1 and "mark" not in told[-1]:
            told.pop()
        self.mark: dict[str, Any] | None = told[-1].get("mark")
        """The last mark that an earlier process has written; None without one."""
        self._notes = [_note(each) for each in told if "shard" in each]
        kept = {NOTES, *(note.shard.file for note in self._notes)}
        for left in [path for path in folder.iterdir() if path.name not in kept]:
            left.unlink()
        self._path.write_bytes(b"")  # Rewrite the file without a torn last line.
        for each in told:
            self.append(each)

    def _read(self, width: int) -> list[dict[str, Any]]:
        """Return the file's lines before one that is torn or damaged, or whose shard is."""
        found: list[dict[str, Any]] = []
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            for line in self._path.read_bytes().splitlines():
                told = json.loads(line)
                known = told.pop("crc32", None)  # Earlier releases wrote none.
                if known not in (None, _crc32(told)):
                    break
                if "shard" in told:
                    shard = _note(told).shard
                    if (self.folder / shard.file).stat().st_size != width * shard.tokens:
                        break
                found.append(told)
        return found

    def of(self, split: str) -> list[Note]:
        """Return the notes of one split, in order."""
        return [note for note in self._notes if note.split == split]

    def append(self, told: dict[str, object]) -> None:
        """Record a ``Note`` on a durable shard, as a dictionary, or ``{"mark": ...}``, a position up to which all
        shards are durable."""
        with self._path.open("ab") as file:
            file.write(json.dumps({**told, "crc32": _crc32(told)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _note(told: dict[str, Any]) -> Note:
    return Note(**{**told, "shard": Shard(**told["shard"])})


def _crc32(told: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


class ShardWriter:
    """Appends the ids of documents to shards of at most ``shard_tokens`` each, hashing on the way."""

    def __init__(self, notes: Notes, split: str, shard_tokens: int, tokenizer: Tokenizer) -> None:
        """The shards are written beside the ``notes``, and begin after the last one of which these know."""
        self._notes, self._split, self._shard_tokens = notes, split, shard_tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([] if tokenizer.end_of_file is None else [tokenizer.end_of_file], dtype=self._dtype)
        before = notes.of(split)
        self._shards = [note.shard for note in before]
        self.documents = before[-1].documents if before else 0
        """Number of whole documents written, and so the index of the next one to pass to ``write``."""
        self._within = before[-1].within if before else 0
        self._pending: list[NDArray[Any]] = []
        self.held = 0
        """Buffered tokens, not yet in a shard."""

    def write(self, ids: NDArray[Any]) -> None:
        """Append the ``ids`` of the next document and the end-of-file token; write a shard when it is full."""
        ids = np.concatenate([ids, self._end])
        at, self._within = self._within, 0
        while self.held + len(ids) - at >= self._shard_tokens:
            room = self._shard_tokens - self.held
            self._pending.append(ids[at : at + room])
            at += room
            self._flush(at)
        self._pending.append(ids[at:])
        self.held += len(ids) - at
        self.documents += 1

    def close(self) -> list[Shard]:
        """Write the buffered tokens as a shard and return all shards."""
        if self.held:
            self._flush(0)
        return self._shards

    def _flush(self, within: int) -> None:
        values = np.concatenate(self._pending).astype(self._dtype)
        content = values.tobytes()
        name = f"{self._split}-{len(self._shards):05d}.bin"
        write_file(self._notes.folder / name, content)
        shard = Shard(name, len(values), hashlib.sha256(content).hexdigest())
        self._shards.append(shard)
        self._notes.append(asdict(Note(self._split, self.documents, within, shard)))
        self._pending, self.held = [], 0


LOCK_POLL_S = 0.1
STREAM_FORMAT = 1
BATCH_BYTES = 4_000_000
"""Bytes of text tokenized at once; bounds memory.  A stream's shards end with a batch, so they depend on this value."""
TOLD_AS = "the stream"
READ_TOKENS = 1 << 22
"""Tokens read at once; bounds memory."""
FILES_FORMAT = 1
Progress = Callable[[str, int, int], None]
DTYPES = ("uint16", "uint32")
PATTERNS = MappingProxyType({"jsonl": "**/*.jsonl", "tokens": "**/*.bin"})


@dataclass(kw_only=True, slots=True)
class DataOptions:
    """Where the text comes from and how it becomes tokens."""

    kind: str = "stdlib"
    """``stdlib``: source of this Python's standard library.  ``text``: UTF-8 files.  ``jsonl``: a field of every line.
    ``tokens``: existing token ids.  ``hf``: a data set of Hugging Face's."""
    path: str = ""
    """A file or a folder, for all kinds but ``stdlib``; for ``hf`` also a name on the hub."""
    pattern: str = ""
    """Glob of the folder's files; empty: all (``text``), ``**/*.jsonl`` (``jsonl``), ``**/*.bin`` (``tokens``)."""
    field: str = FIELD
    """Name of the field with the text, for ``jsonl`` and ``hf``."""
    name: str = ""
    """Name of the data set's configuration.  This option and the next four are for ``hf`` only."""
    split: str = "train"
    validation_split: str = ""
    """Empty: 1 in 16 documents of ``split``, chosen by digest."""
    revision: str = ""
    """A commit, a tag or a branch on the hub; empty for the newest."""
    documents_max: int = 0
    """Documents to take from the front of each split; 0 for all."""
    tokenizer: str = "bpe1024"
    end_of_file: bool = True
    """Whether a token marks the end of each document."""
    dtype: str = "uint16"
    """Type of an id in the files of ``tokens``, little-endian."""
    shard_tokens: int = 1 << 26
    lock_wait_s: float = 600.0
    """How long to wait for another process that prepares the same text, counted from its last complete shard."""

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "kind", self.kind, f"one of {', '.join(KINDS)}")
        wanted = "a file or folder" + (", or a name on the hub" if self.kind == "hf" else "")
        require(self.kind == "stdlib" or bool(self.path), "path", self.path, f"{wanted}, for kind={self.kind}")
        unread = f"kind=stdlib reads this Python's own sources; for other files choose kind={'|'.join(KINDS[1:])}"
        for name, value in (("path", self.path), ("pattern", self.pattern)):
            require(self.kind != "stdlib" or not value, name, value, unread)
        check_name(self.tokenizer)
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(bool(self.field), "field", self.field, "a name")
        require(bool(self.split), "split", self.split, "a name")
        require(self.split != self.validation_split, "validation_split", self.validation_split, "another than split")
        require(self.documents_max >= 0, "documents_max", self.documents_max, "0 (all) or more")
        require(self.shard_tokens >= 1024, "shard_tokens", self.shard_tokens, "at least 1024")
        require(self.lock_wait_s > 0, "lock_wait_s", self.lock_wait_s, "positive")


def prepare_corpus(
    options: DataOptions,
    cache_dir: Path,
    told: Progress = lambda split, done, total: None,
    runs: Path | None = None,
) -> CorpusManifest:
    """Make the corpus if it is not in ``cache_dir``, and return its manifest; ``runs`` as for ``source_files``.

    A corpus in the cache is found by its options and the files' names, sizes and times; a data set on the hub by its
    options alone, without the network.  Several processes may call this at once: one works, and the others wait at most
    ``options.lock_wait_s`` for it.  If it dies, the next one resumes after its last complete shard.
    ``told(split, done, total)`` reports progress in bytes of text; ``total`` is 0 while it is unknown.  Raises
    DataError.
    """
    tokenizer, path = make_tokenizer(options.tokenizer, options.end_of_file), Path(options.path).expanduser()
    if options.kind == "tokens" and (path / "manifest.json").is_file():
        found = load_manifest(path, "copy {0} again, or remove its manifest.json to read its *.bin files alone")
        if found.tokenizer_sha256 != tokenizer.digest:
            made = f"{path} was made by the tokenizer {found.tokenizer}"
            raise DataError(f"{made}, and data.tokenizer is {tokenizer.name}, with another digest")
        if found.end_of_file != options.end_of_file:
            raise DataError(f"end_of_file is {options.end_of_file}, and {path} was made with {found.end_of_file}")
        return found
    is_here = options.kind != "hf" or path.exists() or path.is_absolute() or options.path.startswith((".", "~"))
    pattern = options.pattern or PATTERNS.get(options.kind, "**/*")
    files = source_files(options.kind, options.path, pattern, runs) if is_here else []
    how = _how(options, tokenizer, "" if is_here else options.path)
    key = hashlib.sha256(json.dumps(how).encode())
    for file in files:
        facts = file.stat()
        key.update(f"\n{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode(errors="surrogateescape"))
    made_by = options.dtype if options.kind == "tokens" else tokenizer.name
    name = f"{options.kind}-{made_by}-{key.hexdigest()[:16]}"
    directory, temporary = cache_dir / name, cache_dir / f"{name}.tmp"
    if (directory / "manifest.json").is_file():
        return load_manifest(directory)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f"{name}.lock", options.lock_wait_s, temporary / NOTES):
        if not (directory / "manifest.json").is_file():
            for left in cache_dir.glob(f"{name}.tmp-*"):
                shutil.rmtree(left)  # Left by an earlier release, which did not resume.
            temporary.mkdir(exist_ok=True)
            width = token_dtype(tokenizer.vocab_size).itemsize
            if options.kind == "tokens":
                about = _describe_files(options, tokenizer, path.parent if path.is_file() else path, files)
            elif options.kind == "hf":
                state, streams = _opened(options, path if is_here else None, cache_dir)
                notes = Notes(temporary, json.dumps([*how, state]), width, marked=True)
                about = _Reading(options, tokenizer, streams, notes, told).write()
            else:
                corpus = read_corpus(options.kind, files, options.field)
                notes = Notes(temporary, json.dumps([*how, corpus.digest]), width)
                about = _write_documents(corpus, options, tokenizer, notes, told)
            (temporary / NOTES).unlink(missing_ok=True)
            manifest = CorpusManifest(
                directory=temporary,
                kind=options.kind,
                tokenizer=tokenizer.name,
                tokenizer_sha256=tokenizer.digest,
                end_of_file=options.end_of_file,
                vocab_size=tokenizer.vocab_size,
                **about,
            )
            write_file(temporary / "manifest.json", manifest.to_json().encode())
            temporary.rename(directory)
            PLAIN_DISK.sync_folder(cache_dir, Step.FILE)
    return load_manifest(directory)


def _how(options: DataOptions, tokenizer: Tokenizer, away: str) -> list[object]:
    """Return what decides the tokens, beside the text; ``away`` is the name of a data set on the hub."""
    made_by = [tokenizer.digest, options.end_of_file]
    if options.kind == "tokens":
        return [FILES_FORMAT, options.dtype, *made_by]
    if options.kind == "hf":
        shared = [STREAM_FORMAT, BATCH_BYTES, *made_by, options.shard_tokens]
        shared += [away, options.pattern, options.field, options.documents_max]
        return [*shared, options.name, options.split, options.validation_split, options.revision]
    shared = [FORMAT, options.kind, *made_by, options.shard_tokens]
    return shared if options.field == FIELD else [*shared, options.field]


@contextmanager
def _lock(path: Path, wait_s: float, notes: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system releases it if its holder dies.

    DataError if another process has held it for ``wait_s`` without a new line in its ``notes``.
    """
    deadline, seen = time.monotonic() + wait_s, _size(notes)
    with path.open("w") as file:
        while True:
            try:
                lock(file)
                break
            except BlockingIOError:
                if (written := _size(notes)) != seen:
                    deadline, seen = time.monotonic() + wait_s, written
                if time.monotonic() >= deadline:
                    raise DataError(
                        f"another process has been preparing the same text for over {wait_s:g} s (it holds {path}) and "
                        "wrote nothing: wait for it, or stop it if it hangs"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _split_of(documents: int, text_bytes: int, shards: Sequence[Shard]) -> SplitManifest:
    return SplitManifest(documents, text_bytes, sum(shard.tokens for shard in shards), tuple(shards))


def _write_documents(
    corpus: Corpus, options: DataOptions, tokenizer: Tokenizer, notes: Notes, told: Progress
) -> dict[str, Any]:
    """Write the shards; return what the manifest says of them."""
    splits = {}
    for name in SPLITS:
        documents, writer = corpus.split(name), ShardWriter(notes, name, options.shard_tokens, tokenizer)
        text_bytes = sum(document.text_bytes for document in documents)
        done = sum(document.text_bytes for document in documents[: writer.documents])
        left = documents[writer.documents :]
        for batch in _batches((name, read_text(options.kind, each, options.field), each.text_bytes) for each in left):
            told(name, done, text_bytes)
            for ids in tokenizer.encode_batch([text for _, text, _ in batch]):
                writer.write(ids)
            done += sum(size for _, _, size in batch)
        told(name, text_bytes, text_bytes)
        splits[name] = _split_of(len(documents), text_bytes, writer.close())
    left_out = {"num_duplicates": corpus.num_duplicates, "num_not_text": corpus.num_not_text}
    return {"corpus_sha256": corpus.digest, **splits, **left_out}


Text = tuple[str, str, int]
"""Split, text, and its bytes of UTF-8."""


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Yield ``texts`` in lists of about ``BATCH_BYTES``; at each yield ``texts`` was read to the list's end only."""
    batch, held = list[Text](), 0
    for text in texts:
        batch.append(text)
        held += text[2]
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _opened(options: DataOptions, here: Path | None, cache_dir: Path) -> tuple[str, Mapping[str, Any]]:
    """Open a data set; return the digest of its state, and its streams by split name, before any text is read.

    The state is the data set's (on the hub, its commit) and the release of ``datasets``, because another release may
    not understand a saved position of a stream.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"kind 'hf' needs the library datasets ({error}): pip install 'diloco[datasets]'") from error
    path, pattern = str(here or options.path), options.pattern
    if here is not None and here.is_file():
        path, pattern = str(here.parent), here.name
    try:
        builder = datasets.load_dataset_builder(
            path,
            options.name or None,
            data_files={options.split: pattern} if pattern else None,
            cache_dir=str(cache_dir / "datasets"),
            revision=options.revision or None,
        )
        return f"{builder.hash} {datasets.__version__}", builder.as_streaming_dataset()
    except Exception as error:
        nothing_here = "" if here is not None else "there is no such file or folder here, and of the hub: "
        raise DataError(f"path is {options.path!r}: {nothing_here}{_line(error)}") from error


@dataclass(slots=True)
class _Mark:
    """The position in the streams, kept in the notes so that a process can resume after one that died."""

    stream: int = 0
    """Index of the stream being read."""
    documents: int = 0
    """Documents read of this stream, including those left out."""
    state: dict[str, Any] | None = None
    """The position in it, as the library ``datasets`` represents it."""
    left_out: int = 0
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


class _Reading:
    """Reads the documents of the streams and writes their tokens."""

    def __init__(
        self, options: DataOptions, tokenizer: Tokenizer, streams: Mapping[str, Any], notes: Notes, told: Progress
    ) -> None:
        self._options, self._tokenizer, self._streams, self._told = options, tokenizer, streams, told
        self._notes, self._mark = notes, _Mark(**(notes.mark or {}))
        # The writers never end a shard by themselves: all shards end at a mark.
        self._writers = {name: ShardWriter(notes, name, sys.maxsize, tokenizer) for name in SPLITS}

    def write(self) -> dict[str, Any]:
        """Read all streams to the end, and write the shards; return what the manifest says of them."""
        options = self._options
        parts = [(options.split, "")]
        if options.validation_split:
            parts = [(options.split, "train"), (options.validation_split, "validation")]
        for split, into in parts[self._mark.stream :]:
            self._read(self._stream(split), into)
        splits = {}
        for name, writer in self._writers.items():
            shards = writer.close()
            if not shards:
                train = ": give more documents, or set validation_split if the data set has one"
                raise DataError(f"{options.path} has no document for {name}{train if name == 'validation' else ''}")
            splits[name] = _split_of(writer.documents, self._mark.text_bytes[name], shards)
        digests = [shard.sha256 for name in SPLITS for shard in splits[name].shards]
        digest = hashlib.sha256("".join(digests).encode()).hexdigest()
        return {"corpus_sha256": digest, **splits, "num_duplicates": 0, "num_not_text": self._mark.left_out}

    def _stream(self, split: str) -> Any:
        if split not in self._streams:
            setting = "split" if split == self._options.split else "validation_split"
            there = ", ".join(self._streams) or "none"
            raise DataError(f"{setting} is {split!r}: {self._options.path} has {there}")
        stream, wanted = self._streams[split], self._options.field
        if wanted in (stream.column_names or ()):  # The columns may be unknown before the first document.
            stream = stream.select_columns([wanted])
        if self._mark.state is not None:
            stream.load_state_dict(self._mark.state)
        return stream

    def _read(self, stream: Any, into: str) -> None:
        """Read one stream to its end; write its documents ``into`` a split or, if that is empty, split by digest."""
        for batch in _batches(self._documents(stream, into)):
            encoded = self._tokenizer.encode_batch([text for _, text, _ in batch])
            for (name, _, size), ids in zip(batch, encoded, strict=True):
                self._writers[name].write(ids)
                self._mark.text_bytes[name] += size
            self._told(TOLD_AS, sum(self._mark.text_bytes.values()), 0)
            if max(writer.held for writer in self._writers.values()) >= self._options.shard_tokens:
                self._cut(stream.state_dict())
        self._mark.stream, self._mark.documents = self._mark.stream + 1, 0
        self._cut(None)
        through = sum(self._mark.text_bytes.values())
        self._told(TOLD_AS, through, through)

    def _documents(self, stream: Any, into: str) -> Iterator[Text]:
        """Yield the stream's documents that are text, and count all in the mark."""
        wanted = self._options.field
        for row in self._rows(stream):
            if wanted not in row:
                there = ", ".join(map(str, row)) or "none"
                raise DataError(f"field is {wanted!r}: the documents of {self._options.path} have {there}")
            text = "" if row[wanted] is None else row[wanted]
            if not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"field is {wanted!r}: in document {self._mark.documents} it is not text but {kind}")
            self._mark.documents += 1
            content = _utf8(text)
            self._mark.left_out += not content
            if content:
                low = hashlib.sha256(content).digest()[0] < VALIDATION_FIRST_BYTE
                yield into or ("validation" if low else "train"), text, len(content)

    def _rows(self, stream: Any) -> Iterator[Mapping[str, Any]]:
        bound = self._options.documents_max
        try:
            yield from islice(stream, bound - self._mark.documents if bound else None)
        except Exception as error:
            where = f"the stream of {self._options.path!r} broke off after {self._mark.documents:,} documents"
            raise DataError(f"{where}: {_line(error)}; the next start resumes after the last complete shard") from error

    def _cut(self, state: dict[str, Any] | None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._mark.state = state
        self._notes.append({"mark": asdict(self._mark)})


def _line(error: Exception) -> str:
    """Return the error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _describe_files(options: DataOptions, tokenizer: Tokenizer, root: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Return what the manifest says of ``files``, which stay where they are."""
    splits = {}
    for name in SPLITS:
        mine = [file for file in files if file.name.startswith("val") == (name == "validation")]
        if not mine:
            wanted = 'one whose name begins with "val"' if name == "validation" else "one with another name"
            raise DataError(f"path is {options.path!r}: it has no file for {name}: add {wanted}")
        shards = [_shard(file, root, options.dtype, tokenizer) for file in mine]
        # The UTF-8 of the decoded validation split; a character cut at a piece's end counts as U+FFFD.
        read = (piece for file in mine for piece in _pieces(file, options.dtype) if name == "validation")
        text_bytes = sum(len(tokenizer.decode(piece.tolist()).encode()) for piece in read)
        splits[name] = _split_of(0, text_bytes, shards)
    digests = sorted(shard.sha256 for split in splits.values() for shard in split.shards)
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    where = {"num_duplicates": 0, "num_not_text": 0, "dtype": options.dtype, "source": str(root.resolve())}
    return {"corpus_sha256": digest, **splits, **where}


def _shard(file: Path, root: Path, dtype: str, tokenizer: Tokenizer) -> Shard:
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise DataError(f"{file} has {size} bytes: data.dtype={dtype} needs a multiple of {width}, more than 0")
    hashed = hashlib.sha256()
    for piece in _pieces(file, dtype):
        hashed.update(piece.tobytes())
        largest = int(piece.max())
        if largest >= tokenizer.vocab_size:
            raise DataError(
                f"{file} has the id {largest}, and the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids: set "
                "data.tokenizer to the tokenizer that made the file, and data.dtype to the width of an id"
            )
    return Shard(str(file.relative_to(root)), size // width, hashed.hexdigest())


def _pieces(file: Path, dtype: str) -> Iterator[NDArray[np.uint16 | np.uint32]]:
    """Yield the tokens of ``file``, at most ``READ_TOKENS`` at a time."""
    tokens = np.memmap(file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    for at in range(0, len(tokens), READ_TOKENS):
        yield tokens[at : at + READ_TOKENS]
