"""What the doctor says on the way to an address, and of the syncer that answers there."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from diloco.doctor import Level, syncer
from diloco.doctor.syncer import Visit, Visitor, Way, own_files, visit, way_to
from diloco.wire.checkup import Checkup, Greeting, Heard, Probed
from diloco.wire.messages import ProbeAnswer, ProbeAsk, Refusal, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.loopback.cluster import free_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

PLAIN = SecurityOptions()
TOKEN = "a-token-of-site-a-0123456789"


@contextmanager
def served(security: SecurityOptions = PLAIN, *, ready: bool = True) -> Iterator[tuple[str, FakeSyncer]]:
    fake = FakeSyncer()
    server = serve(fake, ServerOptions(run_id=RUN), security, ready=ready)
    try:
        yield server.address, fake
    finally:
        server.stop(0.2)


def visitor(run_id: str = RUN, **changes: Any) -> Visitor:
    return Visitor("site-a", ProbeAsk(3, run_id), **({"bytes_each": 1 << 20} | changes))


def visited(address: str, run_id: str = RUN, token: str = "", **changes: Any) -> Visit:
    with Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=5.0)) as checkup:
        return visit(checkup, visitor(run_id, **changes))


def said(found: Visit | Way) -> str:
    return "\n".join(finding.line() for finding in found.findings)


def test_a_syncer_that_is_well_is_told_line_by_line_and_nothing_was_asked_of_its_run() -> None:
    with served() as (address, fake):
        found = visited(address)
    wanted = ["grpc", "run", "rtt", "identity", "protocol", "settings", "clock", "bandwidth"]
    assert [(each.check, each.level.value) for each in found.findings] == [(check, "ok") for check in wanted]
    assert 0 < found.rtt_s < 10
    assert found.up_bytes_per_s > 1e6
    assert found.down_bytes_per_s > 1e6
    assert fake.calls == []


def test_another_run_or_one_that_takes_no_updates_is_told_of() -> None:
    with served() as (address, _):
        found = said(visited(address, "run-2"))
        unsaid = said(visited(address, ""))
    assert f"fail  run         run run-2 is not served there, but run {RUN} -> give the right run or address" in found
    assert f"it serves run {RUN}; give run=NAME to have this site's settings compared" in unsaid
    with served(ready=False) as (address, _):
        assert f"warn  run         it knows run {RUN} and takes no updates at present -> " in said(visited(address))
    found = visited(f"127.0.0.1:{free_port()}")
    assert (found.answered, len(found.findings)) == (False, 1)
    assert said(found).startswith("fail  grpc        Check: ")


@pytest.mark.parametrize(
    ("owner", "token", "words"),
    [
        ("site-a", TOKEN, "ok    identity    it takes us for site/site-a\n"),
        ("site-a", "another-token-012345", "fail  identity    it refuses us: the token is not known -> give"),
        ("site-a", "", "it refuses us: a token is needed"),
        ("site-b", TOKEN, "takes us for site/site-b, but site.id is site-a -> set site.id=site-b, or"),
    ],
)
def test_what_a_token_is_worth(owner: str, token: str, words: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {owner: TOKEN}}))
    tokens.chmod(0o600)
    with served(SecurityOptions(tokens_file=str(tokens))) as (address, _):
        found = visited(address, token=token)
    assert words in said(found)
    assert found.answered


def raises(error: Exception) -> Callable[..., Any]:
    def method(*_: object) -> None:
        raise error

    return method


def probed(ahead_s: float = 0.0, **told: Any) -> Callable[..., Probed]:
    answer = ProbeAnswer(**({"protocol": 3, "protocol_oldest": 2, "run_id": RUN} | told))
    return lambda *_: Probed(answer, 0.1, int(ahead_s * 1e9), None, None)


@pytest.mark.parametrize(
    ("method", "found", "words"),
    [
        ("come_in", raises(Unreachable("Watch: gone")), "fail  identity    it answered before, but not now: Watch: "),
        ("round_trips", lambda *_: [0.1] * 17 + [0.9] * 3, "warn  rtt         a small call takes 100 ms (median of 20"),
        ("probe", raises(Refused(Status.UNIMPLEMENTED, "No!")), "warn  protocol    an earlier release"),
        ("probe", probed(difference="outer.lr is 1.0 at the site"), "fail  settings    outer.lr is 1.0 at the site"),
        ("probe", probed(protocol=2, protocol_oldest=1), "fail  protocol    it speaks 1 to 2, and this end 3 -> insta"),
        ("probe", probed(standby_of="10.0.0.1:7077"), "ok    role        it is the standby of 10.0.0.1:7077\n"),
        ("probe", probed(0.4), "ok    clock       its clock and ours agree to 0.4 s"),
        ("probe", probed(-90.0), "warn  clock       its clock is 90 s behind ours (to 0.05 s): the times in the two"),
        ("probe", probed(4000.0), "fail  clock       its clock is 4e+03 s ahead of ours (to 0.05 s): certificates"),
    ],
)
def test_what_a_syncer_answers_is_told(method: str, found: Callable[..., Any], words: str) -> None:
    answering = type("Answering", (Checkup,), {method: found})
    with served() as (address, _), answering(address, SecurityOptions(), ClientOptions()) as checkup:
        assert words in said(visit(checkup, visitor(limit_s=0.0)))


def test_a_rate_that_may_not_be_measured_is_a_warning() -> None:
    with served() as (address, fake), Checkup(address, SecurityOptions(), ClientOptions()) as checkup:
        found = [visit(checkup, visitor(bytes_each=1 << 16)) for _ in range(4)][-1]
        assert "warn  bandwidth   not measured: Probe: caller is over its limit of probes" in said(found)
        assert " -> ask again in " in said(found)
        fake.probe_fails = Refusal(Status.PERMISSION_DENIED, "site/a may not push, nor send filler")
        assert "it answered before, but not now: site/a may not push" in said(visit(checkup, visitor()))


# --- The way to an address, against real ends on the loopback ---------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def mutual(authority: Authority) -> SecurityOptions:
    cert, key = authority.issue("syncer", *LOOPBACK)
    return SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=True)


def test_a_plain_syncer_is_reached_step_by_step() -> None:
    assert way_to("unix:/run/diloco.sock", PLAIN).open, "a socket of this machine needs no way"
    with served() as (address, _):
        way = way_to(address, PLAIN)
    assert (way.reached, way.open) == (True, True)
    assert [each.check for each in way.findings] == ["dns", "tcp"]
    assert "connects in" in said(way)


def test_a_name_that_is_none_a_closed_port_and_a_silent_one_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer, "GREET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address, words in (
            ("nohost.invalid:7077", ("fail  dns         nohost.invalid does not resolve: ", " -> give the right name")),
            (f"localhost:{free_port()}", ("Connection refused -> start the syncer, or give the port",)),
            (
                f"127.0.0.1:{silent.getsockname()[1]}",
                ("fail  http2       nothing answers, where a syncer speaks HTTP/2 -> it accepts and says nothing",),
            ),
        ):
            way = way_to(address, PLAIN)
            assert (way.reached, way.open) == (False, False)
            assert all(each in said(way) for each in words), said(way)


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
    with served(mutual(authority)) as (address, _):
        way = way_to(address, SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key))
    assert way.open
    assert "TLSv1.3, both ends known, certificate of localhost, 127.0.0.1 by CN=authority, good until" in said(way)
    tls = way.findings[-1]
    assert (tls.check, tls.level) == ("tls", Level.WARN)  # It ends within the hour.
    assert "diloco certs issue DIR --syncer --host 127.0.0.1" in tls.remedy


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no tls", "it speaks TLS, but this end is set to do without -> give site.tls_ca=FILE"),
        ("no certificate", "give site.tls_cert and site.tls_key"),
        ("foreign certificate", "-> have site.tls_cert issued by the authority that the syncer trusts"),
        ("wrong authority", "did not sign the syncer's certificate, CN=authority did: "),
        ("over", "the syncer's certificate ended on 2"),
        ("wrong name", "the syncer's certificate is not for 127.0.0.1: it names syncer.example -> give one of these"),
        ("no tls there", "it does not speak TLS -> leave site.tls_ca out"),
    ],
)
def test_tls_that_does_not_stand_is_told_with_what_to_change(
    case: str, words: str, authority: Authority, tmp_path: Path
) -> None:
    def ends(pair: tuple[str, str], ca: str = "") -> SecurityOptions:
        return SecurityOptions(tls_cert=pair[0], tls_key=pair[1], tls_ca=ca)

    both, other, own = mutual(authority), Authority(tmp_path, "other"), authority.site("site/a")
    over = authority.issue("over", *LOOPBACK, ends_in_s=-60)
    named = authority.issue("named", x509.DNSName("syncer.example"))
    there, here = {
        "no tls": (both, PLAIN),
        "no certificate": (both, SecurityOptions(tls_ca=authority.ca)),
        "foreign certificate": (both, ends(other.site("site/a"), authority.ca)),
        "wrong authority": (both, ends(own, other.ca)),
        "over": (ends(over), ends(own, authority.ca)),
        "wrong name": (ends(named), ends(own, authority.ca)),
        "no tls there": (PLAIN, ends(own, authority.ca)),
    }[case]
    with served(there) as (address, _):
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


@pytest.mark.parametrize(
    ("ids", "ends_in_s", "level", "words"),
    [
        (("site/a",), 86400 * 90, Level.OK, "certificate of spiffe://example.org/site/a, good until"),
        (("site/a",), 3600, Level.WARN, "diloco certs issue DIR --site a"),
        (("site/a",), -60, Level.FAIL, "ended on 2"),
        ((), 86400 * 90, Level.FAIL, "it must have exactly one SPIFFE id"),
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
