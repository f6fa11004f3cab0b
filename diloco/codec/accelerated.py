"""Which codecs have kernels for an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.blocks import BlockCodec
from diloco.codec.device import DeviceCodec, Launch
from diloco.codec.device_grids import DeviceGrid
from diloco.codec.device_sparse import CHUNK_MAX, DeviceTopK
from diloco.codec.gridded import GridCodec
from diloco.codec.sparse import TopKCodec

if TYPE_CHECKING:
    from diloco.codec.contract import Codec
    from diloco.codec.device import DevicePasses


def accelerated(codec: Codec, launch: Launch | None = None) -> DevicePasses | None:
    """Return the passes of ``codec``, which has no entropy stage, on an accelerator; None where there are none.

    Sums of 64 bits take many registers, so without a ``launch`` grids and topk get fewer values a thread.
    """
    if isinstance(codec, BlockCodec):
        return DeviceCodec(codec, launch or Launch())
    if isinstance(codec, GridCodec):
        return DeviceGrid(codec, launch or Launch(program_values=2048))
    if isinstance(codec, TopKCodec) and codec.chunk <= CHUNK_MAX:
        return DeviceTopK(codec, launch or Launch(num_warps=16))
    return None
