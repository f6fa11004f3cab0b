"""What the doctor says on the way to an address, against real ends on the loopback."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from cryptography import x509

from diloco.doctor import syncer
from diloco.doctor.findings import Level
from diloco.doctor.syncer import own_files, way_to
from diloco.wire.checkup import Greeting, Heard
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.loopback.cluster import free_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diloco.doctor.syncer import Way

PLAIN = SecurityOptions()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def served(security: SecurityOptions = PLAIN) -> Iterator[str]:
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN), security)
    try:
        yield server.address
    finally:
        server.stop(0.2)


def mutual(authority: Authority) -> SecurityOptions:
    cert, key = authority.issue("syncer", *LOOPBACK)
    return SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=True)


def said(way: Way) -> str:
    return "\n".join(finding.line() for finding in way.findings)


def test_a_plain_syncer_is_reached_step_by_step() -> None:
    with served() as address:
        way = way_to(address, PLAIN)
    assert (way.reached, way.open) == (True, True)
    assert [each.check for each in way.findings] == ["dns", "tcp"]
    assert "connects in" in said(way)


def test_a_name_that_is_none_ends_there() -> None:
    way = way_to("nohost.invalid:7077", PLAIN)
    assert (way.reached, way.open) == (False, False)
    assert said(way).startswith("fail  dns         nohost.invalid does not resolve: ")
    assert " -> give the right name" in said(way)


def test_a_closed_port_ends_there() -> None:
    way = way_to(f"localhost:{free_port()}", PLAIN)
    assert (way.reached, way.open) == (False, False)
    assert "Connection refused -> start the syncer, or give the port" in said(way)


def test_who_accepts_and_says_nothing_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer, "GREET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        way = way_to(f"127.0.0.1:{silent.getsockname()[1]}", PLAIN)
    assert (way.reached, way.open) == (False, False)
    assert "fail  http2       nothing answers, where a syncer speaks HTTP/2 -> it accepts and says nothing" in said(way)


def test_a_web_server_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for _ in range(2):  # The doctor, and the one that asks whether TLS is spoken.
                line, _ = listening.accept()
                with line:
                    line.recv(64)
                    line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        way = way_to(f"127.0.0.1:{listening.getsockname()[1]}", PLAIN)
    assert (way.reached, way.open) == (True, False)
    assert "HTTP/1 answers, where a syncer speaks HTTP/2 -> this is a web server or proxy" in said(way)


def test_mutual_tls_that_stands_is_told_with_its_certificate(authority: Authority) -> None:
    cert, key = authority.site("site/a")
    with served(mutual(authority)) as address:
        way = way_to(address, SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key))
    assert way.open
    assert "TLSv1.3, both ends known, certificate of localhost, 127.0.0.1 by CN=authority, good until" in said(way)
    tls = way.findings[-1]
    assert (tls.check, tls.level) == ("tls", Level.WARN)  # It ends within the hour.
    assert "diloco certs issue DIR --syncer --host 127.0.0.1" in tls.remedy


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no tls", "it speaks TLS, and this end is told to do without -> give site.tls_ca=FILE"),
        ("no certificate", "give site.tls_cert and site.tls_key"),
        ("foreign certificate", "-> have site.tls_cert issued by the authority that the syncer knows"),
        ("wrong authority", "did not sign the syncer's certificate, CN=authority did: "),
        ("over", "the syncer's certificate ended on 2"),
        ("wrong name", "the syncer's certificate is not for 127.0.0.1: it names syncer.example -> give one of these"),
        ("no tls there", "it does not speak TLS -> leave site.tls_ca out"),
    ],
)
def test_tls_that_does_not_stand_is_told_with_what_to_change(
    case: str, words: str, authority: Authority, tmp_path: Path
) -> None:
    there, other = mutual(authority), Authority(tmp_path, "other")
    cert, key = authority.site("site/a")
    here = SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key)
    if case == "no tls":
        here = PLAIN
    elif case == "no certificate":
        here = SecurityOptions(tls_ca=authority.ca)
    elif case == "foreign certificate":
        cert, key = other.site("site/a")
        here = SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key)
    elif case == "wrong authority":
        here = SecurityOptions(tls_ca=other.ca, tls_cert=cert, tls_key=key)
    elif case == "over":
        cert, key = authority.issue("over", *LOOPBACK, ends_in_s=-60)
        there = SecurityOptions(tls_cert=cert, tls_key=key)
    elif case == "wrong name":
        cert, key = authority.issue("named", x509.DNSName("syncer.example"))
        there = SecurityOptions(tls_cert=cert, tls_key=key)
    elif case == "no tls there":
        there = PLAIN
    with served(there) as address:
        way = way_to(address, here)
    assert (way.reached, way.open) == (True, False), said(way)
    assert way.findings[-1].level is Level.FAIL
    assert words in said(way)


def test_one_dead_address_of_several_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(address: str, *_: object) -> Greeting:
        if address == "10.0.0.2":
            raise TimeoutError
        return Greeting(0.08, heard=Heard.HTTP2)

    monkeypatch.setattr(syncer, "resolve", lambda host, port: ("10.0.0.1", "10.0.0.2"))
    monkeypatch.setattr(syncer, "greet", greet)
    way = way_to("syncer.example:7077", PLAIN)
    assert way.open
    assert said(way).splitlines() == [
        "ok    dns         syncer.example: 10.0.0.1, 10.0.0.2",
        "warn  tcp         10.0.0.1 port 7077 connects in 80 ms; 10.0.0.2 port 7077: no answer (dropped on the way?)"
        " -> take the dead address out of DNS: each connection may try it first",
    ]


def test_a_socket_of_this_machine_needs_no_way() -> None:
    assert way_to("unix:/run/diloco.sock", PLAIN).open


@pytest.mark.parametrize(
    ("ids", "ends_in_s", "level", "words"),
    [
        (("site/a",), 86400 * 90, Level.OK, "certificate of spiffe://example.org/site/a, good until"),
        (("site/a",), 3600, Level.WARN, "diloco certs issue DIR --site a"),
        (("site/a",), -60, Level.FAIL, "ended on 2"),
        ((), 86400 * 90, Level.FAIL, "exactly one SPIFFE id is wanted"),
    ],
)
def test_what_this_end_shows_is_judged_here(
    ids: tuple[str, ...], ends_in_s: float, level: Level, words: str, authority: Authority
) -> None:
    uris = [x509.UniformResourceIdentifier(f"spiffe://example.org/{each}") for each in ids]
    cert, key = authority.issue("client", *uris, ends_in_s=ends_in_s)
    [found] = own_files(SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca), "a")
    assert found.level is level
    assert words in found.line()


def test_a_token_is_never_told() -> None:
    [found] = own_files(SecurityOptions(token_file="/secrets/token"), "a")
    assert found.line() == "ok    files       a token, from /secrets/token"
    assert "nothing to show" in own_files(PLAIN, "a")[0].says
