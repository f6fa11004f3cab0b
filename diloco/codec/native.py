"""The passes over memory as compiled kernels, where the package was built with a C++ compiler.

``kernels/kernels.cpp`` computes what the plain torch versions compute, bit for bit, in one pass each and without the
lock of Python.  ``kernel_library`` loads it and chooses the level of instructions that a call names.

A :class:`KernelDigest` is made by a pass of the values that it has in the first cache anyway.  It is the digest that
``base.hasher`` makes of the same bytes.  :class:`Kernels` has one method for each pass.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_void_p
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from diloco.codec.base import XXH3, Add, Carry, DecodeError, NonFinitePayload, Towards, is_sha256
from diloco.codec.kernel_library import choice
from diloco.codec.kernel_library import description as description
from diloco.codec.structures import (
    SUM_BLOCK,
    TILE_MAX,
    TILE_USUAL,
    DecodeJob,
    DigestState,
    EncodeJob,
    Fold,
    FollowJob,
    Kind,
    Layout,
    MeasureJob,
    OuterJob,
    SealJob,
    Status,
    TakeJob,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

BYTES_MIN = 241
"""Shorter input has another form."""


class KernelDigest:
    """Of ``total`` bytes, which kernels take in order; every part but the last is whole blocks of ``SUM_BLOCK``."""

    def __init__(self, total: int) -> None:
        assert total >= BYTES_MIN, total
        self._state = DigestState(total)

    @property
    def address(self) -> int:
        """What a job of the kernels is told."""
        return ctypes.addressof(self._state)

    def text(self) -> str:
        """The digest as it is written, once all bytes are in."""
        assert self._state.done == self._state.total, (self._state.done, self._state.total)
        return f"{XXH3}{self._state.high:016x}{self._state.low:016x}"


def kernel_digest(total: int, like: str = "") -> KernelDigest | None:
    """A new one in the form of ``like``; None where the kernels have no such form."""
    return KernelDigest(total) if total >= BYTES_MIN and not is_sha256(like) else None


MALFORMED: Mapping[Status, str] = MappingProxyType(
    {
        Status.BAD_SCALE: "holds a scale that is negative, subnormal or not finite",
        Status.BAD_CODE: "holds a code below",
        Status.BEHIND: "holds something behind its last value",
        Status.BEYOND: "holds a value beyond fp32",
        Status.BAD_INDEX: "holds indices that do not rise or lie outside",
        Status.BAD_LEVELS: "holds levels that are not those of its values",
        Status.BAD_SIGN: "holds a sign without a value",
        Status.NOT_FIRST: "holds a value of 0 that is not the first",
        Status.BEHIND_INDEX: "holds something behind its last index",
        Status.BAD_TOP: "holds a scale of 255",
        Status.SIGN_ALONE: "holds a sign without a code",
        Status.OTHER_TOP: "holds a scale that is not that of its block's largest code",
        Status.TOO_SMALL: "holds a code below 2**-126",
        Status.SIGN_OF_ZERO: "holds a sign in a block of scale 0",
    }
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library at one level; see ``kernels.cpp`` for what each job means."""

    library: ctypes.CDLL
    level: int
    fused: bool
    """Whether torch's additions with a factor round once on this machine; the kernels do as torch does."""

    def fits(self, *layouts: Layout | None, granule: int = 1) -> bool:
        """Whether all these are formats with kernels, and a tile can hold whole blocks of each."""
        return None not in layouts and tile(granule, *(each.block for each in layouts if each)) > 0

    def encode(
        self,
        layout: Layout,
        numel: int,
        start: int,
        terms: Sequence[Tensor],
        carry: Carry | None,
        payload: Tensor,
        decoded: Tensor | None,
    ) -> Status:
        """Encode the first of ``terms`` less the others."""
        job = EncodeJob(
            layout.format(numel),
            start,
            terms[0].numel(),
            terms[0].data_ptr(),
            pointers(terms[1:]),
            len(terms) - 1,
            None if carry is None else carry.residual.data_ptr(),
            payload.data_ptr(),
            None if decoded is None else decoded.data_ptr(),
            0.0 if carry is None else carry.beta,
        )
        return Status(self.library.diloco_encode(self.level, byref(job)))

    def decode(
        self,
        layout: Layout,
        numel: int,
        start: int,
        payload: bytes | memoryview,
        out: Tensor,
        accumulate: Add | Towards | None,
    ) -> Status:
        """Decode as many values as ``out`` has."""
        fold = Fold.WRITE if accumulate is None else Fold.ADD if isinstance(accumulate, Add) else Fold.TOWARDS
        share = accumulate.share if isinstance(accumulate, Towards) else 0.0
        at = out.data_ptr()
        job = DecodeJob(layout.format(numel), start, out.numel(), address(payload), at, at, fold, share)
        return Status(self.library.diloco_decode(self.level, byref(job)))

    def measure(
        self,
        layout: Layout,
        numel: int,
        start: int,
        payload: bytes | memoryview,
        count: int,
        against: Tensor | None,
        job: MeasureJob,
    ) -> Status:
        """Decode ``count`` values, and go on with the sums of ``job`` in the order of ``merging``."""
        job.format, job.start, job.count = layout.format(numel), start, count
        job.tile = tile(layout.block, SUM_BLOCK)
        job.payload = address(payload)
        job.against = None if against is None else against.data_ptr()
        return Status(self.library.diloco_measure(self.level, byref(job)))

    def sum_of_products(self, a: Tensor, b: Tensor) -> float:
        """See ``merging.sum_of_products``."""
        return float(self.library.diloco_sum_products(self.level, a.data_ptr(), b.data_ptr(), a.numel(), 0.0))

    def outer(self, job: OuterJob) -> Status:
        """Make one range of a version."""
        return Status(self.library.diloco_outer(self.level, byref(job)))

    def seal(self, job: SealJob) -> Status:
        """Encode what a site sends."""
        return Status(self.library.diloco_seal(self.level, byref(job)))

    def follow(self, job: FollowJob) -> Status:
        """Make what is held after a version."""
        return Status(self.library.diloco_follow(self.level, byref(job)))

    def take(self, job: TakeJob) -> Status:
        """Rebase a site's values."""
        return Status(self.library.diloco_take(self.level, byref(job)))

    def digest(self, made: KernelDigest, values: Tensor) -> None:
        """Have ``made`` take the bytes of ``values``."""
        self.library.diloco_digest(self.level, made.address, values.data_ptr(), 4 * values.numel())


def tile(*granules: int) -> int:
    """How many values the kernels handle at a time, so that they are whole granules of all; 0 where they cannot."""
    step = lcm(*granules)
    return 0 if step > TILE_MAX else max(1, TILE_USUAL // step) * step


def refuse(status: Status, name: str, layout: Layout) -> None:
    """Raise what the plain version of decoding would; nothing where it is done."""
    if status is Status.DONE:
        return
    if status is Status.NOT_FINITE:
        raise NonFinitePayload(f"{name} payload holds a NaN or an infinity")
    what = MALFORMED[status]
    if status is Status.BAD_CODE:
        what += " -127" if layout.kind is Kind.INT8 else " -7"
    raise DecodeError(f"{name} payload {what}")


def address(payload: bytes | memoryview) -> int:
    """Where the bytes lie; they stay there as long as the object does."""
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    """Return an array of the tensors' addresses."""
    return (c_void_p * max(1, len(tensors)))(*(each.data_ptr() for each in tensors))


def kernels() -> Kernels | None:
    """Return the kernels that this process runs; None where plain torch does."""
    chosen = choice()
    return None if chosen.library is None else at_level(chosen.level)


@functools.cache
def at_level(level: int) -> Kernels:
    """Return the kernels of one level, for comparison; the CPU must have it."""
    library = choice().library
    assert library is not None, "no kernels"
    return Kernels(library, level, _torch_fuses())


def _torch_fuses() -> bool:
    """Whether ``a + alpha b`` is one rounding in torch here: only then is something left of these three."""
    b = torch.full((64,), 1 + 2.0**-12)
    a = torch.full((64,), -1 - 2.0**-11)
    return bool(torch.add(a, b, alpha=1 + 2.0**-12)[0] != 0)
