"""The controls of a link: what partition, reset and refusal look like to the two programs."""

from __future__ import annotations

import asyncio
import json

import pytest

from diloco.wan.link import LinkOptions
from diloco.wan.relay import Relay, RelayHost, format_address, parse_address, require_loopback
from tests.wan.endpoints import HOST, Streams, is_silent, run, site, soon

FAST = LinkOptions(rtt_ms=4)


async def send(sender: Streams, receiver: Streams, text: bytes) -> None:
    """``text`` arrives at the other side."""
    sender[1].write(text)
    assert await soon(receiver[0].readexactly(len(text))) == text


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_a_partition_lets_nothing_out_and_a_heal_all_of_it(direction: str) -> None:
    async def test() -> None:
        async with site(FAST) as link:
            client, target = await link.connect()
            await send(client, target, b"before")
            link.relay.partition(direction)
            client[1].write(b"up in the dark")
            target[1].write(b"down in the dark")
            for name, receiver, text in (("up", target, b"up in the dark"), ("down", client, b"down in the dark")):
                if direction in ("both", name):
                    assert await is_silent(receiver[0])
                else:
                    assert await soon(receiver[0].readexactly(len(text))) == text
            link.relay.heal()
            if direction in ("both", "up"):
                assert await soon(target[0].readexactly(14)) == b"up in the dark"
            if direction in ("both", "down"):
                assert await soon(client[0].readexactly(16)) == b"down in the dark"
            await send(client, target, b"after")
            await send(target, client, b"after")

    run(test())


def test_a_partition_holds_closes_and_handshakes_too() -> None:
    async def test() -> None:
        async with site(FAST) as link:
            client, target = await link.connect()
            link.relay.partition()
            client[1].close()
            late = await link.dial()
            assert await is_silent(target[0]), "the close came through"
            assert link.arrived.empty(), "the connection was opened"
            link.relay.heal()
            assert await soon(target[0].read(-1)) == b""
            opened = await soon(link.arrived.get())
            link.writers.append(opened[1])
            await send(late, opened, b"at last")

    run(test())


def test_a_reset_is_a_connection_reset_at_both_ends() -> None:
    async def test() -> None:
        async with site(FAST) as link:
            pairs = [await link.connect() for _ in range(2)]
            link.relay.reset()
            for reader, _ in (streams for pair in pairs for streams in pair):
                with pytest.raises(ConnectionResetError):
                    await soon(reader.read(-1))
            assert link.relay.stats()["connections"] == 0
            await send(*await link.connect(), b"the next one works")

    run(test())


def test_a_reset_in_a_partition_frees_what_was_held() -> None:
    async def test() -> None:
        async with site(LinkOptions(rtt_ms=4, mbps=100)) as link:
            client, _ = await link.connect()
            link.relay.partition("up")
            client[1].write(bytes(2_000_000))
            await asyncio.sleep(0.2)
            assert link.relay.stats()["in_flight_bytes_up"] > 0
            link.relay.reset()
            assert link.relay.stats()["in_flight_bytes_up"] == 0

    run(test())


def test_a_refusing_link_keeps_what_it_has_and_its_address() -> None:
    async def test() -> None:
        async with site(FAST) as link:
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

    run(test())


def test_a_target_that_is_not_there_resets_the_client() -> None:
    async def test() -> None:
        async with site(FAST) as link:
            stray = Relay(FAST)
            await link.relay.close()
            await stray.start(HOST, 0, *parse_address(link.relay.address))
            client = await soon(asyncio.open_connection(*parse_address(stray.address)))
            link.writers.append(client[1])
            with pytest.raises(ConnectionResetError):
                await soon(client[0].read(-1))
            await stray.close()

    run(test())


def test_an_option_can_be_changed_and_a_wrong_change_changes_nothing() -> None:
    async def test() -> None:
        async with site(FAST) as link:
            link.relay.set(rtt_ms=10, mbps=5)
            assert (link.relay.options.rtt_ms, link.relay.options.mbps) == (10, 5)
            with pytest.raises(ValueError, match="rtt is no option of a link: one of rtt_ms, jitter_ms"):
                link.relay.set(rtt=5)
            with pytest.raises(ValueError, match="jitter_ms is 20"):
                link.relay.set(mbps=7, jitter_ms=20)
            assert (link.relay.options.rtt_ms, link.relay.options.mbps) == (10, 5)
            with pytest.raises(ValueError, match="direction is 'sideways': one of both, up, down"):
                link.relay.partition("sideways")

    run(test())


@pytest.mark.parametrize("field", ["listen_host", "target_host"])
def test_only_loopback_is_bound_or_dialled_unless_allowed(field: str) -> None:
    async def test() -> None:
        hosts = {"listen_host": HOST, "target_host": HOST, field: "192.0.2.1"}
        with pytest.raises(ValueError, match=f"{field} is '192.0.2.1': only loopback"):
            await Relay(FAST).start(hosts["listen_host"], 0, hosts["target_host"], 1)

    run(test())


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "example.com", "10.0.0.1", "localhost.example.com"])
def test_what_is_not_loopback_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="only loopback addresses, unless allow_remote is set"):
        require_loopback("listen_host", host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.4.5", "::1", "localhost"])
def test_what_is_loopback_is_taken(host: str) -> None:
    require_loopback("listen_host", host)


def test_addresses_are_parsed_and_written_alike() -> None:
    for text in ("127.0.0.1:80", "[::1]:0", "localhost:65535"):
        assert format_address(*parse_address(text)) == text
    for text in ("127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536", ":x"):
        with pytest.raises(ValueError, match="host:port"):
            parse_address(text)


def test_a_host_refuses_in_words() -> None:
    async def test() -> None:
        host = RelayHost()
        add = {"do": "add", "name": "a", "options": {"rtt_ms": 1}, "target": f"{HOST}:1", "listen": f"{HOST}:0"}
        await host.do(add)
        for command, words in (
            (add, "link is 'a': there is one already"),
            ({**add, "name": "b", "options": {"speed": 1}}, "speed is no option of a link"),
            ({"do": "heal", "name": "c"}, "link is 'c': one of a"),
            ({"do": "explode", "name": "a"}, "do is 'explode': one of accept"),
        ):
            with pytest.raises(ValueError, match=words):
                await host.do(command)
        assert json.loads(json.dumps(await host.do({"do": "stats"})))["a"]["bytes_up"] == 0
        await host.do({"do": "remove", "name": "a"})
        assert await host.do({"do": "stats"}) == {}
        await host.close()

    run(test())
