"""Who calls: tokens and certificates turned into an identity, and what takes an identity back.

The files that say so are read again when they change (``watched``); ``refresh`` looks, ``check_still`` says whether
somebody who was let in earlier would still be.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.sync.plain import parse_json
from diloco.wire.messages import Refusal, Status
from diloco.wire.permissions import EVERYTHING, ROLES, Grant, Permissions, check_role, read_permissions
from diloco.wire.security import check_private, is_token
from diloco.wire.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.wire.security import SecurityOptions

TOKEN_CHARS_MIN = 16
TOKENS_EACH_MAX = 4
REVOKED_MAX = 100_000
_SITE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_SPIFFE = re.compile(rf"spiffe://(?P<domain>[^/]+)/(?:site/(?P<site>{_SITE})|(?P<role>observer|admin|standby))")
_ID = re.compile(rf"site/{_SITE}|observer|admin|standby")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller.  ``site`` None and ``anyone`` True: nobody is told apart (loopback without tokens)."""

    site: str | None = None
    roles: frozenset[str] = frozenset()
    anyone: bool = False
    grant: Grant = field(default=Grant(), compare=False)
    certificate: bytes = field(default=b"", compare=False, repr=False)
    """What it showed, PEM; empty where no certificates are asked for."""
    token_digest: bytes = field(default=b"", compare=False, repr=False)

    @property
    def name(self) -> str:
        """``site/a``, ``admin`` ...; empty for anyone."""
        return f"site/{self.site}" if self.site is not None else "".join(sorted(self.roles)[:1] * (not self.anyone))

    def caller(self, context: Any) -> str:
        """By whom calls are counted: by connection where callers cannot be told apart."""
        return self.name or f"peer {context.peer()}"

    def check_role(self, method: str) -> None:
        """Refuse with PERMISSION_DENIED unless the table lets this caller call ``method``."""
        check_role(method, self.anyone or self.site is not None, self.roles | self.grant.roles)

    def check_site(self, site_id: str) -> None:
        """Refuse with PERMISSION_DENIED unless this caller is ``site_id``."""
        if not self.anyone and site_id != self.site:
            raise Refusal(Status.PERMISSION_DENIED, f"this caller may not speak for site_id {site_id!r}")

    def check_reader(self, site_id: str) -> None:
        """Refuse with PERMISSION_DENIED unless this caller may read the run as ``site_id``: '' is for roles."""
        if site_id:
            self.check_site(site_id)
        elif not (self.anyone or self.roles | self.grant.roles):
            text = "site_id is '': only an observer, an admin or a standby reads as nobody"
            raise Refusal(Status.PERMISSION_DENIED, text)


@dataclass(frozen=True, slots=True)
class Revoked:
    """Who is let in no more, whatever they show: certificates by fingerprint, and whole identities."""

    certificates: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()


def read_tokens(path: str) -> tuple[tuple[str, Identity], ...]:
    """The tokens of a syncer, each with the identity that it proves; up to four are good for one identity at a time,
    so that one can follow another.

    Raises ``ValueError`` in words for a file that others can read, a token that is short, odd or given twice.
    """
    check_private("tokens_file", path)
    try:
        table = parse_json(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"tokens_file {path} is not JSON: {error}") from error
    if not isinstance(table, dict) or not set(table) <= {"sites", *ROLES} or not _is_table(table.get("sites", {})):
        raise ValueError(f'tokens_file {path}: wanted an object with "sites", "observer", "admin" and "standby" only')
    holders = [(Identity(site=site), said) for site, said in sorted(table.get("sites", {}).items())]
    holders += [(Identity(roles=frozenset({role})), table[role]) for role in sorted(ROLES & set(table))]
    pairs: list[tuple[str, Identity]] = []
    for identity, said in holders:
        given = said if isinstance(said, list) and 1 <= len(said) <= TOKENS_EACH_MAX else [said]
        for token in given:
            if not isinstance(token, str) or len(token) < TOKEN_CHARS_MIN or not is_token(token):
                who = identity.site or identity.name
                raise ValueError(
                    f"tokens_file {path}: the token of {who} must be {TOKEN_CHARS_MIN} or more printable ASCII "
                    f"characters, or up to {TOKENS_EACH_MAX} of them in [ ]"
                )
            pairs.append((token, replace(identity, token_digest=hashlib.sha256(token.encode()).digest())))
    if len({token for token, _ in pairs}) != len(pairs):
        raise ValueError(f"tokens_file {path}: one token is given twice")
    return tuple(pairs)


def _is_table(sites: object) -> bool:
    return isinstance(sites, dict) and all(re.fullmatch(_SITE, site) for site in sites)


def read_revoked(path: str) -> Revoked:
    """The revocation list; ``diloco certs revoke`` writes it.  Raises ``ValueError`` in words."""
    try:
        table = parse_json(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"revoked_file {path} is not JSON: {error}") from error
    found: dict[str, frozenset[str]] = {}
    for name, pattern in (("certificates", _FINGERPRINT), ("ids", _ID)):
        listed = table.get(name, []) if isinstance(table, dict) else None
        if not isinstance(listed, list) or len(listed) > REVOKED_MAX or set(table) - {"certificates", "ids"}:
            raise ValueError(f'revoked_file {path}: wanted an object with lists "certificates" and "ids" only')
        for each in listed:
            if not isinstance(each, str) or not pattern.fullmatch(each):
                raise ValueError(f"revoked_file {path}: {name} has {each!r}")
        found[name] = frozenset(listed)
    return Revoked(**found)


class Authenticator:
    """Turns a call into an ``Identity``, before any message of it is looked at."""

    def __init__(self, options: SecurityOptions) -> None:
        self._domain = options.trust_domain
        self._certificates = options.require_client_cert
        tokens, permissions, revoked = options.tokens_file, options.permissions, options.revoked_file
        self._tokens = Watched("tokens_file", [tokens], lambda: read_tokens(tokens)) if tokens else None
        self._permissions = (
            Watched("permissions", [permissions], lambda: read_permissions(permissions)) if permissions else None
        )
        self._revoked = Watched("revoked_file", [revoked], lambda: read_revoked(revoked)) if revoked else None
        self._open = not (tokens or self._certificates)

    @property
    def watched(self) -> tuple[Watched[Any], ...]:
        """The files behind it."""
        return tuple(each for each in (self._tokens, self._permissions, self._revoked) if each is not None)

    def identify(self, context: Any) -> Identity:
        """Who calls, with what is granted to them.

        Refuses with UNAUTHENTICATED when that cannot be told or was revoked, or when TLS is older than 1.3; with
        PERMISSION_DENIED when the permissions do not list them.
        """
        transport = context.auth_context()
        for version in transport.get("ssl_tls_version", ()):
            if version != b"TLSv1.3":
                raise Refusal(Status.UNAUTHENTICATED, "TLS 1.3 is needed")
        if self._open:
            return self._granted(Identity(roles=ROLES, anyone=True))
        caller = self._told(context.invocation_metadata()) if self._tokens is not None else None
        if self._certificates:
            certified = self._certified(transport)
            if certified is None:
                raise Refusal(
                    Status.UNAUTHENTICATED,
                    "the client certificate does not hold one SPIFFE id of a site, observer, admin or standby",
                )
            if caller is not None and certified != caller:
                raise Refusal(Status.UNAUTHENTICATED, "the token and the client certificate name different callers")
            caller = replace(certified, token_digest=caller.token_digest if caller is not None else b"")
        assert caller is not None
        self._check_not_revoked(caller)
        return self._granted(caller)

    def check_still(self, identity: Identity, method: str) -> None:
        """Refuse as ``identify`` would if this caller came again now, and as the table would for ``method``."""
        known = self._tokens.value if self._tokens is not None else ()
        if self._tokens is not None and not any(
            identity.token_digest == each.token_digest and identity == each for _, each in known
        ):
            raise Refusal(Status.UNAUTHENTICATED, "the token is not known any more")
        self._check_not_revoked(identity)
        now = self._granted(identity)
        now.check_role(method)
        if method == "Push" and not now.grant.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{now.name} may not push any more")

    def _check_not_revoked(self, identity: Identity) -> None:
        revoked = self._revoked.value if self._revoked is not None else Revoked()
        if identity.name in revoked.ids:
            raise Refusal(Status.UNAUTHENTICATED, f"{identity.name} was revoked")
        if revoked.certificates and identity.certificate:
            der = ssl.PEM_cert_to_DER_cert(identity.certificate.decode("ascii"))
            if hashlib.sha256(der).hexdigest() in revoked.certificates:
                raise Refusal(Status.UNAUTHENTICATED, f"this certificate of {identity.name} was revoked")

    def _granted(self, identity: Identity) -> Identity:
        table: Permissions = self._permissions.value if self._permissions is not None else EVERYTHING
        if identity.anyone:
            return identity
        if identity.site is None:
            if not identity.roles <= table.roles:
                raise Refusal(Status.PERMISSION_DENIED, f"{identity.name} is not in the permissions of this run")
            return identity
        grant = table.of_site(identity.site)
        if grant is None:
            raise Refusal(Status.PERMISSION_DENIED, f"site {identity.site} is not in the permissions of this run")
        return identity if grant is identity.grant else replace(identity, grant=grant)

    def _certified(self, transport: Mapping[str, Any]) -> Identity | None:
        ids = list(transport.get("peer_spiffe_id", ()))
        match = _SPIFFE.fullmatch(ids[0].decode("utf-8", "replace")) if len(ids) == 1 else None
        if match is None or (self._domain and match["domain"] != self._domain):
            return None
        shown = b"".join(transport.get("x509_pem_cert", ()))
        if match["site"]:
            return Identity(site=match["site"], certificate=shown)
        return Identity(roles=frozenset({match["role"]}), certificate=shown)

    def _told(self, metadata: Any) -> Identity:
        assert self._tokens is not None
        values = [value for key, value in metadata if key == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith("Bearer "):
            raise Refusal(Status.UNAUTHENTICATED, "a token is needed: authorization: Bearer <token>")
        given = values[0].removeprefix("Bearer ").encode()
        found: Identity | None = None
        for token, identity in self._tokens.value:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(token.encode(), given):
                found = identity
        if found is None:
            raise Refusal(Status.UNAUTHENTICATED, "the token is not known")
        return found
