"""Text as memory-mapped token shards with a manifest, and the batches that a site draws from them.

Permutations.  A seeded permutation of 0 .. size-1 needs no memory: any single place can be asked for.  It is a balanced
Feistel network over the next even number of bits, walked until it lands inside (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002).  It gives good shuffling and no secrecy.

Shards.  ``prepare_corpus`` writes ``<cache>/<key>/{manifest.json, train-00000.bin, validation-00000.bin, ...}``: uint16
little endian (uint32 where the tokenizer has more ids than that holds), documents in the order of their sha256.

Batches.  ``TokenStream`` is a pure function from a cursor to a batch.

Leased units.  ``LeasedStream`` has the same cursor, over a list of units that are leased to the site; the list is kept
elsewhere.  The text has one endless order, equal at all sites: each epoch is a permutation of all its windows.  A unit
is a number of consecutive sequences of that order, and a site draws the units of its list one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diloco.durable import lock
from diloco.inner.checks import require
from diloco.inner.corpus import (
    FIELD,
    NOTES,
    SPLITS,
    Corpus,
    DataError,
    Document,
    Notes,
    Shard,
    ShardWriter,
    check_kind,
    read_corpus,
    read_text,
    source_files,
)
from diloco.inner.tokenizer import Tokenizer, check_name, make_tokenizer, token_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from diloco.inner.parallel import SiteGroup

ROUNDS = 6


def permuted(places: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Where the permutation of 0 .. ``size`` - 1 named by ``key`` puts each of ``places``, int64, same shape."""
    assert size >= 1
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * ROUNDS), dtype="<u8").astype(np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    # The network permutes 0 .. 4^half_bits - 1 and every cycle of it comes back below size, so the walk ends; the
    # domain is less than 4 times (for tiny sizes a few times more) too large, so it is short.
    while outside.any():
        values[outside] = _network(values[outside], np.uint64(half_bits), keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _network(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for index in range(len(keys)):
        left, right = right, left ^ (_mixed(right + keys[index]) & mask)
    return (left << half_bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


FORMAT = 1
ENCODE_BYTES = 4_000_000
"""Text handed to the tokenizer at once; bounds memory."""
LOCK_POLL_S = 0.1
Progress = Callable[[str, int, int], None]
DTYPES = ("uint16", "uint32")
PATTERNS = MappingProxyType({"jsonl": "**/*.jsonl", "tokens": "**/*.bin"})


@dataclass(kw_only=True, slots=True)
class DataOptions:
    """Where the text comes from and how it becomes tokens."""

    kind: str = "stdlib"
    """``stdlib``: this Python's standard library in source.  ``text``: files of UTF-8.  ``jsonl``: a field of every
    line.  ``tokens``: ids that exist already (``streamed.prepare_tokens``).  ``hf``: a data set of Hugging Face's
    (``streamed.prepare_stream``)."""
    path: str = ""
    """A file or a folder, for all but ``stdlib``; for ``hf`` that, or a name on the hub."""
    pattern: str = ""
    """Which files of the folder; empty for all (``text``) or ``**/*.jsonl`` (``jsonl``)."""
    field: str = FIELD
    """Which one is the text, for ``jsonl`` and ``hf``."""
    name: str = ""
    """Of ``hf``, as the next four: which of its configurations."""
    split: str = "train"
    validation_split: str = ""
    """Empty: 1 in 16 documents of ``split``, by their digest."""
    revision: str = ""
    """On the hub: a commit, a tag or a branch; empty for its newest."""
    documents_max: int = 0
    """Taken from the front of each split; 0 for all."""
    tokenizer: str = "bpe1024"
    end_of_file: bool = True
    """Whether a token marks the end of each document."""
    dtype: str = "uint16"
    """How wide an id is in the files of ``tokens``, little-endian."""
    shard_tokens: int = 1 << 26
    lock_wait_s: float = 600.0
    """How long to wait for another process that prepares the same text, since it has last written a whole shard."""

    def __post_init__(self) -> None:
        check_kind(self.kind, self.path)
        check_name(self.tokenizer)
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(bool(self.field), "field", self.field, "a name")
        require(bool(self.split), "split", self.split, "a name")
        require(self.split != self.validation_split, "validation_split", self.validation_split, "another than split")
        require(self.documents_max >= 0, "documents_max", self.documents_max, "0 (all) or more")
        require(self.shard_tokens >= 1024, "shard_tokens", self.shard_tokens, "at least 1024")
        require(self.lock_wait_s > 0, "lock_wait_s", self.lock_wait_s, "positive")

    @property
    def pattern_used(self) -> str:
        """The glob with the empty default resolved."""
        return self.pattern or PATTERNS.get(self.kind, "**/*")


@dataclass(frozen=True, slots=True)
class SplitManifest:
    """One split: how much text, and in which shards."""

    documents: int
    text_bytes: int
    tokens: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class CorpusManifest:
    """What was prepared, as ``manifest.json`` tells it.  Holds no path but where it was read from."""

    directory: Path
    kind: str
    tokenizer: str
    tokenizer_sha256: str
    end_of_file: bool
    vocab_size: int
    corpus_sha256: str
    """Sha256 hex of the documents' sorted sha256 digests."""
    num_duplicates: int
    num_not_text: int
    train: SplitManifest
    validation: SplitManifest
    dtype: str = ""
    """Of files that somebody else has made; empty: as wide as the vocabulary asks for."""
    source: str = ""
    """The folder in which the shards lie, where that is not the manifest's."""

    @property
    def folder(self) -> Path:
        """Where the shards lie."""
        return Path(self.source) if self.source else self.directory

    @property
    def identity(self) -> str:
        """Sha256 hex of all that decides the tokens: equal on two machines exactly when they train on the same data."""
        splits = {name: [asdict(shard) for shard in self.split(name).shards] for name in SPLITS}
        told = {"format": FORMAT, "tokenizer": self.tokenizer_sha256, "corpus": self.corpus_sha256, "splits": splits}
        told |= {"dtype": self.dtype} if self.dtype else {}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """How a token lies in a shard."""
        return np.dtype(self.dtype).newbyteorder("<") if self.dtype else token_dtype(self.vocab_size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of UTF-8 per token of the validation split: turns nats per token into bits per byte."""
        return self.validation.text_bytes / self.validation.tokens

    def split(self, name: str) -> SplitManifest:
        """The split called ``name``; ValueError for another name than ``train`` and ``validation``."""
        require(name in SPLITS, "split", name, f"one of {', '.join(SPLITS)}")
        return self.train if name == "train" else self.validation

    def verify(self) -> None:
        """Read every shard and compare its sha256; DataError names the first that differs."""
        for shard in (*self.train.shards, *self.validation.shards):
            with (self.folder / shard.file).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise DataError(f"{self.folder / shard.file} is damaged (its sha256 differs from the manifest)")

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        usual = {"directory": self.directory, "dtype": "", "source": ""}  # An earlier release knows the rest.
        told = {name: value for name, value in asdict(self).items() if usual.get(name) != value}
        return json.dumps({"format": FORMAT, "identity": self.identity, **told}, indent=1) + "\n"


def load_manifest(directory: Path) -> CorpusManifest:
    """Read ``directory/manifest.json``; DataError names the file that is damaged and what to delete."""
    path = directory / "manifest.json"
    try:
        told = json.loads(path.read_text())
        if told.pop("format") != FORMAT:
            raise DataError(f"{path} has another format than {FORMAT}: delete {directory} to have it made again")
        identity = told.pop("identity")
        for name in SPLITS:
            shards = tuple(Shard(**shard) for shard in told[name].pop("shards"))
            told[name] = SplitManifest(shards=shards, **told[name])
        manifest = CorpusManifest(directory=directory, **told)
        wrong = "its identity does not match" if manifest.identity != identity else ""
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}): delete {directory} to have it made again") from error
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        file, size = manifest.folder / shard.file, manifest.token_dtype.itemsize * shard.tokens
        found = file.stat().st_size if file.is_file() else -1
        if found != size:
            wrong = wrong or f"{shard.file} has {found} bytes and the manifest says {size}"
    if wrong:
        raise DataError(f"{path} is damaged ({wrong}): delete {directory} to have it made again")
    return manifest


def prepare_corpus(
    options: DataOptions, cache_dir: Path, told: Progress = lambda split, done, total: None
) -> CorpusManifest:
    """Tokenise the text once and return its manifest; later calls find it by the files' names, sizes and times.

    Several processes may call it at once: one works, the others wait for it, at most ``options.lock_wait_s``.  A
    process that dies leaves what it has written, and the next one goes on behind that.  ``told`` hears of each split
    how many bytes of its text are through, and of how many.  Raises DataError in words.
    """
    assert options.kind not in ("tokens", "hf"), "prepare_tokens and prepare_stream have these"
    tokenizer = make_tokenizer(options.tokenizer, options.end_of_file)
    files = source_files(options.kind, options.path, options.pattern_used)
    key = f"{options.kind}-{tokenizer.name}-{_source_key(options, tokenizer, files)[:16]}"
    return made_once(
        cache_dir,
        key,
        options.lock_wait_s,
        lambda folder: _write_all(read_corpus(options.kind, files, options.field), options, tokenizer, folder, told),
    )


def made_once(cache_dir: Path, key: str, wait_s: float, make: Callable[[Path], None]) -> CorpusManifest:
    """The manifest in ``cache_dir/key``, which ``make`` has put into the folder it is given, whoever calls first.

    What a process that died has left is in that folder.
    """
    directory = cache_dir / key
    if (directory / "manifest.json").is_file():
        return load_manifest(directory)
    cache_dir.mkdir(parents=True, exist_ok=True)
    temporary = cache_dir / f"{key}.tmp"
    with _lock(cache_dir / f"{key}.lock", wait_s, temporary / NOTES):
        if not (directory / "manifest.json").is_file():
            for left in cache_dir.glob(f"{key}.tmp-*"):
                shutil.rmtree(left)  # Of an earlier release, which began anew.
            temporary.mkdir(exist_ok=True)
            make(temporary)
            temporary.rename(directory)
            _sync_directory(cache_dir)
    return load_manifest(directory)


def _source_key(options: DataOptions, tokenizer: Tokenizer, files: list[Path]) -> str:
    """Sha256 hex over what the shards are made from, by names, sizes and times, without reading the text."""
    how: list[object] = [FORMAT, options.kind, tokenizer.digest, options.end_of_file, options.shard_tokens]
    return key_of(how + ([] if options.field == FIELD else [options.field]), files)


def key_of(how: Sequence[object], files: Sequence[Path]) -> str:
    """Sha256 hex over ``how`` something is made, and from which files, by their names, sizes and times."""
    told = hashlib.sha256(json.dumps(how).encode())
    for file in files:
        facts = file.stat()
        told.update(f"\n{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode(errors="surrogateescape"))
    return told.hexdigest()


@contextmanager
def _lock(path: Path, wait_s: float, notes: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system drops it when its holder dies.

    DataError where the holder has kept it for ``wait_s`` without another line in its ``notes``.
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


def _write_all(corpus: Corpus, options: DataOptions, tokenizer: Tokenizer, directory: Path, told: Progress) -> None:
    how = [FORMAT, options.kind, tokenizer.digest, options.end_of_file, options.shard_tokens, corpus.digest]
    dtype, splits = token_dtype(tokenizer.vocab_size), {}
    notes = Notes(directory, json.dumps(how), dtype.itemsize)
    for name in SPLITS:
        writer = ShardWriter(directory, name, options.shard_tokens, dtype, notes)
        splits[name] = _write_split(name, corpus.split(name), options, tokenizer, writer, told)
    manifest = CorpusManifest(
        directory=directory,
        kind=options.kind,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.digest,
        end_of_file=options.end_of_file,
        vocab_size=tokenizer.vocab_size,
        corpus_sha256=corpus.digest,
        num_duplicates=corpus.num_duplicates,
        num_not_text=corpus.num_not_text,
        train=splits["train"],
        validation=splits["validation"],
    )
    notes.remove()
    write_manifest(manifest, directory)


def write_manifest(manifest: CorpusManifest, directory: Path) -> None:
    """Write ``directory/manifest.json``, so that it is there after a power cut."""
    with (directory / "manifest.json").open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(directory)


def _write_split(
    name: str,
    documents: list[Document],
    options: DataOptions,
    tokenizer: Tokenizer,
    writer: ShardWriter,
    told: Progress,
) -> SplitManifest:
    text_bytes = sum(document.text_bytes for document in documents)
    done = sum(document.text_bytes for document in documents[: writer.documents])
    for texts, size in _text_batches(options, documents[writer.documents :]):
        told(name, done, text_bytes)
        for ids in tokenizer.encode_batch(texts):
            end = [] if tokenizer.end_of_file is None else [tokenizer.end_of_file]
            writer.write(np.concatenate([ids, np.array(end, dtype=writer.dtype)]))
        done += size
    told(name, text_bytes, text_bytes)
    shards = writer.close()
    return SplitManifest(len(documents), text_bytes, sum(shard.tokens for shard in shards), tuple(shards))


def _text_batches(options: DataOptions, documents: list[Document]) -> Iterator[tuple[list[str], int]]:
    """The texts, and how many bytes they have."""
    texts: list[str] = []
    held = 0
    for document in documents:
        texts.append(read_text(options.kind, document, options.field))
        held += document.text_bytes
        if held >= ENCODE_BYTES:
            yield texts, held
            texts, held = [], 0
    if texts:
        yield texts, held


def _sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Windows:
    """A split cut into windows of ``length`` + 1 tokens that share one token with the next; none crosses a shard."""

    def __init__(self, manifest: CorpusManifest, split: str, length: int) -> None:
        require(length >= 1, "sequence_length", length, "at least 1")
        shards = manifest.split(split).shards
        self._length = length
        kind = manifest.token_dtype
        self._tokens = [np.memmap(manifest.folder / shard.file, dtype=kind, mode="r") for shard in shards]
        self._ends = np.cumsum([(shard.tokens - 1) // length for shard in shards])
        self.count = int(self._ends[-1]) if shards else 0
        require(
            self.count >= 1, "sequence_length", length, f"at most the {manifest.split(split).tokens} tokens of {split}"
        )

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [len(indices), length] each; targets are one token further."""
        rows = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            shard = int(np.searchsorted(self._ends, index, side="right"))
            first = int(index) - (int(self._ends[shard - 1]) if shard else 0)
            row[:] = self._tokens[shard][first * self._length : (first + 1) * self._length + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class TokenStream:
    """A site's endless, seeded draw of sequences; ``batch`` is a pure function of (seed, site, rank, cursor).

    The seed deals all windows of the split to ``num_sites`` fixed, disjoint shares that cover it; each epoch of a
    site is a new permutation of its share.  The **cursor** counts sequences drawn by the whole site, so it keeps its
    meaning when a site comes back with another number of ranks; rank r of a batch takes the r-th part of it.
    """

    def __init__(
        self,
        manifest: CorpusManifest,
        split: str,
        sequence_length: int,
        batch_sequences: int,
        site_index: int = 0,
        num_sites: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
    ) -> None:
        require(batch_sequences >= 1, "batch_sequences", batch_sequences, "at least 1")
        require(num_sites >= 1, "num_sites", num_sites, "at least 1")
        require(0 <= site_index < num_sites, "site_index", site_index, f"0 to num_sites-1={num_sites - 1}")
        require(world >= 1, "world", world, "at least 1")
        require(0 <= rank < world, "rank", rank, f"0 to world-1={world - 1}")
        self._windows = _Windows(manifest, split, sequence_length)
        require(
            num_sites <= self._windows.count, "num_sites", num_sites, f"at most the {self._windows.count} sequences"
        )
        self.identity = f"{manifest.identity}/{split}/{sequence_length}/site-{site_index}-of-{num_sites}/seed-{seed}"
        """Equal where equal cursors mean equal sequences."""
        self.sequence_length = sequence_length
        self.batch_sequences = batch_sequences
        self.sequences_per_batch = batch_sequences * world
        """How far a batch of the whole site moves the cursor."""
        self.sequences_per_epoch = len(range(site_index, self._windows.count, num_sites))
        self._site_index, self._num_sites, self._rank, self._seed = site_index, num_sites, rank, seed

    @property
    def tokens_per_batch(self) -> int:
        """Target tokens of one batch of the whole site."""
        return self.sequences_per_batch * self.sequence_length

    def batch(self, cursor: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets at ``cursor``, int64 [batch_sequences, sequence_length] each."""
        return self._windows.read(self.window_indices(cursor))

    def window_indices(self, cursor: int) -> NDArray[np.int64]:
        """Which windows of the split ``batch`` reads, int64 [batch_sequences]; ValueError for a negative cursor."""
        return self.windows_at(self.drawn(cursor))

    def drawn(self, cursor: int) -> NDArray[np.int64]:
        """The cursors of the sequences that are this rank's, int64 [batch_sequences]."""
        require(cursor >= 0, "cursor", cursor, "not negative")
        first = cursor + self._rank * self.batch_sequences
        return np.arange(first, first + self.batch_sequences, dtype=np.int64)

    def windows_at(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows at these places of the endless order."""
        epochs, places = np.divmod(drawn, self.sequences_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = f"{self._seed}/site/{self._site_index}/{self._num_sites}/epoch/{epoch}"
            places[here] = permuted(places[here], self.sequences_per_epoch, key)
        dealt = places * self._num_sites + self._site_index
        return permuted(dealt, self._windows.count, f"{self._seed}/deal")


def validation_batches(
    manifest: CorpusManifest, sequence_length: int, batch_sequences: int, num_batches: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """The same batches at every call and every site: windows spread evenly over the validation split.

    ``num_batches`` 0 takes every window (the last batch may be shorter); never more windows than there are.
    """
    require(batch_sequences >= 1, "batch_sequences", batch_sequences, "at least 1")
    require(num_batches >= 0, "num_batches", num_batches, "0 (all) or more")
    windows = _Windows(manifest, "validation", sequence_length)
    wanted = min(num_batches * batch_sequences or windows.count, windows.count)
    chosen = np.arange(wanted, dtype=np.int64) * windows.count // wanted
    return [windows.read(chosen[at : at + batch_sequences]) for at in range(0, wanted, batch_sequences)]


PIECES_MAX = 31
"""That one broadcast to the ranks carries."""

UnitSource = Callable[[int, int], list[tuple[int, int]]]
"""(place, count) to the units at ``place`` and on, at least one and at most ``count``, as (first unit, how many)."""


class UnitPlaces:
    """Which units stand at the places of a site's list: rank 0 is told by ``source``, the others by rank 0."""

    def __init__(self, unit_sequences: int, source: UnitSource, group: SiteGroup) -> None:
        require(unit_sequences >= 1, "unit_sequences", unit_sequences, "at least 1")
        self._unit, self._source, self._group = unit_sequences, source, group

    def numbers(self, cursor: int, stop: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the endless order of the sequences at the cursors ``drawn``, which lie before ``stop``.

        A collective: all ranks ask for the same from ``cursor`` to ``stop``, and each for its own ``drawn`` of it.
        """
        first, last = cursor // self._unit, (stop - 1) // self._unit
        places, within = np.divmod(drawn, self._unit)
        units = np.array(self._units(first, last + 1 - first), dtype=np.int64)
        found: NDArray[np.int64] = units[places - first] * self._unit + within
        return found

    def _units(self, first: int, count: int) -> list[int]:
        """The units at ``count`` places from ``first`` on.

        They are asked for by each batch, and nothing is remembered: when a run was restored the list is another.
        """
        found: list[int] = []
        while len(found) < count:
            told: list[int] = []
            if self._group.is_first:
                pieces = self._source(first + len(found), count - len(found))
                told = [number for piece in pieces[:PIECES_MAX] for number in piece]
            told = self._group.broadcast_small(told)
            for start, number in zip(told[::2], told[1::2], strict=True):
                found += range(start, start + number)
        return found


class LeasedSamples:
    """The samples of data that are somebody's own, by index, in the order in which units of them are leased.

    The order is that of the seed, equal at all sites; each epoch of it is a permutation of all ``samples``.
    """

    def __init__(self, samples: int, unit_samples: int, source: UnitSource, group: SiteGroup, seed: int = 0) -> None:
        require(samples >= 1, "samples", samples, "at least 1")
        self._samples, self._seed = samples, seed
        self._places = UnitPlaces(unit_samples, source, group)

    def indices(self, cursor: int, stop: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those at the cursors ``drawn``; a collective, as ``UnitPlaces.numbers``."""
        epochs, places = np.divmod(self._places.numbers(cursor, stop, drawn), self._samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permuted(places[here], self._samples, f"{self._seed}/samples/epoch/{epoch}")
        return places


class LeasedStream(TokenStream):
    """``batch`` is a pure function of the seed, the cursor and the list, which ``source`` tells on rank 0.

    The other ranks learn the units of a batch from rank 0, so ``batch`` is a collective; all ranks draw the same
    cursors in the same order.
    """

    def __init__(
        self,
        manifest: CorpusManifest,
        split: str,
        sequence_length: int,
        batch_sequences: int,
        unit_sequences: int,
        source: UnitSource,
        group: SiteGroup,
        seed: int = 0,
        place: tuple[int, int] | None = None,
    ) -> None:
        """``place`` is this rank's among those that draw batches of their own, and how many of them there are; None:
        every rank of ``group`` does."""
        rank, world = place if place is not None else (group.rank, group.world)
        super().__init__(manifest, split, sequence_length, batch_sequences, rank=rank, world=world, seed=seed)
        self.identity = f"{manifest.identity}/{split}/{sequence_length}/units-of-{unit_sequences}/seed-{seed}"
        self._places = UnitPlaces(unit_sequences, source, group)

    def window_indices(self, cursor: int) -> NDArray[np.int64]:
        """Which windows of the split ``batch`` reads, int64 [batch_sequences]; ValueError for a negative cursor."""
        return self.windows_at(self._places.numbers(cursor, cursor + self.sequences_per_batch, self.drawn(cursor)))
