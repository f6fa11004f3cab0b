"""The controls of a link: what partition, reset and refusal look like to the two programs.

Bytes through it are whole, in order, late enough, and never more of them than the link holds.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time

import pytest

from diloco.wan.link import LinkOptions
from diloco.wan.relay import SOCKET_BUFFER_BYTES, Relay, RelayHost, format_address, parse_address, require_loopback
from tests.wan.endpoints import HOST, Site, Streams, is_silent, over, run, site, soon

FAST = LinkOptions(rtt_ms=4)


async def send(sender: Streams, receiver: Streams, text: bytes) -> None:
    """``text`` arrives at the other side."""
    sender[1].write(text)
    assert await soon(receiver[0].readexactly(len(text))) == text


@over(FAST)
async def test_a_partition_lets_nothing_out_and_a_heal_all_of_it(link: Site) -> None:
    client, target = await link.connect()
    ways = {"up": (client, target), "down": (target, client)}
    for direction in ("up", "down", "both"):
        link.relay.partition(direction)
        for name, (sender, receiver) in ways.items():
            sender[1].write(b"in the dark")
            if direction in ("both", name):
                assert await is_silent(receiver[0])
            else:
                assert await soon(receiver[0].readexactly(11)) == b"in the dark"
        link.relay.heal()
        for name, (sender, receiver) in ways.items():
            if direction in ("both", name):
                assert await soon(receiver[0].readexactly(11)) == b"in the dark"
            await send(sender, receiver, b"after")
    link.relay.partition()
    client[1].close()
    late = await link.dial()
    assert await is_silent(target[0]), "the close came through"
    assert link.arrived.empty(), "the connection was opened"
    link.relay.heal()
    assert await soon(target[0].read(-1)) == b""
    opened = await link.taken()
    await send(late, opened, b"at last")


@over(LinkOptions(rtt_ms=4, mbps=100))
async def test_a_reset_is_a_connection_reset_at_both_ends_and_frees_what_was_held(link: Site) -> None:
    pairs = [await link.connect() for _ in range(2)]
    link.relay.partition("up")
    pairs[0][0][1].write(bytes(2_000_000))
    await asyncio.sleep(0.2)
    assert link.relay.stats()["in_flight_bytes_up"] > 0
    link.relay.reset()
    for reader, _ in (streams for pair in pairs for streams in pair):
        with pytest.raises(ConnectionResetError):
            await soon(reader.read(-1))
    assert (link.relay.stats()["in_flight_bytes_up"], link.relay.stats()["connections"]) == (0, 0)
    link.relay.heal()
    await send(*await link.connect(), b"the next one works")


@over(LinkOptions(rtt_ms=60))
async def test_a_new_connection_takes_a_round_trip_before_its_first_byte_and_an_echo_one_more(link: Site) -> None:
    began_s = time.monotonic()
    client = await link.dial()
    client[1].write(b"ping")
    target = await link.taken()
    assert time.monotonic() - began_s >= 0.060, "the far side opens one round trip after the connect"
    assert await soon(target[0].readexactly(4)) == b"ping"
    assert time.monotonic() - began_s >= 0.090, "nothing is read before that"
    for _ in range(5):
        began_s = time.monotonic()
        await send(target, client, b"pong")
        assert time.monotonic() - began_s >= 0.030
        await send(client, target, b"ping")
        assert time.monotonic() - began_s >= 0.060
    assert link.relay.stats()["late_us_p95"] > 0


@over(FAST)
async def test_a_refusing_link_keeps_what_it_has_and_its_address(link: Site) -> None:
    client, target = await link.connect()
    address = link.relay.address
    for _ in range(3):
        link.relay.refuse()
        link.relay.refuse()
        with pytest.raises(ConnectionRefusedError):
            await link.dial()
        await send(client, target, b"still here")
        await link.relay.accept()
        await link.relay.accept()
        assert link.relay.address == address
        await send(*await link.connect(), b"welcome")


@over(FAST)
async def test_a_target_that_is_not_there_resets_the_client(link: Site) -> None:
    link.target.close()
    reader, _ = await link.dial()
    with pytest.raises(ConnectionResetError):
        await soon(reader.read(-1))


def test_only_loopback_is_bound_or_dialled_and_addresses_are_parsed_and_written_alike() -> None:
    for host in ("", "0.0.0.0", "::", "example.com", "10.0.0.1", "localhost.example.com"):
        for field, hosts in (("listen_host", (host, HOST)), ("target_host", (HOST, host))):
            with pytest.raises(ValueError, match=f"{field} is '{host}': only loopback addresses"):
                Relay(FAST, (hosts[0], 0), (hosts[1], 1))
    for taken in ("127.0.0.1", "127.3.4.5", "::1", "localhost"):
        require_loopback("listen_host", taken)
    for text in ("127.0.0.1:80", "[::1]:0", "localhost:65535"):
        assert format_address(*parse_address(text)) == text
    for text in ("127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536", ":x"):
        with pytest.raises(ValueError, match="host:port"):
            parse_address(text)


# --- Bytes through a link ---------------------------------------------------------------------------------------------


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


@over(LinkOptions(rtt_ms=20, queue_kib=64))
async def test_bulk_is_held_to_the_rate_as_last_set_over_all_connections_of_a_direction(link: Site) -> None:
    link.relay.set(mbps=16)
    with pytest.raises(ValueError, match="jitter_ms is 50"):
        link.relay.set(mbps=7000, jitter_ms=50)
    pairs = [await link.connect() for _ in range(3)]
    began_s = time.monotonic()
    for client, _ in pairs:
        client[1].write(bytes(500_000))
    await soon(asyncio.gather(*(target[0].readexactly(500_000) for _, target in pairs)))
    assert time.monotonic() - began_s >= 0.95 * 0.750, "1.5 MB at 2 MB/s"
    await send(pairs[0][1], pairs[0][0], b"the other way is free")


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
            pairs = [await link.connect() for _ in range(2)]
            ways = [way for client, target in pairs for way in ((client, target), (target, client))]
            payloads = [draws.randbytes(draws.randrange(1_000_000)) for _ in ways]
            pumps = [
                pump(sender[1], payload, random.Random(draws.random()))
                for (sender, _), payload in zip(ways, payloads, strict=True)
            ]
            came = await soon(asyncio.gather(*(receiver[0].read(-1) for _, receiver in ways), *pumps))
            changing.cancel()
            assert came[: len(ways)] == payloads, f"seed {seed}"
            stats = link.relay.stats()
            assert stats["bytes_up"] == len(payloads[0]) + len(payloads[2]), f"seed {seed}"
            assert stats["bytes_down"] == len(payloads[1]) + len(payloads[3]), f"seed {seed}"
            assert stats["in_flight_bytes_up"] == stats["in_flight_bytes_down"] == 0, f"seed {seed}"

    run(test())


@over(LinkOptions(rtt_ms=10))
async def test_one_half_can_end_while_the_other_goes_on(link: Site) -> None:
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


@over(LinkOptions(rtt_ms=20, mbps=1, queue_kib=32))
async def test_a_slow_link_makes_its_sender_wait(link: Site) -> None:
    client, _ = await link.connect()
    await fill(client[1], 30_000_000)
    peak = link.relay.stats()["in_flight_bytes_peak"]
    assert 0 < peak <= link.relay.options.window_bytes + link.relay.options.read_bytes


@over(LinkOptions(rtt_ms=10))
async def test_a_receiver_that_does_not_read_makes_its_sender_wait_and_no_other(link: Site) -> None:
    (stuck, _), (client, target) = await link.connect(), await link.connect()
    await fill(stuck[1], 100_000_000)
    client[1].write(b"x" * 1_000_000)
    assert len(await soon(target[0].readexactly(1_000_000))) == 1_000_000


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


@over(LinkOptions(mbps=50, queue_kib=0))
async def test_senders_that_fall_silent_while_they_wait_for_room_do_not_block_the_others(link: Site) -> None:
    options = link.relay.options
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


@over(LinkOptions(rtt_ms=60))
async def test_a_reset_by_one_side_crosses_the_link_behind_what_was_sent(link: Site) -> None:
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


def test_a_link_that_cannot_listen_leaves_its_address_free(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Relay] = []

    async def accept(relay: Relay) -> None:
        made.append(relay)
        raise OSError("another began to listen there")

    monkeypatch.setattr(Relay, "accept", accept)
    asked = {"do": "add", "name": "a", "options": {}, "target": "127.0.0.1:1", "listen": "127.0.0.1:0"}
    with pytest.raises(OSError, match="another began"):
        run(RelayHost().do(asked))
    assert made[0]._reservation.fileno() == -1
