"""Sample indices for a user's own training loop over data leased in units, and the count of samples trained on.

The loop asks for indices into its data.  ``samples_per_step`` alone decides what a step has consumed, so a data loader
that runs ahead of training, in its own workers, does not change the counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diloco.inner.checks import require
from diloco.inner.data import LeasedSamples

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.inner.data import UnitSource
    from diloco.inner.parallel import SiteGroup

NAME_CHARS_MAX = 256
STEPS_AHEAD_MAX = 1024
"""A loop may draw at most so many steps ahead of training; beyond that ``samples_per_step`` must be wrong."""


@dataclass(frozen=True, slots=True)
class OwnData:
    """The loop's own data set, the same at all sites of the run."""

    name: str
    samples: int
    samples_per_step: int
    """By all ranks of the site together."""

    def __post_init__(self) -> None:
        wanted = f"what all sites call the same data, 1 to {NAME_CHARS_MAX} letters"
        require(isinstance(self.name, str) and 0 < len(self.name) <= NAME_CHARS_MAX, "data", self.name, wanted)
        for name in ("samples", "samples_per_step"):
            value = getattr(self, name)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(good, name, value, "a whole number from 1 on, where data is given")

    @property
    def identity(self) -> str:
        """Return a SHA-256 hex, equal at two sites exactly when the same index means the same sample there."""
        return hashlib.sha256(json.dumps(["samples", self.name, self.samples]).encode()).hexdigest()


class Drawing:
    """A loop's position in its site's list of leased units."""

    def __init__(self, data: OwnData, unit_samples: int, source: UnitSource, group: SiteGroup, seed: int) -> None:
        self._data, self._group = data, group
        self._samples = LeasedSamples(data.samples, unit_samples, source, group, seed)
        self._drawn = 0
        self.cursor = 0
        """Samples that the site has trained on."""

    @property
    def steps(self) -> int:
        """The samples that the site has trained on, in steps of ``samples_per_step``."""
        return self.cursor // self._data.samples_per_step

    def begin(self, cursor: int) -> None:
        """Continue after ``cursor``; samples drawn ahead of it are drawn again."""
        self.cursor = self._drawn = cursor

    def batch(self, count: int, rank: int | None = None, ranks: int | None = None) -> list[int]:
        """Return the next ``count`` indices for ``rank`` of the ``ranks`` that draw different batches; default: all.

        Every rank calls it, in the same order and with the same ``count``.
        """
        world = self._group.world if ranks is None else ranks
        mine = self._group.rank if rank is None else rank
        require(isinstance(count, int) and count >= 1, "count", count, "a whole number from 1 on")
        require(world >= 1, "ranks", world, "at least 1")
        require(0 <= mine < world, "rank", mine, f"0 to ranks-1={world - 1}")
        first, stop = self._drawn, self._drawn + count * world
        if stop - self.cursor > STEPS_AHEAD_MAX * self._data.samples_per_step:
            raise ValueError(
                f"samples_per_step is {self._data.samples_per_step}, and {stop - self.cursor:,} samples would be drawn "
                "ahead of the steps: say how many one step of the whole site reads"
            )
        mine_first = first + mine * count
        drawn = np.arange(mine_first, mine_first + count, dtype=np.int64)
        found = self._samples.indices(first, stop, drawn)
        self._drawn = stop
        return [int(index) for index in found]

    def stepped(self) -> int:
        """Count one step's samples as trained on and return their number; ValueError if fewer were drawn."""
        count = self._data.samples_per_step
        if self.cursor + count > self._drawn:
            raise ValueError(
                f"samples_per_step is {count}, and the loop has drawn {self._drawn - self.cursor} for this step: take "
                "the indices of its samples from outer.batches"
            )
        self.cursor += count
        return count


class Batches(Iterator[list[int]]):
    """Iterates over batches of indices, for a loop or its data loader.

    Each new iteration begins after the site's last step: batches that an abandoned loader drew ahead are never trained
    on, and the next loader draws them again.
    """

    def __init__(
        self, drawing: Drawing, goes_on: Callable[[], bool], count: int, rank: int | None, ranks: int | None
    ) -> None:
        self._drawing, self._goes_on, self._asked = drawing, goes_on, (count, rank, ranks)

    def __iter__(self) -> Batches:
        self._drawing.begin(self._drawing.cursor)
        return self

    def __next__(self) -> list[int]:
        if not self._goes_on():
            raise StopIteration
        return self._drawing.batch(*self._asked)
