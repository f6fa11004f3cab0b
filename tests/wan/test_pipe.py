"""Super-packets, and the model of one direction that carries them, tried without a clock."""

from __future__ import annotations

import itertools
import math
import random
import struct

import pytest

from benchmarks.pipe import IP_AT, KIND_PLAIN, KIND_TCP4, QUEUE_BYTES_MIN, VIRTIO, Pipe, PipeOptions, keep, measure
from diloco.wan.link import MILLISECOND_NS as MS
from diloco.wan.link import SECOND_NS

# --- Super-packets: how many segments they stand for, and what is left of them when some are lost --------------------


def test_a_packet_takes_the_headers_of_each_segment_and_one_that_loses_nothing_stays_as_it_is() -> None:
    whole, small = packet(bytes(3 * SEGMENT + 10)), packet(b"small")
    size = measure(whole)
    assert (size.segments, size.wire_bytes) == (4, 3 * SEGMENT + 10 + 4 * HEADERS)
    assert [size.bytes_of(*each) for each in ((0, 1), (3, 4))] == [SEGMENT + HEADERS, 10 + HEADERS]
    assert (measure(small).segments, measure(small).wire_bytes) == (1, HEADERS + 5)
    for content, segments in ((whole, 4), (small, 1)):
        assert list(keep(content, ())) == [(content, 0, segments)]
        assert list(keep(content, range(segments))) == []


@pytest.mark.parametrize("percent", [0.1, 30.0, 100.0])
def test_loss_strikes_segments_as_often_as_it_was_told_by_seed_and_direction(percent: float) -> None:
    def lossy(seed: int, direction: str) -> tuple[Pipe, list[bytes]]:
        pipe = Pipe(PipeOptions(loss_percent=percent, seed=seed), direction, 0)
        for _ in range(1000):
            pipe.push(BIG, 0)
        return pipe, [content for _, content in drain(pipe)]

    pipe, came = lossy(0, "down")
    expected = 400 * percent
    assert pipe.counts.drawn == 40_000
    assert math.isclose(pipe.counts.expected_lost, expected, rel_tol=1e-6)
    assert abs(pipe.counts.lost - expected) <= 5 * math.sqrt(expected * (1 - percent / 100))
    assert sum(measure(content).segments for content in came) == 40_000 - pipe.counts.lost
    if percent < 100:
        assert came == lossy(0, "down")[1]
        assert came not in (lossy(1, "down")[1], lossy(0, "up")[1])


IP_BYTES, TCP_BYTES = 20, 32
HEADERS = IP_BYTES + TCP_BYTES
SEGMENT = 1448
FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80


def summed(content: bytes) -> int:
    """RFC 1071, the slow way: 0xFFFF over a header whose checksum is right."""
    total = 0
    for word in struct.unpack(f"!{len(content) // 2}H", content):
        total += word
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(payload: bytes, *, flags: int = ACK, sequence: int = 1000, number: int = 7) -> bytes:
    """A TCP packet as a TUN device would hand it over."""
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, HEADERS + len(payload), number, 0x4000, 64, 6, 0, bytes([10, 77, 1, 1]), bytes(4)
    )
    ip = ip[:10] + struct.pack("!H", 0xFFFF - summed(ip)) + ip[12:]
    tcp = struct.pack("!HHIIBBHHH", 40000, 7077, sequence, 5, TCP_BYTES // 4 << 4, flags, 500, 0, 0) + bytes(12)
    kind, cut = (KIND_TCP4, SEGMENT) if len(payload) > SEGMENT else (KIND_PLAIN, 0)
    return VIRTIO.pack(1, kind, HEADERS if cut else 0, cut, IP_BYTES, 16) + ip + tcp + payload


def fields(piece: bytes) -> tuple[int, int, int, bytes]:
    """Sequence number, IP's number, flags and payload, after a look at lengths and sums."""
    ip = piece[IP_AT:]
    assert summed(ip[:IP_BYTES]) == 0xFFFF
    length, number = struct.unpack_from("!HH", ip, 2)
    assert length == len(ip)
    (sequence,) = struct.unpack_from("!I", ip, IP_BYTES + 4)
    (checksum,) = struct.unpack_from("!H", ip, IP_BYTES + 16)
    if checksum:
        assert checksum == summed(ip[12:20] + struct.pack("!HH", 6, length - IP_BYTES))
    return sequence, number, ip[IP_BYTES + 13], ip[HEADERS:]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_the_stream_without_the_lost_segments(seed: int) -> None:
    dice = random.Random(seed)
    payload = dice.randbytes(dice.randrange(SEGMENT + 1, 44 * SEGMENT))
    sequence = dice.choice([1000, 2**32 - 5000])  # It wraps.
    whole = packet(payload, sequence=sequence, number=65_530, flags=ACK | PSH | FIN | CWR)
    segments = measure(whole).segments
    gone = {number for number in range(segments) if dice.random() < 0.2}
    rebuilt = {}
    for piece, first, stop in keep(whole, gone):
        size = measure(piece)
        assert size.segments == stop - first
        assert size.wire_bytes == measure(whole).bytes_of(first, stop)
        at, number, flags, content = fields(piece)
        assert (at, number) == ((sequence + first * SEGMENT) % 2**32, (65_530 + first) % 2**16)
        assert bool(flags & (FIN | PSH)) == (stop == segments), "the stream ended before its end"
        assert bool(flags & CWR) == (first == 0)
        assert flags & ACK
        for place in range(first, stop):
            rebuilt[place] = content[(place - first) * SEGMENT : (place - first + 1) * SEGMENT]
    assert set(rebuilt) == set(range(segments)) - gone
    assert all(content == payload[place * SEGMENT : (place + 1) * SEGMENT] for place, content in rebuilt.items())


# --- The model of one direction ---------------------------------------------------------------------------------------

SMALL = packet(bytes(948))  # 1000 bytes on the link.
BIG = packet(bytes(40 * SEGMENT))
BIG_BYTES = measure(BIG).wire_bytes


def drain(pipe: Pipe) -> list[tuple[int, bytes]]:
    """All that is under way, each with the instant at which it is due."""
    found = []
    while (due_ns := pipe.next_due_ns()) is not None:
        assert pipe.take(due_ns - 1) is None
        content = pipe.take(due_ns)
        if content is not None:
            found.append((due_ns, content))
    return found


def test_the_rate_counts_the_headers_of_every_segment_and_is_shared() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=10, mbps=8), "up", 0)  # A byte in a microsecond.
    pipe.push(BIG, 0)
    pipe.push(SMALL, 0)
    assert [due_ns for due_ns, _ in drain(pipe)] == [BIG_BYTES * 1000 + 5 * MS, (BIG_BYTES + 1000) * 1000 + 5 * MS]
    pipe.push(SMALL, SECOND_NS)  # An idle link owes nobody.
    assert [due_ns for due_ns, _ in drain(pipe)] == [SECOND_NS + MS + 5 * MS]


def test_the_queue_is_bounded_and_drops_single_segments_at_its_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PipeOptions(rtt_ms=100, mbps=1000).queue_bytes == 12_500_000, "what the link holds in a round trip"
    assert PipeOptions(rtt_ms=10, mbps=1).queue_bytes == QUEUE_BYTES_MIN
    pipe = Pipe(PipeOptions(mbps=8, queue_kib=100), "up", 0)
    for _ in range(3):
        pipe.push(BIG, 0)
    counts = pipe.counts
    kept = 100 * 1024 // (SEGMENT + 52)
    assert counts.overflowed == 120 - kept
    assert sum(measure(content).segments for _, content in drain(pipe)) == kept == counts.segments_out
    monkeypatch.setattr("benchmarks.pipe.HELD_BYTES_MAX", 10_000)
    pipe = Pipe(PipeOptions(rtt_ms=100), "up", 0)
    for _ in range(12):
        pipe.push(SMALL, 0)
    assert (pipe.stats()["held_segments"], pipe.counts.overflowed) == (10, 2), "also without a rate"


def test_every_segment_is_accounted_for_and_lateness_in_bins_of_powers_of_two() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=20, mbps=100, loss_percent=3, queue_kib=64), "up", 0)
    for step in range(200):
        pipe.push(BIG, step * MS)
        pipe.blocked = 50 <= step < 60
        while pipe.take(step * MS) is not None:
            pass
    counts = pipe.counts
    assert min(counts.lost, counts.overflowed, counts.cut_off, counts.segments_out, pipe.stats()["held_segments"]) > 0
    gone = counts.lost + counts.overflowed + counts.cut_off
    assert counts.segments_in == 200 * 40 == gone + counts.segments_out + pipe.stats()["held_segments"]
    pipe = Pipe(PipeOptions(), "up", 0)
    for late_us in [0] * 98 + [900, 70_000]:
        pipe.push(SMALL, 0)
        pipe.take(late_us * 1000)
    assert [pipe.counts.late_us(share) for share in (50, 99, 100)] == [1.0, 1024.0, 70_000.0]
    assert pipe.stats()["late_us_p99"] == 1024.0


def test_jitter_spreads_and_never_reorders() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=40, jitter_ms=20), "up", 0)
    for step in range(500):
        pipe.push(packet(step.to_bytes(4, "big")), step * MS)
    found = drain(pipe)
    assert [int.from_bytes(content[-4:], "big") for _, content in found] == list(range(500))
    delays_ms = [(due_ns - step * MS) / MS for step, (due_ns, _) in enumerate(found)]
    assert 10 <= min(delays_ms) < 13
    assert 27 < max(delays_ms) <= 30
    assert all(later >= sooner for (sooner, _), (later, _) in itertools.pairwise(found))


def test_a_partition_loses_what_would_come_out_and_nothing_else() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=20), "up", 0)
    pipe.push(BIG, 0)
    pipe.blocked = True
    assert pipe.take(10 * MS) is None
    pipe.push(SMALL, 15 * MS)
    pipe.blocked = False
    assert pipe.take(25 * MS) == SMALL
    assert (pipe.counts.cut_off, pipe.counts.segments_out) == (40, 1)


def test_a_change_holds_for_what_comes_after_it() -> None:
    pipe = Pipe(PipeOptions(rtt_ms=20), "up", 0)
    pipe.push(SMALL, 0)
    pipe.change(PipeOptions(rtt_ms=100, loss_percent=100))
    pipe.push(SMALL, 0)
    pipe.change(PipeOptions(rtt_ms=100))
    pipe.push(SMALL, 0)
    assert [due_ns for due_ns, _ in drain(pipe)] == [10 * MS, 50 * MS]
    pipe.change(PipeOptions(rtt_ms=2))
    pipe.push(SMALL, 50 * MS)
    assert [due_ns for due_ns, _ in drain(pipe)] == [51 * MS]
