from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_STALE: _ClassVar[Reason]
    REASON_OVERLOAD: _ClassVar[Reason]
    REASON_GAP: _ClassVar[Reason]
    REASON_NON_FINITE: _ClassVar[Reason]
    REASON_OUTLIER: _ClassVar[Reason]
    REASON_FENCED: _ClassVar[Reason]
    REASON_NOT_JOINED: _ClassVar[Reason]
    REASON_EVICTED: _ClassVar[Reason]
    REASON_BAD_BASE: _ClassVar[Reason]
    REASON_CONFLICT: _ClassVar[Reason]
    REASON_FORGOTTEN: _ClassVar[Reason]
    REASON_FINISHED: _ClassVar[Reason]
    REASON_SUPERSEDED: _ClassVar[Reason]
    REASON_FULL: _ClassVar[Reason]
    REASON_RESTORED: _ClassVar[Reason]
    REASON_CORRUPT: _ClassVar[Reason]
    REASON_WITHDRAWN: _ClassVar[Reason]
    REASON_OTHER_DATA: _ClassVar[Reason]
    REASON_IMPLAUSIBLE: _ClassVar[Reason]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_DUPLICATE: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_RETRY: _ClassVar[Outcome]

class Ending(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENDING_UNSPECIFIED: _ClassVar[Ending]
    ENDING_FINISHED: _ClassVar[Ending]
    ENDING_DRAINED: _ClassVar[Ending]
REASON_UNSPECIFIED: Reason
REASON_STALE: Reason
REASON_OVERLOAD: Reason
REASON_GAP: Reason
REASON_NON_FINITE: Reason
REASON_OUTLIER: Reason
REASON_FENCED: Reason
REASON_NOT_JOINED: Reason
REASON_EVICTED: Reason
REASON_BAD_BASE: Reason
REASON_CONFLICT: Reason
REASON_FORGOTTEN: Reason
REASON_FINISHED: Reason
REASON_SUPERSEDED: Reason
REASON_FULL: Reason
REASON_RESTORED: Reason
REASON_CORRUPT: Reason
REASON_WITHDRAWN: Reason
REASON_OTHER_DATA: Reason
REASON_IMPLAUSIBLE: Reason
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_DUPLICATE: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_RETRY: Outcome
ENDING_UNSPECIFIED: Ending
ENDING_FINISHED: Ending
ENDING_DRAINED: Ending

class Fate(_message.Message):
    __slots__ = ("fragment", "sequence", "version", "tokens", "digest", "reason")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    sequence: int
    version: int
    tokens: int
    digest: str
    reason: Reason
    def __init__(self, fragment: _Optional[int] = ..., sequence: _Optional[int] = ..., version: _Optional[int] = ..., tokens: _Optional[int] = ..., digest: _Optional[str] = ..., reason: _Optional[_Union[Reason, str]] = ...) -> None: ...

class Undecided(_message.Message):
    __slots__ = ("sequence", "tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tokens: int
    def __init__(self, sequence: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("fragment", "version", "digest", "watermark", "cursor", "tokens_merged", "tokens_discarded", "undecided", "fates")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    FATES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    digest: str
    watermark: int
    cursor: int
    tokens_merged: int
    tokens_discarded: int
    undecided: _containers.RepeatedCompositeFieldContainer[Undecided]
    fates: _containers.RepeatedCompositeFieldContainer[Fate]
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., watermark: _Optional[int] = ..., cursor: _Optional[int] = ..., tokens_merged: _Optional[int] = ..., tokens_discarded: _Optional[int] = ..., undecided: _Optional[_Iterable[_Union[Undecided, _Mapping]]] = ..., fates: _Optional[_Iterable[_Union[Fate, _Mapping]]] = ...) -> None: ...

class LearnerSettings(_message.Message):
    __slots__ = ("heartbeat_ns", "chunk_bytes", "updates_in_flight_max", "site_timeout_ns", "keep_until_decided")
    HEARTBEAT_NS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    SITE_TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    KEEP_UNTIL_DECIDED_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ns: int
    chunk_bytes: int
    updates_in_flight_max: int
    site_timeout_ns: int
    keep_until_decided: bool
    def __init__(self, heartbeat_ns: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., updates_in_flight_max: _Optional[int] = ..., site_timeout_ns: _Optional[int] = ..., keep_until_decided: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "lineage", "site_id", "process", "layout_fingerprint", "layout_json", "shared_config", "ticket")
    class SharedConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    SHARED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    lineage: int
    site_id: str
    process: str
    layout_fingerprint: str
    layout_json: bytes
    shared_config: _containers.ScalarMap[str, str]
    ticket: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., lineage: _Optional[int] = ..., site_id: _Optional[str] = ..., process: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., layout_json: _Optional[bytes] = ..., shared_config: _Optional[_Mapping[str, str]] = ..., ticket: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("epoch", "incarnation", "lineage", "standings", "run_tokens", "progress_ppm", "ending", "settings", "protocol", "ticket")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_PPM_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: int
    lineage: int
    standings: _containers.RepeatedCompositeFieldContainer[Standing]
    run_tokens: int
    progress_ppm: int
    ending: Ending
    settings: LearnerSettings
    protocol: int
    ticket: int
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., lineage: _Optional[int] = ..., standings: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., run_tokens: _Optional[int] = ..., progress_ppm: _Optional[int] = ..., ending: _Optional[_Union[Ending, str]] = ..., settings: _Optional[_Union[LearnerSettings, _Mapping]] = ..., protocol: _Optional[int] = ..., ticket: _Optional[int] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("run_id", "site_id", "incarnation", "fragment", "sequence", "base_version", "tokens", "steps", "step_ns", "cursor", "final", "encoding", "payload_bytes", "numel", "digest", "values_digest", "frames", "beside", "progress", "others", "spans", "lineage")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VALUES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
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
    values_digest: str
    frames: bool
    beside: bool
    progress: bool
    others: int
    spans: _containers.RepeatedScalarFieldContainer[int]
    lineage: int
    def __init__(self, run_id: _Optional[str] = ..., site_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment: _Optional[int] = ..., sequence: _Optional[int] = ..., base_version: _Optional[int] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., step_ns: _Optional[int] = ..., cursor: _Optional[int] = ..., final: bool = ..., encoding: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., numel: _Optional[int] = ..., digest: _Optional[str] = ..., values_digest: _Optional[str] = ..., frames: bool = ..., beside: bool = ..., progress: bool = ..., others: _Optional[int] = ..., spans: _Optional[_Iterable[int]] = ..., lineage: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "crc32", "data", "xxh3")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    XXH3_FIELD_NUMBER: _ClassVar[int]
    offset: int
    crc32: int
    data: bytes
    xxh3: int
    def __init__(self, offset: _Optional[int] = ..., crc32: _Optional[int] = ..., data: _Optional[bytes] = ..., xxh3: _Optional[int] = ...) -> None: ...

class PushCommit(_message.Message):
    __slots__ = ("payload_bytes", "digest")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    digest: str
    def __init__(self, payload_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "chunk", "commit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: Chunk
    commit: PushCommit
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., commit: _Optional[_Union[PushCommit, _Mapping]] = ...) -> None: ...

class PushAdmitted(_message.Message):
    __slots__ = ("offset", "frames")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    frames: bool
    def __init__(self, offset: _Optional[int] = ..., frames: bool = ...) -> None: ...

class PushAgain(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class PushResult(_message.Message):
    __slots__ = ("outcome", "reason", "version", "fate", "text", "epoch")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    reason: Reason
    version: int
    fate: Fate
    text: str
    epoch: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., version: _Optional[int] = ..., fate: _Optional[_Union[Fate, _Mapping]] = ..., text: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("admitted", "result", "again")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    admitted: PushAdmitted
    result: PushResult
    again: PushAgain
    def __init__(self, admitted: _Optional[_Union[PushAdmitted, _Mapping]] = ..., result: _Optional[_Union[PushResult, _Mapping]] = ..., again: _Optional[_Union[PushAgain, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run_id", "site_id", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    site_id: str
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., site_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("epoch", "fragment", "version", "digest", "run_tokens", "progress_ppm", "lineage", "fastest_step_ns")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_PPM_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FASTEST_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    fragment: int
    version: int
    digest: str
    run_tokens: int
    progress_ppm: int
    lineage: int
    fastest_step_ns: int
    def __init__(self, epoch: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., run_tokens: _Optional[int] = ..., progress_ppm: _Optional[int] = ..., lineage: _Optional[int] = ..., fastest_step_ns: _Optional[int] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("ending", "versions")
    ENDING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ending: Ending
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ending: _Optional[_Union[Ending, str]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("published", "fate", "final", "dropped", "alive")
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    published: Published
    fate: Fate
    final: Final
    dropped: Dropped
    alive: Alive
    def __init__(self, published: _Optional[_Union[Published, _Mapping]] = ..., fate: _Optional[_Union[Fate, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("run_id", "site_id", "fragment", "have_version", "want_version", "offset", "protocol", "length", "deal", "bytes_per_s", "wait_ns")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    HAVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WANT_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DEAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    site_id: str
    fragment: int
    have_version: int
    want_version: int
    offset: int
    protocol: int
    length: int
    deal: int
    bytes_per_s: int
    wait_ns: int
    def __init__(self, run_id: _Optional[str] = ..., site_id: _Optional[str] = ..., fragment: _Optional[int] = ..., have_version: _Optional[int] = ..., want_version: _Optional[int] = ..., offset: _Optional[int] = ..., protocol: _Optional[int] = ..., length: _Optional[int] = ..., deal: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., wait_ns: _Optional[int] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("fragment", "from_version", "version", "whole", "encoding", "numel", "payload_bytes", "part_bytes", "digest", "payload_crc32", "fates", "epoch", "frames", "sites")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CRC32_FIELD_NUMBER: _ClassVar[int]
    FATES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    from_version: int
    version: int
    whole: bool
    encoding: str
    numel: int
    payload_bytes: int
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    payload_crc32: int
    fates: _containers.RepeatedCompositeFieldContainer[Fate]
    epoch: int
    frames: bool
    sites: int
    def __init__(self, fragment: _Optional[int] = ..., from_version: _Optional[int] = ..., version: _Optional[int] = ..., whole: bool = ..., encoding: _Optional[str] = ..., numel: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., part_bytes: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., payload_crc32: _Optional[int] = ..., fates: _Optional[_Iterable[_Union[Fate, _Mapping]]] = ..., epoch: _Optional[int] = ..., frames: bool = ..., sites: _Optional[int] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run_id", "site_id", "incarnation", "step", "tokens_processed", "tokens_unsent", "tokens_in_flight", "tokens_overwritten", "tokens_lost", "loss", "tokens_per_s", "step_ns", "train_ns", "stall_ns", "bytes_up", "bytes_down", "versions", "digests", "link", "units")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PROCESSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_UNSENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OVERWRITTEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_NS_FIELD_NUMBER: _ClassVar[int]
    STALL_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    site_id: str
    incarnation: int
    step: int
    tokens_processed: int
    tokens_unsent: int
    tokens_in_flight: int
    tokens_overwritten: int
    tokens_lost: int
    loss: float
    tokens_per_s: float
    step_ns: int
    train_ns: int
    stall_ns: int
    bytes_up: int
    bytes_down: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    link: LinkReport
    units: UnitAsk
    def __init__(self, run_id: _Optional[str] = ..., site_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., tokens_processed: _Optional[int] = ..., tokens_unsent: _Optional[int] = ..., tokens_in_flight: _Optional[int] = ..., tokens_overwritten: _Optional[int] = ..., tokens_lost: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., step_ns: _Optional[int] = ..., train_ns: _Optional[int] = ..., stall_ns: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., link: _Optional[_Union[LinkReport, _Mapping]] = ..., units: _Optional[_Union[UnitAsk, _Mapping]] = ...) -> None: ...

class UnitAsk(_message.Message):
    __slots__ = ("known", "begin", "upto", "floor", "again")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    known: int
    begin: int
    upto: int
    floor: int
    again: int
    def __init__(self, known: _Optional[int] = ..., begin: _Optional[int] = ..., upto: _Optional[int] = ..., floor: _Optional[int] = ..., again: _Optional[int] = ...) -> None: ...

class UnitList(_message.Message):
    __slots__ = ("first", "units", "counts")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    first: int
    units: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., units: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("rtt_ns", "up_bytes_per_s", "down_bytes_per_s", "up_codec", "channels", "exchange_steps", "why", "round_ns", "overlap_steps")
    RTT_NS_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UP_CODEC_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ROUND_NS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_STEPS_FIELD_NUMBER: _ClassVar[int]
    rtt_ns: int
    up_bytes_per_s: int
    down_bytes_per_s: int
    up_codec: str
    channels: int
    exchange_steps: int
    why: str
    round_ns: int
    overlap_steps: int
    def __init__(self, rtt_ns: _Optional[int] = ..., up_bytes_per_s: _Optional[int] = ..., down_bytes_per_s: _Optional[int] = ..., up_codec: _Optional[str] = ..., channels: _Optional[int] = ..., exchange_steps: _Optional[int] = ..., why: _Optional[str] = ..., round_ns: _Optional[int] = ..., overlap_steps: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("epoch", "run_tokens", "progress_ppm", "known", "ending", "retake", "units")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_PPM_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    RETAKE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_tokens: int
    progress_ppm: int
    known: bool
    ending: Ending
    retake: _containers.RepeatedScalarFieldContainer[int]
    units: UnitList
    def __init__(self, epoch: _Optional[int] = ..., run_tokens: _Optional[int] = ..., progress_ppm: _Optional[int] = ..., known: bool = ..., ending: _Optional[_Union[Ending, str]] = ..., retake: _Optional[_Iterable[int]] = ..., units: _Optional[_Union[UnitList, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("run_id", "site_id", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    site_id: str
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., site_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeAsk(_message.Message):
    __slots__ = ("protocol", "run_id", "layout_fingerprint", "layout_json", "shared_config", "bytes_up", "bytes_down", "limit_ns")
    class SharedConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    SHARED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_NS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    layout_fingerprint: str
    layout_json: bytes
    shared_config: _containers.ScalarMap[str, str]
    bytes_up: int
    bytes_down: int
    limit_ns: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., layout_json: _Optional[bytes] = ..., shared_config: _Optional[_Mapping[str, str]] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., limit_ns: _Optional[int] = ...) -> None: ...

class ProbeAnswer(_message.Message):
    __slots__ = ("protocol", "protocol_oldest", "run_id", "identity", "time_ns", "difference", "standby_of", "shared_config")
    class SharedConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_OLDEST_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    STANDBY_OF_FIELD_NUMBER: _ClassVar[int]
    SHARED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    protocol_oldest: int
    run_id: str
    identity: str
    time_ns: int
    difference: str
    standby_of: str
    shared_config: _containers.ScalarMap[str, str]
    def __init__(self, protocol: _Optional[int] = ..., protocol_oldest: _Optional[int] = ..., run_id: _Optional[str] = ..., identity: _Optional[str] = ..., time_ns: _Optional[int] = ..., difference: _Optional[str] = ..., standby_of: _Optional[str] = ..., shared_config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ProbeTaken(_message.Message):
    __slots__ = ("bytes", "duration_ns", "bytes_per_s")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    duration_ns: int
    bytes_per_s: int
    def __init__(self, bytes: _Optional[int] = ..., duration_ns: _Optional[int] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("ask", "filler")
    ASK_FIELD_NUMBER: _ClassVar[int]
    FILLER_FIELD_NUMBER: _ClassVar[int]
    ask: ProbeAsk
    filler: bytes
    def __init__(self, ask: _Optional[_Union[ProbeAsk, _Mapping]] = ..., filler: _Optional[bytes] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("answer", "taken", "filler")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FILLER_FIELD_NUMBER: _ClassVar[int]
    answer: ProbeAnswer
    taken: ProbeTaken
    filler: bytes
    def __init__(self, answer: _Optional[_Union[ProbeAnswer, _Mapping]] = ..., taken: _Optional[_Union[ProbeTaken, _Mapping]] = ..., filler: _Optional[bytes] = ...) -> None: ...
