"""e3m0, int2 and sign on the device: every pass that a site needs, against the plain codec."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.base import NonFiniteError
from diloco.codec.blocks import BlockCodec
from diloco.codec.gpu import DeviceBlocks, Launch, new_fault
from diloco.codec.registry import make_codec
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.codec.test_device import assert_same, payload_bytes

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
