"""One attempt to send an update, over one stream or several.

``Sending`` is the sending half.  gRPC's own threads run it while the caller waits for the answer.  One stream opens the
push and commits it.  Where the path is longer than one TCP connection can fill, other streams run beside it.  Each
takes the next chunk from what is left whenever flow control lets it, so a slow one takes fewer.

``Pushing`` is the whole attempt: it opens the streams, reads the answers and returns the result.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert_bulk
from diloco.wire.chunks import PIECE_BYTES_MIN, ChunkSize, bytes_at_risk, tail_chunk
from diloco.wire.messages import (
    AGAINS_MAX,
    CHUNK_BYTES_MIN,
    Chunk,
    Frame,
    MalformedMessage,
    PushAdmitted,
    PushAgain,
    PushCommit,
    PushHeader,
    PushResult,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diloco.wire.channel import Calls, Guard, Pacer, StallWatch
    from diloco.wire.messages import WireError
    from diloco.wire.options import ClientOptions


class Sending:
    """Header; then chunks from the admitted offset; then commit.

    To who is known to take it, everything goes at once, from byte 0, and what is held there is left out as soon as that
    is known: a far syncer's word costs a round trip, and is nearly always that it has nothing yet.

    gRPC asks for the next message when the last one has passed flow control, so each asking is progress.
    """

    def __init__(
        self,
        header: PushHeader,
        payload: memoryview,
        options: ClientOptions,
        guard: Guard,
        sent: Callable[[int], None],
        pacer: Pacer,
        breaks: int = 0,
        *,
        at_once: bool = False,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """``breaks``: connections that have broken under this payload before.  ``at_once``: without waiting to be
        admitted.  ``arrived`` wants to be told, time and again, how many bytes the syncer holds."""
        self._header = replace(header, frames=True, progress=breaks > 0 or arrived is not None)
        self._arrived = arrived
        self._breaks = breaks
        self._began = self._held = 0
        self._payload = payload
        self._options = options
        self._guard = guard
        self._sent = sent
        self._pacer = pacer
        self._changed = threading.Condition()
        self._stopped = False
        self._at: int | None = 0 if at_once else None
        self.admitted = False
        """Whether the syncer has said from where on it wants the rest."""
        self._again: deque[tuple[int, int]] = deque()
        self._agains = 0
        self._beside = 0
        self._committed = False
        self._carrying: set[Guard] = set()
        self._broken: set[Guard] = set()
        self._resumed = False
        self.frames = at_once

    def admit(self, admitted: PushAdmitted) -> None:
        """The syncer holds so many bytes and wants the rest."""
        with self._changed:
            self.frames = admitted.frames
            self._resumed = admitted.offset > 0
            self._began = self._held = admitted.offset
            self._at = max(self._at or 0, admitted.offset)
            self.admitted = True
            self._changed.notify_all()

    def held(self, offset: int) -> None:
        """The syncer holds so many bytes by now."""
        with self._changed:
            self._held = max(self._held, offset)
            if self._arrived is not None:
                self._arrived(self._held)
            self._changed.notify_all()

    def again(self, wanted: PushAgain) -> None:
        """The syncer wants these bytes once more.  ``MalformedMessage`` where it cannot, or too often."""
        if self._at is None or wanted.offset + wanted.length > self._at:
            raise MalformedMessage(f"offset is {wanted.offset}: bytes are wanted again that were not sent")
        with self._changed:
            self._agains += 1
            if self._agains > AGAINS_MAX:
                raise MalformedMessage(f"chunks are wanted again for the {self._agains}th time")
            self._again.append((wanted.offset, wanted.length))
            self._committed = False
            self._guard.limit(self._options.stall_s)
            self._changed.notify_all()

    def stop(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def requests(self) -> Iterator[bytes]:
        """The messages of the stream that opens and commits the push, made as gRPC asks for them."""
        yield self._counted(convert_bulk.pack_push(self._header))
        with self._changed:
            # The caller's guard bounds this wait: when it ends, for whatever reason, ``stop`` is called.
            self._changed.wait_for(lambda: self._stopped or self._at is not None)
        while not self._stopped:
            yield from self._chunks(self._guard)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._again or self._may_commit())
                if self._stopped:
                    return
                if self._again:
                    continue
                self._committed = True
            yield self._counted(convert_bulk.pack_push(PushCommit(self._header.payload_bytes, self._header.digest)))
            with self._changed:
                if self._committed:
                    self._guard.limit(self._options.answer_s)
                self._changed.wait_for(lambda: self._stopped or self._again)

    def _may_commit(self) -> bool:
        """Who was not told how many streams there are takes a commit for the end of all of them."""
        return self._header.others > 0 or not self._beside

    def beside(self, guard: Guard) -> Iterator[bytes]:
        """The messages of a stream beside that one, begun with ``join_in``."""
        yield self._counted(convert_bulk.pack_push(replace(self._header, beside=True)))
        yield from self._chunks(guard)

    def carries(self, guard: Guard) -> bool:
        """Whether the stream of ``guard`` beside the first, which has broken off, was given chunks: then the push has.

        One that was given none gets none any more.
        """
        with self._changed:
            self._broken.add(guard)
            return guard in self._carrying

    def join_in(self) -> None:
        """One more stream beside the first; ``leave`` must follow."""
        with self._changed:
            self._beside += 1

    def leave(self) -> None:
        """A stream beside the first is over, and everything that it sent has been taken."""
        with self._changed:
            self._beside -= 1
            self._changed.notify_all()

    def _chunks(self, guard: Guard) -> Iterator[bytes]:
        longest = self._pacer.chunk_bytes(self._options.chunk_bytes)
        size = ChunkSize(CHUNK_BYTES_MIN, longest, careful=self._resumed)
        while (place := self._next(size.bytes, guard)) is not None:
            offset, length = place
            self._pacer.wait(length, guard)
            data = self._payload[offset : offset + length]
            began_s = time.monotonic()
            yield self._counted(convert_bulk.pack_push(Frame(offset, data) if self.frames else Chunk.of(offset, data)))
            size.took(time.monotonic() - began_s)
            guard.touch()

    def _next(self, chunk_bytes: int, guard: Guard) -> tuple[int, int] | None:
        with self._changed:
            # What is on its way when a connection breaks is lost: no more than can be spared on one that often does.
            self._changed.wait_for(lambda: self._stopped or self._again or self._spared(chunk_bytes))
            if self._stopped or guard in self._broken:
                return None
            if self._again:
                self._carrying.add(guard)
                return self._again.popleft()
            assert self._at is not None, "not admitted yet"
            left = len(self._payload) - self._at
            if not left:
                return None
            offset, length = self._at, min(left, tail_chunk(chunk_bytes, left, 1 + self._beside))
            self._at += length
            self._carrying.add(guard)
            return offset, length

    def _spared(self, chunk_bytes: int) -> bool:
        """Whether one more chunk may be on its way; one always may, else nothing would ever move again."""
        assert self._at is not None, "not admitted yet"
        if not self.frames or not self._breaks or self._at <= self._held:
            return True
        return self._at + chunk_bytes <= self._held + bytes_at_risk(self._breaks, self._held - self._began)

    def _counted(self, message: bytes) -> bytes:
        self._sent(len(message))
        return message


class Pushing:
    """Opens the push on the first of ``bulk``, and the others beside it once it is admitted."""

    def __init__(
        self,
        bulk: Sequence[Calls],
        header: PushHeader,
        payload: memoryview,
        options: ClientOptions,
        stalls: StallWatch,
        sent: Callable[[int], None],
        pacer: Pacer,
        breaks: int,
        *,
        known: bool = False,
        at_once: bool = False,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """``breaks``: attempts of this very push that were broken off before; ``known``: the syncer understands
        how many streams there will be; ``at_once``: and will hardly refuse, so that nothing waits to be admitted;
        ``arrived`` is told now and then how much the syncer holds."""
        self._bulk = bulk
        others = min(len(bulk) - 1, header.payload_bytes // PIECE_BYTES_MIN) if known else 0
        self._header = replace(header, others=others)
        self._at_once = at_once
        self._arrived = arrived
        self._payload = payload
        self._options = options
        self._stalls = stalls
        self._sent = sent
        self._pacer = pacer
        self._breaks = breaks
        self._lock = threading.Lock()
        self._others: list[tuple[Any, threading.Thread]] = []
        self._opened = False
        self._failed: WireError | None = None
        self.admitted = False
        """Whether the syncer has let it in: what breaks off before that has lost nothing on the way."""

    def run(self) -> PushResult:
        """Until its answer.  ``Refused`` or ``Unreachable``; where one stream breaks off, all do."""
        with self._stalls.guard(self._options.stall_s) as guard:
            of_bulk = (self._payload, self._options, guard, self._sent, self._pacer, self._breaks)
            sending = Sending(self._header, *of_bulk, at_once=self._at_once, arrived=self._arrived)
            call = self._bulk[0].exchange("Push", sending.requests())
            guard.arm(call.cancel)
            try:
                if self._at_once:
                    self._open_others(call, sending, 0)
                return self._answer(call, sending, guard)
            finally:
                self.admitted = sending.admitted
                sending.stop()
                call.cancel()
                for other, thread in self._others:
                    other.cancel()
                    thread.join()

    def _answer(self, call: Any, sending: Sending, guard: Guard) -> PushResult:
        result: PushResult | None = None
        try:
            for raw in call:
                reply = convert_bulk.unpack_push_reply(raw)
                guard.touch()
                if isinstance(reply, PushResult):
                    result = reply
                    sending.stop()
                elif result is None:
                    self._heard(reply, sending)
                    if isinstance(reply, PushAdmitted) and reply.frames:
                        self._open_others(call, sending, reply.offset)
        except MalformedMessage as error:
            raise Unreachable(f"Push: the syncer's answer cannot be: {error}") from error
        except grpc.RpcError as error:
            if result is None:
                raise self._why() or self._bulk[0].failed("Push", error, guard) from error
        if result is None:
            raise Unreachable("Push: the stream ended without an answer")
        return result

    def _heard(self, reply: PushAdmitted | PushAgain, sending: Sending) -> None:
        if isinstance(reply, PushAgain):
            sending.again(reply)
        elif sending.admitted:
            sending.held(reply.offset)
        elif reply.offset > self._header.payload_bytes:
            raise MalformedMessage(f"offset is {reply.offset}: the payload has {self._header.payload_bytes} bytes")
        else:
            sending.admit(reply)

    def _open_others(self, first: Any, sending: Sending, offset: int) -> None:
        if self._opened:
            return
        self._opened = True
        worth = (self._header.payload_bytes - offset) // PIECE_BYTES_MIN
        for bulk in self._bulk[1 : 1 + worth]:
            guard = self._stalls.guard(self._options.stall_s)
            sending.join_in()
            call = bulk.exchange("Push", sending.beside(guard))
            guard.arm(call.cancel)
            thread = threading.Thread(
                target=self._beside, args=(bulk, call, first, sending, guard), name="push-beside", daemon=True
            )
            thread.start()
            self._others.append((call, thread))

    def _beside(self, bulk: Calls, call: Any, first: Any, sending: Sending, guard: Guard) -> None:
        """Hears what the syncer says on a stream beside the first; a thread of its own."""
        with guard:
            try:
                for raw in call:
                    reply = convert_bulk.unpack_push_reply(raw)
                    guard.touch()
                    if isinstance(reply, PushAdmitted):
                        sending.held(reply.offset)  # Only the first stream's word says from where on it is wanted.
                    elif isinstance(reply, PushAgain):
                        self._heard(reply, sending)
            except MalformedMessage as error:
                self._break_off(Unreachable(f"Push: the syncer's answer cannot be: {error}"), call, first)
            except grpc.RpcError as error:
                why = bulk.failed("Push", error, guard)
                if sending.carries(guard):  # Otherwise the others do without it.
                    self._break_off(why, call, first)
            finally:
                sending.leave()

    def _break_off(self, why: WireError, call: Any, first: Any) -> None:
        with self._lock:
            self._failed = self._failed or why
        call.cancel()
        first.cancel()

    def _why(self) -> WireError | None:
        with self._lock:
            return self._failed
