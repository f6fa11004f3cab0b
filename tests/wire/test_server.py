"""A server as a whole: its address, its end, the standard services, and callers that cost it something."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diloco.wire.channel import (
    ADMIN_SERVICE,
    SYNC_SERVICE,
)
from diloco.wire.convert import pack_member, pack_pull, pack_push, pack_report
from diloco.wire.messages import (
    MemberAsk,
    PullAsk,
    Unreachable,
)
from diloco.wire.options import STANDARD_STREAMS_MAX, SecurityOptions, ServerOptions
from diloco.wire.server import RunningServer
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.hunts import flooding
from tests.sooner import sooner
from tests.wire.conftest import Start, Wired, ended, refused
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, push_header, report_info, serve
from tests.wire.relay import WAIT_S, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING


def test_an_address_that_cannot_be_or_is_taken_is_refused_in_words(wired: Wired) -> None:
    with pytest.raises(ValueError, match="cannot be bound: Address already in use"):
        serve(FakeSyncer(), ServerOptions(run_id=RUN, address=wired.server.address))
    for address in ("127.0.0.1:65536", "[::]:99999", "127.0.0.1", "127.0.0.1:-1", "127.0.0.1:http!"):
        with pytest.raises(ValueError, match=r"address is '.*': host:port wanted, with a port of 0 to 65535"):
            serve(FakeSyncer(), ServerOptions(run_id=RUN, address=address))
    # A name that does not resolve is no reason to switch protection off.
    for host, insecure in (("nohost.invalid", False), ("a..b", True), ("10.1.2.300", False)):
        options = ServerOptions(run_id=RUN, address=f"{host}:7000")
        with pytest.raises(ValueError, match=f"address is '{host}:7000': {host} does not resolve here") as caught:
            serve(FakeSyncer(), options, SecurityOptions(insecure_non_loopback=insecure))
        assert "insecure" not in str(caught.value)


def test_what_keeps_a_server_from_starting_is_not_hidden_by_its_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer(FakeSyncer(), ServerOptions(run_id=RUN, address="127.0.0.1:0"), SecurityOptions(), print)
    monkeypatch.setattr(server._server, "start", lambda: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            server.start(ready=True)
    finally:
        server.stop(0.0)


def test_stop_ends_watches_at_once_takes_no_new_calls_and_leaves_no_thread(start: Start) -> None:
    before = set(threading.enumerate())  # Another test of this process may have left some.
    wired = start()
    client = wired.client()
    stream = client.watch(1)
    next(stream)
    begun_s = time.monotonic()
    wired.server.stop(20.0)
    assert time.monotonic() - begun_s < 5
    with pytest.raises(Unreachable, match="UNAVAILABLE"):
        list(stream)
    with pytest.raises(Unreachable):
        client.join(join_ask())
    client.close()
    ours = ("stalls-", "syncer-rpc")
    left = lambda: [each.name for each in {*threading.enumerate()} - before if each.name.startswith(ours)]  # noqa: E731
    assert wait_until(lambda: not left()), left()


HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVED = (sync_pb2, admin_pb2, health_pb2, reflection_pb2)
SERVICES = [service for served in SERVED for service in served.DESCRIPTOR.services_by_name.values()]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


def silent(wired: Wired, *methods: str) -> list[Any]:
    """Calls of ``methods`` that say nothing."""
    channels = [wired.channel() for _ in range(0, len(methods), 8)]  # Under the limit of streams in one connection.
    return [wired.talk(method, channel=channels[at // 8]).call for at, method in enumerate(methods)]


def test_a_call_without_its_message_is_ended_whatever_the_method_is(start: Start) -> None:
    wired = start(header_timeout_s=0.3, stall_s=0.3)
    assert {ended(call)[0] for call in silent(wired, *METHODS)} == {"CANCELLED"}
    # The status reaches us before the call is counted there.
    assert wait_until(lambda: sum(wired.server.counters().values()) == len(METHODS)), wired.server.counters()
    assert wired.syncer.calls == []


def test_silent_calls_leave_room_for_those_that_speak(start: Start) -> None:
    wired, method = start(sites_max=1), f"/{SYNC_SERVICE}/Join"
    threads = ServerOptions(run_id=RUN, sites_max=1).calls_max
    calls = silent(wired, *[method] * (2 * threads))
    # Those for whom there is no room are sent away.
    assert wait_until(lambda: sum(call.done() for call in calls) >= threads)
    codes = {call.code() for call in calls if call.done()}
    assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert wired.client().report(report_info()).known


def test_callers_that_take_no_answer_leave_room_for_those_that_do(start: Start) -> None:
    wired, method, raw = start(sites_max=1), f"/{SYNC_SERVICE}/Report", pack_report(report_info())
    calls_max = ServerOptions(run_id=RUN, sites_max=1).calls_max
    with contextlib.ExitStack() as opened:
        for _ in range(calls_max // 8):
            rude = opened.enter_context(flooding.hello(wired.server.address, flooding.TAKES_NOTHING))
            for stream in range(1, 16, 2):  # Under the limit of streams in one connection.
                rude.sendall(flooding.frame(flooding.HEADERS, flooding.END_HEADERS, stream, flooding.headers(method)))
                rude.sendall(flooding.frame(flooding.DATA, flooding.END_STREAM, stream, flooding.message(raw)))
        time.sleep(0.5)  # All of them have come in; nothing of theirs is waited for.
        assert wired.client().report(report_info()).known


def test_streams_of_the_standard_services_are_bounded(wired: Wired) -> None:
    streams = []
    for _ in range(STANDARD_STREAMS_MAX):
        streams.append(wired.talk(f"/{HEALTH}/Watch", b"").call)
        next(streams[-1])
    refused(lambda: next(wired.talk(f"/{HEALTH}/Watch", b"").call), grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_health_lists_every_name_knows_no_other_and_says_when_the_syncer_stops(wired: Wired) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    found = stub.List(health_pb2.HealthListRequest(), timeout=10).statuses
    names = ("", SYNC_SERVICE, ADMIN_SERVICE, RUN)
    assert {name: answer.status for name, answer in found.items()} == dict.fromkeys(names, SERVING)
    ask = health_pb2.HealthCheckRequest(service="other")
    for call in (lambda: stub.Check(ask, timeout=WAIT_S), lambda: next(stub.Watch(ask, timeout=WAIT_S))):
        refused(call, grpc.StatusCode.NOT_FOUND)
    stream = stub.Watch(health_pb2.HealthCheckRequest(service=RUN), timeout=20)
    assert next(stream).status == SERVING
    wired.server.stop(1.0)
    assert next(stream).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert ended(stream)[0] != "OK"


def test_reflection_lists_our_services(wired: Wired) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(wired.channel())
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {SYNC_SERVICE, ADMIN_SERVICE, "grpc.health.v1.Health"} <= names
    ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SYNC_SERVICE)
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=10)
    assert b"PushHeader" in answer.file_descriptor_response.file_descriptor_proto[0]


def test_noise_at_the_standard_services_is_the_senders_fault(wired: Wired) -> None:
    for method in (f"/{HEALTH}/Check", f"/{HEALTH}/Watch", f"/{REFLECTION}"):
        assert ended(wired.talk(method, b"\xff").call)[0] == "INVALID_ARGUMENT"


MEMBER = pack_member(MemberAsk("other", "site-a", 1))
REFUSALS: dict[str, tuple[str, bytes]] = {
    "a push": (f"/{SYNC_SERVICE}/Push", pack_push(push_header(b"abc", run_id="other"))),
    "a watch": (f"/{SYNC_SERVICE}/Watch", MEMBER),
    "a pull": (f"/{SYNC_SERVICE}/Pull", pack_pull(PullAsk("other", "site-a", 0, -1))),
    "compressed": (f"/{SYNC_SERVICE}/Watch", MEMBER),
    "a leave": (f"/{SYNC_SERVICE}/Leave", MEMBER),
    "health": (f"/{HEALTH}/Watch", b"\x0a\x05other"),
}


@pytest.mark.parametrize("place", sooner(REFUSALS, "a push", "compressed"))
def test_a_call_that_was_refused_takes_up_no_place_in_its_connection(wired: Wired, place: str) -> None:
    """Seen: after sixteen refusals a connection was of no more use until the syncer next collected garbage."""
    method, message = REFUSALS[place]
    call = wired.channel().unary_stream(method)
    compression = grpc.Compression.Gzip if place == "compressed" else None

    def is_told() -> bool:
        """A connection may be full until the calls before have been put away; with the defect it stays so."""
        status, _ = ended(call(message, timeout=20, compression=compression))
        assert status != "OK"
        return status != "UNAVAILABLE"

    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            assert wait_until(is_told, seconds=10.0)
    finally:
        gc.enable()
