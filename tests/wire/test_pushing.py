"""One push over several streams, and through a path that damages bytes."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from diloco.sync.events import Outcome
from diloco.wire.messages import KIB, MIB, PushResult, Unreachable
from tests.wire.fake_syncer import join_ask, push_header
from tests.wire.relay import Relay, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.wire.conftest import Wired

SEED = 33
MARK = b"nothing else in the payload looks like this"
MARKS = 3 * MARK  # One of them is whole in a read, wherever the stream is cut.
PAYLOAD = random.Random(SEED).randbytes(6 * MIB + 123)
MARKED = b"".join((PAYLOAD[: 2 * MIB], MARKS, PAYLOAD[2 * MIB : 4 * MIB], MARKS, PAYLOAD[4 * MIB :], MARKS))


@pytest.fixture
def relay(wired: Wired) -> Iterator[Relay]:
    relay = Relay(wired.server.address)
    yield relay
    relay.close()


@pytest.mark.parametrize("channels", [2, 6])
def test_one_push_goes_over_several_streams_and_arrives_once(wired: Wired, relay: Relay, channels: int) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    for sequence in (1, 2):
        header = push_header(PAYLOAD, sequence=sequence)
        assert client.push(header, PAYLOAD) == PushResult(Outcome.ACCEPTED, 3)
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD
    assert relay.connections == channels
    carried = wired.server.counters()["payload_bytes_in"]
    assert carried == 2 * len(PAYLOAD), "something was sent twice"
    assert wired.syncer.calls.count("open_push") == 2


def test_a_short_push_takes_one_stream(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, data_channels=6)
    client.push(push_header(b"short"), b"short")
    assert relay.connections == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_a_damaged_chunk_is_sent_again_by_itself(wired: Wired, relay: Relay, channels: int) -> None:
    client = wired.client(address=relay.address, data_channels=channels)
    relay.damage(MARK, 3)
    assert client.push(push_header(MARKED), MARKED) == PushResult(Outcome.ACCEPTED, 3)
    assert relay.damaged == 3
    assert wired.syncer.accepted["site-a", 0, 1] == MARKED
    counters = wired.server.counters()
    assert 1 <= counters["chunks_again"] <= 3
    assert counters["payload_bytes_in"] <= len(MARKED) + 3 * 64 * KIB
    assert wired.syncer.commits == 1


def test_a_path_that_damages_everything_is_given_up(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    relay.damage(MARK, 1_000_000)
    with pytest.raises(Unreachable, match="damaged on the way, as 64 before it"):
        client.push(push_header(MARKED), MARKED)
    assert not wired.syncer.accepted


def test_streams_that_break_off_end_the_push_and_the_next_goes_on(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address, data_channels=3)
    relay.hold(1 * MIB)
    pool = ThreadPoolExecutor(1)
    pushed = pool.submit(client.push, push_header(PAYLOAD), PAYLOAD)
    assert wired.syncer.wrote.wait(20)
    relay.cut()
    with pytest.raises(Unreachable):
        pushed.result(20)
    assert wired.syncer.ended.wait(20)
    held = len(wired.syncer.spool["site-a", 0, 1])
    assert 0 < held < len(PAYLOAD)
    before = client.bytes_up
    for _ in range(100):
        try:
            assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.ACCEPTED
            break
        except Unreachable:
            wired.syncer.ended.wait(0.1)
    assert wired.syncer.accepted["site-a", 0, 1] == PAYLOAD
    assert client.bytes_up - before < 2 * len(PAYLOAD)
    pool.shutdown()


def test_a_stream_that_finds_nobody_is_done_without(wired: Wired) -> None:
    client = wired.client(data_channels=3)
    client._lines[2].lead_to("127.0.0.1:1")
    for sequence in range(1, 7):
        client._turn = itertools.count()  # The first stream is always one that works.
        assert client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD).outcome is Outcome.ACCEPTED
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD


def test_more_connections_are_used_when_that_is_said(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    for sequence, (count, connections) in enumerate(((1, 1), (3, 3), (99, 6), (0, 6)), 1):
        client.use_channels(count)
        client.push(push_header(PAYLOAD, sequence=sequence), PAYLOAD)
        assert relay.connections == connections
        assert wired.syncer.accepted["site-a", 0, sequence] == PAYLOAD


@pytest.mark.parametrize("channels", [1, 3])
def test_after_one_that_was_welcome_a_push_does_not_wait_to_be_admitted(
    wired: Wired, relay: Relay, channels: int
) -> None:
    wired.syncer.protocol = 3
    client = wired.client(address=relay.address, data_channels=channels)
    client.join(join_ask())
    client.push(push_header(PAYLOAD), PAYLOAD)
    small = PAYLOAD[: 800 * KIB]  # More than the first window, less than what finds room on the way.
    wired.syncer.admits.clear()
    before = client.bytes_up
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(client.push, push_header(small, sequence=2), small)
        assert wait_until(lambda: client.bytes_up - before > 256 * KIB), "nothing goes before the admission"
        assert not wired.syncer.spool.get(("site-a", 0, 2)), "a byte was read before the admission"
        wired.syncer.admits.set()
        assert pushed.result(20).outcome is Outcome.ACCEPTED
    assert wired.syncer.accepted["site-a", 0, 2] == small
    assert wired.server.counters()["payload_bytes_in"] == len(PAYLOAD) + len(small), "something was sent twice"


def test_a_push_that_was_not_welcome_lets_the_next_one_wait(wired: Wired) -> None:
    wired.syncer.protocol = 3
    client = wired.client()
    client.join(join_ask())
    client.push(push_header(PAYLOAD), PAYLOAD)
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    before = client.bytes_up
    assert client.push(push_header(PAYLOAD), PAYLOAD).outcome is Outcome.DUPLICATE
    assert client.bytes_up - before < KIB


def test_what_is_held_already_is_left_out_as_soon_as_that_is_known(wired: Wired, relay: Relay) -> None:
    """As after a restart of the site, which does not know how far the last process came."""
    wired.syncer.protocol = 3
    client = wired.client(address=relay.address)
    client.join(join_ask())
    client.push(push_header(PAYLOAD), PAYLOAD)
    wired.syncer.spool["site-a", 0, 2] = bytearray(PAYLOAD[: 5 * MIB])
    before = wired.server.counters()["payload_bytes_in"]
    assert client.push(push_header(PAYLOAD, sequence=2), PAYLOAD).outcome is Outcome.ACCEPTED
    assert wired.syncer.accepted["site-a", 0, 2] == PAYLOAD
    assert wired.server.counters()["payload_bytes_in"] - before < len(PAYLOAD)


def test_attempts_that_found_nobody_are_no_breaks(wired: Wired) -> None:
    """Nothing was lost on the way, so what goes on after them need not be careful."""
    client, header = wired.client(), push_header(PAYLOAD)
    client._lines[1].lead_to("127.0.0.1:1")
    for _ in range(3):
        with pytest.raises(Unreachable):
            client.push(header, PAYLOAD)
    assert client._breaks == {header.digest: 0}
    client._lines[1].lead_to(wired.server.address)
    assert client.push(header, PAYLOAD).outcome is Outcome.ACCEPTED


def test_a_push_that_breaks_again_and_again_puts_less_and_less_at_risk(wired: Wired, relay: Relay) -> None:
    client = wired.client(address=relay.address)
    payload = bytes(24 * MIB)
    breaks = 0
    relay.cut_after(2 * MIB)
    for _ in range(200):
        try:
            assert client.push(push_header(payload), payload).outcome is Outcome.ACCEPTED
            break
        except Unreachable:
            if not relay.waits_to_cut and breaks < 8:
                breaks += 1
                relay.cut_after(2 * MIB)
            wired.syncer.ended.wait(0.1)
    assert wired.syncer.accepted["site-a", 0, 1] == payload
    assert breaks >= 6
    assert relay.carried_up < len(payload) + 12 * MIB
