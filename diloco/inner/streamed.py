"""Tokens that come from elsewhere than a corpus of files: a data set of Hugging Face's, or files of token ids.

A data set (``prepare_stream``) is read once as a stream and written down as token shards.  A stream has no places, and
units of text are told by number: so the tokens are kept, and the text is not.  Documents stay in the order of the
stream.  Which of them are validation is told by their digests, or by the data set's own splits; so every reader of the
same data set with the same settings has the same tokens.  When as many tokens as make a shard have come, all that is
held is written, and the notes say where the stream stood: after a process that dies, the next one goes on from there.
Documents that come twice are not looked for, because that would need all of them.

The library ``datasets`` is an extra, and is imported when there is a stream to read.

Token ids (``prepare_tokens``) are plain little-endian files that exist already, read where they lie.
``prepare_tokens`` reads them once, to know their digests and that every id is one of the tokenizer's, and keeps a
manifest; the files are mapped into memory as those that ``prepare_corpus`` writes are.  A file whose name begins with
"val" is validation, every other one training.  A folder that ``prepare_corpus`` has written is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.inner.corpus import SPLITS, VALIDATION_FIRST_BYTE, DataError, Notes, Shard, ShardWriter, source_files
from diloco.inner.data import (
    CorpusManifest,
    DataOptions,
    Progress,
    SplitManifest,
    key_of,
    load_manifest,
    made_once,
    write_manifest,
)
from diloco.inner.tokenizer import Tokenizer, make_tokenizer, token_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

STREAM_FORMAT = 1
BATCH_BYTES = 4_000_000
"""Text handed to the tokenizer at once.  Bounds memory, and shards end with a batch: another number, other shards."""
TOLD_AS = "the stream"
Batch = list[tuple[str, str]]
"""Texts, each with the split that it is of."""


def prepare_stream(
    options: DataOptions, cache_dir: Path, told: Progress = lambda split, done, total: None
) -> CorpusManifest:
    """Read and tokenise the data set once and return its manifest; later calls need neither it nor the network.

    Several processes may call it at once, as ``prepare_corpus``.  ``told`` hears how many bytes of text are through,
    and of how many once that is known.  Raises DataError in words.
    """
    tokenizer = make_tokenizer(options.tokenizer, options.end_of_file)
    here = _local(options.path)
    files = source_files(options.kind, options.path, options.pattern_used) if here is not None else []
    how: list[object] = [STREAM_FORMAT, BATCH_BYTES, tokenizer.digest, options.end_of_file, options.shard_tokens]
    how += [options.path if here is None else "", options.pattern, options.field, options.documents_max]
    how += [options.name, options.split, options.validation_split, options.revision]

    def make(folder: Path) -> None:
        _Reading(options, tokenizer, _opened(options, here, cache_dir), folder, how, told).write()

    return made_once(cache_dir, f"hf-{tokenizer.name}-{key_of(how, files)[:16]}", options.lock_wait_s, make)


def _local(path: str) -> Path | None:
    """What ``path`` is on this machine; None where it is a name on the hub."""
    here = Path(path).expanduser()
    return here if here.exists() or here.is_absolute() or path.startswith((".", "~")) else None


@dataclass(frozen=True, slots=True)
class _Opened:
    """A data set, of which no text has been read yet."""

    digest: str
    """Of which state of it (the commit, on the hub), and by which release of the library, whose word for a place in a
    stream no other need understand."""
    streams: Mapping[str, Any]
    """By the names of its splits."""


def _opened(options: DataOptions, here: Path | None, cache_dir: Path) -> _Opened:
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
        return _Opened(f"{builder.hash} {datasets.__version__}", builder.as_streaming_dataset())
    except Exception as error:
        nothing_here = "" if here is not None else "there is no such file or folder here, and of the hub: "
        raise DataError(f"path is {options.path!r}: {nothing_here}{_line(error)}") from error


@dataclass(slots=True)
class _Mark:
    """How far the streams are through: the notes hold it, so that who comes after a process that died goes on."""

    stream: int = 0
    """Which of them is under way."""
    documents: int = 0
    """Of this one, those that were left out included."""
    state: dict[str, Any] | None = None
    """The library's own word for the place in it."""
    left_out: int = 0
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


class _Reading:
    """Takes the documents from the streams and writes their tokens."""

    def __init__(
        self,
        options: DataOptions,
        tokenizer: Tokenizer,
        opened: _Opened,
        folder: Path,
        how: list[object],
        told: Callable[[str, int, int], None],
    ) -> None:
        self._options, self._tokenizer, self._streams = options, tokenizer, opened.streams
        self._folder, self._told = folder, told
        self._dtype = token_dtype(tokenizer.vocab_size)
        text = json.dumps([*how, opened.digest])
        self._notes = Notes(folder, text, self._dtype.itemsize, marked=True)
        self._mark = _Mark(**self._notes.mark) if self._notes.mark is not None else _Mark()
        shards = {name: ShardWriter(folder, name, sys.maxsize, self._dtype, self._notes) for name in SPLITS}
        self._writers = shards  # Which never end a shard by themselves: all end where there is a mark.

    def write(self) -> None:
        """Read to the end, and write the manifest."""
        options = self._options
        parts = [(options.split, "")]
        if options.validation_split:
            parts = [(options.split, "train"), (options.validation_split, "validation")]
        for split, into in parts[self._mark.stream :]:
            self._read(self._stream(split), into)
        manifest = self._manifest()
        self._notes.remove()
        write_manifest(manifest, self._folder)

    def _stream(self, split: str) -> Any:
        if split not in self._streams:
            setting = "split" if split == self._options.split else "validation_split"
            there = ", ".join(self._streams) or "none"
            raise DataError(f"{setting} is {split!r}: {self._options.path} has {there}")
        stream, wanted = self._streams[split], self._options.field
        columns = stream.column_names
        if columns is not None:  # It may not be known before the first document.
            if wanted not in columns:
                raise self._without_field(columns)
            stream = stream.select_columns([wanted])
        if self._mark.state is not None:
            stream.load_state_dict(self._mark.state)
        return stream

    def _read(self, stream: Any, into: str) -> None:
        """One stream to its end, its documents ``into`` a split, or into the one that each of them is of."""
        end = [] if self._tokenizer.end_of_file is None else [self._tokenizer.end_of_file]
        for batch in self._batches(stream, into):
            encoded = self._tokenizer.encode_batch([text for _, text in batch])
            for (name, text), ids in zip(batch, encoded, strict=True):
                self._writers[name].write(np.concatenate([ids, np.array(end, dtype=self._dtype)]))
                self._mark.text_bytes[name] += len(text.encode())
            self._told(TOLD_AS, sum(self._mark.text_bytes.values()), 0)
            if max(writer.held for writer in self._writers.values()) >= self._options.shard_tokens:
                self._cut(stream.state_dict())
        self._mark.stream, self._mark.documents = self._mark.stream + 1, 0
        self._cut(None)
        through = sum(self._mark.text_bytes.values())
        self._told(TOLD_AS, through, through)

    def _batches(self, stream: Any, into: str) -> Iterator[Batch]:
        """The stream stands behind a batch when that is handed out."""
        batch, held = Batch(), 0
        for row in self._rows(stream):
            text = self._text(row)
            self._mark.documents += 1
            content = _utf8(text)
            self._mark.left_out += not content
            if content:
                low = hashlib.sha256(content).digest()[0] < VALIDATION_FIRST_BYTE
                batch.append((into or ("validation" if low else "train"), text))
                held += len(content)
            if held >= BATCH_BYTES:
                yield batch
                batch, held = Batch(), 0
        if batch:
            yield batch

    def _rows(self, stream: Any) -> Iterator[Mapping[str, Any]]:
        bound = self._options.documents_max
        try:
            yield from islice(stream, bound - self._mark.documents if bound else None)
        except Exception as error:
            where = f"the stream of {self._options.path!r} broke off behind {self._mark.documents:,} documents"
            raise DataError(f"{where}: {_line(error)}; the next start goes on behind the last whole shard") from error

    def _text(self, row: Mapping[str, Any]) -> str:
        wanted = self._options.field
        if wanted not in row:
            raise self._without_field(row)
        text = row[wanted]
        if text is not None and not isinstance(text, str):
            kind = type(text).__name__
            raise DataError(f"field is {wanted!r}: in document {self._mark.documents} it is no text, but {kind}")
        return text or ""

    def _without_field(self, columns: Any) -> DataError:
        there = ", ".join(map(str, columns)) or "none"
        return DataError(f"field is {self._options.field!r}: the documents of {self._options.path} have {there}")

    def _cut(self, state: dict[str, Any] | None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._mark.state = state
        self._notes.put(asdict(self._mark))

    def _manifest(self) -> CorpusManifest:
        splits = {}
        for name, writer in self._writers.items():
            shards = tuple(writer.close())
            if not shards:
                more = "give documents, or validation_split where the data set has one" if name == "validation" else ""
                raise DataError(f"{self._options.path} has no document for {name}" + (f": {more}" if more else ""))
            tokens = sum(shard.tokens for shard in shards)
            splits[name] = SplitManifest(writer.documents, self._mark.text_bytes[name], tokens, shards)
        digests = [shard.sha256 for name in SPLITS for shard in splits[name].shards]
        return CorpusManifest(
            directory=self._folder,
            kind=self._options.kind,
            tokenizer=self._tokenizer.name,
            tokenizer_sha256=self._tokenizer.digest,
            end_of_file=self._options.end_of_file,
            vocab_size=self._tokenizer.vocab_size,
            corpus_sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
            num_duplicates=0,
            num_not_text=self._mark.left_out,
            train=splits["train"],
            validation=splits["validation"],
        )


def _utf8(text: str) -> bytes:
    """Nothing for what is no UTF-8, which the tokenizer could not give back."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return b""


def _line(error: Exception) -> str:
    """What a library says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


READ_TOKENS = 1 << 22
"""That are looked at in one piece; bounds memory."""
FILES_FORMAT = 1


def prepare_tokens(options: DataOptions, cache_dir: Path) -> CorpusManifest:
    """The manifest of the files at ``options.path``; later calls find it by their names, sizes and times.

    Raises DataError in words.
    """
    tokenizer = make_tokenizer(options.tokenizer, options.end_of_file)
    if (Path(options.path).expanduser() / "manifest.json").is_file():
        return _ours(Path(options.path).expanduser(), tokenizer)
    files = source_files("tokens", options.path, options.pattern_used)
    root = files[0].parent if Path(options.path).expanduser().is_file() else Path(options.path).expanduser()
    how = [FILES_FORMAT, options.dtype, tokenizer.digest, options.end_of_file]
    key = f"tokens-{options.dtype}-{key_of(how, files)[:16]}"
    return made_once(
        cache_dir,
        key,
        options.lock_wait_s,
        lambda folder: write_manifest(_manifest(options, tokenizer, root, files), folder),
    )


def _ours(directory: Path, tokenizer: Tokenizer) -> CorpusManifest:
    found = load_manifest(directory)
    if found.tokenizer_sha256 != tokenizer.digest:
        made = f"{directory} was made by the tokenizer {found.tokenizer}"
        raise DataError(f"{made}, and data.tokenizer is {tokenizer.name}, or another of that name")
    return found


def _manifest(options: DataOptions, tokenizer: Tokenizer, root: Path, files: Sequence[Path]) -> CorpusManifest:
    splits = {}
    for name in SPLITS:
        mine = [file for file in files if file.name.startswith("val") == (name == "validation")]
        if not mine:
            wanted = 'one whose name begins with "val"' if name == "validation" else "one that does not begin so"
            raise DataError(f"path is {options.path!r}: no file of it is for {name}: {wanted} is wanted")
        shards = tuple(_shard(file, root, options.dtype, tokenizer) for file in mine)
        tokens = sum(shard.tokens for shard in shards)
        text_bytes = _text_bytes(mine, options.dtype, tokenizer) if name == "validation" else 0
        splits[name] = SplitManifest(0, text_bytes, tokens, shards)
    digests = sorted(shard.sha256 for split in splits.values() for shard in split.shards)
    return CorpusManifest(
        directory=root.resolve(),
        kind="tokens",
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.digest,
        end_of_file=options.end_of_file,
        vocab_size=tokenizer.vocab_size,
        corpus_sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
        num_duplicates=0,
        num_not_text=0,
        train=splits["train"],
        validation=splits["validation"],
        dtype=options.dtype,
        source=str(root.resolve()),
    )


def _shard(file: Path, root: Path, dtype: str, tokenizer: Tokenizer) -> Shard:
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise DataError(f"{file} has {size} bytes: a multiple of {width}, more than 0, is wanted (data.dtype={dtype})")
    tokens, hashed = _tokens(file, dtype), hashlib.sha256()
    for at in range(0, len(tokens), READ_TOKENS):
        piece = tokens[at : at + READ_TOKENS]
        hashed.update(piece.tobytes())
        largest = int(piece.max())
        if largest >= tokenizer.vocab_size:
            raise DataError(
                f"{file} has the id {largest}, and the tokenizer {tokenizer.name} has {tokenizer.vocab_size}: give the "
                "tokenizer that made it (data.tokenizer), and the width of an id (data.dtype)"
            )
    return Shard(str(file.relative_to(root)), len(tokens), hashed.hexdigest())


def _tokens(file: Path, dtype: str) -> NDArray[np.uint16 | np.uint32]:
    return np.memmap(file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _text_bytes(files: Sequence[Path], dtype: str, tokenizer: Tokenizer) -> int:
    """Bytes of UTF-8 that the files decode to; a letter that is cut where a piece ends counts as what stands for it."""
    found = 0
    for file in files:
        tokens = _tokens(file, dtype)
        for at in range(0, len(tokens), READ_TOKENS):
            found += len(tokenizer.decode(tokens[at : at + READ_TOKENS].tolist()).encode())
    return found
