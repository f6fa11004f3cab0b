"""A version on its way in: into a sink, over one stream or several, and through a path that breaks or damages bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from diloco.wire.channel import SYNC_SERVICE, bulk_bytes_per_s
from diloco.wire.chunks import ChunkError, DamagedChunk, checksum, cut
from diloco.wire.client import SyncClient
from diloco.wire.convert import pack_pull_part, unpack_pull
from diloco.wire.handlers import PullSource
from diloco.wire.messages import KIB, MIB, Chunk, Frame, MalformedMessage, PullAsk, PullHeader, Unreachable
from diloco.wire.pulling import Patience, PulledVersion, PullSink, pieces
from tests.wire.conftest import Aside, Patch, Wired, answering
from tests.wire.fake_syncer import DIGEST, RUN, push_header
from tests.wire.relay import WAIT_S, Relay, until_reached, wait_until
from tests.wire.samples import MARK, MARKED, PAYLOAD

PARTS = (b"first down-link", b"second")
JOINED = b"".join(PARTS)
HEADER = PullHeader(0, 7, 9, False, "int4", 64, 21, (15, 6), DIGEST, checksum(PARTS), ())
ASK = PullAsk(RUN, "site-a", 0, 2)


def feed(sink: PullSink, offset: int = 0, until: int = 1000) -> PullSink:
    for at, data in cut(PARTS, offset, len(JOINED), lambda: 4):
        if at < until:
            sink.accept(Chunk.of(at, data))
    return sink


def begun(sink: PullSink | None = None, until: int = 1000, **changes: Any) -> PullSink:
    """A sink that was told a header and given the chunks before ``until``."""
    sink = sink or PullSink()
    sink.begin(replace(HEADER, **changes))
    return feed(sink, 0, until)


def test_bytes_are_kept_for_the_same_version_with_newer_fates_and_dropped_for_another() -> None:
    for stop in (0, 4, 8, 12, 15, 19):
        sink = begun(until=stop)
        with pytest.raises(DamagedChunk):
            sink.finish()
        assert sink.missing() == [(stop, len(JOINED))]
        sink.begin(replace(HEADER, fates=()))
        assert sink.missing() == [(stop, len(JOINED))]
        assert tuple(map(bytes, feed(sink, stop).finish().parts)) == PARTS
    for changes in ({"version": 10, "part_bytes": (15, 3, 3)}, {"digest": "0" * 64}, {"payload_crc32": 1}):
        sink = begun(until=8)
        sink.begin(replace(HEADER, **changes))
        assert sink.bytes_held == 0


def test_the_whole_is_compared_where_its_checksum_is_told_and_nothing_comes_before_its_header() -> None:
    sink = begun(payload_crc32=HEADER.payload_crc32 ^ 1)
    with pytest.raises(DamagedChunk, match="whole payload differs"):
        sink.finish()
    assert sink.bytes_held == 0
    assert tuple(map(bytes, begun(payload_crc32=0).finish().parts)) == PARTS
    with pytest.raises(MalformedMessage, match="before the header"):
        PullSink().accept(Frame(0, memoryview(b"a")))
    with pytest.raises(DamagedChunk, match="before the header"):
        PullSink().finish()


def test_nothing_is_held_while_a_payload_begins(monkeypatch: Patch) -> None:
    """Another thread asks how much is here while the memory for it is still being made."""
    sink, hold, held = PullSink(), PullSink._hold, []

    def asked_meanwhile(self: PullSink, memory: bytearray, header: PullHeader | None = None) -> None:
        held.extend([] if header is None else [self.bytes_held])
        hold(self, memory, header)

    monkeypatch.setattr(PullSink, "_hold", asked_meanwhile)
    begun(sink, until=8)
    sink.begin(replace(HEADER, version=10))
    assert held == [0, 0]
    assert sink.bytes_held == 0


def test_frames_come_in_any_order_and_each_once_and_a_damaged_one_leaves_its_bytes_missing() -> None:
    sink = PullSink()
    sink.begin(replace(HEADER, frames=True, payload_crc32=0))
    for at, data in reversed(list(cut(PARTS, 0, len(JOINED), lambda: 4))):
        frame = Frame(at, data, intact=at != 8)
        sink.accept(frame)
        if frame.intact:
            with pytest.raises(ChunkError, match="not missing"):
                sink.accept(frame)
    assert sink.missing() == [(8, 12)]
    assert sink.bytes_held == len(JOINED) - 4
    with pytest.raises(DamagedChunk, match="ends at 8 of 21"):
        sink.finish()
    sink.accept(Frame(8, memoryview(JOINED)[8:12]))
    assert tuple(map(bytes, sink.finish().parts)) == PARTS


def test_parts_come_out_as_declared_and_memory_is_used_again_once_it_is_given_back_and_no_longer_read() -> None:
    sink = PullSink()
    first = begun(sink).finish()
    assert (first.header, tuple(map(bytes, first.parts))) == (HEADER, PARTS)
    assert all(part.readonly for part in first.parts)
    assert (sink.bytes_held, sink.header) == (0, None)
    memory = first.parts[0].obj
    second = begun(sink).finish()
    assert second.parts[0].obj is not memory, "it was not given back"
    sink.give_back(first)
    third = begun(sink).finish()
    assert third.parts[0].obj is memory
    reader = third.parts[1][2:]  # Made of a part, as a tensor over it is.
    sink.give_back(third)
    pulled = begun(sink).finish()
    assert pulled.parts[0].obj is not memory
    assert reader == PARTS[1][2:]
    sink.give_back(PulledVersion(HEADER, ()))
    for length, is_used in ((11, True), (22, False), (10, False)):  # What is much too long is given up.
        payload = bytes(range(length))
        memory = pulled.parts[0].obj
        sink.give_back(pulled)
        sink.begin(replace(HEADER, version=8, payload_bytes=length, part_bytes=(length,), payload_crc32=0))
        assert sink.missing() == [(0, length)]
        sink.accept(Frame(0, memoryview(payload)))
        pulled = sink.finish()
        assert (bytes(pulled.parts[0]), pulled.parts[0].obj is memory) == (payload, is_used)


def test_one_pull_goes_over_several_streams_and_each_byte_once_and_a_short_one_over_one(
    wired: Wired, relay: Relay
) -> None:
    for payload, connections in ((b"short", 1), (PAYLOAD, 6)):
        wired.syncer.publish(payload)
        client = wired.client(address=relay.address, data_channels=6)
        before, relay.connections = wired.server.counters().get("payload_bytes_out", 0), 0
        assert bytes(client.pull(ASK, PullSink()).parts[0]) == payload
        assert relay.connections == connections
        assert wired.server.counters()["payload_bytes_out"] - before == len(payload)
    assert wired.syncer.calls.count("pull") == 1 + 6


@pytest.mark.parametrize("channels", [1, 3])
def test_a_version_sets_out_the_moment_it_is_made(wired: Wired, relay: Relay, aside: Aside, channels: int) -> None:
    client, patience = wired.client(address=relay.address, data_channels=channels), Patience(20.0)
    wired.syncer.publish(PAYLOAD)
    client.pull(ASK, PullSink())
    began = client.down.bytes
    pulled = aside(client.pull, replace(ASK, have_version=3), PullSink(), patience)
    assert wait_until(lambda: wired.syncer.waiting == channels)
    assert not wired.syncer.feeds
    assert client.down.bytes == began
    assert patience.carried_s == 0.0
    wired.syncer.publish(PAYLOAD, from_version=3, version=4)
    found = pulled.result(WAIT_S)
    assert bytes(found.parts[0]) == PAYLOAD
    assert found.header.version == 4
    assert 0.0 < patience.carried_s < 20.0
    assert wired.server.counters()["payload_bytes_out"] == 2 * len(PAYLOAD), "something was sent twice"
    wired.syncer.publish(from_version=3, numel=1)
    found = client.pull(replace(ASK, have_version=3), PullSink(), Patience(0.2))
    assert (found.parts, found.header.version) == ((), 3), "what is not made is waited for no longer than said"


@pytest.mark.slow
def test_a_pull_that_waits_for_what_is_made_already_has_lost_its_connection(
    wired: Wired, relay: Relay, aside: Aside
) -> None:
    client, patience = wired.client(address=relay.address, stall_s=0.5), Patience(60.0)
    wired.syncer.publish(from_version=3, numel=1)
    pulled = aside(client.pull, replace(ASK, have_version=3), PullSink(), patience)
    assert wait_until(lambda: wired.syncer.waiting == 1)
    assert not wait_until(pulled.done, seconds=1.0), "it may wait longer than a stream may be silent"
    patience.due()
    with pytest.raises(Unreachable, match="no progress"):
        pulled.result(WAIT_S)


def test_streams_that_find_different_versions_bring_one_of_them(wired: Wired) -> None:
    """One was published between the answers to two streams of a pull."""
    client, answer = wired.client(data_channels=3), wired.syncer.pull
    size, versions = 6 * MIB, iter((4, 5, 4, 5, 5))
    wired.syncer.publish(bytes(size), whole=True, from_version=0, payload_crc32=0)
    client.pull(ASK, PullSink())

    def pull(ask: PullAsk, identity: Any) -> PullSource:
        version = ask.want_version or next(versions)
        found = answer(replace(ask, want_version=0), identity)
        return PullSource(replace(found.header, version=version), (bytes([version]) * size,))

    wired.syncer.pull = pull  # type: ignore[method-assign]
    found = client.pull(ASK, PullSink())
    assert bytes(found.parts[0]) == bytes([found.header.version]) * size


@pytest.mark.slow
def test_a_path_that_damages_everything_is_given_up_and_keeps_the_rest(wired: Wired, relay: Relay) -> None:
    wired.syncer.publish(MARKED)
    client, sink = wired.client(address=relay.address), PullSink()
    relay.damage(MARK, 1_000_000)
    with pytest.raises(Unreachable, match="damaged on the way 65 times"):
        client.pull(ASK, sink)
    relay.damage(MARK, 0)
    before = wired.server.counters()["payload_bytes_out"]
    assert bytes(client.pull(ASK, sink).parts[0]) == MARKED
    assert wired.server.counters()["payload_bytes_out"] - before <= 3 * MIB


@pytest.mark.parametrize(("channels", "is_gone"), [(1, False), (3, False), (1, True)])
def test_a_pull_that_was_cut_goes_on_from_where_it_was_and_anew_when_its_version_is_gone(
    wired: Wired, relay: Relay, aside: Aside, channels: int, is_gone: bool
) -> None:
    wired.syncer.publish(PAYLOAD)
    broken: list[int] = []

    class Cut(PullSink):
        def broke_off(self) -> None:
            super().broke_off()
            broken.append(self.bytes_held)

    sink = Cut()
    client = wired.client(address=relay.address, data_channels=channels)
    relay.hold(MIB)
    pulled = aside(client.pull, ASK, sink)
    assert wait_until(lambda: sink.bytes_held > MIB // 2)
    relay.cut()
    with pytest.raises(Unreachable):
        pulled.result(WAIT_S)
    held, before = sink.bytes_held, client.down.bytes
    assert 0 < held < len(PAYLOAD)
    assert broken == [held]
    if is_gone:
        wired.syncer.publish(b"new!" * 100, whole=True, version=4, from_version=0)
    found = until_reached(lambda: client.pull(ASK, sink))
    assert bytes(found.parts[0]) == (b"new!" * 100 if is_gone else PAYLOAD)
    assert client.down.bytes - before < len(PAYLOAD) - held + 200_000


def test_a_version_that_was_not_asked_for_is_not_taken(wired: Wired, monkeypatch: Patch) -> None:
    monkeypatch.setattr(wired.syncer, "pull", lambda ask, identity: PullSource(wired.syncer.version, (b"abc",)))
    three_parts = {"from_version": 0, "part_bytes": (1, 1, 1), "payload_bytes": 3}
    for changes in ({"payload_crc32": 1}, {"fragment": 1}, three_parts):
        wired.syncer.publish(b"abc", **changes)
        with pytest.raises(Unreachable, match="Pull"):
            wired.client().pull(ASK, PullSink())


@contextlib.contextmanager
def pulling(pull: Callable[[bytes, Any], Iterator[bytes]]) -> Iterator[SyncClient]:
    """A client of a server that answers a pull so."""
    handler = grpc.method_handlers_generic_handler(SYNC_SERVICE, {"Pull": grpc.unary_stream_rpc_method_handler(pull)})
    with answering(handler) as address, SyncClient(address, "site-a", RUN) as client:
        yield client


SIZE = len(PAYLOAD)
OTHERS = PullHeader(0, 2, 3, False, "int4", 2 * SIZE, SIZE, (SIZE,), DIGEST, 0, ())


def test_nothing_is_kept_of_an_answer_that_cannot_be() -> None:
    frame, sink = pack_pull_part(Frame(0, memoryview(PAYLOAD)[: 64 * KIB])), PullSink()
    answers = pack_pull_part(OTHERS), frame, frame
    with (
        pulling(lambda raw, context: iter(answers)) as client,
        pytest.raises(Unreachable, match="that are not missing"),
    ):
        client.pull(ASK, sink)
    assert sink.bytes_held == 0


def test_bulk_keeps_over_all_its_streams_to_the_rate_that_its_site_has_set(wired: Wired) -> None:
    short = PAYLOAD[: 2 * MIB]
    wired.syncer.publish(short)
    began_s = time.monotonic()
    wired.client(down_mbps=16.0, data_channels=2).pull(ASK, PullSink())
    pulled_s = time.monotonic()
    wired.client(up_mbps=16.0, data_channels=2).push(push_header(short), short)
    assert 0.8 < pulled_s - began_s < 10.0
    assert 0.8 < time.monotonic() - pulled_s < 10.0


def test_a_syncer_of_an_earlier_protocol_answers_with_chunks() -> None:
    """It sends everything from the offset, whatever else was asked, and the checksum of the whole counts."""
    crc = checksum((PAYLOAD,))
    asked: list[int] = []

    def pull(raw: bytes, context: Any) -> Iterator[bytes]:
        asked.append(unpack_pull(raw).offset)
        yield pack_pull_part(replace(OTHERS, payload_crc32=crc))
        for count, piece in enumerate(cut((PAYLOAD,), asked[-1], SIZE, lambda: 64 * KIB)):
            if len(asked) == 1 and count == 10:
                return
            yield pack_pull_part(Chunk.of(*piece, as_in_2=True))

    with pulling(pull) as client:
        assert bytes(client.pull(ASK, PullSink()).parts[0]) == PAYLOAD
        assert asked == [0, 640 * KIB]
        crc += 1
        sink = PullSink()
        with pytest.raises(Unreachable, match="whole payload differs"):
            client.pull(ASK, sink)
        assert sink.bytes_held == 0


def test_streams_that_bring_what_is_missing_from_its_beginning_share_the_rate(wired: Wired) -> None:
    wired.syncer.publish(PAYLOAD)
    sink = PullSink()
    sink.begin(replace(wired.syncer.version, frames=True))
    sink.accept(Frame(0, memoryview(PAYLOAD)[:MIB]))
    client = wired.client(data_channels=2, down_mbps=8000.0)
    assert bytes(client.pull(ASK, sink).parts[0]) == PAYLOAD
    assert [ask.bytes_per_s for ask in wired.syncer.pulls] == [bulk_bytes_per_s(8000.0) // 2] * 2
    assert pieces([(0, 6 * MIB)], 3, 9 * MIB) == [(0, 2 * MIB), (2 * MIB, 4 * MIB), (4 * MIB, 6 * MIB)]
    assert pieces([(5, 6), (8, 9)], 4, MIB) == [(5, 6), (8, 9)]
    assert pieces([(0, 300 * KIB)], 6, MIB) == [(0, 256 * KIB), (256 * KIB, 300 * KIB)]
    assert pieces([(0, 1), (2, 3), (4, 5)], 2, MIB) == [(0, 1), (2, 3)]
    assert pieces([(0, 6 * MIB)], 2, MIB) == [(0, MIB), (MIB, 2 * MIB)]
