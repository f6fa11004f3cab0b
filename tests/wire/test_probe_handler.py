"""Probe, over real gRPC: what it tells, what bounds it, and that nothing else is asked of the syncer."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.checkup import Checkup
from diloco.wire.convert import pack_probe, unpack_probe_reply
from diloco.wire.messages import (
    CONTROL_BYTES_MAX,
    JOIN_BYTES_MAX,
    PROBES_MAX,
    Filler,
    ProbeAnswer,
    ProbeAsk,
    ProbeTaken,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diloco.wire.server import RunningServer
    from tests.wire.conftest import Wired

A, B = "a-token-of-site-a-0123456789", "a-token-of-site-b-0123456789"
MIB = 1 << 20
WAIT_S = 20.0


def checkup(address: str, token: str = "") -> Checkup:
    return Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=WAIT_S))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """A syncer that knows two sites, with permissions."""
    running: list[RunningServer] = []

    def start(**grants: Any) -> RunningServer:
        tokens, table = tmp_path / "tokens.json", tmp_path / "permissions.json"
        tokens.write_text(json.dumps({"sites": {"a": A, "b": B}}))
        tokens.chmod(0o600)
        table.write_text(json.dumps({"default": "allow", "sites": grants}))
        security = SecurityOptions(tokens_file=str(tokens), permissions=str(table))
        running.append(serve(FakeSyncer(), ServerOptions(run_id=RUN), security))
        return running[-1]

    yield start
    for server in running:
        server.stop(0.2)


def test_it_tells_who_answers_whom_it_sees_and_what_time_it_is(guarded: Callable[..., RunningServer]) -> None:
    with checkup(guarded().address, A) as asked:
        probed = asked.probe(ProbeAsk(3, RUN))
    assert (probed.answer.protocol, probed.answer.run_id, probed.answer.identity) == (3, RUN, "site/a")
    assert abs(probed.ahead_ns) / 1e9 <= probed.round_s + 0.05
    assert (probed.up, probed.down) == (None, None)


def test_filler_is_counted_both_ways_and_is_no_payload(wired: Wired) -> None:
    with checkup(wired.server.address) as asked:
        probed = asked.probe(ProbeAsk(3, bytes_up=4 * MIB + 5, bytes_down=3 * MIB + 7, limit_ns=10**10))
    assert probed.up is not None
    assert probed.down is not None
    assert (probed.up.bytes, probed.down.bytes) == (4 * MIB + 5, 3 * MIB + 7)
    assert probed.up.bytes_per_s > 1e6
    assert probed.down.bytes_per_s > 1e6
    counters = wired.server.counters()
    assert (counters["probe_bytes_in"], counters["probe_bytes_out"]) == (4 * MIB + 5, 3 * MIB + 7)
    assert not {"payload_bytes_in", "payload_bytes_out"} & set(counters)
    assert wired.syncer.calls == []


def test_time_bounds_it_where_bytes_do_not(wired: Wired) -> None:
    began = time.monotonic()
    with checkup(wired.server.address) as asked:
        probed = asked.probe(ProbeAsk(3, bytes_up=64 * MIB, bytes_down=64 * MIB, limit_ns=1))
    assert time.monotonic() - began < WAIT_S
    assert probed.up is None or probed.up.bytes < 64 * MIB
    assert probed.down is None or probed.down.bytes < 64 * MIB


def status_of(call: Any) -> tuple[str, str]:
    try:
        list(call)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


@pytest.mark.parametrize(
    ("messages", "status", "words"),
    [
        ([], "INVALID_ARGUMENT", "ended before its message"),
        ([b"\xff\xff"], "INVALID_ARGUMENT", "cannot be parsed"),
        ([pack_probe(Filler(b"x"))], "INVALID_ARGUMENT", "first message of a probe is not its ask"),
        ([bytes(JOIN_BYTES_MAX + 1)], "INVALID_ARGUMENT", "bytes long"),
        ([pack_probe(ProbeAsk(3, "run-2"))], "NOT_FOUND", "'run-2'"),
        ([pack_probe(ProbeAsk(3, bytes_up=10)), pack_probe(Filler(bytes(11)))], "INVALID_ARGUMENT", "10 bytes at most"),
        ([pack_probe(ProbeAsk(3, bytes_up=10)), pack_probe(ProbeAsk(3))], "INVALID_ARGUMENT", "filler wanted"),
        ([pack_probe(ProbeAsk(3, bytes_up=100)), *[pack_probe(Filler(b"x"))] * 9], "INVALID_ARGUMENT", "in 2 messages"),
    ],
)
def test_what_is_no_probe_is_refused_in_words(wired: Wired, messages: list[bytes], status: str, words: str) -> None:
    call = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Probe")(iter(messages), timeout=WAIT_S)
    found, details = status_of(call)
    assert (found, words in details) == (status, True), details
    assert wired.syncer.calls == []
    assert wired.server.counters().get("internal", 0) == 0


def test_a_stranger_is_refused_before_a_byte_is_parsed(guarded: Callable[..., RunningServer]) -> None:
    server = guarded()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(f"/{SYNC_SERVICE}/Probe")(iter([b"\xff" * CONTROL_BYTES_MAX]), timeout=WAIT_S)
        assert status_of(call)[0] == "UNAUTHENTICATED"


class Held:
    """A probe that has begun and does not end before it is told to."""

    def __init__(self, channel: Any, token: str = "") -> None:
        self.over = threading.Event()
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        ask = pack_probe(ProbeAsk(3, bytes_up=100))
        self.call = channel.stream_stream(f"/{SYNC_SERVICE}/Probe")(
            self.messages(ask), timeout=WAIT_S, metadata=metadata
        )
        assert isinstance(unpack_probe_reply(next(self.call)), ProbeAnswer)

    def messages(self, ask: bytes) -> Iterator[bytes]:
        yield ask
        yield pack_probe(Filler(b"12345"))
        self.over.wait(WAIT_S)

    def end(self) -> ProbeTaken:
        self.over.set()
        [taken] = [unpack_probe_reply(raw) for raw in self.call]
        assert isinstance(taken, ProbeTaken)
        return taken


def own_channel(wired: Wired) -> Any:
    """A connection that no other channel shares: here callers are told apart by it."""
    channel = grpc.insecure_channel(wired.server.address, [("grpc.use_local_subchannel_pool", 1)])
    wired.opened.append(channel)
    return channel


def test_one_caller_makes_one_at_a_time_and_all_together_few(start: Callable[..., Wired]) -> None:
    wired = start()
    held = [Held(own_channel(wired)) for _ in range(PROBES_MAX)]
    with checkup(wired.server.address) as asked, pytest.raises(Unreachable, match="no room for one more probe in all"):
        asked.probe(ProbeAsk(3))
    assert [each.end().bytes for each in held] == [5] * PROBES_MAX
    with checkup(wired.server.address) as asked:
        asked.probe(ProbeAsk(3))


def test_one_site_has_one_place(guarded: Callable[..., RunningServer]) -> None:
    server = guarded()
    with grpc.insecure_channel(server.address) as channel:
        held = Held(channel, A)
        with checkup(server.address, A) as asked, pytest.raises(Unreachable, match="probe of this caller"):
            asked.probe(ProbeAsk(3))
        with checkup(server.address, B) as asked:
            asked.probe(ProbeAsk(3))
        held.end()


def test_filler_has_a_rate_of_its_own_and_questions_have_not(guarded: Callable[..., RunningServer]) -> None:
    server = guarded()
    with checkup(server.address, A) as asked:
        for _ in range(3):
            asked.probe(ProbeAsk(3, bytes_up=1))
        with pytest.raises(Unreachable, match="probes of this caller is used up") as caught:
            asked.probe(ProbeAsk(3, bytes_down=1))
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 10.1
        for _ in range(5):
            asked.probe(ProbeAsk(3))
    with checkup(server.address, B) as asked:
        asked.probe(ProbeAsk(3, bytes_up=1))


def test_filler_counts_against_what_a_site_may_carry(guarded: Callable[..., RunningServer]) -> None:
    server = guarded(a={"bytes_per_s": 1000.0, "pull_bytes_per_s": 1000.0}, b={"may_push": False})
    with checkup(server.address, A) as asked:
        asked.probe(ProbeAsk(3, bytes_up=100_000))
        with pytest.raises(Unreachable, match="Probe: bytes_per_s of this caller"):
            asked.probe(ProbeAsk(3, bytes_up=1))
        asked.probe(ProbeAsk(3, bytes_down=100_000))
        with pytest.raises(Unreachable, match="pull_bytes_per_s of this caller"):
            asked.probe(ProbeAsk(3, bytes_down=1))
    with checkup(server.address, B) as asked:
        with pytest.raises(Refused, match="may not push") as refused:
            asked.probe(ProbeAsk(3, bytes_up=1))
        assert refused.value.status is Status.PERMISSION_DENIED
        asked.probe(ProbeAsk(3, bytes_down=1))


def test_one_who_goes_away_leaves_the_place_free(wired: Wired) -> None:
    held = [Held(own_channel(wired)) for _ in range(PROBES_MAX)]
    for each in held:
        each.call.cancel()
        each.over.set()
    until = time.monotonic() + WAIT_S
    while True:
        try:
            with checkup(wired.server.address) as asked:
                asked.probe(ProbeAsk(3))
            return
        except Unreachable:
            assert time.monotonic() < until
            time.sleep(0.05)
