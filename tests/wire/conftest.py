"""A fake syncer on a real loopback port, clients for it, and servers that are none of ours."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.wire.client import SyncClient
from diloco.wire.messages import KIB
from diloco.wire.options import ClientOptions, ServerOptions
from diloco.wire.server import RunningServer
from tests.wire.fake_syncer import RUN, FakeSyncer, serve
from tests.wire.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Wired:
    """The syncer, its server, and what was opened towards it."""

    syncer: FakeSyncer
    server: RunningServer
    opened: list[Any]

    def client(self, site: str = "site-a", address: str = "", **options: Any) -> SyncClient:
        """A client with chunks of 64 KiB, closed at the end of the test."""
        options = {"chunk_bytes": 64 * KIB} | options
        client = SyncClient(address or self.server.address, site, RUN, options=ClientOptions(**options))
        self.opened.append(client)
        return client

    def channel(self) -> Any:
        """A bare channel of its own, to say what no client of ours would."""
        channel = grpc.insecure_channel(self.server.address, [("grpc.use_local_subchannel_pool", 1)])
        self.opened.append(channel)
        return channel


@pytest.fixture
def start() -> Iterator[Callable[..., Wired]]:
    """Start a server with the given ``ServerOptions``."""
    running: list[Wired] = []

    def run(**options: Any) -> Wired:
        syncer = FakeSyncer()
        running.append(Wired(syncer, serve(syncer, ServerOptions(run_id=RUN, **options)), []))
        return running[-1]

    yield run
    for wired in running:
        for opened in wired.opened:
            opened.close()
        wired.server.stop(0.5)


@pytest.fixture
def wired(start: Callable[..., Wired]) -> Wired:
    return start()


@pytest.fixture
def relay(wired: Wired) -> Iterator[Relay]:
    relay = Relay(wired.server.address)
    yield relay
    relay.close()


@pytest.fixture
def aside() -> Iterator[Callable[..., Any]]:
    """Run a call in a thread; gives the future of its result."""
    pool = ThreadPoolExecutor(4)
    yield pool.submit
    pool.shutdown(wait=False)


@contextlib.contextmanager
def answering(handler: grpc.GenericRpcHandler, calls_max: int | None = None) -> Iterator[str]:
    """The address of a server that is none of ours, with ``handler``."""
    server = grpc.server(ThreadPoolExecutor(4), (handler,), maximum_concurrent_rpcs=calls_max)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(None).wait(5)
