"""Identities over real connections: tokens, TLS and permissions, also changed and broken while a server runs."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diloco.deploy import certificates
from diloco.wire.channel import SYNC_SERVICE
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.convert import pack_report
from diloco.wire.handlers import PullSource
from diloco.wire.identity import Identity
from diloco.wire.messages import Outcome, PullAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from diloco.wire.pulling import PullSink
from diloco.wire.server import RunningServer
from tests.wire.certificates import ADMIN, LOOPBACK, OBSERVER, TOKENS, A, Authority, B, written
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, push_header, report_info, serve
from tests.wire.relay import WAIT_S, until_reached, wait_until

NEXT_B = "next-token-of-site-b"
PAYLOAD = b"payload" * 200_000


class Running:
    """A server whose files are changed, and what it said about them."""

    def __init__(self, options: dict[str, Any], **security: Any) -> None:
        self.notes: list[str] = []
        self.syncer = FakeSyncer()
        self.server: RunningServer = serve(
            self.syncer,
            ServerOptions(run_id=RUN, alive_s=0.2, **options),
            SecurityOptions(**security),
            lambda what, why: self.notes.append(why),
        )

    def client(self, site: str = "site-a", **security: Any) -> SyncClient:
        options = ClientOptions(control_timeout_s=10.0, join_timeout_s=10.0)
        return SyncClient(self.server.address, site, RUN, SecurityOptions(**security), options)

    def wait(self, words: str) -> None:
        assert wait_until(lambda: any(words in note for note in self.notes)), f"{words} in {self.notes}"


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(options: dict[str, Any] | None = None, **security: Any) -> Running:
        running.append(Running(options or {}, **security))
        return running[-1]

    yield start
    for each in running:
        each.server.stop(0.2)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return written(tmp_path / "tokens.json")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Follower:
    """A site's Watch stream in a thread."""

    def __init__(self, client: SyncClient) -> None:
        self.events = 0
        self.ended = threading.Event()
        self._stream = client.watch(1)
        next(self._stream)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            for _ in self._stream:
                self.events += 1
        except (Refused, Unreachable):
            pass
        self.ended.set()


def status_of(call: Callable[[], object]) -> Status:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.text
    return caught.value.status


def test_the_right_token_opens_its_own_site(run: Callable[..., Running], tokens: str) -> None:
    here = run(tokens_file=tokens)
    with here.client(token=A) as site:
        assert site.join(join_ask()).incarnation == 1
        assert site.push(push_header(PAYLOAD), PAYLOAD)
        with site.watch(1) as stream:
            next(stream)
        site.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
        with pytest.raises(Refused, match="only an observer, an admin or a standby reads as nobody"):
            site.pull(PullAsk(RUN, "", 0, -1), PullSink())
    assert here.syncer.accepted["site-a", 0, 1] == PAYLOAD


def test_a_wrong_token_or_a_foreign_site_gets_nowhere_and_no_payload_is_read(
    run: Callable[..., Running], tokens: str
) -> None:
    unknown, denied = Status.UNAUTHENTICATED, Status.PERMISSION_DENIED
    for token, status in (("", unknown), ("token-of-no-site-0", unknown), (B, denied), (OBSERVER, denied)):
        here = run(tokens_file=tokens)
        with here.client(token=token) as site:
            calls: list[Callable[[], object]] = [
                lambda site=site: site.join(join_ask()),
                lambda site=site: site.report(report_info()),
                lambda site=site: site.leave(1),
                lambda site=site: list(site.watch(1)),
                lambda site=site: site.pull(PullAsk(RUN, "site-a", 0, -1), PullSink()),
                lambda site=site: site.push(push_header(PAYLOAD), PAYLOAD),
            ]
            assert [status_of(call) for call in calls] == [status] * len(calls)
            assert site.bytes_up < 1000
        assert here.syncer.calls == []
        assert here.server.counters() == {f"refused_{status.lower()}": len(calls)}


def test_one_call_has_one_token(run: Callable[..., Running], tokens: str) -> None:
    raw = pack_report(report_info())
    with grpc.insecure_channel(run(tokens_file=tokens).server.address) as channel:
        call = channel.unary_unary(f"/{SYNC_SERVICE}/Report")
        for values in ([f"Bearer {A}", f"Bearer {A}"], [f"Basic {A}"], [f"bearer {A}"], [A], [f"Bearer  {A}"], [""]):
            with pytest.raises(grpc.RpcError) as caught:
                call(raw, timeout=10, metadata=[("authorization", value) for value in values])
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(raw, timeout=10, metadata=[("authorization", f"Bearer {A}")])


def test_a_site_takes_up_its_own_room_under_whatever_name_it_reads(
    run: Callable[..., Running],
    tmp_path: Path,
    tokens: str,
    aside: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"default": "allow", "sites": {"site-a": {"roles": ["observer"]}}}
    here = run({"pulls_per_site_max": 1}, tokens_file=tokens, permissions=written(tmp_path / "p", table))
    inside, go_on = threading.Event(), threading.Event()
    answer, first = here.syncer.pull, [True]

    def wait_once(ask: PullAsk, identity: Identity) -> PullSource:
        if first and first.pop():
            inside.set()
            assert go_on.wait(WAIT_S)
        return answer(ask, identity)

    monkeypatch.setattr(here.syncer, "pull", wait_once)
    with here.client(token=A) as site, here.client("", token=OBSERVER) as observer:
        unnamed, itself = PullAsk(RUN, "", 0, -1), PullAsk(RUN, "site-a", 0, -1)
        held = aside(site.pull, unnamed, PullSink())
        try:
            assert inside.wait(WAIT_S)
            with pytest.raises(Unreachable, match="no room for one more pull of this caller"):
                site.pull(itself, PullSink())
            observer.pull(unnamed, PullSink())
        finally:
            go_on.set()
        held.result(WAIT_S)
        site.pull(itself, PullSink())


def test_strangers_may_ask_for_health_and_nothing_else(run: Callable[..., Running], tokens: str) -> None:
    with grpc.insecure_channel(run(tokens_file=tokens).server.address) as channel:
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


def test_permissions_hold_for_tokens_too(run: Callable[..., Running], tmp_path: Path, tokens: str) -> None:
    table = {"default": "deny", "sites": {"site-a": {"update_bytes_max": 5}, "site-b": {"roles": ["observer"]}}}
    here = run(tokens_file=tokens, permissions=written(tmp_path / "p", table))
    with here.client("site-a", token=A) as client:
        assert status_of(lambda: client.push(push_header(b"sixsix"), b"sixsix")) is Status.PERMISSION_DENIED
        assert client.push(push_header(b"fives"), b"fives")
        client.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
        assert status_of(lambda: client.pull(PullAsk(RUN, "", 0, -1), PullSink())) is Status.PERMISSION_DENIED
    with here.client("site-b", token=B) as client:
        client.pull(PullAsk(RUN, "", 0, -1), PullSink())
    with AdminClient(here.server.address, SecurityOptions(token=B)) as both:
        assert both.status()
        assert status_of(both.drain) is Status.PERMISSION_DENIED
    with AdminClient(here.server.address, SecurityOptions(token=ADMIN)) as admin:
        assert status_of(admin.status) is Status.PERMISSION_DENIED, "the file lists no role"


def test_a_token_that_is_removed_ends_its_streams_and_opens_nothing_more(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    here = run(tokens_file=written(file))
    with here.client(token=A) as first, here.client("site-b", token=B) as second:
        stays, goes = Follower(first), Follower(second)
        written(file, {**TOKENS, "sites": {"site-a": A}})
        assert goes.ended.wait(WAIT_S)
        assert status_of(lambda: second.join(join_ask(site_id="site-b"))) is Status.UNAUTHENTICATED
        here.wait("calls of site/site-b were ended: the token is not known any more")
        seen = stays.events
        assert wait_until(lambda: stays.events > seen), "the other site's stream goes on"
        assert first.join(join_ask())


def test_one_token_follows_another_without_a_gap(run: Callable[..., Running], tmp_path: Path) -> None:
    file, own = tmp_path / "tokens.json", tmp_path / "own"
    here = run(tokens_file=written(file))
    with here.client("site-b", token_file=written(own, B)) as client:
        follower = Follower(client)
        written(file, {**TOKENS, "sites": {"site-a": A, "site-b": [B, NEXT_B]}})
        here.wait("tokens_file was read again")
        written(own, NEXT_B)
        assert client.join(join_ask(site_id="site-b"))
        assert not follower.ended.is_set()
        written(file, {**TOKENS, "sites": {"site-a": A, "site-b": NEXT_B}})
        assert follower.ended.wait(WAIT_S), "it began with the token that is no more"
        assert client.join(join_ask(site_id="site-b"))


def test_a_broken_file_leaves_the_one_before_it_in_force_and_says_so(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    file, table = tmp_path / "tokens.json", tmp_path / "permissions.json"
    here = run(tokens_file=written(file), permissions=written(table, {"default": "allow"}))
    with here.client(token=A) as client:
        follower = Follower(client)
        written(file, '{"sites": {"site-a": "token-of')
        here.wait("tokens_file cannot be used, what was read before stays in force: tokens_file")
        written(table, {"default": "perhaps"})
        here.wait("permissions cannot be used")
        assert client.join(join_ask())
        assert not follower.ended.is_set()
        assert [text.split()[0] for text in here.server.complaints()] == ["tokens_file", "permissions"]
        assert not any(A in note for note in here.notes)
        written(file)
        written(table, {"default": "deny"})
        assert follower.ended.wait(WAIT_S)
        assert status_of(lambda: client.join(join_ask())) is Status.PERMISSION_DENIED
    assert here.server.complaints() == []


def serving(authority: Authority, *, mutual: bool = True) -> dict[str, Any]:
    cert, key = authority.issue("syncer", *LOOPBACK)
    own: dict[str, Any] = {"tls_cert": cert, "tls_key": key}
    return own | ({"tls_ca": authority.ca, "require_client_cert": True} if mutual else {})


def shown(authority: Authority, *ids: str) -> dict[str, str]:
    cert, key = authority.site(*ids)
    return {"tls_ca": authority.ca, "tls_cert": cert, "tls_key": key}


def test_tls_with_a_token(run: Callable[..., Running], authority: Authority, tokens: str) -> None:
    here = run(**serving(authority, mutual=False), tokens_file=tokens)
    with here.client(token=A, tls_ca=authority.ca) as site:
        assert site.join(join_ask())
        assert site.push(push_header(PAYLOAD), PAYLOAD)
    with here.client(token=B, tls_ca=authority.ca) as foreign:
        assert status_of(lambda: foreign.join(join_ask())) is Status.PERMISSION_DENIED


def test_ends_that_do_not_trust_one_another_or_speak_another_language_never_meet(
    run: Callable[..., Running], authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    tls, mutual = run(**serving(authority, mutual=False)), run(**serving(authority))
    for here, security in (
        (run(), {"tls_ca": authority.ca}),
        (tls, {}),
        (tls, {"tls_ca": stranger.ca}),
        (mutual, {"tls_ca": authority.ca}),
        (mutual, shown(stranger, "site/site-a") | {"tls_ca": authority.ca}),
    ):
        with here.client(**security) as site, pytest.raises(Unreachable):
            site.join(join_ask())
        assert here.syncer.calls == []
        assert here.server.counters() == {}


def test_the_certificate_says_who_a_site_is(run: Callable[..., Running], authority: Authority) -> None:
    here = run(**serving(authority))
    with here.client(**shown(authority, "site/site-a")) as site:
        assert site.join(join_ask())
        assert status_of(lambda: site.join(join_ask(site_id="site-b"))) is Status.PERMISSION_DENIED
    with AdminClient(here.server.address, SecurityOptions(**shown(authority, "admin"))) as admin:
        admin.drain()
    with AdminClient(here.server.address, SecurityOptions(**shown(authority, "observer"))) as observer:
        assert observer.status()
        assert status_of(observer.drain) is Status.PERMISSION_DENIED
    assert here.syncer.calls == ["join", "drain", "status"]


def test_a_certificate_without_exactly_one_known_id_of_the_trust_domain_proves_nothing(
    run: Callable[..., Running], authority: Authority
) -> None:
    here, elsewhere = (run(**serving(authority), trust_domain=f"example.{end}") for end in ("org", "com"))
    bad = [(), ("site/site-a", "admin"), ("sites/site-a",), ("site/",), ("site/a b",)]
    good = ("site/site-a",)
    for server, ids in (*((here, ids) for ids in bad), (elsewhere, good)):
        with server.client(**shown(authority, *ids)) as site:
            assert status_of(lambda site=site: site.join(join_ask())) is Status.UNAUTHENTICATED
    with here.client(**shown(authority, *good)) as site:
        assert site.join(join_ask())


def test_token_and_certificate_must_name_the_same_caller(
    run: Callable[..., Running], authority: Authority, tokens: str
) -> None:
    here = run(**serving(authority), tokens_file=tokens)
    shows = shown(authority, "site/site-a")
    with here.client(**shows, token=A) as site:
        assert site.join(join_ask())
    with here.client(**shows, token=B) as site:
        assert status_of(lambda: site.join(join_ask(site_id="site-b"))) is Status.UNAUTHENTICATED


def fingerprint(cert: str) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(Path(cert).read_text())).hexdigest()


def test_a_revoked_certificate_ends_its_streams_and_another_of_the_same_site_is_good(
    run: Callable[..., Running], tmp_path: Path, authority: Authority
) -> None:
    file = tmp_path / "revoked.json"
    here = run(**serving(authority), revoked_file=written(file, {"certificates": []}))
    shows = shown(authority, "site/site-a")
    with here.client(**shows) as client:
        follower = Follower(client)
        written(file, {"certificates": [fingerprint(shows["tls_cert"])]})
        assert follower.ended.wait(WAIT_S)
        assert status_of(lambda: client.join(join_ask())) is Status.UNAUTHENTICATED
        here.wait("this certificate of site/site-a was revoked")
    with here.client(**shown(authority, "site/site-a")) as client:
        follower = Follower(client)
        written(file, {"ids": ["site/site-a"]})
        assert follower.ended.wait(WAIT_S), "a whole identity was revoked"


@pytest.fixture
def successor(tmp_path: Path) -> Authority:
    """Another authority of the same name."""
    (tmp_path / "next").mkdir()
    return Authority(tmp_path / "next")


def test_a_new_connection_sees_the_new_certificate_and_an_old_one_lives_on(
    run: Callable[..., Running], authority: Authority, successor: Authority
) -> None:
    files = serving(authority)
    here = run(**files)
    with here.client(**shown(authority, "site/site-a")) as client:
        follower = Follower(client)
        cert, key = successor.issue("syncer", *LOOPBACK)
        shutil.copy(cert, files["tls_cert"])  # For a moment they do not fit, and that is said and survived.
        here.wait("are no certificate and its key")
        shutil.copy(key, files["tls_key"])
        assert wait_until(lambda: here.server.complaints() == []), "certificate and key fit again"
        later = shown(authority, "site/site-a") | {"tls_ca": successor.ca}
        with here.client(**later) as other:
            assert other.join(join_ask())
        seen = follower.events
        assert wait_until(lambda: follower.events > seen), "the old connection goes on"


@pytest.mark.slow
def test_a_certificate_is_looked_at_again_though_its_connection_lives(
    run: Callable[..., Running], tmp_path: Path, authority: Authority, successor: Authority
) -> None:
    """As it is when it has ended: here its authority is no longer the one that counts."""
    files = serving(authority)
    here = run({"connection_age_s": 3.0}, **files)
    shows = shown(authority, "site/site-a")
    kept = tmp_path / "kept.pem"
    shutil.copy(authority.ca, kept)  # What the site itself trusts does not change.
    with here.client(**shows | {"tls_ca": str(kept)}) as client:
        follower = Follower(client)
        shutil.copy(successor.ca, files["tls_ca"])
        here.wait("was read again")
        assert follower.ended.wait(WAIT_S)

        def is_shut_out() -> bool:
            try:
                client.join(join_ask())
            except Unreachable:
                return True
            return False

        assert wait_until(is_shut_out), "no new call on what counts no more"


def test_a_site_shows_its_new_certificate_when_it_comes_back(
    run: Callable[..., Running], authority: Authority, successor: Authority
) -> None:
    here, shows = run(**serving(authority)), shown(authority, "site/site-a")
    with here.client(**shows) as client:
        assert client.join(join_ask())
        here.server.stop(0.2)
        run({"address": here.server.address}, **serving(successor))
        with pytest.raises(Unreachable):
            client.join(join_ask())  # Its certificate is of an authority that counts no more.
        for name, path in shown(successor, "site/site-a").items():
            shutil.copy(path, shows[name])
        assert until_reached(lambda: client.join(join_ask())).incarnation > 0


class Pusher:
    """A site that pushes one update after another in a thread, and tries again where the syncer is not reached."""

    def __init__(self, client: SyncClient, site: str) -> None:
        self._client, self._site = client, site
        self.pushed = 0
        self.refused: list[Refused] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            payload = f"{self._site} {self.pushed} ".encode() * 20_000
            try:
                answer = self._client.push(push_header(payload, site_id=self._site, sequence=self.pushed + 1), payload)
                assert answer.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE)
                self.pushed += 1
            except Unreachable:
                self._stopping.wait(0.02)
            except Refused as error:
                self.refused.append(error)
                return

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)


@pytest.mark.slow
def test_an_authority_is_replaced_while_sites_push(run: Callable[..., Running], tmp_path: Path) -> None:
    """Both authorities count, then every end shows what the new one has signed, then the old one counts no more.

    They are those of ``diloco certs init``, and so have one name.
    """
    now = datetime.datetime.now(datetime.UTC)
    old, new = (certificates.make_authority("diloco", now) for _ in range(2))
    trusted, names = tmp_path / "trusted.pem", ("site-a", "site-b", "site-c")

    def put(authority: certificates.Pair, who: str, *hosts: str) -> dict[str, str]:
        """Write what ``authority`` signs for ``who`` over what was there; the files, by setting."""
        pair = certificates.issue(authority, who, hosts, 1, now)
        key, cert = (tmp_path / f"{who.replace('/', '-')}.{kind}" for kind in ("key", "pem"))
        return {
            "tls_key": written(key, pair.key.decode()),
            "tls_cert": written(cert, pair.certificate.decode()),
            "tls_ca": str(trusted),
        }

    written(trusted, old.certificate.decode())
    here = run({"connection_age_s": 1.0}, **put(old, "syncer", "127.0.0.1"), require_client_cert=True)
    with contextlib.ExitStack() as stack:
        pushers = []
        for name in names:
            client = stack.enter_context(here.client(name, **put(old, f"site/{name}")))
            pushers.append(Pusher(client, name))
            stack.callback(pushers[-1].stop)

        def all_go_on(what: str) -> None:
            """Also over connections that began after this: the server ends each at its age."""
            before, since_s = [each.pushed for each in pushers], time.monotonic()
            assert wait_until(
                lambda: (
                    time.monotonic() > since_s + 2.5
                    and all(each.pushed > so_far + 20 for each, so_far in zip(pushers, before, strict=True))
                ),
                seconds=30.0,
            ), f"every site pushes with {what}"

        all_go_on("the old authority")
        written(trusted, (old.certificate + new.certificate).decode())
        all_go_on("both authorities")
        for name in names:
            put(new, f"site/{name}")
        put(new, "syncer", "127.0.0.1")
        all_go_on("the new certificates")
        written(trusted, new.certificate.decode())
        all_go_on("the new authority alone")
        assert [error for each in pushers for error in each.refused] == []
    assert here.server.complaints() == []
