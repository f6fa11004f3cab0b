"""The kernels' digest is that of the library, at every level and however the bytes come."""

from __future__ import annotations

import ctypes

import pytest
import torch

from diloco.codec import native
from diloco.codec.base import BYTES_MIN, KernelDigest, digest_of, hashing_kernels
from diloco.codec.kernel_library import SUM_BLOCK
from diloco.codec.native import kernels
from tests.codec.levels import NATIVE, running

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels here: " + native.description())
# A stripe of 16 values, a block of 256, a part of 2048: one more and one less, and a rest shorter than a stripe.
SIZES = [61, 64, 255, 256, 257, 271, 272, 273, 1024, 2047, 2048, 2049, 2063, 2064, 2065, 3 * 2048 + 256, 99_999]


def take(made: KernelDigest, values: torch.Tensor) -> None:
    fast = kernels()
    assert fast is not None
    pointers = (ctypes.c_void_p(made.address), ctypes.c_void_p(values.data_ptr()))
    fast.library.diloco_digest(fast.level, *pointers, ctypes.c_int64(4 * values.numel()))


@pytest.mark.parametrize("level", NATIVE)
def test_it_is_that_of_the_library(level: str) -> None:
    for numel in SIZES:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        for part in (SUM_BLOCK, 2048, 100 * SUM_BLOCK):
            made = KernelDigest(4 * numel)
            with running(level):
                for start in range(0, numel, part):
                    take(made, values[start : start + part])
            assert made.text() == digest_of(values.numpy().data), (numel, part)


def test_there_is_one_only_where_the_kernels_have_its_form() -> None:
    assert hashing_kernels(BYTES_MIN, "") is not None
    assert hashing_kernels(BYTES_MIN - 1, "") is None
    assert hashing_kernels(BYTES_MIN, "xxh3:" + "0" * 32) is not None
    assert hashing_kernels(BYTES_MIN, "0" * 64) is None, "SHA-256 is what is asked for"


def test_a_digest_of_a_part_is_none() -> None:
    made = KernelDigest(4 * 2048)
    take(made, torch.zeros(1024))
    with pytest.raises(AssertionError):
        made.text()
