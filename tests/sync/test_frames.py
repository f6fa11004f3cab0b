"""Segments: a torn end is told from damage, and an edit anywhere shows, whatever it is."""

from __future__ import annotations

import random

import pytest

from diloco.sync import journal
from diloco.sync.journal import (
    CHAIN_START,
    FRAME_BYTES_MAX,
    UNIT,
    JournalError,
    Record,
    Segment,
    canonical,
    chain_after,
    decode_records,
    encode_frame,
    encode_header,
    encode_mark,
    encode_records,
    is_framed,
    read_segment,
)
from tests.sync.format_1 import encode_record
from tests.sync.test_journal import a_run

RUN: dict[str, str | int] = {"run_id": "small"}


def units(turns: list[list[Record]], before: bytes = CHAIN_START, segment: int = 1) -> list[bytes]:
    """A segment piece by piece: a unit, its mark, the next unit ..."""
    header, chain = encode_header(segment, before, RUN)
    pieces = [header, encode_mark(chain)]
    for records in turns:
        frame, chain = encode_frame(encode_records(records), chain)
        pieces += [frame, encode_mark(chain)]
    return pieces


def turns() -> list[list[Record]]:
    records = a_run().records
    return [records[:3], records[3:4], records[4:]]


def records_of(segment: Segment) -> list[list[Record]]:
    return [decode_records(frame.body, frame.offset) for frame in segment.frames]


def test_what_is_written_is_read() -> None:
    data = b"".join(units(turns(), segment=7))
    found = read_segment(data)
    assert found.header is not None
    assert (found.header.segment, found.header.run, found.header.format) == (7, RUN, 2)
    assert (records_of(found), found.end, found.marked) == (turns(), len(data), True)
    assert data[found.frames[1].offset :].startswith(b"\xd1JF")
    assert read_segment(b"") == Segment(None, (), 0, CHAIN_START, marked=False)


def test_the_chain_stands_for_everything_before_across_segments() -> None:
    first = read_segment(b"".join(units(turns())))
    second = read_segment(b"".join(units(turns(), first.chain, 2)))
    assert second.header is not None
    assert second.header.before == first.chain.hex()
    chain = first.chain
    for body in (canonical(second.header), *(frame.body for frame in second.frames)):
        chain = chain_after(chain, body)
    assert chain == second.chain
    other = read_segment(b"".join(units(turns(), bytes(31) + b"\1", 2)))
    assert not {frame.chain for frame in second.frames} & {frame.chain for frame in other.frames}


def test_an_end_that_was_never_acknowledged_is_cut_at_every_byte() -> None:
    pieces = units(turns())
    for number in range(len(pieces)):
        whole, torn = b"".join(pieces[:number]), pieces[number]
        for kept in range(len(torn)):
            found = read_segment(whole + torn[:kept])
            assert found.end == len(whole), (number, kept)
            assert len(found.frames) == max(0, (number - 1) // 2), (number, kept)
            assert found.marked == (number > 0 and number % 2 == 0)


@pytest.mark.parametrize("zeros", [1, 43, 44, 45, 4096])
def test_an_end_of_zeros_is_cut(zeros: int) -> None:
    """A power cut can leave a file longer than what was written to it."""
    pieces = units(turns())
    for number in range(len(pieces) + 1):
        whole = b"".join(pieces[:number])
        assert read_segment(whole + bytes(zeros)).end == len(whole)


def test_a_flipped_bit_in_any_byte_is_found_and_named_but_for_the_last_mark_which_tells_nothing_more() -> None:
    pieces = units(turns())
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


def test_a_flipped_bit_of_the_last_frame_is_found_by_its_mark_alone() -> None:
    """The crash that takes the mark along is the one case where it cannot be."""
    *pieces, frame, mark = units(turns())
    dice = random.Random(5)
    at = len(b"".join(pieces))
    for _ in range(200):
        damaged = bytearray(frame)
        damaged[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        with pytest.raises(JournalError, match=f"unit at byte {at} is damaged: the one at byte {at + len(frame)}"):
            read_segment(b"".join(pieces) + bytes(damaged) + mark)


def test_an_edit_with_its_checksum_made_right_is_found_by_the_chain() -> None:
    pieces = units(turns())
    at = len(b"".join(pieces[:2]))
    body = pieces[2][UNIT.size :].replace(b'"site":"a"', b'"site":"b"')
    assert body != pieces[2][UNIT.size :]
    honest, chain = encode_frame(body, read_segment(b"".join(pieces[:2])).chain)
    kept_chain = pieces[2][12 : UNIT.size]
    edited = journal._unit(journal.FRAME, kept_chain, body)
    with pytest.raises(JournalError, match=f"unit at byte {at} does not go on from what is before it"):
        read_segment(b"".join([*pieces[:2], edited, *pieces[3:]]))
    after = at + len(honest) + UNIT.size
    with pytest.raises(JournalError, match=f"unit at byte {after} does not go on from what is before it"):
        read_segment(b"".join([*pieces[:2], honest, encode_mark(chain), *pieces[4:]]))


@pytest.mark.parametrize("taken", [2, 3])
def test_a_frame_that_was_taken_out_shows(taken: int) -> None:
    pieces = units(turns())
    with pytest.raises(JournalError, match="does not go on"):
        read_segment(b"".join([*pieces[:taken], *pieces[taken + 2 :]]))


def test_a_second_header_or_none_is_damage() -> None:
    pieces = units(turns())
    with pytest.raises(JournalError, match="one header, at its beginning"):
        read_segment(b"".join(pieces + pieces[:1]))
    with pytest.raises(JournalError, match="one header, at its beginning"):
        read_segment(b"".join(pieces[2:]))


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
    data, _ = journal._chained(journal.HEADER, body, CHAIN_START)
    with pytest.raises(JournalError, match=f"unit at byte 0 .*{words}"):
        read_segment(data)


def test_many_bytes_that_are_no_unit_are_damage() -> None:
    data = b"".join(units(turns()))
    with pytest.raises(JournalError, match=f"unit at byte {len(data)} is damaged"):
        read_segment(data + b"\xff" * (UNIT.size + FRAME_BYTES_MAX + 1))


def test_segments_of_the_two_formats_are_told_apart() -> None:
    old = b"".join(encode_record(record) for record in a_run().records)
    assert not is_framed(old)
    assert not is_framed(old[:-3])
    assert is_framed(b"".join(units(turns())))


def test_a_body_that_is_not_records_is_named_by_the_place_of_its_frame() -> None:
    for body in (b"{}", b"[]", encode_records(a_run().records) + b"\n"):
        with pytest.raises(JournalError, match="byte 77 is not an event"):
            decode_records(body, 77)


def test_a_frame_that_outlived_the_mark_before_it_is_cut_off_with_the_hole() -> None:
    """One sync makes both durable; before it a power cut may keep the second alone, and neither was acknowledged."""
    pieces = units(turns()[:3])
    kept = b"".join(pieces[:-3])
    data = kept + bytes(UNIT.size) + pieces[-2]
    found = read_segment(data)
    assert (found.end, len(found.frames), found.marked) == (len(kept), 2, False)


def test_a_hole_before_a_frame_that_has_its_mark_is_damage() -> None:
    pieces = units(turns()[:3])
    data = b"".join(pieces[:-3]) + bytes(UNIT.size) + pieces[-2] + pieces[-1]
    with pytest.raises(JournalError, match=f"unit at byte {len(b''.join(pieces[:-3]))} is damaged"):
        read_segment(data)
