"""How a site takes a new version of a fragment: keep its progress, overwrite it, blend, or look ahead by its own part.

All tensors are flat fp32 of the fragment's size; the results are new tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.outer.pseudo_gradient import pseudo_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MEASURE_FROM = ("adopted", "published")
"""Where the next update is measured from under :func:`blend`: from what it returned, or from the version."""


def rebase(local: Tensor, old_base: Tensor, new_base: Tensor, merged: Sequence[Tensor]) -> Tensor:
    """Return ``new_base + r`` with ``r = (local - old_base) + merged[0] + merged[1] + ...``, in this order.

    ``merged`` holds the site's own updates that the new version merged, in sequence order: their progress is in
    ``new_base`` already, the rest of what the site learned is r and is kept (the form of LOSCAR-SGD, arXiv
    2605.20866).  With no codec and nothing trained since the update, r is exactly 0 and the result is ``new_base``
    bit for bit, because rounding is symmetric: fl(local - base) = -fl(base - local).

    For the same reason -r is the pseudo-gradient of what is left.  Subtracting that gives the same bits as adding r,
    and keeps the sign of a zero in ``new_base`` besides (-0 - 0 is -0, -0 + 0 is +0).
    """
    unsent = pseudo_gradient(old_base, local, merged)
    return new_base.sub(unsent)


def overwrite(new_base: Tensor) -> Tensor:
    """Return ``new_base``: what the site trained since its last update is given up (Decoupled DiLoCo, 2604.21428)."""
    return new_base.clone()


def blend(local: Tensor, new_base: Tensor, alpha: float) -> Tensor:
    """Return ``alpha local + (1 - alpha) new_base`` (Streaming DiLoCo, arXiv 2501.18512).

    In the paper's algorithm the next update is measured from ``new_base``, so that it brings again what is left of the
    site's own way.  Measured from the result it brings what was trained since, and what is left is never sent.

    ``alpha`` 0 is :func:`overwrite`, 1 is no communication; both ends, and equal inputs, are exact.  ``ValueError``
    outside of 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"adopt_alpha is {alpha!r}: must be from 0 to 1")
    if alpha == 0:
        return overwrite(new_base)
    if alpha == 1:
        return local.clone()
    return new_base.sub(new_base.sub(local).mul_(alpha))


def eager(new_base: Tensor, unsent: Tensor, under_way: Sequence[Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Return (values, reference): ``new_base`` with ``share`` of the site's own updates that it lacks, and with what
    the site has not sent yet.

    Eager updates (arXiv 2502.12996, section 3) apply a site's own part of a round at once and the others' part a round
    later: with a plain outer step of rate lr over M sites the values are those of the last version that everybody has
    part in, less lr/M of the site's own update since.  That is ``share``; with 0 a site's own updates come back to it
    with the version as the others' do (the delay that the paper finds worse), with 1 it is :func:`rebase`, to rounding.

    ``unsent`` is the pseudo-gradient of what was trained and is in no update, and ``under_way`` are the decoded updates
    that the version lacks, in sequence order.  The next update is measured from ``reference``.
    """
    reference = new_base.clone()
    for sent in under_way:
        reference.sub_(sent, alpha=share)
    return reference.sub(unsent), reference
