"""The kernels' digest is that of the library, at every level and however the bytes come."""

from __future__ import annotations

import pytest
import torch

from diloco.codec import native
from diloco.codec.base import digest_of
from diloco.codec.native import BYTES_MIN, KernelDigest, at_level, kernel_digest, kernels
from diloco.codec.structures import SUM_BLOCK

BEST = kernels()
pytestmark = pytest.mark.skipif(BEST is None, reason="no compiled kernels here: " + native.description())
# A stripe of 16 values, a block of 256, a part of 2048: one more and one less, and a rest shorter than a stripe.
SIZES = [61, 64, 255, 256, 257, 271, 272, 273, 1024, 2047, 2048, 2049, 2063, 2064, 2065, 3 * 2048 + 256, 99_999]


@pytest.mark.parametrize("level", range(BEST.level + 1 if BEST is not None else 0))
def test_it_is_that_of_the_library(level: int) -> None:
    fast = at_level(level)
    for numel in SIZES:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        for part in (SUM_BLOCK, 2048, 100 * SUM_BLOCK):
            made = KernelDigest(4 * numel)
            for start in range(0, numel, part):
                fast.digest(made, values[start : start + part])
            assert made.text() == digest_of(values.numpy().data), (numel, part)


def test_there_is_one_only_where_the_kernels_have_its_form() -> None:
    assert kernel_digest(BYTES_MIN) is not None
    assert kernel_digest(BYTES_MIN - 1) is None
    assert kernel_digest(BYTES_MIN, "xxh3:" + "0" * 32) is not None
    assert kernel_digest(BYTES_MIN, "0" * 64) is None, "SHA-256 is what is asked for"


def test_a_digest_of_a_part_is_none() -> None:
    assert BEST is not None
    made = KernelDigest(4 * 2048)
    BEST.digest(made, torch.zeros(1024))
    with pytest.raises(AssertionError):
        made.text()
