"""Just enough HTTP/2 to abuse a syncer, and floods of frames that HTTP/2 allows but our peers never send."""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from diloco.wire.channel import SYNC_SERVICE

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


# --- Floods of frames, each as fast as one connection accepts them ---------------------------------------------------

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
