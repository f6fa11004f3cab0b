"""What a standby and the syncer say to each other, as plain dataclasses and as bytes; ``replication.proto`` in Python.

Bounds are checked here on both ends, as those of the other messages are in ``bounds``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diloco.wire import messages as m
from diloco.wire.convert import parse
from diloco.wire.v1 import replication_pb2, sync_pb2

ITEM_BYTES_MAX = m.PAYLOAD_BYTES_MAX
NAME_CHARS_MAX = 300

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(
    r"(snapshots/[0-9]{8}|lineages/[0-9]{1,19}|spool/[A-Za-z0-9][A-Za-z0-9._-]*)/[A-Za-z0-9][A-Za-z0-9._-]*"
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
