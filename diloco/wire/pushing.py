"""One attempt to send an update, over one stream or several."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire import convert_bulk
from diloco.wire.chunks import PIECE_BYTES_MIN
from diloco.wire.messages import MalformedMessage, PushAdmitted, PushAgain, PushHeader, PushResult, Unreachable
from diloco.wire.sending import Sending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.wire.calls import Calls
    from diloco.wire.messages import WireError
    from diloco.wire.options import ClientOptions
    from diloco.wire.pacing import Pacer
    from diloco.wire.stall import Guard, StallWatch


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
