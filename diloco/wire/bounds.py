"""The bound of every field, in one table; both ends check it, and a test sees that no field is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from diloco.sync.events import Ending, Fate, FateTold, FinalAnnounced, FragmentStanding, Outcome, Reason, UnitsTold
from diloco.sync.site_units import SPANS_MAX, UnitAsk
from diloco.sync.unit_leases import PIECES_TOLD_MAX
from diloco.sync.units import SKIPPED
from diloco.wire import messages as m
from diloco.wire import probing as p

Rule = Callable[[str, object], None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PROCESS = re.compile(r"[0-9a-f]{8,64}")
_HEX = re.compile(r"[0-9a-f]{64}")
_TOLD_DIGEST = re.compile(r"xxh3:[0-9a-f]{32}|[0-9a-f]{64}")
_ENCODING = re.compile(r"[a-z0-9][a-z0-9:+._-]{0,63}")


def _refuse(field: str, value: object, wanted: str) -> None:
    shown = repr(value)
    raise m.MalformedMessage(f"{field} is {shown[:80] + '...' if len(shown) > 80 else shown}: {wanted}")


def _number(low: int = 0, high: int = m.NUMBER_MAX) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            _refuse(field, value, f"a number from {low} to {high} wanted")

    return rule


def _matches(pattern: re.Pattern[str], wanted: str) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            _refuse(field, value, f"{wanted} wanted")

    return rule


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(field, value, "true or false wanted")


def _one_of(kind: type, optional: bool = False) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, kind) and not (optional and value is None):
            _refuse(field, value, f"a {kind.__name__} wanted")

    return rule


def _text(field: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > m.TEXT_CHARS_MAX:
        _refuse(field, value, f"a text of at most {m.TEXT_CHARS_MAX} characters wanted")


def _finite(field: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        _refuse(field, value, "a finite number, not negative, wanted")


def _loss(field: str, value: object) -> None:
    # One that is not finite becomes unknown on the way (``convert``), so that a site in trouble can still report.
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        _refuse(field, value, "a number or nothing wanted")


def _bytes(bytes_max: int) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, bytes) or len(value) > bytes_max:
            _refuse(field, value, f"at most {bytes_max} bytes wanted")

    return rule


def _many(each: Rule, count_max: int) -> Rule:
    def rule(field: str, value: object) -> None:
        if not isinstance(value, tuple) or len(value) > count_max:
            _refuse(field, value, f"at most {count_max} wanted")
            return
        for index, item in enumerate(value):
            each(f"{field}[{index}]", item)

    return rule


def _shared_config(field: str, value: object) -> None:
    if not isinstance(value, Mapping) or len(value) > m.SHARED_CONFIG_MAX:
        _refuse(field, value, f"a mapping of at most {m.SHARED_CONFIG_MAX} names wanted")
        return
    for name, text in value.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 200:
            _refuse(f"{field} name", name, "1 to 200 characters wanted")
        if not isinstance(text, str) or len(text) > 4096:
            _refuse(f"{field}.{name}", text, "at most 4096 characters wanted")


def _undecided(field: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        _refuse(field, value, "a sequence and its tokens wanted")
        return
    _NUMBER(f"{field}.sequence", value[0])
    _NUMBER(f"{field}.tokens", value[1])


def _span(field: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        _refuse(field, value, "a first and an end wanted")
        return
    _NUMBER(f"{field}.first", value[0])
    _number(value[0] + 1)(f"{field}.end", value[1])


def _piece(field: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        _refuse(field, value, "a unit and a count wanted")
        return
    _number(SKIPPED)(f"{field}.unit", value[0])
    _number(1)(f"{field}.count", value[1])


def _nested(kind: type, optional: bool = False) -> Rule:
    def rule(field: str, value: object) -> None:
        if optional and value is None:
            return
        if not isinstance(value, kind):
            _refuse(field, value, f"a {kind.__name__} wanted")
        check(value, f"{field}.")

    return rule


_NUMBER = _number()
_ID = _matches(_NAME, "1 to 64 letters, digits, '.', '_' or '-'")
_SHA256 = _matches(_HEX, "64 hexadecimal digits")
_DIGEST = _matches(_TOLD_DIGEST, "xxh3: and 32 hexadecimal digits, or 64 of them,")
_CODEC = _matches(_ENCODING, "a codec's name")
_FRAGMENT = _number(0, m.FRAGMENTS_MAX - 1)
_PAYLOAD = _number(1, m.PAYLOAD_BYTES_MAX)
_PPM = _number(0, 1_000_000)
_PROTOCOL = _number(0, 0x7FFFFFFF)
_CRC = _number(0, 0xFFFFFFFF)
_REASON = _one_of(Reason, optional=True)
_ENDING = _one_of(Ending, optional=True)
_FATES = _many(_nested(Fate), m.FATES_MAX)


def _observer_or_id(field: str, value: object) -> None:
    if value != "":
        _ID(field, value)


def _codec_or_nothing(field: str, value: object) -> None:
    if value != "":
        _CODEC(field, value)


def _sha256_or_nothing(field: str, value: object) -> None:
    if value != "":
        _SHA256(field, value)


def _digest_or_nothing(field: str, value: object) -> None:
    if value != "":
        _DIGEST(field, value)


BOUNDS: Mapping[type, Mapping[str, Rule]] = {
    Fate: {
        "fragment": _FRAGMENT,
        "sequence": _NUMBER,
        "version": _NUMBER,
        "tokens": _NUMBER,
        "digest": _DIGEST,
        "reason": _REASON,
    },
    FragmentStanding: {
        "fragment": _FRAGMENT,
        "version": _NUMBER,
        "digest": _DIGEST,
        "watermark": _NUMBER,
        "cursor": _NUMBER,
        "tokens_merged": _NUMBER,
        "tokens_discarded": _NUMBER,
        "undecided": _many(_undecided, m.UNDECIDED_MAX),
        "fates": _FATES,
    },
    m.LearnerSettings: {
        "heartbeat_ns": _number(1),
        "chunk_bytes": _number(m.CHUNK_BYTES_MIN, m.CHUNK_BYTES_MAX),
        "updates_in_flight_max": _number(1, m.UNDECIDED_MAX),
        "site_timeout_ns": _number(1),
        "keep_until_decided": _flag,
    },
    m.JoinAsk: {
        "protocol": _PROTOCOL,
        "run_id": _ID,
        "lineage": _NUMBER,
        "site_id": _ID,
        "process": _matches(_PROCESS, "8 to 64 hexadecimal digits"),
        "layout_fingerprint": _SHA256,
        "layout_json": _bytes(m.LAYOUT_BYTES_MAX),
        "shared_config": _shared_config,
        "ticket": _NUMBER,
    },
    m.JoinReply: {
        "epoch": _NUMBER,
        "incarnation": _NUMBER,
        "lineage": _NUMBER,
        "standings": _many(_nested(FragmentStanding), m.FRAGMENTS_MAX),
        "run_tokens": _NUMBER,
        "progress_ppm": _PPM,
        "ending": _ENDING,
        "settings": _nested(m.LearnerSettings),
        "protocol": _PROTOCOL,
        "ticket": _NUMBER,
    },
    m.PushHeader: {
        "run_id": _ID,
        "site_id": _ID,
        "incarnation": _NUMBER,
        "fragment": _FRAGMENT,
        "sequence": _NUMBER,
        "base_version": _NUMBER,
        "tokens": _NUMBER,
        "steps": _NUMBER,
        "step_ns": _NUMBER,
        "cursor": _NUMBER,
        "final": _flag,
        "encoding": _CODEC,
        "payload_bytes": _PAYLOAD,
        "numel": _number(1, m.NUMEL_MAX),
        "digest": _DIGEST,
        "values_digest": _digest_or_nothing,
        "frames": _flag,
        "beside": _flag,
        "progress": _flag,
        "others": _number(0, m.STREAMS_MAX - 1),
        "spans": _many(_span, SPANS_MAX),
        "lineage": _NUMBER,
    },
    m.PushCommit: {"payload_bytes": _PAYLOAD, "digest": _DIGEST},
    m.PushAdmitted: {"offset": _number(0, m.PAYLOAD_BYTES_MAX), "frames": _flag},
    m.PushAgain: {"offset": _number(0, m.PAYLOAD_BYTES_MAX), "length": _number(1, m.CHUNK_BYTES_MAX)},
    m.PushResult: {
        "outcome": _one_of(Outcome),
        "version": _NUMBER,
        "reason": _REASON,
        "fate": _nested(Fate, optional=True),
        "text": _text,
        "epoch": _NUMBER,
    },
    m.WatchAsk: {"run_id": _ID, "site_id": _ID, "incarnation": _NUMBER},
    m.Published: {
        "epoch": _NUMBER,
        "fragment": _FRAGMENT,
        "version": _NUMBER,
        "digest": _DIGEST,
        "run_tokens": _NUMBER,
        "progress_ppm": _PPM,
        "lineage": _NUMBER,
        "fastest_step_ns": _NUMBER,
    },
    FateTold: {"fate": _nested(Fate)},
    FinalAnnounced: {"ending": _one_of(Ending)},
    m.Dropped: {"reason": _one_of(Reason)},
    m.Alive: {},
    m.PullAsk: {
        "run_id": _ID,
        "site_id": _observer_or_id,
        "fragment": _FRAGMENT,
        "have_version": _number(-1),
        "want_version": _NUMBER,
        "offset": _number(0, m.PAYLOAD_BYTES_MAX),
        "protocol": _PROTOCOL,
        "length": _number(0, m.PAYLOAD_BYTES_MAX),
        "deal": _NUMBER,
        "bytes_per_s": _NUMBER,
        "wait_ns": _number(0, m.PULL_WAIT_NS_MAX),
    },
    m.PullHeader: {
        "fragment": _FRAGMENT,
        "from_version": _NUMBER,
        "version": _NUMBER,
        "whole": _flag,
        "encoding": _CODEC,
        "numel": _number(1, m.NUMEL_MAX),
        "payload_bytes": _number(0, m.PAYLOAD_BYTES_MAX),
        "part_bytes": _many(_PAYLOAD, m.PARTS_MAX),
        "digest": _DIGEST,
        "payload_crc32": _CRC,
        "fates": _FATES,
        "epoch": _NUMBER,
        "frames": _flag,
        "sites": _NUMBER,
    },
    m.LinkInfo: {
        "rtt_ns": _NUMBER,
        "up_bytes_per_s": _NUMBER,
        "down_bytes_per_s": _NUMBER,
        "up_codec": _codec_or_nothing,
        "channels": _NUMBER,
        "exchange_steps": _NUMBER,
        "why": _text,
        "round_ns": _NUMBER,
        "overlap_steps": _NUMBER,
    },
    m.ReportInfo: {
        "run_id": _ID,
        "site_id": _ID,
        "incarnation": _NUMBER,
        "step": _NUMBER,
        "tokens_processed": _NUMBER,
        "tokens_unsent": _NUMBER,
        "tokens_in_flight": _NUMBER,
        "tokens_overwritten": _NUMBER,
        "tokens_lost": _NUMBER,
        "loss": _loss,
        "tokens_per_s": _finite,
        "step_ns": _NUMBER,
        "train_ns": _NUMBER,
        "stall_ns": _NUMBER,
        "bytes_up": _NUMBER,
        "bytes_down": _NUMBER,
        "versions": _many(_NUMBER, m.FRAGMENTS_MAX),
        "digests": _many(_number(0, 0xFFFFFFFFFFFFFFFF), m.FRAGMENTS_MAX),
        "link": _nested(m.LinkInfo, optional=True),
        "units": _nested(UnitAsk, optional=True),
    },
    UnitAsk: {"known": _NUMBER, "begin": _NUMBER, "upto": _NUMBER, "floor": _NUMBER, "again": _NUMBER},
    UnitsTold: {"first": _NUMBER, "pieces": _many(_piece, PIECES_TOLD_MAX)},
    m.ReportReply: {
        "epoch": _NUMBER,
        "run_tokens": _NUMBER,
        "progress_ppm": _PPM,
        "known": _flag,
        "ending": _ENDING,
        "retake": _many(_FRAGMENT, m.FRAGMENTS_MAX),
        "units": _nested(UnitsTold, optional=True),
    },
    m.LeaveAsk: {"run_id": _ID, "site_id": _ID, "incarnation": _NUMBER},
    p.ProbeAsk: {
        "protocol": _PROTOCOL,
        "run_id": _observer_or_id,
        "layout_fingerprint": _sha256_or_nothing,
        "layout_json": _bytes(m.LAYOUT_BYTES_MAX),
        "shared_config": _shared_config,
        "bytes_up": _number(0, p.PROBE_BYTES_MAX),
        "bytes_down": _number(0, p.PROBE_BYTES_MAX),
        "limit_ns": _number(1, p.PROBE_NS_MAX),
    },
    p.ProbeAnswer: {
        "protocol": _PROTOCOL,
        "protocol_oldest": _PROTOCOL,
        "run_id": _ID,
        "identity": _text,
        "time_ns": _NUMBER,
        "difference": _text,
        "standby_of": _text,
        "shared_config": _shared_config,
    },
    p.ProbeTaken: {"bytes": _number(0, p.PROBE_BYTES_MAX), "duration_ns": _NUMBER, "bytes_per_s": _NUMBER},
    p.Filler: {"data": _bytes(m.CHUNK_BYTES_MAX)},
    m.EvictAsk: {"site_id": _ID},
    m.UpdateAsk: {"site_id": _ID, "fragment": _FRAGMENT, "sequence": _NUMBER},
}


def check(message: object, prefix: str = "") -> None:
    """``MalformedMessage`` naming the first field of ``message`` that breaks its bound."""
    for field, rule in BOUNDS[type(message)].items():
        rule(prefix + field, getattr(message, field))
    if isinstance(message, m.PullHeader):
        _check_parts(message)
    if isinstance(message, m.ReportInfo) and len(message.digests) not in (0, len(message.versions)):
        _refuse(
            "digests", len(message.digests), f"none, or one for each of the {len(message.versions)} versions, wanted"
        )


def _check_parts(header: m.PullHeader) -> None:
    if header.from_version > header.version:
        _refuse("from_version", header.from_version, f"not above version={header.version} wanted")
    wanted = 1 if header.whole else header.version - header.from_version
    if len(header.part_bytes) != wanted:
        _refuse("part_bytes", len(header.part_bytes), f"{wanted} parts wanted")
    if sum(header.part_bytes) != header.payload_bytes:
        _refuse("payload_bytes", header.payload_bytes, f"the sum of part_bytes, {sum(header.part_bytes)}, wanted")
    if header.whole and header.payload_bytes != 4 * header.numel:
        _refuse("payload_bytes", header.payload_bytes, f"4 * numel = {4 * header.numel} wanted for a whole fragment")
