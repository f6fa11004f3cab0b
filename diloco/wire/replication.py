"""``ReplicationService``, between a syncer and its standby: its messages, as dataclasses and as bytes, and both ends.

The messages are those of ``replication.proto``.  Both ends check the bounds here, as ``messages`` does for the others.
``FollowHandlers`` is the syncer's handler, ``FollowClient`` and ``FollowStream`` are the standby's end.
"""

from __future__ import annotations

import queue
import re
import threading
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from diloco.wire import messages as m
from diloco.wire.arrivals import streamed
from diloco.wire.channel import REPLICATION_SERVICE, Calls, Line, StallWatch
from diloco.wire.chunks import ChunkError
from diloco.wire.convert import parse
from diloco.wire.messages import MalformedMessage, Refusal, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions
from diloco.wire.v1 import replication_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.channel import Guard
    from diloco.wire.door import Counters, OneAtATime
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions

ITEM_BYTES_MAX = m.PAYLOAD_BYTES_MAX
NAME_CHARS_MAX = 300

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(
    r"(snapshots/[0-9]{8}|lineages/[0-9]{1,19}|spool/(\.above|[A-Za-z0-9][A-Za-z0-9._-]*)|above/outbox)"
    r"/[A-Za-z0-9][A-Za-z0-9._-]*"
)


@dataclass(frozen=True, slots=True)
class FollowStart:
    """Where the standby's journal ends: after the unit of ``segment`` whose chain value is ``chain``; 0 for nowhere."""

    run_id: str
    standby: str
    layout_fingerprint: str
    shared_digest: str
    segment: int
    chain: str


@dataclass(frozen=True, slots=True)
class FollowAck:
    """Everything up to byte ``offset`` of the syncer's ``segment`` is durable at the standby."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class Follows:
    """What comes goes on from where the standby is; ``anew``: it is a snapshot, then the journal from ``segment`` on.

    ``chain`` is the value before that segment; ``lineage`` the run's.  ``waits`` is whether nothing is told before the
    standby has it, as long as no operator says otherwise.
    """

    anew: bool
    segment: int
    chain: str
    lineage: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """A file of the data folder by ``name``, or (without one) a unit of the journal; its bytes follow in chunks."""

    name: str
    segment: int
    offset: int
    item_bytes: int
    digest: str


FollowPart = Follows | Item | m.Chunk | m.Alive


def pack_request(part: FollowStart | FollowAck) -> bytes:
    """``FollowRequest``."""
    if isinstance(part, FollowAck):
        ack = replication_pb2.FollowAck(segment=part.segment, offset=part.offset)
        return replication_pb2.FollowRequest(ack=ack).SerializeToString()
    start = replication_pb2.FollowStart(
        run_id=part.run_id,
        standby=part.standby,
        layout_fingerprint=part.layout_fingerprint,
        shared_digest=part.shared_digest,
        segment=part.segment,
        chain=part.chain,
    )
    return replication_pb2.FollowRequest(start=start).SerializeToString()


def unpack_request(raw: bytes) -> FollowStart | FollowAck:
    """``FollowRequest``."""
    proto = parse(replication_pb2.FollowRequest, raw, m.CONTROL_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "start":
            start = proto.start
            _match("run_id", start.run_id, _NAME)
            _match("standby", start.standby, _NAME)
            _match("layout_fingerprint", start.layout_fingerprint, _HEX)
            _match("shared_digest", start.shared_digest, _NAME)
            if start.chain or start.segment:
                _match("chain", start.chain, _HEX)
                _number("segment", start.segment, 1)
            return FollowStart(
                start.run_id,
                start.standby,
                start.layout_fingerprint,
                start.shared_digest,
                start.segment,
                start.chain,
            )
        case "ack":
            _number("segment", proto.ack.segment)
            _number("offset", proto.ack.offset)
            return FollowAck(proto.ack.segment, proto.ack.offset)
        case _:
            raise m.MalformedMessage("part is not set: a start or an ack wanted")


def pack_part(part: FollowPart) -> bytes:
    """``FollowResponse``."""
    match part:
        case Follows():
            follows = replication_pb2.Follows(
                anew=part.anew, segment=part.segment, chain=part.chain, lineage=part.lineage, waits=part.waits
            )
            return replication_pb2.FollowResponse(follows=follows).SerializeToString()
        case Item():
            item = replication_pb2.Item(
                name=part.name,
                segment=part.segment,
                offset=part.offset,
                item_bytes=part.item_bytes,
                digest=part.digest,
            )
            return replication_pb2.FollowResponse(item=item).SerializeToString()
        case m.Chunk():
            chunk = sync_pb2.Chunk(offset=part.offset, data=bytes(part.data), crc32=part.crc32, xxh3=part.xxh3)
            return replication_pb2.FollowResponse(chunk=chunk).SerializeToString()
        case m.Alive():
            return replication_pb2.FollowResponse(alive=sync_pb2.Alive()).SerializeToString()


def unpack_part(raw: bytes) -> FollowPart:
    """``FollowResponse``."""
    proto = parse(replication_pb2.FollowResponse, raw, m.MESSAGE_BYTES_MAX)
    match proto.WhichOneof("part"):
        case "follows":
            follows = proto.follows
            if follows.chain:
                _match("chain", follows.chain, _HEX)
            _number("segment", follows.segment)
            _number("lineage", follows.lineage)
            return Follows(follows.anew, follows.segment, follows.chain, follows.lineage, follows.waits)
        case "item":
            return _item(proto.item)
        case "chunk":
            chunk = proto.chunk
            return m.Chunk(chunk.offset, chunk.data, chunk.crc32, chunk.xxh3 if chunk.HasField("xxh3") else None)
        case "alive":
            return m.Alive()
        case _:
            raise m.MalformedMessage("part is not set: follows, an item, a chunk or alive wanted")


def _item(item: replication_pb2.Item) -> Item:
    if item.name:
        if len(item.name) > NAME_CHARS_MAX or ".." in item.name:
            raise m.MalformedMessage(f"name is {item.name[:80]!r}: a file of a data folder wanted")
        _match("name", item.name, _FILE)
    _number("segment", item.segment)
    _number("offset", item.offset)
    _number("item_bytes", item.item_bytes, 0 if item.name else 1, ITEM_BYTES_MAX)
    _match("digest", item.digest, _HEX)
    return Item(item.name, item.segment, item.offset, item.item_bytes, item.digest)


def _match(field: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise m.MalformedMessage(f"{field} is {value[:80]!r}: it cannot be")


def _number(field: str, value: int, low: int = 0, high: int = m.NUMBER_MAX) -> None:
    if not low <= value <= high:
        raise m.MalformedMessage(f"{field} is {value}: a number from {low} to {high} wanted")


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
