"""A call that sends nothing costs its caller's own room and nobody else's, whatever the method is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.convert import pack_report
from diloco.wire.options import STANDARD_STREAMS_MAX, ServerOptions
from tests.hunts import http2
from tests.sooner import sooner
from tests.wire.fake_syncer import RUN, report_info

if TYPE_CHECKING:
    from tests.wire.conftest import Wired

WAIT_S = 20.0
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = [
    *(f"/{SYNC_SERVICE}/{name}" for name in ("Join", "Report", "Leave", "Push", "Watch", "Pull")),
    *(f"/{ADMIN_SERVICE}/{name}" for name in ("Status", "Drain", "Evict", "Snapshot")),
    *(f"/{HEALTH}/{name}" for name in ("Check", "List", "Watch")),
    f"/{REFLECTION}",
]


class Silent:
    """Calls that were opened and say nothing."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._channels: list[Any] = []
        self.calls: list[Any] = []

    def open(self, method: str, count: int, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        for _ in range(count):
            if len(self.calls) % 8 == 0:  # Under the limit of streams in one connection.
                private = [("grpc.use_local_subchannel_pool", 1)]
                self._channels.append(grpc.insecure_channel(self._address, private))
            call = self._channels[-1].stream_stream(method)(self._nothing(), timeout=120, metadata=metadata)
            self.calls.append(call)

    def _nothing(self) -> Iterator[bytes]:
        self._over.wait()
        return
        yield b""

    def close(self) -> None:
        self._over.set()
        for channel in self._channels:
            channel.close()


@pytest.fixture
def silent() -> Iterator[Callable[[str], Silent]]:
    opened: list[Silent] = []
    yield lambda address: opened.append(Silent(address)) or opened[-1]  # type: ignore[func-returns-value]
    for each in opened:
        each.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_its_message_is_ended(
    start: Callable[..., Wired], silent: Callable[[str], Silent], method: str
) -> None:
    wired = start(header_timeout_s=0.3, stall_s=0.3)
    calls = silent(wired.server.address)
    began_s = time.monotonic()
    calls.open(method, 1)
    with pytest.raises(grpc.RpcError) as caught:
        list(calls.calls[0])
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert time.monotonic() - began_s < WAIT_S
    assert wired.syncer.calls == []
    while not wired.server.counters():  # The status reaches us before the call is counted there.
        assert time.monotonic() - began_s < WAIT_S
        time.sleep(0.01)
    assert sum(wired.server.counters().values()) == 1


@pytest.mark.parametrize(
    "method", sooner([f"/{SYNC_SERVICE}/Join", f"/{HEALTH}/Check", f"/{REFLECTION}"], f"/{SYNC_SERVICE}/Join")
)
def test_silent_calls_leave_room_for_those_that_speak(
    start: Callable[..., Wired], silent: Callable[[str], Silent], method: str
) -> None:
    wired = start(sites_max=1)
    threads = ServerOptions(run_id=RUN, sites_max=1).calls_max
    calls = silent(wired.server.address)
    calls.open(method, 2 * threads)
    until_s = time.monotonic() + WAIT_S
    while sum(call.done() for call in calls.calls) < threads:  # Those for whom there is no room are sent away.
        assert time.monotonic() < until_s
        time.sleep(0.02)
    codes = {call.code() for call in calls.calls if call.done()}
    assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert wired.client().report(report_info()).known


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        (f"/{HEALTH}/Check", b""),
        (f"/{HEALTH}/List", b""),
        (f"/{SYNC_SERVICE}/Report", pack_report(report_info())),
        (f"/{ADMIN_SERVICE}/Status", b""),
    ],
)
def test_callers_that_take_no_answer_leave_room_for_those_that_do(
    start: Callable[..., Wired], method: str, raw: bytes
) -> None:
    wired = start(sites_max=1)
    calls_max = ServerOptions(run_id=RUN, sites_max=1).calls_max
    with contextlib.ExitStack() as opened:
        for _ in range(calls_max // 8):
            rude = opened.enter_context(http2.hello(wired.server.address, http2.TAKES_NOTHING))
            for stream in range(1, 16, 2):  # Under the limit of streams in one connection.
                rude.sendall(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.headers(method)))
                rude.sendall(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(raw)))
        time.sleep(0.5)  # All of them have come in; nothing of theirs is waited for.
        assert wired.client().report(report_info()).known


def test_an_ended_call_says_nothing_and_is_the_callers_fault(wired: Wired) -> None:
    call = wired.channel().stream_unary(f"/{SYNC_SERVICE}/Report")
    with pytest.raises(grpc.RpcError) as caught:
        call(iter(()), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "before its message" in caught.value.details()


def test_streams_of_the_standard_services_are_bounded(wired: Wired) -> None:
    stubs = [
        health_pb2_grpc.HealthStub(grpc.insecure_channel(wired.server.address, [("grpc.use_local_subchannel_pool", 1)]))
        for _ in range(STANDARD_STREAMS_MAX + 1)
    ]
    with contextlib.ExitStack() as ended:
        for number, stub in enumerate(stubs):
            stream = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=WAIT_S)
            ended.callback(stream.cancel)
            if number < STANDARD_STREAMS_MAX:
                next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_name_that_nobody_serves_is_not_watched(wired: Wired) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
