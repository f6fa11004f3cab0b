"""Reading an update by ranges: what is found in it is the same with kernels and without."""

from __future__ import annotations

from math import nan

import pytest
import torch

from diloco.codec.base import DecodeError, NonFinitePayload, digest
from diloco.codec.merging import READ_VALUES, Reading, Sums, sum_of_products
from diloco.codec.registry import make_codec
from tests.codec.levels import ALL, running


@pytest.mark.parametrize("name", ["int4:32", "int8", "fp32", "topk", "e3m0"])
@pytest.mark.parametrize("like", ["", "0" * 64])
def test_what_is_found_is_what_is_in_it(name: str, like: str) -> None:
    codec = make_codec(name).plain
    for numel in (1, 60, 61, 4099, READ_VALUES + 1500):
        values, against = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
        payload = codec.encode(values)
        decoded = codec.decode(payload, numel)
        for level in ALL:
            with running(level):
                reading = Reading(codec, numel, like)
            found = []
            for start, stop in reading.ranges():
                part = against[start:stop] if start else None
                with running(level):
                    found.append(reading.read(payload, numel, start, stop - start, part))
                own = decoded[start:stop]
                assert found[-1].largest == float(own.abs().max())
                assert found[-1].squares == sum_of_products(own, own)
                assert found[-1].products == (0 if part is None else sum_of_products(own, part))
                assert found[-1].against_squares == (0 if part is None else sum_of_products(part, part))
            assert len(found) == len(reading.ranges())
            assert reading.digest() == digest(decoded, like)


def test_a_piece_of_a_payload_is_read_by_itself() -> None:
    """As it is taken out of a file that is still growing."""
    codec, numel = make_codec("int4:32").plain, READ_VALUES + 3000
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    payload, decoded = codec.encode(values), codec.decode(codec.encode(values), numel)
    for level in ALL:
        with running(level):
            reading = Reading(codec, numel)
        for start, stop in reading.ranges():
            piece = b"".join(payload[at : at + length] for at, length in codec.sections(numel, start, stop))
            own = decoded[start:stop]
            assert reading.read(piece, stop - start, 0, stop - start).squares == sum_of_products(own, own)
        assert reading.digest() == digest(decoded)


@pytest.mark.parametrize("numel", [40, 4096])
def test_it_refuses_what_decoding_refuses(numel: int) -> None:
    values = torch.zeros(numel)
    values[7] = nan
    for level in ALL:
        with running(level):
            reading = Reading(make_codec("fp32").plain, numel)
            short = Reading(make_codec("int4").plain, numel)
        with pytest.raises(NonFinitePayload):
            reading.read(values.numpy().tobytes(), numel, 0, numel)
        with pytest.raises(DecodeError):
            short.read(b"abc", numel, 0, numel)
        assert isinstance(short.read(make_codec("int4").encode(torch.ones(numel)), numel, 0, numel), Sums)
