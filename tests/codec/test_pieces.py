"""A site's passes over a model in pieces: the bits of the definitions, with kernels of every level and without."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from diloco.codec.base import DecodeError, NonFiniteError, digest
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import Coded, make_codec
from diloco.codec.site_pass import rebase_pieces, seal_pieces
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from tests.codec.levels import ALL, running
from tests.codec.test_contract import samples
from tests.codec.test_ranged import same

SIZES = [[1], [0, 17], [4096], [1, 1, 4095, 0, 3], [2048, 2048, 2049], [5000, 1, 333, 7000]]
SENT = [[], ["int4:32"], ["int8", "fp32", "topk:256x8"]]


def draw(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def in_flight(names: list[str], numel: int) -> list[Coded]:
    codecs = [make_codec(name) for name in names]
    return [Coded(codec, codec.encode(draw(numel, 50 + at, 1e-3)), numel) for at, codec in enumerate(codecs)]


def cut(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Pieces with memory of their own, at places that are no multiple of anything."""
    return [torch.cat([torch.zeros(at % 3), each])[at % 3 :] for at, each in enumerate(values.split(sizes))]


@pytest.mark.parametrize("codec_name", ["int4:32", "int8", "bf16", "fp32", "topk:256x8", "e3m0"])
@pytest.mark.parametrize("sent", SENT, ids=len)
def test_what_is_sealed_is_the_pseudo_gradient(codec_name: str, sent: list[str]) -> None:
    codec = make_codec(codec_name)
    for sizes in [*SIZES, [RANGE_VALUES, 1001]]:
        numel = sum(sizes)
        base, held = draw(numel, 1), in_flight(sent, numel)
        local = base - draw(numel, 2, 1e-3)
        pieces = cut(local, sizes)
        wanted = codec.encode(pseudo_gradient(base, local, [each.values() for each in held]))
        decoded, norms = codec.decode(wanted, numel), set()
        for level in ALL:
            payload = torch.full((codec.payload_bytes(numel),), 0xA5, dtype=torch.uint8)
            with running(level):
                found = seal_pieces(pieces, base, held, codec, payload)
            assert payload.numpy().tobytes() == wanted, (sizes, level)
            assert found.digest == digest(decoded)
            norms.add(found.norm)
        assert norms.pop() == pytest.approx(float(decoded.double().norm()), rel=1e-9, abs=1e-12)
        assert same(torch.cat(pieces), local), "the model was written to"


def test_values_of_every_kind_are_sealed_as_they_are_encoded() -> None:
    codec = make_codec("int4:32")
    for kind, values in samples(5).items():
        numel = values.numel()
        if not numel:
            continue
        wanted = codec.encode(values)
        for level in ALL:
            payload = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
            with running(level):
                seal_pieces([torch.zeros(numel)], values, [], codec, payload)
            assert payload.numpy().tobytes() == wanted, kind


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_not_sealed(bad: float) -> None:
    codec, local = make_codec("int4"), torch.zeros(5000)
    local[4321] = bad
    for level in ALL:
        payload = torch.empty(codec.payload_bytes(5000), dtype=torch.uint8)
        with running(level), pytest.raises(NonFiniteError):
            seal_pieces([local], torch.zeros(5000), [], codec, payload)


@pytest.mark.parametrize("merged", SENT, ids=len)
def test_a_version_is_taken_as_rebase_defines(merged: list[str]) -> None:
    for sizes in [*SIZES, [RANGE_VALUES, 1001]]:
        numel = sum(sizes)
        old, new, held = draw(numel, 3), draw(numel, 4), in_flight(merged, numel)
        local = old - draw(numel, 5, 1e-3)
        wanted = rebase(local, old, new, [each.values() for each in held])
        before = [old.clone(), new.clone()]
        for level in ALL:
            pieces = cut(local, sizes)
            with running(level):
                rebase_pieces(pieces, old, new, held)
            assert same(torch.cat(pieces), wanted), (sizes, level)
        assert same(old, before[0])
        assert same(new, before[1])


def test_nothing_trained_is_the_new_base_with_its_zeros() -> None:
    old, new = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([-0.0, 0.0, -0.0])
    for level in ALL:
        local = old.clone()
        with running(level):
            rebase_pieces([local], old, new, [])
        assert same(local, new)


def test_a_payload_that_nobody_made_is_refused() -> None:
    codec = make_codec("int4:32")
    payload = bytearray(codec.encode(torch.ones(64)))
    payload[1] |= 0x80  # A negative scale.
    ruined = Coded(codec, memoryview(payload), 64)
    for level in ALL:
        with running(level), pytest.raises(DecodeError):
            rebase_pieces([torch.zeros(64)], torch.zeros(64), torch.zeros(64), [ruined])
