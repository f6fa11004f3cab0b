"""The messages between a site and the syncer, as plain dataclasses whose fields state their bounds.

A field's annotation holds its bound: ``Number``, ``Id`` and the other names below are a type and a ``Rule`` together.
Both ends check the bounds: the sender before it sends a byte, the receiver before it uses the message.
``convert`` turns the messages into bytes.  ``protos/diloco/wire/v1`` states the same contract in protobuf.
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
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_type_hints

from xxhash import xxh3_64_intdigest

from diloco.sync.data_units import SKIPPED, Piece, Span
from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, FragmentStanding, Outcome, Reason, UnitsTold
from diloco.sync.fates import PIECES_TOLD_MAX
from diloco.sync.link import CHANNELS_MAX
from diloco.sync.options import FATES_KEPT_LIMIT, PROTOCOL
from diloco.sync.progress import SPANS_MAX, UnitAsk

KIB = 1024
MIB = 1024 * KIB

CONTROL_BYTES_MAX = 64 * KIB
JOIN_BYTES_MAX = 1280 * KIB
LAYOUT_BYTES_MAX = MIB
CHUNK_BYTES_MIN = 64 * KIB
CHUNK_BYTES_MAX = 2 * MIB
MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 64 * KIB
"""Longest message to the syncer: the largest chunk and its frame."""
REPLY_BYTES_MAX = 16 * MIB
"""Longest control message to a site: Join's answer holds every fragment's recent fates."""
PAYLOAD_BYTES_MAX = 1 << 36
NUMEL_MAX = 1 << 36
NUMBER_MAX = 1 << 62
FRAGMENTS_MAX = 4096
UNDECIDED_MAX = 1024
PARTS_MAX = 1024
SHARED_CONFIG_MAX = 1024
STREAMS_MAX = CHANNELS_MAX
"""Streams of one push or pull; the streams of a push, of a pull and of a waiting pull, a Watch and a heartbeat together
fit in the calls that one caller may have."""
WINDOW_BYTES = 8 * MIB
"""Most bytes of one push that are buffered because they arrived ahead of earlier ones."""
FRAMES_SINCE = 3
"""First protocol in which a chunk may be a frame, a push may start before its admission, and a pull may wait."""
PULL_WAIT_NS_MAX = 60_000_000_000
"""Longest wait of a pull for a version that is not published yet."""
AGAINS_MAX = 64
"""Retries of chunks in one push or pull, after which it fails: the path is too bad."""
TEXT_CHARS_MAX = 1024
PROBE_BYTES_MAX = 64 * MIB
"""Most filler of a probe, each way."""
PROBE_NS_MAX = 10_000_000_000
"""Longest time for a probe's filler, each way."""
PROBES_PER_S = 0.1
PROBES_BURST_S = 30.0
"""Rate limit of one caller's probes with filler: three at once, then one in ten seconds."""
PROBES_MAX = 2
"""Concurrent probes of all callers."""


def short_digest(digest: str) -> int:
    """Return the first 8 bytes of a digest as a number, its form in a heartbeat; there, 0 means no digest."""
    return int(digest.rpartition(":")[2][:16], 16)  # Not with codec.base, which loads torch: `diloco status` is quick.


class MalformedMessage(ValueError):
    """A message breaks the contract; the text names the field, its value and what was wanted."""


class Status(StrEnum):
    """Why a call failed; the values are the names of gRPC's status codes."""

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
    """Raised on the syncer's side to end a call with ``status`` and a ``text`` for the user at the other end.

    ``retry_ms`` asks the caller to retry after that delay.  Without it the refusal is definite, except for UNAVAILABLE
    and DATA_LOSS, after which the same request may be sent again.  ``reason`` is sent along where one status has
    several causes.
    """

    def __init__(self, status: Status, text: str, retry_ms: int | None = None, *, reason: Reason | None = None) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text
        self.retry_ms = retry_ms
        self.reason = reason


class WireError(Exception):
    """A call from a site or an operator failed."""


class Unreachable(WireError):
    """No definite answer came; the same call may be retried, after ``retry_after_s`` seconds if given.

    ``refused`` is the refusal of one of several addresses while another was away.
    """

    def __init__(self, why: str, retry_after_s: float | None = None, *, refused: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s
        self.refused = refused


class Nonsense(Unreachable):
    """The answer breaks the contract (malformed message or impossible chunk)."""


class Refused(WireError):
    """The syncer's definite refusal; the same call would be refused again."""

    def __init__(self, status: Status, text: str, reason: Reason | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.reason = reason

    @property
    def final(self) -> bool:
        """Whether the syncer has decided that this process may no longer act for its site.

        Any other refusal may come from an operator's mistake in a file that is read again once corrected.
        """
        return self.status is Status.ALREADY_EXISTS or self.reason in (Reason.EVICTED, Reason.SUPERSEDED)


# --- bounds ----------------------------------------------------------------------------------------------------

Rule = Callable[[str, object], None]
"""Called with a field's name and value; raises ``MalformedMessage`` where the value breaks the bound."""


class AtMost(NamedTuple):
    """The bound of a tuple of at most ``items_max`` items; each item's own bound is in the tuple's type."""

    items_max: int


def refuse(field: str, value: object, wanted: str) -> NoReturn:
    """Raise ``MalformedMessage``; its text shortens a long value, and gives only the length of bytes."""
    shown = f"{len(value)} bytes long" if isinstance(value, _BYTES) else repr(value)
    raise MalformedMessage(f"{field} is {shown[:80] + '...' if len(shown) > 80 else shown}: {wanted} wanted")


def bound(wanted: str, holds: Callable[[Any], bool]) -> Rule:
    """Return the rule that refuses values for which ``holds`` is false; ``wanted`` describes a valid value."""

    def rule(field: str, value: object) -> None:
        if not holds(value):
            refuse(field, value, wanted)

    return rule


_BYTES = (bytes, bytearray, memoryview)


def in_range(low: int = 0, high: int = NUMBER_MAX) -> Rule:
    """Return the rule for an integer from ``low`` to ``high``, both included; bools are refused."""
    return bound(f"a number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _long(low: int, high: int) -> Rule:
    return bound(f"{low} to {high} bytes", lambda value: isinstance(value, _BYTES) and low <= len(value) <= high)


def _text(low: int, high: int) -> Rule:
    wanted = f"a text of {low} to {high} characters"
    return bound(wanted, lambda value: isinstance(value, str) and low <= len(value) <= high)


def _matches(pattern: str, wanted: str, *, or_empty: bool = False) -> Rule:
    if or_empty:
        pattern, wanted = f"({pattern})?", f"{wanted} or nothing"
    whole = re.compile(pattern)
    return bound(wanted, lambda value: isinstance(value, str) and whole.fullmatch(value) is not None)


def _pair(wanted: str, holds: Callable[[int, int], bool]) -> Rule:
    """Return the rule for a pair of integers for which ``holds`` is true."""
    return bound(
        wanted,
        lambda value: (
            isinstance(value, tuple)
            and len(value) == 2
            and all(type(number) is int and number <= NUMBER_MAX for number in value)
            and holds(*value)
        ),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shared_config(field: str, value: object) -> None:
    if not isinstance(value, Mapping) or len(value) > SHARED_CONFIG_MAX:
        refuse(field, value, f"a mapping of at most {SHARED_CONFIG_MAX} names")
    for name, text in value.items():
        _text(1, 200)(f"{field} name", name)
        _text(0, 4096)(f"{field}.{name}", text)


Flag = Annotated[bool, bound("true or false", lambda value: isinstance(value, bool))]
Loss = Annotated[float, bound("a number", _is_number)]
Speed = Annotated[
    float, bound("a finite number, not negative,", lambda value: _is_number(value) and 0 <= value < math.inf)
]
Number = Annotated[int, in_range()]
Positive = Annotated[int, in_range(1)]
Fragment = Annotated[int, in_range(0, FRAGMENTS_MAX - 1)]
Offset = Annotated[int, in_range(0, PAYLOAD_BYTES_MAX)]
PayloadBytes = Annotated[int, in_range(1, PAYLOAD_BYTES_MAX)]
Numel = Annotated[int, in_range(1, NUMEL_MAX)]
Millionths = Annotated[int, in_range(0, 1_000_000)]
ProtocolNumber = Annotated[int, in_range(0, 0x7FFFFFFF)]
Crc32 = Annotated[int, in_range(0, 0xFFFFFFFF)]
Word64 = Annotated[int, in_range(0, 0xFFFFFFFFFFFFFFFF)]
ProbeBytes = Annotated[int, in_range(0, PROBE_BYTES_MAX)]
_ID = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 letters, digits, '.', '_' or '-'"
_SHA256 = "[0-9a-f]{64}", "64 hexadecimal digits"
_DIGEST = "xxh3:[0-9a-f]{32}|[0-9a-f]{64}", "xxh3: and 32 hexadecimal digits, or 64 of them,"
_CODEC = "[a-z0-9][a-z0-9:+._-]{0,63}", "a codec's name"
_FILE = (
    r"(?=.{1,300}$)(?!.*\.\.)"
    r"(snapshots/[0-9]{8}|lineages/[0-9]{1,19}|spool/(\.above|[A-Za-z0-9][A-Za-z0-9._-]*)|above/outbox)"
    r"/[A-Za-z0-9][A-Za-z0-9._-]*",
    "a file of a data folder",
)
Id = Annotated[str, _matches(*_ID)]
IdOrEmpty = Annotated[str, _matches(*_ID, or_empty=True)]
Process = Annotated[str, _matches("[0-9a-f]{8,64}", "8 to 64 hexadecimal digits")]
PROCESS_DIGITS = 16
FOLDER_DIGITS = 16
"""A site's process id: its random digits, then its folder's digits; an id without the latter names no folder."""
Sha256 = Annotated[str, _matches(*_SHA256)]
Sha256OrEmpty = Annotated[str, _matches(*_SHA256, or_empty=True)]
Digest = Annotated[str, _matches(*_DIGEST)]
DigestOrEmpty = Annotated[str, _matches(*_DIGEST, or_empty=True)]
Codec = Annotated[str, _matches(*_CODEC)]
CodecOrEmpty = Annotated[str, _matches(*_CODEC, or_empty=True)]
Text = Annotated[str, _text(0, TEXT_CHARS_MAX)]
LayoutJson = Annotated[bytes, _long(0, LAYOUT_BYTES_MAX)]
ChunkData = Annotated[bytes | memoryview, _long(1, CHUNK_BYTES_MAX)]
SharedConfig = Annotated[Mapping[str, str], _shared_config]
Fates = Annotated[tuple[Fate, ...], AtMost(FATES_KEPT_LIMIT)]
_Span = Annotated[Span, _pair("a first and an end above it", lambda first, end: 0 <= first < end)]
_Undecided = Annotated[tuple[int, int], _pair("a sequence and its tokens", lambda *numbers: min(numbers) >= 0)]
_Piece = Annotated[Piece, _pair("a unit and a count", lambda unit, count: unit >= SKIPPED and count >= 1)]

_RECORDS: Mapping[type, Mapping[str, Any]] = {
    Fate: {"fragment": Fragment, "digest": Digest},
    FragmentStanding: {
        "fragment": Fragment,
        "digest": Digest,
        "undecided": Annotated[tuple[_Undecided, ...], AtMost(UNDECIDED_MAX)],
        "fates": Fates,
    },
    FinalAnnounced: {"versions": Annotated[tuple[Number, ...], AtMost(FRAGMENTS_MAX)]},
    UnitAsk: {},
    UnitsTold: {"pieces": Annotated[tuple[_Piece, ...], AtMost(PIECES_TOLD_MAX)]},
}
"""Records defined in ``sync``, whose own annotations state no bounds, with those of their fields; any other int is a
``Number``."""


@cache
def annotations_of(kind: type) -> Mapping[str, Any]:
    """Return the annotation of each field of ``kind``, with its bound."""
    stated = get_type_hints(kind, include_extras=True)
    if kind in _RECORDS:
        stated = {name: Number if each is int else each for name, each in stated.items()} | dict(_RECORDS[kind])
    return stated


@cache
def bounds_of(kind: type) -> Mapping[str, Rule]:
    """Return the bound of each field of ``kind``; ``TypeError`` where a field states none."""
    return {name: _rule_of(name, annotation) for name, annotation in annotations_of(kind).items()}


def taken_apart(annotation: Any) -> tuple[Any, Rule | AtMost | None, bool]:
    """Return the type in ``annotation``, its bound if it states one, and whether None is allowed."""
    several = get_args(annotation)
    optional = NoneType in several
    stated = several[0] if optional else annotation
    if hasattr(stated, "__metadata__"):
        return stated.__origin__, stated.__metadata__[0], optional
    return stated, None, optional


def _rule_of(name: str, annotation: Any) -> Rule:
    kind, rule, optional = taken_apart(annotation)
    if isinstance(rule, AtMost):
        rule = _many(_rule_of(name, get_args(kind)[0]), rule.items_max)
    elif rule is None and not is_dataclass(kind) and not issubclass(kind, Enum):
        raise TypeError(f"{name} has no bound")
    required = rule or _one_of(kind)
    return (lambda field, value: None if value is None else required(field, value)) if optional else required


def _one_of(kind: type) -> Rule:
    """Return the rule for a member of an enum, or for a record whose own bounds hold."""
    nested = is_dataclass(kind)

    def rule(field: str, value: object) -> None:
        if not isinstance(value, kind):
            refuse(field, value, f"a {kind.__name__}")
        if nested:
            check(value, f"{field}.")

    return rule


def _many(each: Rule, count_max: int) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, tuple) or len(value) > count_max:
            refuse(field, value, f"at most {count_max}")
        for index, item in enumerate(value):
            each(f"{field}[{index}]", item)

    return rule


def check(message: object, prefix: str = "") -> None:
    """Raise ``MalformedMessage`` naming the first field of ``message`` that breaks its bound.

    Bounds between fields are checked by the message's method ``check_together``, if it has one.
    """
    kind: Any = type(message)
    for name, rule in bounds_of(kind).items():
        rule(prefix + name, getattr(message, name))
    if hasattr(kind, "check_together"):
        kind.check_together(message)


# --- Join ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The settings that the syncer gives a learner.  ``chunk_bytes`` lies in CHUNK_BYTES_MIN..CHUNK_BYTES_MAX.

    ``keep_until_decided``: keep an update's encoded bytes until its fate is known, not only until its ack.
    """

    heartbeat_ns: Positive
    chunk_bytes: Annotated[int, in_range(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)]
    updates_in_flight_max: Annotated[int, in_range(1, UNDECIDED_MAX)]
    site_timeout_ns: Positive
    keep_until_decided: Flag = False


@dataclass(frozen=True, slots=True)
class JoinAsk:
    """A learner process asks to join as ``site_id``.

    ``process`` is a random id of the process, 8 to 64 hexadecimal digits; ``lineage`` is 0 when not known yet;
    ``layout_json`` (at most 1 MiB) lets a refusal name the first difference; ``shared_config`` maps dotted names of the
    shared configuration to their values as text; ``ticket`` repeats the ticket of an earlier answer.
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
    """The site has joined as ``incarnation``.  ``progress_ppm`` is the run's progress in millionths.

    A ``ticket`` other than 0 means that another process holds the site; joining again with the ticket replaces it.
    ``protocol`` is the version that both ends use from now on.
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
    number of values, ``encoding`` the codec's name.  ``values_digest`` is the site's digest of the fp32 values that the
    payload decodes to; empty where not given.  ``frames``: the sender can send frames, and can send chunks again.
    ``beside``: this is an additional stream, with chunks of a push that another stream opened and will commit.
    ``progress``: the sender wants regular replies with the number of bytes held.  ``others``: number of additional
    streams, which need not wait for the admission; the commit need not wait for their end.  ``lineage``: the run's, as
    the sender knows it, 0 where not given.  The other fields are those of ``sync.events.UpdateArrived``.
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
    final: Flag
    encoding: Codec
    payload_bytes: PayloadBytes
    numel: Numel
    digest: Digest
    values_digest: DigestOrEmpty = ""
    frames: Flag = False
    beside: Flag = False
    progress: Flag = False
    others: Annotated[int, in_range(0, STREAMS_MAX - 1)] = 0
    spans: Annotated[tuple[_Span, ...], AtMost(SPANS_MAX)] = ()
    lineage: Number = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """``data`` at ``offset`` of the payload; its checksum is ``xxh3``, or ``crc32`` where that is None."""

    offset: Offset
    data: ChunkData
    crc32: Crc32
    xxh3: Word64 | None = None

    @classmethod
    def of(cls, offset: int, data: bytes | memoryview, *, as_in_2: bool = False) -> Chunk:
        """Make a chunk of ``data`` with its checksum: CRC-32 if ``as_in_2`` (protocol 2), else XXH3-64."""
        return cls(offset, data, zlib.crc32(data)) if as_in_2 else cls(offset, data, 0, xxh3_64_intdigest(data))

    @property
    def intact(self) -> bool:
        """Whether ``data`` matches the checksum."""
        if self.xxh3 is None:
            return zlib.crc32(self.data) == self.crc32
        return xxh3_64_intdigest(self.data) == self.xxh3


@dataclass(frozen=True, slots=True)
class Frame:
    """``data`` at ``offset`` of the payload (protocol 3); not ``intact``: it was damaged in transit."""

    offset: int
    data: memoryview
    intact: Flag = True


@dataclass(frozen=True, slots=True)
class PushCommit:
    """Ends a push; repeats what its header declared."""

    payload_bytes: PayloadBytes
    digest: Digest


PushPart = PushHeader | Chunk | Frame | PushCommit


@dataclass(frozen=True, slots=True)
class PushAdmitted:
    """The push is admitted: the syncer holds the first ``offset`` bytes, and accepts frames if ``frames``."""

    offset: Offset
    frames: Flag = False


@dataclass(frozen=True, slots=True)
class PushAgain:
    """The syncer asks for these bytes of the payload again: they were damaged in transit, or found no room."""

    offset: Offset
    length: Annotated[int, in_range(1, CHUNK_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class PushResult:
    """The final answer to a push, with the fragment's present ``version``, the update's ``fate`` if known, and the
    syncer's ``epoch``.
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
class MemberAsk:
    """A request of the process that joined as ``incarnation``: for its site's events (Watch), or to leave (Leave)."""

    run_id: Id
    site_id: Id
    incarnation: Number


@dataclass(frozen=True, slots=True)
class Published:
    """``version`` of ``fragment`` is published; ``digest`` is that of its fp32 values."""

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
    """The stream ends here: the site was evicted, or a newer process has joined for it."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing happened, and the stream is alive."""


WatchEvent = Published | FateTold | FinalAnnounced | Dropped | Alive


# --- Pull ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PullAsk:
    """A request for a version of ``fragment`` newer than ``have_version`` (-1: the whole fragment).

    ``site_id`` is empty for an observer.  ``want_version`` 0 means the newest; otherwise it is the version of an
    earlier pull, which this one resumes at ``offset``.  ``protocol`` is the client's.  ``length`` is the number of
    bytes wanted from ``offset`` (0: all the rest).  Streams with the same ``deal`` (not 0) share one payload: each
    chunk is sent once, and a faster stream gets more of them.  ``bytes_per_s`` is a rate limit (0: none).  ``wait_ns``
    is how long to wait when there is nothing newer yet.
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
    """Describes the payload of a pull.

    ``part_bytes`` are the lengths of the encoded down-links of ``from_version + 1`` .. ``version`` in order, or of the
    one fp32 payload when ``whole``; their sum is ``payload_bytes``.  With nothing newer, ``from_version == version``
    and there are no parts.  ``digest`` is that of the fp32 values of ``version``, ``payload_crc32`` a checksum of the
    payload (``chunks.checksum``), 0 where not given.  ``fates`` are this site's, read at the same instant.  ``epoch``
    is the syncer's.  ``frames``: chunks come as frames, and spans of the payload can be requested.  ``sites`` is the
    number of sites with updates in ``version`` that are not in the version before it; 0: none, or not given.
    """

    fragment: Fragment
    from_version: Number
    version: Number
    whole: Flag
    encoding: Codec
    numel: Numel
    payload_bytes: Offset
    part_bytes: Annotated[tuple[PayloadBytes, ...], AtMost(PARTS_MAX)]
    digest: Digest
    payload_crc32: Crc32
    fates: Fates
    epoch: Number = 0
    frames: Flag = field(default=False, compare=False)
    sites: Number = field(default=0, compare=False)

    def check_together(self) -> None:
        """Raise ``MalformedMessage`` unless versions, parts and lengths fit together; ``check`` calls it."""
        if self.from_version > self.version:
            refuse("from_version", self.from_version, f"not above version={self.version}")
        parts = 1 if self.whole else self.version - self.from_version
        if len(self.part_bytes) != parts:
            refuse("part_bytes", len(self.part_bytes), f"{parts} parts")
        if sum(self.part_bytes) != self.payload_bytes:
            refuse("payload_bytes", self.payload_bytes, f"the sum of part_bytes, {sum(self.part_bytes)},")
        if self.whole and self.payload_bytes != 4 * self.numel:
            refuse("payload_bytes", self.payload_bytes, f"4 * numel = {4 * self.numel} for a whole fragment")


PullPart = PullHeader | Chunk | Frame


# --- Report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """A site's measurements of its link, and how it uses the link.

    ``rtt_ns`` (of control calls, smoothed) and the recent rates of updates and versions are 0 until measured.
    ``up_codec`` and ``channels`` are those of the next update, ``why`` the reason for the choice ("": as configured).
    ``exchange_steps`` is the number of inner steps while an update goes up, waits ``round_ns`` at the syncer, and its
    version comes down; ``overlap_steps`` the number that the site lets pass before it adopts a version.
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

    ``loss`` is in nats per token, over recent steps; None or a non-finite one is sent as unknown.  ``train_ns``,
    ``stall_ns`` (time that exchange takes in the training thread), ``bytes_up`` and ``bytes_down`` are totals since
    the process started; ``versions`` is the base version of each fragment.  ``digests`` has for each base the
    ``short_digest`` of the values that the site holds, computed from the tensor itself; 0 where not computed for this
    version yet.  ``link`` is None from a site that does not report it, ``units`` where none are leased.
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
    loss: Loss | None
    tokens_per_s: Speed
    step_ns: Number
    train_ns: Number
    stall_ns: Number
    bytes_up: Number
    bytes_down: Number
    versions: Annotated[tuple[Number, ...], AtMost(FRAGMENTS_MAX)]
    digests: Annotated[tuple[Word64, ...], AtMost(FRAGMENTS_MAX)] = ()
    link: LinkInfo | None = None
    units: UnitAsk | None = None

    def check_together(self) -> None:
        """Raise ``MalformedMessage`` unless ``digests`` fits ``versions``; ``check`` calls it."""
        if len(self.digests) not in (0, len(self.versions)):
            refuse("digests", len(self.digests), f"none, or one for each of the {len(self.versions)} versions,")


@dataclass(frozen=True, slots=True)
class ReportReply:
    """The state of the run; ``known`` is False when the syncer does not know this incarnation, which must join again.

    ``retake`` lists the fragments whose values at the site differ from those of the version that the site reported.
    """

    epoch: Number
    run_tokens: Number
    progress_ppm: Millionths
    known: Flag
    ending: Ending | None
    retake: Annotated[tuple[Fragment, ...], AtMost(FRAGMENTS_MAX)] = ()
    units: UnitsTold | None = None


# --- Admin -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictAsk:
    """Evict ``site_id`` from the run, or (Readmit) let it join again."""

    site_id: Id


@dataclass(frozen=True, slots=True)
class UpdateAsk:
    """An operator's decision (Admit, Refuse) on one accepted update."""

    site_id: Id
    fragment: Fragment
    sequence: Number


@dataclass(frozen=True, slots=True)
class PromoteAsk:
    """Let a standby take over; ``lossy``: even if it may lack something that was acknowledged."""

    lossy: Flag


@dataclass(frozen=True, slots=True)
class Nothing:
    """A request or an answer without fields."""


# --- Probe -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """A probe's request.  ``run_id`` and ``layout_fingerprint`` are not compared where they are empty."""

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
    """``identity`` is the caller's as authenticated, ``time_ns`` the syncer's clock, ``difference`` the reason for
    which a join would be refused.  ``standby_of`` is the syncer that this standby would replace, empty from the syncer
    itself; ``shared_config`` is what a join must send, empty where not given."""

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
    """The filler that the syncer received; ``bytes_per_s`` is over the later half of the time."""

    bytes: ProbeBytes
    duration_ns: Number
    bytes_per_s: Number


@dataclass(frozen=True, slots=True)
class Filler:
    """Random bytes that measure the link."""

    data: Annotated[bytes, _long(0, CHUNK_BYTES_MAX)]


ProbePart = ProbeAsk | Filler
ProbeReply = ProbeAnswer | ProbeTaken | Filler


# --- Follow ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FollowStart:
    """Where the standby's journal ends: after the unit of ``segment`` with chain value ``chain``; segment 0: empty."""

    run_id: Id
    standby: Id
    layout_fingerprint: Sha256
    shared_digest: Id
    segment: Number
    chain: Sha256OrEmpty

    def check_together(self) -> None:
        """Raise ``MalformedMessage`` unless ``segment`` and ``chain`` are both given or neither; ``check`` calls it."""
        if bool(self.segment) != bool(self.chain):
            refuse("chain" if self.segment else "segment", self.chain or self.segment, "a segment and its chain value")


@dataclass(frozen=True, slots=True)
class FollowAck:
    """Everything up to byte ``offset`` of the syncer's ``segment`` is durable at the standby."""

    segment: Number
    offset: Number


FollowRequest = FollowStart | FollowAck


@dataclass(frozen=True, slots=True)
class Follows:
    """The stream continues the standby's journal; ``anew``: it is a snapshot, then the journal from ``segment`` on.

    ``chain`` is the chain value before that segment; ``lineage`` the run's.  ``waits``: the syncer announces nothing
    before the standby has it (synchronous replication), until an operator orders otherwise.
    """

    anew: Flag
    segment: Number
    chain: Sha256OrEmpty
    lineage: Number
    waits: Flag = False


@dataclass(frozen=True, slots=True)
class Item:
    """A file ``name`` of the data folder, or (without a name) a unit of the journal; its bytes follow in chunks."""

    name: Annotated[str, _matches(*_FILE, or_empty=True)]
    segment: Number
    offset: Number
    item_bytes: Offset
    digest: Sha256

    def check_together(self) -> None:
        """Raise ``MalformedMessage`` for a unit of the journal without bytes; ``check`` calls it."""
        if not (self.name or self.item_bytes):
            refuse("item_bytes", self.item_bytes, "at least 1 byte of a unit")


FollowPart = Follows | Item | Chunk | Alive
STOPS = "the syncer stops"
"""The last text that a standby or a site gets from a syncer that shuts down in order."""
