from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from diloco.sync.events import Reason
from diloco.wire.channel import ADMIN_SERVICE, PUSHBACK_KEY, REASON_KEY, SYNC_SERVICE, Line, Stream, wire_error
from diloco.wire.messages import Refused, Status, Unreachable
from diloco.wire.options import SecurityOptions

RETRYABLE = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "DATA_LOSS", "INTERNAL", "UNKNOWN", "ABORTED"}


class Failed:
    """As much of a failed call as is looked at."""

    def __init__(self, code: grpc.StatusCode, pushback: str | None = None, reason: str | None = None) -> None:
        self._code = code
        told = ((PUSHBACK_KEY, pushback), (REASON_KEY, reason))
        self._metadata = tuple((key, value) for key, value in told if value is not None)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "words"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_is_either_definite_or_to_be_tried_again(code: grpc.StatusCode) -> None:
    error = wire_error("Join", Failed(code))
    if code.name in RETRYABLE:
        assert isinstance(error, Unreachable)
        assert code.name in error.why
    else:
        assert isinstance(error, Refused)
        assert (error.status, error.text) == (Status(code.name), "words")


@pytest.mark.parametrize(("pushback", "after_s"), [("1500", 1.5), ("0", 0.0)])
def test_pushback_makes_a_refusal_one_to_come_back_after(pushback: str, after_s: float) -> None:
    error = wire_error("Push", Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, pushback))
    assert isinstance(error, Unreachable)
    assert error.retry_after_s == after_s


@pytest.mark.parametrize("pushback", ["-1", "soon", "9" * 30, ""])
def test_pushback_that_is_no_number_is_ignored(pushback: str) -> None:
    assert isinstance(wire_error("Push", Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, pushback)), Refused)


@pytest.mark.parametrize(("told", "reason"), [("evicted", Reason.EVICTED), ("of-a-later-release", None), ("", None)])
def test_a_reason_that_is_known_comes_with_a_refusal(told: str, reason: Reason | None) -> None:
    failed = Failed(grpc.StatusCode.PERMISSION_DENIED, reason=told)
    error = wire_error("Join", failed)
    assert isinstance(error, Refused)
    assert (error.reason, error.final) == (reason, reason is Reason.EVICTED)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", "Connection refused"),
        (
            "UNAVAILABLE: ipv6:%5B::1%5D:1: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED",
            "Ssl handshake failed: CERT",
        ),
    ],
)
def test_why_there_is_no_connection_is_said_without_grpcs_own_words(
    said: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Failed(grpc.StatusCode.UNAVAILABLE)
    monkeypatch.setattr(failed, "details", lambda: f"failed to connect to all addresses; last error: {said}")
    error = wire_error("Join", failed)
    assert isinstance(error, Unreachable)
    assert error.why.startswith(f"Join: {why}")


def test_a_closed_channel_is_unreachable() -> None:
    line = Line("127.0.0.1:1", SecurityOptions(), [], SYNC_SERVICE)
    line.close()
    with pytest.raises(Unreachable, match="closed"):
        line.unary("Join", b"", bytes, 1.0)
    with pytest.raises(Unreachable, match="closed"):
        Stream(line, "Watch", b"", bytes)
    with pytest.raises(Unreachable, match="closed"):
        Stream(line, "Push", iter(()), bytes)


def test_a_server_that_has_no_room_for_one_more_call_is_come_back_to() -> None:
    """gRPC says so itself, before any of our code is asked, and without a time: its words are all there is."""
    over, began = threading.Event(), threading.Event()

    def held(request: bytes, context: object) -> bytes:
        began.set()
        over.wait(30)
        return request

    handlers = {"Status": grpc.unary_unary_rpc_method_handler(held)}
    server = grpc.server(ThreadPoolExecutor(1), maximum_concurrent_rpcs=1)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers),))
    line = Line(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", SecurityOptions(), [], ADMIN_SERVICE)
    server.start()
    first = Stream(line, "Status", b"", bytes)
    try:
        assert began.wait(30)
        with pytest.raises(Unreachable, match="RESOURCE_EXHAUSTED") as caught:
            line.unary("Status", b"", bytes, 30.0)
        assert caught.value.retry_after_s is None
    finally:
        over.set()
        list(first)
        line.close()
        server.stop(None)


def test_nobody_there_is_unreachable_at_once() -> None:
    line = Line("127.0.0.1:1", SecurityOptions(), [], ADMIN_SERVICE)
    with pytest.raises(Unreachable, match=r"^Status: Connection refused$"):
        line.unary("Status", b"", bytes, 5.0)
    line.close()


def test_a_defect_in_what_takes_an_answer_is_no_unreachable_syncer() -> None:
    """Else a thread would ask again without end, and say nothing."""

    def defective(raw: bytes) -> bytes:
        raise ValueError("operation forbidden on released memoryview object")

    handlers = {"Status": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers),))
    line = Line(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", SecurityOptions(), [], ADMIN_SERVICE)
    server.start()
    try:
        with pytest.raises(ValueError, match="released memoryview"):
            line.unary("Status", b"", defective, 30.0)
        with pytest.raises(ValueError, match="released memoryview"), Stream(line, "Status", b"", defective) as stream:
            next(stream)
    finally:
        line.close()
        server.stop(None)
