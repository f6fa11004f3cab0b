"""Identities taken back, files replaced and files broken while a server runs."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import shutil
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diloco.deploy import certificates
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import Outcome, PullAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from diloco.wire.pulling import PullSink
from diloco.wire.server import RunningServer
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, push_header, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOUND_S = 30.0
A, B, NEXT_B, ADMIN = "token-of-site-a-1", "token-of-site-b-2", "next-token-of-site-b", "token-of-operator"
TOKENS: dict[str, Any] = {"sites": {"site-a": A, "site-b": B}, "admin": ADMIN}


class Running:
    """A server whose files are changed, and what it said about them."""

    def __init__(self, connection_age_s: float = 3600.0, **security: Any) -> None:
        self.notes: list[str] = []
        self.syncer = FakeSyncer()
        options = ServerOptions(run_id=RUN, alive_s=0.2, connection_age_s=connection_age_s)
        self.server: RunningServer = serve(
            self.syncer, options, SecurityOptions(**security), lambda what, why: self.notes.append(why)
        )

    def client(self, site: str, **security: Any) -> SyncClient:
        options = ClientOptions(control_timeout_s=10.0, join_timeout_s=10.0)
        return SyncClient(self.server.address, site, RUN, SecurityOptions(**security), options)

    def wait(self, words: str) -> None:
        eventually(lambda: any(words in note for note in self.notes), f"{words} in {self.notes}")


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []
    yield lambda **security: running.append(Running(**security)) or running[-1]  # type: ignore[func-returns-value]
    for each in running:
        each.server.stop(0.2)


def eventually(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until_s, f"not in {BOUND_S} s: {what}"
        time.sleep(0.02)


def written(path: Path, table: object) -> str:
    beside = path.with_suffix(".new")
    beside.write_text(table if isinstance(table, str) else json.dumps(table))
    beside.chmod(0o600)
    beside.replace(path)
    return str(path)


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
    return caught.value.status


def test_a_token_that_is_removed_ends_its_streams_and_opens_nothing_more(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    here = run(tokens_file=written(file, TOKENS))
    with here.client("site-a", token=A) as first, here.client("site-b", token=B) as second:
        stays, goes = Follower(first), Follower(second)
        written(file, {**TOKENS, "sites": {"site-a": A}})
        assert goes.ended.wait(BOUND_S)
        assert status_of(lambda: second.join(join_ask(site_id="site-b"))) is Status.UNAUTHENTICATED
        here.wait("calls of site/site-b were ended: the token is not known any more")
        seen = stays.events
        eventually(lambda: stays.events > seen, "the other site's stream goes on")
        assert first.join(join_ask())


def test_one_token_follows_another_without_a_gap(run: Callable[..., Running], tmp_path: Path) -> None:
    file, own = tmp_path / "tokens.json", tmp_path / "own"
    here = run(tokens_file=written(file, TOKENS))
    with here.client("site-b", token_file=written(own, B)) as client:
        follower = Follower(client)
        written(file, {**TOKENS, "sites": {"site-a": A, "site-b": [B, NEXT_B]}})
        here.wait("tokens_file was read again")
        written(own, NEXT_B)
        assert client.join(join_ask(site_id="site-b"))
        assert not follower.ended.is_set()
        written(file, {**TOKENS, "sites": {"site-a": A, "site-b": NEXT_B}})
        assert follower.ended.wait(BOUND_S), "it began with the token that is no more"
        assert client.join(join_ask(site_id="site-b"))


def test_a_broken_file_leaves_the_one_before_it_in_force_and_says_so(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    file, table = tmp_path / "tokens.json", tmp_path / "permissions.json"
    here = run(tokens_file=written(file, TOKENS), permissions=written(table, {"default": "allow"}))
    with here.client("site-a", token=A) as client:
        follower = Follower(client)
        written(file, '{"sites": {"site-a": "token-of')
        here.wait("tokens_file cannot be used, what was read before stays in force: tokens_file")
        written(table, {"default": "perhaps"})
        here.wait("permissions cannot be used")
        assert client.join(join_ask())
        assert not follower.ended.is_set()
        assert [text.split()[0] for text in here.server.complaints()] == ["tokens_file", "permissions"]
        assert not any(A in note for note in here.notes)
        written(file, TOKENS)
        written(table, {"default": "deny"})
        assert follower.ended.wait(BOUND_S)
        assert status_of(lambda: client.join(join_ask())) is Status.PERMISSION_DENIED
    assert here.server.complaints() == []


def test_permissions_hold_for_tokens_too(run: Callable[..., Running], tmp_path: Path) -> None:
    table = {"default": "deny", "sites": {"site-a": {"update_bytes_max": 5}, "site-b": {"roles": ["observer"]}}}
    here = run(tokens_file=written(tmp_path / "t", TOKENS), permissions=written(tmp_path / "p", table))
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


# --- certificates --------------------------------------------------------------------------------------------------


def shown(authority: Authority, *ids: str) -> dict[str, str]:
    cert, key = authority.site(*ids)
    return {"tls_ca": authority.ca, "tls_cert": cert, "tls_key": key}


def fingerprint(cert: str) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(Path(cert).read_text())).hexdigest()


def serving(authority: Authority) -> dict[str, Any]:
    cert, key = authority.issue("syncer", *LOOPBACK)
    return {"tls_cert": cert, "tls_key": key, "tls_ca": authority.ca, "require_client_cert": True}


def test_a_revoked_certificate_ends_its_streams_and_another_of_the_same_site_is_good(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    authority, file = Authority(tmp_path), tmp_path / "revoked.json"
    here = run(**serving(authority), revoked_file=written(file, {"certificates": []}))
    shows = shown(authority, "site/site-a")
    with here.client("site-a", **shows) as client:
        follower = Follower(client)
        written(file, {"certificates": [fingerprint(shows["tls_cert"])]})
        assert follower.ended.wait(BOUND_S)
        assert status_of(lambda: client.join(join_ask())) is Status.UNAUTHENTICATED
        here.wait("this certificate of site/site-a was revoked")
    with here.client("site-a", **shown(authority, "site/site-a")) as client:
        follower = Follower(client)
        written(file, {"ids": ["site/site-a"]})
        assert follower.ended.wait(BOUND_S), "a whole identity was revoked"


def test_only_one_trust_domain_counts_where_one_is_named(run: Callable[..., Running], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for domain, good in (("example.org", True), ("example.com", False)):
        here = run(**serving(authority), trust_domain=domain)
        with here.client("site-a", **shown(authority, "site/site-a")) as client:
            if good:
                assert client.join(join_ask())
            else:
                assert status_of(lambda: client.join(join_ask())) is Status.UNAUTHENTICATED


def test_a_new_connection_sees_the_new_certificate_and_an_old_one_lives_on(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "next").mkdir()
    authority, successor = Authority(tmp_path), Authority(tmp_path / "next")
    files = serving(authority)
    here = run(**files)
    with here.client("site-a", **shown(authority, "site/site-a")) as client:
        follower = Follower(client)
        cert, key = successor.issue("syncer", *LOOPBACK)
        shutil.copy(cert, files["tls_cert"])  # For a moment they do not fit, and that is said and survived.
        here.wait("are no certificate and its key")
        shutil.copy(key, files["tls_key"])
        eventually(lambda: here.server.complaints() == [], "certificate and key fit again")
        later = shown(authority, "site/site-a") | {"tls_ca": successor.ca}
        with here.client("site-a", **later) as other:
            assert other.join(join_ask())
        seen = follower.events
        eventually(lambda: follower.events > seen, "the old connection goes on")


@pytest.mark.slow
def test_a_certificate_is_looked_at_again_though_its_connection_lives(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    """As it is when it has ended: here its authority is no longer the one that counts."""
    (tmp_path / "next").mkdir()
    authority, successor = Authority(tmp_path), Authority(tmp_path / "next")
    files = serving(authority)
    here = run(**files, connection_age_s=3.0)
    shows = shown(authority, "site/site-a")
    kept = tmp_path / "kept.pem"
    shutil.copy(authority.ca, kept)  # What the site itself trusts does not change.
    with here.client("site-a", **shows | {"tls_ca": str(kept)}) as client:
        follower = Follower(client)
        shutil.copy(successor.ca, files["tls_ca"])
        here.wait("was read again")
        assert follower.ended.wait(BOUND_S)

        def is_shut_out() -> bool:
            try:
                client.join(join_ask())
            except Unreachable:
                return True
            return False

        eventually(is_shut_out, "no new call on what counts no more")


def test_a_site_shows_its_new_certificate_when_it_comes_back(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    authority, successor = Authority(tmp_path), Authority(tmp_path / "next")
    options = ServerOptions(run_id=RUN)
    server = serve(FakeSyncer(), options, SecurityOptions(**serving(authority)))
    shows = shown(authority, "site/site-a")
    quick = ClientOptions(join_timeout_s=5.0)
    with SyncClient(server.address, "site-a", RUN, SecurityOptions(**shows), quick) as client:
        assert client.join(join_ask())
        server.stop(0.2)
        options = ServerOptions(run_id=RUN, address=server.address)
        server = serve(FakeSyncer(), options, SecurityOptions(**serving(successor)))
        try:
            with pytest.raises(Unreachable):
                client.join(join_ask())  # Its certificate is of an authority that counts no more.
            later = shown(successor, "site/site-a")
            for name, path in later.items():
                shutil.copy(path, shows[name])

            def joined() -> bool:
                try:
                    return client.join(join_ask()).incarnation > 0
                except Unreachable:
                    return False

            eventually(joined, "the site is back with what its files have now")
        finally:
            server.stop(0.2)


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
        self._thread.join(BOUND_S)


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
    here = run(**put(old, "syncer", "127.0.0.1"), require_client_cert=True, connection_age_s=1.0)
    with contextlib.ExitStack() as stack:
        pushers = []
        for name in names:
            client = stack.enter_context(here.client(name, **put(old, f"site/{name}")))
            pushers.append(Pusher(client, name))
            stack.callback(pushers[-1].stop)

        def all_go_on(what: str) -> None:
            """Also over connections that began after this: the server ends each at its age."""
            before, since_s = [each.pushed for each in pushers], time.monotonic()
            eventually(
                lambda: (
                    time.monotonic() > since_s + 2.5
                    and all(each.pushed > so_far + 20 for each, so_far in zip(pushers, before, strict=True))
                ),
                f"every site pushes with {what}",
            )

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
