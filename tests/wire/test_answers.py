from __future__ import annotations

import grpc
import pytest

from diloco.wire.answers import abort, answered, refusal_of, streamed
from diloco.wire.chunks import ChunkError, DamagedChunk
from diloco.wire.gates import Counters
from diloco.wire.messages import MalformedMessage, Refusal, Status


class Ended(Exception):
    """What ``abort`` raises here."""


class Context:
    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.trailing: object = None

    def set_trailing_metadata(self, metadata: object) -> None:
        self.trailing = metadata

    def abort(self, status: grpc.StatusCode, text: str) -> None:
        self.ended = status, text
        raise Ended


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
    counters = Counters()
    assert refusal_of(error, "Push", counters).status is status
    assert counters.totals() == {f"refused_{status.lower()}": 1}


def test_a_defect_is_logged_and_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    refusal = refusal_of(OSError("/var/lib/secret"), "Push", counters)
    assert refusal.status is Status.INTERNAL
    assert "secret" not in refusal.text
    assert "secret" in caplog.text
    assert counters.totals() == {"internal": 1}


def test_words_are_one_short_line_and_pushback_comes_along() -> None:
    context = Context()
    with pytest.raises(Ended):
        abort(context, Refusal(Status.RESOURCE_EXHAUSTED, "a\r\nb " + "x" * 5000, 250))
    assert context.ended is not None
    assert context.ended[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.ended[1].startswith("a b x")
    assert len(context.ended[1]) == 1024
    assert context.trailing == (("grpc-retry-pushback-ms", "250"),)


def test_answered_and_streamed_pass_good_answers_on() -> None:
    assert answered(lambda: b"yes", Context(), "Join", Counters()) == b"yes"
    assert list(streamed(iter([b"a", b"b"]), Context(), "Pull", Counters())) == [b"a", b"b"]


def test_a_client_that_is_gone_ends_a_stream_silently() -> None:
    counters = Counters()

    def broken() -> object:
        yield b"a"
        raise grpc.RpcError

    assert list(streamed(broken(), Context(), "Push", counters)) == [b"a"]  # type: ignore[arg-type]
    assert counters.totals() == {"broken_off": 1}
