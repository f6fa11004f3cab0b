from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from diloco.wire.checkup import Checkup, Heard, greet, resolve
from diloco.wire.messages import Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.loopback.cluster import free_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diloco.wire.checkup import Greeting
    from tests.wire.conftest import Wired


TOKEN = "a-token-of-site-a-0123456789"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[FakeSyncer, str]]:
    """A syncer that wants tokens, and its address."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {"site-a": TOKEN}}))
    tokens.chmod(0o600)
    syncer = FakeSyncer()
    server = serve(syncer, ServerOptions(run_id=RUN), SecurityOptions(tokens_file=str(tokens)))
    yield syncer, server.address
    server.stop(0.2)


def checkup(address: str, token: str = "") -> Checkup:
    return Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=5.0))


def test_it_tells_what_is_served_and_what_is_not(wired: Wired) -> None:
    with checkup(wired.server.address) as asked:
        assert asked.serving("") is True
        assert asked.serving(RUN) is True
        assert asked.serving("run-2") is None
        assert RUN in asked.names()
        asked.come_in()


def test_one_that_takes_no_updates_says_so(start: Callable[..., Wired]) -> None:
    wired = start()
    wired.server.ready(False)
    with checkup(wired.server.address) as asked:
        assert asked.serving(RUN) is False
        assert asked.serving("") is True


def test_round_trips_are_counted_and_bounded(wired: Wired) -> None:
    with checkup(wired.server.address) as asked:
        taken = asked.round_trips(5, 5.0)
        assert len(taken) == 5
        assert all(0 < each < 5 for each in taken)
        assert asked.round_trips(1000, 0.0) == []


def test_who_is_known_comes_in_and_a_stranger_does_not(locked: tuple[FakeSyncer, str]) -> None:
    syncer, address = locked
    with checkup(address, TOKEN) as asked:
        asked.come_in()
    for token in ("", "another-token-0123456789"):
        with checkup(address, token) as asked:
            assert asked.serving("") is True
            with pytest.raises(Refused) as refused:
                asked.come_in()
            assert refused.value.status is Status.UNAUTHENTICATED
    assert syncer.calls == []


def test_nobody_there_is_unreachable() -> None:
    with checkup(f"127.0.0.1:{free_port()}") as asked:
        for question in (lambda: asked.serving(""), asked.names, asked.come_in, lambda: asked.round_trips(1, 1.0)):
            with pytest.raises(Unreachable):
                question()


LIMIT_S = 5.0
PLAIN = SecurityOptions()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def greeted(address: str, security: SecurityOptions = PLAIN, host: str = "127.0.0.1") -> Greeting:
    return greet("127.0.0.1", int(address.rpartition(":")[2]), host, security, LIMIT_S)


def served(security: SecurityOptions = PLAIN) -> Iterator[str]:
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN), security)
    yield server.address
    server.stop(0.2)


@pytest.fixture
def plain() -> Iterator[str]:
    yield from served()


@pytest.fixture
def mutual(authority: Authority) -> Iterator[str]:
    cert, key = authority.issue("syncer", *LOOPBACK)
    yield from served(SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=True))


@pytest.fixture
def over(authority: Authority) -> Iterator[str]:
    cert, key = authority.issue("over", *LOOPBACK, ends_in_s=-60)
    yield from served(SecurityOptions(tls_cert=cert, tls_key=key))


def answering(told: bytes) -> tuple[socket.socket, str]:
    """Somebody who accepts one connection, says ``told`` and closes it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        line, _ = listening.accept()
        with line:
            line.recv(64)
            line.sendall(told)

    threading.Thread(target=answer, daemon=True).start()
    return listening, f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_name_is_resolved_and_one_that_is_none_is_not() -> None:
    assert "127.0.0.1" in resolve("localhost", 7077)
    for host in ("nohost.invalid", "a..b"):
        with pytest.raises((OSError, UnicodeError)):
            resolve(host, 7077)


def test_a_syncer_answers_in_http2(plain: str) -> None:
    greeting = greeted(plain)
    assert greeting.heard is Heard.HTTP2
    assert 0 < greeting.connect_s < LIMIT_S


def test_nobody_there_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="refused"):
        greeted(f"127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("told", "heard"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Heard.HTTP1),
        (b"SSH-2.0-OpenSSH_9\r\n", Heard.OTHER),
        (b"\x15\x03\x01\x00\x02\x02\x46xx", Heard.TLS),
        (b"", Heard.CLOSED),
    ],
)
def test_who_is_no_syncer_is_known_by_the_first_word(told: bytes, heard: Heard) -> None:
    listening, address = answering(told)
    with listening:
        assert greeted(address).heard is heard


def test_silence_is_told_within_the_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert greet("127.0.0.1", port, "127.0.0.1", PLAIN, 0.2).heard is Heard.SILENCE
        told = greet("127.0.0.1", port, "127.0.0.1", SecurityOptions(tls_ca="system"), 0.2)
        assert (told.heard, told.unverified) == (None, False)
        assert "timed out" in told.alert


def test_mutual_tls_stands_with_what_both_ends_accept(mutual: str, authority: Authority) -> None:
    cert, key = authority.site("site/a")
    greeting = greeted(mutual, SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key))
    assert (greeting.heard, greeting.tls_version, greeting.alert) == (Heard.HTTP2, "TLSv1.3", "")
    assert greeting.shown


def test_a_caller_without_a_certificate_is_sent_away(mutual: str, authority: Authority) -> None:
    greeting = greeted(mutual, SecurityOptions(tls_ca=authority.ca))
    assert greeting.heard in (None, Heard.CLOSED)
    assert greeting.heard is Heard.CLOSED or "CERTIFICATE_REQUIRED" in greeting.alert


@pytest.mark.parametrize(
    ("which", "host", "words"), [("own", "other.example", "mismatch"), ("other", "", "certificate")]
)
def test_a_certificate_that_is_refused_is_shown_all_the_same(
    mutual: str, authority: Authority, tmp_path: Path, which: str, host: str, words: str
) -> None:
    ca = authority.ca if which == "own" else Authority(tmp_path, "other").ca
    greeting = greeted(mutual, SecurityOptions(tls_ca=ca), host or "127.0.0.1")
    assert greeting.unverified
    assert greeting.heard is None
    assert words in greeting.alert
    assert greeting.shown


def test_one_that_is_over_is_refused(over: str, authority: Authority) -> None:
    greeting = greeted(over, SecurityOptions(tls_ca=authority.ca))
    assert (greeting.unverified, greeting.alert) == (True, "certificate has expired")


def test_tls_towards_who_speaks_none_fails_in_words(plain: str, authority: Authority) -> None:
    greeting = greeted(plain, SecurityOptions(tls_ca=authority.ca))
    assert greeting.heard is None
    assert greeting.alert
