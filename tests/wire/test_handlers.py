"""What the syncer's end does with what sites send, over a real connection."""

from __future__ import annotations

import inspect
import random
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import pytest

from diloco.sync.events import Outcome, Reason
from diloco.wire.channel import PUSHBACK_KEY, SYNC_SERVICE
from diloco.wire.convert import (
    pack_join,
    pack_pull,
    pack_push,
    pack_report,
    pack_watch,
    unpack_pull_part,
    unpack_push_reply,
    unpack_watch_event,
)
from diloco.wire.handlers import PushSession, SyncerApi, WatchFeed
from diloco.wire.messages import (
    KIB,
    PAYLOAD_BYTES_MAX,
    Alive,
    Chunk,
    Dropped,
    PullAsk,
    PushAdmitted,
    PushCommit,
    PushPart,
    PushReply,
    PushResult,
    Refusal,
    Status,
    WatchAsk,
)
from diloco.wire.pulling import PullSink
from diloco.wire.v1 import sync_pb2
from tests.wire.fake_syncer import RUN, FakeFeed, FakeSession, FakeSyncer, join_ask, push_header, report_info, sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.messages import JoinAsk
    from tests.wire.conftest import Wired


SEED = 8
PAYLOAD = random.Random(SEED).randbytes(10_000)
WAIT_S = 10.0


def chunk(offset: int, data: bytes) -> Chunk:
    return Chunk(offset, data, zlib.crc32(data))


def commit(payload: bytes = PAYLOAD) -> PushCommit:
    return PushCommit(len(payload), sha256(payload))


def say(wired: Wired, *messages: PushPart | bytes) -> list[PushReply]:
    """A push of just these messages, then the end of the stream."""
    raws = [message if isinstance(message, bytes) else pack_push(message) for message in messages]
    call = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Push")(iter(raws), timeout=WAIT_S)
    return [unpack_push_reply(raw) for raw in call]


def refused(call: Callable[[], object]) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def assert_untouched(wired: Wired) -> None:
    assert not wired.syncer.accepted
    assert wired.server.counters().get("internal", 0) == 0


def test_a_push_in_pieces(wired: Wired) -> None:
    said = say(wired, push_header(PAYLOAD), chunk(0, PAYLOAD[:1]), chunk(1, PAYLOAD[1:]), commit())
    assert said == [PushAdmitted(0), PushResult(Outcome.ACCEPTED, 3)]
    assert wired.syncer.accepted == {("site-a", 0, 1): PAYLOAD}
    assert wired.syncer.endings == ["committed"]


def test_definite_answers_come_before_any_payload(wired: Wired) -> None:
    wired.syncer.accepted["site-a", 0, 1] = PAYLOAD
    said = say(wired, push_header(PAYLOAD))
    assert [reply.outcome for reply in said if isinstance(reply, PushResult)] == [Outcome.DUPLICATE]
    assert say(wired, push_header(PAYLOAD, sequence=2, base_version=9)) == [
        PushResult(Outcome.REFUSED, 3, Reason.BAD_BASE)
    ]
    assert not wired.syncer.endings


def test_the_end_of_a_stream_means_nothing(wired: Wired) -> None:
    error = refused(lambda: say(wired, push_header(PAYLOAD), chunk(0, PAYLOAD)))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert "before the commit" in error.details()
    assert wired.syncer.endings == ["broken off"]
    assert_untouched(wired)
    # The bytes were kept, so that the next attempt has only the commit to say.
    assert say(wired, push_header(PAYLOAD), commit()) == [PushAdmitted(10_000), PushResult(Outcome.ACCEPTED, 3)]


SPECKS: list[PushPart | bytes] = [chunk(at, PAYLOAD[at : at + 10]) for at in range(0, 1000, 10)]
BAD_PUSHES: dict[str, tuple[list[PushPart | bytes], grpc.StatusCode]] = {
    "nothing": ([], grpc.StatusCode.DATA_LOSS),
    "noise": ([b"\xff\xff\xff"], grpc.StatusCode.INVALID_ARGUMENT),
    "empty message": ([b""], grpc.StatusCode.INVALID_ARGUMENT),
    "chunk first": ([chunk(0, PAYLOAD)], grpc.StatusCode.INVALID_ARGUMENT),
    "two headers": ([push_header(PAYLOAD), push_header(PAYLOAD)], grpc.StatusCode.INVALID_ARGUMENT),
    "noise after the header": ([push_header(PAYLOAD), b"\x0a\xff"], grpc.StatusCode.INVALID_ARGUMENT),
    "commit too early": ([push_header(PAYLOAD), chunk(0, PAYLOAD[:9]), commit()], grpc.StatusCode.DATA_LOSS),
    "another commit": ([push_header(PAYLOAD), chunk(0, PAYLOAD), commit(b"x")], grpc.StatusCode.INVALID_ARGUMENT),
    "a hole": ([push_header(PAYLOAD), chunk(1, PAYLOAD[1:])], grpc.StatusCode.INVALID_ARGUMENT),
    "too many bytes": ([push_header(PAYLOAD), chunk(0, PAYLOAD + b"x")], grpc.StatusCode.INVALID_ARGUMENT),
    "damaged chunk": ([push_header(PAYLOAD), Chunk(0, PAYLOAD, 1)], grpc.StatusCode.DATA_LOSS),
    "wrong bytes": ([push_header(PAYLOAD), chunk(0, bytes(10_000)), commit()], grpc.StatusCode.DATA_LOSS),
    "specks": ([push_header(PAYLOAD), *SPECKS], grpc.StatusCode.INVALID_ARGUMENT),
    "another run": ([push_header(PAYLOAD, run_id="run-2")], grpc.StatusCode.NOT_FOUND),
}


@pytest.mark.parametrize("name", BAD_PUSHES)
def test_a_bad_push_changes_nothing_and_says_why(wired: Wired, name: str) -> None:
    messages, status = BAD_PUSHES[name]
    error = refused(lambda: say(wired, *messages))
    assert error.code() is status, error.details()
    assert error.details()
    assert_untouched(wired)
    assert wired.server.counters()[f"refused_{status.name.lower()}"] == 1
    assert "committed" not in wired.syncer.endings
    assert wired.syncer.commits == (name == "wrong bytes")


def test_an_oversized_declaration_is_refused_before_a_payload_byte_is_read(start: Callable[..., Wired]) -> None:
    wired = start()
    asked = []
    declared = sync_pb2.PushRequest.FromString(pack_push(push_header(PAYLOAD)))
    declared.header.payload_bytes = PAYLOAD_BYTES_MAX + 1

    def messages() -> Iterator[bytes]:
        yield declared.SerializeToString()
        for offset in range(0, 64 * KIB * KIB, 64 * KIB):
            asked.append(offset)
            yield pack_push(chunk(offset, bytes(64 * KIB)))

    call = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Push")(messages(), timeout=WAIT_S)
    error = refused(lambda: list(call))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"payload_bytes is {PAYLOAD_BYTES_MAX + 1}: a number from 1 to {PAYLOAD_BYTES_MAX}" in error.details()
    assert wired.server.counters().get("payload_bytes_in", 0) == 0
    assert len(asked) * 64 * KIB < 16 * KIB * KIB, "the sender was not held back"
    assert_untouched(wired)
    assert wired.syncer.calls == []


class Held:
    """A push that was admitted and says nothing more until released."""

    def __init__(self, wired: Wired, **changes: object) -> None:
        self._released = False
        self._call = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Push")(self._messages(changes), timeout=60)
        self.first = unpack_push_reply(next(self._call))

    def _messages(self, changes: dict[str, object]) -> Iterator[bytes]:
        yield pack_push(push_header(PAYLOAD, **changes))
        until = time.monotonic() + 30
        while not self._released and time.monotonic() < until:
            time.sleep(0.01)
        yield pack_push(chunk(0, PAYLOAD))
        yield pack_push(commit())

    def release(self) -> PushReply:
        self._released = True
        return unpack_push_reply(next(self._call))

    def end(self) -> Any:
        return refused(lambda: next(self._call))


def test_credits_are_taken_before_the_first_payload_byte(start: Callable[..., Wired]) -> None:
    wired = start(pushes_max=2, pushes_per_site_max=2, pushback_ms=1234)
    held = [Held(wired, site_id="site-a"), Held(wired, site_id="site-b")]
    error = refused(lambda: say(wired, push_header(PAYLOAD, site_id="site-c"), chunk(0, PAYLOAD)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())[PUSHBACK_KEY] == "1234"
    assert wired.syncer.calls == ["open_push"] * 2
    assert wired.server.counters().get("payload_bytes_in", 0) == 0
    assert [push.release() for push in held] == [PushResult(Outcome.ACCEPTED, 3)] * 2
    assert len(say(wired, push_header(PAYLOAD, site_id="site-c"), chunk(0, PAYLOAD), commit())) == 2


def test_one_site_cannot_take_every_credit(start: Callable[..., Wired]) -> None:
    wired = start(pushes_max=8, pushes_per_site_max=1)
    held = Held(wired)
    error = refused(lambda: say(wired, push_header(PAYLOAD, fragment=1)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "of this caller" in error.details()
    assert len(say(wired, push_header(PAYLOAD, site_id="site-b"), chunk(0, PAYLOAD), commit())) == 2
    held.release()


def test_a_site_that_comes_back_ends_its_own_old_push(start: Callable[..., Wired]) -> None:
    wired = start(pushes_max=1)
    old = Held(wired, incarnation=4)
    fenced = refused(lambda: say(wired, push_header(PAYLOAD, incarnation=3)))
    assert fenced.code() is grpc.StatusCode.FAILED_PRECONDITION
    said = say(wired, push_header(PAYLOAD, incarnation=5), chunk(0, PAYLOAD), commit())
    assert said[-1] == PushResult(Outcome.ACCEPTED, 3)
    assert old.end().code() is grpc.StatusCode.CANCELLED
    assert wired.syncer.endings == ["broken off", "committed"]


def test_a_push_that_does_not_declare_itself_is_ended(start: Callable[..., Wired]) -> None:
    wired = start(header_timeout_s=0.3)

    def silence() -> Iterator[bytes]:
        time.sleep(5)
        yield b""

    begun_s = time.monotonic()
    call = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Push")(silence(), timeout=WAIT_S)
    assert refused(lambda: list(call)).code() is grpc.StatusCode.CANCELLED
    assert time.monotonic() - begun_s < 3
    assert wired.syncer.calls == []


def test_a_push_that_stalls_is_ended_and_its_bytes_are_kept(start: Callable[..., Wired]) -> None:
    wired = start(stall_s=0.4)

    def stalling() -> Iterator[bytes]:
        yield pack_push(push_header(PAYLOAD))
        yield pack_push(chunk(0, PAYLOAD[:5000]))
        time.sleep(5)

    call = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Push")(stalling(), timeout=WAIT_S)
    assert refused(lambda: list(call)).code() is grpc.StatusCode.CANCELLED
    assert wired.syncer.ended.wait(WAIT_S)
    assert wired.syncer.endings == ["broken off"]
    assert len(wired.syncer.spool["site-a", 0, 1]) == 5000


@pytest.mark.slow
def test_the_shell_may_take_longer_than_a_stall(start: Callable[..., Wired], monkeypatch: pytest.MonkeyPatch) -> None:
    wired = start(stall_s=0.3, header_timeout_s=0.3)
    admit, commit_to = wired.syncer.open_push, FakeSession.commit
    slow_admit = lambda *arguments: (time.sleep(0.9), admit(*arguments))[1]  # noqa: E731
    monkeypatch.setattr(wired.syncer, "open_push", slow_admit)
    monkeypatch.setattr(FakeSession, "commit", lambda *arguments: (time.sleep(0.9), commit_to(*arguments))[1])
    assert say(wired, push_header(PAYLOAD), chunk(0, PAYLOAD), commit())[-1] == PushResult(Outcome.ACCEPTED, 3)


def test_join_is_refused_with_the_shells_words(wired: Wired) -> None:
    wired.syncer.join_fails = Refusal(Status.FAILED_PRECONDITION, "model.dim is 64 here\nand 128 there")
    error = refused(lambda: wired.channel().unary_unary(f"/{SYNC_SERVICE}/Join")(pack_join(join_ask()), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "model.dim is 64 here and 128 there"


def test_one_join_too_many_is_told_to_come_back_at_once(
    start: Callable[..., Wired], monkeypatch: pytest.MonkeyPatch
) -> None:
    wired, over, entered = start(sites_max=3, pushback_ms=1234), threading.Event(), threading.Semaphore(0)

    def join(request: JoinAsk) -> NoReturn:
        entered.release()
        over.wait(WAIT_S)
        raise Refusal(Status.FAILED_PRECONDITION, "it was another run")

    monkeypatch.setattr(wired.syncer, "join", join)
    one, other = (
        grpc.insecure_channel(wired.server.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(2)
    )
    wired.opened += [one, other]
    ask = lambda channel: channel.unary_unary(f"/{SYNC_SERVICE}/Join").future(pack_join(join_ask()), timeout=WAIT_S)  # noqa: E731
    held = [ask(channel) for channel in (one, one, other)]
    assert all(entered.acquire(timeout=WAIT_S) for _ in held)
    for channel, whose in ((one, "of this caller"), (other, "in all")):
        error = ask(channel).exception()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == f"no room for one more join {whose}: come back"
        assert dict(error.trailing_metadata())[PUSHBACK_KEY] == "1234"
    over.set()
    assert [call.exception().code() for call in held] == [grpc.StatusCode.FAILED_PRECONDITION] * 3


def test_a_defect_of_ours_is_internal_logged_and_counted(wired: Wired, logged: list[str]) -> None:
    wired.syncer.join_fails = ZeroDivisionError("secret path /etc/x")
    error = refused(lambda: wired.channel().unary_unary(f"/{SYNC_SERVICE}/Join")(pack_join(join_ask()), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert wired.server.counters()["internal"] == 1
    assert "ZeroDivisionError" in "".join(logged)


def test_control_messages_have_a_length(wired: Wired) -> None:
    raw = pack_report(report_info()) + b"\x8a\x01" + b"\x00" * 70_000
    error = refused(lambda: wired.channel().unary_unary(f"/{SYNC_SERVICE}/Report")(raw, timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes long" in error.details()
    error = refused(lambda: wired.channel().unary_unary(f"/{SYNC_SERVICE}/Report")(b"\x00" * 3_000_000, timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert wired.syncer.calls == []


def test_an_unknown_method_is_unimplemented(wired: Wired) -> None:
    error = refused(lambda: wired.channel().unary_unary(f"/{SYNC_SERVICE}/Nothing")(b"", timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def watch(wired: Wired, incarnation: int = 1) -> Any:
    ask = pack_watch(WatchAsk(RUN, "site-a", incarnation))
    return wired.channel().unary_stream(f"/{SYNC_SERVICE}/Watch")(ask, timeout=30)


def test_watch_says_that_it_is_alive_and_ends_when_dropped(start: Callable[..., Wired]) -> None:
    wired = start(alive_s=0.2)
    stream = watch(wired)
    begun_s = time.monotonic()
    assert [unpack_watch_event(next(stream)) for _ in range(3)] == [Alive()] * 3
    assert 0.3 < time.monotonic() - begun_s < 5
    wired.syncer.feeds[0].events.put(Dropped(Reason.EVICTED))
    assert [event for event in map(unpack_watch_event, stream) if event != Alive()] == [Dropped(Reason.EVICTED)]
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)


def test_a_new_watch_ends_the_old_one_and_an_older_incarnation_is_fenced(wired: Wired) -> None:
    old = watch(wired, 1)
    next(old)
    new = watch(wired, 2)
    assert unpack_watch_event(next(new)) == Alive()
    assert refused(lambda: list(old)).code() is grpc.StatusCode.CANCELLED
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)
    assert refused(lambda: list(watch(wired, 1))).code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_watch_whose_client_is_gone_is_closed(wired: Wired) -> None:
    stream = watch(wired)
    next(stream)
    stream.cancel()
    assert wired.syncer.feeds[0].closed.wait(WAIT_S)


def test_a_feed_that_is_closed_does_not_spin(start: Callable[..., Wired]) -> None:
    wired = start(alive_s=0.3)
    stream = watch(wired)
    next(stream)
    wired.syncer.feeds[0].close()
    next(stream)
    next(stream)
    assert wired.syncer.feeds[0].gets < 20


def pull(wired: Wired, ask: PullAsk) -> list[Any]:
    call = wired.channel().unary_stream(f"/{SYNC_SERVICE}/Pull")(pack_pull(ask), timeout=WAIT_S)
    return [unpack_pull_part(raw) for raw in call]


@pytest.mark.parametrize("offset", [0, 1, 9_999, 10_000, 10_001, 10_003])
def test_a_pull_goes_on_from_an_offset(wired: Wired, offset: int) -> None:
    wired.syncer.publish(PAYLOAD, b"xyz")
    header, *chunks = pull(wired, PullAsk(RUN, "site-a", 0, 1, offset=offset))
    assert header == wired.syncer.version
    assert b"".join(part.data for part in chunks) == (PAYLOAD + b"xyz")[offset:]


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        (PullAsk(RUN, "site-a", 5, 1), grpc.StatusCode.NOT_FOUND),
        (PullAsk("run-2", "site-a", 0, 1), grpc.StatusCode.NOT_FOUND),
        (PullAsk(RUN, "site-a", 0, 1, 2, 3), grpc.StatusCode.NOT_FOUND),
        (PullAsk(RUN, "site-a", 0, 1, 0, 100_000), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_a_pull_of_what_is_not_there_is_refused(wired: Wired, ask: PullAsk, status: grpc.StatusCode) -> None:
    wired.syncer.publish(PAYLOAD)
    assert refused(lambda: pull(wired, ask)).code() is status
    assert wired.server.counters().get("payload_bytes_out", 0) == 0


# --- The fake syncer of these tests is what ``service`` asks for, and learns no more than it should ------------------


def test_the_fake_has_the_signatures_of_the_contract() -> None:
    for contract, fake in ((SyncerApi, FakeSyncer), (PushSession, FakeSession), (WatchFeed, FakeFeed)):
        for name, method in inspect.getmembers(contract, inspect.isfunction):
            if not name.startswith("_"):
                assert list(inspect.signature(getattr(fake, name)).parameters) == list(
                    inspect.signature(method).parameters
                ), name


def test_every_call_of_a_client_reaches_the_shell(wired: Wired) -> None:
    client = wired.client()
    assert client.join(join_ask()).incarnation == 1
    assert client.report(report_info()).known
    client.push(push_header(b"abc"), b"abc")
    client.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
    with client.watch(1) as stream:
        next(stream)
    client.leave(1)
    assert wired.syncer.calls == ["join", "report", "open_push", "pull", "watch", "leave"]
