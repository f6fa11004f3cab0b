"""An update read by ranges in order: decoded, measured and hashed in one pass, and kept nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import bytes_of, check_place, check_values
from diloco.codec.digests import hasher
from diloco.codec.fused import RANGE_VALUES, ranges
from diloco.codec.kernel_digest import kernel_digest
from diloco.codec.native import kernels, refuse
from diloco.codec.structures import SUM_BLOCK, MeasureJob
from diloco.codec.sums import Sums, decode_and_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.codec.contract import Codec
    from diloco.codec.fused import Range
    from diloco.codec.native import Kernels

READ_VALUES = 4 * RANGE_VALUES
"""Of a range where it is never whole in memory, but for its payload."""


class Reading:
    """Of one update of ``numel`` values, by ``codec``, which has no entropy stage."""

    def __init__(self, codec: Codec, numel: int, like: str = "", fast: Callable[[], Kernels | None] = kernels) -> None:
        """``like`` is a digest in whose form that of the values is made."""
        assert codec.plain is codec, codec.name
        self._codec = codec
        self._numel = numel
        found, made = fast(), kernel_digest(4 * numel, like)
        fits = found is not None and made is not None and found.fits(codec.layout, granule=SUM_BLOCK)
        self._fast, self._made = (found, made) if fits else (None, None)
        self._hasher = hasher(like)

    def ranges(self) -> list[Range]:
        """In which :meth:`read` wants the values."""
        return ranges(self._numel, [self._codec], None if self._fast is None else READ_VALUES)

    def read(
        self, payload: bytes | memoryview, numel: int, start: int, count: int, against: Tensor | None = None
    ) -> Sums:
        """The next ``count`` values, which begin at ``start`` of a ``payload`` of ``numel``; sums as by ``sums``."""
        codec, layout = self._codec, self._codec.layout
        if self._fast is None or self._made is None or layout is None:
            values = torch.empty(count)
            found = decode_and_sum(codec, payload, numel, values, start, against)
            self._hasher.update(bytes_of(values))
            return found
        codec.opened(payload, numel)  # Refuses another length.
        check_place(codec, count, start, numel)
        if against is not None:
            check_values(against)
            assert against.shape == (count,), (against.shape, count)
        job = MeasureJob(digest=self._made.address)
        refuse(self._fast.measure(layout, numel, start, payload, count, against, job), codec.name, layout)
        return Sums(job.largest, job.squares, job.products, job.against_squares)

    def digest(self) -> str:
        """That of the values, once all are read."""
        return self._made.text() if self._made is not None else self._hasher.text()
