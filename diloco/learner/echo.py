"""What a site really holds: digests of its bases, computed from the tensors now and then, never copied.

A base is verified when it is fetched, and then lies in memory for as long as its version lasts.  A bit that flips there
shows in the next heartbeat's digest, which the syncer compares with what it published.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from diloco.codec.contract import digest
from diloco.wire.messages import short_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

IDLE_SHARE = 50
"""Time left to others for each unit of time that hashing takes: at most 2 % of one core, however large the model."""


class Echo:
    """One fragment at a time, in turn, in one thread beside training."""

    def __init__(self, num_fragments: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._known: list[tuple[ReferenceType[Tensor], int] | None] = [None] * num_fragments
        self._turn = 0
        self._not_before_s = 0.0

    def next_fragment(self) -> int | None:
        """The fragment whose turn it is, or None while it is too early."""
        return self._turn if self._clock_s() >= self._not_before_s else None

    def compute(self, base: Tensor | None, told: str) -> None:
        """Hash the ``base`` of the fragment whose turn it is, and pass the turn on.

        ``told`` is the digest that came with it, of which only the form is looked at; without one nothing can be
        compared, and nothing is said.
        """
        began_s = self._clock_s()
        if base is not None and told:
            self._known[self._turn] = (ref(base), short_digest(digest(base, told)))
        ended_s = self._clock_s()
        self._not_before_s = ended_s + IDLE_SHARE * (ended_s - began_s)
        self._turn = (self._turn + 1) % len(self._known)

    def digests(self, bases: Sequence[Tensor | None]) -> tuple[int, ...]:
        """What a heartbeat says of the ``bases`` that are held now: 0 for one that was not hashed yet."""
        return tuple(
            known[1] if known is not None and known[0]() is base else 0
            for base, known in zip(bases, self._known, strict=True)
        )
