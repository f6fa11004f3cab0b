"""Cutting, checking and reassembling, without a network."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diloco.wire.chunks import (
    ChunkSize,
    DamagedChunk,
    Holes,
    Window,
    bytes_at_risk,
    check_next,
    cut,
)
from diloco.wire.messages import Chunk

SEED = 20
PAYLOAD = random.Random(SEED).randbytes(97)


def test_pieces_of_a_span_are_views_of_one_part_each_and_no_longer_than_is_asked_for_then() -> None:
    for begin in range(0, len(PAYLOAD), 7):
        for end in range(begin, len(PAYLOAD) + 1, 5):
            lengths = iter(range(1, 1000))
            parts = (PAYLOAD[:40], b"", PAYLOAD[40:])
            at = begin
            for number, (offset, data) in enumerate(cut(parts, begin, end, lambda lengths=lengths: next(lengths)), 1):
                assert offset == at
                assert data == PAYLOAD[at : at + len(data)]
                assert 0 < len(data) <= number
                assert data.obj is parts[0 if at < 40 else 2]
                at += len(data)
            assert at == end


@pytest.mark.parametrize("as_in_2", [False, True])
def test_every_flipped_bit_is_found(as_in_2: bool) -> None:
    chunk = Chunk.of(0, PAYLOAD[:20], as_in_2=as_in_2)
    assert (chunk.xxh3 is None) == as_in_2, "protocol 2 has CRC-32 only"
    check_next(chunk, 0, 20)
    for bit in range(8 * len(chunk.data)):
        damaged = bytearray(chunk.data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedChunk):
            check_next(replace(chunk, data=bytes(damaged)), 0, 20)
    told = {"crc32": chunk.crc32 ^ 1} if as_in_2 else {"xxh3": (chunk.xxh3 or 0) ^ 1 << 63}
    with pytest.raises(DamagedChunk):
        check_next(replace(chunk, **told), 0, 20)


def test_chunks_grow_while_they_pass_quickly_and_shrink_on_a_slow_link() -> None:
    size = ChunkSize(64 * 1024, 1 << 20)
    assert size.bytes == 256 * 1024
    for took_s, turns, kib in ((0.001, 1, 512), (0.001, 2, 1024), (0.5, 1, 1024), (5.0, 9, 64)):
        for _ in range(turns):
            size.took(took_s)
        assert size.bytes == kib * 1024
    assert ChunkSize(64 * 1024, 64 * 1024).bytes == 64 * 1024
    for bytes_per_s in (80_000, 300_000, 1_000_000, 1e9):
        size, longest_s = ChunkSize(64 * 1024, 1 << 20), 0.0
        for turn in range(30):
            took_s = size.bytes / bytes_per_s
            size.took(took_s)
            longest_s = max(longest_s, took_s) if turn > 3 else longest_s
        assert longest_s <= 2.0, f"at {bytes_per_s} B/s something moves about every second"


def test_after_a_break_no_chunk_is_longer_than_a_small_share_of_what_has_passed_since() -> None:
    size, passed, longest = ChunkSize(64 * 1024, 1 << 20, careful=True), 0, 0
    for _ in range(2000):
        assert size.bytes <= max(64 * 1024, passed // 32)
        passed += size.bytes
        longest = max(longest, size.bytes)
        size.took(0.001)
    assert longest == 1 << 20
    assert bytes_at_risk(50, 0) == 128 * 1024, "after any number of breaks some chunks may be on their way"


def test_a_window_passes_on_in_order_whatever_comes_and_holds_no_more_than_its_room() -> None:
    chance = random.Random(SEED)
    for _ in range(200):
        out = bytearray()

        def write(at: int, data: memoryview, out: bytearray = out) -> None:
            assert at == len(out)
            out.extend(data)

        window = Window(write, 0, 30)
        waiting = [(at, memoryview(PAYLOAD)[at : at + 10]) for at in range(0, len(PAYLOAD), 10)]
        while waiting:
            offset, data = waiting.pop(chance.randrange(len(waiting)))
            if not window.accept(offset, data):
                assert offset > window.offset
                waiting.append((offset, data))
            elif chance.random() < 0.2:
                assert window.accept(offset, data), "what is here already takes no room"
            assert PAYLOAD.startswith(out)
        assert out == PAYLOAD
        assert window._room == 30, "room was not given back"


def test_a_window_that_could_not_write_stays_where_it_was() -> None:
    def full(at: int, data: memoryview) -> None:
        raise OSError("disk full")

    window = Window(full, 0, 4)
    assert window.accept(2, memoryview(b"cd"))
    with pytest.raises(OSError, match="disk full"):
        window.accept(0, memoryview(b"ab"))
    assert window.offset == 0


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
