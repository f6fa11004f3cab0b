"""e3m0, int2 and sign on the device: every pass that a site needs, against the plain codec."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.base import NonFiniteError
from diloco.codec.blocks import BlockCodec
from diloco.codec.gpu import DeviceBlocks, Launch, new_fault
from diloco.codec.registry import make_codec
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.codec.test_gpu import apart, assert_same, payload_bytes

LAUNCH = Launch(program_values=2048, num_warps=4)


def grid(name: str) -> DeviceBlocks:
    codec = make_codec(name)
    assert isinstance(codec, BlockCodec)
    return DeviceBlocks(codec, LAUNCH)


@pytest.mark.parametrize("name", ["e3m0", "int2:40", "sign"])
@pytest.mark.parametrize("num_sent", [0, 2, 3])
def test_the_difference_is_that_of_the_plain_pass(name: str, num_sent: int, kernel_device: torch.device) -> None:
    there, numel = grid(name), 1300
    parts = torch.randn(2 + num_sent, numel, generator=torch.Generator().manual_seed(num_sent)).unbind()
    expected = there.codec.encode(pseudo_gradient(parts[0], parts[1], parts[2:]))
    payload, fault = there.payload(numel, kernel_device), new_fault(kernel_device)
    decoded = torch.empty(numel, device=kernel_device)
    base, local, *sent = (each.to(kernel_device, copy=True) for each in parts)
    there.encode((base, local, *sent), payload, fault, decoded)
    there.check(int(fault))
    assert payload_bytes(payload) == expected
    assert_same(decoded, there.codec.decode(expected, numel), "decoded")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, warns of what the fault tells
@pytest.mark.parametrize("name", ["e3m0", "int2", "sign"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_told(name: str, bad: float, kernel_device: torch.device) -> None:
    there, values, fault = grid(name), torch.ones(300), new_fault(kernel_device)
    values[299] = bad
    with pytest.raises(NonFiniteError) as plain:
        there.codec.encode(values)
    there.encode((values.to(kernel_device),), there.payload(300, kernel_device), fault)
    with pytest.raises(NonFiniteError) as told:
        there.check(int(fault))
    assert str(told.value) == str(plain.value)


# --- The bytes of e3m0, int2 and sign from the kernel, for values of every kind --------------------------------------

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
