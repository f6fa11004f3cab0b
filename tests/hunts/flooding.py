"""A site that does all it can to keep a syncer busy: the abuse of ``flood``, in its own process.

It has a valid token and calls only for its own site.  It does not use the product's client, which would back off when
told to: each thread calls again as soon as it has an answer.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum

import grpc

from diloco.sync.options import PROTOCOL
from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.chunks import cut
from diloco.wire.convert import (
    pack_join,
    pack_member,
    pack_pull,
    pack_push,
    pack_report,
    unpack_join_reply,
    unpack_push_reply,
)
from diloco.wire.messages import Chunk, JoinAsk, MemberAsk, PullAsk, PushCommit, PushHeader, PushResult, ReportInfo
from tests.loopback.toy import RUN, Toy

# --- Just enough HTTP/2 for the abuse --------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def headers(path: str, token: str = "") -> bytes:
    """Return a header block for a gRPC call, with every field a literal that is never indexed."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    fields += [("authorization", f"Bearer {token}")] if token else []
    return b"".join(b"\x10" + text(name) + text(value) for name, value in fields)


def text(words: str) -> bytes:
    """Return a string as HPACK writes it: its length, then the bytes, without compression."""
    raw = words.encode()
    assert len(raw) < 127, "one byte of length is enough here"
    return bytes([len(raw)]) + raw


def message(raw: bytes) -> bytes:
    """Return ``raw`` in gRPC's framing, without compression."""
    return b"\x00" + struct.pack(">I", len(raw)) + raw


def dial(address: str, timeout_s: float = 30.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def hello(address: str, settings: bytes = b"") -> socket.socket:
    """Return a connection that has sent the HTTP/2 preface and settings."""
    connection = dial(address)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0, b""))
    return connection


TAKES_NOTHING = struct.pack(">HI", 4, 0)
"""SETTINGS_INITIAL_WINDOW_SIZE=0 (RFC 9113, 6.5.2): the other end may send no byte of an answer."""


def asking(path: str, token: str = "", stream: int = 1, body: bytes | None = None) -> bytes:
    """Return the frames that begin a call and, with a ``body``, those of the whole call."""
    opening = frame(HEADERS, END_HEADERS, stream, headers(path, token))
    return opening if body is None else opening + frame(DATA, END_STREAM, stream, message(body))


def received(connection: socket.socket) -> tuple[bytes, bool]:
    """Return what has arrived, without waiting, and whether the other end has closed the connection."""
    timeout_s, found = connection.gettimeout(), bytearray()
    connection.setblocking(False)
    try:
        while more := connection.recv(1 << 16):
            found += more
        return bytes(found), True
    except (BlockingIOError, ssl.SSLWantReadError):
        return bytes(found), False
    except OSError:
        return bytes(found), True
    finally:
        connection.settimeout(timeout_s)


def is_over(connection: socket.socket) -> bool:
    """Return whether the other end has closed the connection; discard what it has sent."""
    return received(connection)[1]


def frames_in(unread: bytearray) -> Iterator[tuple[int, int, int]]:
    """Take the complete frames out of ``unread``; yield the kind, the flags and the stream of each."""
    while len(unread) >= 9 and len(unread) >= (size := 9 + int.from_bytes(unread[:3], "big")):
        kind, flags, stream = unread[3], unread[4], int.from_bytes(unread[5:9], "big") & 0x7FFFFFFF
        del unread[:size]
        yield kind, flags, stream


def heard(connection: socket.socket, stream: int, timeout_s: float) -> int | None:
    """Return the kind of the first frame that ends ``stream`` or the connection (0 for trailers); None on a timeout."""
    until_s, unread, over = time.monotonic() + timeout_s, bytearray(), False
    while not over:
        more, over = received(connection)
        unread += more
        for kind, flags, which in frames_in(unread):
            if kind == GOAWAY or (kind == RST and which == stream):
                return kind
            if kind in (DATA, HEADERS) and which == stream and flags & END_STREAM:
                return DATA
        if not over and time.monotonic() > until_s:
            return None
        time.sleep(0.001)
    return GOAWAY


# --- Floods of frames and of calls ---

SITE = "flood"
WAIT_S = 10.0
CHUNK_BYTES = 256 * 1024


@dataclass
class Order:
    """The calls to make until ``until_s`` on the monotonic clock, with this number of threads for each kind."""

    kinds: tuple[str, ...]
    until_s: float
    threads: int
    connections: int


class Flood:
    """The calls of one thread over one connection."""

    def __init__(self, toy: Toy, token: str, channel: grpc.Channel) -> None:
        self.toy = toy
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.channel = channel
        layout = toy.layout()
        self.numel = layout.fragments[0].numel
        self.payload = bytes(4 * self.numel)
        self.fingerprint = layout.fingerprint
        self.incarnation = 1
        self.sequence = 1
        self.version = 0
        self.numbers = itertools.count(os.getpid() << 32)

    def ask(self, method: str, *messages: bytes) -> Iterator[bytes]:
        service = ADMIN_SERVICE if method == "Status" else SYNC_SERVICE
        call = self.channel.stream_stream(f"/{service}/{method}")
        answer: Iterator[bytes] = call(iter(messages), timeout=WAIT_S, metadata=self.metadata)
        return answer

    def join(self, process: str) -> None:
        ask = JoinAsk(PROTOCOL, RUN, 1, SITE, process, self.fingerprint, b"", {"codec": self.toy.codec})
        reply = unpack_join_reply(next(self.ask("Join", pack_join(ask))))
        while reply.ticket:  # Our other threads hold the same site: joining with the ticket replaces them.
            reply = unpack_join_reply(next(self.ask("Join", pack_join(replace(ask, ticket=reply.ticket)))))
        self.incarnation = reply.incarnation
        self.sequence = reply.standings[0].watermark + 1
        self.version = reply.standings[0].version

    def joins(self) -> None:
        self.join("0123456789abcdef")

    def starts(self) -> None:
        """Join as a new process each time."""
        self.join(f"{next(self.numbers):032x}")

    def reports(self) -> None:
        fields: dict[str, object] = dict.fromkeys(ReportInfo.__slots__, 1)
        fields |= {"run_id": RUN, "site_id": SITE, "loss": 2.5, "tokens_per_s": 1.0, "versions": (0,), "digests": (0,)}
        fields |= {"link": None, "units": None}
        next(self.ask("Report", pack_report(ReportInfo(**fields))))  # type: ignore[arg-type]

    def pulls(self) -> None:
        for _ in self.ask("Pull", pack_pull(PullAsk(RUN, SITE, 0, -1))):
            pass

    def watches(self) -> None:
        call = self.ask("Watch", pack_member(MemberAsk(RUN, SITE, self.incarnation)))
        next(call)
        call.cancel()  # type: ignore[attr-defined]

    def status(self) -> None:
        next(self.ask("Status", b""))

    def noise(self) -> None:
        next(self.ask("Push", b"\xff" * 200))

    def header(self, digest: str) -> PushHeader:
        size = len(self.payload)
        here = (RUN, SITE, self.incarnation, 0, self.sequence, self.version, 50, 5, 1_000_000, 5)
        return PushHeader(*here, False, "fp32", size, self.numel, digest)

    def push(self, digest: str) -> PushResult | None:
        header = self.header(digest)
        cuts = cut((self.payload,), 0, len(self.payload), lambda: CHUNK_BYTES)
        messages = [pack_push(header), *(pack_push(Chunk.of(*each)) for each in cuts)]
        messages.append(pack_push(PushCommit(len(self.payload), digest)))
        last = [unpack_push_reply(raw) for raw in self.ask("Push", *messages)][-1]
        return last if isinstance(last, PushResult) else None

    def damaged(self) -> None:
        """Push a complete update whose digest does not match."""
        self.starts()
        self.push(hashlib.sha256(str(next(self.numbers)).encode()).hexdigest())

    def updates(self) -> None:
        """Push a valid update."""
        self.starts()
        self.push(hashlib.sha256(self.payload).hexdigest())


KINDS = ("joins", "starts", "reports", "pulls", "watches", "status", "noise", "damaged", "updates")


def attack(flood: Flood, kind: str, until_s: float, counts: Counter[str], lock: threading.Lock) -> None:
    call: Callable[[], None] = getattr(flood, kind)
    while time.monotonic() < until_s:
        try:
            call()
            said = "ok"
        except grpc.RpcError as error:
            said = error.code().name.lower()
        except StopIteration:
            said = "nothing"
        with lock:
            counts[f"{kind}_{said}"] += 1


def flooded(toy: Toy, address: str, token: str, order: Order) -> dict[str, int]:
    """Carry out an order, and return its counts."""
    os.nice(19)  # The hunt measures the syncer's work, not competition for the CPU.
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    private = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(address, private) for _ in range(order.connections)]
    turn = itertools.cycle(channels)
    with ThreadPoolExecutor(len(order.kinds) * order.threads) as pool:
        attacks = [
            pool.submit(attack, Flood(toy, token, next(turn)), kind, order.until_s, counts, lock)
            for kind in order.kinds
            for _ in range(order.threads)
        ]
    for each in attacks:
        each.result()  # Raise the error of a flood that broke down: the hunt must not continue with less.
    for channel in channels:
        channel.close()
    return dict(counts)


# --- Floods of frames that HTTP/2 allows but our peers never send, each as fast as one connection accepts them -------

PUSH = f"/{SYNC_SERVICE}/Push"
Pieces = Callable[[str], Iterator[bytes]]
QUIET_S = 1.0
"""How long to listen after the last piece."""


class Due(Enum):
    """The syncer's reaction to a flood; ENDED includes REFUSED."""

    ENDED = "ended"
    REFUSED = "refused"
    BORNE = "borne"


@dataclass
class Flooded:
    """The outcome of one connection; ``kinds`` are the frames that were received."""

    sent_bytes: int = 0
    ended: bool = False
    kinds: set[int] = field(default_factory=set)

    @property
    def due(self) -> Due:
        """The syncer's reaction."""
        if self.ended or GOAWAY in self.kinds:
            return Due.ENDED
        return Due.REFUSED if RST in self.kinds else Due.BORNE


def flood(address: str, pieces: Iterator[bytes], seconds: float) -> Flooded:
    """Send until ``seconds`` have passed or the other end closes the connection, reading its frames all the time."""
    found, unread, until_s = Flooded(), bytearray(), time.monotonic() + seconds
    with hello(address) as connection:
        connection.settimeout(QUIET_S)
        try:
            for piece in pieces:
                connection.sendall(piece)
                found.sent_bytes += len(piece)
                _listen(connection, unread, found.kinds)
                if time.monotonic() > until_s:
                    break
            until_s = time.monotonic() + QUIET_S
            while time.monotonic() < until_s:
                _listen(connection, unread, found.kinds)
                time.sleep(0.05)
        except TimeoutError:
            pass  # It stopped reading, which is allowed; it closes the connection later.
        except OSError:
            found.ended = True
    return found


def _listen(connection: socket.socket, unread: bytearray, kinds: set[int]) -> None:
    """Receive what has arrived, without waiting; ``unread`` keeps an incomplete frame."""
    more, over = received(connection)
    unread += more
    kinds |= {kind for kind, _, _ in frames_in(unread)}
    if over:
        raise ConnectionResetError


def rapid_resets(token: str) -> Iterator[bytes]:
    """Yield streams that are opened and reset at once, so that the limit of open streams is never reached."""
    block = headers(PUSH, token)
    for first in itertools.count(1, 200):
        opened = (_opened(stream, block) for stream in range(first, first + 200, 2))
        yield b"".join(opened)


def _opened(stream: int, block: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, block) + frame(RST, 0, stream, b"\x00\x00\x00\x08")


def new_names(token: str) -> Iterator[bytes]:
    """Yield such streams with headers that the peer must add to its dynamic table."""
    for number in itertools.count():
        names = (b"\x40" + text(f"x-{number}-{at}") + text("v" * 100) for at in range(60))
        yield _opened(2 * number + 1, headers(PUSH, token) + b"".join(names))


def endless_headers(token: str) -> Iterator[bytes]:
    """Yield one header block without end."""
    yield frame(HEADERS, 0, 1, headers(PUSH, token))
    for number in itertools.count():
        fields = b"\x10" + text(f"x-{number}") + text("v" * 100)
        yield frame(CONTINUATION, 0, 1, fields * 100)


def huge_header(token: str) -> Iterator[bytes]:
    """Yield one header with a declared value of a gigabyte, and send that value."""
    length = b"\x7f" + b"\x81\xff\xff\xff\x03"
    block = headers(PUSH, token) + b"\x10" + text("x-large") + length
    yield frame(HEADERS, 0, 1, block)
    while True:
        yield frame(CONTINUATION, 0, 1, b"v" * 16_000) * 10


def empty_headers(token: str) -> Iterator[bytes]:
    """Yield empty CONTINUATION frames without end."""
    yield frame(HEADERS, 0, 1, headers(PUSH, token))
    while True:
        yield frame(CONTINUATION, 0, 1, b"") * 1000


def empty_data(token: str) -> Iterator[bytes]:
    yield asking(PUSH, token)
    while True:
        yield frame(DATA, 0, 1, b"") * 1000


def same(kind: int, stream: int, body: bytes, count: int) -> Pieces:
    """Return a flood of ``count`` equal frames per piece."""
    return lambda token: itertools.repeat(frame(kind, 0, stream, body) * count)


FLOODS: dict[str, tuple[Pieces, Due]] = {
    "rapid_resets": (rapid_resets, Due.REFUSED),
    "new_names": (new_names, Due.REFUSED),
    "endless_headers": (endless_headers, Due.REFUSED),
    "huge_header": (huge_header, Due.REFUSED),
    "empty_headers": (empty_headers, Due.ENDED),
    "empty_data": (empty_data, Due.ENDED),
    "pings": (same(PING, 0, bytes(8), 500), Due.ENDED),
    "settings": (same(SETTINGS, 0, b"\x00\x03\x00\x00\x00\x64", 500), Due.BORNE),
    "long_settings": (same(SETTINGS, 0, b"\x00\x03\x00\x00\x00\x64" * 2000, 10), Due.BORNE),
    "windows": (same(WINDOW_UPDATE, 0, b"\x00\x00\x00\x01", 1000), Due.BORNE),
    "priorities": (same(PRIORITY, 1, b"\x00\x00\x00\x00\x01", 1000), Due.BORNE),
    "unknown_frames": (same(0x63, 0, bytes(1000), 50), Due.BORNE),
}
"""By name: the flood, and the syncer's least reaction to it."""
