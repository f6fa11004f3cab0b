"""The stream between a standby and the syncer, with somebody simple behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.wire.client import FollowClient
from diloco.wire.messages import (
    Alive,
    FollowAck,
    FollowPart,
    Follows,
    FollowStart,
    Refusal,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

HEX = "a" * 64
BOUND_S = 20.0


class Served:
    """Serves one standby: says who follows, then is alive until that is acknowledged."""

    def __init__(self) -> None:
        self.acks: list[FollowAck] = []
        self.heard = threading.Event()
        self.closed = threading.Event()
        self.starts: list[FollowStart] = []

    def follow(self, start: FollowStart) -> Served:
        self.starts.append(start)
        if start.standby == "stranger":
            raise Refusal(Status.FAILED_PRECONDITION, "give it an empty folder")
        return self

    def parts(self) -> Iterator[FollowPart]:
        yield Follows(False, 1, HEX, 1)
        while not self.heard.wait(0.05) and not self.closed.is_set():
            yield Alive()

    def acknowledged(self, ack: FollowAck) -> None:
        self.acks.append(ack)
        self.heard.set()

    def close(self) -> None:
        self.closed.set()


@contextmanager
def connected() -> Iterator[tuple[Served, FollowClient]]:
    served = Served()
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN), following=served)
    client = FollowClient(server.address, options=ClientOptions(stall_s=BOUND_S))
    try:
        yield served, client
    finally:
        client.close()
        server.stop(0.5)


def start(standby: str = "s", run_id: str = RUN) -> FollowStart:
    return FollowStart(run_id, standby, HEX, HEX, 1, HEX)


def test_parts_come_and_acknowledgements_go(capsys: pytest.CaptureFixture[str]) -> None:
    with connected() as (served, client), client.follow(start()) as stream:
        assert next(stream) == Follows(False, 1, HEX, 1)
        stream.ack(FollowAck(1, 77))
        rest: list[FollowPart] = []
        with pytest.raises(Unreachable, match="the stream ended"):
            rest += stream
        assert set(map(type, rest)) <= {Alive}
        assert served.acks == [FollowAck(1, 77)]
        assert served.starts == [start()]


def test_a_stream_that_is_cancelled_is_closed_at_the_other_end() -> None:
    with connected() as (served, client):
        with client.follow(start()) as stream:
            next(stream)
        assert served.closed.wait(BOUND_S)


@pytest.mark.parametrize(
    ("who", "status"), [(start("stranger"), "empty folder"), (start(run_id="other"), "no such run")]
)
def test_a_refusal_comes_in_words(who: FollowStart, status: str) -> None:
    with connected() as (_, client), client.follow(who) as stream, pytest.raises(Refused, match=status):
        next(stream)


def test_where_nobody_serves_standbys_there_is_no_such_service() -> None:
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN))
    client = FollowClient(server.address)
    try:
        with client.follow(start()) as stream, pytest.raises(Refused) as refused:
            next(stream)
        assert refused.value.status is Status.UNIMPLEMENTED
    finally:
        client.close()
        server.stop(0.5)


def test_only_a_standby_or_an_admin_may_follow(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    table = {"sites": {"site-a": "a" * 20}, "observer": "o" * 20, "admin": "m" * 20, "standby": "s" * 20}
    tokens.write_text(json.dumps(table))
    tokens.chmod(0o600)
    served = Served()
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN), SecurityOptions(tokens_file=str(tokens)), following=served)
    found = {}
    try:
        for token in ("", "a" * 20, "o" * 20, "m" * 20, "s" * 20):
            client = FollowClient(server.address, SecurityOptions(token=token))
            with client.follow(start()) as stream:
                try:
                    next(stream)
                    found[token[:1]] = "OK"
                except Refused as refused:
                    found[token[:1]] = refused.status.value
            client.close()
    finally:
        server.stop(0.5)
    denied = "PERMISSION_DENIED"
    assert found == {"": "UNAUTHENTICATED", "a": denied, "o": denied, "m": "OK", "s": "OK"}
    assert len(served.starts) == 2
