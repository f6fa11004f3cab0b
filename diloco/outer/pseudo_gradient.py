"""A site's part of the mathematics: the progress that it has not sent yet, and how it adopts a new version.

All tensors are flat fp32 of the fragment's size; the results are new tensors.

:func:`pseudo_gradient` is a site's unsent progress with the sign of a gradient: uphill.

A site adopts a new version of a fragment in one of four ways: it keeps its progress (:func:`rebase`), overwrites it
with a copy of the version (Decoupled DiLoCo, arXiv 2604.21428), blends (:func:`blend`), or looks ahead by its own part
(:func:`eager`, :func:`ahead`).

:func:`ahead` predicts what the outer step will make of a site's own updates: eager updates as in arXiv 2502.12996.
In the paper each of M replicas steps its own outer optimizer with the last round's mean, in which its own share of that
round is replaced by its own share of this one::

    g_m(t) = mean(t - 1) + (d_m(t) - d_m(t - 1)) / M

Where the step is linear in the updates, the sum over t is a version plus a step of a second optimizer of the same kind
that has only seen the site's own updates.  With Nesterov, S the momentum of these::

    S(t) = mu S(t - 1) + d_m(t);    replica(t) = version(t - 1) - lr / M (d_m(t) + mu S(t))

which applies lr (1 + mu) / M of the site's own update and a tail of mu^2 of its earlier ones.  So a site applies the
run's outer step to its updates under way, from the version that it has and from the optimizer state of its own part.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from diloco.outer.optimizer import LINEAR, OuterOptimizerOptions, OuterState, outer_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def pseudo_gradient(base: Tensor, local: Tensor, in_flight: Sequence[Tensor]) -> Tensor:
    """Return ``base - local - in_flight[0] - in_flight[1] - ...``, in this order, as a new tensor.

    ``base`` is the version the site measures from, ``local`` its present values, ``in_flight`` the decoded updates
    that it has sent and that have no known fate, in sequence order; all flat fp32 of one shape.  With none in flight
    this is DiLoCo's pseudo-gradient (arXiv 2311.08105, algorithm 1).
    """
    remainder = torch.sub(base, local)
    for sent in in_flight:
        remainder.sub_(sent)
    return remainder


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite; one pass, no temporary of the tensor's size."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)  # both propagate NaN
    return bool(torch.isfinite(low) & torch.isfinite(high))


MEASURE_FROM = ("adopted", "published")
"""Base of the next update under :func:`blend`: the result of the blend, or the version."""


def rebase(local: Tensor, old_base: Tensor, new_base: Tensor, merged: Sequence[Tensor]) -> Tensor:
    """Return ``new_base + r`` with ``r = (local - old_base) + merged[0] + merged[1] + ...``, in this order.

    ``merged`` holds the site's own updates that the new version merged, in sequence order: their progress is in
    ``new_base`` already.  r is the rest of the site's progress and is kept (the form of LOSCAR-SGD, arXiv 2605.20866).
    With no codec and nothing trained since the update, r is exactly 0 and the result is ``new_base`` bit for bit,
    because rounding is symmetric: fl(local - base) = -fl(base - local).

    For the same reason -r is the pseudo-gradient of the remaining progress.  Subtracting it gives the same bits as
    adding r, and also keeps the sign of a zero in ``new_base`` (-0 - 0 is -0, -0 + 0 is +0).
    """
    unsent = pseudo_gradient(old_base, local, merged)
    return new_base.sub(unsent)


def blend(local: Tensor, new_base: Tensor, alpha: float) -> Tensor:
    """Return ``alpha local + (1 - alpha) new_base`` (Streaming DiLoCo, arXiv 2501.18512).

    In the paper's algorithm the next update is measured from ``new_base``, so it contains the remaining local progress
    again.  Measured from the result, it contains only progress since then, and the remainder is never sent.

    ``alpha`` 0 overwrites, 1 is no communication; both ends, and equal inputs, are exact.
    """
    assert 0 <= alpha <= 1, alpha
    if alpha == 0:
        return new_base.clone()
    if alpha == 1:
        return local.clone()
    return new_base.sub(new_base.sub(local).mul_(alpha))


def eager(new_base: Tensor, unsent: Tensor, under_way: Sequence[Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Return (values, reference): ``reference`` is ``new_base`` with ``share`` of the site's own updates that it lacks
    applied, ``values`` is ``reference`` with the site's unsent progress applied.

    Eager updates (arXiv 2502.12996, section 3) apply a site's own part of a round at once and the others' part a round
    later: with a plain outer step of rate lr over M sites the values are those of the last version of all sites, less
    lr/M of the site's own update since.  That factor is ``share``.  With 0 a site's own updates reach it only with the
    version, like the others' (the delay that the paper finds worse); 1 is :func:`rebase`, up to rounding.

    ``unsent`` is the pseudo-gradient of progress that is in no update, and ``under_way`` are the decoded updates that
    the version lacks, in sequence order.  The next update is measured from ``reference``.
    """
    reference = new_base.clone()
    for sent in under_way:
        reference.sub_(sent, alpha=share)
    return reference.sub(unsent), reference


ADDITIVE = ("sgd", *LINEAR)
"""The optimizer kinds whose step on a mean is the sum of the steps on each site's part, from any version."""


def own_part(
    state: OuterState, updates: Sequence[Tensor], steps: int, sites: int, options: OuterOptimizerOptions
) -> OuterState:
    """Return the outer optimizer's ``state`` of one fragment, of only the site's own parts of the means, ``steps``
    outer steps later.  The last of these merged the site's ``updates``, one each in this order.

    With fewer steps than updates the first step merged all surplus ones.  ``sites`` is M: a part is 1/M of an update,
    as in a mean of M sites of equal weight; with 0 (not known yet) the state stays as it is.  No tensor is written to.
    """
    if not sites:
        return state
    if state.momentum is not None and steps > len(updates):
        faded = state.momentum.mul(options.momentum ** (steps - len(updates)))
        state = OuterState(state.steps, {"momentum": faded})
    first = max(1, len(updates) - steps + 1)
    for part in [reduce(torch.add, updates[:first]), *updates[first:]] if updates else []:
        mine = part / sites
        _, state = outer_step(mine, mine, state, options)
    return state


def ahead(
    version: Tensor, under_way: Sequence[Tensor], sites: int, state: OuterState, options: OuterOptimizerOptions
) -> Tensor:
    """Return ``version`` after one outer step for each of the site's own updates that it lacks, in sequence order,
    without other sites' parts, from the ``state`` of :func:`own_part`.  With 0 ``sites`` return a copy of ``version``.
    """
    found = version
    for update in under_way if sites else ():
        found, state = outer_step(found, update / sites, state, options)
    return version.clone() if found is version else found
