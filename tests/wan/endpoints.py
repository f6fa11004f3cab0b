"""A link of the relay with a target behind it, for tests that move real bytes on loopback."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from diloco.wan.relay import Relay, parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from diloco.wan.link import LinkOptions

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")

HOST = "127.0.0.1"
WAIT_S = 10.0
SILENCE_S = 0.3
"""How long a test listens before it says that nothing came; the links of such tests are far faster than that."""


def run(test: Coroutine[object, object, None]) -> None:
    """Run ``test`` to its end, or fail in bounded time."""
    asyncio.run(asyncio.wait_for(test, 2 * WAIT_S))


async def soon(waited_for: Awaitable[T]) -> T:
    """What is waited for, within the bound of all waits here."""
    return await asyncio.wait_for(waited_for, WAIT_S)


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """Whether nothing at all comes, no data, no close and no reset, for ``SILENCE_S``."""
    try:
        await asyncio.wait_for(reader.read(1), SILENCE_S)
    except TimeoutError:
        return True
    return False


@dataclass
class Site:
    """A running link, and the connections that its target has been given."""

    relay: Relay
    target: asyncio.Server
    arrived: asyncio.Queue[Streams]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[Streams, Streams]:
        """One connection through the link: the client's streams and the target's."""
        return await self.dial(), await self.taken()

    async def dial(self) -> Streams:
        """The client's half of ``connect``, without waiting for the target's."""
        client = await soon(asyncio.open_connection(*parse_address(self.relay.address)))
        self.writers.append(client[1])
        return client

    async def taken(self) -> Streams:
        """The target's half of the oldest connection that has come to it."""
        target = await soon(self.arrived.get())
        self.writers.append(target[1])
        return target


@asynccontextmanager
async def site(options: LinkOptions) -> AsyncIterator[Site]:
    """A link with ``options`` to a target that does nothing by itself."""
    arrived: asyncio.Queue[Streams] = asyncio.Queue()

    async def hand_over(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await arrived.put((reader, writer))

    server = await asyncio.start_server(hand_over, HOST, 0)
    relay = Relay(options, (HOST, 0), server.sockets[0].getsockname()[:2])
    await relay.accept()
    running = Site(relay, server, arrived)
    try:
        yield running
    finally:
        server.close()
        await relay.close()
        while not arrived.empty():
            running.writers.append(arrived.get_nowait()[1])
        for writer in running.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


def over(options: LinkOptions) -> Callable[[Callable[[Site], Coroutine[object, object, None]]], Callable[[], None]]:
    """A test that is handed a link with ``options``, and ends in bounded time."""

    def of(test: Callable[[Site], Coroutine[object, object, None]]) -> Callable[[], None]:
        async def linked() -> None:
            async with site(options) as link:
                await test(link)

        return lambda: run(linked())

    return of
