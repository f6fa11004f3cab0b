"""e3m0, int2 and sign on an accelerator: their bytes, made where the values lie.

Encoding only: a site decodes its own updates here as it encodes them, and the down-link's versions on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.codec.contract import NonFiniteError
from diloco.codec.device import (
    NON_FINITE,
    DevicePasses,
    Launch,
    Measured,
    aligned_payload,
    run_programs,
    width_of,
)
from diloco.codec.gridded import GridCodec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceGrid(DevicePasses):
    """The encoding passes of a codec on a grid; a payload with 16-bit scales starts on an even address."""

    codec: GridCodec
    launch: Launch

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`~diloco.codec.device.DevicePasses`."""
        return aligned_payload(self._scales_bytes(numel), self.codec.payload_bytes(numel), device)

    def check(self, found: int) -> None:
        """See :class:`~diloco.codec.device.DevicePasses`."""
        if found & NON_FINITE:
            raise NonFiniteError(f"{self.codec.name} was to encode a NaN or an infinity")

    def run_encode(self, measured: Measured, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.device.DevicePasses`."""
        measured.check(payload, fault, decoded)
        numel = measured.values.numel()
        assert payload.shape == (self.codec.payload_bytes(numel),), (tuple(payload.shape), numel)
        scales = payload[: self._scales_bytes(numel)].view(self.codec.grid.scales_type)
        codes = payload[self._scales_bytes(numel) :]
        block = self.codec.block
        width = width_of(block)
        rows = max(1, self.launch.program_values // width)
        from diloco.codec import grid_kernels

        def run(programs: int, first: int, masked: bool) -> None:
            grid_kernels.encode[(programs,)](
                *measured.inputs(),
                scales,
                codes,
                *measured.outputs(decoded),
                fault,
                numel,
                first,
                measured.decay,
                bits=self.codec.grid.bits,
                block=block,
                width=width,
                rows=rows,
                **measured.chosen(decoded),
                masked=masked,
                num_warps=self.launch.num_warps,
                enable_fp_fusion=False,
            )

        run_programs(measured.values, block, width, rows, run)

    def _scales_bytes(self, numel: int) -> int:
        grid = self.codec.grid
        return grid.scales_type.itemsize * grid.num_scales * -(-numel // self.codec.block)
