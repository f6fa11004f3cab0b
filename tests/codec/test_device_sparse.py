"""topk on the device: every pass that a site needs, against the plain codec."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.base import NonFiniteError
from diloco.codec.gpu import DeviceTopK, Launch, new_fault
from diloco.codec.registry import make_codec
from diloco.codec.topk import TopKCodec
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.codec.test_gpu import assert_same, payload_bytes


def topk(name: str) -> DeviceTopK:
    codec = make_codec(name)
    assert isinstance(codec, TopKCodec)
    return DeviceTopK(codec, Launch(program_values=4096, num_warps=4))


@pytest.mark.parametrize("num_sent", [0, 1, 3])
def test_the_difference_is_that_of_the_plain_pass(num_sent: int, kernel_device: torch.device) -> None:
    there, numel = topk("topk:256x16"), 1300
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
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_what_is_not_finite_is_told(bad: float, kernel_device: torch.device) -> None:
    there, values, fault = topk("topk:256x16"), torch.ones(300), new_fault(kernel_device)
    values[299] = bad
    there.encode((values.to(kernel_device),), there.payload(300, kernel_device), fault)
    with pytest.raises(NonFiniteError, match="topk:256x16 was to encode a NaN or an infinity"):
        there.check(int(fault))


# --- What the kernel keeps of a chunk is what the definition keeps, whatever the values are --------------------------

FP32_MAX = torch.finfo(torch.float32).max
NUMELS = {"topk": 4099, "topk:256x4": 259, "topk:256x64": 259, "topk:4096x1024": 4099}
"""Whole chunks, and three values more."""
NAMES = tuple(NUMELS)
SHAPES = [
    "topk:256x4",
    "topk:4096x1024",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("topk", "topk:256x64")),
]


def assert_encodes(name: str, values: torch.Tensor, device: torch.device, why: str) -> None:
    there, numel = topk(name), values.numel()
    payload, fault = there.payload(numel, device).fill_(0xA5), new_fault(device)
    decoded = torch.full((numel,), torch.nan, device=device)
    there.encode((values.to(device),), payload, fault, decoded)
    there.check(int(fault))
    expected = there.codec.encode(values)
    assert payload_bytes(payload) == expected, f"{name}: {why}"
    assert_same(decoded, there.codec.decode(expected, numel), f"{name}: {why}")


@pytest.mark.parametrize("name", SHAPES)
def test_sizes(name: str, kernel_device: torch.device) -> None:
    """A short chunk keeps fewer, and of 1, 2 or 3 values all: then the last byte is not full."""
    for numel in (1, 3, 256, NUMELS[name]):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
        assert_encodes(name, values, kernel_device, f"{numel} values")


@pytest.mark.parametrize("name", SHAPES)
def test_equal_values_are_kept_from_the_first(name: str, kernel_device: torch.device) -> None:
    random = torch.Generator().manual_seed(3)
    few = torch.randint(-2, 3, (NUMELS[name],), generator=random).to(torch.float32)
    for values in (
        few,
        torch.zeros(256),
        torch.full((NUMELS[name] - 3,), -1.5),
        few * 2.0**-149,
        torch.eye(64).view(-1)[: NUMELS[name]],
    ):
        assert_encodes(name, values, kernel_device, f"{values[:4].tolist()}...")


@pytest.mark.parametrize("name", NAMES)
def test_any_finite_bits(name: str, kernel_device: torch.device) -> None:
    bits = torch.randint(-(2**31), 2**31, (5001,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    values = bits.view(torch.float32)
    assert_encodes(name, torch.where(torch.isfinite(values), values, -0.0), kernel_device, "any bits")


def test_the_largest_values(kernel_device: torch.device) -> None:
    values = torch.full((4096,), FP32_MAX)
    values[::2] = -FP32_MAX / 2
    assert_encodes("topk", values, kernel_device, "near the top")
