"""Codecs on an accelerator: the bytes of ``blocks`` and ``topk``, made on the device that holds the values.

So only encoded bytes leave the device.  Every call enqueues kernels on the current stream and returns.  A
kernel reports a value that is not finite in ``fault``: an int32 tensor of one value on the same device, which the
caller copies to the host together with the payload and passes to ``check``.  On a CPU tensor the same kernels run under
Triton's interpreter (``TRITON_INTERPRET=1``); tests use that without an accelerator, and also test that the kernels
compile for one.  ``benchmarks/results/gpu_codec.jsonl`` says on which devices they have run.

A site decodes its own updates here as it encodes them, and the down-link's versions on the host.

topk makes the same choice and the same bytes as on the host.  One kernel reads the values and chooses; a few device
operations after it pack the kept values, a 64th of all by default.

:func:`accelerated` returns the passes of a codec that has kernels for an accelerator.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.codec.base import require_finite
from diloco.codec.blocks import FIELD_BITS, BlockCodec, IntCodec, pack
from diloco.codec.kernel_library import Kind
from diloco.codec.topk import INDEX_BITS, TopKCodec, pack_indices
from diloco.outer.pseudo_gradient import pseudo_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.codec.base import Codec

TERMS_MAX = 4
"""Most terms that one pass reads; the difference of more terms is computed before the pass."""
BLOCK_KERNELS = (Kind.INT8, Kind.INT4, Kind.E3M0, Kind.INT2, Kind.SIGN)
"""The block codecs that have a Triton kernel; any other is encoded on the host."""
ALIGNMENT = 16
"""Alignment in bytes: the widest load of a thread."""


@dataclass(frozen=True, slots=True)
class DevicePasses:
    """The encoding passes of one codec over flat contiguous fp32 tensors of one device.

    ``payload`` is a uint8 tensor of exactly the codec's ``payload_bytes(numel)``, on an even address unless it is of
    e3m0; :meth:`payload` makes one whose codes are aligned for wide stores, which is faster.
    """

    codec: BlockCodec | TopKCodec
    program_values: int = 4096
    """Values per program of a kernel, at least one block; it changes no bit, nor does the next."""
    num_warps: int = 8

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """Return an uninitialised payload of ``numel`` values."""
        front = -self.codec.sections(numel, 0, numel)[0][1] % ALIGNMENT
        return torch.empty(front + self.codec.payload_bytes(numel), dtype=torch.uint8, device=device)[front:]

    def check(self, found: int) -> None:
        """Raise ``NonFiniteError`` if ``found``, the value of a ``fault``, is not 0."""
        require_finite(not found, self.codec.name)

    def encode(self, terms: Sequence[Tensor], payload: Tensor, fault: Tensor, decoded: Tensor | None = None) -> None:
        """Encode the first of ``terms`` minus the others, with the bits of ``outer.pseudo_gradient``.

        ``decoded`` receives the decoded values, and may be one of the terms.
        """
        if len(terms) > TERMS_MAX:
            terms = (pseudo_gradient(terms[0], terms[1], terms[2:]),)
        values = terms[0]
        for each in (*terms, *([] if decoded is None else [decoded])):
            assert each.dtype == torch.float32, f"values are {each.dtype}"
            assert each.shape == (values.numel(),), (tuple(each.shape), tuple(values.shape))
            assert each.is_contiguous(), "values are not contiguous"
            assert each.device == values.device, (each.device, values.device)
        assert fault.dtype == torch.int32
        assert payload.dtype == torch.uint8
        assert payload.shape == (self.codec.payload_bytes(values.numel()),), (tuple(payload.shape), values.numel())
        assert payload.device == fault.device == values.device
        chosen = {
            "num_less": len(terms) - 1,
            "has_decoded": decoded is not None,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,
        }
        given = [terms[index] if index < len(terms) else values for index in range(TERMS_MAX)]
        outputs = [values if decoded is None else decoded, fault]
        if isinstance(self.codec, TopKCodec):
            self._encode_sparse(self.codec, given, payload, outputs, chosen)
        else:
            self._encode_blocks(self.codec, given, payload, outputs, chosen)

    def _encode_blocks(
        self, codec: BlockCodec, terms: list[Tensor], payload: Tensor, outputs: list[Tensor], chosen: dict[str, Any]
    ) -> None:
        """Enqueue the kernel of a block codec; ``outputs`` are for the decoded values and the fault."""
        from diloco.codec import gpu_kernels

        numel = terms[0].numel()
        (_, front), _ = codec.sections(numel, 0, numel)
        scales, codes = payload[:front].view(codec.scales_type), payload[front:]
        constants = chosen | block_constants(codec, self.program_values)
        self._launch(gpu_kernels.encode_blocks, [*terms, scales, codes, *outputs], constants)

    def _encode_sparse(
        self, codec: TopKCodec, terms: list[Tensor], payload: Tensor, outputs: list[Tensor], chosen: dict[str, Any]
    ) -> None:
        """Enqueue the kernel of topk, and the packing of what it kept."""
        from diloco.codec import gpu_kernels

        numel = terms[0].numel()
        (at, size), *packed = codec.sections(numel, 0, numel)
        levels = payload[at : at + size].view(torch.int16)
        index_bits = INDEX_BITS[codec.block]
        num_kept = packed[0][1] * 8 // index_bits
        # A multiple of four, so that the last byte is padded with zero fields.
        room = num_kept + -num_kept % 4
        indices = torch.zeros(room, dtype=torch.int16, device=payload.device)
        fields = torch.zeros(room, dtype=torch.uint8, device=payload.device)
        rows = max(1, self.program_values // codec.block)
        constants = chosen | {"k": codec.k, "block": codec.block, "rows": rows}
        self._launch(gpu_kernels.encode_sparse, [*terms, levels, indices, fields, *outputs], constants)
        pieces = (pack_indices(indices, index_bits), pack(fields, FIELD_BITS))
        for (at, size), piece in zip(packed, pieces, strict=True):
            payload[at : at + size] = piece[:size]

    def _launch(self, kernel: Any, tensors: Sequence[Tensor], constants: Mapping[str, Any]) -> None:
        """Enqueue ``kernel`` over all values of the first of ``tensors``: the whole programs, and then any rest."""
        numel, device = tensors[0].numel(), tensors[0].device
        block, size = constants["block"], constants["rows"] * constants["block"]
        whole = numel // size if constants.get("width", block) == block else 0
        rest = -(-(numel - whole * size) // size)
        # Triton launches on the current device, not on its arguments'.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for programs, first, masked in ((whole, 0, False), (rest, whole, True)):
                if programs:
                    kernel[(programs,)](*tensors, numel, first, masked=masked, **constants)


def block_constants(codec: BlockCodec, program_values: int) -> dict[str, Any]:
    """Return the constants of ``encode_blocks`` for ``codec``."""
    width = 1 << (codec.block - 1).bit_length()  # The columns that a kernel gives a block: the next power of two.
    return {
        "bits": codec.bits,
        "code_max": codec.code_max if isinstance(codec, IntCodec) else 0,
        "held_from": held_from(codec.code_max) if isinstance(codec, IntCodec) else 0,
        "block": codec.block,
        "width": width,
        "rows": max(1, program_values // width),
    }


def held_from(code_max: int) -> int:
    """Return the fp32 bits of the smallest bf16 that times ``code_max`` overflows fp32 (2**128 or more)."""
    exponent = 128 - code_max.bit_length()
    mantissa = -(-(128 << (128 - exponent)) // code_max)
    return ((exponent + 127) << 23) + ((mantissa - 128) << 16)


def new_fault(device: torch.device) -> Tensor:
    """Return a ``fault`` of 0: no fault yet."""
    return torch.zeros(1, dtype=torch.int32, device=device)


CHUNK_MAX = 4096
"""Largest chunk that fits in the registers of one program; larger ones are encoded on the host."""


def accelerated(codec: Codec) -> DevicePasses | None:
    """Return the passes of ``codec``, which has no entropy stage, on an accelerator; None where there are none.

    Sums of 64 bits take many registers, so int2, sign, e3m0 and topk get fewer values a thread.
    """
    if isinstance(codec, BlockCodec) and codec.kind in BLOCK_KERNELS:
        return DevicePasses(codec, 4096 if isinstance(codec, IntCodec) else 2048)
    if isinstance(codec, TopKCodec) and codec.kind is Kind.TOPK and codec.block <= CHUNK_MAX:
        return DevicePasses(codec, num_warps=16)
    return None
