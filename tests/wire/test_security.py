from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.convert import pack_report
from diloco.wire.identity import read_tokens
from diloco.wire.messages import PullAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions, is_loopback
from diloco.wire.pulling import PullSink
from diloco.wire.server import RunningServer
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, push_header, report_info, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diloco.wire.handlers import PullSource
    from diloco.wire.identity import Identity

A, B, OBSERVER, ADMIN = "token-of-site-a-1", "token-of-site-b-2", "token-of-observer", "token-of-operator"
PAYLOAD = b"payload" * 200_000
TOKENS = {"sites": {"site-a": A, "site-b": B}, "observer": OBSERVER, "admin": ADMIN}


@pytest.fixture
def syncer() -> FakeSyncer:
    return FakeSyncer()


@pytest.fixture
def run(syncer: FakeSyncer) -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def start(**security: Any) -> RunningServer:
        servers.append(serve(syncer, ServerOptions(run_id=RUN), SecurityOptions(**security)))
        return servers[-1]

    yield start
    for server in servers:
        server.stop(0.2)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return written(tmp_path, TOKENS)


def written(folder: Path, table: object, mode: int = 0o600) -> str:
    path = folder / "tokens.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    path.chmod(mode)
    return str(path)


def client(server: RunningServer, site: str = "site-a", **security: Any) -> SyncClient:
    options = ClientOptions(control_timeout_s=10.0, join_timeout_s=10.0)
    return SyncClient(server.address, site, RUN, SecurityOptions(**security), options)


def status_of(call: Callable[[], object]) -> Status:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.text
    return caught.value.status


def test_the_right_token_opens_its_own_site(run: Callable[..., RunningServer], tokens: str, syncer: FakeSyncer) -> None:
    with client(run(tokens_file=tokens), token=A) as site:
        assert site.join(join_ask()).incarnation == 1
        assert site.push(push_header(PAYLOAD), PAYLOAD)
        with site.watch(1) as stream:
            next(stream)
        site.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
        with pytest.raises(Refused, match="only an observer, an admin or a standby reads as nobody"):
            site.pull(PullAsk(RUN, "", 0, -1), PullSink())
    assert syncer.accepted["site-a", 0, 1] == PAYLOAD


@pytest.mark.parametrize(
    ("token", "status"),
    [
        ("", "UNAUTHENTICATED"),
        ("token-of-nobody-0", "UNAUTHENTICATED"),
        (B, "PERMISSION_DENIED"),
        (OBSERVER, "PERMISSION_DENIED"),
        (ADMIN, "PERMISSION_DENIED"),
    ],
)
def test_a_wrong_token_or_a_foreign_site_gets_nowhere_and_no_payload_is_read(
    run: Callable[..., RunningServer], tokens: str, syncer: FakeSyncer, token: str, status: str
) -> None:
    server = run(tokens_file=tokens)
    with client(server, token=token) as site:
        calls: list[Callable[[], object]] = [
            lambda: site.join(join_ask()),
            lambda: site.report(report_info()),
            lambda: site.leave(1),
            lambda: list(site.watch(1)),
            lambda: site.pull(PullAsk(RUN, "site-a", 0, -1), PullSink()),
            lambda: site.push(push_header(PAYLOAD), PAYLOAD),
        ]
        assert [status_of(call) for call in calls] == [Status(status)] * len(calls)
        assert site.bytes_up < 1000
    assert syncer.calls == []
    assert server.counters() == {f"refused_{status.lower()}": len(calls)}


def test_one_call_has_one_token(run: Callable[..., RunningServer], tokens: str) -> None:
    raw = pack_report(report_info())
    with grpc.insecure_channel(run(tokens_file=tokens).address) as channel:
        call = channel.unary_unary(f"/{SYNC_SERVICE}/Report")
        for values in ([f"Bearer {A}", f"Bearer {A}"], [f"Basic {A}"], [f"bearer {A}"], [A], [f"Bearer  {A}"], [""]):
            with pytest.raises(grpc.RpcError) as caught:
                call(raw, timeout=10, metadata=[("authorization", value) for value in values])
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(raw, timeout=10, metadata=[("authorization", f"Bearer {A}")])


def test_roles(run: Callable[..., RunningServer], tokens: str, syncer: FakeSyncer) -> None:
    server = run(tokens_file=tokens)
    security = {name: SecurityOptions(token=token) for name, token in (("a", A), ("o", OBSERVER), ("x", ADMIN))}
    with AdminClient(server.address, security["a"]) as site:
        for call in (site.status, site.drain, site.snapshot, lambda: site.evict("site-b")):
            assert status_of(call) is Status.PERMISSION_DENIED
    with AdminClient(server.address, security["o"]) as observer:
        assert observer.status()
        for call in (observer.drain, observer.snapshot, lambda: observer.evict("site-b")):
            assert status_of(call) is Status.PERMISSION_DENIED
    with AdminClient(server.address, security["x"]) as admin:
        admin.status()
        admin.drain()
        admin.evict("site-b")
        admin.snapshot()
    with client(server, "", token=OBSERVER) as observer_pulls:
        observer_pulls.pull(PullAsk(RUN, "", 0, -1), PullSink())
    assert syncer.calls == ["status", "status", "drain", "evict site-b", "snapshot", "pull"]


def test_a_site_takes_up_its_own_room_under_whatever_name_it_reads(
    tmp_path: Path, tokens: str, syncer: FakeSyncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"default": "allow", "sites": {"site-a": {"roles": ["observer"]}}}
    permissions = tmp_path / "permissions.json"
    permissions.write_text(json.dumps(table))
    inside, go_on = threading.Event(), threading.Event()
    pull, first = syncer.pull, [True]

    def wait_once(ask: PullAsk, identity: Identity) -> PullSource:
        if first and first.pop():
            inside.set()
            assert go_on.wait(20.0)
        return pull(ask, identity)

    monkeypatch.setattr(syncer, "pull", wait_once)
    security = SecurityOptions(tokens_file=tokens, permissions=str(permissions))
    server = serve(syncer, ServerOptions(run_id=RUN, pulls_per_site_max=1), security)
    try:
        with client(server, token=A) as site, client(server, "", token=OBSERVER) as observer:
            nobody, itself = PullAsk(RUN, "", 0, -1), PullAsk(RUN, "site-a", 0, -1)
            held = threading.Thread(target=lambda: site.pull(nobody, PullSink()))
            held.start()
            assert inside.wait(20.0)
            with pytest.raises(Unreachable, match="no room for one more pull of this caller"):
                site.pull(itself, PullSink())
            observer.pull(nobody, PullSink())
            go_on.set()
            held.join(20.0)
            site.pull(itself, PullSink())
    finally:
        go_on.set()
        server.stop(0.2)


def test_strangers_may_ask_for_health_and_nothing_else(run: Callable[..., RunningServer], tokens: str) -> None:
    with grpc.insecure_channel(run(tokens_file=tokens).address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        for call in (
            lambda: list(reflection.ServerReflectionInfo(iter([ask]), timeout=10)),
            lambda: list(health.Watch(health_pb2.HealthCheckRequest(), timeout=10)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("table", "mode", "words"),
    [
        (TOKENS, 0o644, "chmod 600"),
        ("{", 0o600, "not JSON"),
        ([], 0o600, "wanted an object"),
        ({"site": {}}, 0o600, "wanted an object"),
        ({"sites": {"site-a": "short"}}, 0o600, "the token of site-a"),
        ({"admin": "token of an operator"}, 0o600, "the token of admin"),
        ({"sites": {"site-a": A, "site-b": A}}, 0o600, "given twice"),
    ],
)
def test_a_tokens_file_that_cannot_be_is_refused_in_words(tmp_path: Path, table: Any, mode: int, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_tokens(written(tmp_path, table, mode))
    assert A not in str(caught.value)


def test_what_a_site_shows_is_in_no_text_of_its_options() -> None:
    assert A not in repr(SecurityOptions(token=A))


# --- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls(authority: Authority) -> dict[str, str]:
    cert, key = authority.issue("syncer", *LOOPBACK)
    return {"tls_cert": cert, "tls_key": key}


def test_tls_with_a_token(run: Callable[..., RunningServer], authority: Authority, tokens: str) -> None:
    server = run(**tls(authority), tokens_file=tokens)
    with client(server, token=A, tls_ca=authority.ca) as site:
        assert site.join(join_ask())
        assert site.push(push_header(PAYLOAD), PAYLOAD)
    with client(server, token=B, tls_ca=authority.ca) as foreign:
        assert status_of(lambda: foreign.join(join_ask())) is Status.PERMISSION_DENIED


def test_plaintext_or_another_authority_fails_at_a_tls_port(
    run: Callable[..., RunningServer], authority: Authority, tmp_path: Path, syncer: FakeSyncer
) -> None:
    server = run(**tls(authority))
    for security in ({}, {"tls_ca": Authority(tmp_path, "stranger").ca}):
        with client(server, **security) as site, pytest.raises(Unreachable):
            site.join(join_ask())
    assert syncer.calls == []


def test_tls_towards_a_plaintext_port_fails(run: Callable[..., RunningServer], authority: Authority) -> None:
    with client(run(), tls_ca=authority.ca) as site, pytest.raises(Unreachable):
        site.join(join_ask())


def mutual(authority: Authority) -> dict[str, Any]:
    return {**tls(authority), "tls_ca": authority.ca, "require_client_cert": True}


def shown(authority: Authority, *ids: str) -> dict[str, Any]:
    cert, key = authority.site(*ids)
    return {"tls_ca": authority.ca, "tls_cert": cert, "tls_key": key}


def test_the_certificate_says_who_a_site_is(
    run: Callable[..., RunningServer], authority: Authority, syncer: FakeSyncer
) -> None:
    server = run(**mutual(authority))
    with client(server, **shown(authority, "site/site-a")) as site:
        assert site.join(join_ask())
        assert status_of(lambda: site.join(join_ask(site_id="site-b"))) is Status.PERMISSION_DENIED
    with AdminClient(server.address, SecurityOptions(**shown(authority, "admin"))) as admin:
        admin.drain()
    with AdminClient(server.address, SecurityOptions(**shown(authority, "observer"))) as observer:
        assert observer.status()
        assert status_of(observer.drain) is Status.PERMISSION_DENIED
    assert syncer.calls == ["join", "drain", "status"]


@pytest.mark.parametrize("ids", [(), ("site/site-a", "admin"), ("sites/site-a",), ("site/",), ("site/a b",)])
def test_a_certificate_without_exactly_one_known_id_is_nobodys(
    run: Callable[..., RunningServer], authority: Authority, ids: tuple[str, ...]
) -> None:
    server = run(**mutual(authority))
    with client(server, **shown(authority, *ids)) as site:
        assert status_of(lambda: site.join(join_ask())) is Status.UNAUTHENTICATED


def test_without_a_certificate_or_with_a_strangers_no_call_arrives(
    run: Callable[..., RunningServer], authority: Authority, tmp_path: Path, syncer: FakeSyncer
) -> None:
    server = run(**mutual(authority))
    stranger = shown(Authority(tmp_path, "stranger"), "site/site-a") | {"tls_ca": authority.ca}
    for security in ({"tls_ca": authority.ca}, stranger):
        with client(server, **security) as site, pytest.raises(Unreachable):
            site.join(join_ask())
    assert syncer.calls == []
    assert server.counters() == {}


def test_token_and_certificate_must_name_the_same_caller(
    run: Callable[..., RunningServer], authority: Authority, tokens: str
) -> None:
    server = run(**mutual(authority), tokens_file=tokens)
    shows = shown(authority, "site/site-a")
    with client(server, **shows, token=A) as site:
        assert site.join(join_ask())
    with client(server, **shows, token=B) as site:
        assert status_of(lambda: site.join(join_ask(site_id="site-b"))) is Status.UNAUTHENTICATED


# --- what is refused in words before anything starts -----------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7000", "example.org:7000", ":7000"])
def test_a_reachable_address_needs_tls_and_identities(
    address: str, syncer: FakeSyncer, authority: Authority, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **wanted: [("192.0.2.1", 7000)])
    options = ServerOptions(run_id=RUN, address=address)
    with pytest.raises(ValueError, match="there is no TLS"):
        serve(syncer, options, SecurityOptions(tokens_file=tokens))
    with pytest.raises(ValueError, match="cannot be told apart"):
        serve(syncer, options, SecurityOptions(**tls(authority)))


@pytest.mark.parametrize("host", ["nohost.invalid", "a..b", "10.1.2.300"])
@pytest.mark.parametrize("insecure", [False, True])
def test_a_name_that_does_not_resolve_is_no_reason_to_switch_protection_off(
    syncer: FakeSyncer, host: str, insecure: bool
) -> None:
    options = ServerOptions(run_id=RUN, address=f"{host}:7000")
    with pytest.raises(ValueError, match=f"address is '{host}:7000': {host} does not resolve here") as caught:
        serve(syncer, options, SecurityOptions(insecure_non_loopback=insecure))
    assert "insecure" not in str(caught.value)


def test_a_reachable_address_can_be_had_by_saying_so(syncer: FakeSyncer, authority: Authority, tokens: str) -> None:
    options = ServerOptions(run_id=RUN, address="0.0.0.0:0")
    for security in (
        SecurityOptions(insecure_non_loopback=True),
        SecurityOptions(**tls(authority), tokens_file=tokens),
        SecurityOptions(**mutual(authority)),
    ):
        serve(syncer, options, security).stop(0.1)


def test_a_token_does_not_travel_unencrypted() -> None:
    with pytest.raises(ValueError, match="unencrypted"):
        SyncClient("example.org:7000", "site-a", RUN, SecurityOptions(token=A))
    SyncClient("example.org:7000", "site-a", RUN, SecurityOptions(token=A, insecure_non_loopback=True)).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_cert": "x"}, "both or neither"),
        ({"require_client_cert": True, "tls_ca": "x"}, "require_client_cert"),
        ({"require_client_cert": True, "tls_cert": "x", "tls_key": "y", "tls_ca": "system"}, "must name the file"),
        ({"token": "two words"}, "token holds"),
    ],
)
def test_switches_that_do_not_fit_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SecurityOptions(**options)


def test_loopback_is_what_it_says() -> None:
    assert all(map(is_loopback, ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/tmp/x")))
    assert not any(map(is_loopback, ("0.0.0.0:1", "[::]:1", ":1", "127.0.0.1.example.org:1", "10.0.0.1:1")))
