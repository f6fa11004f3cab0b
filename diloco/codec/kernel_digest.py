"""A digest that a compiled pass makes of the values it has in the first cache anyway: the same as ``digests`` makes."""

from __future__ import annotations

import ctypes

from diloco.codec.digests import XXH3, is_sha256
from diloco.codec.structures import DigestState

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
