"""Identities over real connections: tokens, TLS and permissions, also changed and broken while a server runs."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import shutil
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.deploy import certificates
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import PullAsk, Refused, Status, Unreachable
from diloco.wire.options import SecurityOptions
from diloco.wire.pulling import PullSink
from tests.wire.certificates import ADMIN, LOOPBACK, TOKENS, A, Authority, B, written
from tests.wire.conftest import Start, ended
from tests.wire.fake_syncer import RUN, join_ask, push_header
from tests.wire.relay import WAIT_S, until_reached, wait_until

NEXT_B = "next-token-of-site-b"
PAYLOAD = b"payload" * 200_000


@pytest.fixture
def run(start: Start) -> Start:
    return lambda **given: start(alive_s=0.2, **given)


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
        with contextlib.suppress(Refused, Unreachable):
            for _ in self._stream:
                self.events += 1
        self.ended.set()


def status_of(call: Callable[[], object]) -> Status:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.text
    return caught.value.status


def test_strangers_may_ask_for_health_and_nothing_else(run: Start, tokens: str) -> None:
    here, health = run(tokens_file=tokens), "/grpc.health.v1.Health"
    assert next(here.talk(f"{health}/Check", b"").call)
    for method in (f"{health}/Watch", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
        assert ended(here.talk(method, b"").call)[0] == "UNAUTHENTICATED"


def test_sites_and_operators_have_the_roles_that_a_file_gives_them(run: Start, tmp_path: Path, tokens: str) -> None:
    table = {"default": "deny", "sites": {"site-a": {}, "site-b": {"roles": ["observer"]}}}
    here = run(tokens_file=tokens, permissions=written(tmp_path / "p", table))
    client = here.client("site-a", token=A)
    client.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
    assert status_of(lambda: client.pull(PullAsk(RUN, "", 0, -1), PullSink())) is Status.PERMISSION_DENIED
    here.client("site-b", token=B).pull(PullAsk(RUN, "", 0, -1), PullSink())
    with AdminClient(here.server.address, SecurityOptions(token=B)) as both:
        assert both.status()
        assert status_of(both.drain) is Status.PERMISSION_DENIED
    with AdminClient(here.server.address, SecurityOptions(token=ADMIN)) as admin:
        assert status_of(admin.status) is Status.PERMISSION_DENIED, "the file lists no role"


def test_one_token_follows_another_without_a_gap_and_one_that_is_removed_ends_its_streams(
    run: Start, tmp_path: Path
) -> None:
    file, own = tmp_path / "tokens.json", tmp_path / "own"
    here = run(tokens_file=written(file))
    first, second = here.client(token=A), here.client("site-b", token_file=written(own, B))
    stays, goes = Follower(first), Follower(second)
    written(file, {**TOKENS, "sites": {"site-a": A, "site-b": [B, NEXT_B]}})
    assert here.noted("tokens_file was read again")
    written(own, NEXT_B)
    assert second.join(join_ask(site_id="site-b"))
    assert not goes.ended.is_set()
    written(file, {**TOKENS, "sites": {"site-a": A, "site-b": NEXT_B}})
    assert goes.ended.wait(WAIT_S), "it began with the token that is no more"
    assert here.noted("calls of site/site-b were ended: the token is no longer known")
    assert second.join(join_ask(site_id="site-b"))
    written(file, {**TOKENS, "sites": {"site-a": A}})
    assert wait_until(lambda: sum("was read again" in note for note in here.notes) == 3)
    assert status_of(lambda: second.join(join_ask(site_id="site-b"))) is Status.UNAUTHENTICATED
    seen = stays.events
    assert wait_until(lambda: stays.events > seen), "the other site's stream goes on"
    assert first.join(join_ask())


def test_a_broken_file_leaves_the_one_before_it_in_force_and_says_so(run: Start, tmp_path: Path) -> None:
    file, table = tmp_path / "tokens.json", tmp_path / "permissions.json"
    here = run(tokens_file=written(file), permissions=written(table, {"default": "allow"}))
    client = here.client(token=A)
    follower = Follower(client)
    written(file, '{"sites": {"site-a": "token-of')
    assert here.noted("tokens_file cannot be used, its last good content stays in force: tokens_file")
    written(table, {"default": "perhaps"})
    assert here.noted("permissions cannot be used")
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


def test_ends_that_do_not_trust_one_another_or_speak_another_language_never_meet(
    run: Start, authority: Authority, tmp_path: Path
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
        with pytest.raises(Unreachable):
            here.client(**security).join(join_ask())
        assert (here.syncer.calls, here.server.counters()) == ([], {})


def test_a_certificate_without_exactly_one_known_id_of_the_trust_domain_proves_nothing(
    run: Start, authority: Authority
) -> None:
    here, elsewhere = (run(**serving(authority), trust_domain=f"example.{end}") for end in ("org", "com"))
    bad = [(), ("site/site-a", "admin"), ("sites/site-a",), ("site/",), ("site/a b",)]
    good = ("site/site-a",)
    for server, ids in (*((here, ids) for ids in bad), (elsewhere, good)):
        site = server.client(**shown(authority, *ids))
        assert status_of(lambda site=site: site.join(join_ask())) is Status.UNAUTHENTICATED
    assert here.client(**shown(authority, *good)).join(join_ask())


def test_a_token_counts_beside_tls_and_must_name_the_same_caller_as_a_certificate(
    run: Start, authority: Authority, tokens: str
) -> None:
    for mutual, shows in ((False, {"tls_ca": authority.ca}), (True, shown(authority, "site/site-a"))):
        here = run(**serving(authority, mutual=mutual), tokens_file=tokens)
        assert here.client(**shows, token=A).push(push_header(PAYLOAD), PAYLOAD)
        other, status = here.client(**shows, token=B), "UNAUTHENTICATED" if mutual else "PERMISSION_DENIED"
        assert status_of(lambda other=other: other.join(join_ask())).value == status


def test_a_revoked_certificate_ends_its_streams_and_another_of_the_same_site_is_good(
    run: Start, tmp_path: Path, authority: Authority
) -> None:
    file = tmp_path / "revoked.json"
    here = run(**serving(authority), revoked_file=written(file, {"certificates": []}))
    shows = shown(authority, "site/site-a")
    client = here.client(**shows)
    follower = Follower(client)
    raw = ssl.PEM_cert_to_DER_cert(Path(shows["tls_cert"]).read_text())
    written(file, {"certificates": [hashlib.sha256(raw).hexdigest()]})
    assert follower.ended.wait(WAIT_S)
    assert status_of(lambda: client.join(join_ask())) is Status.UNAUTHENTICATED
    assert here.noted("this certificate of site/site-a was revoked")
    client = here.client(**shown(authority, "site/site-a"))
    follower = Follower(client)
    written(file, {"ids": ["site/site-a"]})
    assert follower.ended.wait(WAIT_S), "a whole identity was revoked"


@pytest.fixture
def successor(tmp_path: Path) -> Authority:
    """Another authority of the same name."""
    (tmp_path / "next").mkdir()
    return Authority(tmp_path / "next")


@pytest.mark.slow
def test_a_certificate_is_looked_at_again_though_its_connection_lives(
    run: Start, tmp_path: Path, authority: Authority, successor: Authority
) -> None:
    """As it is when it has ended: here its authority is no longer the one that counts."""
    files = serving(authority)
    here = run(connection_age_s=3.0, **files)
    shows = shown(authority, "site/site-a")
    kept = tmp_path / "kept.pem"
    shutil.copy(authority.ca, kept)  # What the site itself trusts does not change.
    client = here.client(**shows | {"tls_ca": str(kept)})
    follower = Follower(client)
    shutil.copy(successor.ca, files["tls_ca"])
    assert here.noted("was read again")
    assert follower.ended.wait(WAIT_S)

    def is_over() -> bool:
        with contextlib.suppress(Unreachable):
            return not client.join(join_ask())
        return True

    assert wait_until(is_over), "a new call came in on what counts no more"


def test_a_site_shows_its_new_certificate_when_it_comes_back(
    run: Start, authority: Authority, successor: Authority
) -> None:
    here, shows = run(**serving(authority)), shown(authority, "site/site-a")
    client = here.client(**shows)
    assert client.join(join_ask())
    here.server.stop(0.2)
    run(address=here.server.address, **serving(successor))
    with pytest.raises(Unreachable):
        client.join(join_ask())  # Its certificate is of an authority that counts no more.
    for name, path in shown(successor, "site/site-a").items():
        shutil.copy(path, shows[name])
    assert until_reached(lambda: client.join(join_ask())).incarnation > 0


def test_an_authority_is_replaced_without_a_gap(run: Start, tmp_path: Path) -> None:
    """Both authorities count, then every end shows what the new one has signed, then the old one counts no more.

    They are those of ``diloco certs init``, and so have one name.
    """
    now = datetime.datetime.now(datetime.UTC)
    old, new = (certificates.make_authority("diloco", now) for _ in range(2))
    trusted = tmp_path / "trusted.pem"

    def put(authority: certificates.Pair, who: str, *hosts: str) -> dict[str, str]:
        """Write what ``authority`` signs for ``who`` over what was there; the files, by setting."""
        pair = certificates.issue(authority, who, hosts, 1, now)
        key, cert = (tmp_path / f"{who.replace('/', '-')}.{kind}" for kind in ("key", "pem"))
        written(key, pair.key.decode())
        return {"tls_key": str(key), "tls_cert": written(cert, pair.certificate.decode()), "tls_ca": str(trusted)}

    def comes_in(authority: certificates.Pair) -> bool:
        """Whether a site does that shows what ``authority`` has signed, over a connection of its own."""
        with contextlib.suppress(Unreachable):
            return bool(here.client(**put(authority, "site/site-a")).join(join_ask()))
        return False

    written(trusted, old.certificate.decode())
    here = run(**put(old, "syncer", "127.0.0.1"), require_client_cert=True)
    assert (comes_in(old), comes_in(new)) == (True, False)
    follower = Follower(here.client(**put(old, "site/site-a")))
    written(trusted, (old.certificate + new.certificate).decode())
    assert wait_until(lambda: comes_in(new))
    assert comes_in(old)
    before = len(here.notes)
    put(new, "syncer", "127.0.0.1")
    assert wait_until(lambda: any("was read again" in note for note in here.notes[before:]))
    assert all(comes_in(each) for each in (old, new))
    seen = follower.events
    assert wait_until(lambda: follower.events > seen), "the old connection goes on"
    written(trusted, new.certificate.decode())

    def is_over() -> bool:
        assert comes_in(new), "at every moment"
        return not comes_in(old)

    assert wait_until(is_over)
    assert here.server.complaints() == []
