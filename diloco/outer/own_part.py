"""What the outer step will make of a site's own updates: eager updates (arXiv 2502.12996) as the paper has them.

In the paper each of M replicas steps its own outer optimizer with the last round's mean, in which its own share of that
round is replaced by its own share of this one::

    g_m(t) = mean(t - 1) + (d_m(t) - d_m(t - 1)) / M

Where the step is linear in the updates the sum over t is a version and a step of the same optimizer beside it, that has
only ever seen the site's own updates.  With Nesterov, S the momentum of these::

    S(t) = mu S(t - 1) + d_m(t);    replica(t) = version(t - 1) - lr / M (d_m(t) + mu S(t))

which is lr (1 + mu) / M of the site's own update and a tail of mu^2 of those before it.  So a site takes the run's own
outer step on what is under way, from the version that it has and from the state of its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterState, outer_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ADDITIVE = ("sgd", "heavy_ball", "nesterov", "nesterov_ema")
"""The kinds whose step on a mean is the sum of the steps on each site's part, from any version on."""


class OwnPart:
    """The outer optimizer's state of one fragment, as if the site's own parts of the means were all there is.

    All tensors are flat fp32 of the fragment's length, on one device; none is written to.  A part is the M-th of an
    update, as in a mean of M sites of equal weight.
    """

    def __init__(self, options: OuterOptimizerOptions) -> None:
        assert options.kind in ADDITIVE, options.kind
        self._options = options
        self._state = NOTHING

    @property
    def momentum(self) -> Tensor | None:
        """What a checkpoint must hold; None before the first own update was merged, and for sgd."""
        return self._state.momentum

    def restore(self, momentum: Tensor) -> None:
        """Take back what ``momentum`` gave."""
        self._state = OuterState(1, {"momentum": momentum})

    def forget(self) -> None:
        """The fragment begins anew."""
        self._state = NOTHING

    def merged(self, updates: Sequence[Tensor], steps: int, sites: int) -> None:
        """So many outer ``steps`` were made, and the means of the last of them held ``updates`` of the site, one each
        and in this order.  Where there were fewer steps the first one held all that are left over.
        """
        if not sites:
            return
        momentum = self._state.momentum
        if momentum is not None and steps > len(updates):
            faded = momentum.mul(self._options.momentum ** (steps - len(updates)))
            self._state = OuterState(self._state.steps, {"momentum": faded})
        first = max(1, len(updates) - steps + 1)
        together = list(updates[:first])
        while len(together) > 1:
            together[:2] = [together[0] + together[1]]
        for part in (*together, *updates[first:]):
            mine = part / sites
            _, self._state = outer_step(mine, mine, self._state, self._options)

    def ahead(self, version: Tensor, under_way: Sequence[Tensor], sites: int) -> Tensor:
        """Return ``version`` after one outer step for each of the site's own updates that it lacks, in sequence order,
        with nobody else's part in them.  With 0 ``sites`` (not told yet) nothing is ahead.
        """
        found, state = version, self._state
        for update in under_way if sites else ():
            found, state = outer_step(found, update / sites, state, self._options)
        return version.clone() if found is version else found
