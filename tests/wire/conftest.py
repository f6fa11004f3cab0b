"""A fake syncer on a real loopback port, and clients for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.wire.client import SyncClient
from diloco.wire.messages import KIB
from diloco.wire.options import ClientOptions, ServerOptions
from diloco.wire.server import RunningServer
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

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
        """A bare channel, to say what no client of ours would."""
        channel = grpc.insecure_channel(self.server.address)
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
