"""The journal: every event that changed the outer machine, in order, and nothing else.

A record is canonical JSON {"at_ns": instant, "effects": digest, "event": name, "is": {fields}}.  ``effects`` is the
digest of what the machine answered, so that a replay by other code that decides otherwise is noticed at the first
record that differs.  Payloads are in the spool; an event names them.

How records become a file that shows its damage is in ``frames.py``.  Format 1, which is still read, framed each record
by itself, all integers little-endian: u32 length of the body | u32 CRC-32 of the body | body
"""

from __future__ import annotations

import hashlib
import struct
import typing
import zlib
from dataclasses import dataclass, replace

from diloco.sync.effects import Note
from diloco.sync.events import OuterEvent
from diloco.sync.plain import PlainError, canonical, from_plain, parse_json, to_plain

if typing.TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from diloco.sync.effects import OuterEffect
    from diloco.sync.syncer import OuterSync

FRAME = struct.Struct("<II")
RECORD_BYTES_MAX = 1 << 20
BODY_START = b'{"at_ns":'
"""No text inside a body looks like a frame and this: the length would be four printable characters, over the bound."""
EVENT_KINDS: tuple[type, ...] = typing.get_args(OuterEvent)


class JournalError(ValueError):
    """The journal is damaged before its end, or was not written by this machine.  The text names the offset."""


@dataclass(frozen=True, slots=True)
class Record:
    """One event, the machine's instant, and the digest of the effects that it had."""

    at_ns: int
    event: OuterEvent
    effects_digest: str


def digest_effects(effects: Sequence[OuterEffect]) -> str:
    """16 hex digits over the effects' names and fields.

    The reason that a note gives is prose and is left out: another version may word it otherwise and decide the same.
    """
    return _digest([replace(effect, why="") if isinstance(effect, Note) else effect for effect in effects])


def _digest(effects: Sequence[OuterEffect]) -> str:
    """The share of a whole step is left out, as in the journals from before there were shares."""
    named = [[type(effect).__name__, to_plain(effect)] for effect in effects]
    for _, fields in named:
        if isinstance(fields, dict) and fields.get("share") == 1:
            del fields["share"]
    return hashlib.sha256(canonical(named)).hexdigest()[:16]


def encode_records(records: Sequence[Record]) -> bytes:
    """The records of one turn, one on a line."""
    lines = [_encode(record) for record in records]
    assert all(len(line) <= RECORD_BYTES_MAX for line in lines)
    return b"\n".join(lines)


def decode_records(body: bytes, at: int) -> list[Record]:
    """What ``encode_records`` was given; ``JournalError`` names ``at``, the place of the body in its file."""
    return [_parse(line, at) for line in body.split(b"\n")]


def encode_record(record: Record) -> bytes:
    """``record`` in the frame of format 1."""
    body = _encode(record)
    assert len(body) <= RECORD_BYTES_MAX, len(body)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def _encode(record: Record) -> bytes:
    return canonical(
        {
            "at_ns": record.at_ns,
            "effects": record.effects_digest,
            "event": type(record.event).__name__,
            "is": record.event,
        }
    )


def read_records(data: bytes) -> tuple[list[Record], int]:
    """The whole records of ``data``, which is of format 1, and the offset at which they end.

    What follows that offset is a write that a crash cut short: it was never acknowledged and may be cut off.  A write
    that was cut short is the last one, so a whole record further on means damage: ``JournalError``.
    """
    records: list[Record] = []
    at = 0
    while (end := _end_of_record(data, at)) is not None:
        records.append(_parse(data[at + FRAME.size : end], at))
        at = end
    _check_tail(data, at)
    return records, at


def _end_of_record(data: bytes, at: int) -> int | None:
    """Where the whole record at ``at`` ends; None if there is none."""
    if at + FRAME.size > len(data):
        return None
    length, checksum = FRAME.unpack_from(data, at)
    end = at + FRAME.size + int(length)
    if not 0 < length <= RECORD_BYTES_MAX or end > len(data):
        return None
    return end if zlib.crc32(memoryview(data)[at + FRAME.size : end]) == checksum else None


def _check_tail(data: bytes, at: int) -> None:
    later = data.find(BODY_START, at + FRAME.size + 1)
    while later >= 0:
        if _end_of_record(data, later - FRAME.size) is not None:
            raise JournalError(
                f"journal record at byte {at} is damaged: the one at byte {later - FRAME.size} after it is whole"
            )
        later = data.find(BODY_START, later + 1)
    if len(data) - at > FRAME.size + RECORD_BYTES_MAX:
        raise JournalError(f"journal has {len(data) - at} bytes from byte {at} on that are no record")


def _parse(body: bytes, at: int) -> Record:
    try:
        plain = parse_json(body)
        kinds = {kind.__name__: kind for kind in EVENT_KINDS}
        event = from_plain(kinds[plain["event"]], plain["is"], plain["event"])
        at_ns, effects = from_plain(int, plain["at_ns"], "at_ns"), from_plain(str, plain["effects"], "effects")
        return Record(at_ns, event, effects)
    except (ValueError, KeyError, TypeError, PlainError) as error:
        raise JournalError(
            f"journal record at byte {at} is not an event of this version: {str(error)[:200]}"
        ) from error


def replay(machine: OuterSync, records: Iterable[Record]) -> Iterator[tuple[Record, list[OuterEffect]]]:
    """Feed ``records`` to ``machine`` again and yield each with its effects; ``JournalError`` as ``decide_again``."""
    for number, record in enumerate(records):
        yield record, decide_again(machine, record, number)


def decide_again(machine: OuterSync, record: Record, number: int) -> list[OuterEffect]:
    """The effects of one record, the ``number``-th of a replay.

    ``JournalError`` when they differ from the ones that it had when it was written.
    """
    effects = machine.handle(record.event, record.at_ns)
    found = digest_effects(effects)
    # Earlier versions digested the prose as well; a journal of theirs is read as long as it is worded as it was then.
    if record.effects_digest not in (found, _digest(effects)):
        raise JournalError(
            f"record {number} ({type(record.event).__name__} at {record.at_ns} ns) had effects "
            f"{record.effects_digest} when it was written and {found} now: another version or other options"
        )
    return effects


def describe(record: Record) -> str:
    """One line for people: instant in seconds, event, its fields."""
    fields = " ".join(f"{name}={value}" for name, value in _shown(record.event))
    return f"{record.at_ns / 1e9:12.6f}  {type(record.event).__name__:<16} {fields}  -> {record.effects_digest}"


def _shown(event: OuterEvent) -> list[tuple[str, object]]:
    plain = to_plain(event)
    assert isinstance(plain, dict)
    short = {"digest": 17, "downlink_digest": 17, "process": 8}
    return [(name, str(value)[: short[name]] if name in short else value) for name, value in plain.items()]
