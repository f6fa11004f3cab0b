"""The batches of a site that draws units it is leased: the same cursor, over a list of units that somebody else keeps.

The text has one endless order, equal at all sites: each epoch is a permutation of all its windows.  A unit is a number
of consecutive sequences of that order, and a site draws the units of its list one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from diloco.inner.checks import require
from diloco.inner.data import CorpusManifest, TokenStream
from diloco.inner.permutation import permuted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from diloco.inner.parallel import SiteGroup

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
