"""Certificates, tokens and permissions for the tests of rights, made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))

A, B, OBSERVER, ADMIN = "token-of-site-a-1", "token-of-site-b-2", "token-of-observer", "token-of-operator"
TOKENS = {"sites": {"site-a": A, "site-b": B}, "observer": OBSERVER, "admin": ADMIN, "standby": "token-of-standby"}


def written(path: Path, table: object = TOKENS, mode: int = 0o600) -> str:
    """Put ``table`` (JSON or a text) at ``path`` at once, in the place of what was there."""
    beside = path.with_suffix(".new")
    beside.write_text(table if isinstance(table, str) else json.dumps(table))
    beside.chmod(mode)
    beside.replace(path)
    return str(path)


class Authority:
    """Signs certificates and writes them as PEM files into ``folder``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = str(folder / f"{name}.pem")
        own = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._write(self.ca, own.sign(self._key, hashes.SHA256()))

    def issue(
        self, name: str, *alternatives: x509.GeneralName, ends_in_s: float = 3600.0, named: bool = True
    ) -> tuple[str, str]:
        """The paths of a certificate, with a common name if ``named`` and of its key; an end in the past is over."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if named else [])
        builder = self._builder(subject, key.public_key(), ends_in_s)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        cert_path, key_path = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        self._write(str(cert_path), builder.sign(self._key, hashes.SHA256()))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        key_path.chmod(0o600)
        return str(cert_path), str(key_path)

    def site(self, *ids: str) -> tuple[str, str]:
        """A client's certificate with these SPIFFE ids."""
        uris = [x509.UniformResourceIdentifier(f"spiffe://example.org/{each}") for each in ids]
        return self.issue("-".join(("client", *ids)).replace("/", "-"), *uris)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, ends_in_s: float = 3600.0
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(seconds=ends_in_s))
        )

    def _write(self, path: str, certificate: x509.Certificate) -> None:
        Path(path).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
