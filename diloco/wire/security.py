"""Who may speak: TLS, tokens, and what an identity is allowed to do.

Out of the box nothing is encrypted and nobody is asked for a token, and therefore the syncer binds to the loopback
address only.  Anything else is refused in words unless sites can be told apart over an encrypted connection: by a token
each (``tokens_file``), or by a client certificate whose only SPIFFE id is ``spiffe://<trust domain>/site/<site_id>``
(or ``.../observer``, ``.../admin``).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from diloco.sync.plain import parse_json
from diloco.wire.messages import Refusal, Status

TOKEN_CHARS_MIN = 16
SYSTEM_ROOTS = "system"
_TOKEN = re.compile(r"[\x21-\x7e]+")
_SPIFFE = re.compile(r"spiffe://[^/]+/(?:site/(?P<site>[A-Za-z0-9][A-Za-z0-9._-]{0,63})|(?P<role>observer|admin))")


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
    tokens_file: str = ""
    """At the syncer: JSON ``{"sites": {"<site_id>": "<token>"}, "observer": "<token>", "admin": "<token>"}``, mode
    0600."""
    token: str = ""
    """At a site, or with an operator: its own token."""
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
        if self.token and not _TOKEN.fullmatch(self.token):
            raise ValueError("token holds a blank or a character that is not printable ASCII")


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller.  ``site`` None and ``anyone`` True: nobody is told apart (loopback without tokens)."""

    site: str | None = None
    observer: bool = False
    admin: bool = False
    anyone: bool = False

    def check_site(self, site_id: str) -> None:
        """Refuse with PERMISSION_DENIED unless this caller is ``site_id``."""
        if not self.anyone and site_id != self.site:
            raise Refusal(Status.PERMISSION_DENIED, f"this caller may not speak for site_id {site_id!r}")

    def check_reader(self, site_id: str) -> None:
        """Refuse with PERMISSION_DENIED unless this caller may read the run, as ``site_id`` or as an observer ('')."""
        if site_id:
            self.check_site(site_id)

    def check_status(self) -> None:
        """Refuse with PERMISSION_DENIED unless this caller may ask for the run's status."""
        if not (self.anyone or self.admin or self.observer):
            raise Refusal(Status.PERMISSION_DENIED, "only an observer or an admin may do this")

    def check_admin(self) -> None:
        """Refuse with PERMISSION_DENIED unless this caller is an operator."""
        if not (self.anyone or self.admin):
            raise Refusal(Status.PERMISSION_DENIED, "only an admin may do this")


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


def read_tokens(path: str) -> tuple[tuple[str, Identity], ...]:
    """The tokens of a syncer, each with the identity that it proves.

    Raises ``ValueError`` in words for a file that others can read, a token that is short, odd or given twice.
    """
    file = Path(path)
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise ValueError(f"tokens_file {path} can be read by others than its owner: chmod 600 it")
    try:
        table = parse_json(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"tokens_file {path} is not JSON: {error}") from error
    known = {"sites", "observer", "admin"}
    if not isinstance(table, dict) or not set(table) <= known or not isinstance(table.get("sites", {}), dict):
        raise ValueError(f'tokens_file {path}: wanted an object with "sites", "observer" and "admin" only')
    pairs = [(token, Identity(site=site)) for site, token in sorted(table.get("sites", {}).items())]
    pairs += [(table["observer"], Identity(observer=True))] if "observer" in table else []
    pairs += [(table["admin"], Identity(observer=True, admin=True))] if "admin" in table else []
    for token, identity in pairs:
        if not isinstance(token, str) or len(token) < TOKEN_CHARS_MIN or not _TOKEN.fullmatch(token):
            who = identity.site or ("admin" if identity.admin else "observer")
            raise ValueError(
                f"tokens_file {path}: the token of {who} must be {TOKEN_CHARS_MIN} or more printable ASCII characters"
            )
    if len({token for token, _ in pairs}) != len(pairs):
        raise ValueError(f"tokens_file {path}: one token is given twice")
    return tuple(pairs)


class Authenticator:
    """Turns a call into an ``Identity``, before any message of it is looked at."""

    def __init__(self, options: SecurityOptions) -> None:
        self._tokens = read_tokens(options.tokens_file) if options.tokens_file else ()
        self._certificates = options.require_client_cert
        self._open = not (self._tokens or self._certificates)

    def identify(self, context: Any) -> Identity:
        """Who calls.  Refuses with UNAUTHENTICATED when that cannot be told, or when TLS is older than 1.3."""
        transport = context.auth_context()
        for version in transport.get("ssl_tls_version", ()):
            if version != b"TLSv1.3":
                raise Refusal(Status.UNAUTHENTICATED, "TLS 1.3 is needed")
        if self._open:
            return Identity(observer=True, admin=True, anyone=True)
        certified = _certified(transport.get("peer_spiffe_id", ())) if self._certificates else None
        if not self._tokens:
            if certified is None:
                raise Refusal(
                    Status.UNAUTHENTICATED,
                    "the client certificate does not hold one SPIFFE id of a site, observer or admin",
                )
            return certified
        told = self._told(context.invocation_metadata())
        if certified is not None and certified != told:
            raise Refusal(Status.UNAUTHENTICATED, "the token and the client certificate name different callers")
        return told

    def _told(self, metadata: Any) -> Identity:
        values = [value for key, value in metadata if key == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith("Bearer "):
            raise Refusal(Status.UNAUTHENTICATED, "a token is needed: authorization: Bearer <token>")
        given = values[0].removeprefix("Bearer ").encode()
        found: Identity | None = None
        for token, identity in self._tokens:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(token.encode(), given):
                found = identity
        if found is None:
            raise Refusal(Status.UNAUTHENTICATED, "the token is not known")
        return found


def _certified(spiffe_ids: Any) -> Identity | None:
    ids = list(spiffe_ids)
    match = _SPIFFE.fullmatch(ids[0].decode("utf-8", "replace")) if len(ids) == 1 else None
    if match is None:
        return None
    if match["site"]:
        return Identity(site=match["site"])
    return Identity(observer=True, admin=match["role"] == "admin")


def check_bind(address: str, options: SecurityOptions) -> None:
    """Refuse in words (``ValueError``) to listen on a reachable address without encryption or without identities."""
    if is_loopback(address) or options.insecure_non_loopback:
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


def server_credentials(options: SecurityOptions) -> Any:
    """The syncer's TLS credentials, or None for plaintext."""
    if not options.tls_cert:
        return None
    roots = Path(options.tls_ca).read_bytes() if options.require_client_cert else None
    pair = (Path(options.tls_key).read_bytes(), Path(options.tls_cert).read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=options.require_client_cert)


def open_channel(address: str, options: SecurityOptions, arguments: list[tuple[str, int]]) -> Any:
    """A channel to the syncer, with TLS where ``tls_ca`` is given.

    Raises ``ValueError`` in words when a token would be sent unencrypted to another machine.
    """
    if options.tls_ca:
        roots = None if options.tls_ca == SYSTEM_ROOTS else Path(options.tls_ca).read_bytes()
        key = Path(options.tls_key).read_bytes() if options.tls_key else None
        chain = Path(options.tls_cert).read_bytes() if options.tls_cert else None
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, key, chain), arguments)
    if options.token and not is_loopback(address) and not options.insecure_non_loopback:
        raise ValueError(
            f"address is {address!r}: the token would travel unencrypted. Give tls_ca, "
            "or set insecure_non_loopback to accept that anyone on the way can read it"
        )
    return grpc.insecure_channel(address, arguments)


def call_metadata(options: SecurityOptions) -> tuple[tuple[str, str], ...]:
    """What goes with every call: the token, where there is one."""
    return (("authorization", f"Bearer {options.token}"),) if options.token else ()
