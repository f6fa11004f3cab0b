"""The bytes of e3m0, int2 and sign from the kernel, for values of every kind."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.gpu import new_fault
from tests.codec.test_device import apart, assert_same, payload_bytes
from tests.codec.test_device_grids import grid

FP32_MAX = torch.finfo(torch.float32).max
NAMES = ("e3m0", "e3m0:24", "int2", "int2:8", "sign", "sign:512")


def assert_encodes(name: str, values: torch.Tensor, device: torch.device, why: str) -> None:
    there, numel = grid(name), values.numel()
    payload, fault = there.payload(numel, device).fill_(0xA5), new_fault(device)
    decoded = torch.full((numel,), torch.nan, device=device)
    there.encode((values.to(device),), payload, fault, decoded)
    there.check(int(fault))
    expected = there.codec.encode(values)
    assert payload_bytes(payload) == expected, f"{name}: {why}"
    assert_same(decoded, there.codec.decode(expected, numel), f"{name}: {why}")


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str, kernel_device: torch.device) -> None:
    for numel in (1, 511, 1051):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
        assert_encodes(name, values, kernel_device, f"{numel} values")


@pytest.mark.parametrize("name", NAMES)
def test_any_finite_bits(name: str, kernel_device: torch.device) -> None:
    bits = torch.randint(-(2**31), 2**31, (2001,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    values = bits.view(torch.float32)
    assert_encodes(name, torch.where(torch.isfinite(values), values, -0.0), kernel_device, "any bits")


@pytest.mark.parametrize("name", NAMES)
def test_corners(name: str, kernel_device: torch.device) -> None:
    """Each in blocks of its own."""
    least = 2.0**-149
    corners = (
        [0.0, -0.0] * 40,
        [least, -least],
        [FP32_MAX, -FP32_MAX, FP32_MAX / 3],
        [-FP32_MAX] * 9 + [1.0] * 300,
        [1.5, 3.0, 0.75, -1.5, 1.4999999, 1.0, -96.0],  # ties of e3m0
        [2.0**-126, 2.0**-127, -(2.0**-126)] * 5,
        [1.0] * 16 + [-1.0] * 16 + [0.0] * 5,
        [5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    )
    assert_encodes(name, apart(corners, grid(name).codec.block), kernel_device, "corners")
