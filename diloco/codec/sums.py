"""Sums of products in fp64, to the bit: for norms, cosines and whatever is decided by them.

A sum in floating point depends on its order, so the order is part of the definition.  Values are taken in blocks of
``SUM_BLOCK`` from the first one, the last block filled up with zeros, and a block as rows of ``LANES``.  Each lane adds
its products row by row, beginning with +0; then the lanes' upper half is added to the lower until one is left; then the
blocks' sums are added up in order, beginning with +0.  A product of two fp32 is exact in fp64, so a fused multiply-add
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import CHUNK_VALUES, check_place, check_values
from diloco.codec.native import kernels, refuse
from diloco.codec.structures import LANES, SUM_BLOCK, MeasureJob

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.codec.contract import Codec


@dataclass(frozen=True, slots=True)
class Sums:
    """Of some values x and others m: ``largest`` is max |x|, the rest are sums of x x, x m and m m.

    ``largest`` is infinite where an x is not finite, and the sums are nothing then.
    """

    largest: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    against_squares: float = 0.0


def sum_of_products(a: Tensor, b: Tensor) -> float:
    """Return ``sum(a * b)`` of two flat fp32 tensors of one size, in the order of this module."""
    check_values(a)
    check_values(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    fast = kernels()
    return sum_plain(a, b) if fast is None else fast.sum_of_products(a, b)


def sums_of(values: Tensor, against: Tensor | None) -> Sums:
    """Return the sums of ``values`` and ``against``, flat fp32 of one size."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not isfinite(largest):
        return Sums(largest=inf)
    squares = sum_of_products(values, values)
    if against is None:
        return Sums(largest, squares)
    return Sums(largest, squares, sum_of_products(values, against), sum_of_products(against, against))


def decode_and_sum(
    codec: Codec, payload: bytes | memoryview, numel: int, out: Tensor, start: int = 0, against: Tensor | None = None
) -> Sums:
    """Decode a range as ``codec.decode_into`` does, and return the sums of its values and of ``against``, in one pass.

    The sums begin with the range, so their bits depend on how a tensor is cut, and on nothing else.
    """
    codec, payload = codec.opened(payload, numel)
    fast, layout = kernels(), codec.layout
    if fast is None or layout is None or not fast.fits(layout, granule=SUM_BLOCK) or not out.numel():
        codec.decode_into(payload, numel, out, start)
        return sums_of(out, against)
    check_values(out)
    check_place(codec, out.numel(), start, numel)
    assert against is None or against.shape == out.shape
    job = MeasureJob(out=out.data_ptr())
    refuse(fast.measure(layout, numel, start, payload, out.numel(), against, job), codec.name, layout)
    return Sums(job.largest, job.squares, job.products, job.against_squares)


def sum_plain(a: Tensor, b: Tensor) -> float:
    """What :func:`sum_of_products` computes, on torch: its definition."""
    total = 0.0
    for start in range(0, a.numel(), CHUNK_VALUES):
        products = a[start : start + CHUNK_VALUES].double().mul_(b[start : start + CHUNK_VALUES])
        products = torch.nn.functional.pad(products, (0, -products.numel() % SUM_BLOCK))
        rows = products.view(-1, SUM_BLOCK // LANES, LANES)
        lanes = torch.zeros(rows.shape[0], LANES, dtype=torch.float64)
        for row in range(rows.shape[1]):
            lanes.add_(rows[:, row])
        width = LANES
        while width > 1:
            width //= 2
            lanes[:, :width].add_(lanes[:, width : 2 * width])
        for block in lanes[:, 0].tolist():
            total += block
    return total
