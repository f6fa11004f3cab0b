"""All of an outer step that is the run's to choose: how contributions are merged, and the optimizer's step then."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from diloco.outer.merge import MEAN, OPEN, Gate, MergeOptions, Segment
from diloco.outer.optimizer import OuterOptimizerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.outer.fragments import Fragment, Layout


@dataclass(frozen=True, slots=True)
class OuterRule:
    """``segments`` has those of each fragment; a fragment without any is merged by the weighted mean."""

    optimizer: OuterOptimizerOptions
    segments: tuple[tuple[Segment, ...], ...] = ()
    gate: Gate = OPEN

    def factors(self, staleness: Sequence[int]) -> list[float] | None:
        """What is left of contributions that are so many versions old; None: all of all."""
        return None if self.gate.is_open else [self.gate.factor(each) for each in staleness]

    def segments_of(self, fragment: int) -> tuple[Segment, ...]:
        """How the fragment's values are merged."""
        return self.segments[fragment] if self.segments else ()


def outer_rule(
    optimizer: OuterOptimizerOptions,
    merge: MergeOptions,
    layout: Layout,
    plain: Sequence[str] = (),
    gate: Gate = OPEN,
) -> OuterRule:
    """Return the rule of a run with ``layout``.

    ``rda`` goes by parameters, because tensors differ in length by orders of magnitude; those whose name matches one of
    ``plain`` (shell patterns) and vectors are merged by the mean: an embedding's row moves at the sites that saw its
    token, and is no direction of all.  The other kinds compare whole fragments, as a site's update is good or bad.
    """
    if merge.kind == "mean" and gate.is_open:
        return OuterRule(optimizer)
    shapes = dict(layout.parameters)
    if merge.kind != "rda":
        return OuterRule(optimizer, tuple((Segment(0, each.numel, merge),) for each in layout.fragments), gate)

    def options_of(name: str) -> MergeOptions:
        apart = len(shapes[name]) < 2 or any(fnmatchcase(name, pattern) for pattern in plain)
        return MEAN if apart else merge

    def segments(fragment: Fragment) -> tuple[Segment, ...]:
        found, start = [], 0
        for piece in fragment.pieces:
            stop = start + piece.stop - piece.start
            found.append(Segment(start, stop, options_of(piece.name)))
            start = stop
        return tuple(found)

    return OuterRule(optimizer, tuple(map(segments, layout.fragments)), gate)
