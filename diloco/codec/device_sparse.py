"""topk on an accelerator: the same choice and the same bytes, made where the values lie.

One kernel reads the values and chooses; what it kept, a 64th of them by default, is packed by a few operations on the
device behind it.  Encoding only, as in ``device_grids``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codec.contract import NonFiniteError
from diloco.codec.device import NON_FINITE, DevicePasses, Launch, Measured, aligned_payload, run_programs
from diloco.codec.sparse import INDEX_BITS, TopKCodec

CHUNK_MAX = 4096
"""A chunk lies in the registers of one program; larger ones are encoded on the host."""


@dataclass(frozen=True, slots=True)
class DeviceTopK(DevicePasses):
    """The encoding passes of topk with chunks of at most ``CHUNK_MAX``; a payload starts on an even address."""

    codec: TopKCodec
    launch: Launch

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`~diloco.codec.device.DevicePasses`."""
        return aligned_payload(0, self.codec.payload_bytes(numel), device)

    def check(self, found: int) -> None:
        """See :class:`~diloco.codec.device.DevicePasses`."""
        if found & NON_FINITE:
            raise NonFiniteError(f"{self.codec.name} was to encode a NaN or an infinity")

    def run_encode(self, measured: Measured, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.device.DevicePasses`."""
        measured.check(payload, fault, decoded)
        numel, chunk = measured.values.numel(), self.codec.chunk
        assert payload.shape == (self.codec.payload_bytes(numel),), (tuple(payload.shape), numel)
        (at, size), *packed = self.codec.sections(numel, 0, numel)
        levels = payload[at : at + size].view(torch.int16)
        num_kept = packed[0][1] * 8 // INDEX_BITS[chunk]
        # A multiple of four, so that the last byte is filled up with what stands for nothing.
        room = num_kept + -num_kept % 4
        indices = torch.zeros(room, dtype=torch.int16, device=payload.device)
        fields = torch.zeros(room, dtype=torch.uint8, device=payload.device)
        rows = max(1, self.launch.program_values // chunk)
        from diloco.codec import sparse_kernels

        def run(programs: int, first: int, masked: bool) -> None:
            sparse_kernels.encode[(programs,)](
                *measured.inputs(),
                levels,
                indices,
                fields,
                *measured.outputs(decoded),
                fault,
                numel,
                first,
                measured.decay,
                k=self.codec.k,
                block=chunk,
                rows=rows,
                **measured.chosen(decoded),
                masked=masked,
                num_warps=self.launch.num_warps,
                enable_fp_fusion=False,
            )

        run_programs(measured.values, chunk, chunk, rows, run)
        for (at, size), piece in zip(packed, (_indices(indices, INDEX_BITS[chunk]), _fields(fields)), strict=True):
            payload[at : at + size] = piece[:size]


def _indices(indices: Tensor, bits: int) -> Tensor:
    """Return the bytes of ``indices``, an even number of them, as ``sparse`` packs them."""
    if bits == 8:
        return indices.to(torch.uint8)
    pairs = indices.to(torch.int32).view(-1, 2)
    both = pairs[:, 0] | (pairs[:, 1] << 12)
    return both.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)


def _fields(fields: Tensor) -> Tensor:
    """Return the bytes of ``fields``, a multiple of four, as ``fields`` packs them."""
    four = fields.view(torch.int32)
    return (four | (four >> 6) | (four >> 12) | (four >> 18)).to(torch.uint8)
