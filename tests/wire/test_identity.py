from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from diloco.wire.identity import Authenticator, Grant, Identity, read_revoked, read_tokens
from diloco.wire.messages import Refusal, Status
from diloco.wire.options import SecurityOptions

if TYPE_CHECKING:
    from pathlib import Path

A, B, ADMIN = "token-of-site-a-1", "token-of-site-b-2", "token-of-operator"


class Context:
    """As much of gRPC's context as is asked."""

    def __init__(self, *tokens: str, tls: str = "") -> None:
        self._metadata = tuple(("authorization", f"Bearer {token}") for token in tokens)
        self._tls = {"ssl_tls_version": [tls.encode()]} if tls else {}

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._tls

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1234"


def written(path: Path, table: object) -> str:
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    tokens = written(tmp_path / "tokens", {"sites": {"a": A, "b": [B, B + "x"]}, "admin": ADMIN})
    revoked = written(tmp_path / "revoked", {"ids": []})
    return Authenticator(SecurityOptions(tokens_file=tokens, revoked_file=revoked))


def refusal(call: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_a_token_says_who_calls(authenticator: Authenticator) -> None:
    assert authenticator.identify(Context(A)) == Identity(site="a")
    assert authenticator.identify(Context(B)) == authenticator.identify(Context(B + "x")) == Identity(site="b")
    admin = authenticator.identify(Context(ADMIN))
    assert (admin.name, admin.roles) == ("admin", {"admin"})
    for tokens in ((), ("unknown-token-0123",), (A, A)):
        assert refusal(lambda tokens=tokens: authenticator.identify(Context(*tokens))).status is Status.UNAUTHENTICATED


def test_a_right_that_is_withdrawn_is_missing_from_the_next_look_on(tmp_path: Path) -> None:
    tokens = written(tmp_path / "tokens", {"sites": {"a": A}})
    permissions = written(tmp_path / "permissions", {"default": {"may_push": True}})
    authenticator = Authenticator(SecurityOptions(tokens_file=tokens, permissions=permissions))
    found = authenticator.identify(Context(A))
    for method in ("Push", "Pull"):
        authenticator.check_still(found, method)
    written(tmp_path / "permissions", {"default": {"may_push": False}})
    assert any(each.refresh() for each in authenticator.watched)
    authenticator.check_still(found, "Pull")
    assert refusal(lambda: authenticator.check_still(found, "Push")).text == "site/a may not push any more"


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1.1", "TLSv1.2"])
def test_an_older_tls_is_nobodys(authenticator: Authenticator, version: str) -> None:
    said = refusal(lambda: authenticator.identify(Context(A, tls=version)))
    assert (said.status, said.text) == (Status.UNAUTHENTICATED, "TLS 1.3 is needed")
    assert authenticator.identify(Context(A, tls="TLSv1.3"))


def test_callers_are_counted_by_name_or_else_by_connection(authenticator: Authenticator) -> None:
    assert authenticator.identify(Context(A)).caller(Context()) == "site/a"
    anyone = Authenticator(SecurityOptions()).identify(Context())
    assert anyone.caller(Context()) == "peer ipv4:127.0.0.1:1234"
    for method in ("Join", "Push", "Drain", "Status", "Pull"):
        anyone.check_role(method)
    anyone.check_site("whoever")


def test_only_roles_read_as_nobody(authenticator: Authenticator) -> None:
    site = authenticator.identify(Context(A))
    site.check_reader("a")
    for name in ("", "b"):
        assert refusal(lambda name=name: site.check_reader(name)).status is Status.PERMISSION_DENIED
    replace(site, grant=Grant(roles=frozenset({"observer"}))).check_reader("")
    admin = authenticator.identify(Context(ADMIN))
    admin.check_reader("")
    assert refusal(lambda: admin.check_reader("a")).status is Status.PERMISSION_DENIED
    anyone = Authenticator(SecurityOptions()).identify(Context())
    anyone.check_reader("")
    anyone.check_reader("a")


def test_who_was_let_in_is_looked_at_again(authenticator: Authenticator, tmp_path: Path) -> None:
    found = authenticator.identify(Context(B))
    authenticator.check_still(found, "Push")
    assert refusal(lambda: authenticator.check_still(found, "Drain")).status is Status.PERMISSION_DENIED
    written(tmp_path / "revoked", {"ids": ["site/b"]})
    assert [each.refresh() for each in authenticator.watched] == [None, "revoked_file was read again"]
    assert refusal(lambda: authenticator.check_still(found, "Push")).text == "site/b was revoked"
    written(tmp_path / "revoked", {"ids": []})
    written(tmp_path / "tokens", {"sites": {"a": A, "b": B + "x"}})
    assert all(each.refresh() for each in authenticator.watched)
    assert "not known any more" in refusal(lambda: authenticator.check_still(found, "Push")).text
    other = authenticator.identify(Context(B + "x"))
    authenticator.check_still(other, "Push")
    assert refusal(lambda: authenticator.check_still(replace(other, site="a"), "Push"))


def test_the_proof_of_an_identity_is_never_shown(authenticator: Authenticator) -> None:
    found = authenticator.identify(Context(A))
    assert "token_digest" not in repr(found)
    assert "certificate" not in repr(found)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[", "not JSON"),
        ([], "wanted an object"),
        ({"certificate": []}, "wanted an object"),
        ({"certificates": "all"}, "certificates: wanted a list"),
        ({"certificates": ["ab"]}, "certificates has 'ab'"),
        ({"certificates": ["A" * 64]}, "certificates has 'AAA"),
        ({"ids": ["a"]}, "ids has 'a'"),
        ({"ids": [3]}, "ids has 3"),
    ],
)
def test_a_revocation_list_that_cannot_be_is_refused_in_words(tmp_path: Path, table: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_revoked(written(tmp_path / "revoked", table))
    assert str(caught.value).startswith("revoked_file ")


@pytest.mark.parametrize("sites", [{"a": []}, {"a": [A] * 5}, {"a": [A, A]}, {"a/b": A}, {"": A}, {"a": [A, 3]}])
def test_tokens_of_a_site_that_cannot_be(tmp_path: Path, sites: object) -> None:
    with pytest.raises(ValueError, match="tokens_file ") as caught:
        read_tokens(written(tmp_path / "tokens", {"sites": sites}))
    assert A not in str(caught.value)
