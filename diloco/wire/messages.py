"""What a site and the syncer say to each other, as plain dataclasses whose fields state their bounds.

A field's annotation holds its bound: ``Number``, ``Id`` and the other names below are a type and a ``Rule`` together.
Both ends check the bounds: the sender before a byte leaves, the receiver before anything else looks at the message.
``convert`` and ``convert_bulk`` make bytes of the messages.  ``protos/diloco/wire/v1`` states the same contract in
protobuf.

Probe.  A probe tells a site whether it fits a syncer, and how fast the link is, before anything of a run is exchanged.
It reads and changes nothing of the run.  It is bounded in bytes and in time, one caller makes one at a time, and its
bytes count against the caller's rates.  A standby answers it as well.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from diloco.codec.base import digits
from diloco.sync.agreement import PROTOCOL
from diloco.sync.data_units import SKIPPED, Piece, Span
from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, FragmentStanding, Outcome, Reason, UnitsTold
from diloco.sync.fates import PIECES_TOLD_MAX
from diloco.sync.options import FATES_KEPT_LIMIT
from diloco.sync.site_units import SPANS_MAX, UnitAsk

KIB = 1024
MIB = 1024 * KIB

CONTROL_BYTES_MAX = 64 * KIB
JOIN_BYTES_MAX = 1280 * KIB
LAYOUT_BYTES_MAX = MIB
CHUNK_BYTES_MIN = 64 * KIB
CHUNK_BYTES_MAX = 2 * MIB
MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 64 * KIB
"""No message towards the syncer is longer: the largest chunk and its frame."""
REPLY_BYTES_MAX = 16 * MIB
"""No control message towards a site is longer: Join's answer holds every fragment's recent fates."""
PAYLOAD_BYTES_MAX = 1 << 36
NUMEL_MAX = 1 << 36
NUMBER_MAX = 1 << 62
FRAGMENTS_MAX = 4096
FATES_MAX = FATES_KEPT_LIMIT
UNDECIDED_MAX = 1024
PARTS_MAX = 1024
SHARED_CONFIG_MAX = 1024
STREAMS_MAX = 6
"""Streams of one push or pull; those of a push, of a pull and of one that waits, a Watch and a heartbeat fit in the
calls that one caller may have."""
WINDOW_BYTES = 8 * MIB
"""Of one push, so much that came before its turn is in memory."""
FRAMES_SINCE = 3
"""The protocol in which a chunk may be a frame, a push need not wait to be admitted, and a pull may wait."""
PULL_WAIT_NS_MAX = 60_000_000_000
"""How long one may wait for a version that is not there yet."""
AGAINS_MAX = 64
"""Times that chunks of one push or pull are asked for once more; beyond that the path is not worth it."""
TEXT_CHARS_MAX = 1024
PROBE_BYTES_MAX = 64 * MIB
"""Of filler, each way."""
PROBE_NS_MAX = 10_000_000_000
"""That filler takes, each way."""
PROBES_PER_S = 0.1
PROBES_BURST_S = 30.0
"""With filler, of one caller: three at once, and then one in ten seconds."""
PROBES_MAX = 2
"""At once, of all callers."""


def short_digest(digest: str) -> int:
    """The first 8 bytes of a digest as a number, as a heartbeat carries it; 0 there means that there is none."""
    return int(digits(digest)[:16], 16)


class MalformedMessage(ValueError):
    """A message breaks the contract; the text names the field, its value and what was wanted."""


class Status(StrEnum):
    """Why a call failed, in gRPC's words; the values are the names of gRPC's status codes."""

    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class Refusal(Exception):
    """Raised on the syncer's side to end a call with ``status`` and a ``text`` for the other end's user.

    With ``retry_ms`` the caller is told to come back after that time; without it the refusal is definite, except for
    UNAVAILABLE and DATA_LOSS, after which the same request may be sent again.  ``reason`` goes with it where the same
    status has several.
    """

    def __init__(self, status: Status, text: str, retry_ms: int | None = None, *, reason: Reason | None = None) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text
        self.retry_ms = retry_ms
        self.reason = reason


class WireError(Exception):
    """A call from a site or an operator did not end well."""


class Unreachable(WireError):
    """No definite answer came; the same call may be made again, not before ``retry_after_s`` where that is given.

    ``refused`` is what one of several addresses said while another was away.
    """

    def __init__(self, why: str, retry_after_s: float | None = None, *, refused: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s
        self.refused = refused


class Refused(WireError):
    """The syncer's definite no; the same call would be answered so again."""

    def __init__(self, status: Status, text: str, reason: Reason | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.reason = reason

    @property
    def final(self) -> bool:
        """Whether the run has decided that this process speaks for its site no more.

        Any other refusal may be an operator's slip, in a file that is read again once it is mended.
        """
        return self.status is Status.ALREADY_EXISTS or self.reason in (Reason.EVICTED, Reason.SUPERSEDED)


# --- bounds ----------------------------------------------------------------------------------------------------

Rule = Callable[[str, object], None]
"""Raises ``MalformedMessage`` where the value of the field of that name breaks its bound."""


class AtMost(NamedTuple):
    """The bound of a tuple that has at most ``items_max`` items; each item's own bound is in the tuple's type."""

    items_max: int


def refuse(field: str, value: object, wanted: str) -> None:
    """Raise ``MalformedMessage``; a long value is shortened."""
    shown = repr(value)
    raise MalformedMessage(f"{field} is {shown[:80] + '...' if len(shown) > 80 else shown}: {wanted}")


def in_range(low: int = 0, high: int = NUMBER_MAX) -> Rule:
    """A whole number, both ends included."""

    def rule(field: str, value: object) -> None:
        if type(value) is not int or not low <= value <= high:  # True is no number here.
            refuse(field, value, f"a number from {low} to {high} wanted")

    return rule


def _matches(pattern: str, wanted: str, *, or_empty: bool = False) -> Rule:
    whole = re.compile(pattern)

    def rule(field: str, value: object) -> None:
        if or_empty and value == "":
            return
        if not isinstance(value, str) or not whole.fullmatch(value):
            refuse(field, value, f"{wanted} wanted")

    return rule


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(field, value, "true or false wanted")


def _text(field: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        refuse(field, value, f"a text of at most {TEXT_CHARS_MAX} characters wanted")


def _finite(field: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        refuse(field, value, "a finite number, not negative, wanted")


def _loss(field: str, value: object) -> None:
    # One that is not finite becomes unknown on the way (``convert``), so that a site in trouble can still report.
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        refuse(field, value, "a number or nothing wanted")


def _at_most_bytes(bytes_max: int) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, bytes) or len(value) > bytes_max:
            refuse(field, value, f"at most {bytes_max} bytes wanted")

    return rule


def check_chunk_data(field: str, value: object) -> None:
    """The data of a chunk or a frame."""
    size = len(value) if isinstance(value, bytes | bytearray | memoryview) else 0
    if not 1 <= size <= CHUNK_BYTES_MAX:
        raise MalformedMessage(f"{field} is {size} bytes long: 1 to {CHUNK_BYTES_MAX} wanted")


def check_chunk_offset(field: str, value: object) -> None:
    """The place of a chunk or a frame."""
    if not isinstance(value, int) or not 0 <= value <= PAYLOAD_BYTES_MAX:
        refuse(field, value, f"at most {PAYLOAD_BYTES_MAX} wanted")


def _checksum_or_none(field: str, value: object) -> None:
    if value is not None:
        in_range(0, 0xFFFFFFFFFFFFFFFF)(field, value)


def _shared_config(field: str, value: object) -> None:
    if not isinstance(value, Mapping) or len(value) > SHARED_CONFIG_MAX:
        refuse(field, value, f"a mapping of at most {SHARED_CONFIG_MAX} names wanted")
        return
    for name, text in value.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 200:
            refuse(f"{field} name", name, "1 to 200 characters wanted")
        if not isinstance(text, str) or len(text) > 4096:
            refuse(f"{field}.{name}", text, "at most 4096 characters wanted")


def _pair(wanted: str, **rules: Rule) -> Rule:
    """Two values, each with its name and its own bound."""

    def rule(field: str, value: object) -> None:
        if not isinstance(value, tuple) or len(value) != 2:
            refuse(field, value, f"{wanted} wanted")
            return
        for (name, each), item in zip(rules.items(), value, strict=True):
            each(f"{field}.{name}", item)

    return rule


def _span(field: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        refuse(field, value, "a first and an end wanted")
        return
    in_range()(f"{field}.first", value[0])
    in_range(value[0] + 1)(f"{field}.end", value[1])


Number = Annotated[int, in_range()]
Positive = Annotated[int, in_range(1)]
Fragment = Annotated[int, in_range(0, FRAGMENTS_MAX - 1)]
Offset = Annotated[int, in_range(0, PAYLOAD_BYTES_MAX)]
PayloadBytes = Annotated[int, in_range(1, PAYLOAD_BYTES_MAX)]
Numel = Annotated[int, in_range(1, NUMEL_MAX)]
Millionths = Annotated[int, in_range(0, 1_000_000)]
ProtocolNumber = Annotated[int, in_range(0, 0x7FFFFFFF)]
Crc32 = Annotated[int, in_range(0, 0xFFFFFFFF)]
ProbeBytes = Annotated[int, in_range(0, PROBE_BYTES_MAX)]
_ID = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 letters, digits, '.', '_' or '-'"
_SHA256 = "[0-9a-f]{64}", "64 hexadecimal digits"
_DIGEST = "xxh3:[0-9a-f]{32}|[0-9a-f]{64}", "xxh3: and 32 hexadecimal digits, or 64 of them,"
_CODEC = "[a-z0-9][a-z0-9:+._-]{0,63}", "a codec's name"
Id = Annotated[str, _matches(*_ID)]
IdOrEmpty = Annotated[str, _matches(*_ID, or_empty=True)]
Process = Annotated[str, _matches("[0-9a-f]{8,64}", "8 to 64 hexadecimal digits")]
Sha256 = Annotated[str, _matches(*_SHA256)]
Sha256OrEmpty = Annotated[str, _matches(*_SHA256, or_empty=True)]
Digest = Annotated[str, _matches(*_DIGEST)]
DigestOrEmpty = Annotated[str, _matches(*_DIGEST, or_empty=True)]
Codec = Annotated[str, _matches(*_CODEC)]
CodecOrEmpty = Annotated[str, _matches(*_CODEC, or_empty=True)]
Text = Annotated[str, _text]
LayoutJson = Annotated[bytes, _at_most_bytes(LAYOUT_BYTES_MAX)]
SharedConfig = Annotated[Mapping[str, str], _shared_config]
Fates = Annotated[tuple[Fate, ...], AtMost(FATES_MAX)]
_Undecided = Annotated[tuple[int, int], _pair("a sequence and its tokens", sequence=in_range(), tokens=in_range())]
_Piece = Annotated[Piece, _pair("a unit and a count", unit=in_range(SKIPPED), count=in_range(1))]

_RECORDS: Mapping[type, Mapping[str, Any]] = {
    Fate: {
        "fragment": Fragment,
        "sequence": Number,
        "version": Number,
        "tokens": Number,
        "digest": Digest,
        "reason": Reason | None,
    },
    FragmentStanding: {
        "fragment": Fragment,
        "version": Number,
        "digest": Digest,
        "watermark": Number,
        "cursor": Number,
        "tokens_merged": Number,
        "tokens_discarded": Number,
        "undecided": Annotated[tuple[_Undecided, ...], AtMost(UNDECIDED_MAX)],
        "fates": Fates,
    },
    UnitAsk: {"known": Number, "begin": Number, "upto": Number, "floor": Number, "again": Number},
    UnitsTold: {"first": Number, "pieces": Annotated[tuple[_Piece, ...], AtMost(PIECES_TOLD_MAX)]},
}
"""The bounds of records that ``sync`` has, in the place of their own annotations, which state none."""


@cache
def annotations_of(kind: type) -> Mapping[str, Any]:
    """The annotation of each field of ``kind``, with its bound."""
    return _RECORDS.get(kind) or get_type_hints(kind, include_extras=True)


@cache
def bounds_of(kind: type) -> Mapping[str, Rule]:
    """The bound of each field of ``kind``; ``TypeError`` where a field states none."""
    return {name: _rule_of(name, annotation) for name, annotation in annotations_of(kind).items()}


def without_bound(annotation: Any) -> tuple[Any, bool]:
    """The type that ``annotation`` states, and whether None may stand in its place."""
    kind = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    several = get_args(kind)
    return (several[0], True) if NoneType in several else (kind, False)


def _rule_of(name: str, annotation: Any) -> Rule:
    kind, optional = without_bound(annotation)
    for bound in getattr(annotation, "__metadata__", ()):
        return _many(_rule_of(name, get_args(kind)[0]), bound.items_max) if isinstance(bound, AtMost) else bound
    if kind is bool:
        return _flag
    if not is_dataclass(kind) and not issubclass(kind, Enum):
        raise TypeError(f"{name} has no bound")
    return _one_of(kind, optional)


def _one_of(kind: type, optional: bool) -> Rule:
    """A member of an enum, or another record whose own bounds hold."""
    nested = is_dataclass(kind)

    def rule(field: str, value: object) -> None:
        if optional and value is None:
            return
        if not isinstance(value, kind):
            refuse(field, value, f"a {kind.__name__} wanted")
        if nested:
            check(value, f"{field}.")

    return rule


def _many(each: Rule, count_max: int) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, tuple) or len(value) > count_max:
            refuse(field, value, f"at most {count_max} wanted")
            return
        for index, item in enumerate(value):
            each(f"{field}[{index}]", item)

    return rule


def check(message: object, prefix: str = "") -> None:
    """``MalformedMessage`` naming the first field of ``message`` that breaks its bound."""
    kind: Any = type(message)
    for name, rule in bounds_of(kind).items():
        rule(prefix + name, getattr(message, name))
    if isinstance(message, PullHeader):
        _check_parts(message)
    if isinstance(message, ReportInfo) and len(message.digests) not in (0, len(message.versions)):
        refuse(
            "digests", len(message.digests), f"none, or one for each of the {len(message.versions)} versions, wanted"
        )


def _check_parts(header: PullHeader) -> None:
    if header.from_version > header.version:
        refuse("from_version", header.from_version, f"not above version={header.version} wanted")
    wanted = 1 if header.whole else header.version - header.from_version
    if len(header.part_bytes) != wanted:
        refuse("part_bytes", len(header.part_bytes), f"{wanted} parts wanted")
    if sum(header.part_bytes) != header.payload_bytes:
        refuse("payload_bytes", header.payload_bytes, f"the sum of part_bytes, {sum(header.part_bytes)}, wanted")
    if header.whole and header.payload_bytes != 4 * header.numel:
        refuse("payload_bytes", header.payload_bytes, f"4 * numel = {4 * header.numel} wanted for a whole fragment")


# --- Join ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What the syncer asks of a learner.  ``chunk_bytes`` lies in CHUNK_BYTES_MIN..CHUNK_BYTES_MAX.

    ``keep_until_decided``: an update's encoded bytes are kept until its fate is known, and not only until its ack.
    """

    heartbeat_ns: Positive
    chunk_bytes: Annotated[int, in_range(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)]
    updates_in_flight_max: Annotated[int, in_range(1, UNDECIDED_MAX)]
    site_timeout_ns: Positive
    keep_until_decided: bool = False


@dataclass(frozen=True, slots=True)
class JoinAsk:
    """A learner process speaks for ``site_id``.

    ``process`` is 8 to 64 random hexadecimal digits, one for each process; ``lineage`` is 0 when not known yet;
    ``layout_json`` (at most 1 MiB) lets a refusal name the first difference; ``shared_config`` maps dotted names of the
    shared configuration to their values as text; ``ticket`` is what an earlier answer asked to be repeated.
    """

    protocol: ProtocolNumber
    run_id: Id
    lineage: Number
    site_id: Id
    process: Process
    layout_fingerprint: Sha256
    layout_json: LayoutJson
    shared_config: SharedConfig
    ticket: Number = 0


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The site is taken in as ``incarnation``.  ``progress_ppm`` is the run's progress in millionths.

    Where ``ticket`` is not 0 another process speaks for the site, and this one is taken in when it joins again with it.
    ``protocol`` is what both speak from now on.
    """

    epoch: Number
    incarnation: Number
    lineage: Number
    standings: Annotated[tuple[FragmentStanding, ...], AtMost(FRAGMENTS_MAX)]
    run_tokens: Number
    progress_ppm: Millionths
    ending: Ending | None
    settings: LearnerSettings
    protocol: ProtocolNumber = 0
    ticket: Number = 0


# --- Push ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushHeader:
    """One update, declared before its first payload byte.

    ``payload_bytes`` and ``digest`` (``codec.base``) are those of the encoded payload, ``numel`` the fragment's
    number of values, ``encoding`` the codec's name.  ``values_digest`` is that of the fp32 values which the payload
    decodes to, as the site has computed it; empty where it says nothing of it.  ``frames``: the sender can send frames,
    and chunks once more; ``beside``: this stream brings some chunks of a push that another stream has begun and will
    commit; ``progress``: the sender wants to be told, time and again, how much is held; ``others``:
    so many streams may be beside it, which need not wait for its admission, nor it for their end; ``lineage``: that of
    the run, as the sender knows it, 0 where it does not say.  The others are those of ``sync.events.UpdateArrived``.
    """

    run_id: Id
    site_id: Id
    incarnation: Number
    fragment: Fragment
    sequence: Number
    base_version: Number
    tokens: Number
    steps: Number
    step_ns: Number
    cursor: Number
    final: bool
    encoding: Codec
    payload_bytes: PayloadBytes
    numel: Numel
    digest: Digest
    values_digest: DigestOrEmpty = ""
    frames: bool = False
    beside: bool = False
    progress: bool = False
    others: Annotated[int, in_range(0, STREAMS_MAX - 1)] = 0
    spans: Annotated[tuple[Annotated[Span, _span], ...], AtMost(SPANS_MAX)] = ()
    lineage: Number = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """``data`` stands at ``offset`` of the payload; ``xxh3`` is its checksum, or else ``crc32`` is (``chunks.cut``)."""

    offset: Annotated[int, check_chunk_offset]
    data: Annotated[bytes | memoryview, check_chunk_data]
    crc32: Crc32
    xxh3: Annotated[int | None, _checksum_or_none] = None

    @classmethod
    def of(cls, offset: int, data: bytes | memoryview) -> Chunk:
        """``data`` with its checksum."""
        return cls(offset, data, zlib.crc32(data))


@dataclass(frozen=True, slots=True)
class Frame:
    """``data`` stands at ``offset`` of the payload (protocol 3); not ``intact``: it was damaged on the way."""

    offset: int
    data: memoryview
    intact: bool = True


@dataclass(frozen=True, slots=True)
class PushCommit:
    """Ends a push; repeats what its header declared."""

    payload_bytes: PayloadBytes
    digest: Digest


PushPart = PushHeader | Chunk | Frame | PushCommit


@dataclass(frozen=True, slots=True)
class PushAdmitted:
    """The push is let in; the syncer holds the first ``offset`` bytes already, and takes ``frames`` for chunks."""

    offset: Offset
    frames: bool = False


@dataclass(frozen=True, slots=True)
class PushAgain:
    """These bytes of the payload are wanted once more: they were damaged on the way, or found no room."""

    offset: Offset
    length: Annotated[int, in_range(1, CHUNK_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class PushResult:
    """The one answer to a push.  ``version`` is the fragment's at that moment; a known ``fate`` comes along, and
    the syncer's ``epoch``.
    """

    outcome: Outcome
    version: Number
    reason: Reason | None = None
    fate: Fate | None = None
    text: Text = ""
    epoch: Number = 0


PushReply = PushAdmitted | PushAgain | PushResult


# --- Watch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchAsk:
    """The events of ``site_id``, asked by the process that joined as ``incarnation``."""

    run_id: Id
    site_id: Id
    incarnation: Number


@dataclass(frozen=True, slots=True)
class Published:
    """``version`` of ``fragment`` is visible; ``digest`` is that of its fp32 values."""

    epoch: Number
    fragment: Fragment
    version: Number
    digest: Digest
    run_tokens: Number
    progress_ppm: Millionths
    lineage: Number = 0
    fastest_step_ns: Number = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """The stream ends here: the site was evicted, or a newer process speaks for it."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing happened, and the stream is alive."""


WatchEvent = Published | FateTold | FinalAnnounced | Dropped | Alive


# --- Pull ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PullAsk:
    """A version of ``fragment`` newer than ``have_version`` (-1: the whole fragment is wanted).

    ``site_id`` is empty for an observer.  ``want_version`` 0 means the newest; otherwise it names the one that an
    earlier pull began, so that this one goes on from ``offset``.  ``protocol`` is what the asker speaks.  ``length``
    bytes are wanted from there (0: all that follow).  Streams with the same ``deal`` (not 0) bring a payload together,
    each chunk once, a fast one more of them.  ``bytes_per_s``: not faster than this (0: as fast as it goes).  Where
    there is nothing newer yet, ``wait_ns`` long it is waited for.
    """

    run_id: Id
    site_id: IdOrEmpty
    fragment: Fragment
    have_version: Annotated[int, in_range(-1)]
    want_version: Number = 0
    offset: Offset = 0
    protocol: ProtocolNumber = PROTOCOL
    length: Offset = 0
    deal: Number = 0
    bytes_per_s: Number = 0
    wait_ns: Annotated[int, in_range(0, PULL_WAIT_NS_MAX)] = 0


@dataclass(frozen=True, slots=True)
class PullHeader:
    """What a pull brings.

    ``part_bytes`` are the lengths of the encoded down-links of ``from_version + 1`` .. ``version`` in order, or of the
    one fp32 payload when ``whole``; together they are ``payload_bytes``.  With nothing newer, ``from_version ==
    version`` and there are no parts.  ``digest`` is that of the fp32 values of ``version``, ``payload_crc32`` a
    checksum of the payload (``chunks.checksum``), 0 where it is not told.  ``fates`` are this site's, read at the same
    instant.  ``epoch`` is the syncer's.  ``frames``: chunks come as frames, and spans of the payload can be asked for.
    ``sites`` is of how many sites ``version`` holds updates that the version before it lacks; 0: none, or not told.
    """

    fragment: Fragment
    from_version: Number
    version: Number
    whole: bool
    encoding: Codec
    numel: Numel
    payload_bytes: Offset
    part_bytes: Annotated[tuple[PayloadBytes, ...], AtMost(PARTS_MAX)]
    digest: Digest
    payload_crc32: Crc32
    fates: Fates
    epoch: Number = 0
    frames: bool = field(default=False, compare=False)
    sites: Number = field(default=0, compare=False)


PullPart = PullHeader | Chunk | Frame


# --- Report and Leave ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What a site has measured of its link, and how it uses it.

    ``rtt_ns`` (of control calls, smoothed) and the rates at which updates and versions were carried lately are 0 before
    anything was measured.  ``up_codec`` and ``channels`` are those of the next update, ``why`` says what they were
    chosen for ("": as configured); ``exchange_steps`` is how many inner steps pass while an update goes up, waits
    ``round_ns`` at the syncer, and its version comes down; ``overlap_steps`` how many the site lets pass before it
    adopts one.
    """

    rtt_ns: Number = 0
    up_bytes_per_s: Number = 0
    down_bytes_per_s: Number = 0
    up_codec: CodecOrEmpty = ""
    channels: Number = 0
    exchange_steps: Number = 0
    why: Text = ""
    round_ns: Number = 0
    overlap_steps: Number = 0


@dataclass(frozen=True, slots=True)
class ReportInfo:
    """The heartbeat.

    ``loss`` is in nats per token, over recent steps; one that is None or not finite travels as unknown.  ``train_ns``,
    ``stall_ns`` (spent for the outer world in the training thread), ``bytes_up`` and ``bytes_down`` are totals since
    the process started; ``versions`` is the base version of each fragment.  ``digests`` has for each of these
    ``short_digest`` of the values that the site holds for it, computed from the tensor itself; 0 where it was not
    computed for this version yet.  ``link`` is None from a site that does not tell, ``units`` where none are leased.
    """

    run_id: Id
    site_id: Id
    incarnation: Number
    step: Number
    tokens_processed: Number
    tokens_unsent: Number
    tokens_in_flight: Number
    tokens_overwritten: Number
    tokens_lost: Number
    loss: Annotated[float | None, _loss]
    tokens_per_s: Annotated[float, _finite]
    step_ns: Number
    train_ns: Number
    stall_ns: Number
    bytes_up: Number
    bytes_down: Number
    versions: Annotated[tuple[Number, ...], AtMost(FRAGMENTS_MAX)]
    digests: Annotated[tuple[Annotated[int, in_range(0, 0xFFFFFFFFFFFFFFFF)], ...], AtMost(FRAGMENTS_MAX)] = ()
    link: LinkInfo | None = None
    units: UnitAsk | None = None


@dataclass(frozen=True, slots=True)
class ReportReply:
    """How the run stands; ``known`` is False when the syncer does not know this incarnation: please join again.

    ``retake`` names fragments whose values at the site are not those of the version that it holds them for.
    """

    epoch: Number
    run_tokens: Number
    progress_ppm: Millionths
    known: bool
    ending: Ending | None
    retake: Annotated[tuple[Fragment, ...], AtMost(FRAGMENTS_MAX)] = ()
    units: UnitsTold | None = None


@dataclass(frozen=True, slots=True)
class LeaveAsk:
    """The site says goodbye."""

    run_id: Id
    site_id: Id
    incarnation: Number


# --- Admin -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictAsk:
    """Put ``site_id`` out of the run, or (Readmit) let it in again."""

    site_id: Id


@dataclass(frozen=True, slots=True)
class UpdateAsk:
    """An operator's word (Admit, Refuse) on one accepted update."""

    site_id: Id
    fragment: Fragment
    sequence: Number


# --- Probe -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """``run_id`` and ``layout_fingerprint`` may be empty: they are not compared then."""

    protocol: ProtocolNumber
    run_id: IdOrEmpty = ""
    layout_fingerprint: Sha256OrEmpty = ""
    layout_json: LayoutJson = b""
    shared_config: SharedConfig = field(default_factory=dict)
    bytes_up: ProbeBytes = 0
    bytes_down: ProbeBytes = 0
    limit_ns: Annotated[int, in_range(1, PROBE_NS_MAX)] = PROBE_NS_MAX


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """``identity`` is whom the caller is taken for, ``time_ns`` the clock there, ``difference`` what a join would be
    refused for; ``standby_of`` is the syncer whose place this one would take, empty from the syncer itself;
    ``shared_config`` is what a join must say of the run, empty where it is not told."""

    protocol: ProtocolNumber
    protocol_oldest: ProtocolNumber
    run_id: Id
    identity: Text = ""
    time_ns: Number = 0
    difference: Text = ""
    standby_of: Text = ""
    shared_config: SharedConfig = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeTaken:
    """Filler that came to the syncer; ``bytes_per_s`` is over the later half of the time."""

    bytes: ProbeBytes
    duration_ns: Number
    bytes_per_s: Number


@dataclass(frozen=True, slots=True)
class Filler:
    """Bytes that mean nothing."""

    data: Annotated[bytes, _at_most_bytes(CHUNK_BYTES_MAX)]


ProbePart = ProbeAsk | Filler
ProbeReply = ProbeAnswer | ProbeTaken | Filler
