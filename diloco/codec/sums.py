"""Sums of products in fp64, to the bit: for norms, cosines and whatever is decided by them.

A sum in floating point depends on its order, so the order is part of the definition.  Values are taken in blocks of
``SUM_BLOCK`` from the first one, the last block filled up with zeros, and a block as rows of ``LANES``.  Each lane adds
its products row by row, beginning with +0; then the lanes' upper half is added to the lower until one is left; then the
blocks' sums are added up in order, beginning with +0.  A product of two fp32 is exact in fp64, so a fused multiply-add
changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import CHUNK_VALUES

if TYPE_CHECKING:
    from torch import Tensor

SUM_BLOCK = 1024
LANES = 16


def sum_of_products(a: Tensor, b: Tensor) -> float:
    """Return ``sum(a * b)`` of two flat fp32 tensors of one size, in the order of this module."""
    assert a.shape == b.shape, (a.shape, b.shape)
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
