"""Codecs on an accelerator: the bytes of ``blocks``, ``grids`` and ``topk``, made where the values lie.

Only encoded bytes need to leave the device then.  Every call enqueues kernels on the current stream and returns.  A
kernel tells in ``fault`` what it finds wrong: an int32 tensor of one value on the same device, which the caller copies
to the host together with the payload and hands to ``check``.  On a CPU tensor the same kernels run under Triton's
interpreter (``TRITON_INTERPRET=1``), which is how they are tested where there is no accelerator; that they compile for
one is tested too.  ``benchmarks/results/gpu_codec.jsonl``, where it exists, says on which devices they have run.

int8 and int4 (:class:`DeviceCodec`) are encoded and decoded here.  e3m0, int2, sign and topk are only encoded: a site
decodes its own updates here as it encodes them, and the down-link's versions on the host.

topk (:class:`DeviceTopK`) makes the same choice and the same bytes as on the host.  One kernel reads the values and
chooses; what it kept, a 64th of them by default, is packed by a few operations on the device behind it.

:func:`accelerated` says which codecs have kernels for an accelerator.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.codec.base import BAD_CODE, BAD_FILLING, BAD_SCALE, NON_FINITE, TOO_LARGE, DecodeError, NonFiniteError
from diloco.codec.blocks import SCALE_BYTES, BlockCodec
from diloco.codec.grids import GridCodec
from diloco.codec.topk import INDEX_BITS, TopKCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.codec.base import Codec

SENT_MAX = 2
"""Updates in flight that one pass takes off; more are taken off before it."""
ALIGNMENT = 16
"""Bytes; the widest load of a thread."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a pass is cut: values of a program (at least one block) and its warps.  It changes no bit."""

    program_values: int = 4096
    num_warps: int = 8


class DevicePasses:
    """The encoding passes of one codec over flat contiguous fp32 tensors of one device.

    ``payload`` is a uint8 tensor of exactly the codec's ``payload_bytes(numel)``; :meth:`payload` makes one whose codes
    lie where wide stores can reach them, which is faster.
    """

    __slots__ = ()

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """Return an uninitialised payload of ``numel`` values."""
        raise NotImplementedError

    def encode(self, values: Tensor, payload: Tensor, fault: Tensor, decoded: Tensor | None = None) -> None:
        """Encode ``values``; write what they decode to into ``decoded``, which may be ``values``."""
        self.run_encode(Measured(values), payload, fault, decoded)

    def encode_difference(
        self,
        base: Tensor,
        local: Tensor,
        in_flight: Sequence[Tensor],
        payload: Tensor,
        fault: Tensor,
        decoded: Tensor | None = None,
    ) -> None:
        """Encode ``base - local - in_flight[0] - ...``, as ``outer.pseudo_gradient`` has it."""
        if len(in_flight) > SENT_MAX:
            self.encode(less(torch.sub(base, local), in_flight), payload, fault, decoded)
            return
        self.run_encode(Measured(base, local, tuple(in_flight)), payload, fault, decoded)

    def encode_with_residual(
        self,
        base: Tensor,
        local: Tensor,
        residual: Tensor,
        decay: float,
        payload: Tensor,
        fault: Tensor,
        decoded: Tensor | None = None,
    ) -> None:
        """Encode ``x = (base - local) + decay * residual`` and leave ``x - decoded`` in ``residual``."""
        self.run_encode(Measured(base, local, (), residual, decay), payload, fault, decoded)

    def check(self, found: int) -> None:
        """Raise ``NonFiniteError`` or ``DecodeError`` for the bits that a ``fault`` holds, if there are any."""
        raise NotImplementedError

    def run_encode(self, measured: Measured, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """Enqueue the kernel."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Measured:
    """What is encoded: ``values`` [- ``local`` - sent...] [+ ``decay * residual``]."""

    values: Tensor
    local: Tensor | None = None
    sent: tuple[Tensor, ...] = ()
    residual: Tensor | None = None
    decay: float = 1.0

    def check(self, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """Assert that everything is of one size and in one place."""
        given = (self.values, self.local, *self.sent, self.residual, decoded)
        check_tensors([each for each in given if each is not None], fault)
        assert payload.dtype == torch.uint8
        assert payload.device == self.values.device

    def inputs(self) -> list[Tensor]:
        """The first five arguments of an encoding kernel, ``values`` in place of what there is not."""
        given = (self.values, self.local, at(self.sent, 0), at(self.sent, 1), self.residual)
        return [self.values if each is None else each for each in given]

    def outputs(self, decoded: Tensor | None) -> list[Tensor]:
        """Where it writes fp32: what was sent, and what is left, which takes the residual's place."""
        return [self.values if each is None else each for each in (decoded, self.residual)]

    def chosen(self, decoded: Tensor | None) -> dict[str, Any]:
        """What an encoding kernel is built for."""
        return {
            "num_less": len(self.sent) + (self.local is not None),
            "has_residual": self.residual is not None,
            "has_decoded": decoded is not None,
        }


@dataclass(frozen=True, slots=True)
class DeviceCodec(DevicePasses):
    """The passes of int8 and int4, both ways; a payload starts on an even address."""

    codec: BlockCodec
    launch: Launch = Launch()

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`DevicePasses`."""
        return aligned_payload(self._scales_bytes(numel), self.codec.payload_bytes(numel), device)

    def decode(self, payload: Tensor, out: Tensor, fault: Tensor) -> None:
        """Write the decoded values into ``out``."""
        self._decode(payload, None, None, out, None, fault)

    def follow(self, published: Tensor, payload: Tensor, out: Tensor, fault: Tensor) -> None:
        """Write what is held after ``payload`` by one who held ``published`` into ``out``, which may be the same."""
        self._decode(payload, published, None, out, None, fault)

    def rebase(
        self,
        published: Tensor,
        payload: Tensor,
        local: Tensor,
        old_base: Tensor,
        merged: Sequence[Tensor],
        out: Tensor,
        adopted: Tensor,
        fault: Tensor,
    ) -> None:
        """As :meth:`follow`, and write ``outer.pseudo_gradient.rebase(local, old_base, out, merged)`` into ``adopted``.

        One pass; ``adopted`` may be ``local``.
        """
        if len(merged) > SENT_MAX:
            self.follow(published, payload, out, fault)
            torch.sub(out, less(torch.sub(old_base, local), merged), out=adopted)
            return
        self._decode(payload, published, (local, old_base, merged), out, adopted, fault)

    def check(self, found: int) -> None:
        """Raise what the plain codec raises, for the bits that a ``fault`` holds, if there are any."""
        name = self.codec.name
        if found & NON_FINITE:
            raise NonFiniteError(f"{name} was to encode a NaN or an infinity")
        if found & BAD_SCALE:
            raise DecodeError(f"{name} payload holds a scale that is negative, subnormal or not finite")
        if found & BAD_CODE:
            raise DecodeError(f"{name} payload holds a code below {-self.codec.code_max}")
        if found & BAD_FILLING:
            raise DecodeError(f"{name} payload holds something behind its last value")
        if found & TOO_LARGE:
            raise DecodeError(f"{name} payload holds a value beyond fp32")

    def run_encode(self, measured: Measured, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """See :class:`DevicePasses`."""
        measured.check(payload, fault, decoded)
        scales, codes = self._parts(measured.values, payload)
        from diloco.codec import gpu_kernels

        def run(programs: int, first: int, masked: bool) -> None:
            gpu_kernels.encode_blocks[(programs,)](
                *measured.inputs(),
                scales,
                codes,
                *measured.outputs(decoded),
                fault,
                measured.values.numel(),
                first,
                measured.decay,
                **self._constants(),
                **measured.chosen(decoded),
                held_from=self._held_from(),
                masked=masked,
            )

        run_programs(measured.values, self.codec.block, self._width(), self._rows(), run)

    def _decode(
        self,
        payload: Tensor,
        held: Tensor | None,
        rebased: tuple[Tensor, Tensor, Sequence[Tensor]] | None,
        out: Tensor,
        adopted: Tensor | None,
        fault: Tensor,
    ) -> None:
        scales, codes = self._parts(out, payload)
        local, base, merged = rebased if rebased is not None else (out, out, ())
        check_tensors([out, local, base, *merged, *[each for each in (held, adopted) if each is not None]], fault)
        from diloco.codec import gpu_kernels

        def run(programs: int, first: int, masked: bool) -> None:
            gpu_kernels.decode_blocks[(programs,)](
                scales,
                codes,
                *[out if each is None else each for each in (held, local, base, at(merged, 0), at(merged, 1))],
                out,
                out if adopted is None else adopted,
                fault,
                out.numel(),
                first,
                **self._constants(),
                follows=held is not None,
                rebases=rebased is not None,
                num_merged=len(merged),
                masked=masked,
            )

        run_programs(out, self.codec.block, self._width(), self._rows(), run)

    def _constants(self) -> dict[str, Any]:
        return {
            "code_max": self.codec.code_max,
            "block": self.codec.block,
            "width": self._width(),
            "rows": self._rows(),
            "num_warps": self.launch.num_warps,
            "enable_fp_fusion": False,
        }

    def _width(self) -> int:
        return width_of(self.codec.block)

    def _rows(self) -> int:
        return max(1, self.launch.program_values // self._width())

    def _held_from(self) -> int:
        """The bits of the smallest bf16, as an fp32, that times ``code_max`` is beyond fp32 (2**128 or more)."""
        exponent = 128 - self.codec.code_max.bit_length()
        mantissa = -(-(128 << (128 - exponent)) // self.codec.code_max)
        return ((exponent + 127) << 23) + ((mantissa - 128) << 16)

    def _scales_bytes(self, numel: int) -> int:
        return SCALE_BYTES * -(-numel // self.codec.block)

    def _parts(self, values: Tensor, payload: Tensor) -> tuple[Tensor, Tensor]:
        numel = values.numel()
        assert payload.dtype == torch.uint8
        assert payload.shape == (self.codec.payload_bytes(numel),), (tuple(payload.shape), numel)
        assert payload.device == values.device
        assert payload.data_ptr() % SCALE_BYTES == 0, "a payload starts on an even address"
        scales = payload[: self._scales_bytes(numel)].view(torch.int16)
        codes = payload[self._scales_bytes(numel) :]
        return scales, codes.view(torch.int8) if self.codec.bits == 8 else codes


def width_of(block: int) -> int:
    """Return the columns that a kernel gives a block: the next power of two."""
    return 1 << (block - 1).bit_length()


def run_programs(values: Tensor, block: int, width: int, rows: int, run: Callable[[int, int, bool], None]) -> None:
    """Launch ``run(programs, first program, masked)`` for the whole programs, and once more for a rest."""
    numel = values.numel()
    whole, rest = divmod(numel, rows * block)
    if width != block:
        whole, rest = 0, numel
    with on_device(values.device):
        if whole:
            run(whole, 0, False)
        if rest:
            run(-(-rest // (rows * block)), whole, True)


def aligned_payload(front_bytes: int, payload_bytes: int, device: torch.device) -> Tensor:
    """Return room for a payload whose codes, behind ``front_bytes`` of scales, lie on an address of wide stores."""
    front = -front_bytes % ALIGNMENT
    return torch.empty(front + payload_bytes, dtype=torch.uint8, device=device)[front:]


def new_fault(device: torch.device) -> Tensor:
    """Return a ``fault`` that tells of nothing yet."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def check_tensors(tensors: Sequence[Tensor], fault: Tensor) -> None:
    """Assert that ``tensors`` are flat fp32 of one size on one device, and ``fault`` there too."""
    first = tensors[0]
    for each in tensors:
        assert each.dtype == torch.float32, f"values are {each.dtype}"
        assert each.shape == (first.numel(),), (tuple(each.shape), tuple(first.shape))
        assert each.is_contiguous(), "values are not contiguous"
        assert each.device == first.device, (each.device, first.device)
    assert fault.dtype == torch.int32
    assert fault.device == first.device


def less(values: Tensor, sent: Sequence[Tensor]) -> Tensor:
    """Take ``sent`` off ``values`` in place, in order."""
    for each in sent:
        values.sub_(each)
    return values


def at(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    """Return the tensor at ``index``, if there is one."""
    return tensors[index] if index < len(tensors) else None


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class DeviceGrid(DevicePasses):
    """The encoding passes of a codec on a grid; a payload with 16-bit scales starts on an even address."""

    codec: GridCodec
    launch: Launch

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`~diloco.codec.gpu.DevicePasses`."""
        return aligned_payload(self._scales_bytes(numel), self.codec.payload_bytes(numel), device)

    def check(self, found: int) -> None:
        """See :class:`~diloco.codec.gpu.DevicePasses`."""
        if found & NON_FINITE:
            raise NonFiniteError(f"{self.codec.name} was to encode a NaN or an infinity")

    def run_encode(self, measured: Measured, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.gpu.DevicePasses`."""
        measured.check(payload, fault, decoded)
        numel = measured.values.numel()
        assert payload.shape == (self.codec.payload_bytes(numel),), (tuple(payload.shape), numel)
        scales = payload[: self._scales_bytes(numel)].view(self.codec.grid.scales_type)
        codes = payload[self._scales_bytes(numel) :]
        block = self.codec.block
        width = width_of(block)
        rows = max(1, self.launch.program_values // width)
        from diloco.codec import gpu_kernels

        def run(programs: int, first: int, masked: bool) -> None:
            gpu_kernels.encode_grid[(programs,)](
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


CHUNK_MAX = 4096
"""A chunk lies in the registers of one program; larger ones are encoded on the host."""


@dataclass(frozen=True, slots=True)
class DeviceTopK(DevicePasses):
    """The encoding passes of topk with chunks of at most ``CHUNK_MAX``; a payload starts on an even address."""

    codec: TopKCodec
    launch: Launch

    def payload(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`~diloco.codec.gpu.DevicePasses`."""
        return aligned_payload(0, self.codec.payload_bytes(numel), device)

    def check(self, found: int) -> None:
        """See :class:`~diloco.codec.gpu.DevicePasses`."""
        if found & NON_FINITE:
            raise NonFiniteError(f"{self.codec.name} was to encode a NaN or an infinity")

    def run_encode(self, measured: Measured, payload: Tensor, fault: Tensor, decoded: Tensor | None) -> None:
        """See :class:`~diloco.codec.gpu.DevicePasses`."""
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
        from diloco.codec import gpu_kernels

        def run(programs: int, first: int, masked: bool) -> None:
            gpu_kernels.encode_sparse[(programs,)](
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
    """Return the bytes of ``indices``, an even number of them, as ``topk`` packs them."""
    if bits == 8:
        return indices.to(torch.uint8)
    pairs = indices.to(torch.int32).view(-1, 2)
    both = pairs[:, 0] | (pairs[:, 1] << 12)
    return both.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)


def _fields(fields: Tensor) -> Tensor:
    """Return the bytes of ``fields``, a multiple of four, as ``base.pack`` packs them."""
    four = fields.view(torch.int32)
    return (four | (four >> 6) | (four >> 12) | (four >> 18)).to(torch.uint8)


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
