"""A fake syncer on a real loopback port, clients for it, and servers that are none of ours."""

from __future__ import annotations

import contextlib
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import pytest

from diloco.wire.client import SyncClient
from diloco.wire.messages import KIB
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from diloco.wire.server import RunningServer
from tests.wire.fake_syncer import RUN, FakeSyncer, serve
from tests.wire.relay import Relay, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Patch = pytest.MonkeyPatch
Start: TypeAlias = "Callable[..., Wired]"
"""Starts a server, as the fixture ``start`` does."""
Aside: TypeAlias = "Callable[..., Any]"
"""Runs a call in a thread and gives its future, as the fixture ``aside`` does."""


class Talk:
    """A call in which just these messages are said, and more only with ``say``; None ends the stream."""

    def __init__(self, channel: Any, path: str, messages: Iterable[bytes], token: str) -> None:
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.say(*messages)
        metadata = [("authorization", f"Bearer {token}")] if token else []
        self.call = channel.stream_stream(path)(iter(self._said.get, None), timeout=60, metadata=metadata)

    def say(self, *messages: bytes | None) -> None:
        for message in messages:
            self._said.put(message)

    def close(self) -> None:
        self.say(None)


@dataclass
class Wired:
    """The syncer, its server and what that noted, and what was opened towards it."""

    syncer: FakeSyncer
    server: RunningServer
    notes: list[str]
    opened: list[Any]

    def client(self, site: str = "site-a", address: str = "", **given: Any) -> SyncClient:
        """A client with chunks of 64 KiB and the given options and security, closed at the end of the test."""
        security, options = _parted(given)
        options = ClientOptions(**{"chunk_bytes": 64 * KIB} | options)
        self.opened.append(SyncClient(address or self.server.address, site, RUN, security, options))
        return self.opened[-1]

    def channel(self) -> Any:
        """A bare channel of its own, to say what no client of ours would."""
        self.opened.append(grpc.insecure_channel(self.server.address, [("grpc.use_local_subchannel_pool", 1)]))
        return self.opened[-1]

    def talk(self, path: str, *messages: bytes, token: str = "", channel: Any = None) -> Talk:
        """A call of ``path``, over a channel of its own unless one is given."""
        self.opened.append(Talk(channel or self.channel(), path, messages, token))
        return self.opened[-1]

    def noted(self, words: str) -> bool:
        """Whether the server says so in time."""
        return wait_until(lambda: any(words in note for note in self.notes))


def _parted(given: dict[str, Any]) -> tuple[SecurityOptions, dict[str, Any]]:
    security = {name: value for name, value in given.items() if name in SecurityOptions.__slots__}
    return SecurityOptions(**security), {name: value for name, value in given.items() if name not in security}


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server with the given ``ServerOptions`` and ``SecurityOptions``."""
    running: list[Wired] = []

    def run(**given: Any) -> Wired:
        syncer, notes, follow = FakeSyncer(), list[str](), given.pop("follow", None)
        security, options = _parted(given)
        note = lambda what, why: notes.append(f"{what}: {why}")  # noqa: E731
        server = serve(syncer, ServerOptions(run_id=RUN, **options), security, note, follow)
        running.append(Wired(syncer, server, notes, []))
        return running[-1]

    yield run
    for wired in running:
        for opened in wired.opened:
            opened.close()
        wired.server.stop(0.2)


@pytest.fixture
def wired(start: Start) -> Wired:
    return start()


@pytest.fixture
def relay(wired: Wired) -> Iterator[Relay]:
    relay = Relay(wired.server.address)
    yield relay
    relay.close()


@pytest.fixture
def aside() -> Iterator[Aside]:
    """Run a call in a thread; gives the future of its result."""
    pool = ThreadPoolExecutor(4)
    yield pool.submit
    pool.shutdown(wait=False)


def refused(call: Callable[[], object], status: grpc.StatusCode) -> Any:
    """The error with which ``call`` ends, whose status is this one."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is status, caught.value.details()
    return caught.value


def ended(call: Iterable[object]) -> tuple[str, str]:
    """The status of a call, when it has ended, and its words."""
    try:
        list(call)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


@contextlib.contextmanager
def answering(handler: grpc.GenericRpcHandler, calls_max: int | None = None) -> Iterator[str]:
    """The address of a server that is none of ours, with ``handler``."""
    server = grpc.server(ThreadPoolExecutor(4), (handler,), maximum_concurrent_rpcs=calls_max)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(None).wait(5)
