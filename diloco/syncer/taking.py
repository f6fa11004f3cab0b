"""A version of a region that is made of one of the syncer above, and of no update."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.codec.contract import NonFiniteError, digest
from diloco.codec.feedback import publish
from diloco.codec.registry import make_codec
from diloco.outer.adopt import blend
from diloco.outer.pseudo_gradient import is_finite

if TYPE_CHECKING:
    from diloco.sync.effects import TakeVersion
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.spool import Spool

STORED = "fp32"
"""By what the values of a version above lie in the spool."""


def taken(
    command: TakeVersion, values: FragmentValues, spool: Spool, down_codec: str, like: str
) -> tuple[FragmentValues, bytes, float] | None:
    """Return the version, its down-link, and the seconds that it took; None when the values would not be finite.

    ``theta <- (1 - share) theta + share above`` (HALoS, arXiv 2506.04531), by ``outer.adopt.blend``.  What the outer
    optimizer remembers stays as it is.  Like an outer step it is a function of what it is given, to the bit.
    """
    began, numel = time.perf_counter(), values.theta.numel()
    codec, mapped = spool.opened(command.payload, command.digest, make_codec(STORED), numel)
    theta = blend(values.theta, codec.decode(mapped.payload, numel), 1 - command.share)
    down = make_codec(down_codec)
    if not is_finite(theta):
        return None
    try:
        payload, published = publish(theta, values.published, down)
    except NonFiniteError:
        return None
    if down.lossless:
        published = theta
    if not is_finite(published):
        return None
    made = replace(
        values,
        version=command.version,
        theta=theta,
        published=published,
        digest=digest(published, like),
        reference=theta,
    )
    return made, payload, time.perf_counter() - began
