"""Who calls, and what each identity may do: roles, permissions, tokens, certificates and revocations.

Permissions.  ``NEEDS`` is the one table of the roles that methods need; a method that is not in it is denied to all.
The permissions file, JSON, says what a single site may do beyond that:

    {"default": "deny",
     "sites": {"site-a": {},
               "site-b": {"fragments": [0, 1], "update_bytes_max": 40000000, "bytes_per_s": 5e6, "pushes_per_s": 2},
               "site-c": {"may_push": false, "pull_bytes_per_s": 2e7, "roles": ["observer"]}},
     "roles": ["observer", "admin"]}

``default`` is for every site that is not listed: "deny", "allow", or what it may do, as for a site.  ``roles`` are
those that identities without a site may have; without it all of them under "allow", none under "deny".  What the file
does not say about a site is not limited.  ``bytes_per_s`` of updates and ``pull_bytes_per_s`` of versions have no
default, because the syncer does not know what a link carries; without them a site sends and takes as fast as the
network does, in a bounded number of streams.  A transfer under way is never slowed down; the next one waits for its
debt.  A site that may not push still counts where a round waits for all sites.

Identity.  ``Authenticator`` turns tokens and certificates into an identity, and takes an identity back.  It reads its
files again when they change (``options.Watched``): ``refresh`` looks, and ``check_still`` says whether a caller that
was let in earlier would still be let in.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from diloco.sync.plain import parse_json
from diloco.wire.messages import FRAGMENTS_MAX, PAYLOAD_BYTES_MAX, Refusal, Status
from diloco.wire.options import Watched, check_private, is_token

if TYPE_CHECKING:
    from diloco.wire.messages import PushHeader
    from diloco.wire.options import SecurityOptions

ROLES = frozenset({"observer", "admin", "standby"})
SITES_MAX = 10_000
FILE_BYTES_MAX = 4 << 20
RATE_MAX = 1e15


class Needs(Enum):
    """Who may call a method."""

    SITE = "the site that it speaks for"
    READER = "the site that it speaks for, or an observer"
    OBSERVER = "an observer or an admin"
    ADMIN = "an admin"
    STANDBY = "a standby or an admin"
    KNOWN = "somebody whom the syncer knows"


NEEDS: Mapping[str, Needs] = MappingProxyType(
    {
        "Join": Needs.SITE,
        "Push": Needs.SITE,
        "Watch": Needs.SITE,
        "Pull": Needs.READER,
        "Report": Needs.SITE,
        "Leave": Needs.SITE,
        "Probe": Needs.KNOWN,
        "Status": Needs.OBSERVER,
        "Drain": Needs.ADMIN,
        "Evict": Needs.ADMIN,
        "Readmit": Needs.ADMIN,
        "Admit": Needs.ADMIN,
        "Refuse": Needs.ADMIN,
        "Snapshot": Needs.ADMIN,
        "Promote": Needs.ADMIN,
        "Detach": Needs.ADMIN,
        "Follow": Needs.STANDBY,
        "/grpc.health.v1.Health/Watch": Needs.KNOWN,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Needs.KNOWN,
    }
)
_OPEN_TO: Mapping[Needs, frozenset[str]] = MappingProxyType(
    {
        Needs.READER: frozenset({"observer", "admin", "standby"}),
        Needs.OBSERVER: frozenset({"observer", "admin"}),
        Needs.ADMIN: frozenset({"admin"}),
        Needs.STANDBY: frozenset({"standby", "admin"}),
        Needs.KNOWN: ROLES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one identity may do; None is no limit."""

    may_push: bool = True
    fragments: frozenset[int] | None = None
    update_bytes_max: int | None = None
    bytes_per_s: float | None = None
    pull_bytes_per_s: float | None = None
    pushes_per_s: float | None = None
    calls_per_s: float | None = None
    roles: frozenset[str] = frozenset()

    def check_push(self, header: PushHeader) -> None:
        """Refuse with PERMISSION_DENIED an update that this identity may never send."""
        who = f"site {header.site_id}"
        if not self.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{who} may not push")
        if self.fragments is not None and header.fragment not in self.fragments:
            raise Refusal(Status.PERMISSION_DENIED, f"fragment is {header.fragment}: {who} may not push it")
        if self.update_bytes_max is not None and header.payload_bytes > self.update_bytes_max:
            text = f"payload_bytes is {header.payload_bytes}: {who} may push at most {self.update_bytes_max}"
            raise Refusal(Status.PERMISSION_DENIED, text)


@dataclass(frozen=True, slots=True)
class Permissions:
    """The table.  ``default`` None: what is not listed is denied."""

    default: Grant | None
    sites: Mapping[str, Grant]
    roles: frozenset[str] = ROLES

    def of_site(self, site: str) -> Grant | None:
        """What ``site`` may do; None: nothing at all."""
        return self.sites.get(site, self.default)


EVERYTHING = Permissions(Grant(), MappingProxyType({}))


def check_role(method: str, is_site: bool, roles: frozenset[str]) -> None:
    """Refuse with PERMISSION_DENIED a caller whom the table does not let call ``method``."""
    needs = NEEDS.get(method)
    if needs is None:
        raise Refusal(Status.PERMISSION_DENIED, f"{method} is open to nobody")
    if is_site and needs in (Needs.SITE, Needs.READER, Needs.KNOWN):
        return
    if not roles & _OPEN_TO.get(needs, frozenset()):
        raise Refusal(Status.PERMISSION_DENIED, f"only {needs.value} may do this")


def read_permissions(path: str) -> Permissions:
    """The table in the file at ``path``.  Raises ``ValueError`` naming the entry and what is wrong with it."""
    raw = Path(path).read_bytes()
    try:
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError(f"it has {len(raw)} bytes: at most {FILE_BYTES_MAX}")
        return _table(parse_json(raw.decode()))
    except ValueError as error:
        raise ValueError(f"permissions {path}: {error}") from error


def _table(table: Any) -> Permissions:
    if not isinstance(table, dict) or not set(table) <= {"default", "sites", "roles"}:
        raise ValueError('wanted an object with "default", "sites" and "roles" only')
    said = table.get("default")
    if said not in ("allow", "deny") and not isinstance(said, dict):
        raise ValueError(f'default is {said!r}: "allow", "deny" or what a site that is not listed may do')
    default = None if said == "deny" else Grant() if said == "allow" else _grant("default", said)
    sites = table.get("sites", {})
    if not isinstance(sites, dict) or len(sites) > SITES_MAX:
        raise ValueError(f"sites: wanted an object of at most {SITES_MAX} sites")
    grants = {site: _grant(f"sites.{site}", grant) for site, grant in sites.items()}
    roles = _roles("roles", table["roles"]) if "roles" in table else frozenset() if default is None else ROLES
    return Permissions(default, MappingProxyType(grants), roles)


def _grant(where: str, said: Any) -> Grant:
    names = {field.name for field in fields(Grant)}
    if not isinstance(said, dict) or not set(said) <= names:
        extra = sorted(set(said) - names) if isinstance(said, dict) else said
        raise ValueError(f"{where} has {extra!r}: wanted an object of {', '.join(sorted(names))}")
    checked: dict[str, Any] = {}
    for name, value in said.items():
        checked[name] = _CHECKS[name](f"{where}.{name}", value)
    return Grant(**checked)


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}: true or false")
    return value


def _fragments(where: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < FRAGMENTS_MAX for each in value):
        raise ValueError(f"{where} is {value!r}: a list of fragments' numbers")
    return frozenset(value)


def _bytes(where: str, value: Any) -> int:
    if type(value) not in (int, float) or not 1 <= value <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"{where} is {value!r}: 1 to {PAYLOAD_BYTES_MAX}")
    return int(value)


def _rate(where: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= RATE_MAX:
        raise ValueError(f"{where} is {value!r}: a positive number, at most {RATE_MAX:g}")
    return float(value)


def _roles(where: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each in ROLES for each in value):
        raise ValueError(f"{where} is {value!r}: a list of {', '.join(sorted(ROLES))}")
    return frozenset(value)


_CHECKS: Mapping[str, Any] = MappingProxyType(
    {
        "may_push": _flag,
        "fragments": _fragments,
        "update_bytes_max": _bytes,
        "bytes_per_s": _rate,
        "pull_bytes_per_s": _rate,
        "pushes_per_s": _rate,
        "calls_per_s": _rate,
        "roles": _roles,
    }
)


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
