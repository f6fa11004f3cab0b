"""What rank 0 of a site has all ranks do between two steps.

Rank 0 says it before a value is read or written, so that each takes its part in what follows: the values of a fragment
are gathered from those that hold them, or handed out to them.  Any number of such orders, then one of the two by which
all go on or stop.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco.inner.holding import Holding
    from diloco.inner.parallel import SiteGroup
    from diloco.outer.fragments import Fragment, Layout

GO_ON, STOP, SEAL, ADOPT, RETAKE = range(5)


class Owned(Protocol):
    """What a rank above 0 owns of the fragments of one agent."""

    def do(self) -> None:
        """The next thing that rank 0 has ordered of it, at a boundary."""


class Orders:
    """Rank 0's.  What several threads order at a site's end is done one after the other."""

    def __init__(self, group: SiteGroup, part: int = 0) -> None:
        self._group, self._part, self._turn = group, part, threading.RLock()
        self._is_site = True

    def of(self, part: int) -> Orders:
        """Those of one of several agents, which has the layout ``part``: when to go on is the site's to say."""
        found = Orders(self._group, part)
        found._turn, found._is_site = self._turn, False
        return found

    @contextmanager
    def all_do(self, what: int, fragment: int, owner: int = 0) -> Iterator[None]:
        """Inside, the other ranks take their part in what is done with the model's values of ``fragment``."""
        with self._turn:
            self._say(what, self._part, fragment, owner)
            yield

    def go_on(self, *, stop: bool = False) -> None:
        """The boundary is over."""
        if self._is_site:
            with self._turn:
                self._say(STOP if stop else GO_ON)

    def _say(self, *words: int) -> None:
        if self._group.world > 1:
            self._group.broadcast_small(words)


def take_part(holding: Holding, layouts: Sequence[Layout], adopt: str, owned: Sequence[Owned | None] = ()) -> bool:
    """A boundary of a rank above 0; returns whether this rank is to stop.

    ``layouts`` are those of the site's agents, ``adopt`` is by what rule they adopt, ``owned`` what this rank does for
    each of them with fragments whose owner it is, None where there are none.
    """
    while True:
        what, *which = holding.group.broadcast_small([])
        if what in (GO_ON, STOP):
            return what == STOP
        part, fragment, owner = which
        if owner == holding.group.rank:
            own = owned[part]
            assert own is not None, f"rank 0 orders something of agent {part}, of which this rank owns nothing"
            own.do()
        else:
            lend_a_hand(holding, layouts[part].fragments[fragment], what, adopt, owner)


def lend_a_hand(holding: Holding, fragment: Fragment, what: int, adopt: str, owner: int) -> None:
    """The part that each rank but the owner takes in an order."""
    # Overwritten values need not be read first.
    if what == SEAL or (what == ADOPT and adopt != "overwrite"):
        holding.gather(fragment.pieces, None, owner)
    if what != SEAL:
        holding.scatter(fragment.pieces, None, owner)
