from __future__ import annotations

import dataclasses

import pytest

from diloco.wire.chunks import DamagedChunk, checksum, cut
from diloco.wire.messages import Chunk, MalformedMessage, PullHeader
from diloco.wire.pulled import PullSink
from tests.wire.fake_syncer import DIGEST

PARTS = (b"first down-link", b"second")
PAYLOAD = b"".join(PARTS)
HEADER = PullHeader(0, 7, 9, False, "int4", 64, 21, (15, 6), DIGEST, checksum(PARTS), ())


def feed(sink: PullSink, offset: int, until: int = 1000) -> None:
    for at, data, *checksums in cut(PARTS, 4, offset):
        if at < until:
            sink.accept(Chunk(at, bytes(data), *checksums))


def test_parts_come_out_as_they_were_declared() -> None:
    sink = PullSink()
    assert sink.begin(HEADER) is False
    feed(sink, 0)
    pulled = sink.finish()
    assert tuple(map(bytes, pulled.parts)) == PARTS
    assert pulled.header is HEADER
    assert all(part.readonly for part in pulled.parts)
    assert (sink.offset, sink.header) == (0, None)


def test_bytes_are_kept_for_the_same_version_with_newer_fates() -> None:
    for stop in (0, 4, 8, 12, 15, 19):
        sink = PullSink()
        sink.begin(HEADER)
        feed(sink, 0, until=stop)
        with pytest.raises(DamagedChunk):
            sink.finish()
        assert sink.offset == stop
        assert sink.begin(dataclasses.replace(HEADER, fates=())) is True
        feed(sink, sink.offset)
        assert tuple(map(bytes, sink.finish().parts)) == PARTS


@pytest.mark.parametrize(
    "changes", [{"version": 10, "part_bytes": (15, 3, 3)}, {"digest": "0" * 64}, {"payload_crc32": 1}]
)
def test_bytes_of_another_version_are_dropped(changes: dict[str, object]) -> None:
    sink = PullSink()
    sink.begin(HEADER)
    feed(sink, 0, until=8)
    assert sink.begin(dataclasses.replace(HEADER, **changes)) is False
    assert sink.offset == 0


def test_the_whole_is_compared_and_dropped_when_it_differs() -> None:
    sink = PullSink()
    sink.begin(dataclasses.replace(HEADER, payload_crc32=HEADER.payload_crc32 ^ 1))
    feed(sink, 0)
    with pytest.raises(DamagedChunk, match="whole payload differs"):
        sink.finish()
    assert sink.offset == 0


def test_a_checksum_of_the_whole_that_is_not_told_is_not_compared() -> None:
    sink = PullSink()
    sink.begin(dataclasses.replace(HEADER, payload_crc32=0))
    feed(sink, 0)
    assert tuple(map(bytes, sink.finish().parts)) == PARTS


def test_nothing_is_allocated_for_too_large_a_declaration() -> None:
    sink = PullSink(payload_bytes_max=20)
    with pytest.raises(MalformedMessage, match="payload_bytes is 21: at most 20"):
        sink.begin(HEADER)
    assert sink.header is None


def test_chunks_and_ends_before_a_header_are_noticed() -> None:
    with pytest.raises(MalformedMessage, match="before the header"):
        PullSink().accept(Chunk(0, b"a", 0))
    with pytest.raises(DamagedChunk, match="before the header"):
        PullSink().finish()


def test_nothing_newer_has_no_parts() -> None:
    sink = PullSink()
    sink.begin(PullHeader(0, 9, 9, False, "int4", 64, 0, (), DIGEST, 0, ()))
    assert sink.finish().parts == ()
