"""Makes an update out of a site's values, beside training: measure, encode, write to the outbox.

Encoding happens where the values lie.  On a host the codec itself encodes.  On an accelerator a codec that has kernels
(``codec.gpu.accelerated``) encodes there, so that only the bytes, a word about faults and a norm leave it; with any
other the pseudo-gradient leaves it and is encoded on the host.  Either way the bytes are the same.  The host needs what
they decode to for the update's digest and norm, which are made in the same pass.  The model's device needs it for what
comes next; on a host that reads the payload itself.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from importlib.util import find_spec
from math import sqrt
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from diloco.codec.base import Carry, NonFiniteError, bytes_of, digest, digest_of, hasher, payload_view
from diloco.codec.buffers import Buffers
from diloco.codec.entropy import stage_of
from diloco.codec.gpu import DevicePasses, accelerated, new_fault
from diloco.codec.merging import ranges, sum_of_products
from diloco.codec.registry import Coded, coded, make_codec, values_of
from diloco.codec.site_pass import seal_pieces
from diloco.durable import when_there_is_room
from diloco.learner.tensors import Carried, Fed, SealInputs
from diloco.sync.effects import Seal
from diloco.sync.events import SealFailed
from diloco.wire.messages import PushHeader

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from diloco.codec.base import Codec
    from diloco.learner.outbox import Outbox
    from diloco.learner.tensors import Place, SiteTensors
    from diloco.sync.events import LearnerEvent, VersionFetched
    from diloco.wire.messages import PullHeader


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload, and what it decodes to where the model is: on the host by the payload before its entropy stage.

    ``norm`` is the L2 norm of what it decodes to; ``digest`` that of these values.
    ``fed`` is what is left to send, where feedback is on.
    """

    payload: bytes | memoryview
    sent: Tensor | Coded
    norm: float
    digest: str
    fed: Fed | None = None


class Encoder:
    """Encodes the updates of one site, one at a time, beside training; keeps its buffers from one to the next."""

    def __init__(self, codec: Codec, place: Place, buffers: Buffers | None = None) -> None:
        """``buffers`` has memory for payloads on the host."""
        self.codec = codec
        self._buffers = buffers if buffers is not None else Buffers(0)
        self._place = place
        self._passes: DevicePasses | None = None
        self._pinned: dict[torch.dtype, Tensor] = {}
        self._where = "host"
        if place.is_host:
            return
        passes = accelerated(codec.plain)
        if passes is None:
            self._where = f"host, values from {place}: {codec.plain.name} has no kernel there"
        elif find_spec("triton") is None:
            self._where = f"host, values from {place}: Triton is not installed (pip install 'diloco[gpu]')"
        else:
            self._passes, self._where = passes, f"{place}, Triton"

    def __str__(self) -> str:
        """Where updates are encoded, and why there."""
        return self._where

    def encode(self, inputs: SealInputs) -> Encoded:
        """Encode what is to be sent, ``base - local - sent...`` and what is carried; a copy in ``inputs`` is used up.

        ``NonFiniteError`` when that is not finite.
        """
        if self._place.is_host:
            return self._encode_here(inputs) if inputs.carried is None else self._feed_here(inputs, inputs.carried)
        if self._passes is not None:
            return self._encode_there(inputs, self._passes)
        measured = self._fetched(inputs)
        payload = self.codec.encode(measured)
        decoded = measured.clone() if self.codec.lossless else self.codec.decode(payload, measured.numel())
        norm = float(torch.linalg.vector_norm(decoded))
        there = self._place.of(decoded)
        return Encoded(payload, there, norm, digest(decoded), self._fed_there(inputs, there))

    def _encode_here(self, inputs: SealInputs) -> Encoded:
        """In one pass."""
        plain, numel, sent = self.codec.plain, inputs.reference.numel(), [coded(each) for each in inputs.in_flight]
        payload = self._buffers.raw(plain.payload_bytes(numel))
        found = seal_pieces(inputs.pieces, inputs.reference, sent, plain, payload)
        kept = Coded(plain, payload_view(payload), numel)
        return Encoded(self.codec.closed(payload), kept, found.norm, found.digest)

    def _feed_here(self, inputs: SealInputs, carried: Carried) -> Encoded:
        """The same with feedback, by ranges, each hashed and measured where it still lies in the cache; what it says
        takes the place of the site's values."""
        plain, decoded, fresh = self.codec.plain, inputs.local, inputs.pseudo_gradient()
        residual = None if carried.residual is None else carried.residual.clone()
        numel, in_flight = decoded.numel(), [values_of(each) for each in inputs.in_flight]
        payload, found, squares = self._buffers.raw(plain.payload_bytes(numel)), hasher(), 0.0
        for start, stop in ranges(numel, [plain]):
            part = decoded[start:stop]
            plain.encode_difference(
                inputs.reference[start:stop],
                part,
                payload,
                part,
                in_flight=[sent[start:stop] for sent in in_flight],
                carry=None if residual is None else Carry(residual[start:stop], carried.beta),
                start=start,
                numel=numel,
            )
            found.update(bytes_of(part))
            squares += sum_of_products(part, part)
        term = torch.sub(fresh, decoded)
        fed = Fed(carried, fresh, term, term if residual is None else residual)
        return Encoded(self.codec.closed(payload), decoded, sqrt(squares), found.text(), fed)

    def _fed_there(self, inputs: SealInputs, there: Tensor) -> Fed | None:
        """What is left to send, in memory of training's stream."""
        if inputs.carried is None:
            return None
        fresh, term, residual = (torch.empty_like(there) for _ in range(3))
        with self._place.beside():
            fresh.copy_(inputs.pseudo_gradient())
            torch.sub(fresh, there, out=term)
            torch.sub(inputs.carried.onto(fresh), there, out=residual)
        return Fed(inputs.carried, fresh, term, residual)

    def _encode_there(self, inputs: SealInputs, passes: DevicePasses) -> Encoded:
        local, device = inputs.local, self._place.device
        payload, fault = passes.payload(local.numel(), device), new_fault(device)
        # What it says takes the place of the site's values, as on the host.
        decoded, norm = local, torch.empty((), device=device)
        fed = None
        if inputs.carried is not None:
            fed = Fed(inputs.carried, *(torch.empty_like(local) for _ in range(3)))
        told = self._room(payload.numel(), torch.uint8)
        told_fault, told_norm = self._room(1, torch.int32), self._room(1, torch.float32)
        with self._place.beside():
            if fed is None:
                sent = [values_of(each) for each in inputs.in_flight]
                passes.encode_difference(inputs.reference, local, sent, payload, fault, decoded)
            else:
                fed.fresh.copy_(inputs.pseudo_gradient())
                fed.residual.copy_(fed.carried.onto(fed.fresh))
                passes.encode(fed.residual, payload, fault, decoded)
                torch.sub(fed.fresh, decoded, out=fed.term)
                fed.residual.sub_(decoded)
            torch.linalg.vector_norm(decoded, out=norm)
            told.copy_(payload, non_blocking=True)
            told_fault.copy_(fault, non_blocking=True)
            told_norm.copy_(norm, non_blocking=True)
        passes.check(int(told_fault))
        closed = bytes(self.codec.closed(told))
        here = self.codec.plain.decode(told.numpy().data, local.numel())
        return Encoded(closed, decoded, float(told_norm), digest(here), fed)

    def _fetched(self, inputs: SealInputs) -> Tensor:
        """What is to be sent, measured where the values lie, here; valid until the next one is fetched."""
        told = self._room(inputs.local.numel(), torch.float32)
        measured = torch.empty_like(inputs.local)
        with self._place.beside():
            measured.copy_(inputs.to_send())
            told.copy_(measured, non_blocking=True)
        return told

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory that is used again for every update; one room for each type."""
        held = self._pinned.get(dtype)
        if held is None or held.numel() < numel:
            held = self._pinned[dtype] = self._place.pinned(numel, dtype)
        return held[:numel]


def encoders(codecs: Sequence[str], site_tensors: SiteTensors) -> list[Encoder]:
    """One for each of ``codecs``, all with the same buffers: a site makes one update at a time."""
    place, buffers = site_tensors.place, site_tensors.buffers
    return [Encoder(make_codec(codec), place, buffers) for codec in codecs]


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


class Participant(Protocol):
    """A participant of a run at one syncer: a rank of a site that owns fragments, or a region.

    It is what the threads beside training know of it.  Every method is for any thread.
    """

    run_id: str
    site_id: str
    stopping: threading.Event
    """Set when the threads are to end."""

    @property
    def incarnation(self) -> int:
        """The number by which the syncer knows this process; 0 before it has joined."""

    @property
    def epoch(self) -> int:
        """That of the latest syncer that was heard of."""

    @property
    def lineage(self) -> int:
        """That of the run, as it was last told."""

    def wanted(self, fragment: int, sequence: int) -> str | None:
        """The digest of an update that waits to be sent and answered; None when there is none by that number."""

    def keep_sealed(self, sealed: SealedUpdate) -> None:
        """An update is durable."""

    def keep_fetched(self, values: Tensor, event: VersionFetched, lineage: int, told: PullHeader) -> None:
        """The ``values`` of a version are here, asked for in ``lineage``, with what was ``told`` of it."""

    def tell(self, event: LearnerEvent) -> None:
        """Hand an event to the machine."""

    def emit(self, what: str, facts: dict[str, object]) -> None:
        """Write an event into the log."""

    def rejoin(self, why: str) -> None:
        """Join again, soon."""

    def give_up(self, why: str) -> None:
        """End in words: this participant can do no more here."""


ROOM_EVERY_S = 1.0
"""Between two attempts to write on a full disk."""


def with_room(participant: Participant, what: str, write: Callable[[], T]) -> T | None:
    """What ``write`` gives once the disk has room for ``what``, which the log says; None where all ends before."""

    def say(full: OSError | None) -> None:
        waits: dict[str, object] = {"note": "disk_full", "why": f"{what} waits for room: {full}"}
        participant.emit("note", waits if full is not None else {"note": "disk_has_room"})

    return when_there_is_room(write, participant.stopping, ROOM_EVERY_S, say)


class Sealer:
    """Encodes updates and makes them durable, and drops from the outbox those that are needed no more, in order."""

    def __init__(
        self,
        participant: Participant,
        encoders: Sequence[Encoder],
        outbox: Outbox,
        read: Callable[[SealJob], None] = lambda job: None,
    ) -> None:
        """``encoders`` are those of all codecs that a job may name, the configured one first.

        ``read`` is told of a job when the site's values are looked at no more.
        """
        self._participant = participant
        self.encoder = encoders[0]
        self._encoders = {each.codec.name: each for each in encoders}
        self._outbox = outbox
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
        own, effect, encoder = self._participant, job.effect, self._encoders[job.codec]
        try:
            sealed = seal(job, encoder, own.run_id, own.site_id, own.incarnation)
        except NonFiniteError:
            own.tell(SealFailed(effect.fragment, effect.sequence))
            return
        finally:
            self._read(job)
        # Training goes on meanwhile, and what it makes becomes part of the update after this one.
        if with_room(own, "an update", lambda: self._outbox.put(sealed.header, sealed.payload)) is None:
            return
        facts: dict[str, object] = {"fragment": effect.fragment, "sequence": effect.sequence, "steps": effect.steps}
        facts["codec"] = job.codec
        stage = stage_of(encoder.codec, sealed.payload)
        if stage is not None:
            facts["stage"] = stage
        if sealed.fed is not None:
            facts["residual"] = float(torch.linalg.vector_norm(sealed.fed.residual))
        own.emit("sealed", {**facts, "base_version": effect.base_version, "tokens": effect.tokens, "norm": sealed.norm})
        own.keep_sealed(sealed)
