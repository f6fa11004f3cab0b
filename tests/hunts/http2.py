"""As much of HTTP/2 as it takes to be rude: frames by hand on a plain socket, so that they can be cut anywhere."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def headers(path: str, token: str = "") -> bytes:
    """A header block for a gRPC call, every field a literal that is never indexed."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    fields += [("authorization", f"Bearer {token}")] if token else []
    return b"".join(b"\x10" + text(name) + text(value) for name, value in fields)


def text(words: str) -> bytes:
    """As a header has it: not compressed, with its length."""
    raw = words.encode()
    assert len(raw) < 127, "one byte of length is enough here"
    return bytes([len(raw)]) + raw


def message(raw: bytes) -> bytes:
    """As gRPC frames it: not compressed, with its length."""
    return b"\x00" + struct.pack(">I", len(raw)) + raw


def dial(address: str, timeout_s: float = 30.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def hello(address: str, settings: bytes = b"") -> socket.socket:
    """A connection that has introduced itself."""
    connection = dial(address)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0, b""))
    return connection


TAKES_NOTHING = struct.pack(">HI", 4, 0)
"""SETTINGS_INITIAL_WINDOW_SIZE=0 (RFC 9113, 6.5.2): the other end may send no byte of an answer."""


def is_over(connection: socket.socket) -> bool:
    """Whether the other end has hung up; what it has said meanwhile is thrown away."""
    connection.setblocking(False)
    try:
        with suppress(BlockingIOError):
            while True:
                if not connection.recv(65536):
                    return True
        return False
    except OSError:
        return True


def heard(connection: socket.socket, stream: int, timeout_s: float) -> int | None:
    """The kind of the first frame that ends ``stream`` or the connection (0 for trailers); None in ``timeout_s``."""
    connection.settimeout(timeout_s)
    try:
        while True:
            head = _exactly(connection, 9)
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            which = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
            _exactly(connection, length)
            if which == stream and (kind == RST or (kind in (DATA, HEADERS) and flags & END_STREAM)):
                return kind if kind == RST else DATA
            if kind == GOAWAY:
                return GOAWAY
    except TimeoutError:
        return None
    except OSError:
        return GOAWAY


def _exactly(connection: socket.socket, count: int) -> bytes:
    out = b""
    while len(out) < count:
        more = connection.recv(count - len(out))
        if not more:
            raise ConnectionResetError
        out += more
    return out
