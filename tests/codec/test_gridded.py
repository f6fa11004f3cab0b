"""What all codecs of fields share: no two payloads mean the same, and a range looks at its own bytes."""

from __future__ import annotations

import random

import pytest
import torch

from diloco.codec.base import DecodeError
from diloco.codec.registry import make_codec

NAMES = ["e3m0:8", "int2:8", "sign:8", "topk:256x4", "topk:256x64", "topk:4096x64"]


@pytest.mark.parametrize("name", NAMES)
def test_no_two_payloads_mean_the_same(name: str) -> None:
    """Whatever is changed in a payload is refused or changes a value."""
    codec = make_codec(name)
    for seed in range(300):
        rng = random.Random(seed)
        numel = rng.choice([9, 300, 520])
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        values[torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < rng.choice([0, 0.5, 0.95])] = 0.0
        good = codec.encode(values)
        decoded = codec.decode(good, numel)
        damaged = bytearray(good)
        damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        try:
            other = codec.decode(bytes(damaged), numel)
        except DecodeError:
            continue
        assert not torch.equal(other, decoded), f"{name}, seed {seed}"
        assert not bool((other.view(torch.int32) == -(2**31)).any()), f"{name}, seed {seed}: a minus zero"


@pytest.mark.parametrize("name", ["e3m0:8", "int2:8", "sign:8"])
def test_a_range_is_checked_for_its_own_bytes_only(name: str) -> None:
    codec = make_codec(name).plain
    payload = bytearray(codec.encode(torch.randn(64, generator=torch.Generator().manual_seed(0))))
    width = 1 if name.startswith("e3m0") else 2
    payload[:width] = b"\xff" * width
    codec.decode_into(memoryview(payload), 64, torch.empty(56), 8)
    with pytest.raises(DecodeError):
        codec.decode_into(memoryview(payload), 64, torch.empty(8), 0)


@pytest.mark.parametrize("name", ["e3m0:0", "int2:12", "sign:4104"])
def test_block_is_checked(name: str) -> None:
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 4096"):
        make_codec(name)
