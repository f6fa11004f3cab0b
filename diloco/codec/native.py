"""The passes over memory as compiled kernels, where the package was built with a C++ compiler.

``kernels/kernels.cpp`` computes the same as the plain torch versions, bit for bit, in one pass each and without
Python's global lock.  ``kernel_library`` loads it, chooses the instruction level that each call passes, and defines the
jobs: the caller fills one in, and :meth:`Kernels.run` carries it out.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_void_p
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
import torch

from diloco.codec.kernel_library import TILE_MAX, TILE_USUAL, Job, Status
from diloco.codec.kernel_library import description as description

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library at one instruction level."""

    library: ctypes.CDLL
    level: int

    def run(self, job: Job) -> Status:
        """Carry out ``job``, a pass over memory; ``kernels.cpp`` documents it at the job's structure."""
        return Status(getattr(self.library, job.function)(self.level, byref(job)))


def tile(*blocks: int) -> int:
    """Return how many values the kernels handle at a time, in whole blocks of all sizes; 0 where that is impossible."""
    step = lcm(*blocks)
    return 0 if step > TILE_MAX else max(1, TILE_USUAL // step) * step


def address(payload: bytes | memoryview) -> int:
    """Return the address of the bytes, which is valid as long as the object lives."""
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    """Return an array of the tensors' addresses."""
    return (c_void_p * max(1, len(tensors)))(*(each.data_ptr() for each in tensors))


def pointer(values: Tensor | None) -> int | None:
    """Return the address of a tensor, or None (null)."""
    return None if values is None else values.data_ptr()


@functools.cache
def torch_fuses() -> bool:
    """Return whether torch computes ``a + alpha b`` with one rounding on this machine; the kernels then do the same.

    Only with one rounding is the result below not 0.
    """
    b = torch.full((64,), 1 + 2.0**-12)
    a = torch.full((64,), -1 - 2.0**-11)
    return bool(torch.add(a, b, alpha=1 + 2.0**-12)[0] != 0)
