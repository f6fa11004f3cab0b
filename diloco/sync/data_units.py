"""Which units of the data are where: what the outer machine remembers of them.

A unit is a fixed number of sequences; units are numbered from 0 without end.  A site has a list of the units that it
was leased and draws them in that order, so a place in its list is what its data cursor counts.  Of every unit that was
ever leased one of these is true:

    merged      updates that are merged have consumed all of it, in every fragment
    in hand     a site that is there has it, or an update that has no fate yet does
    given back  a site that is gone had it and nothing of it is merged: it is leased next
    partly      a site that is gone had it and a part of it is merged: it is never leased again

What is over, given back and begun is written down; what is in hand follows from the lists.

Sets of whole numbers are sorted spans that neither overlap nor touch, and every function of spans gives such a list.
Long runs of numbers that were given out and came back in order are one span, however many they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SKIPPED = -1
"""In the place of a unit's number: the site had run out, and has drawn something over again."""
Piece = tuple[int, int]
"""So many consecutive units, from the first on, or so many places that were skipped; at as many places of a list."""
PAST_MAX = 256
"""Places of a list that are remembered when they are over, for a process of its site that goes on from before that."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Where all units are that were ever leased, and how often one was leased or merged once more."""

    leased: int
    merged: int
    partly: int
    in_hand: int
    given_back: int
    reissued: int
    repeated: int

    def balanced(self) -> bool:
        """Whether every unit that was ever leased is in exactly one place."""
        return self.leased == self.merged + self.partly + self.in_hand + self.given_back


@dataclass(slots=True)
class Holder:
    """A site's list from place ``first`` on: what is before it is over.

    ``merged`` are, by fragment, the sequences that merged updates have consumed, in the site's own count; ``counted``
    the places that are merged in every fragment, and were counted.  ``silent_ns`` is since when nothing was heard of
    the site; it is ``gone`` once its lease has run out, it said goodbye, or was put out.  ``again`` counts the units
    that it has drawn over again because it had no other.  ``past`` are the last places before ``first``.
    """

    merged: list[list[Span]]
    first: int = 0
    pieces: list[Piece] = field(default_factory=list)
    counted: list[Span] = field(default_factory=list)
    gone: bool = False
    silent_ns: int | None = None
    again: int = 0
    past: list[Piece] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first place that nothing was leased for."""
        return self.first + sum(count for _, count in self.pieces)

    def open(self) -> list[Span]:
        """The places of the list that are not counted."""
        return without([(self.first, self.end)], self.counted)

    def cut(self, first: int, unit: int) -> None:
        """Forget the places before ``first``."""
        past = [*self.past, *pieces_before(self.pieces, first - self.first)]
        self.past = joined(pieces_from(past, sum(count for _, count in past) - PAST_MAX))
        self.pieces = pieces_from(self.pieces, first - self.first)
        self.first = max(self.first, first)
        self.counted = without(self.counted, [(0, self.first)])
        self.merged = [without(spans, [(0, self.first * unit)]) for spans in self.merged]

    def whole(self, unit: int) -> list[Span]:
        """The places that are merged in every fragment."""
        found = self.merged[0]
        for spans in self.merged[1:]:
            found = common(found, spans)
        return common(whole_units(found, unit), [(self.first, self.end)])


@dataclass(slots=True)
class Units:
    """All that is remembered.

    ``corpus`` is the text that all sites draw from, by the first that joined; ``fresh`` the next unit that was never
    leased.  ``over`` are the units that are merged, and ``partly`` of them that are not but in part and are in no list
    any more; ``begun`` those in a list that are merged in part.  So each of these is bounded by what the lists hold.
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


def begun_before(fresh: int) -> Units:
    """Where it is not known any more what was merged: no unit before ``fresh`` is leased again, and each is partly."""
    return Units(fresh=fresh, over=added([(0, fresh)], ()), partly=fresh)


def pieces_from(pieces: Sequence[Piece], skip: int) -> list[Piece]:
    """``pieces`` without the first ``skip`` places."""
    found: list[Piece] = []
    for start, count in pieces:
        if skip >= count:
            skip -= count
            continue
        found.append((start if start == SKIPPED else start + max(skip, 0), count - max(skip, 0)))
        skip = 0
    return found


def pieces_before(pieces: Sequence[Piece], places: int) -> list[Piece]:
    """The first ``places`` places of ``pieces``."""
    found: list[Piece] = []
    for start, count in pieces:
        if places <= 0:
            break
        found.append((start, min(count, places)))
        places -= count
    return found


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same places in as few pieces as can be."""
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


def units_at(first: int, pieces: Sequence[Piece], places: Iterable[Span]) -> list[Span]:
    """The units at ``places`` of a list that begins at place ``first``."""
    wanted, found, at = list(places), list[Span](), first
    for start, count in pieces:
        if start != SKIPPED:
            found += [(start + begin - at, start + end - at) for begin, end in common([(at, at + count)], wanted)]
        at += count
    return added(found, ())


def leased_places(first: int, pieces: Sequence[Piece]) -> list[Span]:
    """The places of a list that have a unit."""
    found, at = list[Span](), first
    for start, count in pieces:
        found += [(at, at + count)] if start != SKIPPED else []
        at += count
    return added(found, ())


def columns(units: Units, in_hand: Sequence[Span]) -> Columns:
    """The count of everything; ``in_hand`` are the units that are."""
    partly = units.partly + size(without(units.begun, in_hand))
    return Columns(
        leased=units.fresh,
        merged=size(units.over) - units.partly,
        partly=partly,
        in_hand=size(in_hand),
        given_back=size(units.free),
        reissued=units.reissued,
        repeated=units.repeated + sum(holder.again for holder in units.holders.values()),
    )


Span = tuple[int, int]
"""From the first number to before the second."""


def added(spans: Iterable[Span], more: Iterable[Span]) -> list[Span]:
    """What is in either."""
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
    """What is in ``spans`` and not in ``less``."""
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
                break  # It reaches into what comes next.
            here += 1
        if at < stop:
            found.append((at, stop))
    return found


def common(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What is in both."""
    found: list[Span] = []
    theirs, here = added(others, ()), 0
    for start, stop in added(spans, ()):
        while here < len(theirs) and theirs[here][0] < stop:
            begin, end = theirs[here]
            if start < end:
                found.append((max(start, begin), min(stop, end)))
            if end > stop:
                break  # It reaches into what comes next.
            here += 1
    return found


def size(spans: Iterable[Span]) -> int:
    """How many numbers there are."""
    return sum(stop - start for start, stop in spans)


def in_units(spans: Iterable[Span], unit: int) -> list[Span]:
    """The numbers of the units, of ``unit`` numbers each, that ``spans`` touches."""
    return added([(start // unit, -(-stop // unit)) for start, stop in spans], ())


def whole_units(spans: Iterable[Span], unit: int) -> list[Span]:
    """The numbers of the units, of ``unit`` numbers each, that are in ``spans`` as a whole."""
    return added([(-(-start // unit), stop // unit) for start, stop in spans], ())


def first_of(spans: Sequence[Span], count: int) -> list[Span]:
    """The ``count`` smallest numbers, or all where there are fewer."""
    found: list[Span] = []
    for start, stop in spans:
        if count <= 0:
            break
        stop = min(stop, start + count)
        found.append((start, stop))
        count -= stop - start
    return found
