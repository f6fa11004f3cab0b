"""Reading a corpus: the manifest of its token shards, and the batches that a site draws from them.

Permutations.  A seeded permutation of 0 .. size-1 needs no memory: any single place can be computed.  It is a balanced
Feistel network over the next even number of bits, applied until the result is below size (cycle walking: Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002).  It shuffles well and gives no secrecy.

Batches.  ``TokenStream`` is a pure function from a cursor to a batch.

Leased units.  With ``UnitPlaces`` the cursor of a stream counts over a list of units that are leased to the site; other
code keeps the list.  The text has one endless order, equal at all sites: each epoch is a permutation of all its
windows.  A unit is a fixed number of consecutive sequences of that order, and a site draws the units of its list in
turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diloco.inner import require
from diloco.inner.tokenizer import token_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from diloco.inner.parallel import SiteGroup

SPLITS = ("train", "validation")
FORMAT = 1


class DataError(ValueError):
    """A text or corpus cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SplitManifest:
    """One split: its size and its shards."""

    documents: int
    text_bytes: int
    tokens: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class CorpusManifest:
    """The content of ``manifest.json``.  Its only paths are ``directory``, where it was read from, and ``source``."""

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
    """Type of a token in files that another program has made; empty: the narrowest that fits the vocabulary."""
    source: str = ""
    """The folder of the shards, if it is not the manifest's."""

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return Path(self.source) if self.source else self.directory

    @property
    def identity(self) -> str:
        """Sha256 hex of all that decides the tokens: equal on two machines exactly if they train on the same data."""
        splits = {name: [asdict(shard) for shard in self.split(name).shards] for name in SPLITS}
        told = {"format": FORMAT, "tokenizer": self.tokenizer_sha256, "corpus": self.corpus_sha256, "splits": splits}
        told |= {"dtype": self.dtype} if self.dtype else {}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of a token in a shard."""
        return np.dtype(self.dtype).newbyteorder("<") if self.dtype else token_dtype(self.vocab_size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of UTF-8 per token of the validation split: turns nats per token into bits per byte."""
        return self.validation.text_bytes / self.validation.tokens

    def split(self, name: str) -> SplitManifest:
        """Return the split called ``name``, ``train`` or ``validation``."""
        return {"train": self.train, "validation": self.validation}[name]

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        usual = {"directory": self.directory, "dtype": "", "source": ""}  # Earlier releases know only the other fields.
        told = {name: value for name, value in asdict(self).items() if usual.get(name) != value}
        return json.dumps({"format": FORMAT, "identity": self.identity, **told}, indent=1) + "\n"


def load_manifest(directory: Path, cure: str = "delete {0} to have it made again") -> CorpusManifest:
    """Read ``directory/manifest.json``; DataError names the file that is damaged, and the ``cure`` of the folder."""
    path, cure = directory / "manifest.json", cure.format(directory)
    try:
        told = json.loads(path.read_text())
        if told.pop("format") != FORMAT:
            raise DataError(f"{path} has another format than {FORMAT}: {cure}")
        identity = told.pop("identity")
        for name in SPLITS:
            shards = tuple(Shard(**shard) for shard in told[name].pop("shards"))
            told[name] = SplitManifest(shards=shards, **told[name])
        manifest = CorpusManifest(directory=directory, **told)
        wrong = "its identity does not match" if manifest.identity != identity else ""
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}): {cure}") from error
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        file, size = manifest.folder / shard.file, manifest.token_dtype.itemsize * shard.tokens
        found = file.stat().st_size if file.is_file() else -1
        if found != size:
            wrong = wrong or f"{shard.file} has {found} bytes and the manifest says {size}"
    if wrong:
        raise DataError(f"{path} is damaged ({wrong}): {cure}")
    return manifest


ROUNDS = 6


def permuted(places: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Map ``places`` by the permutation of 0 .. ``size`` - 1 that ``key`` seeds; returns int64, same shape."""
    assert size >= 1
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    keys = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * ROUNDS), dtype="<u8").astype(np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    # The network permutes 0 .. 4^half_bits - 1, and each of its cycles returns below size, so the walk ends.  It is
    # short, because the domain is less than 4 times (for tiny sizes a few times more) too large.
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & mask
        for round_key in keys:
            # The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2^64.
            mixed = right + round_key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def in_epochs(places: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Map the ``places`` of an endless order to 0 .. ``size`` - 1: each epoch is another permutation."""
    epochs, found = np.divmod(places, size)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permuted(found[here], size, f"{key}/epoch/{epoch}")
    return found


class _Windows:
    """A split cut into windows of ``length`` + 1 tokens that share one token with the next; none crosses a shard."""

    def __init__(self, manifest: CorpusManifest, split: str, length: int) -> None:
        shards = manifest.split(split).shards
        self._length = length
        kind = manifest.token_dtype
        self._tokens = [np.memmap(manifest.folder / shard.file, dtype=kind, mode="r") for shard in shards]
        self._ends = np.cumsum([(shard.tokens - 1) // length for shard in shards])
        self.count = int(self._ends[-1]) if shards else 0
        if not self.count:
            most = max((shard.tokens for shard in shards), default=0)
            raise DataError(
                f"sequence_length is {length}: a sequence needs one token more than that in a row, and the {split} "
                f"text has {most}; give more text, or a smaller inner.sequence_length"
            )

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [len(indices), length] each; targets are shifted by one token."""
        rows = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            shard = int(np.searchsorted(self._ends, index, side="right"))
            first = int(index) - (int(self._ends[shard - 1]) if shard else 0)
            row[:] = self._tokens[shard][first * self._length : (first + 1) * self._length + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class TokenStream:
    """A site's endless, seeded draw of sequences; ``batch`` is a pure function of (seed, site, rank, cursor).

    The seed divides all windows of the split into ``num_sites`` fixed, disjoint shares that cover it; each epoch of a
    site is a new permutation of its share.  The **cursor** counts sequences drawn by the whole site, so it keeps its
    meaning if a site resumes with another number of ranks; rank r takes the r-th part of a batch.

    With ``units``, whose list then decides as well, ``batch`` is a collective: all ranks draw the same cursors in the
    same order.
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
        seed: int | str = 0,
        units: UnitPlaces | None = None,
    ) -> None:
        """With ``units`` the site draws leased ones of the whole text, and has no share of its own."""
        assert 0 <= site_index < num_sites, (site_index, num_sites)
        assert 0 <= rank < world, (rank, world)
        assert units is None or num_sites == 1, "leased units are of the whole text"
        self._windows = _Windows(manifest, split, sequence_length)
        require(
            num_sites <= self._windows.count, "num_sites", num_sites, f"at most the {self._windows.count} sequences"
        )
        drawn = f"site-{site_index}-of-{num_sites}" if units is None else f"units-of-{units.unit_sequences}"
        self.identity = f"{manifest.identity}/{split}/{sequence_length}/{drawn}/seed-{seed}"
        """Two streams with equal identities have equal sequences at equal cursors."""
        self.sequence_length = sequence_length
        self.batch_sequences = batch_sequences
        self.sequences_per_batch = batch_sequences * world
        """Sequences in a batch of the whole site, by which the cursor advances."""
        self.tokens_per_batch = self.sequences_per_batch * sequence_length
        """Target tokens of one batch of the whole site."""
        self.sequences_per_epoch = len(range(site_index, self._windows.count, num_sites))
        self._site_index, self._num_sites, self._rank, self._seed = site_index, num_sites, rank, seed
        self._units = units

    def batch(self, cursor: int) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets at ``cursor``, int64 [batch_sequences, sequence_length] each."""
        return self._windows.read(self.window_indices(cursor))

    def window_indices(self, cursor: int) -> NDArray[np.int64]:
        """Return the windows that ``batch`` reads, int64 [batch_sequences]."""
        first = cursor + self._rank * self.batch_sequences
        drawn = np.arange(first, first + self.batch_sequences, dtype=np.int64)
        if self._units is not None:
            drawn = self._units.numbers(cursor, cursor + self.sequences_per_batch, drawn)
        key = f"{self._seed}/site/{self._site_index}/{self._num_sites}"
        dealt = in_epochs(drawn, self.sequences_per_epoch, key) * self._num_sites + self._site_index
        return permuted(dealt, self._windows.count, f"{self._seed}/deal")


def validation_batches(
    manifest: CorpusManifest, sequence_length: int, batch_sequences: int, num_batches: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return batches of windows spread evenly over the validation split, the same at every call and every site.

    ``num_batches`` 0 takes every window.  No window is taken twice: there may be fewer batches, and a shorter last one.
    Each batch is read when it is taken.
    """
    require(num_batches >= 0, "num_batches", num_batches, "0 (all) or more")
    windows = _Windows(manifest, "validation", sequence_length)
    wanted = min(num_batches * batch_sequences or windows.count, windows.count)
    chosen = np.arange(wanted, dtype=np.int64) * windows.count // wanted
    return (windows.read(chosen[at : at + batch_sequences]) for at in range(0, wanted, batch_sequences))


PIECES_MAX = 31
"""Most pieces in one broadcast to the ranks, which carries at most 63 integers, two for each piece."""

UnitSource = Callable[[int, int], list[tuple[int, int]]]
"""Maps (place, count) to the units from ``place`` on, at least one and at most ``count``, as pieces (first unit, number
of units)."""


class UnitPlaces:
    """The units at the places of a site's list: rank 0 gets them from ``source``, the others from rank 0."""

    def __init__(self, unit_sequences: int, source: UnitSource, group: SiteGroup) -> None:
        self.unit_sequences, self._source, self._group = unit_sequences, source, group

    def numbers(self, cursor: int, stop: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers in the endless order of the sequences at the cursors ``drawn``, int64, same shape.

        A collective: all ranks pass the same ``cursor`` and ``stop``, and each its own ``drawn`` between them.
        Every batch asks for its units, without a cache, because the list changes when a run is restored.
        """
        unit = self.unit_sequences
        first, count = cursor // unit, (stop - 1) // unit + 1 - cursor // unit
        units: list[int] = []
        while len(units) < count:
            told: list[int] = []
            if self._group.is_first:
                pieces = self._source(first + len(units), count - len(units))
                told = [number for piece in pieces[:PIECES_MAX] for number in piece]
            told = self._group.broadcast_small(told)
            for start, number in zip(told[::2], told[1::2], strict=True):
                units += range(start, start + number)
        places, within = np.divmod(drawn, unit)
        found: NDArray[np.int64] = np.array(units, dtype=np.int64)[places - first] * unit + within
        return found
