"""What is asked of an address before a run: who answers there, in which language, and how fast the link is."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from diloco.wire import checkup as module
from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.checkup import Checkup, Greeting, Heard, greet, speaks_tls
from diloco.wire.convert import pack_probe, unpack_probe_reply
from diloco.wire.messages import (
    CONTROL_BYTES_MAX,
    JOIN_BYTES_MAX,
    MIB,
    Filler,
    ProbeAsk,
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.options import ClientOptions, SecurityOptions
from tests.wire.certificates import A, B, written
from tests.wire.conftest import Aside, Patch, Start, Wired, answering, ended
from tests.wire.relay import WAIT_S


@pytest.fixture
def guarded(start: Start, tmp_path: Path) -> Start:
    """Start a syncer that knows two sites, with permissions."""
    return lambda **grants: start(
        tokens_file=written(tmp_path / "tokens"),
        permissions=written(tmp_path / "permissions", {"default": "allow", "sites": grants}),
    )


def checkup(address: str, token: str = "") -> Checkup:
    return Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=WAIT_S))


def probed(address: str, token: str = "", **ask: int) -> Any:
    with checkup(address, token) as asked:
        return asked.probe(ProbeAsk(3, **ask))


def test_a_server_that_refuses_to_list_its_services_has_none_by_name() -> None:
    others = grpc.method_handlers_generic_handler("another.Service", {})
    with answering(others) as address, checkup(address) as asked:
        assert asked.names() == ()


def greeted(address: str, security: SecurityOptions = SecurityOptions(), limit_s: float = 5.0) -> Greeting:  # noqa: B008
    return greet("127.0.0.1", int(address.rpartition(":")[2]), "127.0.0.1", security, limit_s)


def test_a_connection_that_ends_without_an_answer_is_closed_and_an_error_of_tls_is_raised() -> None:
    failures: list[OSError] = [ConnectionResetError(), ssl.SSLEOFError(), TimeoutError(), ssl.SSLError("refused")]

    def makefile(mode: str) -> Any:
        raise failures.pop(0)

    line: Any = SimpleNamespace(sendall=len, makefile=makefile)
    assert [module._first_word(line) for _ in range(3)] == [Heard.CLOSED, Heard.CLOSED, Heard.SILENCE]
    with pytest.raises(ssl.SSLError, match="refused"):
        module._first_word(line)


def test_what_is_no_syncer_is_known_by_its_first_word(aside: Aside) -> None:
    def answer(listening: socket.socket, told: bytes) -> None:
        line, _ = listening.accept()
        with line:
            line.recv(64)
            line.sendall(told)

    for told, heard in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Heard.HTTP1),
        (b"SSH-2.0-OpenSSH_9\r\n", Heard.OTHER),
        (b"\x15\x03\x01\x00\x02\x02\x46xx", Heard.TLS),
        (b"", Heard.CLOSED),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            aside(answer, listening, told)
            assert greeted(f"127.0.0.1:{listening.getsockname()[1]}").heard is heard


def test_silence_is_told_within_the_bound_and_whether_it_speaks_tls_is_not_known(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "KNOCK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        told = greeted(address, SecurityOptions(tls_ca="system"), 0.2)
        assert (told.heard, told.unverified) == (None, False)
        assert "timed out" in told.alert
        for each in (address, "unix:/nowhere", "nohost.invalid:7077", "127.0.0.1:99999", "a..b:1", "x"):
            assert speaks_tls(each) is None


def test_filler_is_counted_both_ways_is_no_payload_and_is_bounded_by_time_where_bytes_do_not(wired: Wired) -> None:
    found = probed(wired.server.address, bytes_up=4 * MIB + 5, bytes_down=3 * MIB + 7, limit_ns=10**10)
    assert (found.up.bytes, found.down.bytes) == (4 * MIB + 5, 3 * MIB + 7)
    counters = wired.server.counters()
    assert (counters["probe_bytes_in"], counters["probe_bytes_out"]) == (4 * MIB + 5, 3 * MIB + 7)
    assert not {"payload_bytes_in", "payload_bytes_out"} & set(counters)
    assert wired.syncer.calls == []
    began = time.monotonic()
    found = probed(wired.server.address, bytes_up=64 * MIB, bytes_down=64 * MIB, limit_ns=1)
    assert time.monotonic() - began < WAIT_S
    assert all(taken is None or taken.bytes < 64 * MIB for taken in (found.up, found.down))
    with checkup(wired.server.address) as asked:
        assert asked.round_trips(1000, 0.0) == []
    short = [pack_probe(ProbeAsk(3, bytes_up=100)), pack_probe(Filler(b"12345"))]
    *_, taken = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Probe")(iter(short), timeout=WAIT_S)
    assert unpack_probe_reply(taken).bytes == 5, "less than was announced may come"


NO_PROBES: list[tuple[list[bytes], str, str]] = [
    ([], "INVALID_ARGUMENT", "ended before its message"),
    ([pack_probe(Filler(b"x"))], "INVALID_ARGUMENT", "first message of a probe is not its ask"),
    ([bytes(JOIN_BYTES_MAX + 1)], "INVALID_ARGUMENT", "bytes long"),
    ([pack_probe(ProbeAsk(3, "run-2"))], "NOT_FOUND", "'run-2'"),
    ([pack_probe(ProbeAsk(3, bytes_up=10)), pack_probe(Filler(bytes(11)))], "INVALID_ARGUMENT", "10 bytes at most"),
    ([pack_probe(ProbeAsk(3, bytes_up=10)), pack_probe(ProbeAsk(3))], "INVALID_ARGUMENT", "filler wanted"),
    ([pack_probe(ProbeAsk(3, bytes_up=100)), *[pack_probe(Filler(b"x"))] * 9], "INVALID_ARGUMENT", "in 2 messages"),
]


def test_what_is_no_probe_is_refused_in_words_and_a_stranger_before_a_byte_is_parsed(
    wired: Wired, guarded: Start
) -> None:
    probe = wired.channel().stream_stream(f"/{SYNC_SERVICE}/Probe")
    for messages, status, words in NO_PROBES:
        found, details = ended(probe(iter(messages), timeout=WAIT_S))
        assert (found, words in details) == (status, True), details
    assert wired.syncer.calls == []
    assert wired.server.counters().get("internal", 0) == 0
    call = guarded().channel().stream_stream(f"/{SYNC_SERVICE}/Probe")
    assert ended(call(iter([b"\xff" * CONTROL_BYTES_MAX]), timeout=WAIT_S))[0] == "UNAUTHENTICATED"


def test_filler_has_a_rate_of_its_own_and_questions_have_not(guarded: Start) -> None:
    address = guarded().server.address
    for _ in range(3):
        probed(address, A, bytes_up=1)
    with pytest.raises(Unreachable, match="caller is over its limit of probes") as caught:
        probed(address, A, bytes_down=1)
    assert 0 < (caught.value.retry_after_s or 0) <= 10.1
    for _ in range(5):
        probed(address, A)
    probed(address, B, bytes_up=1)


def test_filler_counts_against_what_a_site_may_carry(guarded: Start) -> None:
    rates = {"bytes_per_s": 1000.0, "pull_bytes_per_s": 1000.0}
    address = guarded(**{"site-a": rates, "site-b": {"may_push": False}}).server.address
    for way, words in (("bytes_up", "limit of bytes_per_s"), ("bytes_down", "limit of pull_bytes_per_s")):
        probed(address, A, **{way: 100_000})
        with pytest.raises(Unreachable, match=words):
            probed(address, A, **{way: 1})
    with pytest.raises(Refused, match="may not push") as refused:
        probed(address, B, bytes_up=1)
    assert refused.value.status is Status.PERMISSION_DENIED
    probed(address, B, bytes_down=1)
