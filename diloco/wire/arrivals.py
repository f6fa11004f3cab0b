"""How a call comes in: the door is passed before a byte of it is read, and its first message must come soon.

gRPC itself reads the one message of a unary call in the handler's thread, before the handler is asked and without a
bound: a few callers who open calls and never send anything would hold every thread, known or not.  So every method is
a stream of requests to gRPC, which is the same on the wire, and its first message is read here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire.answers import forget
from diloco.wire.gates import WaitingRoom
from diloco.wire.messages import MalformedMessage, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from diloco.wire.door import Door
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions
    from diloco.wire.stall import StallWatch


class Arrivals:
    """The way in of all services of one server."""

    def __init__(self, door: Door, stalls: StallWatch, options: ServerOptions) -> None:
        self._door = door
        self._stalls = stalls
        self._header_timeout_s = options.header_timeout_s
        self._stall_s = options.stall_s
        self._silent = WaitingRoom(options.calls_max // 2)

    def enter(self, method: str, context: Any) -> AbstractContextManager[Identity]:
        """Be inside, as whom it is (``Door.enter``, which refuses in words)."""
        return self._door.enter(method, context)

    @contextmanager
    def waiting(self, identity: Identity | None, context: Any) -> Iterator[None]:
        """Inside, the first message of a call of ``identity`` (None: a stranger) is waited for."""
        with self._silent.enter(self.caller(identity, context), context.cancel):
            yield

    def first(
        self, requests: Iterator[bytes], context: Any, identity: Identity | None, *, large: bool = False
    ) -> bytes:
        """The one message of a call, of which a ``large`` one may take as long as a stream that stalls."""
        limit_s = self._stall_s if large else self._header_timeout_s
        with self.waiting(identity, context), self._stalls.guard(limit_s, context.cancel) as guard:
            try:
                raw = next(requests, None)
            except grpc.RpcError as error:
                forget(error)
                if not guard.stalled:
                    raise
        if guard.stalled:
            raise Refusal(Status.DEADLINE_EXCEEDED, f"no message came within {limit_s:g} s")
        if raw is None:
            raise MalformedMessage("the call ended before its message")
        return raw

    def caller(self, identity: Identity | None, context: Any) -> str:
        """By whom calls are counted (``Identity.caller``); a stranger by connection too."""
        return f"peer {context.peer()}" if identity is None else identity.caller(context)
