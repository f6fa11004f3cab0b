"""Memory that is used again, digests, and what every codec promises."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import random
import struct
import threading

import pytest
import torch

from diloco.codec.base import (
    ALIGNMENT,
    BYTES_MIN,
    Buffers,
    Codec,
    DecodeError,
    Hasher,
    KernelDigest,
    NonFiniteError,
    PlainCodec,
    bytes_of,
    digest,
    digest_of,
    digits,
    fold_into,
    hashing,
    is_sha256,
    kernels,
    shorter,
)
from diloco.codec.kernel_library import PLAIN as PLAIN_TORCH
from diloco.codec.kernel_library import SUM_BLOCK, Fold
from diloco.codec.registry import make_codec
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.codec.values import ALL, NATIVE, NOT_FINITE, drawn, error_bound, running, same, samples

# --- Memory is used again when nothing can read it, and never before --------------------------------------------------


NUMEL = 5000


@pytest.mark.parametrize(
    "reader",
    [
        lambda values: values.detach().view(-1, 2)[1],
        lambda values: memoryview(values.numpy().data)[4:8],
        lambda values: torch.frombuffer(values.numpy().data, dtype=torch.float32)[2:],
    ],
)
def test_memory_stays_with_whatever_can_still_read_it(reader: object) -> None:
    buffers = Buffers(8)
    values = buffers.values(NUMEL)
    at = values.data_ptr()
    assert at % ALIGNMENT == 0
    held = reader(values)  # type: ignore[operator]
    del values
    gc.collect(1)  # What was made here is young; all that a run of tests has imported is not.
    assert not buffers._spare
    others = [buffers.values(NUMEL).fill_(-1.0) for _ in range(4)]
    assert at not in [each.data_ptr() for each in others]
    del held
    gc.collect(1)
    assert buffers.values(NUMEL).data_ptr() == at


def test_no_more_than_the_bound_lies_idle_and_what_is_too_short_or_far_too_long_is_not_used() -> None:
    buffers = Buffers(2)
    referring: list[object] = [buffers.values(NUMEL) for _ in range(5)]
    referring.append(referring)
    del referring
    gc.collect(1)
    assert sum(each.nbytes for each in buffers._spare) == 2 * (4 * NUMEL + ALIGNMENT)
    assert Buffers(0).values(NUMEL).numel() == NUMEL
    buffers = Buffers(3)
    held = [buffers.raw(size) for size in (100, 10_000)]
    short, long = (each.data_ptr() for each in held)
    held.clear()
    assert buffers.raw(9_000).data_ptr() == long
    assert buffers.raw(100).data_ptr() == short
    held = [buffers.raw(1000)]
    assert held[0].data_ptr() not in (short, long)
    assert sum(each.nbytes for each in buffers._spare) == 100 + ALIGNMENT, "the longer one was idle for longer"


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


# --- Digests ----------------------------------------------------------------------------------------------------------


DATA = random.Random(4).randbytes(100_003)
SHA256 = hashlib.sha256(DATA).hexdigest()


def test_the_forms_of_today_and_of_earlier_versions_are_known_to_the_bit() -> None:
    """From the reference vectors of XXH3: files that were written today are to be read in ten years."""
    assert digest_of(b"") == "xxh3:99aa06d3014798d86001c324468d497f"
    assert digest_of(b"diloco") == digest_of(bytearray(b"diloco")) == digest_of(memoryview(b"diloco"))
    assert len(digits(digest_of(DATA))) == 32
    assert shorter(digest_of(b"")) == "xxh3:99aa06d30147"
    assert digest_of(DATA, like=SHA256) == SHA256
    assert is_sha256(SHA256)
    assert not is_sha256("")
    assert (digits(SHA256), shorter(SHA256)) == (SHA256, SHA256[:12])


@pytest.mark.parametrize("like", ["", "xxh3:" + "0" * 32, "0" * 64])
@pytest.mark.parametrize("piece", [1, 240, 241, 65_536, 100_003])
def test_pieces_make_the_same_as_the_whole_in_either_form(like: str, piece: int) -> None:
    data = DATA[: 50 * piece]
    found = Hasher(like)
    for begin in range(0, len(data), piece):
        found.update(memoryview(data)[begin : begin + piece])
    assert found.text() == digest_of(data, like)
    assert is_sha256(found.text()) == (like == "0" * 64)


def test_a_digest_of_values_is_that_of_their_little_endian_bytes() -> None:
    values, raw = torch.tensor([1.0, -0.0, 2.0**-149]), struct.pack("<3f", 1.0, -0.0, 2.0**-149)
    assert digest(values) == digest_of(raw)
    assert digest(values, like="f" * 64) == hashlib.sha256(raw).hexdigest()
    assert digest(values) != digest(values.abs())


# A stripe of 16 values, a block of 256, a part of 2048: one more and one less, and a rest shorter than a stripe.
SIZES = [61, 64, 255, 256, 257, 271, 272, 273, 1024, 2047, 2048, 2049, 2063, 2064, 2065, 3 * 2048 + 256, 99_999]


@pytest.mark.parametrize("level", NATIVE)
def test_kernels_hash_what_has_their_form_to_the_same_however_it_comes(level: str) -> None:
    with running(level):
        for numel, part in itertools.product(SIZES, (SUM_BLOCK, 2048, 100 * SUM_BLOCK)):
            values, made = drawn(numel, numel), hashing(4 * numel, "")
            assert isinstance(made, KernelDigest)
            for piece in values.split(part):
                pointers = (ctypes.c_void_p(made.address), ctypes.c_void_p(piece.data_ptr()))
                made.kernels.library.diloco_digest(made.kernels.level, *pointers, ctypes.c_int64(4 * piece.numel()))
            assert made.text() == digest_of(values.numpy().data), (numel, part)
        assert isinstance(hashing(BYTES_MIN, "xxh3:" + "0" * 32), KernelDigest)
        assert isinstance(hashing(BYTES_MIN - 1, ""), Hasher)
        assert isinstance(hashing(BYTES_MIN, "0" * 64), Hasher), "SHA-256 is what is asked for"


# --- Every codec: bound, exact length, zeros, refusal of what is not finite -------------------------------------------


PLAIN = ["fp32", "bf16", "int8", "int8:256", "int8:2", "int8:6", "int4", "int4:64", "int4:128", "int4:256", "int4:2"]
PLAIN += ["int4:4094", "e3m0", "e3m0:8", "int2", "int2:24", "int2:32", "int2:4096", "sign", "sign:8", "sign:256"]
PLAIN += ["topk", "topk:256x4", "topk:256x64", "topk:4096x1024", "topk:65536x1024"]
STAGED = ["fp32+zstd", "bf16+zstd1", "int8+zstd3", "int4:32+zstd1", "e3m0+zstd1", "topk+auto", "int8+auto3"]


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_12_error_bound_and_length_and_neither_the_level_nor_the_number_of_threads_shows(name: str) -> None:
    codec = make_codec(name)
    lengths = {f"{numel}": drawn(numel, numel) for numel in (0, 1, 2, 31, 32, 33, 127, 129, 262_144, 262_277)}
    for kind, values in (samples(0) | lengths).items():
        where = f"{name}, {kind}"
        with running(PLAIN_TORCH):
            payload = codec.encode(values)
            decoded = codec.decode(payload, values.numel())
        assert len(payload) <= codec.payload_bytes_max(values.numel()), where
        if name in PLAIN:
            assert len(payload) == codec.payload_bytes(values.numel()), where
        assert decoded.dtype == torch.float32, where
        assert decoded.shape == values.shape, where
        assert bool(decoded.isfinite().all()), where
        error = (decoded.double() - values.double()).abs()
        assert bool((error <= error_bound(codec, values).double()).all()), where
        if codec.lossless:
            assert same(decoded, values), where
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            for level in ALL:
                with running(level):
                    has_none = level == PLAIN_TORCH or name == "topk:65536x1024"
                    assert (kernels(codec.plain) is None) == has_none, (where, level)
                    assert codec.encode(values) == payload, (where, level)
                    assert same(codec.decode(memoryview(payload), values.numel()), decoded), (where, level)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_12_what_is_not_finite_is_never_encoded(name: str, level: str) -> None:
    codec, places = make_codec(name), ((1, 0), (5000, 0), (5000, 2047), (5000, 4999), (300_001, 299_000))
    far = torch.full((3,), 3e38)
    with running(level):
        for (numel, at), bad in itertools.product(places, NOT_FINITE):
            values = torch.zeros(numel)
            values[at] = bad
            with pytest.raises(NonFiniteError, match="NaN or an infinity"):
                codec.encode(values)
            with pytest.raises(NonFiniteError):
                codec.plain.encode_into((torch.zeros(numel), values), room(codec.plain, numel))
        with pytest.raises(NonFiniteError):
            codec.plain.encode_into((far, -far), room(codec.plain, 3))


@pytest.mark.parametrize("name", PLAIN + STAGED)
def test_hostile_payloads(name: str) -> None:
    codec = make_codec(name)

    def decoded(payload: bytes, numel: int, where: object) -> torch.Tensor | None:
        """Finite values, or None for a DecodeError; the same at every level."""
        found: list[torch.Tensor | None] = []
        for level in ALL:
            try:
                with running(level):
                    found.append(codec.decode(payload, numel))
            except DecodeError:
                continue
            except Exception as error:
                raise AssertionError(where) from error
        if not found:
            return None
        assert len(found) == len(ALL), where
        assert found[0].shape == (numel,), where
        assert bool(found[0].isfinite().all()), where
        assert all(same(each, found[0]) for each in found), where
        return found[0]

    numel = 131
    good = codec.encode(drawn(numel, 0))
    for wrong in (numel - 40, numel + 40, 0):
        # top-k keeps as many of some other numbers; how many values there are is said beside the payload.
        assert codec.payload_bytes(wrong) == codec.payload_bytes(numel) or decoded(good, wrong, wrong) is None
    for each in (*(good[:cut] for cut in range(len(good))), good + b"\0", good * 2):
        assert decoded(each, numel, len(each)) is None, len(each)
    outcomes = set()
    for seed in range(150):
        rng = random.Random(seed)
        numel = rng.choice([1, 5, 33, 131, 259, 2051])
        good = codec.encode(drawn(numel, seed))
        noise = rng.randbytes(rng.choice([len(good), codec.payload_bytes(numel), rng.randint(0, 2 * len(good))]))
        if rng.random() < 0.3 and noise:
            noise = bytes([rng.randint(0, 1)]) + noise[1:]
        damaged = bytearray(good)
        for _ in range(rng.randint(0, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randint(0, 255)])
        outcomes |= {decoded(each, numel, f"{name}, seed {seed}") is None for each in (noise, bytes(damaged))}
    assert outcomes == {True, False}


# --- Parts, differences and accumulation: the same bits as whole tensors, however they are cut ------------------------


NUMELS = [0, 1, 2, 31, 33, 127, 129, 2047, 2049, 4099, 262_147]


def room(codec: Codec, numel: int) -> torch.Tensor:
    """A payload's memory, dirty, with a guard of 64 bytes behind it."""
    return torch.full((codec.payload_bytes_max(numel) + 64,), 0xA5, dtype=torch.uint8)


def cuts(codec: PlainCodec, numel: int, seed: int) -> list[int]:
    """Bounds of ranges, at multiples of a block, drawn from ``seed``."""
    blocks = numel // codec.block
    drawn = torch.randint(0, blocks + 1, (4,), generator=torch.Generator().manual_seed(seed)) * codec.block
    return sorted({0, numel, *drawn.tolist()})


@pytest.mark.parametrize("giant", [0.0, 3e38])  # Codes have to be held in the midst of others.
@pytest.mark.parametrize("name", PLAIN)
def test_ranges_of_differences_are_encoded_as_if_they_were_made_first_and_what_is_left_is_kept(
    name: str, giant: float
) -> None:
    """A difference of two has something carried over as well."""
    codec = make_codec(name).plain
    for numel, count in itertools.product(NUMELS, (1, 2, 4)):
        terms = [drawn(numel, numel + at, 1e-3 if at else 1.0) for at in range(count)]
        terms[0][numel // 2 : numel // 2 + 1] += giant
        carried = drawn(numel, numel + 9) if count == 2 else None
        owed = pseudo_gradient(terms[0], terms[1], terms[2:]) if count > 1 else terms[0]
        owed = owed if carried is None else owed + carried * 0.95
        with running(PLAIN_TORCH):
            expected = codec.encode(owed)
            wanted = codec.decode(expected, numel)
        for level in ALL:
            where, payload, place = (numel, count, level), room(codec, numel), min(1, count - 1)
            decoded = terms[place].clone()  # In the place of one of them.
            given = [*terms[:place], decoded, *terms[place + 1 :]]
            with running(level):
                again, left = room(codec, numel), None if carried is None else carried.clone()
                codec.encode_into(given, again, residual=left, beta=0.95)
                assert bytes_of(again[: len(expected)]) == expected, where
                assert left is None or same(left, owed - wanted), where
                for start, stop in reversed(list(itertools.pairwise(cuts(codec, numel, count)))):
                    part = [each[start:stop] for each in given]
                    fed = None if carried is None else carried.clone()[start:stop]
                    codec.encode_into(
                        part, payload, decoded[start:stop], residual=fed, beta=0.95, start=start, numel=numel
                    )
            assert bytes_of(payload[: len(expected)]) == expected, where
            assert bool((payload[len(expected) :] == 0xA5).all()), where
            assert same(decoded, wanted), where


@pytest.mark.parametrize("name", PLAIN)
def test_ranges_are_decoded_and_accumulated_each_from_a_payload_of_its_own(name: str) -> None:
    codec = make_codec(name).plain
    for numel, seed in itertools.product(NUMELS, range(2)):
        where, values, held = f"{numel} values, seed {seed}", drawn(numel, numel), drawn(numel, numel + 1)
        payload = codec.encode(values)
        whole, ranges = codec.decode(payload, numel), list(itertools.pairwise(cuts(codec, numel, seed)))
        folds = ((Fold.WRITE, 0.0), (Fold.ADD, 0.0), (Fold.TOWARDS, 0.3), (Fold.TOWARDS, 1.0))
        for (fold, share), level in itertools.product(folds, ALL):
            expected, found = held.clone(), held.clone()
            fold_into(expected, whole, fold, share)
            with running(level):
                for start, stop in ranges:
                    codec.decode_into(payload, numel, found[start:stop], start, fold, share)
            assert same(found, expected), (where, fold, share, level)
        for start, stop in ranges:
            sections = codec.sections(numel, start, stop)
            joined = b"".join(payload[offset : offset + length] for offset, length in sections)
            assert joined == codec.encode(values[start:stop]), where
            assert same(codec.decode(joined, stop - start), whole[start:stop]), where


def test_what_is_stored_raw_is_opened_without_a_copy_and_what_is_decoded_is_one() -> None:
    held = bytearray(make_codec("int4").encode(torch.randn(5000)))
    _, raw = make_codec("int4").opened(memoryview(held), 5000)
    held[7] ^= 0xFF
    assert raw[7] == held[7]
    flagged = bytearray(b"\0" + held)
    _, raw = make_codec("int4+zstd").opened(memoryview(flagged), 5000)
    flagged[8] ^= 0xFF
    assert raw[7] == flagged[8]
    payload = bytes(8)
    make_codec("fp32").decode(payload, 2).fill_(1.0)
    assert payload == bytes(8)


@pytest.mark.parametrize("name", ["int4:32", "e3m0:8", "int2:8", "sign:8"])
def test_a_range_is_checked_for_its_own_bytes_only(name: str) -> None:
    codec = make_codec(name).plain
    payload, width = bytearray(codec.encode(drawn(128, 0))), 1 if name.startswith("e3m0") else 2
    payload[:width] = b"\xff" * width  # The first block's scale.
    codec.decode_into(memoryview(payload), 128, torch.empty(96), 32)
    with pytest.raises(DecodeError):
        codec.decode_into(memoryview(payload), 128, torch.empty(32), 0)
