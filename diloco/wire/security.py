"""What the ends of a connection show each other: certificates, keys and tokens, and where they may do without.

Out of the box nothing is encrypted and nobody is asked for a token, and therefore the syncer binds to the loopback
address only.  Anything else is refused in words unless sites can be told apart over an encrypted connection: by a token
each (``tokens_file``), or by a client certificate whose only SPIFFE id is ``spiffe://<trust domain>/site/<site_id>``
(or ``.../observer``, ``.../admin``, ``.../standby``).

Certificates, keys and tokens are read again when they change.  At the syncer each new handshake gets the latest; at a
site gRPC takes them once for each connection, so that the connection is opened anew (``lines``).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from diloco.wire.watched import Watched

SYSTEM_ROOTS = "system"
PORT_MAX = 65535
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(kw_only=True, slots=True)
class SecurityOptions:
    """Files and switches; every file is named by its path, PEM where it is a key or a certificate.

    Raises ``ValueError`` for combinations that cannot work.
    """

    tls_cert: str = ""
    """This end's certificate chain: the syncer's, or a site's own where client certificates are asked for."""
    tls_key: str = ""
    tls_ca: str = ""
    """At a site: who signed the syncer's certificate (``system``: the machine's roots); this turns TLS on.
    At the syncer: who signed the sites' certificates."""
    require_client_cert: bool = False
    """At the syncer: a connection without a certificate signed by ``tls_ca`` is not accepted."""
    trust_domain: str = ""
    """At the syncer: the one in which a client's SPIFFE id must be; empty: any that ``tls_ca`` signs."""
    revoked_file: str = ""
    """At the syncer: JSON ``{"certificates": [<SHA-256>], "ids": ["site/<site_id>"]}``, who is let in no more."""
    permissions: str = ""
    """At the syncer: what each identity may do (``permissions``); without it, what its role allows."""
    tokens_file: str = ""
    """At the syncer: JSON ``{"sites": {"<site_id>": "<token>"}, "observer": "<token>", "admin": "<token>"}``, mode
    0600.  A list of tokens in place of one: each of them is good."""
    token: str = ""
    """At a site, or with an operator: its own token."""
    token_file: str = ""
    """The same in a file, mode 0600, which is read again when it changes."""
    insecure_non_loopback: bool = False
    """Permit what is refused by default: a reachable address without encryption or without identities."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert is {self.tls_cert!r} and tls_key {self.tls_key!r}: give both or neither")
        if self.require_client_cert and not (self.tls_cert and self.tls_ca):
            raise ValueError("require_client_cert is True: it needs tls_cert, tls_key and tls_ca")
        if self.require_client_cert and self.tls_ca == SYSTEM_ROOTS:
            raise ValueError(
                "require_client_cert is True: tls_ca must name the file of the authority that signs the sites"
            )
        if self.token and not is_token(self.token):
            raise ValueError("token holds a blank or a character that is not printable ASCII")
        if self.token and self.token_file:
            raise ValueError(f"token_file is {self.token_file!r}: give it or token, not both")
        if (self.revoked_file or self.permissions) and not (self.tokens_file or self.require_client_cert):
            name = "revoked_file" if self.revoked_file else "permissions"
            raise ValueError(f"{name} is {getattr(self, name)!r}: it needs tokens_file or require_client_cert")


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` can be reached from this machine only."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_token(text: str) -> bool:
    """Whether ``text`` can travel as a token."""
    return _TOKEN.fullmatch(text) is not None


def check_private(field: str, path: str) -> None:
    """``ValueError`` in words when the secret in ``path`` is not its owner's alone, or is neither ours nor root's."""
    found = Path(path).stat()
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(f"{field} {path} can be read by others than its owner: chmod 600 it")
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(f"{field} {path} belongs to user {found.st_uid}: it must be that of this process, or root's")


def check_bind(address: str, options: SecurityOptions) -> None:
    """Refuse in words (``ValueError``) to listen on a reachable address without encryption or without identities.

    And at a port that is none, of which gRPC would take the remainder.
    """
    port = address.rpartition(":")[2]
    if not address.startswith("unix:") and not (":" in address and port.isdecimal() and int(port) <= PORT_MAX):
        raise ValueError(f"address is {address!r}: host:port wanted, with a port of 0 to {PORT_MAX}")
    if is_loopback(address):
        return
    _check_resolves(address)
    if options.insecure_non_loopback:
        return
    if not options.tls_cert:
        raise ValueError(
            f"address is {address!r}: not a loopback address, and there is no TLS. Give tls_cert and tls_key, "
            "or set insecure_non_loopback to accept that anyone on the network can read and change the run"
        )
    if not (options.tokens_file or options.require_client_cert):
        raise ValueError(
            f"address is {address!r}: not a loopback address, and sites cannot be told apart. Give tokens_file or "
            "require_client_cert, or set insecure_non_loopback to accept that anyone on the network can join"
        )


def _check_resolves(address: str) -> None:
    """Whoever has misspelt a name is to mend the name, and not to be shown how protection is switched off."""
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"address is {address!r}: {host} does not resolve here: {why}") from error


class ServingCertificate:
    """The syncer's certificate, key and authority, for each new handshake as they are then."""

    def __init__(self, options: SecurityOptions) -> None:
        """Raises ``ValueError`` in words, or ``OSError``, for files that do not fit together."""
        self._options = options
        self._served: Any = None
        names = [options.tls_cert, options.tls_key, *([options.tls_ca] if options.require_client_cert else [])]
        self.watched: Watched[Any] = Watched("tls_cert, tls_key or tls_ca", names, self._read)

    def credentials(self) -> Any:
        """What gRPC's server takes."""
        self._served = self.watched.value
        return grpc.dynamic_ssl_server_credentials(self._served, self._latest, self._options.require_client_cert)

    def _latest(self) -> Any:
        """Called by gRPC before each handshake; None: nothing has changed."""
        latest = self.watched.value
        if latest is self._served:
            return None
        self._served = latest
        return latest

    def _read(self) -> Any:
        options = self._options
        cert, key = read_pair(options.tls_cert, options.tls_key)
        roots = read_authority(options.tls_ca) if options.require_client_cert else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=roots)


def read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Certificate chain and key, PEM.  ``ValueError`` when they do not belong together, or the key is not private."""
    check_private("tls_key", key)
    pair = Path(cert).read_bytes(), Path(key).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert {cert} and tls_key {key} are no certificate and its key: {error.reason}") from error
    return pair


def read_authority(path: str) -> bytes:
    """The certificates of an authority, PEM.  ``ValueError`` when there is none in the file."""
    authority = Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"tls_ca {path} holds no certificate: {error.reason or error}") from error
    return authority


def read_token(path: str) -> str:
    """The token in a site's own file.  ``ValueError`` in words, which never hold the token."""
    check_private("token_file", path)
    token = Path(path).read_text("utf-8").strip()
    if not is_token(token):
        raise ValueError(f"token_file {path} is empty, or holds a blank or a character that is not printable ASCII")
    return token


def check_own_files(options: SecurityOptions) -> None:
    """``ValueError`` in words, or ``OSError``, for what a site would show and cannot."""
    if options.token_file:
        read_token(options.token_file)
    if options.tls_cert:
        read_pair(options.tls_cert, options.tls_key)
    if options.tls_ca and options.tls_ca != SYSTEM_ROOTS:
        read_authority(options.tls_ca)
