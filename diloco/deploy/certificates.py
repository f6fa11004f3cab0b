"""Create certificates: a private authority, and leaf certificates with one SPIFFE id that names the holder's role.

Only this module uses ``cryptography``; the verb imports it on demand.  It touches no file: results are returned as PEM.
Keys are EC P-256.  The syncer's certificate authenticates a server by its host names; those of sites, observers and
admins authenticate a client by its id.  TLS libraries refuse one in the other's place.  A standby's has both uses where
hosts are given, since it may become the syncer.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence

AUTHORITY_DAYS = 3650
LEAF_DAYS = 90
SKEW = datetime.timedelta(minutes=5)
"""A certificate is valid from this long before its creation, because clocks differ."""
TRUST_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")


class CertificateError(ValueError):
    """A certificate cannot be made as requested, or the input is no certificate; the text says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of a certificate, for display."""

    subject: str
    issuer: str
    ids: tuple[str, ...]
    hosts: tuple[str, ...]
    is_authority: bool
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str
    """SHA-256 hex of the DER certificate; revocations name it by this."""


def make_authority(trust_domain: str, now: datetime.datetime) -> Pair:
    """Make a new authority, which may sign leaf certificates of ``trust_domain`` but no other authorities."""
    if not TRUST_DOMAIN.fullmatch(trust_domain):
        raise CertificateError(f"trust domain is {trust_domain!r}: lower-case letters, digits, '-' and '.', at most 63")
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"diloco authority of {trust_domain}"
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and lists
    own = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")])
    extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (usage, True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (own, False),
    ]
    return _signed(name, key, _name(name), key, extensions, now, AUTHORITY_DAYS)


def issue(authority: Pair, who: str, hosts: Sequence[str], days: int, now: datetime.datetime) -> Pair:
    """Issue a leaf for ``who`` (``site/a``, ``syncer``, ``observer`` ...), also for a server where ``hosts`` are given.

    Raises ``CertificateError`` for an invalid host, and when the authority would expire before the leaf.
    """
    try:
        key = serialization.load_pem_private_key(authority.key, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"the authority's key cannot be read: {error}") from error
    signer, facts = _certificate(authority.certificate), describe(authority.certificate)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or signer.public_key() != key.public_key():
        raise CertificateError("the authority's key is not that of its certificate")
    if not facts.is_authority or len(facts.ids) != 1:
        raise CertificateError("the authority's certificate is not one that `diloco certs init` has made")
    if days < 1:
        raise CertificateError(f"days is {days}: at least 1")
    if now + datetime.timedelta(days=days) > facts.ends:
        raise CertificateError(f"days is {days}: the authority itself ends on {facts.ends:%Y-%m-%d}")
    own = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{facts.ids[0]}/{who}")]
    names += [_host(host) for host in hosts]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
    if who != "syncer":
        purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)  # signs handshakes
    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage, True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ]
    return _signed(who, own, signer.subject, key, extensions, now, days)


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CertificateError(f"there is no certificate in it: {error}") from error


def describe(pem: bytes) -> Facts:
    """Return the contents of the first certificate in ``pem``; ``CertificateError`` when there is none."""
    certificate = _certificate(pem)
    extensions: dict[type, Any] = {type(each.value): each.value for each in certificate.extensions}
    names = list(extensions.get(x509.SubjectAlternativeName, ()))
    basic = extensions.get(x509.BasicConstraints)
    return Facts(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        ids=tuple(name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)),
        hosts=tuple(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)),
        is_authority=basic is not None and basic.ca,
        begins=certificate.not_valid_before_utc,
        ends=certificate.not_valid_after_utc,
        fingerprint=hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest(),
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST.fullmatch(host) or len(host) > 253:
        raise CertificateError(f"host is {host!r}: a DNS name or an IP address, without port")
    return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
    now: datetime.datetime,
    days: int,
) -> Pair:
    """Return ``key`` and its certificate, signed with ``signer``; each extension with whether it is critical."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return Pair(
        builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
