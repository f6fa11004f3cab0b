"""One pull over several streams, and through a path that damages bytes."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.wire.channel import SYNC_SERVICE, bulk_bytes_per_s
from diloco.wire.chunks import checksum
from diloco.wire.client import SyncClient
from diloco.wire.handlers import PullSource
from diloco.wire.messages import KIB, MIB, Frame, PullAsk, Unreachable
from diloco.wire.options import ClientOptions
from diloco.wire.pulling import Patience, PullSink, pieces
from diloco.wire.v1 import sync_pb2
from tests.wire.fake_syncer import DIGEST, RUN, join_ask
from tests.wire.relay import Relay, wait_until
from tests.wire.test_messages import MARK, MARKED, PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.wire.conftest import Wired

ASK = PullAsk(RUN, "site-a", 0, 2)


@pytest.fixture
def relay(wired: Wired) -> Iterator[Relay]:
    relay = Relay(wired.server.address)
    yield relay
    relay.close()


@pytest.mark.parametrize("channels", [2, 3, 6])
def test_one_pull_goes_over_several_streams_and_each_byte_once(wired: Wired, relay: Relay, channels: int) -> None:
    wired.syncer.publish(PAYLOAD)
    client = wired.client(address=relay.address, data_channels=channels)
    pulled = client.pull(ASK, PullSink())
    assert bytes(pulled.parts[0]) == PAYLOAD
    assert relay.connections == channels
    assert wired.server.counters()["payload_bytes_out"] == len(PAYLOAD)
    assert wired.syncer.calls.count("pull") == channels


def test_a_short_pull_takes_one_stream(wired: Wired, relay: Relay) -> None:
    wired.syncer.publish(b"short")
    client = wired.client(address=relay.address, data_channels=6)
    assert bytes(client.pull(ASK, PullSink()).parts[0]) == b"short"
    assert relay.connections == 1


def joined(wired: Wired, relay: Relay, channels: int) -> SyncClient:
    """A client whose syncer has said that it speaks protocol 3."""
    wired.syncer.protocol = 3
    client = wired.client(address=relay.address, data_channels=channels)
    client.join(join_ask())
    return client


@pytest.mark.parametrize("channels", [1, 3])
def test_a_version_sets_out_the_moment_it_is_made(wired: Wired, relay: Relay, channels: int) -> None:
    client, patience = joined(wired, relay, channels), Patience(20.0)
    wired.syncer.publish(PAYLOAD)
    client.pull(ASK, PullSink())
    began = client.bytes_down
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(client.pull, replace(ASK, have_version=3), PullSink(), patience)
        wait_until(lambda: wired.syncer.waiting == channels)
        assert not wired.syncer.feeds
        assert client.bytes_down == began
        assert patience.carried_s == 0.0
        wired.syncer.publish(PAYLOAD, from_version=3, version=4)
        found = pulled.result(20)
    assert bytes(found.parts[0]) == PAYLOAD
    assert found.header.version == 4
    assert 0.0 < patience.carried_s < 20.0
    assert wired.server.counters()["payload_bytes_out"] == 2 * len(PAYLOAD), "something was sent twice"


def test_what_is_not_made_is_waited_for_no_longer_than_said(wired: Wired, relay: Relay) -> None:
    client = joined(wired, relay, 1)
    wired.syncer.publish(from_version=3, numel=1)
    found = client.pull(replace(ASK, have_version=3), PullSink(), Patience(0.2))
    assert found.parts == ()
    assert found.header.version == 3


@pytest.mark.slow
def test_who_waits_for_what_is_made_already_has_lost_its_connection(wired: Wired, relay: Relay) -> None:
    wired.syncer.protocol = 3
    client = wired.client(address=relay.address, stall_s=0.5)
    client.join(join_ask())
    patience = Patience(60.0)
    wired.syncer.publish(from_version=3, numel=1)
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(client.pull, replace(ASK, have_version=3), PullSink(), patience)
        wait_until(lambda: wired.syncer.waiting == 1)
        assert not wait_until(pulled.done, seconds=1.0), "it may wait longer than a stream may be silent"
        patience.due()
        with pytest.raises(Unreachable, match="nothing moved"):
            pulled.result(20)


def test_streams_that_find_different_versions_bring_one_of_them(wired: Wired, relay: Relay) -> None:
    """One was published between the answers to two streams of a pull."""
    client, answer = joined(wired, relay, 3), wired.syncer.pull
    wired.syncer.publish(PAYLOAD)
    client.pull(ASK, PullSink())
    versions = iter((4, 5, 4, 5, 5))

    def pull(ask: PullAsk, identity: Any) -> PullSource:
        version = ask.want_version or next(versions)
        found = answer(replace(ask, want_version=0), identity)
        sizes = (len(PAYLOAD) // (version - 2),) * (version - 3)
        sizes += (len(PAYLOAD) - sum(sizes),)
        header = replace(found.header, version=version, from_version=2, part_bytes=sizes, payload_crc32=0)
        ends = list(itertools.accumulate(sizes))
        parts = [bytes([version]) + PAYLOAD[end - size + 1 : end] for size, end in zip(sizes, ends, strict=True)]
        return replace(found, header=header, parts=parts)

    wired.syncer.pull = pull  # type: ignore[method-assign]
    found = client.pull(ASK, PullSink())
    assert all(part[0] == found.header.version for part in found.parts)
    assert sum(map(len, found.parts)) == len(PAYLOAD)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_damaged_chunk_is_fetched_again_by_itself(wired: Wired, relay: Relay, channels: int) -> None:
    wired.syncer.publish(MARKED)
    client = wired.client(address=relay.address, data_channels=channels)
    relay.damage(MARK, 3)
    assert bytes(client.pull(ASK, PullSink()).parts[0]) == MARKED
    assert relay.damaged == 3
    assert wired.server.counters()["payload_bytes_out"] <= len(MARKED) + 3 * MIB


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


def test_what_several_streams_have_brought_is_not_fetched_again(wired: Wired, relay: Relay) -> None:
    wired.syncer.publish(PAYLOAD)
    broken: list[int] = []
    sink = PullSink(broken=lambda: broken.append(sink.bytes_held))
    client = wired.client(address=relay.address, data_channels=3)
    relay.hold(1 * MIB)
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(client.pull, ASK, sink)
        for _ in range(1000):
            if sink.bytes_held > MIB:
                break
            threading.Event().wait(0.01)
        relay.cut()
        with pytest.raises(Unreachable):
            pulled.result(20)
    held = sink.bytes_held
    assert held > MIB
    assert broken == [held]
    before = client.bytes_down
    for _ in range(100):
        try:
            assert bytes(client.pull(ASK, sink).parts[0]) == PAYLOAD
            break
        except Unreachable:
            threading.Event().wait(0.1)
    assert client.bytes_down - before < len(PAYLOAD) - held + 20_000


def test_a_pull_keeps_to_the_rate_that_its_site_has_set(wired: Wired) -> None:
    wired.syncer.publish(PAYLOAD[: 2 * MIB])
    client = wired.client(down_mbps=16.0)
    began_s = time.monotonic()
    client.pull(ASK, PullSink())
    assert 0.8 < time.monotonic() - began_s < 10.0
    client = wired.client(up_mbps=16.0)
    began_s = time.monotonic()
    from tests.wire.fake_syncer import push_header

    client.push(push_header(PAYLOAD[: 2 * MIB]), PAYLOAD[: 2 * MIB])
    assert 0.8 < time.monotonic() - began_s < 10.0


def test_a_syncer_of_an_earlier_protocol_answers_with_chunks_over_one_stream() -> None:
    """It sends everything from the offset, whatever else was asked, and the checksum of the whole counts."""
    crc = checksum((PAYLOAD,))
    asked: list[int] = []

    def pull(raw: bytes, context: Any) -> Iterator[bytes]:
        from diloco.wire.chunks import cut

        ask = sync_pb2.PullRequest.FromString(raw)
        asked.append(ask.offset)
        header = sync_pb2.PullHeader(
            fragment=0,
            from_version=2,
            version=3,
            encoding="int4",
            numel=2 * len(PAYLOAD),
            payload_bytes=len(PAYLOAD),
            part_bytes=[len(PAYLOAD)],
            digest=DIGEST,
            payload_crc32=crc,
        )
        yield sync_pb2.PullResponse(header=header).SerializeToString()
        for count, (offset, data) in enumerate(cut((PAYLOAD,), ask.offset, len(PAYLOAD), lambda: 64 * KIB)):
            if len(asked) == 1 and count == 10:
                return
            chunk = sync_pb2.Chunk(offset=offset, data=bytes(data), crc32=zlib.crc32(data))
            yield sync_pb2.PullResponse(chunk=chunk).SerializeToString()

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"Pull": grpc.unary_stream_rpc_method_handler(pull)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SYNC_SERVICE, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with SyncClient(address, "site-a", RUN, options=ClientOptions(data_channels=4)) as client:
            assert bytes(client.pull(ASK, PullSink()).parts[0]) == PAYLOAD
            assert asked == [0, 640 * KIB]
            crc += 1
            sink = PullSink()
            with pytest.raises(Unreachable, match="whole payload differs"):
                client.pull(ASK, sink)
            assert sink.bytes_held == 0
    finally:
        server.stop(None)


def test_streams_that_bring_what_is_missing_share_the_rate(wired: Wired) -> None:
    asked: list[int] = []
    answer = wired.syncer.pull
    wired.syncer.pull = lambda ask, identity: (asked.append(ask.bytes_per_s), answer(ask, identity))[1]  # type: ignore[method-assign]
    wired.syncer.publish(PAYLOAD)
    sink = PullSink()
    sink.begin(replace(wired.syncer.version, frames=True))
    sink.accept(Frame(0, memoryview(PAYLOAD)[:MIB]))
    client = wired.client(data_channels=2, down_mbps=8000.0)
    assert bytes(client.pull(ASK, sink).parts[0]) == PAYLOAD
    assert asked == [bulk_bytes_per_s(8000.0) // 2] * 2


def test_pieces_cover_what_is_missing_from_its_beginning() -> None:
    assert pieces([(0, 6 * MIB)], 3, 9 * MIB) == [(0, 2 * MIB), (2 * MIB, 4 * MIB), (4 * MIB, 6 * MIB)]
    assert pieces([(5, 6), (8, 9)], 4, MIB) == [(5, 6), (8, 9)]
    assert pieces([(0, 300 * KIB)], 6, MIB) == [(0, 256 * KIB), (256 * KIB, 300 * KIB)]
    assert pieces([(0, 1), (2, 3), (4, 5)], 2, MIB) == [(0, 1), (2, 3)]
    assert pieces([(0, 6 * MIB)], 2, MIB) == [(0, MIB), (MIB, 2 * MIB)]
