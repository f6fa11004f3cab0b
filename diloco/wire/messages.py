"""What a site and the syncer say to each other, as plain dataclasses; ``convert`` makes bytes of them.

The bounds beside the names are checked on both ends: by the sender before a byte leaves, by the receiver before
anything else looks at the message.  ``protos/diloco/wire/v1`` is the contract in another language's words.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from diloco.codec.digests import digits
from diloco.sync.agreement import PROTOCOL
from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, FragmentStanding, Outcome, Reason, UnitsTold
from diloco.sync.options import FATES_KEPT_LIMIT
from diloco.sync.site_units import UnitAsk
from diloco.sync.spans import Span

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


# --- Join ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What the syncer asks of a learner.  ``chunk_bytes`` lies in CHUNK_BYTES_MIN..CHUNK_BYTES_MAX.

    ``keep_until_decided``: an update's encoded bytes are kept until its fate is known, and not only until its ack.
    """

    heartbeat_ns: int
    chunk_bytes: int
    updates_in_flight_max: int
    site_timeout_ns: int
    keep_until_decided: bool = False


@dataclass(frozen=True, slots=True)
class JoinAsk:
    """A learner process speaks for ``site_id``.

    ``process`` is 8 to 64 random hexadecimal digits, one for each process; ``lineage`` is 0 when not known yet;
    ``layout_json`` (at most 1 MiB) lets a refusal name the first difference; ``shared_config`` maps dotted names of the
    shared configuration to their values as text; ``ticket`` is what an earlier answer asked to be repeated.
    """

    protocol: int
    run_id: str
    lineage: int
    site_id: str
    process: str
    layout_fingerprint: str
    layout_json: bytes
    shared_config: Mapping[str, str]
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The site is taken in as ``incarnation``.  ``progress_ppm`` is the run's progress in millionths.

    Where ``ticket`` is not 0 another process speaks for the site, and this one is taken in when it joins again with it.
    ``protocol`` is what both speak from now on.
    """

    epoch: int
    incarnation: int
    lineage: int
    standings: tuple[FragmentStanding, ...]
    run_tokens: int
    progress_ppm: int
    ending: Ending | None
    settings: LearnerSettings
    protocol: int = 0
    ticket: int = 0


# --- Push ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushHeader:
    """One update, declared before its first payload byte.

    ``payload_bytes`` and ``digest`` (``codec.digests``) are those of the encoded payload, ``numel`` the fragment's
    number of values, ``encoding`` the codec's name.  ``values_digest`` is that of the fp32 values which the payload
    decodes to, as the site has computed it; empty where it says nothing of it.  ``frames``: the sender can send frames,
    and chunks once more; ``beside``: this stream brings some chunks of a push that another stream has begun and will
    commit; ``progress``: the sender wants to be told, time and again, how much is held; ``others``:
    so many streams may be beside it, which need not wait for its admission, nor it for their end; ``lineage``: that of
    the run, as the sender knows it, 0 where it does not say.  The others are those of ``sync.events.UpdateArrived``.
    """

    run_id: str
    site_id: str
    incarnation: int
    fragment: int
    sequence: int
    base_version: int
    tokens: int
    steps: int
    step_ns: int
    cursor: int
    final: bool
    encoding: str
    payload_bytes: int
    numel: int
    digest: str
    values_digest: str = ""
    frames: bool = False
    beside: bool = False
    progress: bool = False
    others: int = 0
    spans: tuple[Span, ...] = ()
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """``data`` stands at ``offset`` of the payload; ``xxh3`` is its checksum, or else ``crc32`` is (``chunks.cut``)."""

    offset: int
    data: bytes | memoryview
    crc32: int
    xxh3: int | None = None

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

    payload_bytes: int
    digest: str


PushPart = PushHeader | Chunk | Frame | PushCommit


@dataclass(frozen=True, slots=True)
class PushAdmitted:
    """The push is let in; the syncer holds the first ``offset`` bytes already, and takes ``frames`` for chunks."""

    offset: int
    frames: bool = False


@dataclass(frozen=True, slots=True)
class PushAgain:
    """These bytes of the payload are wanted once more: they were damaged on the way, or found no room."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PushResult:
    """The one answer to a push.  ``version`` is the fragment's at that moment; a known ``fate`` comes along, and
    the syncer's ``epoch``.
    """

    outcome: Outcome
    version: int
    reason: Reason | None = None
    fate: Fate | None = None
    text: str = ""
    epoch: int = 0


PushReply = PushAdmitted | PushAgain | PushResult


# --- Watch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchAsk:
    """The events of ``site_id``, asked by the process that joined as ``incarnation``."""

    run_id: str
    site_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Published:
    """``version`` of ``fragment`` is visible; ``digest`` is that of its fp32 values."""

    epoch: int
    fragment: int
    version: int
    digest: str
    run_tokens: int
    progress_ppm: int
    lineage: int = 0
    fastest_step_ns: int = 0


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

    run_id: str
    site_id: str
    fragment: int
    have_version: int
    want_version: int = 0
    offset: int = 0
    protocol: int = PROTOCOL
    length: int = 0
    deal: int = 0
    bytes_per_s: int = 0
    wait_ns: int = 0


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

    fragment: int
    from_version: int
    version: int
    whole: bool
    encoding: str
    numel: int
    payload_bytes: int
    part_bytes: tuple[int, ...]
    digest: str
    payload_crc32: int
    fates: tuple[Fate, ...]
    epoch: int = 0
    frames: bool = field(default=False, compare=False)
    sites: int = field(default=0, compare=False)


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

    rtt_ns: int = 0
    up_bytes_per_s: int = 0
    down_bytes_per_s: int = 0
    up_codec: str = ""
    channels: int = 0
    exchange_steps: int = 0
    why: str = ""
    round_ns: int = 0
    overlap_steps: int = 0


@dataclass(frozen=True, slots=True)
class ReportInfo:
    """The heartbeat.

    ``loss`` is in nats per token, over recent steps; one that is None or not finite travels as unknown.  ``train_ns``,
    ``stall_ns`` (spent for the outer world in the training thread), ``bytes_up`` and ``bytes_down`` are totals since
    the process started; ``versions`` is the base version of each fragment.  ``digests`` has for each of these
    ``short_digest`` of the values that the site holds for it, computed from the tensor itself; 0 where it was not
    computed for this version yet.  ``link`` is None from a site that does not tell, ``units`` where none are leased.
    """

    run_id: str
    site_id: str
    incarnation: int
    step: int
    tokens_processed: int
    tokens_unsent: int
    tokens_in_flight: int
    tokens_overwritten: int
    tokens_lost: int
    loss: float | None
    tokens_per_s: float
    step_ns: int
    train_ns: int
    stall_ns: int
    bytes_up: int
    bytes_down: int
    versions: tuple[int, ...]
    digests: tuple[int, ...] = ()
    link: LinkInfo | None = None
    units: UnitAsk | None = None


@dataclass(frozen=True, slots=True)
class ReportReply:
    """How the run stands; ``known`` is False when the syncer does not know this incarnation: please join again.

    ``retake`` names fragments whose values at the site are not those of the version that it holds them for.
    """

    epoch: int
    run_tokens: int
    progress_ppm: int
    known: bool
    ending: Ending | None
    retake: tuple[int, ...] = ()
    units: UnitsTold | None = None


@dataclass(frozen=True, slots=True)
class LeaveAsk:
    """The site says goodbye."""

    run_id: str
    site_id: str
    incarnation: int


# --- Admin -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictAsk:
    """Put ``site_id`` out of the run, or (Readmit) let it in again."""

    site_id: str


@dataclass(frozen=True, slots=True)
class UpdateAsk:
    """An operator's word (Admit, Refuse) on one accepted update."""

    site_id: str
    fragment: int
    sequence: int
