"""Messages as protobuf bytes and back; those of Push and Pull are in ``convert_bulk``.

A field travels under its own name, so both directions follow from the annotations of a message and the descriptor of
its generated class: an enum travels by its members' names, a record as a nested message, a tuple as a repeated field,
and None as a field that is not set.  What differs from that is in ``_BY_HAND``.  It is worked out once, where a message
is declared.

Every bound is checked in both directions.  ``pack_*`` and ``unpack_*`` raise ``MalformedMessage`` and nothing else for
a message that breaks the contract.  The length is compared before anything is parsed, because parsing can cost 44 times
a message's length in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_args, get_origin

from google.protobuf.message import DecodeError

from diloco.sync.data_units import SKIPPED
from diloco.sync.events import FateTold, FinalAnnounced, FragmentStanding, UnitsTold
from diloco.sync.plain import parse_json
from diloco.wire import messages as m
from diloco.wire.v1 import admin_pb2, sync_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.data_units import Span


class _Proto(Protocol):
    def ParseFromString(self, serialized: bytes) -> int: ...  # noqa: N802 — protobuf's name


P = TypeVar("P", bound=_Proto)
M = TypeVar("M")


def parse(kind: Callable[[], P], raw: bytes, bytes_max: int) -> P:
    """A generated message of ``kind``, not yet checked."""
    if len(raw) > bytes_max:
        raise m.MalformedMessage(f"message is {len(raw)} bytes long: at most {bytes_max} wanted")
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise m.MalformedMessage("message is not what its method takes: it cannot be parsed") from error
    return message


# --- fields that do not travel as they are ---------------------------------------------------------------------


def _unit_list_out(told: UnitsTold) -> dict[str, object]:
    units = [0 if start == SKIPPED else start + 1 for start, _ in told.pieces]
    return {"first": told.first, "units": units, "counts": [count for _, count in told.pieces]}


def _unit_list_in(told: sync_pb2.UnitList) -> UnitsTold:
    if len(told.units) != len(told.counts):
        raise m.MalformedMessage(f"units has {len(told.units)} runs: {len(told.counts)} wanted, as counts has")
    starts = [unit - 1 if unit else SKIPPED for unit in told.units]
    return UnitsTold(told.first, tuple(zip(starts, told.counts, strict=True)))


def spans_out(spans: Sequence[Span]) -> list[int]:
    """As first, end, first, end..."""
    return [number for span in spans for number in span]


def spans_in(numbers: Sequence[int]) -> tuple[Span, ...]:
    """The spans; MalformedMessage where one has no end."""
    if len(numbers) % 2:
        raise m.MalformedMessage(f"spans has {len(numbers)} numbers: a first and an end of each wanted")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _undecided_out(undecided: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"sequence": sequence, "tokens": tokens} for sequence, tokens in undecided]


def _undecided_in(undecided: Sequence[sync_pb2.Undecided]) -> tuple[tuple[int, int], ...]:
    return tuple((item.sequence, item.tokens) for item in undecided)


def _finite_or_none(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _protocol_in(protocol: int) -> int:
    return protocol or 2  # An asker that does not say it.


def _as_it_is(value: Any) -> Any:
    return value


_Way = Callable[[Any], Any]
_Ways = tuple[_Way, _Way]
"""To what protobuf takes (for a nested message that is a dict of its fields), and back from what it gives."""

_BY_HAND: Mapping[tuple[type, str], _Ways] = {
    (m.PushHeader, "spans"): (spans_out, spans_in),
    (m.PullAsk, "protocol"): (_as_it_is, _protocol_in),
    (m.ReportInfo, "loss"): (_finite_or_none, _finite_or_none),
    (FragmentStanding, "undecided"): (_undecided_out, _undecided_in),
}


# --- all others ------------------------------------------------------------------------------------------------


def _message_ways(kind: type, descriptor: Any) -> _Ways:
    """From a ``kind`` to the fields of its generated message, and from that message back; nothing is checked."""
    if kind is UnitsTold:
        return _unit_list_out, _unit_list_in
    names = [field.name for field in fields(kind)]
    get = attrgetter(*names) if len(names) > 1 else lambda source: [getattr(source, name) for name in names]
    outs: list[tuple[str, _Way]] = []
    backs: list[tuple[int, str, _Way, bool]] = []
    for place, name in enumerate(names):
        field = descriptor.fields_by_name[name]
        out, back = _value_ways(kind, name, field)
        may_lack = field.has_presence and m.without_bound(m.annotations_of(kind)[name])[1]
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
    value, optional = m.without_bound(m.annotations_of(kind)[name])
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
    """By name; None is UNSPECIFIED, which is 0."""
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


class Whole(Generic[M]):
    """A message of ``kind`` that travels as a ``proto``, in at most ``bytes_max`` bytes."""

    def __init__(self, kind: type[M], proto: Any, bytes_max: int = m.CONTROL_BYTES_MAX) -> None:
        self._proto = proto
        self._bytes_max = bytes_max
        self._out, self._back = _message_ways(kind, proto.DESCRIPTOR)

    def pack(self, message: M) -> bytes:
        """``message`` as bytes, checked."""
        m.check(message)
        raw: bytes = self._proto(**self._out(message)).SerializeToString()
        return raw

    def unpack(self, raw: bytes) -> M:
        """The message in ``raw``, checked."""
        message: M = self._back(parse(self._proto, raw, self._bytes_max))
        m.check(message)
        return message


class OneOf(Generic[M]):
    """A message that travels as one of the ``parts`` of a ``proto``; ``unset`` are the words where none is set.

    A part is the message itself or, for a kind with one field, that field.
    """

    def __init__(self, proto: Any, unset: str, bytes_max: int = m.CONTROL_BYTES_MAX, **parts: type[M]) -> None:
        self._proto = proto
        self._unset = unset
        self._bytes_max = bytes_max
        self._oneof = proto.DESCRIPTOR.oneofs[0].name
        self._outs: dict[type, tuple[str, _Way]] = {}
        self._backs: dict[str, _Way] = {}
        for name, kind in parts.items():
            out, self._backs[name] = _part_ways(kind, proto.DESCRIPTOR.fields_by_name[name])
            self._outs[kind] = name, out

    def pack(self, message: M) -> bytes:
        """``message`` as bytes, checked."""
        m.check(message)
        name, out = self._outs[type(message)]
        raw: bytes = self._proto(**{name: out(message)}).SerializeToString()
        return raw

    def unpack(self, raw: bytes) -> M:
        """The message in ``raw``, checked."""
        return self.read(parse(self._proto, raw, self._bytes_max))

    def read(self, proto: Any) -> M:
        """The message in ``proto``, checked."""
        name = proto.WhichOneof(self._oneof)
        if name not in self._backs:
            raise m.MalformedMessage(self._unset)
        message: M = self._backs[name](getattr(proto, name))
        m.check(message)
        return message


def _part_ways(kind: Any, descriptor: Any) -> _Ways:
    names = [field.name for field in fields(kind)]
    if descriptor.message_type is not None and set(names) <= set(descriptor.message_type.fields_by_name):
        return _message_ways(kind, descriptor.message_type)
    [only] = names
    get = attrgetter(only)
    out, back = _value_ways(kind, only, descriptor)
    return lambda message: out(get(message)), lambda value: kind(back(value))


# --- the messages ----------------------------------------------------------------------------------------------

_JOIN = Whole(m.JoinAsk, sync_pb2.JoinRequest, m.JOIN_BYTES_MAX)
pack_join, unpack_join = _JOIN.pack, _JOIN.unpack

_JOIN_REPLY = Whole(m.JoinReply, sync_pb2.JoinResponse, m.REPLY_BYTES_MAX)
pack_join_reply, unpack_join_reply = _JOIN_REPLY.pack, _JOIN_REPLY.unpack

_WATCH = Whole(m.WatchAsk, sync_pb2.WatchRequest)
pack_watch, unpack_watch = _WATCH.pack, _WATCH.unpack

_WATCH_EVENT = OneOf[m.WatchEvent](
    sync_pb2.WatchResponse,
    "event is not set, or of a kind that is not known here",
    published=m.Published,
    fate=FateTold,
    final=FinalAnnounced,
    dropped=m.Dropped,
    alive=m.Alive,
)
pack_watch_event, unpack_watch_event = _WATCH_EVENT.pack, _WATCH_EVENT.unpack

_REPORT = Whole(m.ReportInfo, sync_pb2.ReportRequest)
pack_report, unpack_report = _REPORT.pack, _REPORT.unpack

_REPORT_REPLY = Whole(m.ReportReply, sync_pb2.ReportResponse)
pack_report_reply, unpack_report_reply = _REPORT_REPLY.pack, _REPORT_REPLY.unpack

_LEAVE = Whole(m.LeaveAsk, sync_pb2.LeaveRequest)
pack_leave, unpack_leave = _LEAVE.pack, _LEAVE.unpack

_PROBE = OneOf[m.ProbePart](
    sync_pb2.ProbeRequest,
    "part is not set: an ask or filler wanted",
    m.MESSAGE_BYTES_MAX,
    ask=m.ProbeAsk,
    filler=m.Filler,
)
pack_probe, unpack_probe = _PROBE.pack, _PROBE.unpack

_PROBE_REPLY = OneOf[m.ProbeReply](
    sync_pb2.ProbeResponse,
    "part is not set: an answer, what was taken, or filler wanted",
    m.MESSAGE_BYTES_MAX,
    answer=m.ProbeAnswer,
    taken=m.ProbeTaken,
    filler=m.Filler,
)
pack_probe_reply, unpack_probe_reply = _PROBE_REPLY.pack, _PROBE_REPLY.unpack

_EVICT = Whole(m.EvictAsk, admin_pb2.EvictRequest)
pack_evict, unpack_evict = _EVICT.pack, _EVICT.unpack
"""Also of ``ReadmitRequest``, which has the same field."""

_UPDATE = Whole(m.UpdateAsk, admin_pb2.AdmitRequest)
pack_update, unpack_update = _UPDATE.pack, _UPDATE.unpack
"""Also of ``RefuseRequest``, which has the same fields."""


def pack_promote(*, lossy: bool) -> bytes:
    """``PromoteRequest``."""
    return admin_pb2.PromoteRequest(lossy=lossy).SerializeToString()


def unpack_promote(raw: bytes) -> bool:
    """``PromoteRequest``: whether it may be lossy."""
    return parse(admin_pb2.PromoteRequest, raw, m.CONTROL_BYTES_MAX).lossy


def unpack_empty(raw: bytes) -> None:
    """A request that is empty (Status, Drain, Snapshot, Detach): nothing that this end knows, but it must parse."""
    parse(admin_pb2.StatusRequest, raw, m.CONTROL_BYTES_MAX)


def pack_status(status: dict[str, object]) -> bytes:
    """``StatusResponse``.  ``ValueError`` or ``TypeError`` for what JSON cannot carry."""
    text = json.dumps(status, allow_nan=False, separators=(",", ":"))
    return admin_pb2.StatusResponse(json=text.encode("utf-8")).SerializeToString()


def unpack_status(raw: bytes) -> dict[str, object]:
    """``StatusResponse``."""
    proto = parse(admin_pb2.StatusResponse, raw, m.REPLY_BYTES_MAX)
    try:
        status = parse_json(proto.json)
    except ValueError as error:
        raise m.MalformedMessage("json is not JSON") from error
    if not isinstance(status, dict):
        raise m.MalformedMessage("json is not an object")
    return status
