"""Packets of a TUN device: an IP packet behind a virtio-net header, often with many TCP segments in one.

Pure: bytes in, bytes out.  With offloads on, the kernel does not cut a stream into segments of the link's size itself:
it passes up to 64 KiB behind one set of headers, with the length of a segment.  That makes user space fast enough, and
must not change the emulated network: a rate counts the headers of every segment, and loss hits single segments.
``measure`` counts the segments, ``keep`` removes some of them.

The header is ``struct virtio_net_hdr`` of Linux, ten bytes in the machine's own byte order: flags, kind, length of all
headers, payload of one segment, and where the checksummed bytes start and the checksum stands.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

VIRTIO = struct.Struct("=BBHHHH")
IP_AT = VIRTIO.size
KIND_PLAIN = 0
KIND_TCP4 = 1
PACKET_BYTES_MAX = IP_AT + 65_535

IP_LENGTH_AT, IP_ID_AT, IP_CHECKSUM_AT, IP_ADDRESSES_AT = 2, 4, 10, 12
TCP_SEQUENCE_AT, TCP_FLAGS_AT, TCP_CHECKSUM_AT = 4, 13, 16
TCP_PROTOCOL = 6
LAST_ONLY_FLAGS = 0x09
"""FIN and PSH: only the last of a run of segments carries them."""
FIRST_ONLY_FLAGS = 0x80
"""CWR: only the first of a run of segments carries it."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The size of a packet on a link."""

    segments: int
    """Number of packets on the link that it represents."""
    header_bytes: int
    """IP and TCP headers of each segment; 0 if the packet is never cut."""
    payload_bytes: int
    """Payload of each segment except the last, which may be shorter."""
    wire_bytes: int
    """Bytes of all segments on the link, with the headers of each."""

    def bytes_of(self, first: int, stop: int) -> int:
        """Return the bytes on the link of the segments ``first`` to ``stop`` (excluded)."""
        if self.segments == 1:
            return self.wire_bytes
        whole = (self.header_bytes + self.payload_bytes) * (stop - first)
        if stop < self.segments:
            return whole
        return whole - ((self.header_bytes + self.payload_bytes) * self.segments - self.wire_bytes)


def measure(packet: bytes) -> Measure:
    """Return how many segments and bytes ``packet`` is on a link."""
    _, kind, header_bytes, payload_bytes, _, _ = VIRTIO.unpack_from(packet)
    ip_bytes = len(packet) - IP_AT
    if kind & 0x7F != KIND_TCP4 or payload_bytes == 0:
        return Measure(1, 0, ip_bytes, ip_bytes)
    segments = max(1, -(-(ip_bytes - header_bytes) // payload_bytes))
    return Measure(segments, header_bytes, payload_bytes, ip_bytes + (segments - 1) * header_bytes)


def keep(packet: bytes, gone: Collection[int]) -> Iterator[tuple[bytes, int, int]]:
    """Yield what is left of ``packet`` without the segments numbered in ``gone``, as (packet, first, stop).

    Each run of adjacent segments is one packet, with the segments numbered ``first`` to ``stop`` (excluded).
    """
    size = measure(packet)
    first = 0
    while first < size.segments:
        if first in gone:
            first += 1
            continue
        stop = first + 1
        while stop < size.segments and stop not in gone:
            stop += 1
        whole = first == 0 and stop == size.segments
        yield (packet if whole else _run(packet, size, first, stop)), first, stop
        first = stop


def _run(packet: bytes, size: Measure, first: int, stop: int) -> bytes:
    """Return the segments ``first`` to ``stop`` (excluded) of a TCP packet as one packet with corrected headers."""
    flags, kind, header_bytes, payload_bytes, checksum_start, checksum_at = VIRTIO.unpack_from(packet)
    begin = IP_AT + header_bytes
    payload = packet[begin + first * payload_bytes : begin + stop * payload_bytes]
    headers = bytearray(packet[IP_AT:begin])
    tcp_at = (headers[0] & 0x0F) * 4
    number, sequence = _word(headers, IP_ID_AT), int.from_bytes(headers[tcp_at + 4 : tcp_at + 8], "big")
    struct.pack_into("!HH", headers, IP_LENGTH_AT, header_bytes + len(payload), (number + first) & 0xFFFF)
    struct.pack_into("!I", headers, tcp_at + TCP_SEQUENCE_AT, (sequence + first * payload_bytes) & 0xFFFFFFFF)
    if stop < size.segments:
        headers[tcp_at + TCP_FLAGS_AT] &= ~LAST_ONLY_FLAGS & 0xFF
    if first > 0:
        headers[tcp_at + TCP_FLAGS_AT] &= ~FIRST_ONLY_FLAGS & 0xFF
    struct.pack_into("!H", headers, IP_CHECKSUM_AT, 0)
    struct.pack_into("!H", headers, IP_CHECKSUM_AT, ~_sum_of_words(bytes(headers[:tcp_at])) & 0xFFFF)
    # As the kernel does, store the sum of the pseudo-header in the checksum field: the payload is not summed here.
    pseudo = bytes(headers[IP_ADDRESSES_AT:tcp_at][:8]) + struct.pack(
        "!HH", TCP_PROTOCOL, len(payload) + header_bytes - tcp_at
    )
    struct.pack_into("!H", headers, tcp_at + TCP_CHECKSUM_AT, _sum_of_words(pseudo))
    if stop - first == 1:
        kind, header_bytes, payload_bytes = KIND_PLAIN, 0, 0
    return VIRTIO.pack(flags, kind, header_bytes, payload_bytes, checksum_start, checksum_at) + headers + payload


def _word(content: bytearray, at: int) -> int:
    return content[at] << 8 | content[at + 1]


def _sum_of_words(content: bytes) -> int:
    """Return the ones' complement sum, of which an Internet checksum is the complement (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
