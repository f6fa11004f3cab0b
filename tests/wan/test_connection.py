"""Bytes through a link: whole, in order, late enough, and never more of them than the link holds."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time

import pytest

from diloco.wan.link import LinkOptions
from diloco.wan.relay import SOCKET_BUFFER_BYTES
from tests.wan.endpoints import Site, Streams, run, site, soon


async def pump(writer: asyncio.StreamWriter, payload: bytes, draws: random.Random) -> None:
    """Write ``payload`` in pieces of any size with pauses, then end the stream."""
    at = 0
    while at < len(payload):
        size = draws.choice([1, 100, 5000, 100_000, 400_000])
        writer.write(payload[at : at + size])
        at += size
        await writer.drain()
        if draws.random() < 0.2:
            await asyncio.sleep(draws.random() * 0.01)
    writer.write_eof()


async def pump_both_ways(
    client: Streams, target: Streams, up: bytes, down: bytes, draws: random.Random
) -> tuple[bytes, bytes]:
    """What came out above and below."""
    came_up, came_down, _, _ = await soon(
        asyncio.gather(
            target[0].read(-1),
            client[0].read(-1),
            pump(client[1], up, random.Random(draws.random())),
            pump(target[1], down, random.Random(draws.random())),
        )
    )
    return came_up, came_down


def test_an_echo_takes_a_round_trip_and_a_new_connection_one_more() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=60)) as link:
            began_s = time.monotonic()
            client, target = await link.connect()
            assert time.monotonic() - began_s >= 0.060, "the far side opens one round trip after the connect"
            for _ in range(5):
                began_s = time.monotonic()
                client[1].write(b"ping")
                assert await soon(target[0].readexactly(4)) == b"ping"
                assert time.monotonic() - began_s >= 0.030
                target[1].write(b"pong")
                assert await soon(client[0].readexactly(4)) == b"pong"
                assert time.monotonic() - began_s >= 0.060
            assert link.relay.stats()["late_us_p95"] > 0

    run(test())


def test_nothing_is_read_before_the_far_side_is_open() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=100)) as link:
            began_s = time.monotonic()
            client = await link.dial()
            client[1].write(b"hello")
            target = await soon(link.arrived.get())
            link.writers.append(target[1])
            assert await soon(target[0].readexactly(5)) == b"hello"
            assert time.monotonic() - began_s >= 0.150, "a round trip for the handshake, half of one for the data"

    run(test())


def test_bulk_is_held_to_the_rate_over_all_connections_of_a_direction() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=20, mbps=16, queue_kib=64)) as link:
            pairs = [await link.connect() for _ in range(3)]
            began_s = time.monotonic()
            for client, _ in pairs:
                client[1].write(bytes(500_000))
            await soon(asyncio.gather(*(target[0].readexactly(500_000) for _, target in pairs)))
            assert time.monotonic() - began_s >= 0.95 * 0.750, "1.5 MB at 2 MB/s"
            # The other way is free.
            pairs[0][1][1].write(b"x")
            await soon(pairs[0][0][0].readexactly(1))

    run(test())


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_whole_and_are_counted_exactly_while_the_link_changes(seed: int) -> None:
    async def change_at_random(link: Site, draws: random.Random) -> None:
        while True:
            await asyncio.sleep(draws.random() * 0.03)
            rtt_ms = draws.choice([0, 1, 20])
            link.relay.set(
                rtt_ms=rtt_ms,
                jitter_ms=rtt_ms * draws.random(),
                mbps=draws.choice([20, 50, 500]),
                queue_kib=draws.choice([0, 16, 1024]),
                stall_percent=draws.choice([0, 100]),
                stall_ms=20,
            )
            if draws.random() < 0.5:
                link.relay.partition(draws.choice(["up", "down", "both"]))
                await asyncio.sleep(draws.random() * 0.03)
                link.relay.heal()

    async def test() -> None:
        draws = random.Random(seed)
        async with site(LinkOptions(mbps=20, seed=seed)) as link:
            changing = asyncio.create_task(change_at_random(link, random.Random(seed + 100)))
            payloads = [draws.randbytes(draws.randrange(1_000_000)) for _ in range(4)]
            pairs = [await link.connect() for _ in range(2)]
            came = await soon(
                asyncio.gather(
                    pump_both_ways(*pairs[0], payloads[0], payloads[1], draws),
                    pump_both_ways(*pairs[1], payloads[2], payloads[3], draws),
                )
            )
            changing.cancel()
            assert [*came[0], *came[1]] == payloads, f"seed {seed}"
            stats = link.relay.stats()
            assert stats["bytes_up"] == len(payloads[0]) + len(payloads[2]), f"seed {seed}"
            assert stats["bytes_down"] == len(payloads[1]) + len(payloads[3]), f"seed {seed}"
            assert stats["in_flight_bytes_up"] == stats["in_flight_bytes_down"] == 0, f"seed {seed}"

    run(test())


def test_one_half_can_end_while_the_other_goes_on() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=10)) as link:
            client, target = await link.connect()
            client[1].write(b"question")
            client[1].write_eof()
            assert await soon(target[0].read(-1)) == b"question"
            assert link.relay.stats()["connections"] == 1
            target[1].write(b"answer")
            target[1].close()
            assert await soon(client[0].read(-1)) == b"answer"
            # The target's end has closed when the client's stream ended, or does so in the loop's next turns.
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert link.relay.stats()["connections"] == 0
            assert link.relay.stats()["connections_total"] == 1

    run(test())


def test_a_slow_link_makes_its_sender_wait() -> None:
    async def test() -> None:
        options = LinkOptions(rtt_ms=20, mbps=1, queue_kib=32)
        async with site(options) as link:
            client, _ = await link.connect()
            await fill(client[1], 30_000_000)
            peak = link.relay.stats()["in_flight_bytes_peak"]
            assert 0 < peak <= options.window_bytes + options.read_bytes

    run(test())


def test_a_receiver_that_does_not_read_makes_its_sender_wait_and_no_other() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=10)) as link:
            (stuck, _), (client, target) = await link.connect(), await link.connect()
            await fill(stuck[1], 100_000_000)
            client[1].write(b"x" * 1_000_000)
            assert len(await soon(target[0].readexactly(1_000_000))) == 1_000_000

    run(test())


async def fill(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    """Send until nothing is taken any more; fail if all of ``num_bytes`` is."""
    handle: socket.socket = writer.get_extra_info("socket").dup()
    sent, quiet = 0, 0
    with handle:
        while sent < num_bytes and quiet < 10:
            try:
                sent += handle.send(bytes(SOCKET_BUFFER_BYTES))
                quiet = 0
            except BlockingIOError:
                quiet += 1
                await asyncio.sleep(0.05)
    assert 0 < sent < num_bytes, "the sender was never made to wait"


def test_senders_that_fall_silent_while_they_wait_for_room_do_not_block_the_others() -> None:
    async def test() -> None:
        options = LinkOptions(mbps=50, queue_kib=0)
        async with site(options) as link:
            pairs = [await link.connect() for _ in range(8)]
            link.relay.partition("up")
            # Each fills the link by itself; all but the last then have nothing more to say.
            for client, _ in pairs:
                client[1].write(bytes(3 * options.read_bytes))
            await asyncio.sleep(0.1)
            pairs[-1][0][1].write(bytes(200_000))
            link.relay.heal()
            await soon(asyncio.gather(*(target[0].readexactly(3 * options.read_bytes) for _, target in pairs)))
            await soon(pairs[-1][1][0].readexactly(200_000))

    run(test())


def test_a_reset_by_one_side_crosses_the_link_behind_what_was_sent() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=60)) as link:
            client, target = await link.connect()
            handle: socket.socket = target[1].get_extra_info("socket")
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            began_s = time.monotonic()
            target[1].write(b"last words")
            # A moment, so that the relay has read the words before the reset takes them out of its kernel.
            await asyncio.sleep(0.02)
            # Held and then let go, both come out at once.
            link.relay.partition("down")
            target[1].transport.abort()
            await asyncio.sleep(0.02)
            link.relay.heal()
            assert await soon(client[0].readexactly(10)) == b"last words"
            with pytest.raises(ConnectionResetError):
                await soon(client[0].read(-1))
            assert time.monotonic() - began_s >= 0.050

    run(test())
