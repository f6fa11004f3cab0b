"""Memory is used again when nobody can read it any more, and never before."""

from __future__ import annotations

import gc
import hashlib
import random
import struct
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch

from diloco.codec.base import (
    ALIGNMENT,
    Buffers,
    DecodeError,
    Hasher,
    NonFiniteError,
    check_scales,
    digest_of,
    digits,
    is_negative,
    is_sha256,
    level_values,
    magnitudes,
    mean_scale,
    pack,
    packed_bytes,
    scale_values,
    shorter,
    two_levels,
    units,
    unpack,
)
from diloco.codec.registry import make_codec
from tests.codec.slow import packed, slow_scale, slow_units
from tests.codec.test_contract import samples

NUMEL = 5000


def test_memory_comes_back_when_its_tensor_is_gone() -> None:
    buffers = Buffers(2)
    first = buffers.values(NUMEL).fill_(1.0)
    at = first.data_ptr()
    assert at % ALIGNMENT == 0
    assert buffers.values(NUMEL).data_ptr() != at, "it is in use"
    del first
    taken = {buffers.values(NUMEL).data_ptr() for _ in range(3)}
    held = [buffers.values(NUMEL) for _ in range(2)]
    assert at in taken | {each.data_ptr() for each in held}


@pytest.mark.parametrize(
    "reader",
    [
        lambda values: values[7:9],
        lambda values: values.view(torch.uint8),
        lambda values: values.detach().view(-1, 2)[1],
        lambda values: values.numpy(),
        lambda values: values.numpy()[3:4].view(np.uint8),
        lambda values: values.numpy().data,
        lambda values: memoryview(values.numpy().data)[4:8],
        lambda values: torch.from_numpy(values.numpy()[1:2]),
        lambda values: torch.frombuffer(values.numpy().data, dtype=torch.float32)[2:],
        lambda values: {"held": (values,)},
    ],
)
def test_memory_stays_with_whatever_can_still_read_it(reader: object) -> None:
    buffers = Buffers(8)
    values = buffers.values(NUMEL)
    at = values.data_ptr()
    held = reader(values)  # type: ignore[operator]
    del values
    gc.collect(1)  # What was made here is young; all that a run of tests has imported is not.
    assert buffers.spare_bytes == 0
    others = [buffers.values(NUMEL).fill_(-1.0) for _ in range(4)]
    assert at not in [each.data_ptr() for each in others]
    del held
    gc.collect(1)
    assert buffers.values(NUMEL).data_ptr() == at


def test_a_tensor_that_refers_to_itself_gives_its_memory_back_when_it_is_collected() -> None:
    buffers = Buffers(2)
    values = buffers.values(NUMEL)
    knot: list[object] = [values]
    knot.append(knot)
    del values, knot
    gc.collect(1)
    assert buffers.spare_bytes > 0


def test_no_more_than_the_bound_lies_idle() -> None:
    buffers = Buffers(2)
    held = [buffers.values(NUMEL) for _ in range(5)]
    held.clear()
    assert buffers.spare_bytes == 2 * (4 * NUMEL + ALIGNMENT)
    assert Buffers(0).values(NUMEL).numel() == NUMEL


def test_memory_that_is_too_short_or_far_too_long_is_not_used_and_one_piece_of_it_is_let_go() -> None:
    buffers = Buffers(3)
    held = [buffers.raw(size) for size in (100, 10_000)]
    short, long = (each.data_ptr() for each in held)
    held.clear()
    assert buffers.raw(9_000).data_ptr() == long
    assert buffers.raw(100).data_ptr() == short
    held = [buffers.raw(1000)]
    assert held[0].data_ptr() not in (short, long)
    assert buffers.spare_bytes == 100 + ALIGNMENT, "the longer one was idle for longer"


def test_sizes_and_types_are_as_asked_for() -> None:
    buffers = Buffers(2)
    for numel in (0, 1, 3, 257):
        values, raw = buffers.values(numel), buffers.raw(numel)
        assert (values.shape, values.dtype) == ((numel,), torch.float32)
        assert (raw.shape, raw.dtype) == ((numel,), torch.uint8)
        assert buffers.like(values).shape == values.shape


def test_threads_that_take_and_drop_never_share_memory() -> None:
    buffers, damage = Buffers(4), []

    def work(mine: int) -> None:
        for turn in range(300):
            one, two = buffers.values(NUMEL + turn % 3), buffers.values(NUMEL)
            one.fill_(mine)
            two.fill_(-mine)
            if float(one.sum()) != mine * one.numel() or float(two.sum()) != -mine * NUMEL:
                damage.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert damage == []


DATA = random.Random(4).randbytes(100_003)
SHA256 = hashlib.sha256(DATA).hexdigest()


def test_the_form_of_today_is_known_to_the_bit() -> None:
    """From the reference vectors of XXH3: files that were written today are to be read in ten years."""
    assert digest_of(b"") == "xxh3:99aa06d3014798d86001c324468d497f"
    assert digest_of(b"diloco") == digest_of(bytearray(b"diloco")) == digest_of(memoryview(b"diloco"))
    assert len(digits(digest_of(DATA))) == 32


@pytest.mark.parametrize("like", ["", "xxh3:" + "0" * 32, "0" * 64])
@pytest.mark.parametrize("piece", [1, 240, 241, 65_536, 100_003])
def test_pieces_make_the_same_as_the_whole_in_either_form(like: str, piece: int) -> None:
    data = DATA[: 50 * piece]
    found = Hasher(like)
    for begin in range(0, len(data), piece):
        found.update(memoryview(data)[begin : begin + piece])
    assert found.text() == digest_of(data, like)
    assert is_sha256(found.text()) == (like == "0" * 64)


def test_the_form_of_earlier_versions_is_sha256() -> None:
    assert digest_of(DATA, like=SHA256) == SHA256
    assert is_sha256(SHA256)
    assert not is_sha256("")
    assert (digits(SHA256), shorter(SHA256)) == (SHA256, SHA256[:12])
    assert shorter(digest_of(b"")) == "xxh3:99aa06d30147"


def test_every_flipped_bit_changes_it() -> None:
    data, found = bytearray(DATA[:300]), set()
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        found.add(digest_of(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * len(data)
    assert digest_of(data) not in found


# --- Fields in bytes -------------------------------------------------------------------------------------------------


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


# --- Two levels ------------------------------------------------------------------------------------------------------

INT2 = make_codec("int2:8")


def levels_of(values: list[float], is_big: list[bool]) -> list[float]:
    rows = torch.tensor([values])
    found, top = units(magnitudes(rows, "x"))
    levels, fields = two_levels(found.to(torch.int64), top, torch.tensor([is_big]), rows < 0)
    return [float(x) for x in level_values(levels, fields)[0]]


def test_means_of_both_kinds() -> None:
    assert levels_of([1.0, -3.0, 10.0, -20.0], [False, False, True, True]) == [2, -2, 15, -15]
    assert levels_of([0.0, -0.0, 10.0, -0.0], [False, False, True, False]) == [0, 0, 10, 0]


def test_levels_that_are_equal_as_bf16_are_one() -> None:
    assert levels_of([1.0, 1.001], [False, True]) == [1, 1]


@pytest.mark.parametrize(
    ("low", "high", "fields", "why"),
    [
        (0x8000, 0, 0, "negative"),
        (0x7F80, 0, 0, "not finite"),
        (0, 0x7FC0, 1, "not finite"),
        (0x0001, 0, 0, "subnormal"),
        (0x3F80, 0x3F80, 1, "levels"),
        (0x3F80, 0x3F00, 1, "levels"),
        (0x3F80, 0x4000, 0, "levels"),
        (0x3F80, 0x4000, 0x5555, "levels"),
        (0x3F80, 0, 1, "levels"),
        (0, 0, 2, "sign without a value"),
        (0, 0x3F80, 9, "sign without a value"),
        (0, 0x3F80, 3, None),
    ],
)
def test_what_is_never_made_is_refused(low: int, high: int, fields: int, why: str | None) -> None:
    payload = struct.pack("<3H", low, high, fields)
    if why is None:
        assert INT2.decode(payload, 8).tolist() == [-1] + [0] * 7
        return
    with pytest.raises(DecodeError, match=why):
        INT2.decode(payload, 8)


def test_a_short_last_block_of_large_ones_is_refused_too() -> None:
    with pytest.raises(DecodeError, match="levels"):
        INT2.decode(struct.pack("<2HB", 0x3F00, 0x3F80, 0b0101), 2)


# --- Magnitudes as whole numbers, and the scales made of them --------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(samples(0)))
def test_against_exact_arithmetic(kind: str) -> None:
    rows = samples(0)[kind][: 24 * 17].view(24, 17)
    found, top = units(magnitudes(rows, "x"))
    scales = mean_scale(found.sum(dim=1, dtype=torch.int64) * 5, torch.full((24,), 17 * 8), top)
    for row, mine, scale in zip(rows.tolist(), found.tolist(), scales.tolist(), strict=True):
        expected, unit = slow_units(row)
        assert mine == expected
        assert scale == slow_scale(Fraction(5 * sum(expected), 8 * 17), unit)[0]
    assert bool((scale_values(scales) <= rows.abs().amax(dim=1).clamp(min=2.0**-126)).all())


def test_a_mean_is_nothing_only_where_all_are() -> None:
    rows = torch.tensor([[1.0] + [0.0] * 4095, [2.0**-126] + [0.0] * 4095, [2.0**-127] * 4096, [-0.0] * 4096])
    found, top = units(magnitudes(rows, "x"))
    scales = scale_values(mean_scale(found.sum(dim=1, dtype=torch.int64), torch.full((4,), 4096), top))
    assert scales.tolist() == [2.0**-12, 2.0**-126, 0.0, 0.0]


def test_minus_zero_is_not_negative_and_a_subnormal_is() -> None:
    assert is_negative(torch.tensor([-0.0, 0.0, -(2.0**-149), 2.0**-149, -1.0])).tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_has_no_magnitude(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="x was to encode a NaN or an infinity"):
        magnitudes(torch.tensor([0.0, bad]), "x")


@pytest.mark.parametrize("bits", [1, 0x7F, 0x7F80, 0x7FC0, -1, -0x8000])
def test_a_scale_that_is_never_made_is_refused(bits: int) -> None:
    with pytest.raises(DecodeError, match="scale"):
        check_scales(torch.tensor([0x3F80, bits]), "x")
    check_scales(torch.tensor([0, 0x80, 0x7F7F]), "x")
