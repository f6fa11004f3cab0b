"""The bytes of one push on their way in, over one stream or several, to a session that wants them in order."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.wire.chunks import Assembler, ChunkError, DamagedChunk, Window
from diloco.wire.messages import (
    AGAINS_MAX,
    STREAMS_MAX,
    WINDOW_BYTES,
    Chunk,
    Frame,
    MalformedMessage,
    PushAgain,
    PushHeader,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.service import PushSession

LOOK_S = 0.25
ROOM_WAIT_S = 5.0
"""So long a stream waits for one that is behind it, before what it brought is let fall and asked for again."""


class Receiving:
    """One push.  Its streams call from a thread each; the session is called by one of them at a time."""

    def __init__(self, header: PushHeader, session: PushSession) -> None:
        self.header = header
        self._window = Window(header.payload_bytes, session.write, session.offset, WINDOW_BYTES)
        self._changed = threading.Condition()
        self._asked: set[int] = set()
        self.agains = 0
        """Times that something was asked for once more."""
        self._streams = 1
        self._over = False

    @property
    def offset(self) -> int:
        """Bytes that the session has."""
        return self._window.offset

    @property
    def awaits(self) -> bool:
        """Whether something was asked for again and has not come."""
        with self._changed:
            return bool(self._asked)

    def chunk(self, chunk: Chunk) -> None:
        """Take a chunk, which must be the next one.  ``ChunkError`` when it is not, or was damaged."""
        with self._changed:
            assembler = Assembler(self.header.payload_bytes, self._window.accept, self.offset)
            assembler.accept(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3)

    def frame(self, frame: Frame) -> PushAgain | None:
        """Take a frame.  What it was, when it has to be sent once more."""
        end = frame.offset + len(frame.data)
        if end > self.header.payload_bytes:
            raise ChunkError(f"frame at offset {frame.offset} ends at {end} of {self.header.payload_bytes} bytes")
        until_s = time.monotonic() + ROOM_WAIT_S
        with self._changed:
            while not self._over:
                if not frame.intact:
                    return self._ask(frame, "was damaged on the way")
                if self._window.accept(frame.offset, frame.data):
                    self._asked.discard(frame.offset)
                    self._changed.notify_all()
                    return None
                # Only another stream can be what everybody waits for, and not while it waits for a chunk once more:
                # that may come behind this one.
                waits = self._streams > 1 and not self._asked
                if not waits or not self._changed.wait(until_s - time.monotonic()):
                    return self._ask(frame, "found no room")
        raise DamagedChunk("the push that this stream belongs to is over")

    def _ask(self, frame: Frame, why: str) -> PushAgain | None:
        if frame.offset + len(frame.data) <= self.offset:
            return None
        self.agains += 1
        if self.agains > AGAINS_MAX:
            raise DamagedChunk(f"chunk at offset {frame.offset} {why}, as {AGAINS_MAX} before it")
        self._asked.add(frame.offset)
        self._changed.notify_all()
        return PushAgain(frame.offset, len(frame.data))

    def await_rest(self, moved: Callable[[], object], active: Callable[[], bool]) -> None:
        """Behind the commit: until what streams beside it still bring is here, or something is wanted once more.

        ``moved`` is told of what came; as soon as the sender is not ``active`` nothing more is expected.
        """
        with self._changed:
            while self.header.others and not (self._window.complete or self._asked) and active():
                before = self.offset
                self._changed.wait(LOOK_S)
                if self.offset > before:
                    moved()

    def finish(self) -> None:
        """``DamagedChunk`` unless every byte is there."""
        if not self._window.complete:
            raise DamagedChunk(f"payload ends at {self.offset} of {self.header.payload_bytes} bytes")

    @contextmanager
    def stream_beside(self) -> Iterator[None]:
        """One stream more brings chunks of this push."""
        with self._changed:
            if self._streams >= STREAMS_MAX:
                raise MalformedMessage(f"a push has at most {STREAMS_MAX} streams")
            self._streams += 1
        try:
            yield
        finally:
            with self._changed:
                self._streams -= 1

    def close(self) -> None:
        """The session takes nothing more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Receivings:
    """The pushes under way, so that streams beside the first find theirs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[tuple[str, int, int], Receiving] = {}

    @contextmanager
    def open(self, header: PushHeader, session: PushSession) -> Iterator[Receiving]:
        """A push that was admitted, as long as it is."""
        receiving = Receiving(header, session)
        with self._changed:
            self._open[_key(header)] = receiving
            self._changed.notify_all()
        try:
            yield receiving
        finally:
            receiving.close()
            with self._changed:
                if self._open.get(_key(header)) is receiving:
                    del self._open[_key(header)]

    def of(self, header: PushHeader, timeout_s: float, active: Callable[[], bool]) -> Receiving:
        """The one that a stream beside it belongs to.

        One that may come before that was admitted waits for it, at most ``timeout_s`` and while ``active``.
        ``DamagedChunk`` where it is over: what comes here is lost.
        """
        wanted, until_s = replace(header, beside=False), time.monotonic() + timeout_s
        with self._changed:
            while True:
                receiving = self._open.get(_key(header))
                if receiving is not None and receiving.header == wanted:
                    return receiving
                left_s = until_s - time.monotonic()
                if not header.others or left_s <= 0 or not active():
                    raise DamagedChunk("the push that this stream belongs to is over")
                self._changed.wait(min(left_s, LOOK_S))


def _key(header: PushHeader) -> tuple[str, int, int]:
    return header.site_id, header.fragment, header.sequence
