"""Floods of frames that HTTP/2 allows and no peer of ours would send, each as fast as one connection takes them.

What is due to each is what gRPC does about it: the connection is ended, or the streams are refused, or, where gRPC has
no rule, the frames are borne.  Those cost the syncer up to a core for each connection as long as they last, in threads
of gRPC's own, and nothing that we could set ends them; who may connect is then the bound (client certificates, or a
firewall).  In all cases what they take in memory is bounded, and the rounds of others go on.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from diloco.wire.channel import SYNC_SERVICE
from tests.hunts import http2

PUSH = f"/{SYNC_SERVICE}/Push"
Pieces = Callable[[str], Iterator[bytes]]
QUIET_S = 1.0
"""What was sent before is looked at for so long after the last piece."""


class Due(Enum):
    """What is done about a flood; who is ended is refused too."""

    ENDED = "ended"
    REFUSED = "refused"
    BORNE = "borne"


@dataclass
class Flooded:
    """What became of one connection; ``kinds`` are the frames that were heard."""

    sent_bytes: int = 0
    ended: bool = False
    kinds: set[int] = field(default_factory=set)

    @property
    def due(self) -> Due:
        """What was done about it."""
        if self.ended or http2.GOAWAY in self.kinds:
            return Due.ENDED
        return Due.REFUSED if http2.RST in self.kinds else Due.BORNE


def flood(address: str, pieces: Iterator[bytes], seconds: float) -> Flooded:
    """Send until ``seconds`` have passed or the other end has had enough; what it says is read all the while."""
    found, heard, until_s = Flooded(), bytearray(), time.monotonic() + seconds
    with http2.hello(address) as connection:
        connection.settimeout(QUIET_S)
        try:
            for piece in pieces:
                connection.sendall(piece)
                found.sent_bytes += len(piece)
                _listen(connection, heard, found.kinds)
                if time.monotonic() > until_s:
                    break
            until_s = time.monotonic() + QUIET_S
            while time.monotonic() < until_s:
                _listen(connection, heard, found.kinds)
                time.sleep(0.05)
        except TimeoutError:
            pass  # It reads no more, which is its right, and hangs up only when it looks again.
        except OSError:
            found.ended = True
    return found


def _listen(connection: socket.socket, heard: bytearray, kinds: set[int]) -> None:
    """Take in what was said, without waiting; ``heard`` keeps what is not yet a whole frame."""
    timeout_s = connection.gettimeout()
    connection.setblocking(False)
    try:
        with suppress(BlockingIOError):
            while more := connection.recv(1 << 16):
                heard += more
            raise ConnectionResetError
    finally:
        connection.settimeout(timeout_s)
        at = 0
        while len(heard) - at >= 9 and len(heard) - at >= 9 + int.from_bytes(heard[at : at + 3], "big"):
            kinds.add(heard[at + 3])
            at += 9 + int.from_bytes(heard[at : at + 3], "big")
        del heard[:at]


def rapid_resets(token: str) -> Iterator[bytes]:
    """Streams that are opened and reset at once, so that there is always room for one more."""
    block = http2.headers(PUSH, token)
    for first in itertools.count(1, 200):
        opened = (_opened(stream, block) for stream in range(first, first + 200, 2))
        yield b"".join(opened)


def _opened(stream: int, block: bytes) -> bytes:
    reset = http2.frame(http2.RST, 0, stream, b"\x00\x00\x00\x08")
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, block) + reset


def new_names(token: str) -> Iterator[bytes]:
    """Streams of the same kind whose headers are all to be remembered."""
    for number in itertools.count():
        names = (b"\x40" + http2.text(f"x-{number}-{at}") + http2.text("v" * 100) for at in range(60))
        yield _opened(2 * number + 1, http2.headers(PUSH, token) + b"".join(names))


def endless_headers(token: str) -> Iterator[bytes]:
    """One block of headers that goes on and on."""
    yield http2.frame(http2.HEADERS, 0, 1, http2.headers(PUSH, token))
    for number in itertools.count():
        fields = b"\x10" + http2.text(f"x-{number}") + http2.text("v" * 100)
        yield http2.frame(http2.CONTINUATION, 0, 1, fields * 100)


def huge_header(token: str) -> Iterator[bytes]:
    """One header whose value is said to be a gigabyte, and comes."""
    length = b"\x7f" + b"\x81\xff\xff\xff\x03"
    block = http2.headers(PUSH, token) + b"\x10" + http2.text("x-large") + length
    yield http2.frame(http2.HEADERS, 0, 1, block)
    while True:
        yield http2.frame(http2.CONTINUATION, 0, 1, b"v" * 16_000) * 10


def empty_headers(token: str) -> Iterator[bytes]:
    """Continuations of nothing."""
    yield http2.frame(http2.HEADERS, 0, 1, http2.headers(PUSH, token))
    while True:
        yield http2.frame(http2.CONTINUATION, 0, 1, b"") * 1000


def empty_data(token: str) -> Iterator[bytes]:
    yield http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.headers(PUSH, token))
    while True:
        yield http2.frame(http2.DATA, 0, 1, b"") * 1000


def same(kind: int, stream: int, body: bytes, count: int) -> Pieces:
    """One frame over and over."""
    return lambda token: itertools.repeat(http2.frame(kind, 0, stream, body) * count)


FLOODS: dict[str, tuple[Pieces, Due]] = {
    "rapid_resets": (rapid_resets, Due.REFUSED),
    "new_names": (new_names, Due.REFUSED),
    "endless_headers": (endless_headers, Due.REFUSED),
    "huge_header": (huge_header, Due.REFUSED),
    "empty_headers": (empty_headers, Due.ENDED),
    "empty_data": (empty_data, Due.ENDED),
    "pings": (same(http2.PING, 0, bytes(8), 500), Due.ENDED),
    "settings": (same(http2.SETTINGS, 0, b"\x00\x03\x00\x00\x00\x64", 500), Due.BORNE),
    "long_settings": (same(http2.SETTINGS, 0, b"\x00\x03\x00\x00\x00\x64" * 2000, 10), Due.BORNE),
    "windows": (same(http2.WINDOW_UPDATE, 0, b"\x00\x00\x00\x01", 1000), Due.BORNE),
    "priorities": (same(http2.PRIORITY, 1, b"\x00\x00\x00\x00\x01", 1000), Due.BORNE),
    "unknown_frames": (same(0x63, 0, bytes(1000), 50), Due.BORNE),
}
"""By name, with the least that is done about it."""
