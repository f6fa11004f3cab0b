from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from tests.wire.fake_syncer import RUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.wire.conftest import Wired

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("name", ["", SYNC_SERVICE, ADMIN_SERVICE, RUN])
def test_health_answers_for_the_server_its_services_and_its_run(wired: Wired, name: str) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == SERVING


def test_health_lists_every_name(wired: Wired) -> None:
    found = health_pb2_grpc.HealthStub(wired.channel()).List(health_pb2.HealthListRequest(), timeout=10).statuses
    assert {name: answer.status for name, answer in found.items()} == dict.fromkeys(
        ("", SYNC_SERVICE, ADMIN_SERVICE, RUN), SERVING
    )


def test_health_knows_no_other_run(wired: Wired) -> None:
    stub = health_pb2_grpc.HealthStub(wired.channel())
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="run-2"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_says_when_the_syncer_stops(start: Callable[..., Wired]) -> None:
    wired = start()
    stub = health_pb2_grpc.HealthStub(wired.channel())
    seen = []
    stream = stub.Watch(health_pb2.HealthCheckRequest(service=RUN), timeout=20)
    seen.append(next(stream).status)
    wired.server.stop(1.0)
    with pytest.raises(grpc.RpcError):
        seen.extend(answer.status for answer in stream)
    assert seen == [SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


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
    channel = wired.channel()
    calls = [
        lambda: channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff", timeout=10),
        lambda: list(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff", timeout=10)),
        lambda: list(
            channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
                iter([b"\xff"]), timeout=10
            )
        ),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
