"""The outer step as numbers: read the payloads, merge, step, encode the down-link.

A pure function of the contributions, the fragment's values and the options, so that a replay of the journal gives the
same bits (DESIGN invariant 11).  Memory: one decoded update for each update of the round, and three fragments.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import NonFiniteError, digest
from diloco.codec.feedback import publish
from diloco.codec.registry import make_codec
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import OuterOptimizerOptions, outer_step
from diloco.syncer.snapshots import FragmentValues

if TYPE_CHECKING:
    from diloco.sync.effects import StartOuterStep
    from diloco.syncer.spool import Spool


@dataclass(frozen=True, slots=True)
class Downlink:
    """What takes those who hold the version before to ``version``; ``digest`` is that of the values they then hold."""

    version: int
    digest: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class OuterResult:
    """The candidate for a new version: its ``values`` and the encoded ``downlink`` from the version before.

    ``norm`` is that of the merged pseudo-gradient, ``seconds`` the time it all took.
    """

    values: FragmentValues
    downlink: bytes
    downlink_digest: str
    norm: float
    seconds: float

    def link(self) -> Downlink:
        """The down-link without the values, which are large and are held elsewhere."""
        return Downlink(self.values.version, self.values.digest, self.downlink)


def run_outer_step(
    command: StartOuterStep,
    values: FragmentValues,
    spool: Spool,
    optimizer: OuterOptimizerOptions,
    down_codec: str,
) -> OuterResult | None:
    """Carry out ``command`` on ``values``; None when the result is not finite, and then nothing has happened."""
    assert command.version == values.version + 1, (command.version, values.version)
    began = time.perf_counter()
    contributions = [
        (
            part.weight,
            [
                make_codec(update.encoding).decode(spool.read(update.payload, update.digest), values.theta.numel())
                for update in part.updates
            ],
        )
        for part in command.contributions
    ]
    merged = merge_mean(contributions)
    theta, momentum = outer_step(values.theta, merged, values.momentum, optimizer)
    if not bool(torch.isfinite(theta).all()):
        return None
    try:
        downlink, published = publish(theta, values.published, make_codec(down_codec))
    except NonFiniteError:
        return None  # Θ and Θ̂ are finite and too far apart for fp32.
    if not bool(torch.isfinite(published).all()):
        return None
    return OuterResult(
        FragmentValues(command.version, theta, published, momentum, digest(published)),
        downlink,
        hashlib.sha256(downlink).hexdigest(),
        float(torch.linalg.vector_norm(merged)),
        time.perf_counter() - began,
    )
