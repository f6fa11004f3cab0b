"""All of an outer step that is the run's to choose: how contributions are corrected and merged, and the optimizer's
step then."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING

from diloco.outer.merge import BY_TENSOR, MEAN, OPEN, UNCORRECTED, Correction, Gate, MergeOptions, Segment
from diloco.outer.optimizer import TENSORS_KEPT, OuterOptimizerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.outer.fragments import Fragment, Layout


@dataclass(frozen=True, slots=True)
class OuterRule:
    """``segments`` has those of each fragment; a fragment without any is merged by the weighted mean."""

    optimizer: OuterOptimizerOptions
    segments: tuple[tuple[Segment, ...], ...] = ()
    gate: Gate = OPEN
    correction: Correction = UNCORRECTED

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
    correction: Correction = UNCORRECTED,
) -> OuterRule:
    """Return the rule of a run with ``layout``.

    ``rda`` and ``clamp`` go by parameters, because tensors differ in length by orders of magnitude.  Under ``rda``
    those whose name matches one of ``plain`` (shell patterns) and vectors are merged by the mean: an embedding's row
    moves at the sites that saw its token, and is no direction of all.  The other kinds compare whole fragments, as a
    site's update is good or bad.  A correction goes by parameters under all of them.  ``ValueError`` where there is no
    momentum to correct by.
    """
    if not correction.is_none and "momentum" not in TENSORS_KEPT[optimizer.kind]:
        kinds = " or ".join(kind for kind, kept in TENSORS_KEPT.items() if "momentum" in kept)
        raise ValueError(f"correction is {correction.kind!r}: kind {optimizer.kind!r} has no momentum, {kinds} do")
    if merge.kind == "mean" and gate.is_open and correction.is_none:
        return OuterRule(optimizer)
    shapes = dict(layout.parameters)

    def options_of(name: str) -> MergeOptions:
        is_plain = len(shapes[name]) < 2 or any(fnmatchcase(name, pattern) for pattern in plain)
        return MEAN if merge.kind == "rda" and is_plain else merge

    def segments(fragment: Fragment) -> tuple[Segment, ...]:
        stops = tuple(accumulate(piece.stop - piece.start for piece in fragment.pieces))
        if merge.kind not in BY_TENSOR:
            return (Segment(0, fragment.numel, merge, () if correction.is_none else stops[:-1]),)
        starts = (0, *stops[:-1])
        return tuple(
            Segment(start, stop, options_of(piece.name))
            for start, stop, piece in zip(starts, stops, fragment.pieces, strict=True)
        )

    return OuterRule(optimizer, tuple(map(segments, layout.fragments)), gate, correction)
