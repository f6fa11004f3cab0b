"""Parts, differences and accumulation: the same bits as whole tensors, however they are cut."""

from __future__ import annotations

import itertools

import pytest
import torch

from diloco.codec.base import (
    Add,
    Carry,
    Codec,
    DecodeError,
    NonFiniteError,
    PlainCodec,
    Towards,
    accumulate_into,
    bytes_of,
)
from diloco.codec.registry import make_codec
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.codec.test_contract import PLAIN, STAGED, samples

NUMELS = [0, 1, 2, 31, 33, 127, 129, 4099, 262_147]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of a zero too."""
    return torch.equal(bits(a), bits(b))


def room(codec: Codec, numel: int) -> torch.Tensor:
    """A payload's memory, dirty, with a guard of 64 bytes behind it."""
    return torch.full((codec.payload_bytes_max(numel) + 64,), 0xA5, dtype=torch.uint8)


def cuts(codec: PlainCodec, numel: int, seed: int) -> list[int]:
    """Bounds of ranges, at multiples of the granule, drawn from ``seed``."""
    blocks = numel // codec.granule
    drawn = torch.randint(0, blocks + 1, (4,), generator=torch.Generator().manual_seed(seed)) * codec.granule
    return sorted({0, numel, *drawn.tolist()})


@pytest.mark.parametrize("name", PLAIN)
def test_encode_into_is_encode(name: str) -> None:
    codec = make_codec(name).plain
    for kind, values in samples(1).items():
        expected = codec.encode(values)
        for in_place in (False, True):
            given, payload = values.clone(), room(codec, values.numel())
            decoded = given if in_place else torch.full_like(values, 7.0)
            codec.encode_into((given,), payload, decoded)
            length = codec.payload_bytes(values.numel())
            assert bytes_of(payload[:length]) == expected, (name, kind)
            assert same(decoded, codec.decode(expected, values.numel())), (name, kind)
            assert in_place or same(given, values), (name, kind)
            assert bool((payload[codec.payload_bytes_max(values.numel()) :] == 0xA5).all()), (name, kind)


@pytest.mark.parametrize("name", PLAIN)
def test_a_difference_is_encoded_as_if_it_were_made_first(name: str) -> None:
    codec = make_codec(name).plain
    for numel in NUMELS:
        generator = torch.Generator().manual_seed(numel)
        base = torch.randn(numel, generator=generator)
        local = base - torch.randn(numel, generator=generator) * 1e-3
        expected = codec.encode(base - local)
        payload, decoded = room(codec, numel), torch.empty(numel)
        codec.encode_into((base, local), payload, decoded)
        length = codec.payload_bytes(numel)
        assert bytes_of(payload[:length]) == expected, numel
        assert same(decoded, codec.decode(expected, numel)), numel
        into_local = local.clone()
        codec.encode_into((base, into_local), payload, into_local)
        assert same(into_local, decoded), numel


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_in_flight_and_what_is_carried(name: str) -> None:
    codec, numel = make_codec(name).plain, 5001
    base, local, first, second, residual = torch.randn(5, numel, generator=torch.Generator().manual_seed(2))
    payload, decoded = room(codec, numel), torch.empty(numel)
    codec.encode_into((base, local, first, second), payload)
    length = codec.payload_bytes(numel)
    assert bytes_of(payload[:length]) == codec.encode(pseudo_gradient(base, local, [first, second]))
    carry = Carry(residual.clone(), 0.95)
    codec.encode_into((base, local, first), payload, decoded, carry=carry)
    owed = pseudo_gradient(base, local, [first]) + residual * 0.95
    assert bytes_of(payload[:length]) == codec.encode(owed)
    assert same(decoded, codec.decode(codec.encode(owed), numel))
    assert same(carry.residual, owed - decoded)


@pytest.mark.parametrize("name", PLAIN)
def test_ranges_give_the_bytes_of_the_whole(name: str) -> None:
    codec = make_codec(name).plain
    for numel in NUMELS:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        other = torch.randn(numel, generator=torch.Generator().manual_seed(numel + 1))
        expected = codec.encode(values)
        for seed in range(2):
            bounds = cuts(codec, numel, seed)
            whole, difference = room(codec, numel), room(codec, numel)
            decoded = torch.empty(numel)
            for start, stop in reversed(list(itertools.pairwise(bounds))):
                part = slice(start, stop)
                codec.encode_into((values[part],), whole, decoded[part], start=start, numel=numel)
                codec.encode_into((values[part], other[part]), difference, start=start, numel=numel)
            if numel:
                assert bytes_of(whole[: len(expected)]) == expected, f"{numel} values, seed {seed}"
                assert bytes_of(difference[: len(expected)]) == codec.encode(values - other), (
                    f"{numel} values, seed {seed}"
                )
                assert same(decoded, codec.decode(expected, numel)), f"{numel} values, seed {seed}"


@pytest.mark.parametrize("name", PLAIN)
def test_ranges_decode_and_accumulate(name: str) -> None:
    codec = make_codec(name).plain
    for numel in NUMELS:
        payload = codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
        whole = codec.decode(payload, numel)
        held = torch.randn(numel, generator=torch.Generator().manual_seed(numel + 1))
        for accumulate in (None, Add(), Towards(0.3), Towards(1.0)):
            expected = held.clone()
            accumulate_into(expected, whole, accumulate)
            for seed in range(2):
                bounds = cuts(codec, numel, seed)
                found = held.clone()
                for start, stop in itertools.pairwise(bounds):
                    codec.decode_into(payload, numel, found[start:stop], start, accumulate)
                assert same(found, expected), f"{numel} values, {accumulate}, seed {seed}"


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_opened_and_closed_are_the_entropy_stage(name: str) -> None:
    codec = make_codec(name)
    for values in (torch.randn(5000, generator=torch.Generator().manual_seed(1)), torch.zeros(5000), torch.zeros(0)):
        payload = codec.encode(values)
        inside, raw = codec.opened(payload, values.numel())
        assert inside == codec.plain
        assert bytes(raw) == codec.plain.encode(values)
        assert codec.closed(torch.tensor(list(raw), dtype=torch.uint8)) == payload
        with pytest.raises(DecodeError):
            codec.opened(payload + b"1234", values.numel())


def test_what_is_stored_raw_is_opened_without_a_copy() -> None:
    held = bytearray(make_codec("int4").encode(torch.randn(5000)))
    _, raw = make_codec("int4").opened(memoryview(held), 5000)
    held[7] ^= 0xFF
    assert raw[7] == held[7]
    flagged = bytearray(b"\0" + held)
    _, raw = make_codec("int4+zstd").opened(memoryview(flagged), 5000)
    flagged[8] ^= 0xFF
    assert raw[7] == flagged[8]


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_finite_is_refused_here_too(name: str) -> None:
    codec = make_codec(name).plain
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.zeros(300_001)
        values[299_000] = bad
        with pytest.raises(NonFiniteError):
            codec.encode_into((values,), room(codec, values.numel()))
        with pytest.raises(NonFiniteError):
            codec.encode_into((torch.zeros_like(values), values), room(codec, values.numel()))
    far = torch.full((3,), 3e38)
    with pytest.raises(NonFiniteError):
        codec.encode_into((far, -far), room(codec, 3))


def test_a_range_is_checked_for_its_own_bytes_only() -> None:
    codec = make_codec("int4:32").plain
    payload = bytearray(codec.encode(torch.randn(128, generator=torch.Generator().manual_seed(0))))
    payload[1] = 0xFF  # the first block's scale
    codec.decode_into(memoryview(payload), 128, torch.empty(96), 32)
    with pytest.raises(DecodeError):
        codec.decode_into(memoryview(payload), 128, torch.empty(32), 0)


def test_what_is_no_range_is_our_own_mistake() -> None:
    codec, values = make_codec("int4:32").plain, torch.zeros(128)
    payload = codec.encode(values)
    for start, count in ((1, 32), (0, 33), (-32, 32), (96, 64)):
        with pytest.raises(AssertionError):
            codec.decode_into(payload, 128, torch.empty(count), start)
    with pytest.raises(AssertionError, match="room for"):
        codec.encode_into((values,), torch.empty(len(payload) - 1, dtype=torch.uint8))


@pytest.mark.parametrize("name", PLAIN)
def test_the_pieces_of_a_range_are_its_own_payload(name: str) -> None:
    codec = make_codec(name).plain
    for numel in NUMELS:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        payload = codec.encode(values)
        for start, stop in itertools.pairwise(cuts(codec, numel, numel)):
            sections = codec.sections(numel, start, stop)
            joined = b"".join(payload[offset : offset + length] for offset, length in sections)
            assert sum(length for _, length in sections) == codec.payload_bytes(stop - start), (name, start, stop)
            assert joined == codec.encode(values[start:stop]), (name, numel, start, stop)
            assert same(codec.decode(joined, stop - start), codec.decode(payload, numel)[start:stop])
