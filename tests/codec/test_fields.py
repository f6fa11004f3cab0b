"""Fields in bytes."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.base import DecodeError, pack, packed_bytes, unpack
from tests.codec.slow import packed


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 8, 9, 1001])
def test_against_one_large_number(bits: int, numel: int) -> None:
    fields = torch.randint(0, 2**bits, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.uint8)
    found = pack(fields, bits)
    assert bytes(found.tolist()) == packed(fields.tolist(), bits), f"seed {numel}"
    assert found.numel() == packed_bytes(numel, bits)
    assert torch.equal(unpack(found, numel, bits, "x"), fields)


def test_what_fills_up_the_last_byte_is_nothing() -> None:
    with pytest.raises(DecodeError, match="x payload holds something behind its last value"):
        unpack(torch.tensor([0b1000_0000], dtype=torch.uint8), 7, 1, "x")
    assert unpack(torch.tensor([0b0100_0000], dtype=torch.uint8), 7, 1, "x").tolist() == [0] * 6 + [1]
