"""Memory of a fragment's size that is used again, instead of given back to the system and asked for anew.

The system gives memory in pages, each at its first touch, and that costs ten times as much as the write itself: new
tensors for each version cost more than all the arithmetic on them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Of every buffer, in bytes: a line of the cache."""
LONGER_MAX = 4 / 3
"""How much longer than asked for memory may be that is used again: fragments differ by no more."""


class Buffers:
    """Gives tensors whose memory comes back by itself when the last tensor, array or view that reads it is gone.

    Nobody has to say so, and nobody can be wrong about it: the storage of a tensor owns the array that it was made
    from, every view of it owns the storage, and memory changes hands when that array dies.  At most ``spare_max``
    pieces of it lie idle.  Any thread may ask, and any may drop a tensor.
    """

    def __init__(self, spare_max: int) -> None:
        self._spare: deque[np.ndarray[tuple[int], np.dtype[np.uint8]]] = deque(maxlen=spare_max)

    @property
    def spare_bytes(self) -> int:
        """Memory that lies idle."""
        return sum(each.nbytes for each in tuple(self._spare))

    def values(self, numel: int) -> Tensor:
        """A flat fp32 tensor of ``numel`` values, whatever they are."""
        return self.raw(4 * numel).view(torch.float32)

    def like(self, values: Tensor) -> Tensor:
        """One of the size of ``values``."""
        return self.values(values.numel())

    def raw(self, size: int) -> Tensor:
        """A flat uint8 tensor of ``size`` bytes, whatever they are."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        memory = self._taken(size + ALIGNMENT)
        begin = -memory.ctypes.data % ALIGNMENT
        lease = memory[begin : begin + size]
        # A deque can be appended to at any moment, in the middle of its own ``popleft`` too: no lock is needed.
        weakref.finalize(lease, self._spare.append, memory).atexit = False
        return torch.from_numpy(lease)

    def _taken(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Memory for ``size`` bytes: the first spare one that is neither too short nor far too long, or new.

        Where there is none, the one that has been idle for longest is let go: what is idle and what is new are together
        never more than what was in use before.
        """
        for _ in range(len(self._spare)):
            try:
                memory = self._spare.popleft()
            except IndexError:
                break  # Another thread was faster.
            if size <= memory.nbytes <= LONGER_MAX * size:
                return memory
            self._spare.append(memory)
        with contextlib.suppress(IndexError):
            self._spare.popleft()
        return np.empty(size, dtype=np.uint8)
