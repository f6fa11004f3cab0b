"""The journal: every event that changed the outer machine, in order, and nothing else.

A record is canonical JSON {"at_ns": instant, "effects": digest, "event": name, "is": {fields}}.  ``effects`` is the
digest of the machine's effects, so that a replay by code that decides otherwise is detected at the first record that
differs.  Payloads are in the spool; an event names them.

Format 2 consists of chained frames in segments, each with a mark that tells a torn end from damage.  A segment is a
sequence of units, each of them

    4 bytes kind | u32 length of the body | u32 CRC-32 of all but itself | 32 bytes chain | body

- a *header*, first and only there.  Body: canonical JSON {"before": chain, "format": 2, "run": {}, "segment": number}
- a *frame* for each turn of the decision loop.  Body: its records, canonical JSON, one on a line
- a *mark* after each header and frame, without a body: the same chain value again.  It is written when the unit that it
  marks is durable and before anything that follows from that is told; the next fsync makes the mark itself durable.

chain_n = SHA-256(chain_n-1 || body_n) over headers and frames, across segments: a header's chain continues from
``before``, the last chain value of the previous segment (32 zero bytes for the first segment).  So each value covers
everything written before it, and an edit anywhere shows at the next unit.  All integers are little-endian.

The names that a journal, a snapshot or a checkpoint stores are a format (``tests/fixtures/stored.json`` has all).  A
class or a field is stored under its own name, or after a rename under its first one: ``STORED = "OldName"`` in the
class, ``metadata={"stored": "old_name"}`` at the field.

A unit that is not whole at the end of the last segment was being written when its process died; it was never
acknowledged and is cut off.  But where its mark or any other whole unit follows, it *was* acknowledged, and has been
damaged since: ``JournalError``.  One exception is cut off as well: a last frame without a mark after a hole of the size
of the previous mark.  One fsync makes mark and frame durable, and a power cut before it may keep only the frame.

Two cases look here like an end that was never acknowledged: damage to the very last frame after a power cut that also
lost its mark, and a last segment that was truncated between two units (``syncer/journal_files`` detects the latter).

Format 1, which is still read, framed each record by itself, all integers little-endian: u32 length of the body | u32
CRC-32 of the body | body
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import struct
import types
import typing
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from diloco.sync import events
from diloco.sync.effects import Note, OuterEffect
from diloco.sync.events import OuterEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# --- Records of this package to plain values (dict, list, str, int, float, bool, None), canonical JSON, and back


class PlainError(ValueError):
    """A plain value does not describe a record of the requested type."""


FLOAT_INT_MAX = 1 << 1000
"""Largest whole number accepted for a float; floats end near 2^1024."""
JSON_DEPTH_MAX = 100
"""Deepest nesting of lists and objects in JSON that is read; JSON written here has less than twenty levels."""
TOO_DEEP = f"it is nested too deeply: more than {JSON_DEPTH_MAX} levels"
SCALARS = frozenset({type(None), str, bool, int, float})


def to_plain(value: object) -> object:
    """Return a dataclass, a collection of them or a scalar as plain values; tuples become lists, enums their text."""
    kind: type = type(value)
    if kind in SCALARS:
        return value
    if kind is tuple or kind is list:
        return [item if type(item) in SCALARS else to_plain(item) for item in value]  # type: ignore[attr-defined]
    if isinstance(value, StrEnum):
        return value.value
    names = stored_fields(kind)
    if names is not None:
        return {
            stored: item if type(item := getattr(value, name)) in SCALARS else to_plain(item)
            for stored, name in names.items()
        }
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    raise TypeError(f"{kind.__name__} has no plain form")


@functools.cache
def stored_fields(kind: type) -> dict[str, str] | None:
    """Return the field names of a dataclass by their stored names; None for any other type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return {field.metadata.get("stored", field.name): field.name for field in dataclasses.fields(kind)}


def stored_name(kind: type) -> str:
    """Return the name under which records of ``kind`` are stored."""
    return str(getattr(kind, "STORED", kind.__name__))


def records_in(module: types.ModuleType, base: type) -> dict[str, type]:
    """Return the dataclasses of ``module`` that are subclasses of ``base``, by their stored names."""
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    return {stored_name(kind): kind for kind in found if dataclasses.is_dataclass(kind)}


def canonical(value: object) -> bytes:
    """Return ``value`` as JSON bytes that depend only on the value."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_json(text: str | bytes) -> typing.Any:
    """Parse JSON; ``ValueError`` where ``text`` is not JSON, or nests deeper than ``JSON_DEPTH_MAX``.

    The bound is ours because the interpreter's differs by release: 5,000 levels are an error on Python 3.11 and a value
    on 3.13, where the next function that recurses into that value fails instead.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    level = [value]
    for _ in range(JSON_DEPTH_MAX + 1):
        nested = [each for each in level if isinstance(each, list | dict)]
        if not nested:
            return value
        level = [item for each in nested for item in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(TOO_DEEP)


def shown(value: object) -> str:
    """Return ``value`` for error messages, cut to 80 characters: a damaged value can be of any length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


_hints = functools.cache(typing.get_type_hints)


def from_plain(kind: object, value: object, where: str = "") -> typing.Any:
    """Return the record of type ``kind`` that ``value`` describes; ``PlainError`` names the place that does not fit."""
    if type(value) is kind and kind in SCALARS:  # Most values are scalars.
        return value
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if type(value) in kinds:
            return value
        rest = [each for each in kinds if each is not type(None)]
        if len(rest) > 1:
            raise PlainError(f"{where} is {shown(value)}: fits none of {', '.join(map(str, rest))}")
        return from_plain(rest[0], value, where)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise PlainError(f"{where} is {shown(value)}: a list wanted")
        kinds = typing.get_args(kind)
        if origin is list or kinds[1:] == (Ellipsis,):
            kinds = kinds[:1] * len(value)
        if len(value) != len(kinds):
            raise PlainError(f"{where} has {len(value)} items: {len(kinds)} wanted")
        return origin([from_plain(kinds[index], item, f"{where}[{index}]") for index, item in enumerate(value)])
    if origin is dict or dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise PlainError(f"{where} is {shown(value)}: a mapping wanted")
        if isinstance(kind, type):
            return _record(kind, value, where)
        _, item_kind = typing.get_args(kind)
        return {key: from_plain(item_kind, item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(str(value))
        except ValueError:
            raise PlainError(f"{where} is {shown(value)}: not one of {', '.join(kind)}") from None
    if kind is float and type(value) is int and abs(value) <= FLOAT_INT_MAX:
        return float(value)
    if type(value) is not kind:
        raise PlainError(f"{where} is {shown(value)}: {getattr(kind, '__name__', kind)} wanted")
    return value


def _record(kind: type, given: dict[str, object], where: str) -> typing.Any:
    hints, names = _hints(kind), stored_fields(kind) or {}
    unknown = given.keys() - names.keys()
    if unknown:
        raise PlainError(f"{where or kind.__name__} has unknown fields: {', '.join(sorted(unknown))[:80]}")
    absent = names.keys() - given.keys()
    if absent:
        required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
        missing = [stored for stored in sorted(absent) if names[stored] in required]
        if missing:
            raise PlainError(f"{where or kind.__name__} lacks fields: {', '.join(missing)}")
    return kind(
        **{names[stored]: from_plain(hints[names[stored]], item, f"{where}.{stored}") for stored, item in given.items()}
    )


# --- Segments

FORMAT = 2
"""Format of segments with a header.  Segments of format 1 have none (``journal.read_records``)."""
UNIT = struct.Struct("<4sII32s")
# A body is ASCII, so it never contains a kind; the length at the start of a segment of format 1 never equals one.
HEADER, FRAME, MARK = b"\xd1JH\x02", b"\xd1JF\x02", b"\xd1JM\x02"
ANY_KIND = re.compile(b"\xd1J[HFM]\x02")
FRAME_BYTES_MAX = 64 << 20
"""A turn handles some hundreds of events, each from a message of at most 64 KiB."""
CHAIN_START = bytes(32)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment.  ``before`` is hexadecimal; ``run`` identifies the run, to detect mixed-up folders."""

    before: str
    format: int
    run: dict[str, str | int]
    segment: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The whole units of a segment.  ``header`` is None without a whole header: nothing here was ever acknowledged.

    ``end`` is the offset at which the whole units end, ``chain`` the chain value there; ``marked`` is whether the last
    unit is a mark.
    """

    header: Header | None
    frames: tuple[Unit, ...]
    end: int
    chain: bytes
    marked: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """A header, a frame or a mark, from byte ``offset`` to before byte ``end``.

    The body of a frame has the records of a turn; ``chain`` covers everything up to it.
    """

    kind: bytes
    offset: int
    chain: bytes
    body: bytes
    end: int


def encode_header(segment: int, before: bytes, run: Mapping[str, str | int]) -> tuple[bytes, bytes]:
    """Return the first unit of a segment, and its chain value."""
    return encode_frame(canonical(Header(before.hex(), FORMAT, dict(run), segment)), before, HEADER)


def encode_frame(body: bytes, before: bytes, kind: bytes = FRAME) -> tuple[bytes, bytes]:
    """Return a frame (or a header) that follows the chain value ``before``, and its own chain value."""
    assert 0 < len(body) <= FRAME_BYTES_MAX, len(body)
    chain = chain_after(before, body)
    return _unit(kind, chain, body), chain


def encode_mark(chain: bytes) -> bytes:
    """Return the mark to write when the unit with this chain value is durable."""
    return _unit(MARK, chain, b"")


def chain_after(before: bytes, body: bytes) -> bytes:
    """Return the chain value that covers everything up to and including ``body``."""
    return hashlib.sha256(before + body).digest()


def _unit(kind: bytes, chain: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(body, zlib.crc32(chain, zlib.crc32(kind + len(body).to_bytes(4, "little"))))
    return UNIT.pack(kind, len(body), checksum, chain) + body


def is_framed(data: bytes) -> bool:
    """Return whether this is a segment of format 2, damaged or not; one of format 1 has no unit anywhere.

    A segment that is empty, or only zeros, may be of either format; it counts as format 2, because it holds no data.
    """
    return HEADER.startswith(data[:4]) or not data.strip(b"\0") or _later_unit(data, 0) is not None


def read_segment(data: bytes) -> Segment:
    """Return the whole units of ``data``; ``JournalError`` with the offset where data is damaged, edited or unknown."""
    header: Header | None = None
    frames: list[Unit] = []
    at, chain, marked = 0, CHAIN_START, False
    for unit in units(data):
        if (unit.kind == HEADER) != (at == 0):
            raise JournalError(f"unit at byte {at} is damaged: a segment has one header, at its beginning")
        if header is None:
            header = _parse_header(unit.body)
            chain = bytes.fromhex(header.before)
        marked = unit.kind == MARK
        expected = chain if marked else chain_after(chain, unit.body)
        if unit.chain != expected:
            raise JournalError(f"unit at byte {at} does not continue the chain of the unit before it: one was changed")
        if unit.kind == FRAME:
            frames.append(unit)
        at, chain = unit.end, unit.chain
    later = _later_unit(data, at + 1)
    if later is not None:
        # One fsync makes a mark and the frame after it durable, and a power cut before it may keep only the frame:
        # then a hole of the size of a mark is followed by one frame and nothing else.
        lacks_mark = later.offset == at + UNIT.size and later.kind == FRAME and _later_unit(data, later.end) is None
        if marked or not lacks_mark:
            raise JournalError(f"unit at byte {at} is damaged: the one at byte {later.offset} after it is whole")
    if len(data) - at > UNIT.size + FRAME_BYTES_MAX:
        raise JournalError(f"unit at byte {at} is damaged: the last {len(data) - at} bytes hold no whole unit")
    return Segment(header, tuple(frames), at, chain, marked)


def units(data: bytes, at: int = 0) -> Iterator[Unit]:
    """Yield the consecutive whole units from ``at`` on, without checking the chain."""
    while (unit := _whole_unit(data, at)) is not None:
        yield unit
        at = unit.end


def _whole_unit(data: bytes, at: int) -> Unit | None:
    """Return the unit at ``at``; None if there is no whole unit."""
    if at + UNIT.size > len(data):
        return None
    kind, length, _, chain = UNIT.unpack_from(data, at)
    end = at + UNIT.size + int(length)
    if kind not in (HEADER, FRAME, MARK) or length > FRAME_BYTES_MAX or end > len(data):
        return None
    body = data[at + UNIT.size : end]
    return Unit(kind, at, chain, body, end) if data[at:end] == _unit(kind, chain, body) else None


def _later_unit(data: bytes, start: int) -> Unit | None:
    """Return the first whole unit from byte ``start`` on; None if there is none."""
    found = (_whole_unit(data, place.start()) for place in ANY_KIND.finditer(data, start))
    return next((unit for unit in found if unit is not None), None)


def _parse_header(body: bytes) -> Header:
    try:
        plain = parse_json(body)
        found = plain["format"]
        if type(found) is int and found > FORMAT:
            raise JournalError(f"unit at byte 0 has format {found}, of a newer version; this one reads up to {FORMAT}")
        header: Header = from_plain(Header, plain, "header")
        if header.format != FORMAT or len(bytes.fromhex(header.before)) != len(CHAIN_START):
            raise ValueError(f"format {header.format!r}, before {header.before!r}")
    except JournalError:
        raise
    except (ValueError, KeyError, TypeError, PlainError) as error:
        raise JournalError(f"unit at byte 0 is not a segment's header of this version: {str(error)[:200]}") from error
    return header


FRAME_1 = struct.Struct("<II")
RECORD_BYTES_MAX = 1 << 20
BODY_START = re.compile(rb'\{"at_ns":')
"""Start of a body.  Inside a body no frame precedes it: four printable characters, as a length, exceed the bound."""
EVENT_KINDS = records_in(events, OuterEvent)


class JournalError(ValueError):
    """The journal is damaged before its end, or another version of the machine wrote it.  The text names the offset."""


@dataclass(frozen=True, slots=True)
class Record:
    """One event, the machine's instant, and the digest of the event's effects."""

    at_ns: int
    event: OuterEvent
    effects_digest: str


def digest_effects(effects: Sequence[OuterEffect]) -> str:
    """Return 16 hex digits over the effects' names and fields.

    The reason in a note is prose and is left out: another version may word it otherwise and decide the same.
    """
    return digest_with_prose([replace(effect, why="") if isinstance(effect, Note) else effect for effect in effects])


def digest_with_prose(effects: Sequence[OuterEffect]) -> str:
    """Return the digest with the notes' reasons, without a share of 1: the first journals had no ``share``."""
    named = [[stored_name(type(effect)), to_plain(effect)] for effect in effects]
    for _, fields in named:
        if isinstance(fields, dict) and fields.get("share") == 1:
            del fields["share"]
    return hashlib.sha256(canonical(named)).hexdigest()[:16]


def encode_records(records: Sequence[Record]) -> bytes:
    """Return the body of a frame: the records of one turn, one on a line."""
    lines = []
    for record in records:
        event, effects = stored_name(type(record.event)), record.effects_digest
        lines.append(canonical({"at_ns": record.at_ns, "effects": effects, "event": event, "is": record.event}))
        assert len(lines[-1]) <= RECORD_BYTES_MAX
    return b"\n".join(lines)


def decode_records(body: bytes, at: int) -> list[Record]:
    """Return the records in ``body``; ``JournalError`` names ``at``, the offset of the body in its file."""
    return [_parse(line, at) for line in body.split(b"\n")]


def read_records(data: bytes) -> tuple[list[Record], int]:
    """Return the whole records of ``data``, which is of format 1, and the offset at which they end.

    The bytes after that offset are a write that a crash interrupted: it was never acknowledged and may be cut off.  An
    interrupted write is the last one, so a whole record further on means damage: ``JournalError``.
    """
    records: list[Record] = []
    at = 0
    while (end := _end_of_record(data, at)) is not None:
        records.append(_parse(data[at + FRAME_1.size : end], at))
        at = end
    for place in BODY_START.finditer(data, at + FRAME_1.size + 1):
        begin = place.start() - FRAME_1.size
        if _end_of_record(data, begin) is not None:
            raise JournalError(f"journal record at byte {at} is damaged: the one at byte {begin} after it is whole")
    if len(data) - at > FRAME_1.size + RECORD_BYTES_MAX:
        raise JournalError(f"journal has {len(data) - at} bytes from byte {at} on that hold no whole record")
    return records, at


def _end_of_record(data: bytes, at: int) -> int | None:
    """Return the end of the whole record at ``at``; None if there is none."""
    if at + FRAME_1.size > len(data):
        return None
    length, checksum = FRAME_1.unpack_from(data, at)
    end = at + FRAME_1.size + int(length)
    if not 0 < length <= RECORD_BYTES_MAX or end > len(data):
        return None
    return end if zlib.crc32(memoryview(data)[at + FRAME_1.size : end]) == checksum else None


def _parse(body: bytes, at: int) -> Record:
    try:
        plain = parse_json(body)
        event = from_plain(EVENT_KINDS[plain["event"]], plain["is"], plain["event"])
        at_ns, effects = from_plain(int, plain["at_ns"], "at_ns"), from_plain(str, plain["effects"], "effects")
        return Record(at_ns, event, effects)
    except (ValueError, KeyError, TypeError, PlainError) as error:
        raise JournalError(
            f"journal record at byte {at} is not an event of this version: {str(error)[:200]}"
        ) from error


def describe(record: Record) -> str:
    """Return one readable line: instant in seconds, event, its fields."""
    plain = to_plain(record.event)
    assert isinstance(plain, dict)
    short = {"digest": 17, "downlink_digest": 17, "process": 8}
    fields = " ".join(f"{name}={str(value)[: short.get(name)]}" for name, value in plain.items())
    return f"{record.at_ns / 1e9:12.6f}  {type(record.event).__name__:<16} {fields}  -> {record.effects_digest}"
