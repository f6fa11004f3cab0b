"""The journal: what a crash cuts short is cut off, what is damaged is found, what is replayed is the same.

After a field was added, which needs a default, ``python -m tests.sync.test_journal`` writes the table of stored names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import types
import typing
import zlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import pytest

from diloco.sync import effects, events, journal
from diloco.sync import events as ev
from diloco.sync.effects import Contribution, LearnerEffect, Note, OuterEffect, StartOuterStep, UpdateRef
from diloco.sync.events import LearnerEvent, OuterEvent
from diloco.sync.journal import (
    CHAIN_START,
    FRAME_1,
    FRAME_BYTES_MAX,
    JSON_DEPTH_MAX,
    RECORD_BYTES_MAX,
    UNIT,
    Header,
    JournalError,
    PlainError,
    Record,
    Segment,
    canonical,
    chain_after,
    decode_records,
    describe,
    digest_effects,
    encode_frame,
    encode_header,
    encode_mark,
    encode_records,
    from_plain,
    is_framed,
    parse_json,
    read_records,
    read_segment,
    records_in,
    stored_fields,
    stored_name,
    to_plain,
)
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.progress import LearnerState
from diloco.sync.state import OuterState
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, replay, through_json
from tests.sync.format_1 import encode_record


def a_run() -> Syncer:
    syncer = Syncer(quorum=2, grace="fixed")
    for site in ("a", "b", "c"):
        syncer.join(site, at_s=1)
    syncer.push("a", at_s=2)
    syncer.push("b", at_s=3)
    syncer.deadline()
    syncer.push("c", at_s=4.5)
    syncer.done(at_s=5)
    syncer.handle(ev.SiteSilent("b"), 6)
    syncer.handle(ev.DrainRequested(1), 7)
    return syncer


# --- Format 1: records one after the other ---------------------------------------------------------------------------


def test_what_is_written_is_read_and_a_torn_tail_or_one_of_zeros_is_cut() -> None:
    """A power cut can leave a file longer than what was written to it."""
    records = a_run().records
    *whole, last = [encode_record(record) for record in records]
    data = b"".join(whole)
    assert not is_framed(data)
    for zeros in (0, 1, 7, 8, 9, 4096):
        assert read_records(data + last + bytes(zeros)) == (records, len(data + last))
        for kept in (20,) if zeros else range(len(last)):
            assert read_records(data + last[:kept] + bytes(zeros)) == (records[:-1], len(data)), kept


def test_a_flipped_bit_in_any_byte_before_the_tail_is_found() -> None:
    *whole, last = [encode_record(record) for record in a_run().records]
    data = b"".join(whole)
    for bit in range(0, 8 * len(data), 7):
        damaged = bytearray(data + last)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            read_records(bytes(damaged))
        except JournalError:
            continue
        pytest.fail(f"bit {bit} is not missed")


def test_many_bytes_that_are_no_record_are_damage() -> None:
    data = encode_record(a_run().records[0])
    with pytest.raises(JournalError, match=f"from byte {len(data)} on"):
        read_records(data + b"\xff" * (FRAME_1.size + RECORD_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"\xff",
        b'{"at_ns":1,"effects":"","event":"Gone","is":{}}',
        b'{"at_ns":1,"effects":"","event":"SiteHeard","is":{"site":"a","more":1}}',
        b'{"at_ns":1.5,"effects":"","event":"SiteHeard","is":{"site":"a"}}',
        b'{"at_ns":1,"effects":2,"event":"SiteHeard","is":{"site":"a"}}',
    ],
)
def test_record_of_another_version_is_named_by_its_offset(body: bytes) -> None:
    first = encode_record(a_run().records[0])
    with pytest.raises(JournalError, match=f"byte {len(first)}"):
        read_records(first + FRAME_1.pack(len(body), zlib.crc32(body)) + body)


# --- Format 2: segments of chained units -----------------------------------------------------------------------------

RUN: dict[str, str | int] = {"run_id": "small"}


def turns() -> list[list[Record]]:
    records = a_run().records
    return [records[:3], records[3:4], records[4:]]


def units(before: bytes = CHAIN_START, segment: int = 1) -> list[bytes]:
    """A segment of three turns piece by piece: a unit, its mark, the next unit ..."""
    header, chain = encode_header(segment, before, RUN)
    pieces = [header, encode_mark(chain)]
    for records in turns():
        frame, chain = encode_frame(encode_records(records), chain)
        pieces += [frame, encode_mark(chain)]
    return pieces


def test_what_is_written_is_read() -> None:
    data = b"".join(units(segment=7))
    assert is_framed(data)
    found = read_segment(data)
    assert found.header is not None
    assert (found.header.segment, found.header.run, found.header.format) == (7, RUN, 2)
    assert [decode_records(frame.body, frame.offset) for frame in found.frames] == turns()
    assert (found.end, found.marked) == (len(data), True)
    assert data[found.frames[1].offset :].startswith(b"\xd1JF")
    assert read_segment(b"") == Segment(None, (), 0, CHAIN_START, marked=False)


def test_the_chain_stands_for_everything_before_across_segments() -> None:
    first = read_segment(b"".join(units()))
    second = read_segment(b"".join(units(first.chain, 2)))
    assert second.header is not None
    assert second.header.before == first.chain.hex()
    chain = first.chain
    for body in (canonical(second.header), *(frame.body for frame in second.frames)):
        chain = chain_after(chain, body)
    assert chain == second.chain
    other = read_segment(b"".join(units(bytes(31) + b"\1", 2)))
    assert not {frame.chain for frame in second.frames} & {frame.chain for frame in other.frames}


def test_an_end_that_was_never_acknowledged_is_cut_at_every_byte_and_so_is_one_of_zeros() -> None:
    pieces = units()
    for number in range(len(pieces) + 1):
        whole = b"".join(pieces[:number])
        for kept in range(len(pieces[number])) if number < len(pieces) else ():
            found = read_segment(whole + pieces[number][:kept])
            assert found.end == len(whole), (number, kept)
            assert len(found.frames) == max(0, (number - 1) // 2), (number, kept)
            assert found.marked == (number > 0 and number % 2 == 0)
        for zeros in (1, 43, 44, 45, 4096):
            assert read_segment(whole + bytes(zeros)).end == len(whole), (number, zeros)


def test_a_flipped_bit_in_any_byte_is_found_and_named_but_for_the_last_mark_which_tells_nothing_more() -> None:
    pieces = units()
    data = b"".join(pieces)
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    whole = read_segment(data)
    for bit in range(0, 8 * len(data), 7):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        begin = max(start for start in starts if start <= bit // 8)
        assert is_framed(bytes(damaged)), bit
        if begin == starts[-1]:
            found = read_segment(bytes(damaged))
            assert (found.frames, found.end) == (whole.frames, begin), "nothing acknowledged was touched"
            continue
        with pytest.raises(JournalError, match=f"byte {begin} "):
            read_segment(bytes(damaged))


def test_an_edit_with_its_checksum_made_right_a_missing_frame_a_second_header_and_none_show() -> None:
    pieces = units()
    at = len(b"".join(pieces[:2]))
    body = pieces[2][UNIT.size :].replace(b'"site":"a"', b'"site":"b"')
    assert body != pieces[2][UNIT.size :]
    in_its_place = journal._unit(journal.FRAME, pieces[2][12 : UNIT.size], body)
    honest, chain = encode_frame(body, read_segment(b"".join(pieces[:2])).chain)
    after = at + len(honest) + UNIT.size
    for damaged, words in (
        ([*pieces[:2], in_its_place, *pieces[3:]], f"unit at byte {at} does not continue the chain of the unit before"),
        ([*pieces[:2], honest, encode_mark(chain), *pieces[4:]], f"unit at byte {after} does not continue the chain"),
        ([*pieces[:2], *pieces[4:]], "does not continue the chain"),
        ([*pieces[:3], *pieces[5:]], "does not continue the chain"),
        ([*pieces, pieces[0]], "one header, at its beginning"),
        (pieces[2:], "one header, at its beginning"),
        ([*pieces, b"\xff" * (UNIT.size + FRAME_BYTES_MAX + 1)], f"unit at byte {len(b''.join(pieces))} is damaged"),
    ):
        with pytest.raises(JournalError, match=words):
            read_segment(b"".join(damaged))


def test_a_frame_that_outlived_the_mark_before_it_is_cut_off_with_the_hole_unless_it_has_its_own_mark() -> None:
    """One sync makes both durable; before it a power cut may keep the second alone, and neither was acknowledged."""
    *kept, _, frame, mark = units()
    data = b"".join(kept)
    found = read_segment(data + bytes(UNIT.size) + frame)
    assert (found.end, len(found.frames), found.marked) == (len(data), 2, False)
    with pytest.raises(JournalError, match=f"unit at byte {len(data)} is damaged"):
        read_segment(data + bytes(UNIT.size) + frame + mark)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "not a segment's header"),
        (b"[]", "not a segment's header"),
        (b'{"before":"00","format":2,"run":{},"segment":1}', "not a segment's header"),
        (b'{"before":"","format":1,"run":{},"segment":1}', "not a segment's header"),
        (b'{"format":3,"who":"knows"}', "has format 3, of a newer version; this one reads up to 2"),
    ],
)
def test_a_header_of_another_version_is_said_in_words(body: bytes, words: str) -> None:
    data, _ = encode_frame(body, CHAIN_START, journal.HEADER)
    with pytest.raises(JournalError, match=f"unit at byte 0 .*{words}"):
        read_segment(data)


def test_a_body_that_is_not_records_is_named_by_the_place_of_its_frame() -> None:
    for body in (b"{}", b"[]", encode_records(a_run().records) + b"\n"):
        with pytest.raises(JournalError, match="byte 77 is not an event"):
            decode_records(body, 77)


# --- Replays ---------------------------------------------------------------------------------------------------------


def test_replay_from_any_snapshot_gives_the_same_memory_bit_for_bit() -> None:
    syncer = a_run()
    for cut in range(len(syncer.records)):
        machine = OuterSync(syncer.options)
        assert [record for record, _ in replay(machine, syncer.records[:cut])] == syncer.records[:cut]
        machine = OuterSync.restore(syncer.options, through_json(machine.snapshot()))
        list(replay(machine, syncer.records[cut:]))
        assert machine.snapshot() == syncer.machine.snapshot(), f"snapshot after record {cut}"


def test_other_options_and_another_order_are_noticed_at_the_first_record_that_differs() -> None:
    syncer = a_run()
    first = next(number for number, record in enumerate(syncer.records) if isinstance(record.event, ev.UpdateArrived))
    with pytest.raises(JournalError, match=rf"record {first} \(UpdateArrived at 2000000000 ns\)"):
        list(replay(OuterSync(OuterOptions(quorum=1, grace="fixed")), syncer.records))
    shuffled = [Record(0, record.event, record.effects_digest) for record in syncer.records]
    random.Random(3).shuffle(shuffled)
    with pytest.raises((JournalError, AssertionError, KeyError)):
        list(replay(OuterSync(syncer.options), shuffled))


def test_description_is_one_line_with_the_facts() -> None:
    record = next(record for record in a_run().records if isinstance(record.event, ev.UpdateArrived))
    line = describe(record)
    assert "\n" not in line
    for fact in ("2.000000", "UpdateArrived", "site=a", "sequence=1", "tokens=100", record.effects_digest):
        assert fact in line


def test_a_digest_is_of_what_was_decided_and_not_of_how_it_is_worded() -> None:
    note = Note("evicted", "an operator's word", "a")
    assert digest_effects([note]) == digest_effects([replace(note, why="said by hand")])
    others = [[replace(note, what="held")], [replace(note, site="b")], []]
    assert all(digest_effects(other) != digest_effects([note]) for other in others)
    step = StartOuterStep(1, 7, (Contribution("a", 1.0, 6, (UpdateRef(3, "p", "int4", "d"),)),))
    assert digest_effects([step]) == "6190a878554b89b3", "19: as it was told before there were shares"
    assert digest_effects([replace(step, share=0.5)]) != digest_effects([step])


def test_a_journal_whose_digests_cover_the_words_is_read_as_well() -> None:
    syncer = a_run()
    worded = []
    machine = OuterSync(OuterOptions(quorum=2, grace="fixed"))
    for record, decided in replay(machine, syncer.records):
        plain = [(type(effect).__name__, to_plain(effect)) for effect in decided]
        named = [[name, {key: value for key, value in told.items() if key != "share"}] for name, told in plain]
        worded.append(replace(record, effects_digest=hashlib.sha256(canonical(named)).hexdigest()[:16]))
    assert worded != syncer.records, "there are notes in it"
    assert len(list(replay(OuterSync(OuterOptions(quorum=2, grace="fixed")), worded))) == len(worded)


# --- Plain values ----------------------------------------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


@dataclass
class Inner:
    n: int
    x: float = 0.5


@dataclass
class Outer:
    name: str
    flag: bool
    colour: Colour | None
    pair: tuple[int, str]
    many: tuple[Inner, ...]
    rows: list[Inner]
    table: dict[str, int] = field(default_factory=dict)
    either: int | str = 1


VALUE = Outer("a", True, Colour.RED, (1, "b"), (Inner(1), Inner(2, 1.5)), [Inner(3)], {"k": 4}, "all")


def test_plain_values_go_there_and_back_and_their_bytes_depend_on_the_value_only() -> None:
    assert from_plain(Outer, to_plain(VALUE)) == VALUE
    assert from_plain(Inner, {"n": 1, "x": 2}) == Inner(1, 2.0), "whole numbers may stand for floats"
    assert canonical({"b": 1, "a": (2, 3)}) == canonical({"a": [2, 3], "b": 1}) == b'{"a":[2,3],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))
    with pytest.raises(TypeError, match="set has no plain form"):
        to_plain({1, 2})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 5}, r"\.name is 5: str wanted"),
        ({"flag": 1}, r"\.flag is 1: bool wanted"),
        ({"colour": "blue"}, r"\.colour is 'blue': not one of red"),
        ({"pair": [1]}, r"\.pair has 1 items: 2 wanted"),
        ({"pair": [1, 2]}, r"\.pair\[1\] is 2: str wanted"),
        ({"many": [{"n": 1}, {"n": True}]}, r"\.many\[1\]\.n is True: int wanted"),
        ({"rows": {}}, r"\.rows is \{\}: a list wanted"),
        ({"rows": [{"m": 1}]}, r"\.rows\[0\] has unknown fields: m"),
        ({"rows": [{}]}, r"\.rows\[0\] lacks fields: n"),
        ({"table": {"k": "v"}}, r"\.table\.k is 'v': int wanted"),
        ({"either": 1.5}, r"\.either is 1\.5: fits none of"),
        ({"other": 1}, r"unknown fields: other"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(change: dict[str, object], words: str) -> None:
    plain = to_plain(VALUE)
    assert isinstance(plain, dict)
    with pytest.raises(PlainError, match=words):
        from_plain(Outer, plain | change)


def test_json_may_nest_as_deep_on_every_interpreter_and_what_is_none_is_an_error_in_words() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        assert parse_json(opening * JSON_DEPTH_MAX + "1" + closing * JSON_DEPTH_MAX)
        for levels in (JSON_DEPTH_MAX + 1, 5000):
            with pytest.raises(ValueError, match="nested too deeply: more than 100 levels"):
                parse_json(opening * levels + "1" + closing * levels)
        with pytest.raises(ValueError):  # noqa: PT011 — any words
            parse_json(opening * 50_000)
    for text in (b"\xff", ""):
        with pytest.raises(ValueError):  # noqa: PT011 — any words
            parse_json(text)


def test_a_mapping_is_wanted_a_number_beyond_every_float_is_none_and_a_long_value_is_shown_cut_short() -> None:
    with pytest.raises(PlainError, match="a mapping wanted"):
        from_plain(Outer, [])
    assert from_plain(float, 10**300, "norm") == 1e300
    with pytest.raises(PlainError, match="norm is 1000"):
        from_plain(float, 10**400, "norm")
    with pytest.raises(PlainError) as raised:
        from_plain(int, "x" * 100_000, "number")
    assert len(str(raised.value)) < 200


@dataclass(frozen=True, slots=True)
class Renamed:
    STORED: ClassVar[str] = "Named"
    now: int = field(metadata={"stored": "before"})


def test_what_is_renamed_keeps_the_name_under_which_it_is_stored() -> None:
    assert stored_name(Renamed) == "Named"
    assert to_plain(Renamed(3)) == {"before": 3}
    assert from_plain(Renamed, {"before": 3}) == Renamed(3)
    with pytest.raises(PlainError, match="lacks fields: before"):
        from_plain(Renamed, {})
    with pytest.raises(PlainError, match="unknown fields: now"):
        from_plain(Renamed, {"before": 3, "now": 3})


# --- What is stored is a format: no name of it changes with a name of ours -------------------------------------------


TABLE = Path(__file__).parents[1] / "fixtures" / "stored.json"


def spelt(kind: object, found: dict[str, object]) -> str:
    """A type in stored names; the records and enums in it go into ``found``."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        found[kind.__name__] = sorted(kind)
        return kind.__name__
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        tabulate(kind, found)
        return stored_name(kind)
    arguments = typing.get_args(kind)
    if not arguments:
        return "..." if kind is Ellipsis else kind.__name__ if isinstance(kind, type) else str(kind)
    parts = [spelt(each, found) for each in arguments]
    origin = typing.get_origin(kind)
    return " | ".join(parts) if origin in (typing.Union, types.UnionType) else f"{origin.__name__}[{', '.join(parts)}]"


def tabulate(kind: type, found: dict[str, object]) -> None:
    name, hints = stored_name(kind), typing.get_type_hints(kind)
    if name in found:
        return
    found[name] = table = {}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for stored, own in (stored_fields(kind) or {}).items():
        field = fields[own]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        table[stored] = spelt(hints[own], found) + (", or its default" if has_default else "")


def all_that_is_stored() -> dict[str, object]:
    found: dict[str, object] = {}
    recorded = {**records_in(events, OuterEvent), **records_in(effects, OuterEffect)}
    for kind in (*recorded.values(), OuterState, LearnerState, Header):
        tabulate(kind, found)
    return found


def test_stored_names_and_types_are_those_of_the_format() -> None:
    assert all_that_is_stored() == json.loads(TABLE.read_text())


def example(kind: Any, number: int = 3) -> Any:
    """A value of type ``kind`` with nothing left at its default."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return example(next(arg for arg in args if arg is not type(None)), number)
    if origin is tuple:
        parts = args[:1] * 2 if args[-1] is Ellipsis else args
        return tuple(example(part, number + place) for place, part in enumerate(parts))
    if kind is HealthOptions:  # Not every value is one that may be set.
        return HealthOptions(policies={"site-a": "hold"}, history=number + 8)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        return kind(**{field.name: example(hints[field.name], number + place) for place, field in enumerate(fields)})
    if issubclass(kind, StrEnum):
        return list(kind)[number % len(kind)]
    return {int: number, str: f"text {number}", bool: number % 2 == 0, float: number / 7}[kind]


KINDS = [
    kind
    for module, base in ((events, OuterEvent), (events, LearnerEvent), (effects, OuterEffect), (effects, LearnerEffect))
    for kind in records_in(module, base).values()
]


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: kind.__name__)
def test_every_event_and_effect_is_frozen_and_survives_a_file(kind: type) -> None:
    value = example(kind)
    assert from_plain(kind, through_json(to_plain(value))) == value
    for each in dataclasses.fields(kind)[:1]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, each.name, None)


if __name__ == "__main__":
    TABLE.write_text(json.dumps(all_that_is_stored(), indent=1, sort_keys=True) + "\n")
