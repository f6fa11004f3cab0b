"""Super-packets: how many segments they stand for, and what is left of them when some are lost."""

from __future__ import annotations

import random
import struct

import pytest

from diloco.wan.pipe import IP_AT, KIND_PLAIN, KIND_TCP4, VIRTIO, keep, measure

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


def test_a_packet_takes_the_headers_of_each_segment() -> None:
    size = measure(packet(bytes(3 * SEGMENT + 10)))
    assert (size.segments, size.wire_bytes) == (4, 3 * SEGMENT + 10 + 4 * HEADERS)
    assert size.bytes_of(0, 1) == SEGMENT + HEADERS
    assert size.bytes_of(3, 4) == 10 + HEADERS
    assert size.bytes_of(0, 4) == size.wire_bytes
    small = measure(packet(b"small"))
    assert (small.segments, small.wire_bytes) == (1, HEADERS + 5) == (1, small.bytes_of(0, 1))


def test_what_loses_nothing_is_the_same_packet() -> None:
    whole = packet(bytes(5 * SEGMENT))
    assert list(keep(whole, ())) == [(whole, 0, 5)]
    assert list(keep(whole, range(5))) == []
    small = packet(b"small")
    assert list(keep(small, ())) == [(small, 0, 1)]
    assert list(keep(small, {0})) == []


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
