"""The state of every unit of the data, as the outer machine remembers it.

A unit is a fixed number of sequences; units are numbered from 0 without end.  A site has a list of its leased units and
draws them in that order, so its data cursor counts places in the list.  Every unit ever leased is in one of these
states:

    merged      merged updates have consumed all of it, in every fragment
    in hand     a present site has it, or an update without a fate does
    given back  a site that is gone had it and nothing of it is merged: it is leased next
    partly      a site that is gone had it and a part of it is merged: it is never leased again

Stored are the units that are over (merged or partly), given back and begun; those in hand follow from the lists.

Sets of whole numbers are sorted spans that neither overlap nor touch, and every function of spans returns such a list.
A long run of numbers that were leased and came back in order is one span, whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SKIPPED = -1
"""In place of a unit's number: the site had no new unit there, and drew an earlier one again."""
Piece = tuple[int, int]
"""(first, count): ``count`` places of a list with consecutive units from ``first`` on, or all skipped (``SKIPPED``)."""
PAST_MAX = 256
"""Places of a list kept after they are over, for a process of its site that resumes from before them."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The counts of all units ever leased by state, and how often a unit was leased again or trained on again."""

    leased: int
    merged: int
    partly: int
    in_hand: int
    given_back: int
    reissued: int
    repeated: int

    def balanced(self) -> bool:
        """Return whether every unit ever leased is in exactly one state."""
        return self.leased == self.merged + self.partly + self.in_hand + self.given_back


@dataclass(slots=True)
class UnitList:
    """A site's list of units from place ``first`` on."""

    first: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first place beyond the list."""
        return self.first + num_places(self.pieces)

    def units(self, places: Iterable[Span]) -> list[Span]:
        """Return the units at ``places``."""
        wanted, found, at = list(places), list[Span](), self.first
        for start, count in self.pieces:
            if start != SKIPPED:
                found += [(start + begin - at, start + end - at) for begin, end in common([(at, at + count)], wanted)]
            at += count
        return added(found, ())


@dataclass(slots=True)
class Holder(UnitList):
    """A site's list at the syncer; the places before ``first`` are over.

    ``merged`` are, by fragment, the sequences that merged updates have consumed, in the site's own count and from
    ``past`` on; ``counted`` the places that are merged in every fragment and counted. ``silent_ns`` is the instant at
    which the site became silent; it is ``gone`` once its lease has run out, it left, or was evicted. ``again`` counts
    the places at which it had no new unit and drew an earlier one again. ``past`` are the last places before ``first``.
    """

    merged: list[list[Span]] = field(kw_only=True)
    counted: list[Span] = field(default_factory=list)
    gone: bool = False
    silent_ns: int | None = None
    again: int = 0
    past: list[Piece] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """The first place in ``past``."""
        return self.first - num_places(self.past)

    def open(self) -> list[Span]:
        """Return the places of the list that are not counted as merged."""
        return without([(self.first, self.end)], self.counted)

    def cut(self, first: int, unit: int) -> None:
        """Drop the places before ``first``, keeping the last ``PAST_MAX`` in ``past``.  ``unit``: sequences a unit."""
        past = [*self.past, *pieces_at(self.pieces, 0, first - self.first)]
        self.past = joined(pieces_at(past, num_places(past) - PAST_MAX))
        self.pieces = pieces_at(self.pieces, first - self.first)
        self.first = max(self.first, first)
        self.counted = without(self.counted, [(0, self.first)])
        self.merged = [without(spans, [(0, self.begin * unit)]) for spans in self.merged]

    def whole(self, unit: int) -> list[Span]:
        """Return the places that are merged in every fragment."""
        return whole_units(reduce(common, self.merged), unit)


@dataclass(slots=True)
class Units:
    """The stored state of all units.

    ``corpus`` identifies the text that all sites draw from, set by the first that joined; ``fresh`` is the next unit
    never leased.  ``over`` are the units that are merged, or merged in part and in no list any more: ``partly`` counts
    the latter.  ``begun`` are units in a list that are merged in part, ``free`` those given back.  The size of each is
    bounded by that of the lists.
    """

    corpus: str = ""
    fresh: int = 0
    over: list[Span] = field(default_factory=list)
    partly: int = 0
    begun: list[Span] = field(default_factory=list)
    free: list[Span] = field(default_factory=list)
    reissued: int = 0
    repeated: int = 0
    holders: dict[str, Holder] = field(default_factory=dict)


def num_places(pieces: Iterable[Piece]) -> int:
    """Return the number of places in ``pieces``."""
    return sum(map(itemgetter(1), pieces))


def pieces_at(pieces: Iterable[Piece], begin: int, end: int | None = None) -> list[Piece]:
    """Return the places of ``pieces`` from ``begin``, counted from 0, to before ``end``; None: to the last."""
    found: list[Piece] = []
    at = 0
    for start, count in pieces:
        skip, stop = max(begin - at, 0), count if end is None else min(end - at, count)
        if skip < stop:
            found.append((start if start == SKIPPED else start + skip, stop - skip))
        at += count
    return found


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same places in as few pieces as possible."""
    found: list[Piece] = []
    for start, count in pieces:
        if count <= 0:
            continue
        if found:
            before, number = found[-1]
            if start == before == SKIPPED or (before != SKIPPED and start == before + number):
                found[-1] = (before, number + count)
                continue
        found.append((start, count))
    return found


Span = tuple[int, int]
"""The numbers from the first, included, to the second, excluded."""


def added(spans: Iterable[Span], more: Iterable[Span]) -> list[Span]:
    """Return the union of ``spans`` and ``more``, which need not be sorted."""
    found: list[Span] = []
    for start, stop in sorted([*spans, *more]):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def without(spans: Iterable[Span], less: Iterable[Span]) -> list[Span]:
    """Return the numbers in ``spans`` that are not in ``less``."""
    found: list[Span] = []
    gaps, here = added(less, ()), 0
    for start, stop in added(spans, ()):
        at = start
        while here < len(gaps) and gaps[here][0] < stop:
            begin, end = gaps[here]
            if begin > at:
                found.append((at, begin))
            at = max(at, end)
            if end > stop:
                break  # The gap may reach into the next span.
            here += 1
        if at < stop:
            found.append((at, stop))
    return found


def common(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the intersection of ``spans`` and ``others``."""
    spans = list(spans)
    return without(spans, without(spans, others))


def size(spans: Iterable[Span]) -> int:
    """Return how many numbers ``spans`` hold."""
    return sum(stop - start for start, stop in spans)


def in_units(spans: Iterable[Span], unit: int) -> list[Span]:
    """Return the units, of ``unit`` numbers each, that ``spans`` touch."""
    return added([(start // unit, -(-stop // unit)) for start, stop in spans], ())


def whole_units(spans: Iterable[Span], unit: int) -> list[Span]:
    """Return the units, of ``unit`` numbers each, that are wholly in ``spans``."""
    return added([(-(-start // unit), stop // unit) for start, stop in spans], ())


def first_of(spans: Sequence[Span], count: int) -> list[Span]:
    """Return the ``count`` smallest numbers, or all where there are fewer."""
    found = pieces_at([(start, stop - start) for start, stop in spans], 0, count)
    return [(start, start + number) for start, number in found]
