from __future__ import annotations

import random
import zlib

import pytest
from xxhash import xxh3_64_intdigest

from diloco.wire.chunks import (
    TAIL_BYTES_MIN,
    Assembler,
    ChunkError,
    ChunkSize,
    DamagedChunk,
    Holes,
    Window,
    bytes_at_risk,
    checksum,
    cut,
    cut_as_asked,
    tail_chunk,
)

SEED = 20
PAYLOAD = random.Random(SEED).randbytes(97)


def assembled(parts: tuple[bytes, ...], chunk_bytes: int, offset: int = 0, held: bytes = b"") -> bytes:
    out = bytearray(held)
    total = sum(map(len, parts))
    assembler = Assembler(total, lambda at, data: out.__setitem__(slice(at, at + len(data)), data), offset)
    for chunk in cut(parts, chunk_bytes, offset):
        assembler.accept(*chunk)
    assembler.finish()
    return bytes(out)


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 96, 97, 98, 1000])
def test_cut_and_assemble_from_every_offset(chunk_bytes: int) -> None:
    for offset in range(len(PAYLOAD) + 1):
        assert assembled((PAYLOAD,), chunk_bytes, offset, PAYLOAD[:offset]) == PAYLOAD


def test_cut_at_every_boundary_of_several_parts() -> None:
    for first in range(len(PAYLOAD) + 1):
        parts = (PAYLOAD[:first], b"", PAYLOAD[first:])
        for offset in (0, 1, first, len(PAYLOAD)):
            assert assembled(parts, 10, offset, PAYLOAD[:offset]) == PAYLOAD
            for _, data, _, _ in cut(parts, 10, offset):
                assert len(data) <= 10


def test_chunks_are_views_with_one_checksum() -> None:
    payload = bytearray(PAYLOAD)
    chunks = list(cut((payload,), 40))
    assert [offset for offset, _, _, _ in chunks] == [0, 40, 80]
    assert all(data.obj is payload for _, data, _, _ in chunks)
    assert all((crc32, xxh3) == (0, xxh3_64_intdigest(data)) for _, data, crc32, xxh3 in chunks)


def test_who_speaks_protocol_2_gets_crc32_and_may_send_it() -> None:
    assert all((crc32, xxh3) == (zlib.crc32(data), None) for _, data, crc32, xxh3 in cut((PAYLOAD,), 40, as_in_2=True))
    out: list[bytes] = []
    assembler = Assembler(len(PAYLOAD), lambda at, data: out.append(bytes(data)))
    for chunk in cut((PAYLOAD,), 40, as_in_2=True):
        assembler.accept(*chunk)
    assert b"".join(out) == PAYLOAD
    assert checksum((PAYLOAD[:30], PAYLOAD[30:])) == zlib.crc32(PAYLOAD)


def test_a_broken_assembly_goes_on_from_its_offset() -> None:
    for stop in range(1, 10):
        out = bytearray(len(PAYLOAD))
        assembler = Assembler(len(PAYLOAD), lambda at, data, out=out: out.__setitem__(slice(at, at + len(data)), data))
        for chunk in list(cut((PAYLOAD,), 10))[:stop]:
            assembler.accept(*chunk)
        with pytest.raises(DamagedChunk, match=f"{stop * 10} of 97"):
            assembler.finish()
        for chunk in cut((PAYLOAD,), 7, assembler.offset):
            assembler.accept(*chunk)
        assembler.finish()
        assert bytes(out) == PAYLOAD


@pytest.mark.parametrize("as_in_2", [False, True])
def test_every_flipped_bit_is_found_and_nothing_is_written(as_in_2: bool) -> None:
    ((_, data, crc32, xxh3),) = cut((PAYLOAD[:20],), 20, as_in_2=as_in_2)
    written: list[int] = []
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assembler = Assembler(20, lambda at, data: written.append(at))
        with pytest.raises(DamagedChunk):
            assembler.accept(0, bytes(damaged), crc32, xxh3)
        assert assembler.offset == 0
    for bit in range(32 if as_in_2 else 64):
        told = (crc32 ^ 1 << bit, None) if as_in_2 else (0, (xxh3 or 0) ^ 1 << bit)
        with pytest.raises(DamagedChunk):
            Assembler(20, lambda at, data: written.append(at)).accept(0, data, *told)
    assert not written


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (4, b"abc", "the next byte is 5"),
        (6, b"abc", "the next byte is 5"),
        (5, b"", "is empty"),
        (5, b"abcdef", "over the 10 declared"),
    ],
)
def test_a_chunk_out_of_place_is_refused(offset: int, data: bytes, words: str) -> None:
    assembler = Assembler(10, lambda at, data: None, 5)
    with pytest.raises(ChunkError, match=words):
        assembler.accept(offset, data, zlib.crc32(data))
    assert assembler.offset == 5


def test_what_the_writer_raises_leaves_the_offset() -> None:
    def full(at: int, data: memoryview) -> None:
        raise OSError("disk full")

    assembler = Assembler(3, full)
    with pytest.raises(OSError, match="disk full"):
        assembler.accept(0, b"abc", zlib.crc32(b"abc"))
    assert assembler.offset == 0


@pytest.mark.parametrize("offset", [-1, 98])
def test_offsets_outside_of_the_payload_are_our_own_defect(offset: int) -> None:
    with pytest.raises(ValueError, match="offset"):
        list(cut((PAYLOAD,), 10, offset))
    with pytest.raises(ValueError, match="offset"):
        Assembler(len(PAYLOAD), lambda at, data: None, offset)


def test_pieces_of_a_span_are_as_long_as_is_asked_for_then() -> None:
    for begin in range(0, len(PAYLOAD), 7):
        for end in range(begin, len(PAYLOAD) + 1, 5):
            lengths = iter(range(1, 1000))
            parts = (PAYLOAD[:40], b"", PAYLOAD[40:])
            found = list(cut_as_asked(parts, begin, end, lambda lengths=lengths: next(lengths)))
            assert b"".join(data for _, data in found) == PAYLOAD[begin:end]
            assert [offset for offset, _ in found] == [
                begin + sum(len(d) for _, d in found[:n]) for n in range(len(found))
            ]


def test_near_the_end_streams_share_what_is_left_in_shorter_and_shorter_chunks() -> None:
    assert tail_chunk(1 << 20, 5, 1) == 1 << 20
    assert tail_chunk(1 << 20, 100 << 20, 4) == 1 << 20
    assert tail_chunk(1 << 20, 4 << 20, 4) == 1 << 19
    assert tail_chunk(1 << 20, 1000, 4) == TAIL_BYTES_MIN


def test_chunks_grow_while_they_pass_quickly_and_shrink_on_a_slow_link() -> None:
    size = ChunkSize(64 * 1024, 1 << 20)
    grown = []
    for _ in range(4):
        grown.append(size.bytes)
        size.took(0.001)
    assert grown == [256 * 1024, 512 * 1024, 1 << 20, 1 << 20]
    size.took(0.5)
    assert size.bytes == 1 << 20
    for _ in range(9):
        size.took(5.0)
    assert size.bytes == 64 * 1024
    assert ChunkSize(64 * 1024, 64 * 1024).bytes == 64 * 1024


def test_after_a_break_no_chunk_is_longer_than_a_small_share_of_what_has_passed_since() -> None:
    size, passed, longest = ChunkSize(64 * 1024, 1 << 20, careful=True), 0, 0
    for _ in range(2000):
        assert size.bytes <= max(64 * 1024, passed // 32)
        passed += size.bytes
        longest = max(longest, size.bytes)
        size.took(0.001)
    assert longest == 1 << 20


def test_what_many_breaks_cost_is_a_small_share() -> None:
    payload = 256 << 20
    for breaks in (1, 3, 10, 50):
        between = payload // (breaks + 1)
        lost = sum(min(between, bytes_at_risk(count, between)) for count in range(1, breaks + 1))
        assert lost < 0.05 * payload, breaks
    assert bytes_at_risk(50, 0) == 128 * 1024


def test_whatever_the_link_something_moves_about_every_second() -> None:
    for bytes_per_s in (80_000, 300_000, 1_000_000, 1e9):
        size, longest_s = ChunkSize(64 * 1024, 1 << 20), 0.0
        for turn in range(30):
            took_s = size.bytes / bytes_per_s
            size.took(took_s)
            longest_s = max(longest_s, took_s) if turn > 3 else longest_s
        assert longest_s <= 2.0, bytes_per_s


def test_a_window_passes_on_in_order_whatever_comes_and_holds_no_more_than_its_room() -> None:
    chance = random.Random(SEED)
    for _ in range(200):
        out = bytearray()

        def write(at: int, data: memoryview, out: bytearray = out) -> None:
            assert at == len(out)
            out.extend(data)

        window = Window(len(PAYLOAD), write, 0, 30)
        waiting = [(at, memoryview(PAYLOAD)[at : at + 10]) for at in range(0, len(PAYLOAD), 10)]
        while waiting:
            offset, data = waiting.pop(chance.randrange(len(waiting)))
            if not window.accept(offset, data):
                assert offset > window.offset
                waiting.append((offset, data))
            elif chance.random() < 0.2:
                assert window.accept(offset, data), "what is here already takes no room"
            assert PAYLOAD.startswith(out)
        assert window.complete
        assert out == PAYLOAD
        assert window._room == 30, "room was not given back"


def test_a_window_that_could_not_write_stays_where_it_was() -> None:
    def full(at: int, data: memoryview) -> None:
        raise OSError("disk full")

    window = Window(4, full, 0, 4)
    assert window.accept(2, memoryview(b"cd"))
    with pytest.raises(OSError, match="disk full"):
        window.accept(0, memoryview(b"ab"))
    assert window.offset == 0
    with pytest.raises(ChunkError, match="over the 4 declared"):
        window.accept(3, memoryview(b"de"))


def test_holes_are_filled_once() -> None:
    chance = random.Random(SEED)
    for _ in range(200):
        total = chance.randint(1, 60)
        holes, missing = Holes(total), set(range(total))
        for _ in range(100):
            begin, end = sorted((chance.randint(0, total + 3), chance.randint(0, total + 3)))
            wanted = set(range(begin, end))
            fits = begin < end and wanted <= missing
            assert holes.fill(begin, end) == fits
            missing -= wanted if fits else set()
            assert [at for first, last in holes.spans for at in range(first, last)] == sorted(missing)
    assert Holes(0).spans == []
