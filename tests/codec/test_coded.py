"""A payload stands for the values that it decodes to."""

from __future__ import annotations

import torch

from diloco.codec.registry import Coded, coded, make_codec, values_of
from tests.codec.test_ranged import same


def test_values_and_payloads_stand_for_each_other() -> None:
    values = torch.randn(333, generator=torch.Generator().manual_seed(1))
    codec = make_codec("int4")
    held = Coded(codec, codec.encode(values), 333)
    assert same(values_of(held), codec.decode(codec.encode(values), 333))
    assert coded(held) is held
    assert values_of(values) is values
    assert coded(values).codec.lossless
    assert same(coded(values).values(), values)
