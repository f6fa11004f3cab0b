"""Whether an update looks like those that its site, and the others, usually send.

An update has two vital signs, measured by the shell when it decodes the payload: the L2 norm of the pseudo-gradient,
and its cosine with the fragment's outer momentum.  Each is held against two windows of recent admitted updates of the
same fragment: the site's own and those of all others.  An update is an *outlier* only if it is far from both (from the
one that is long enough, where only one is), because a site with other batches differs from the others for ever, and a
site after a long absence from itself for once.

*Norm ratio*: the norm over the median of a window's.  Only too large is too far: a small update does no harm, and
learning rates decay.  An update of more steps than one of the window may be larger in proportion (AdamW moves every
parameter by at most about the learning rate in each step), so each norm of the window is raised by the steps' ratio,
and never lowered for fewer.

*Cosine z-score*: how many spreads the cosine lies below the mean of a window's, the spread being at least
``COSINE_SPREAD_MIN``.  Only a negative cosine can be too far: an update that goes with the run is no danger.  Cosines
fall fast while the momentum is young, and a step too far turns them round at all sites, so nothing is said about
direction before the site's own window is full.

The rule is that of robust aggregation turned into admission: screening by norm and by direction against what is usual
(RELIABILITY section 10, item 9; compare arXiv 1703.02757 and 1803.01498).  What it cannot see is a bad update of usual
size and direction; what that one can do is bounded by its site's weight.

Measured before the defaults were chosen (``tests/hunts/pseudo_gradients.py``, ``python -m tests.hunts.admission``):
14,960 pseudo-gradients of a byte-level transformer trained with AdamW at 1 to 4 sites, in 2 fragments, with 2 to 8
inner steps and more; all rounds from the first, long and short warm-up, decay to nothing, a learning rate of 0.01,
texts and batch sizes of the sites' own, a site that joins half-way, restarts with an empty optimizer, updates of ten
times the usual steps after a partition, lock-step and asynchronous.  The largest norm ratio was 2.5.  The lowest z of
a negative cosine was -4.3; with windows of 4 updates it was -15, and where sites pull against each other -9
(``tests/loopback/toy.py`` under Nesterov).  With the defaults none is an outlier.  Turned round in sign, 28 % of the
same updates are: of most others the cosine is too near to nothing to tell.

Everything here is made of additions, products, quotients and square roots, so that every machine judges alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.options import HealthOptions

COSINE_SPREAD_MIN = 0.05
"""Of a window's cosines: a few that happen to be alike say little about what is usual."""


@dataclass(frozen=True, slots=True)
class Vital:
    """The vital signs of one update: ``steps`` is how many inner steps are in it; ``cosine`` None without momentum."""

    steps: int
    norm: float
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """How far an update is from what is usual.

    ``ratio`` and ``z`` are the milder ones of the two windows, None where neither is long enough; ``why`` is empty
    when nothing is wrong.
    """

    ratio: float | None
    z: float | None
    why: str = ""


NOTHING_WRONG = Finding(None, None)
"""With an update that nobody measured."""


def judge(options: HealthOptions, vital: Vital, own: Sequence[Vital], others: Sequence[Vital]) -> Finding:
    """Hold ``vital`` against the site's ``own`` recent updates and those of the ``others``."""
    windows = [window for window in (own, others) if len(window) >= options.history_min]
    ratio = min((_norm_ratio(vital, window) for window in windows), default=None)
    z = _score(options, vital, own, others)
    why: list[str] = []
    if ratio is not None and ratio > options.norm_ratio_max:
        why.append(f"its norm is {ratio:.3g} times the usual one, more than {options.norm_ratio_max:g}")
    if z is not None and vital.cosine is not None and vital.cosine < 0 and -z > options.cosine_z_max:
        below = f"{-z:.1f} spreads below the usual, more than {options.cosine_z_max:g}"
        why.append(f"its cosine {vital.cosine:.2f} is {below}")
    return Finding(ratio, z, "; ".join(why))


def _norm_ratio(vital: Vital, window: Sequence[Vital]) -> float:
    """The norm over the median of the window's, each raised to as many steps as this update has."""
    usual = _median([each.norm * max(1.0, vital.steps / each.steps) for each in window])
    return vital.norm / usual


def _score(options: HealthOptions, vital: Vital, own: Sequence[Vital], others: Sequence[Vital]) -> float | None:
    """The milder z of the two windows, once the site's own is full."""
    known = [[each.cosine for each in window if each.cosine is not None] for window in (own, others)]
    if vital.cosine is None or len(known[0]) < options.history:
        return None
    return max(_z(vital.cosine, cosines) for cosines in known if len(cosines) >= options.history)


def _z(cosine: float, cosines: Sequence[float]) -> float:
    mean = sum(cosines) / len(cosines)
    spread = sqrt(sum((each - mean) * (each - mean) for each in cosines) / len(cosines))
    return (cosine - mean) / max(spread, COSINE_SPREAD_MIN)


def _median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
