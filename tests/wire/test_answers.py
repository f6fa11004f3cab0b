from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.sync.events import Reason
from diloco.wire.channel import SYNC_SERVICE, StallWatch
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.convert import pack_leave, pack_pull, pack_push, pack_watch
from diloco.wire.door import Connections, Counters, Door, abort
from diloco.wire.identity import Authenticator
from diloco.wire.messages import LeaveAsk, MalformedMessage, PullAsk, Refusal, Status, WatchAsk
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.sooner import sooner
from tests.wire.fake_syncer import RUN, push_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.wire.conftest import Wired


class Ended(Exception):
    """What ``abort`` raises here."""


class Context:
    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.trailing: object = None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "here"

    def cancel(self) -> None:
        return

    def set_trailing_metadata(self, metadata: object) -> None:
        self.trailing = metadata

    def abort(self, status: grpc.StatusCode, text: str) -> None:
        self.ended = status, text
        raise Ended


def a_door() -> Door:
    counters = Counters()
    return Door(
        Authenticator(SecurityOptions()),
        ServerOptions(run_id=RUN),
        counters,
        Connections(8, counters, str),
        StallWatch("never started"),
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refusal(Status.ABORTED, "x"), Status.ABORTED),
        (MalformedMessage("x"), Status.INVALID_ARGUMENT),
        (ChunkError("x"), Status.INVALID_ARGUMENT),
        (DamagedChunk("x"), Status.DATA_LOSS),
    ],
)
def test_errors_have_a_status_and_are_counted(error: Exception, status: Status) -> None:
    door = a_door()
    assert door.refusal_of(error, "Push").status is status
    assert door.counters.totals() == {f"refused_{status.lower()}": 1}


def test_a_defect_is_logged_and_says_nothing_of_the_inside(logged: list[str]) -> None:
    door = a_door()
    refusal = door.refusal_of(OSError("/var/lib/secret"), "Push")
    assert refusal.status is Status.INTERNAL
    assert "secret" not in refusal.text
    assert "secret" in "".join(logged)
    assert door.counters.totals() == {"internal": 1}


def test_words_are_one_short_line_and_pushback_comes_along() -> None:
    context = Context()
    with pytest.raises(Ended):
        abort(context, Refusal(Status.RESOURCE_EXHAUSTED, "a\r\nb " + "x" * 5000, 250))
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.ended[1].startswith("a b x")
    assert len(context.ended[1]) == 1024
    assert context.trailing == (("grpc-retry-pushback-ms", "250"),)


def test_a_reason_comes_along() -> None:
    context = Context()
    refusal = Refusal(Status.PERMISSION_DENIED, "put out of the run", reason=Reason.EVICTED)
    with pytest.raises(Ended):
        abort(context, a_door().refusal_of(refusal, "Join"))
    assert context.trailing == (("diloco-reason", "evicted"),)


def test_good_answers_are_passed_on_and_a_client_that_is_gone_ends_them_silently() -> None:
    door = a_door()

    def work(requests: Iterator[bytes], context: object, identity: object) -> Iterator[bytes]:
        yield from requests
        raise grpc.RpcError

    answers = door.handler("Push", work).stream_stream(iter([b"a", b"b"]), Context())
    assert list(answers) == [b"a", b"b"]
    assert door.counters.totals() == {"broken_off": 1}
    one = door.unary("Join", lambda raw, identity: raw * 2).stream_unary(iter([b"a"]), Context())
    assert one == b"aa"


def refusals() -> list[tuple[str, bytes, dict[str, Any]]]:
    """Method, message, and what else: each is refused at another place."""
    other_run = pack_push(replace(push_header(b"abc"), run_id="other"))
    watch, pull = pack_watch(WatchAsk("other", "site-a", 1)), pack_pull(PullAsk("other", "site-a", 0, -1))
    return [
        (f"/{SYNC_SERVICE}/Push", other_run, {}),
        (f"/{SYNC_SERVICE}/Watch", watch, {}),
        (f"/{SYNC_SERVICE}/Pull", pull, {}),
        (f"/{SYNC_SERVICE}/Watch", watch, {"compression": grpc.Compression.Gzip}),
        (f"/{SYNC_SERVICE}/Leave", pack_leave(LeaveAsk("other", "site-a", 1)), {}),
        ("/grpc.health.v1.Health/Watch", b"\x0a\x05other", {}),
    ]


@pytest.mark.parametrize("number", sooner(range(6), 0, 3))
def test_a_call_that_was_refused_takes_up_no_place_in_its_connection(wired: Wired, number: int) -> None:
    """Seen: after sixteen refusals a connection was of no more use until the syncer next collected garbage."""
    method, message, options = refusals()[number]
    call = wired.channel().unary_stream(method)
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            assert refused(lambda: list(call(message, timeout=20, **options)))
    finally:
        gc.enable()


def refused(ask: Callable[[], object], bound_s: float = 10.0) -> bool:
    """Whether it is refused by the syncer.  A connection may be full until the calls before have been put away, on a
    loaded machine for a moment; with the defect it stays so."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        if caught.value.code() is not grpc.StatusCode.UNAVAILABLE:
            return True
        time.sleep(0.02)
    return False
