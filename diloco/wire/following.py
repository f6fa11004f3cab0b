"""Both ends of ``ReplicationService``: the syncer's handler, and the stream of a standby."""

from __future__ import annotations

import queue
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from diloco.wire.answers import streamed
from diloco.wire.calls import REPLICATION_SERVICE, Calls
from diloco.wire.chunks import ChunkError
from diloco.wire.lines import Line
from diloco.wire.messages import MalformedMessage, Refusal, Status, Unreachable
from diloco.wire.options import ClientOptions
from diloco.wire.replication import (
    FollowAck,
    FollowPart,
    FollowStart,
    pack_part,
    pack_request,
    unpack_part,
    unpack_request,
)
from diloco.wire.security import SecurityOptions
from diloco.wire.stall import StallWatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.gates import Counters, OneAtATime
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions
    from diloco.wire.stall import Guard


STOPS = "the syncer stops"
"""What a standby hears last of one that ends in order."""


class Followed(Protocol):
    """One standby being served.  ``parts`` is for one thread, the other methods for any."""

    def parts(self) -> Iterator[FollowPart]:
        """Everything, for as long as it is not closed; ``Alive`` when there is nothing."""
        ...

    def acknowledged(self, ack: FollowAck) -> None:
        """The standby has it."""
        ...

    def close(self) -> None:
        """It is gone.  Always called, last; perhaps twice."""
        ...


class Following(Protocol):
    """The syncer behind the network, for standbys."""

    def follow(self, start: FollowStart) -> Followed:
        """Serve a standby from where it is.  Refuses with FAILED_PRECONDITION one whose journal is not of this one."""
        ...


class FollowHandlers:
    """``ReplicationService`` over one ``Following``."""

    def __init__(
        self,
        api: Following,
        options: ServerOptions,
        arrivals: Arrivals,
        one: OneAtATime,
        counters: Counters,
        stopping: threading.Event,
    ) -> None:
        self._api, self._options, self._arrivals = api, options, arrivals
        self._one, self._counters, self._stopping = one, counters, stopping

    def generic_handler(self) -> Any:
        """What gRPC's server takes."""
        handlers = {"Follow": grpc.stream_stream_rpc_method_handler(self._handler)}
        return grpc.method_handlers_generic_handler(REPLICATION_SERVICE, handlers)

    def _handler(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        return streamed(self._let_in(requests, context), context, "Follow", self._counters)

    def _let_in(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with self._arrivals.enter("Follow", context) as identity:
            yield from self._follow(requests, context, identity)

    def _follow(self, requests: Iterator[bytes], context: Any, identity: Identity) -> Iterator[bytes]:
        start = unpack_request(self._arrivals.first(requests, context, identity))
        if not isinstance(start, FollowStart):
            raise MalformedMessage("the first message of a standby is not its start")
        if start.run_id != self._options.run_id:
            raise Refusal(Status.NOT_FOUND, f"run_id is {start.run_id!r}: there is no such run here")
        with self._one.enter(("standby",), 0, context.cancel), closing(self._api.follow(start)) as followed:
            listener = threading.Thread(
                target=self._listen, args=(requests, followed), name="standby-acks", daemon=True
            )
            listener.start()
            for part in followed.parts():
                if self._stopping.is_set():
                    raise Refusal(Status.UNAVAILABLE, STOPS)
                yield pack_part(part)

    def _listen(self, requests: Iterator[bytes], followed: Followed) -> None:
        """In a thread of its own: what the standby says until it is gone."""
        try:
            for raw in requests:
                ack = unpack_request(raw)
                if not isinstance(ack, FollowAck):
                    raise MalformedMessage("a standby starts once")
                followed.acknowledged(ack)
        except (grpc.RpcError, MalformedMessage):
            self._counters.add("broken_off")
        finally:
            followed.close()


class FollowClient:
    """A standby's end."""

    def __init__(
        self, address: str, security: SecurityOptions | None = None, options: ClientOptions | None = None
    ) -> None:
        self._options = options or ClientOptions()
        line = Line(address, security or SecurityOptions(), self._options.channel_arguments())
        self._calls = Calls(line, REPLICATION_SERVICE)
        self._stalls = StallWatch("stalls-standby")

    def follow(self, start: FollowStart) -> FollowStream:
        """Everything that the syncer keeps, as it becomes durable there."""
        return FollowStream(self._calls, start, self._stalls.guard(self._options.stall_s))

    def close(self) -> None:
        """End every stream; they raise ``Unreachable``."""
        self._calls.close()
        self._stalls.close()


class FollowStream:
    """Parts, to be iterated by one thread; ``ack`` and ``cancel`` may come from others.  Use it in ``with``.

    Raises ``Unreachable`` or ``Refused`` when it ends by itself.
    """

    def __init__(self, calls: Calls, start: FollowStart, guard: Guard) -> None:
        self._said: queue.SimpleQueue[FollowStart | FollowAck | None] = queue.SimpleQueue()
        self._said.put(start)
        self._calls = calls
        self._guard = guard
        self._call = calls.exchange("Follow", self._requests())
        guard.arm(self._call.cancel)

    def _requests(self) -> Iterator[bytes]:
        while (part := self._said.get()) is not None:
            yield pack_request(part)

    def __enter__(self) -> FollowStream:
        self._guard.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._guard.__exit__(kind, error, at)
        self.cancel()

    def __iter__(self) -> Iterator[FollowPart]:
        return self

    def __next__(self) -> FollowPart:
        try:
            part = unpack_part(next(self._call))
        except StopIteration:
            raise Unreachable("Follow: the stream ended") from None
        except grpc.RpcError as error:
            raise self._calls.failed("Follow", error, self._guard) from error
        except (MalformedMessage, ChunkError) as error:
            raise Unreachable(f"Follow: the syncer's answer cannot be: {error}") from error
        self._guard.touch()
        return part

    def ack(self, ack: FollowAck) -> None:
        """Say that everything up to there is durable here."""
        self._said.put(ack)

    def cancel(self) -> None:
        """End the stream; the thread that iterates is woken."""
        self._said.put(None)
        self._call.cancel()
