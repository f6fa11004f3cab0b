from __future__ import annotations

import datetime

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
    site = describe(issue(authority, "site/a", [], 1, NOW).certificate)
    assert site.ids == ("spiffe://example.org/site/a",)
    assert (site.hosts, site.is_authority) == ((), False)
    assert site.ends == NOW + datetime.timedelta(days=1)
    assert site.issuer == describe(authority.certificate).subject
    syncer = describe(issue(authority, "syncer", ["sync.example.org", "10.0.0.1", "::1"], LEAF_DAYS, NOW).certificate)
    assert syncer.ids == ("spiffe://example.org/syncer",)
    assert syncer.hosts == ("sync.example.org", "10.0.0.1", "::1")
    assert syncer.fingerprint != site.fingerprint


@pytest.mark.parametrize("host", ["", "a b", "host:7077", "https://x", "-x.org", "x..y", "a" * 300, "*", "ü.org"])
def test_a_host_that_is_none_is_refused(authority: Pair, host: str) -> None:
    with pytest.raises(CertificateError, match="host is"):
        issue(authority, "syncer", [host], 1, NOW)


def test_what_cannot_be_made_is_refused_in_words(authority: Pair) -> None:
    with pytest.raises(CertificateError, match="the authority itself ends on 2036-"):
        issue(authority, "site/a", [], 4000, NOW)
    with pytest.raises(CertificateError, match="days is 0"):
        issue(authority, "site/a", [], 0, NOW)
    with pytest.raises(CertificateError, match="not that of its certificate"):
        issue(Pair(authority.certificate, make_authority("x", NOW).key), "site/a", [], 1, NOW)
    with pytest.raises(CertificateError, match="key cannot be read"):
        issue(Pair(authority.certificate, b"nothing"), "site/a", [], 1, NOW)
    leaf = issue(authority, "site/a", [], 1, NOW)
    with pytest.raises(CertificateError, match="not one that"):
        issue(leaf, "site/b", [], 1, NOW)
    with pytest.raises(CertificateError, match="no certificate in it"):
        describe(b"nothing")
    for domain in ("", "Example.org", "a/b", "-a", "x" * 80):
        with pytest.raises(CertificateError, match="trust domain is"):
            make_authority(domain, NOW)
