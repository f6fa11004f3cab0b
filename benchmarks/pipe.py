"""The model of one direction of a link that carries packets: which are lost, and when the others arrive.

Pure: no clock, no devices.  Instants are integer nanoseconds and always an argument.  As on a real path, a segment may
be lost (an independent seeded draw decides), then waits in a bounded queue, whose overflow is dropped at the tail, then
is serialised at the rate, then travels for half the round-trip time plus the jitter of the moment.  The order is kept.
In a partition, packets that would arrive are lost.

Unlike ``diloco.wan.link.Path``, a pipe never makes its senders wait: the TCP of their kernel decides how they react to
loss and delay.

Packets of a TUN device.  With segmentation offload, the kernel does not cut a stream into segments itself: it passes up
to 64 KiB after one set of headers, which gives the length of a segment.  That makes user space fast enough, but must
not change the emulated network: a rate counts the headers of every segment, and loss hits single segments.
``measure`` counts the segments, ``keep`` removes some of them.

The header is ``struct virtio_net_hdr`` of Linux, ten bytes in the machine's own byte order: flags, kind, length of all
headers, payload of one segment, and where the checksummed bytes start and the checksum stands.
"""

from __future__ import annotations

import math
import random
import struct
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from diloco.wan.link import CommonOptions, Weather, check_number

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
    (number,) = struct.unpack_from("!H", headers, IP_ID_AT)
    (sequence,) = struct.unpack_from("!I", headers, tcp_at + TCP_SEQUENCE_AT)
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


def _sum_of_words(content: bytes) -> int:
    """Return the ones' complement sum, of which an Internet checksum is the complement (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


# --- The model of one direction of a link that carries packets -------------------------------------------------------

QUEUE_BYTES_MIN = 256 * 1024
HELD_BYTES_MAX = 1 << 30
"""Most bytes that one direction holds, under any options: a delay of a second at 8 Gbit/s."""
LATENESS_BINS = 32


@dataclass(kw_only=True, slots=True)
class PipeOptions(CommonOptions):
    """The properties of a link that carries packets.  ``mbps`` counts the headers of IP and TCP.

    ``queue_kib`` is the size of the queue in front of a link with a rate; 0: the rate times the round trip, at least
    256 KiB.
    """

    mbps_min = 0.01
    mbps_max = 1e5

    loss_percent: float = 0.0
    """Chance of each segment (packet on the link) to be lost, in each direction."""

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)  # Plain ``super()`` fails in a class with ``slots=True``.
        check_number("loss_percent", self.loss_percent, 0, 100, "0 to 100")

    @property
    def queue_bytes(self) -> int:
        """Size of the queue, with the default resolved."""
        if self.queue_kib:
            return int(self.queue_kib * 1024)
        return max(QUEUE_BYTES_MIN, int(self.rtt_ms * self.mbps * 125))


@dataclass(slots=True)
class PipeCounts:
    """Counts of segments by what happened to them: in = lost + overflowed + cut_off + out + held."""

    segments_in: int = 0
    bytes_in: int = 0
    drawn: int = 0
    """Segments that could be lost: those that came in while ``loss_percent`` was not 0."""
    expected_lost: float = 0.0
    """Expected number of losses among ``drawn`` by the options."""
    lost: int = 0
    overflowed: int = 0
    """Dropped because the queue was full."""
    cut_off: int = 0
    """Lost in a partition."""
    segments_out: int = 0
    bytes_out: int = 0
    packets_out: int = 0
    late_us_max: float = 0.0
    lateness: list[int] = field(default_factory=lambda: [0] * LATENESS_BINS)
    """Packets by how late they arrived: bin n counts those from 2^(n-1) to below 2^n µs; bin 0 those below 1 µs."""

    def late_us(self, percent: float) -> float:
        """Return an upper bound (within a factor of two) on the lateness of ``percent`` of the packets, in us."""
        wanted = self.packets_out * percent / 100
        seen = 0
        for power, count in enumerate(self.lateness):
            seen += count
            if seen >= wanted:
                return min(float(1 << power), self.late_us_max)
        return self.late_us_max


@dataclass(frozen=True, slots=True)
class _Held:
    packet: bytes
    segments: int
    wire_bytes: int
    due_ns: int


class Pipe:
    """One direction of a link: ``push`` packets of the sender's kernel, ``take`` those for the receiver's kernel."""

    def __init__(self, options: PipeOptions, direction: str, started_ns: int) -> None:
        self.counts = PipeCounts()
        self.blocked = False
        """True in a partition."""
        self._direction = direction
        self._started_ns = started_ns
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._free_ns = started_ns
        self._last_due_ns = started_ns
        self._options = options
        self._seed(options.seed)

    def stats(self) -> dict[str, float]:
        """Return all counts by name, with a percentile in place of the bins, and the segments in flight now."""
        counts: dict[str, float] = asdict(self.counts)
        del counts["lateness"]
        held = sum(each.segments for each in self._held)
        return {**counts, "late_us_p99": self.counts.late_us(99), "held_segments": held}

    def change(self, options: PipeOptions) -> None:
        """Change the options; packets in flight keep their instants."""
        if options.seed != self._options.seed:
            self._seed(options.seed)
        self._options = options

    def push(self, packet: bytes, now_ns: int) -> None:
        """Accept ``packet`` from its sender; decide which of its segments are lost and when the others arrive."""
        size = measure(packet)
        counts = self.counts
        counts.segments_in += size.segments
        counts.bytes_in += size.wire_bytes
        gone = self._draw(size.segments) if self._options.loss_percent else ()
        counts.lost += len(gone)
        # Bytes that are not serialised yet are in the queue; the others are in flight.
        room = HELD_BYTES_MAX - self._held_bytes
        if mbps := self._options.mbps:
            room = min(room, self._options.queue_bytes - int(max(0, self._free_ns - now_ns) * mbps / 8000))
        if not gone and size.wire_bytes <= room:
            self._hold(packet, size.segments, size.wire_bytes, now_ns)
            return
        overflowed = []
        for number in range(size.segments):
            if number not in gone:
                room -= size.bytes_of(number, number + 1)
                if room < 0:
                    overflowed.append(number)
        counts.overflowed += len(overflowed)
        for run, first, stop in keep(packet, {*gone, *overflowed}):
            self._hold(run, stop - first, size.bytes_of(first, stop), now_ns)

    def next_due_ns(self) -> int | None:
        """Return the instant at which ``take`` next has a packet, or None while nothing is in flight."""
        return self._held[0].due_ns if self._held else None

    def take(self, now_ns: int) -> bytes | None:
        """Return the next packet that has arrived by ``now_ns``, or None; in a partition drop those that are due."""
        while self._held and self._held[0].due_ns <= now_ns:
            held = self._held.popleft()
            self._held_bytes -= held.wire_bytes
            if self.blocked:
                self.counts.cut_off += held.segments
                continue
            counts, late_ns = self.counts, now_ns - held.due_ns
            counts.segments_out += held.segments
            counts.bytes_out += held.wire_bytes
            counts.packets_out += 1
            counts.late_us_max = max(counts.late_us_max, late_ns / 1e3)
            counts.lateness[min((late_ns // 1000).bit_length(), LATENESS_BINS - 1)] += 1
            return held.packet
        return None

    def _seed(self, seed: int) -> None:
        self._weather = Weather(seed, self._direction)
        self._dice = random.Random(f"{seed}/{self._direction}/loss")

    def _draw(self, segments: int) -> Collection[int]:
        """Draw the numbers of the lost ones among ``segments``: the gaps between them have a geometric distribution."""
        chance = self._options.loss_percent / 100
        self.counts.drawn += segments
        self.counts.expected_lost += segments * chance
        if chance == 1.0:
            return range(segments)
        lost: set[int] = set()
        number = -1
        while True:
            number += 1 + int(math.log(1.0 - self._dice.random()) / math.log1p(-chance))
            if number >= segments:
                return lost
            lost.add(number)

    def _hold(self, packet: bytes, segments: int, wire_bytes: int, now_ns: int) -> None:
        self._free_ns = max(self._free_ns, now_ns) + self._options.serialise_ns(wire_bytes)
        delay_ns = self._weather.delay_ns(self._free_ns - self._started_ns, self._options)
        self._last_due_ns = max(self._free_ns + delay_ns, self._last_due_ns)
        self._held.append(_Held(packet, segments, wire_bytes, self._last_due_ns))
        self._held_bytes += wire_bytes
