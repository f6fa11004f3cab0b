"""The sending half of one push, run by gRPC's own thread while the caller waits for the answer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.wire import convert_bulk
from diloco.wire.chunks import cut
from diloco.wire.messages import Chunk, PushCommit, PushHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.options import ClientOptions
    from diloco.wire.stall import Guard


class Sending:
    """Header; then, when admitted, chunks from the admitted offset; then commit.

    gRPC asks for the next message when the last one has passed flow control, so each asking is progress.
    """

    def __init__(
        self, header: PushHeader, payload: memoryview, options: ClientOptions, guard: Guard, sent: Callable[[int], None]
    ) -> None:
        self._header = header
        self._payload = payload
        self._options = options
        self._guard = guard
        self._sent = sent
        self._decided = threading.Event()
        self._offset: int | None = None

    def admit(self, offset: int) -> None:
        """The syncer holds ``offset`` bytes and wants the rest."""
        self._offset = offset
        self._decided.set()

    def stop(self) -> None:
        """Send nothing more."""
        self._offset = None
        self._decided.set()

    def requests(self) -> Iterator[bytes]:
        """The messages, made as gRPC asks for them."""
        yield self._counted(convert_bulk.pack_push(self._header))
        # The caller's guard bounds this wait: when it ends, for whatever reason, ``stop`` is called.
        self._decided.wait()
        begin = self._offset
        if begin is None:
            return
        for each in cut((self._payload,), self._options.chunk_bytes, begin):
            if self._offset is None:
                return
            yield self._counted(convert_bulk.pack_push(Chunk(*each)))
            self._guard.touch()
        yield self._counted(convert_bulk.pack_push(PushCommit(self._header.payload_bytes, self._header.digest)))
        self._guard.limit(self._options.answer_s)

    def _counted(self, message: bytes) -> bytes:
        self._sent(len(message))
        return message
