"""Making an update out of a site's values, beside training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.contract import digest
from diloco.learner.site_tensors import SealInputs
from diloco.sync.effects import Seal
from diloco.wire.messages import PushHeader

if TYPE_CHECKING:
    from diloco.codec.contract import Codec


@dataclass(frozen=True, slots=True)
class SealJob:
    """What the machine ordered, and the tensors as they were at that boundary."""

    effect: Seal
    inputs: SealInputs


@dataclass(frozen=True, slots=True)
class SealedUpdate:
    """The update to send, and ``decoded``: the pseudo-gradient as the syncer will read it."""

    header: PushHeader
    payload: bytes
    decoded: Tensor
    norm: float


def seal(job: SealJob, codec: Codec, run_id: str, site_id: str, incarnation: int) -> SealedUpdate:
    """Measure, encode and describe an update; ``NonFiniteError`` when the site's values are not finite."""
    effect = job.effect
    measured = job.inputs.pseudo_gradient()
    payload = codec.encode(measured)
    decoded = measured if codec.lossless else codec.decode(payload, measured.numel())
    header = PushHeader(
        run_id=run_id,
        site_id=site_id,
        incarnation=incarnation,
        fragment=effect.fragment,
        sequence=effect.sequence,
        base_version=effect.base_version,
        tokens=effect.tokens,
        steps=effect.steps,
        step_ns=effect.step_ns,
        cursor=effect.cursor,
        final=effect.final,
        encoding=codec.name,
        payload_bytes=len(payload),
        numel=measured.numel(),
        digest=hashlib.sha256(payload).hexdigest(),
        values_digest=digest(decoded),
    )
    return SealedUpdate(header, payload, decoded, float(torch.linalg.vector_norm(measured)))
