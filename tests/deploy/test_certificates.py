from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from diloco.deploy.certificates import LEAF_DAYS, CertificateError, Pair, describe, issue, make_authority

NOW = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_authority("example.org", NOW)


def test_an_authority_signs_and_outlives_its_leaves(authority: Pair) -> None:
    facts = describe(authority.certificate)
    assert facts.is_authority
    assert facts.ids == ("spiffe://example.org",)
    assert facts.subject == facts.issuer == "CN=diloco authority of example.org"
    assert facts.begins < NOW
    assert facts.ends - NOW > datetime.timedelta(days=3000)
    assert b"BEGIN PRIVATE KEY" in authority.key


def test_a_leaf_has_one_id_and_only_a_server_has_hosts(authority: Pair) -> None:
    site = describe(leaf(authority).certificate)
    assert site.ids == ("spiffe://example.org/site/a",)
    assert (site.hosts, site.is_authority) == ((), False)
    assert site.ends == NOW + datetime.timedelta(days=1)
    assert site.issuer == describe(authority.certificate).subject
    syncer = describe(issue(authority, "syncer", ["sync.example.org", "10.0.0.1", "::1"], LEAF_DAYS, NOW).certificate)
    assert syncer.ids == ("spiffe://example.org/syncer",)
    assert syncer.hosts == ("sync.example.org", "10.0.0.1", "::1")
    assert syncer.fingerprint != site.fingerprint


def leaf(authority: Pair, *hosts: str, days: int = 1) -> Pair:
    return issue(authority, "syncer" if hosts else "site/a", [*hosts], days, NOW)


HOSTS = "", "a b", "host:7077", "https://x", "-x.org", "x..y", "a" * 300, "*", "ü.org"
DOMAINS = "", "Example.org", "a/b", "-a", "x" * 80


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *[(lambda authority, host=host: leaf(authority, host), "host is") for host in HOSTS],
        *[(lambda _, domain=domain: make_authority(domain, NOW), "trust domain is") for domain in DOMAINS],
        (lambda authority: leaf(authority, days=4000), "the authority itself ends on 2036-"),
        (lambda authority: leaf(authority, days=0), "days is 0"),
        (lambda authority: leaf(Pair(authority.certificate, leaf(authority).key)), "not that of its certificate"),
        (lambda authority: leaf(Pair(authority.certificate, b"no")), "key cannot be read"),
        (lambda authority: leaf(leaf(authority)), "not one that"),
        (lambda _: describe(b"nothing"), "no certificate in it"),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(authority: Pair, make: Callable[[Pair], object], words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        make(authority)
