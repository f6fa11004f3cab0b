"""Making an update out of a site's values, beside training."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.coded import Coded
from diloco.codec.contract import NonFiniteError
from diloco.codec.digests import digest_of
from diloco.codec.entropy import stage_of
from diloco.durable import is_full
from diloco.learner.residuals import Fed
from diloco.learner.site_tensors import SealInputs
from diloco.sync.effects import Seal
from diloco.sync.events import SealFailed
from diloco.wire.messages import PushHeader

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from diloco.learner.encoding import Encoder
    from diloco.learner.outbox import Outbox
    from diloco.sync.events import LearnerEvent

ROOM_EVERY_S = 1.0
"""Between two attempts to write an update on a full disk."""


@dataclass(frozen=True, slots=True)
class SealJob:
    """What the machine ordered, and the tensors as they were at that boundary."""

    effect: Seal
    inputs: SealInputs
    codec: str
    """By whose name the update is encoded."""


@dataclass(frozen=True, slots=True)
class SealedUpdate:
    """The update to send, and what was ``sent``: the pseudo-gradient as the syncer will read it, where the model is.

    ``fed`` is what is left of it to send, where feedback is on.
    """

    header: PushHeader
    payload: bytes | memoryview
    sent: Tensor | Coded
    norm: float
    fed: Fed | None = None


def seal(job: SealJob, encoder: Encoder, run_id: str, site_id: str, incarnation: int) -> SealedUpdate:
    """Measure, encode and describe an update; ``NonFiniteError`` when the site's values are not finite."""
    effect = job.effect
    encoded = encoder.encode(job.inputs)
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
        encoding=encoder.codec.name,
        payload_bytes=len(encoded.payload),
        numel=job.inputs.reference.numel(),
        digest=digest_of(encoded.payload),
        values_digest=encoded.digest,
        spans=effect.spans,
    )
    return SealedUpdate(header, encoded.payload, encoded.sent, encoded.norm, encoded.fed)


class Sealer:
    """Encodes updates and makes them durable, and drops from the outbox those that are needed no more, in order."""

    def __init__(
        self,
        run_id: str,
        site_id: str,
        encoders: Sequence[Encoder],
        outbox: Outbox,
        incarnation: Callable[[], int],
        keep: Callable[[SealedUpdate], None],
        tell: Callable[[LearnerEvent], None],
        emit: Callable[[str, dict[str, object]], None],
        stopping: threading.Event,
        read: Callable[[SealJob], None] = lambda job: None,
    ) -> None:
        """``encoders`` are those of all codecs that a job may name, the configured one first.

        ``keep`` gets every update that is durable; a full disk is waited for, until ``stopping``.  ``read`` is told of
        a job when the site's values are looked at no more.
        """
        self._run_id = run_id
        self._site_id = site_id
        self.encoder = encoders[0]
        self._encoders = {each.codec.name: each for each in encoders}
        self._outbox = outbox
        self._incarnation = incarnation
        self._keep = keep
        self._tell = tell
        self._emit = emit
        self._stopping = stopping
        self._read = read
        self.queue: queue.SimpleQueue[SealJob | tuple[int, int] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread; None in the queue ends it."""
        while (job := self.queue.get()) is not None:
            if isinstance(job, tuple):
                self._outbox.drop(*job)
                continue
            self._seal(job)

    def _seal(self, job: SealJob) -> None:
        effect, encoder = job.effect, self._encoders[job.codec]
        try:
            sealed = seal(job, encoder, self._run_id, self._site_id, self._incarnation())
        except NonFiniteError:
            self._tell(SealFailed(effect.fragment, effect.sequence))
            return
        finally:
            self._read(job)
        if not self._put(sealed):
            return
        facts: dict[str, object] = {"fragment": effect.fragment, "sequence": effect.sequence, "steps": effect.steps}
        facts["codec"] = job.codec
        stage = stage_of(encoder.codec, sealed.payload)
        if stage is not None:
            facts["stage"] = stage
        if sealed.fed is not None:
            facts["residual"] = float(torch.linalg.vector_norm(sealed.fed.residual))
        self._emit(
            "sealed", {**facts, "base_version": effect.base_version, "tokens": effect.tokens, "norm": sealed.norm}
        )
        self._keep(sealed)

    def _put(self, sealed: SealedUpdate) -> bool:
        """Make it durable, as soon as there is room for it; False when the agent stops before that.

        Training goes on meanwhile, and what it makes becomes part of the update after this one.
        """
        full = False
        while True:
            try:
                self._outbox.put(sealed.header, sealed.payload)
            except OSError as error:
                if not is_full(error):
                    raise
                if not full:
                    self._emit("note", {"note": "disk_full", "why": f"an update waits for room: {error}"})
                full = True
                if self._stopping.wait(ROOM_EVERY_S):
                    return False
                continue
            if full:
                self._emit("note", {"note": "disk_has_room"})
            return True
