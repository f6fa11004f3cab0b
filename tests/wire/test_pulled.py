from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from diloco.wire.chunks import ChunkError, DamagedChunk, checksum, cut
from diloco.wire.messages import Chunk, Frame, MalformedMessage, PullHeader
from diloco.wire.pulling import PulledVersion, PullSink
from tests.wire.fake_syncer import DIGEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.wire.chunks import Piece

PARTS = (b"first down-link", b"second")
PAYLOAD = b"".join(PARTS)
HEADER = PullHeader(0, 7, 9, False, "int4", 64, 21, (15, 6), DIGEST, checksum(PARTS), ())


def pieces(offset: int = 0) -> Iterator[Piece]:
    return cut(PARTS, offset, len(PAYLOAD), lambda: 4)


def feed(sink: PullSink, offset: int, until: int = 1000) -> None:
    for at, data in pieces(offset):
        if at < until:
            sink.accept(Chunk.of(at, data))


def test_parts_come_out_as_they_were_declared() -> None:
    sink = PullSink()
    sink.begin(HEADER)
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
        sink.begin(dataclasses.replace(HEADER, fates=()))
        assert sink.offset == stop
        feed(sink, sink.offset)
        assert tuple(map(bytes, sink.finish().parts)) == PARTS


def test_nothing_is_held_while_a_payload_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else asks how much is here while the memory for it is still being made."""
    sink, memory, held = PullSink(), PullSink._memory, []

    def asked_meanwhile(self: PullSink, payload_bytes: int) -> bytearray:
        held.append(self.bytes_held)
        return memory(self, payload_bytes)

    monkeypatch.setattr(PullSink, "_memory", asked_meanwhile)
    sink.begin(HEADER)
    feed(sink, 0, until=8)
    sink.begin(dataclasses.replace(HEADER, version=10))
    assert held == [0, 0]
    assert sink.bytes_held == 0


@pytest.mark.parametrize(
    "changes", [{"version": 10, "part_bytes": (15, 3, 3)}, {"digest": "0" * 64}, {"payload_crc32": 1}]
)
def test_bytes_of_another_version_are_dropped(changes: dict[str, object]) -> None:
    sink = PullSink()
    sink.begin(HEADER)
    feed(sink, 0, until=8)
    sink.begin(dataclasses.replace(HEADER, **changes))
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


def test_chunks_and_ends_before_a_header_are_noticed() -> None:
    with pytest.raises(MalformedMessage, match="before the header"):
        PullSink().accept(Frame(0, memoryview(b"a")))
    with pytest.raises(DamagedChunk, match="before the header"):
        PullSink().finish()


def test_nothing_newer_has_no_parts() -> None:
    sink = PullSink()
    sink.begin(PullHeader(0, 9, 9, False, "int4", 64, 0, (), DIGEST, 0, ()))
    assert sink.finish().parts == ()


def test_frames_come_in_any_order_and_each_once() -> None:
    sink = PullSink()
    sink.begin(dataclasses.replace(HEADER, frames=True, payload_crc32=0))
    frames = [Frame(*piece) for piece in pieces()]
    for frame in reversed(frames):
        sink.accept(frame)
        with pytest.raises(ChunkError, match="not missing"):
            sink.accept(frame)
    assert tuple(map(bytes, sink.finish().parts)) == PARTS


def test_a_frame_that_was_damaged_leaves_its_bytes_missing() -> None:
    sink = PullSink()
    sink.begin(dataclasses.replace(HEADER, frames=True))
    for at, data in pieces():
        sink.accept(Frame(at, data, intact=at != 8))
    assert sink.missing() == [(8, 12)]
    assert (sink.offset, sink.bytes_held) == (8, len(PAYLOAD) - 4)
    with pytest.raises(DamagedChunk, match="ends at 8 of 21"):
        sink.finish()
    sink.accept(Frame(8, memoryview(PAYLOAD)[8:12]))
    assert tuple(map(bytes, sink.finish().parts)) == PARTS


def test_memory_is_used_again_once_it_is_given_back_and_nobody_reads_it() -> None:
    sink = PullSink()

    def pulled() -> PulledVersion:
        sink.begin(HEADER)
        feed(sink, 0)
        return sink.finish()

    first = pulled()
    memory = first.parts[0].obj
    second = pulled()
    assert second.parts[0].obj is not memory, "it was not given back"
    sink.give_back(first)
    third = pulled()
    assert third.parts[0].obj is memory
    reader = third.parts[1][2:]  # Made of a part, as a tensor over it is.
    sink.give_back(third)
    assert pulled().parts[0].obj is not memory
    assert reader == PARTS[1][2:]
    sink.give_back(PulledVersion(HEADER, ()))


@pytest.mark.parametrize("length", [3, 10, 11, 20, 22, 100])
def test_memory_of_about_the_same_length_is_used_again(length: int) -> None:
    sink = PullSink()
    sink.begin(HEADER)
    feed(sink, 0)
    first = sink.finish()
    memory = first.parts[0].obj
    sink.give_back(first)
    payload = bytes(range(length))
    for crc32 in (checksum((payload,)) ^ 1, checksum((payload,))):
        sink.begin(PullHeader(0, 7, 8, False, "int4", 64, length, (length,), DIGEST, crc32, ()))
        assert sink.missing() == [(0, length)]
        sink.accept(Frame(0, memoryview(payload)))
        assert (sink.offset, sink.bytes_held, sink.missing()) == (length, length, [])
        if crc32 != checksum((payload,)):
            with pytest.raises(DamagedChunk):
                sink.finish()
    pulled = sink.finish()
    assert bytes(pulled.parts[0]) == payload
    assert (pulled.parts[0].obj is memory) == (11 <= length <= 21)


def test_whoever_wants_to_know_is_told_how_many_bytes_from_the_first_on_are_there() -> None:
    told: list[tuple[int, bytes]] = []
    begun: list[PullHeader] = []

    def begin(header: PullHeader, payload: memoryview) -> object:
        begun.append(header)
        assert payload.readonly
        assert len(payload) == len(PAYLOAD)
        return lambda count: told.append((count, bytes(payload[:count])))

    sink = PullSink(begun=begin)  # type: ignore[arg-type]
    sink.begin(HEADER)
    for start, stop in ((8, 12), (0, 4), (12, 21), (4, 8)):
        sink.accept(Frame(start, memoryview(PAYLOAD)[start:stop]))
    assert told == [(count, PAYLOAD[:count]) for count in (0, 4, 4, 21)]
    sink.begin(HEADER)
    assert begun == [HEADER], "it goes on with what it has"
    sink.finish()
    sink.begin(HEADER)
    assert begun == [HEADER, HEADER]


def test_nobody_is_told_more_after_an_attempt_broke_off() -> None:
    told: list[object] = []
    sink = PullSink(begun=lambda header, payload: told.append, broken=lambda: told.append("broken"))
    sink.begin(HEADER)
    sink.accept(Frame(0, memoryview(PAYLOAD)[:4]))
    sink.broke_off()
    sink.begin(HEADER)
    assert sink.offset == 4, "what came is kept"
    sink.accept(Frame(4, memoryview(PAYLOAD)[4:]))
    assert told == [4, "broken"]
    assert b"".join(sink.finish().parts) == PAYLOAD
