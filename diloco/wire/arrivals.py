"""How a call comes in: who calls is asked before a byte of it is read, and its first message must come soon.

gRPC itself reads the one message of a unary call in the handler's thread, before the handler is asked and without a
bound: a few callers who open calls and never send anything would hold every thread, known or not.  So every method is
a stream of requests to gRPC, which is the same on the wire, and its first message is read here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from diloco.wire.gates import WaitingRoom
from diloco.wire.messages import MalformedMessage, Refusal, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.wire.options import ServerOptions
    from diloco.wire.security import Authenticator, Identity
    from diloco.wire.stall import StallWatch


class Arrivals:
    """The door of all services of one server."""

    def __init__(self, authenticator: Authenticator, stalls: StallWatch, options: ServerOptions) -> None:
        self._authenticator = authenticator
        self._stalls = stalls
        self._header_timeout_s = options.header_timeout_s
        self._stall_s = options.stall_s
        self._silent = WaitingRoom(options.calls_max // 2)

    def identify(self, context: Any) -> Identity:
        """Who calls; refuses with UNAUTHENTICATED."""
        return self._authenticator.identify(context)

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
            except grpc.RpcError:
                if not guard.stalled:
                    raise
        if guard.stalled:
            raise Refusal(Status.DEADLINE_EXCEEDED, f"no message came within {limit_s:g} s")
        if raw is None:
            raise MalformedMessage("the call ended before its message")
        return raw

    def caller(self, identity: Identity | None, context: Any) -> str:
        """By whom calls are counted: by connection where callers cannot be told apart."""
        if identity is None or identity.anyone:
            return f"peer {context.peer()}"
        return identity.site or ("an admin" if identity.admin else "an observer")
