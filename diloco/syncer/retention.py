"""How much of the past a data folder keeps: which snapshots may go, and with them the journal and payloads behind them.

Whatever happens, the newest two snapshots stay: recovery needs one, and another if that is damaged.  Beyond those, the
past is kept from one snapshot on, the *anchor*: everything from it to now can be replayed.  The anchor is the newest
snapshot that is at least ``steps`` outer steps old; of those behind it only so many stay that the next anchor is never
far.  Where all that takes more than ``bytes_max``, the oldest goes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEWEST = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """``steps`` outer steps over all fragments, 0 for what recovery needs; ``bytes_max`` bounds what is beyond that."""

    steps: int = 0
    bytes_max: int = 0


RECOVERY_ONLY = Retention()


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot: the outer steps made before it, the first journal segment behind it, and its size."""

    number: int
    steps: int
    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The snapshots that stay, oldest first; ``cut`` is whether the bound took one that retention would have kept."""

    kept: tuple[Point, ...]
    cut: bool

    def reaches(self, retention: Retention) -> bool:
        """Whether all that ``retention`` asks for can be replayed, or all that ever was."""
        oldest, newest = self.kept[0], self.kept[-1]
        return oldest.steps == 0 or newest.steps - oldest.steps >= retention.steps


def choose(points: Sequence[Point], retention: Retention, behind_bytes: Callable[[Point, Point], int]) -> Choice:
    """Which of ``points``, oldest first, stay; ``behind_bytes`` are the journal and payloads between two of them."""
    newest = list(points[-NEWEST:])
    past = list(points[:-NEWEST]) if retention.steps else []
    if not past:
        return Choice(tuple(newest), cut=False)
    now = points[-1].steps
    old_enough = [point for point in [*past, *newest] if now - point.steps >= retention.steps]
    anchor = old_enough[-1] if old_enough else past[0]
    kept: list[Point] = []
    for point in past:
        # Half of what is kept at most lies between two of them, so that the anchor is never twice as old as it must be.
        if point.steps >= anchor.steps and (not kept or point.steps - kept[-1].steps >= retention.steps / 2):
            kept.append(point)
    cut = False
    while kept and sum(point.size for point in kept) + behind_bytes(kept[0], newest[0]) > retention.bytes_max:
        kept.pop(0)
        cut = True
    return Choice((*kept, *newest), cut)
