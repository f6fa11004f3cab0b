"""Messages to bytes and back.

Fields have the same names in the dataclass and in protobuf, so both directions follow from a message's annotations and
the descriptor of its generated class: an enum is sent by its members' names, a record as a nested message, a tuple as a
repeated field, and None as an unset field.  Exceptions are in ``_BY_HAND``.  The conversion is computed once, where a
message is declared.

Every bound is checked in both directions.  For a message that breaks the contract ``pack_*`` and ``unpack_*`` raise
only ``MalformedMessage``, except ``DamagedChunk`` for a frame with a damaged head.  The length is checked before
parsing, because parsing can take 44 times a message's length in memory.

Frames.  A chunk may be sent as a frame: a head of 24 bytes, then the data itself, which a receiver reads in place.  The
head is little-endian: a zero byte, the kind (1), two zero bytes, the CRC-32 of the sixteen bytes that follow, the
offset in the payload, the XXH3-64 of the data with the offset as its seed.  No protobuf message begins with a zero
byte, because no field has the number 0, so frames and messages can share a stream.

Protobuf would cost a second copy of every byte at each end, and a CRC-32 at a tenth of the speed.  The head has its own
checksum because the receiver requests damaged data again by its offset, which it knows only if the head is intact.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from diloco.sync.data_units import SKIPPED
from diloco.sync.events import FateTold, FinalAnnounced, FragmentStanding, UnitsTold
from diloco.sync.journal import parse_json
from diloco.sync.progress import SPANS_MAX
from diloco.wire import messages as m
from diloco.wire.chunks import DamagedChunk
from diloco.wire.v1 import admin_pb2, replication_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.data_units import Span


M = TypeVar("M")


def parse(kind: Any, raw: bytes, bytes_max: int) -> Any:
    """Parse a message of the generated ``kind``, without its bounds; ``MalformedMessage`` if too long or unreadable."""
    if len(raw) > bytes_max:
        raise m.MalformedMessage(f"message is {len(raw)} bytes long: at most {bytes_max} wanted")
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise m.MalformedMessage("message cannot be parsed as the type that its method takes") from error


# --- fields that are converted by hand -------------------------------------------------------------------------


def _unit_list_in(told: sync_pb2.UnitList) -> UnitsTold:
    if len(told.units) != len(told.counts):
        raise m.MalformedMessage(f"units has {len(told.units)} runs: {len(told.counts)} wanted, as counts has")
    starts = [unit - 1 if unit else SKIPPED for unit in told.units]
    return UnitsTold(told.first, tuple(zip(starts, told.counts, strict=True)))


def spans_in(numbers: Sequence[int]) -> tuple[Span, ...]:
    """Rebuild the spans; ``MalformedMessage`` for an odd count of numbers or more than ``SPANS_MAX`` spans."""
    if len(numbers) % 2 or len(numbers) > 2 * SPANS_MAX:
        raise m.MalformedMessage(f"spans has {len(numbers)} numbers: a first and an end of each wanted")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _finite_or_none(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _as_it_is(value: Any) -> Any:
    return value


_Way = Callable[[Any], Any]
_Ways = tuple[_Way, _Way]
"""A conversion to what protobuf takes (a nested message is a dict of its fields), and one back from what it returns."""

_BY_HAND: Mapping[tuple[type, str], _Ways] = {
    # Spans are flattened to first, end, first, end...
    (m.PushHeader, "spans"): (lambda spans: [number for span in spans for number in span], spans_in),
    # Only a client of protocol 2 leaves it unset.
    (m.PullAsk, "protocol"): (_as_it_is, lambda protocol: protocol or 2),
    (m.ReportInfo, "loss"): (_finite_or_none, _finite_or_none),
    (m.ReportReply, "units"): (
        lambda told: {
            "first": told.first,
            "units": [0 if start == SKIPPED else start + 1 for start, _ in told.pieces],
            "counts": [count for _, count in told.pieces],
        },
        _unit_list_in,
    ),
    (m.Chunk, "data"): (bytes, _as_it_is),
    (FragmentStanding, "undecided"): (
        lambda pairs: [{"sequence": sequence, "tokens": tokens} for sequence, tokens in pairs],
        lambda items: tuple((item.sequence, item.tokens) for item in items),
    ),
}


# --- all others ------------------------------------------------------------------------------------------------


def _message_ways(kind: type, descriptor: Any) -> _Ways:
    """Return the conversions from a ``kind`` to its generated message's fields and back, without bound checks."""
    names = [field.name for field in fields(kind)]
    get = attrgetter(*names) if len(names) > 1 else lambda source: [getattr(source, name) for name in names]
    outs: list[tuple[str, _Way]] = []
    backs: list[tuple[int, str, _Way, bool]] = []
    for place, name in enumerate(names):
        field = descriptor.fields_by_name[name]
        out, back = _value_ways(kind, name, field)
        may_lack = field.has_presence and m.taken_apart(m.annotations_of(kind)[name])[2]
        if out is not _as_it_is:
            outs.append((name, out))
        if back is not _as_it_is or may_lack:
            backs.append((place, name, back, may_lack))

    def message_out(message: Any) -> dict[str, Any]:
        values = dict(zip(names, get(message), strict=True))
        for name, out in outs:
            if values[name] is not None:
                values[name] = out(values[name])
        return values

    def message_in(message: Any) -> Any:
        values = list(get(message))
        for place, name, back, may_lack in backs:
            values[place] = None if may_lack and not message.HasField(name) else back(values[place])
        return kind(*values)

    return message_out, message_in


def _value_ways(kind: type, name: str, descriptor: Any) -> _Ways:
    if (kind, name) in _BY_HAND:
        return _BY_HAND[kind, name]
    value, _, optional = m.taken_apart(m.annotations_of(kind)[name])
    if is_dataclass(value):
        return _message_ways(value, descriptor.message_type)  # type: ignore[arg-type]
    if isinstance(value, type) and issubclass(value, Enum):
        return _enum_ways(name, value, optional, descriptor.enum_type)
    if get_origin(value) is Mapping:
        return dict, dict
    if get_origin(value) is not tuple:
        return _as_it_is, _as_it_is
    if descriptor.message_type is None:
        return _as_it_is, tuple
    out, back = _message_ways(get_args(value)[0], descriptor.message_type)
    return lambda items: [out(item) for item in items], lambda items: tuple([back(item) for item in items])


def _enum_ways(name: str, kind: type[Enum], optional: bool, theirs: Any) -> _Ways:
    """Return the conversions of an enum, by its members' names; None is UNSPECIFIED, which is 0."""
    prefix = f"{theirs.name.upper()}_"
    numbers = {member: theirs.values_by_name[prefix + member.name].number for member in kind}
    members = {number: member for member, number in numbers.items()}

    def enum_in(number: int) -> Enum | None:
        if number not in members and number != 0:
            raise m.MalformedMessage(f"{theirs.name.lower()} is {number}: not known here")
        if number == 0 and not optional:
            raise m.MalformedMessage(f"{name} is not set")
        return members.get(number)

    return numbers.__getitem__, enum_in


# --- a whole message -------------------------------------------------------------------------------------------

_Form = tuple[Callable[[M], bytes], Callable[[bytes], M]]
"""The functions that pack and unpack a message; both check its bounds."""


def _form(proto: Any, ways: _Ways, bytes_max: int) -> _Form[Any]:
    out, back = ways

    def pack(message: Any) -> bytes:
        m.check(message)
        raw: bytes = proto(**out(message)).SerializeToString()
        return raw

    def unpack(raw: bytes) -> Any:
        message = back(parse(proto, raw, bytes_max))
        m.check(message)
        return message

    return pack, unpack


def _whole(kind: type[M], proto: Any, bytes_max: int = m.CONTROL_BYTES_MAX) -> _Form[M]:
    """Return the form of a ``kind`` that is sent as a ``proto`` of at most ``bytes_max`` bytes."""
    return _form(proto, _message_ways(kind, proto.DESCRIPTOR), bytes_max)


def _one_of(proto: Any, bytes_max: int = m.CONTROL_BYTES_MAX, **parts: type) -> _Form[Any]:
    """Return the form of messages sent as one of the ``parts`` of a ``proto``.

    A part is the message itself or, for a kind with one field, that field.
    """
    [oneof] = proto.DESCRIPTOR.oneofs
    ways = {name: _part_ways(kind, proto.DESCRIPTOR.fields_by_name[name]) for name, kind in parts.items()}
    names = {kind: name for name, kind in parts.items()}

    def out(message: Any) -> dict[str, Any]:
        name = names[type(message)]
        return {name: ways[name][0](message)}

    def back(message: Any) -> Any:
        name = message.WhichOneof(oneof.name)
        if name not in ways:
            wanted = f"one of {', '.join(ways)} wanted"
            raise m.MalformedMessage(f"{oneof.name} is not set, or of an unknown kind: {wanted}")
        return ways[name][1](getattr(message, name))

    return _form(proto, (out, back), bytes_max)


def _part_ways(kind: Any, descriptor: Any) -> _Ways:
    names = [field.name for field in fields(kind)]
    if descriptor.message_type is not None and set(names) <= set(descriptor.message_type.fields_by_name):
        return _message_ways(kind, descriptor.message_type)
    [only] = names
    get = attrgetter(only)
    out, back = _value_ways(kind, only, descriptor)
    return lambda message: out(get(message)), lambda value: kind(back(value))


# --- chunks and frames -----------------------------------------------------------------------------------------

_HEAD = struct.Struct("<BBHIQQ")
_PLACE = struct.Struct("<QQ")
_KIND = 1
_CHECKED_FROM = 8

FRAME_HEAD_BYTES = _HEAD.size
_check_offset, _check_data = m.bounds_of(m.Chunk)["offset"], m.bounds_of(m.Chunk)["data"]


def pack_frame(offset: int, data: bytes | memoryview) -> bytes:
    """Return the frame of ``data`` at ``offset``."""
    _check_data("data", data)
    checksum = xxh3_64_intdigest(data, offset)
    checked = zlib.crc32(_PLACE.pack(offset, checksum))
    return b"".join((_HEAD.pack(0, _KIND, 0, checked, offset, checksum), data))


def unpack_frame(raw: bytes) -> m.Frame:
    """Parse a frame; its ``data`` is a view of ``raw``.  Damaged data makes the frame not ``intact``.

    ``MalformedMessage`` for bytes that are not a frame, ``DamagedChunk`` when the head itself is damaged.
    """
    if not FRAME_HEAD_BYTES < len(raw) <= FRAME_HEAD_BYTES + m.CHUNK_BYTES_MAX:
        wanted = f"{FRAME_HEAD_BYTES} of its head and 1 to {m.CHUNK_BYTES_MAX} of data"
        raise m.MalformedMessage(f"frame is {len(raw)} bytes long: {wanted} wanted")
    zero, kind, reserved, checked, offset, checksum = _HEAD.unpack_from(raw)
    if checked != zlib.crc32(memoryview(raw)[_CHECKED_FROM:FRAME_HEAD_BYTES]):
        raise DamagedChunk("the head of a frame was damaged on the way")
    if (zero, kind, reserved) != (0, _KIND, 0):
        raise m.MalformedMessage(f"kind is {kind}: a frame of kind {_KIND} wanted")
    _check_offset("offset", offset)
    data = memoryview(raw)[FRAME_HEAD_BYTES:]
    return m.Frame(offset, data, intact=xxh3_64_intdigest(data, offset) == checksum)


def _or_frame(form: _Form[Any]) -> _Form[Any]:
    """Extend ``form`` so that a chunk may also be a frame."""
    pack, unpack = form
    return (
        lambda part: pack_frame(part.offset, part.data) if isinstance(part, m.Frame) else pack(part),
        lambda raw: unpack_frame(raw) if raw[:1] == b"\x00" else unpack(raw),
    )


# --- the messages ----------------------------------------------------------------------------------------------

pack_join, unpack_join = _whole(m.JoinAsk, sync_pb2.JoinRequest, m.JOIN_BYTES_MAX)
pack_join_reply, unpack_join_reply = _whole(m.JoinReply, sync_pb2.JoinResponse, m.REPLY_BYTES_MAX)
pack_report, unpack_report = _whole(m.ReportInfo, sync_pb2.ReportRequest)
pack_report_reply, unpack_report_reply = _whole(m.ReportReply, sync_pb2.ReportResponse)
pack_member, unpack_member = _whole(m.MemberAsk, sync_pb2.WatchRequest)
"""Also for ``LeaveRequest``, which has the same fields (a test compares them)."""
_watch_event: _Form[m.WatchEvent] = _one_of(
    sync_pb2.WatchResponse, published=m.Published, fate=FateTold, final=FinalAnnounced, dropped=m.Dropped, alive=m.Alive
)
pack_watch_event, unpack_watch_event = _watch_event

_probe: _Form[m.ProbePart] = _one_of(sync_pb2.ProbeRequest, m.MESSAGE_BYTES_MAX, ask=m.ProbeAsk, filler=m.Filler)
pack_probe, unpack_probe = _probe
_probe_reply: _Form[m.ProbeReply] = _one_of(
    sync_pb2.ProbeResponse, m.MESSAGE_BYTES_MAX, answer=m.ProbeAnswer, taken=m.ProbeTaken, filler=m.Filler
)
pack_probe_reply, unpack_probe_reply = _probe_reply

_push: _Form[m.PushPart] = _or_frame(
    _one_of(sync_pb2.PushRequest, m.MESSAGE_BYTES_MAX, header=m.PushHeader, chunk=m.Chunk, commit=m.PushCommit)
)
pack_push, unpack_push = _push
_push_reply: _Form[m.PushReply] = _one_of(
    sync_pb2.PushResponse, admitted=m.PushAdmitted, again=m.PushAgain, result=m.PushResult
)
pack_push_reply, unpack_push_reply = _push_reply

pack_pull, unpack_pull = _whole(m.PullAsk, sync_pb2.PullRequest)
_pull_part: _Form[m.PullPart] = _or_frame(
    _one_of(sync_pb2.PullResponse, m.MESSAGE_BYTES_MAX, header=m.PullHeader, chunk=m.Chunk)
)
pack_pull_part, unpack_pull_part = _pull_part

_follow: _Form[m.FollowRequest] = _one_of(replication_pb2.FollowRequest, start=m.FollowStart, ack=m.FollowAck)
pack_follow, unpack_follow = _follow
_follow_part: _Form[m.FollowPart] = _one_of(
    replication_pb2.FollowResponse, m.MESSAGE_BYTES_MAX, follows=m.Follows, item=m.Item, chunk=m.Chunk, alive=m.Alive
)
pack_follow_part, unpack_follow_part = _follow_part

pack_empty, unpack_empty = _whole(m.Nothing, admin_pb2.StatusRequest)
"""For every request and answer without fields known to this end; the bytes must still parse."""
pack_evict, unpack_evict = _whole(m.EvictAsk, admin_pb2.EvictRequest)
"""Also for ``ReadmitRequest``, which has the same field."""
pack_update, unpack_update = _whole(m.UpdateAsk, admin_pb2.AdmitRequest)
"""Also for ``RefuseRequest``, which has the same fields."""
pack_promote, unpack_promote = _whole(m.PromoteAsk, admin_pb2.PromoteRequest)


def pack_status(status: dict[str, object]) -> bytes:
    """Pack a ``StatusResponse``.  ``ValueError`` or ``TypeError`` for values that JSON cannot carry."""
    text = json.dumps(status, allow_nan=False, separators=(",", ":"))
    return admin_pb2.StatusResponse(json=text.encode("utf-8")).SerializeToString()


def unpack_status(raw: bytes) -> dict[str, object]:
    """Unpack a ``StatusResponse``; ``MalformedMessage`` when it does not hold a JSON object."""
    proto = parse(admin_pb2.StatusResponse, raw, m.REPLY_BYTES_MAX)
    try:
        status = parse_json(proto.json)
    except ValueError as error:
        raise m.MalformedMessage("json is not JSON") from error
    if not isinstance(status, dict):
        raise m.MalformedMessage("json is not an object")
    return status
