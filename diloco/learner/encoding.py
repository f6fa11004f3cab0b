"""From what an update is measured to its bytes, where the values lie.

On a host that is the codec itself.  On an accelerator int8 and int4 are encoded by ``codec.device``, so that only the
bytes, a word about faults and a norm leave it; with any other codec the pseudo-gradient does, and is encoded here.
Either way the bytes are the same, and what they decode to is on both sides: here for the digest, there for the next
update.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.blocks import BlockCodec
from diloco.codec.device import DeviceCodec, new_fault

if TYPE_CHECKING:
    from diloco.codec.contract import Codec
    from diloco.learner.place import Place
    from diloco.learner.site_tensors import SealInputs


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload and what it decodes to, on the host and (``there``) where the model is.

    ``norm`` is the L2 norm of what was measured, or on an accelerator of what it decodes to.
    """

    payload: bytes
    decoded: Tensor
    there: Tensor
    norm: float


class Encoder:
    """Encodes the updates of one site, one at a time, beside training; keeps its buffers from one to the next."""

    def __init__(self, codec: Codec, place: Place) -> None:
        self.codec = codec
        self._place = place
        self._device_codec: DeviceCodec | None = None
        self._pinned: dict[torch.dtype, Tensor] = {}
        self._where = "host"
        if place.is_host:
            return
        plain = codec.plain
        if not isinstance(plain, BlockCodec):
            self._where = f"host, values from {place}: {plain.name} has no kernel there"
        elif find_spec("triton") is None:
            self._where = f"host, values from {place}: Triton is not installed (pip install 'diloco[gpu]')"
        else:
            self._device_codec, self._where = DeviceCodec(plain), f"{place}, Triton"

    def __str__(self) -> str:
        """Where updates are encoded, and why there."""
        return self._where

    def encode(self, inputs: SealInputs) -> Encoded:
        """Encode ``base - local - sent...``; ``NonFiniteError`` when that is not finite."""
        if self._device_codec is not None:
            return self._encode_there(inputs, self._device_codec)
        measured = inputs.pseudo_gradient() if self._place.is_host else self._fetched(inputs)
        payload = self.codec.encode(measured)
        norm = float(torch.linalg.vector_norm(measured))
        if not self.codec.lossless:
            decoded = self.codec.decode(payload, measured.numel())
        else:
            decoded = measured if self._place.is_host else measured.clone()
        return Encoded(payload, decoded, self._place.of(decoded), norm)

    def _encode_there(self, inputs: SealInputs, codec: DeviceCodec) -> Encoded:
        local, device = inputs.local, self._place.device
        payload, fault = codec.payload(local.numel(), device), new_fault(device)
        decoded, norm = torch.empty_like(local), torch.empty((), device=device)
        told = self._room(payload.numel(), torch.uint8)
        told_fault, told_norm = self._room(1, torch.int32), self._room(1, torch.float32)
        with self._place.beside():
            codec.encode_difference(inputs.reference, local, inputs.in_flight, payload, fault, decoded)
            torch.linalg.vector_norm(decoded, out=norm)
            told.copy_(payload, non_blocking=True)
            told_fault.copy_(fault, non_blocking=True)
            told_norm.copy_(norm, non_blocking=True)
        codec.check(int(told_fault))
        closed = bytes(self.codec.closed(told))
        here = codec.codec.decode(told.numpy().data, local.numel())
        return Encoded(closed, here, decoded, float(told_norm))

    def _fetched(self, inputs: SealInputs) -> Tensor:
        """The pseudo-gradient, measured where the values lie, here; valid until the next one is fetched."""
        told = self._room(inputs.local.numel(), torch.float32)
        measured = torch.empty_like(inputs.local)
        with self._place.beside():
            measured.copy_(inputs.pseudo_gradient())
            told.copy_(measured, non_blocking=True)
        return told

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory that is used again for every update; one room for each type."""
        held = self._pinned.get(dtype)
        if held is None or held.numel() < numel:
            held = self._pinned[dtype] = self._place.pinned(numel, dtype)
        return held[:numel]
